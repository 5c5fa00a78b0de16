"""Skip-gram on sharded tables of three kinds, with a dense part that takes its time; its runs, and what they compare.

A sample is a word of the text and one of three contexts; the model says whether the context is the true one. Words are
a table-wise table, contexts a row-wise one, pairs of words a key-value table of any 64-bit ids, whose rows are evicted.
"""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.nn.parallel import DistributedDataParallel

from conformance.harness import Mismatch, Rank, RankDied, RankPool, assert_equal, assert_le, assert_same_tensor
from conformance.kvstore.corpus import CONTEXTS, Corpus
from conformance.provers.virtual_device import VirtualDevice

__all__ = ["RANKS", "Batch", "Job", "Plan", "killed_run", "prove", "resumed_run", "sequential_run"]

RANKS = 2
TIMEOUT_S = 300.0
EMBEDDING_DIM = 16
OPTIMIZER = "partial_rowwise_adam"
EPOCH, STEP_SECONDS = 1_700_000_000, 60


@dataclass(frozen=True)
class Plan:
    """Positions of the text in a rank's batch, steps, rows of the bounded tables, units of the dense layers, and every
    how many steps those pairs go that were not seen for half as many.
    """

    batch: int
    step_count: int
    row_count: int
    hidden: int
    evict_every: int


@dataclass
class Batch:
    """Ids of the features "word", "context" and "pair", and labels [3 B]."""

    ids: Any
    labels: torch.Tensor

    def to(self, device: Any, non_blocking: bool = False) -> Batch:
        """As torchrec's batches have it."""
        return Batch(self.ids.to(device), self.labels.to(device))


class SkipGram(torch.nn.Module):
    """Returns (loss [1], scores [3 B])."""

    def __init__(self, tables: torch.nn.Module, hidden: int, group: Any) -> None:
        super().__init__()
        self.tables = tables
        generator = torch.Generator().manual_seed(5)
        layers = [
            torch.nn.Linear(3 * EMBEDDING_DIM, hidden),
            torch.nn.Linear(hidden, hidden),
            torch.nn.Linear(hidden, 1),
        ]
        with torch.no_grad():
            for param in (param for layer in layers for param in layer.parameters()):
                param.copy_((torch.rand(param.shape, generator=generator) - 0.5) / param.shape[-1] ** 0.5)
        dense = torch.nn.Sequential(layers[0], torch.nn.ReLU(), layers[1], torch.nn.ReLU(), layers[2])
        self.dense = DistributedDataParallel(dense, process_group=group)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """The mean logistic loss."""
        scores = self.dense(self.tables(batch.ids).values())[:, 0]
        loss = torch.nn.functional.binary_cross_entropy_with_logits(scores, batch.labels)
        return loss.reshape(1), scores.detach()


class OffloadedDense:
    """The dense optimizer with its state on the host, on a virtual device that proves every step's stream program.

    It steps as the optimizer does; the rest of the training is not the device's.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, offload: Any) -> None:
        self._optimizer, self._device = optimizer, VirtualDevice(late=True)
        with self._device:
            self._offloader = offload.OptimizerStateOffloader(optimizer, engine=self._device.engine)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def step(self) -> None:
        """One step."""
        with self._device:
            self._optimizer.step()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what was saved; counters are scalars of the host, which the device has to know."""
        counts = [float(found["step"]) for found in state["state"].values()]
        with self._device:
            for found, count in zip(state["state"].values(), counts, strict=True):
                found["step"] = torch.tensor(count)
            self._offloader.load_state_dict(state)

    def settle(self) -> None:
        """Bring the state to the host, and judge all that the device has seen."""
        with self._device:
            self._offloader.settle()
        self._device.check()


