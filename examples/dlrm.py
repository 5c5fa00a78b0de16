"""Train a DLRM whose tables are cut among ranks, one of them in a row store; save, resume, reshard and export it.

    torchrun --nproc-per-node 2 examples/dlrm.py out/dlrm             # trains, saves on the way, exports
    torchrun --nproc-per-node 2 examples/dlrm.py out/dlrm --resume 6  # the same losses, bit for bit
    torchrun --nproc-per-node 3 examples/dlrm.py out/dlrm --resume 6  # the same tables, cut into three

Prints losses, and what it compared with them; exits with 1 where something differs. It needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

from fastimpl import kvstore
from fastimpl import pipeline as p
from fastimpl.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter

STEPS, SAVED_AFTER, BATCH, ROWS, WIDTH, DENSE = 12, 6, 60, 10_000, 16, 8
# How rows of the store fall to ranks, and lie in files. It is the same for any number of ranks.
BUCKETS = kvstore.Buckets(64)
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


@dataclass
class Batch:
    """Numbers [B, DENSE], ids of three features, labels [B]."""

    dense: torch.Tensor
    ids: p.KeyedJaggedTensor
    labels: torch.Tensor

    def to(self, device: Any, non_blocking: bool = False) -> Batch:
        """How a pipeline brings a batch to the device."""
        ids = self.ids.to(device, non_blocking=non_blocking)
        dense, labels = (part.to(device, non_blocking=non_blocking) for part in (self.dense, self.labels))
        return Batch(dense, ids, labels)


def batches(first: int) -> Iterator[Batch]:
    """This rank's samples of each step from ``first`` on: every so many-th."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for step in range(first, STEPS):
        generator = torch.Generator().manual_seed(step)
        dense = torch.randn(BATCH, DENSE, generator=generator)[rank::ranks]
        ids = torch.randint(ROWS, (3, BATCH, 2), generator=generator)[:, rank::ranks].contiguous()
        ids[2] *= 999_999_999_989  # the store takes any 64-bit id
        lengths = torch.full((ids[0].shape[0] * 3,), 2)
        bags = p.KeyedJaggedTensor(["user", "item", "ad"], ids.flatten(), lengths=lengths)
        yield Batch(dense, bags, dense.sum(1).gt(0).float())


