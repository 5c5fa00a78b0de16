"""SparseNN: sharded tables, a dense bottom and top, trained on every rank, by this project and by torchrec.

Each rank has a run of tables, so that pooled columns stand in one order everywhere. The optimizer of the tables is
Adagrad, that of the dense part SGD, as in the benchmark of torchrec PR 2916; a second job has
row-wise Adagrad. Every contender trains its own model on the same batches; predictions of the first steps are compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

import refimpl.pipeline
from conformance.harness import Mismatch, Rank
from fastimpl import pipeline
from fastimpl.pipeline.lookups import NativeLookup
from perf.harness.paired import Round, Sample, interleave
from perf.harness.workloads import Workload
from perf.peers import fbgemm_code, torchrec_model
from perf.peers.plain_bags import read_rows

__all__ = ["SparseJob", "measure_sparse_nn"]

POOLING, DENSE = 10, 16
LR, EPS = 0.05, 1e-8
READ = "read-tables"
# Which loop each pipeline drives the modules of.
LOOPS = {"fused": "ours", "sparse-dist": "ours", "base": "ours", "torchrec-sparse-dist": "torchrec"}


@dataclass(frozen=True)
class SparseJob:
    """Samples of a rank's batch, steps of one measurement, the optimizer of the tables."""

    batch: int
    step_count: int
    optimizer: str


@dataclass
class Batch:
    """Dense features [B, 16], ids of all features, targets [B]; what torchrec's pipelines ask of a batch."""

    dense: torch.Tensor
    ids: Any
    target: torch.Tensor

    def to(self, device: Any, non_blocking: bool = False) -> Batch:
        """On the CPU already."""
        return self

    def record_stream(self, stream: Any) -> None:
        """There are no streams on the CPU."""

    def pin_memory(self) -> Batch:
        """There is nothing to pin for."""
        return self