class Job:
    """One rank's part: tables, model, optimizer, its place in the stream, its clock."""

    def __init__(self, rank: Rank, plan: Plan, corpus: Corpus) -> None:
        torch.set_num_threads(1)
        self.rank, self.plan, self.corpus, self.step = rank, plan, corpus, 0
        self.pipeline, self._kvstore = rank.component("pipeline"), rank.component("kvstore")
        pipeline, kvstore = self.pipeline, self._kvstore
        self.buckets = kvstore.Buckets(64)
        self.store = kvstore.KVStore(
            {"pairs": kvstore.RowLayout(EMBEDDING_DIM, optimizer=OPTIMIZER)},
            optimizer_in_row=True,
            return_whole_row=True,
            seed=3,
            initializer=kvstore.Initializer.uniform(-1 / 32, 1 / 32),
            eviction={"pairs": kvstore.EvictionPolicy.ttl(plan.evict_every // 2 * STEP_SECONDS)},
            clock=lambda: EPOCH + STEP_SECONDS * self.step,
        )
        configs = [
            pipeline.EmbeddingBagConfig(plan.row_count, EMBEDDING_DIM, name, feature_names=[feature])
            for name, feature in (("words", "word"), ("contexts", "context"), ("pairs", "pair"))
        ]
        sharding = {
            "words": pipeline.table_wise(rank.world_size - 1),
            "contexts": pipeline.row_wise(),
            "pairs": pipeline.key_value(self.store, self.buckets),
        }
        self.tables = pipeline.ShardedEmbeddingBagCollection(
            pipeline.EmbeddingBagCollection(configs, device="meta"),
            sharding,
            optimizer=pipeline.FusedOptimizer(OPTIMIZER, lr=0.02),
            process_group=rank.group,
        )
        self.model = SkipGram(self.tables, plan.hidden, rank.group)
        self.optimizer = torch.optim.Adam(self.model.dense.parameters(), lr=1e-3, foreach=False)
        self.losses: list[str] = []

    def batches(self, first: int) -> Iterator[Batch]:
        """From step ``first`` to the end."""
        plan, world_size = self.plan, self.rank.world_size
        for step in range(first, plan.step_count):
            begin = step * plan.batch * world_size + self.rank.rank
            samples = torch.arange(begin, (step + 1) * plan.batch * world_size, world_size)
            bags = self.corpus.bags[samples]
            count = CONTEXTS * samples.numel()
            words, pairs = bags[:, :1].repeat_interleave(CONTEXTS, 0), bags[:, 1:].repeat_interleave(CONTEXTS, 0)
            contexts = self.corpus.contexts(samples).reshape(-1)
            bounded = torch.cat([words.reshape(-1), contexts]).remainder(plan.row_count)
            lengths = torch.tensor([1, 1, pairs.shape[1]]).repeat_interleave(count)
            ids = self.pipeline.KeyedJaggedTensor(
                ["word", "context", "pair"], torch.cat([bounded, pairs.reshape(-1)]), lengths=lengths
            )
            yield Batch(ids, torch.tensor([1.0, 0.0, 0.0]).repeat(samples.numel()))

    def _ended(self, scores: torch.Tensor) -> None:
        self.losses.append(hashlib.blake2b(scores.numpy().tobytes(), digest_size=16).hexdigest())
        self.step += 1
        if self.step % self.plan.evict_every == 0:
            self.store.evict()

    def train_in_a_loop(self) -> None:
        """All steps, as anybody would write them."""
        for batch in self.batches(0):
            self.optimizer.zero_grad()
            losses, scores = self.model(batch)
            losses.sum().backward()
            self.optimizer.step()
            self._ended(scores)

    def train_pipelined(self, last: int, dense: OffloadedDense) -> None:
        """Up to step ``last`` through Fused, the dense optimizer's state offloaded; what is ahead stays in flight."""
        schedule = self.pipeline.TrainPipelineFusedSparseDist(self.model, dense, process_group=self.rank.group)
        loader = self.batches(self.step)
        while self.step < last:
            self._ended(schedule.progress(loader))
        dense.settle()

    def offloaded(self) -> OffloadedDense:
        """The dense optimizer, offloaded."""
        return OffloadedDense(self.optimizer, self.rank.component("offload"))

    def _dense(self) -> dict[str, torch.Tensor]:
        found = {}
        for name, param in self.model.dense.module.named_parameters():
            found[f"dense.{name}"] = param.detach()
            found |= {f"adam.{name}.{key}": value for key, value in self.optimizer.state[param].items()}
        return found

    def save(self, folder: Path) -> None:
        """Whole rows in one folder, all else in another."""
        checkpoint = self.rank.component("checkpoint")
        self._kvstore.save(
            self.store, folder / "rows", buckets=self.buckets, process_group=self.rank.group, durable=False
        )
        state = {**self.tables.state_dict(), **self.tables.optimizer_state_dict(), **self._dense()}
        with checkpoint.HuggingFaceStorageWriter(folder / "tensors", durable=False) as writer:
            dcp.save(state, storage_writer=writer, process_group=self.rank.group)

    def load(self, folder: Path, step: int, dense: OffloadedDense) -> None:
        """Continue at a step from what was saved there."""
        checkpoint, self.step = self.rank.component("checkpoint"), step
        self._kvstore.load(self.store, folder / "rows", process_group=self.rank.group)
        # Names and shapes of Adam's state, which begins with the first step.
        params = dict(self.model.dense.module.named_parameters())
        adam = {
            f"adam.{name}.{key}": torch.zeros(()) if key == "step" else torch.zeros_like(param)
            for name, param in params.items()
            for key in ("step", "exp_avg", "exp_avg_sq")
        }
        weights = {f"dense.{name}": param.detach() for name, param in params.items()}
        state = {**self.tables.state_dict(), **self.tables.optimizer_state_dict(), **weights, **adam}
        dcp.load(
            state,
            storage_reader=checkpoint.HuggingFaceStorageReader(folder / "tensors"),
            process_group=self.rank.group,
        )
        self.tables.load_state_dict({name: value for name, value in state.items() if name in self.tables.state_dict()})
        self.tables.load_optimizer_state_dict(state)
        states = {
            number: {key: state[f"adam.{name}.{key}"] for key in ("step", "exp_avg", "exp_avg_sq")}
            for number, name in enumerate(params)
        }
        groups = self.optimizer.state_dict()["param_groups"]
        dense.load_state_dict({"state": states, "param_groups": groups})

    def state(self) -> dict[str, torch.Tensor]:
        """Every bit that training changes, of this rank."""
        found = {name: value.clone() for name, value in self._dense().items()}
        for name, (_, weight, states) in self.tables.local_shards().items():
            found[f"{name}.weight"] = weight.clone()
            found |= {f"{name}.{key}": value.clone() for key, value in states.items()}
        found["pairs.ids"] = self.store.ids("pairs")
        found["pairs.rows"] = self.store.get_rows("pairs", found["pairs.ids"])
        found["steps"] = torch.tensor([self.step, self.tables.fused_optimizer.step_count])
        return found


def sequential_run(rank: Rank, plan: Plan, corpus: str) -> tuple[dict[str, torch.Tensor], list[str], int]:
    """The judge: no pipeline, no offload, never stopped. What it holds, its scores' hashes, rows evicted."""
    job = Job(rank, plan, Corpus.load(corpus))
    job.train_in_a_loop()
    return job.state(), job.losses, job.store.stats().evicted_count


def killed_run(rank: Rank, plan: Plan, corpus: str, stop: int, folder: str) -> None:
    """Pipelined and offloaded up to a step; saves, with batches in flight, and dies by SIGKILL, without a word."""
    job = Job(rank, plan, Corpus.load(corpus))
    job.train_pipelined(stop, job.offloaded())
    job.save(Path(folder))
    torch.distributed.barrier(group=rank.group)
    os.kill(os.getpid(), signal.SIGKILL)


def resumed_run(
    rank: Rank, plan: Plan, corpus: str, stop: int, folder: str
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Goes on from there to the end."""
    job = Job(rank, plan, Corpus.load(corpus))
    dense = job.offloaded()
    job.load(Path(folder), stop, dense)
    job.train_pipelined(plan.step_count, dense)
    return job.state(), job.losses


def prove(pool: RankPool, plan: Plan, corpus: Corpus, stop: int, work: Path) -> dict[str, Any]:
    """Run the loop, the killed and the resumed pipeline; raises Mismatch. Returns facts for the report."""
    path, folder = str(work / "corpus.safetensors"), str(work / "checkpoint")
    corpus.save(Path(path))
    Path(folder).mkdir()
    judges = pool.run(sequential_run, RANKS, plan, path, timeout_s=TIMEOUT_S)
    try:
        pool.run(killed_run, RANKS, plan, path, stop, folder, timeout_s=TIMEOUT_S)
    except RankDied as death:
        assert_equal(death.exit_code, -signal.SIGKILL, where="how the ranks ended")
    else:
        raise Mismatch("the ranks were not killed")
    resumed = pool.run(resumed_run, RANKS, plan, path, stop, folder, timeout_s=TIMEOUT_S)
    compared = 0
    for number, ((expected, scores, _), (got, again)) in enumerate(zip(judges, resumed, strict=True)):
        assert_equal(again, scores[stop:], where=f"scores of rank {number} behind step {stop}")
        assert_equal(sorted(got), sorted(expected), where=f"names of rank {number}")
        for name, value in expected.items():
            assert_same_tensor(got[name], value, where=f"rank {number}: {name}")
            compared += 1
    assert_le(1, sum(evicted for *_, evicted in judges), where="rows evicted")
    return {
        "steps": plan.step_count,
        "stopped_after": stop,
        "samples": plan.batch * RANKS * plan.step_count,
        "tensors_compared": compared,
        "pairs": sum(state["pairs.ids"].numel() for state, *_ in judges),
        "evicted": sum(evicted for *_, evicted in judges),
        "dense_parameters": sum(v.numel() for name, v in judges[0][0].items() if name.startswith("dense.")),
    }