class DLRM(torch.nn.Module):
    """A click predicted from numbers, pooled rows, and products of the two."""

    def __init__(self, tables: torch.nn.Module) -> None:
        super().__init__()
        self.tables = tables
        self.bottom = torch.nn.Sequential(torch.nn.Linear(DENSE, WIDTH), torch.nn.ReLU())
        self.top = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss, and what ``progress`` returns of a step."""
        pooled = self.tables(batch.ids).values().view(-1, 3, WIDTH)
        parts = torch.cat([self.bottom(batch.dense)[:, None], pooled], 1)
        scores = self.top((parts @ parts.transpose(1, 2)).flatten(1))[:, 0]
        loss = torch.nn.functional.binary_cross_entropy_with_logits(scores, batch.labels)
        return loss, loss.detach()


class Trainer:
    """One rank's part of model, tables and optimizer."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        # Rows of "ad" are made when an id is first trained, and hold the state of their optimizer.
        layouts = {"ad": kvstore.RowLayout(WIDTH, optimizer="rowwise_adagrad")}
        self.store = kvstore.KVStore(layouts, optimizer_in_row=True, return_whole_row=True)
        configs = [p.EmbeddingBagConfig(ROWS, WIDTH, name, feature_names=[name]) for name in ("user", "item", "ad")]
        self.tables = p.ShardedEmbeddingBagCollection(
            p.EmbeddingBagCollection(configs, device="meta"),
            {"user": p.row_wise(), "item": p.table_wise(0), "ad": p.key_value(self.store, BUCKETS)},
            optimizer=p.FusedOptimizer("rowwise_adagrad", lr=0.05),  # it runs inside the backward
        )
        self.model = DLRM(self.tables)
        self.optimizer = torch.optim.Adam([*self.model.bottom.parameters(), *self.model.top.parameters()], lr=0.01)
        # The lookup of the next batch overlaps this one's optimizer. No bit depends on it.
        self.pipeline = p.TrainPipelineFusedSparseDist[Batch, torch.Tensor](
            self.model, self.optimizer, reduce_dense_gradients=True
        )

    def state(self) -> dict[str, Any]:
        """All but the rows of the store, by name: this rank's parts of the tables, and the dense layers whole."""
        dense = get_optimizer_state_dict(self.model, self.optimizer, options=FLAT)
        return {**self.model.state_dict(), **self.tables.optimizer_state_dict(), **dense}

    def save(self, folder: Path) -> None:
        """Save between two steps. Batches may be in flight: they have changed nothing yet."""
        kvstore.save(self.store, folder / "rows", buckets=BUCKETS)
        with HuggingFaceStorageWriter(folder / "tensors") as writer:
            dcp.save(tensors_of(self.state()), storage_writer=writer)

    def load(self, folder: Path) -> None:
        """Load what any number of ranks has saved: each reads its own rows, and its own parts of the tables."""
        kvstore.load(self.store, folder / "rows")
        state = self.state()
        dcp.load(tensors_of(state), storage_reader=HuggingFaceStorageReader(folder / "tensors"))
        self.tables.load_optimizer_state_dict(state)
        dense = {name: state[name] for name in get_optimizer_state_dict(self.model, self.optimizer, options=FLAT)}
        set_optimizer_state_dict(self.model, self.optimizer, dense, options=FLAT)

    def check(self, folder: Path) -> str:
        """Compare this rank's parts with what the safetensors library reads, and its rows with those of all ranks."""
        (file,) = (folder / "tensors").glob("*.safetensors")
        saved, rows = load_file(file), kvstore.SavedRows(folder / "rows")
        for name, (shard, weight, states) in self.tables.local_shards().items():
            begin, end = shard.rows
            for key, part in {"weight": weight, **states}.items():
                prefix = "tables." if key == "weight" else ""
                if not torch.equal(saved[f"{prefix}embedding_bags.{name}.{key}"][begin:end], part):
                    sys.exit(f"{key} of {name} differs from the file")
        ids = self.store.ids("ad")
        if not torch.equal(self.store.get_rows("ad", ids), rows.get_rows("ad", ids)):
            sys.exit("rows differ from the file")
        count = torch.tensor(len(ids))
        dist.all_reduce(count)
        if count != rows.size("ad"):
            sys.exit(f"{count} rows are not the {rows.size('ad')} of the file")
        return f"{count} rows and all parts of tables are those of the files"

    def export(self, folder: Path) -> None:
        """Save what serving takes: weights in bfloat16, the ids of the store's rows, no optimizer."""
        self.store.set_return_whole_row(False)
        rows = {n: v for n, v in self.tables.key_value_state_dict().items() if n.endswith((".weight", ".weight_id"))}
        with HuggingFaceStorageWriter(folder, export_dtype="bfloat16") as writer:
            dcp.save({**self.model.state_dict(), **rows}, storage_writer=writer)


def tensors_of(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What files hold; the learning rate and the like are no tensors, and the program sets them."""
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def main() -> None:
    """Train from the beginning, or from a checkpoint."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--resume", type=int, default=0, metavar="STEP")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    ranks, say = dist.get_world_size(), print if dist.get_rank() == 0 else lambda *_: None
    trainer, losses = Trainer(), []
    if arguments.resume:
        folder = arguments.folder / f"step-{arguments.resume}"
        trainer.load(folder)
        say(f"resumed on {ranks} ranks: {trainer.check(folder)}")
    loader = batches(arguments.resume)
    for step in range(arguments.resume, STEPS):
        mean = trainer.pipeline.progress(loader) / ranks
        dist.all_reduce(mean)
        losses.append(mean.item())
        if step + 1 == SAVED_AFTER:
            trainer.save(arguments.folder / f"step-{SAVED_AFTER}")
    say("losses", *losses)
    trainer.export(arguments.folder / "model")
    say(f"exported {sum(path.stat().st_size for path in (arguments.folder / 'model').iterdir())} bytes")

    record = arguments.folder / "losses.json"
    if not arguments.resume and dist.get_rank() == 0:
        record.write_text(json.dumps({"ranks": ranks, "losses": losses}))
    # Another number of ranks adds gradients in another order, so that its losses have other last bits.
    if arguments.resume and (whole := json.loads(record.read_text()))["ranks"] == ranks:
        if whole["losses"][arguments.resume :] != losses:
            sys.exit("the losses differ from those of the run that went through")
        say("the losses are those of the run that went through, bit for bit")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