class SparseNN(torch.nn.Module):
    """Returns (loss [1], predictions [B])."""

    def __init__(self, collection: torch.nn.Module, width: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.collection = collection
        self.bottom = torch.nn.Linear(DENSE, 64)
        self.top = torch.nn.Sequential(torch.nn.Linear(64 + width, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
        with torch.no_grad():
            for part in (self.bottom, self.top):
                for param in part.parameters():
                    param.copy_(torch.rand(param.shape, generator=generator).sub_(0.5).mul_(0.1))

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """The mean square of prediction less target."""
        pooled = self.collection(batch.ids).values()
        dense = torch.relu(self.bottom(batch.dense))
        predictions = self.top(torch.cat([dense, pooled], dim=1))[:, 0]
        return (predictions - batch.target).square().mean().reshape(1), predictions.detach()


@dataclass
class _Arm:
    """One contender: a model, its dense optimizer, how it is stepped, and the class of its batches."""

    model: Any
    optimizer: Any
    make_ids: Any
    schedule: Any = None
    batch_class: Any = Batch

    def run(self, batches: list[Batch]) -> torch.Tensor:
        """A few steps; the last predictions."""
        loader, output = iter(batches), torch.empty(0)
        for batch in batches:
            if self.schedule is not None:
                output = self.schedule.progress(loader)
                continue
            self.optimizer.zero_grad()
            loss, output = self.model(batch)
            loss.sum().backward()
            self.optimizer.step()
        return output


def _batches(workload: Workload, seed: int, job: SparseJob, arm: _Arm) -> Iterator[Batch]:
    names, batch = [f"f{i}" for i in range(workload.tensor_count)], job.batch
    for step in range(job.step_count):
        generator = torch.Generator().manual_seed(1000 * seed + 10 * step + dist.get_rank())
        lengths = torch.randint(0, 2 * POOLING + 1, (workload.tensor_count * batch,), generator=generator)
        values = torch.randint(0, workload.shape[0], (int(lengths.sum()),), generator=generator)
        dense, target = torch.rand(batch, DENSE, generator=generator), torch.rand(batch, generator=generator)
        yield arm.batch_class(dense, arm.make_ids(names, values, lengths=lengths), target)


def _our_arm(workload: Workload, job: SparseJob, schedule: str | None, implementation: Any = pipeline) -> _Arm:
    rows, dim = workload.shape
    tables = [
        implementation.EmbeddingBagConfig(rows, dim, f"t{i}", feature_names=[f"f{i}"])
        for i in range(workload.tensor_count)
    ]
    collection = implementation.EmbeddingBagCollection(tables)
    _fill(collection)
    plan = {
        f"t{i}": implementation.table_wise(i * workload.rank_count // workload.tensor_count)
        for i in range(workload.tensor_count)
    }
    optimizer = implementation.FusedOptimizer(job.optimizer, lr=LR, eps=EPS)
    sharded = implementation.ShardedEmbeddingBagCollection(collection, plan, optimizer=optimizer)
    model = SparseNN(sharded, workload.tensor_count * dim)
    dense = torch.optim.SGD(model.parameters(), lr=LR)
    # torchrec's arm reduces no dense gradients either: what is compared is the schedule.
    given = {"reduce_dense_gradients": False}
    driver = None if schedule is None else getattr(implementation, schedule)(model, dense, **given)
    return _Arm(model, dense, implementation.KeyedJaggedTensor, driver)


class _ReadLookup(NativeLookup):
    """Tables whose rows are read for each of their ids, once to pool and once to step, and nothing else."""

    def outside(self, bags: Any, row_counts: Any) -> tuple[int, int]:
        return 0, -1

    def pool(self, tables: Any, feature_tables: Any, bags: Any) -> torch.Tensor:
        self._read(tables, feature_tables, bags)
        width = sum(tables[table].weight.shape[1] for table in feature_tables)
        return torch.zeros((bags.offsets.numel() - 1) // len(feature_tables), width)

    def update(self, tables: Any, feature_tables: Any, bags: Any, *rest: Any) -> None:
        self._read(tables, feature_tables, bags)

    def _read(self, tables: Any, feature_tables: Any, bags: Any) -> None:
        bag_count = (bags.offsets.numel() - 1) // len(feature_tables)
        ends = bags.offsets[::bag_count].tolist()
        for table, begin, end in zip(feature_tables, ends, ends[1:], strict=False):
            read_rows(tables[table].weight, bags.indices[begin:end], 1)


def _read_arm(workload: Workload, job: SparseJob) -> _Arm:
    """Fused whose kernels do the least: beside them are the exchanges, the dense part and the host's own work."""
    arm = _our_arm(workload, job, "TrainPipelineFusedSparseDist")
    for lookup in arm.model.collection.lookups:
        lookup._engine = _ReadLookup()
    return arm


def _their_arm(workload: Workload, job: SparseJob, schedule: str | None) -> _Arm:
    rows, dim = workload.shape
    tables = torchrec_model.Tables(rows, dim, workload.tensor_count, job.optimizer, LR, EPS)
    sharded = torchrec_model.sharded(tables, workload.rank_count, _fill)
    model = SparseNN(sharded, workload.tensor_count * dim)
    dense_params = [*model.bottom.parameters(), *model.top.parameters()]
    dense = torch.optim.SGD(dense_params, lr=LR)
    driver = None if schedule is None else torchrec_model.schedule(schedule, model, dense)
    return _Arm(model, dense, torchrec_model.jagged(), driver, torchrec_model.pipelineable(Batch))


def _fill(collection: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, param in sorted(collection.named_parameters()):
            param.copy_(torch.rand(param.shape, generator=generator).sub_(0.5).mul_(0.1))


def measure_sparse_nn(
    job: SparseJob, rank: Rank, workload: Workload, folder: str, round_count: int, seed: int
) -> list[Round]:
    """``seconds`` of some steps; ``progress_seconds`` of a pipeline are what it adds to a loop over the same modules.

    ``ours`` and ``torchrec`` call the model in a loop; ``fused``, ``sparse-dist`` and ``base`` are our pipelines,
    ``torchrec-sparse-dist`` is torchrec's, ``reference`` the plain loop; ``read-tables`` is ``fused`` that only reads
    the rows, the limit of what kernels can win. Ranks have one thread each.
    """
    torch.set_num_threads(1)
    makers: dict[str, Callable[[], _Arm]] = {
        "ours": lambda: _our_arm(workload, job, None),
        "fused": lambda: _our_arm(workload, job, "TrainPipelineFusedSparseDist"),
        "sparse-dist": lambda: _our_arm(workload, job, "TrainPipelineSparseDist"),
        "base": lambda: _our_arm(workload, job, "TrainPipelineBase"),
        "reference": lambda: _our_arm(workload, job, "TrainPipelineFusedSparseDist", refimpl.pipeline),
    }
    makers[READ] = lambda: _read_arm(workload, job)
    if torchrec_model.installed():
        makers["torchrec"] = lambda: _their_arm(workload, job, None)
        makers["torchrec-sparse-dist"] = lambda: _their_arm(workload, job, "TrainPipelineSparseDist")
    arms = {name: makers[name]() for name in workload.contenders if name in makers}
    _check_first_losses(workload, job, arms)
    # By now FBGEMM has generated the code of its steps.
    fbgemm_code.reencode()
    turn = [0]

    def runner(arm: _Arm) -> Callable[[], Sample]:
        def run() -> Sample:
            turn[0] += 1
            batches = list(_batches(workload, seed + turn[0], job, arm))
            dist.barrier()
            begun = time.perf_counter()
            arm.run(batches)
            return {"seconds": time.perf_counter() - begun}

        return run

    rounds = interleave({name: runner(arm) for name, arm in arms.items()}, round_count=round_count, seed=seed)
    for found in rounds:
        for name, loop in LOOPS.items():
            if name in found and loop in found:
                found[name]["progress_seconds"] = found[name]["seconds"] - found[loop]["seconds"]
    return rounds


def _check_first_losses(workload: Workload, job: SparseJob, arms: dict[str, _Arm]) -> None:
    """All have the same model: predictions of four steps are the same within float32 noise of the sums' order."""
    few = replace(job, step_count=4)
    found = {name: arm.run(list(_batches(workload, 0, few, arm))).detach().double() for name, arm in arms.items()}
    first = next(iter(found.values()))
    for name, output in found.items():
        if name == READ:
            continue
        worst = float((output - first).abs().max() / first.abs().max())
        if worst > 1e-4:
            raise Mismatch("contenders do not train the same model", got=worst, expected="<= 1e-4", where=name)
