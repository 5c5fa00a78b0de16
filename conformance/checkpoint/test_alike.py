"""D, continued. What every rank of a save has to ask for alike, and what may differ."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Shard

from conformance.checkpoint.cases import assert_loads, mesh_of, random_bits, sharded
from conformance.harness import Rank, assert_equal, raises, requirement, succeeds
from twinproof.errors import ConfigError

_WHOLE = {"w": random_bits(torch.float32, (5, 4), 1), "v": random_bits(torch.float32, (4, 3), 2)}
# Of each option what rank 0 has, and rank 1.
_UNLIKE: dict[str, tuple[Any, Any]] = {
    "fqn_to_index_mapping": ({"w": 1, "v": 2}, {"w": 2, "v": 1}),
    "max_shard_size": (1000, None),
    "metadata": ({"by": "us"}, {"by": "them"}),
    "export_dtype": (None, "bfloat16"),
    "export_keep": ((), ("w",)),
    "single_file": (True, False),
    "enable_consolidation": (True, False),
    "save_distributed": (True, False),
    "durable": (True, False),
    "overwrite": (True, False),
    "page_align": (False, True),
    "check_replicas": (False, True),
    "write_mode": ("sequential", "auto"),
    "block_bytes": (64, 128),
    "checksums": (True, False),
}
_BESIDE = {"export_keep": {"export_dtype": "bfloat16"}}


def _state(rank: Rank) -> dict[str, Any]:
    mesh = mesh_of(rank)
    return {name: sharded(value, mesh, [Shard(0)]) for name, value in _WHOLE.items()}


def _save_unlike(rank: Rank, root: str) -> None:
    writer_of: Callable[..., Any] = rank.component("checkpoint").HuggingFaceStorageWriter
    # A group of its own each writer makes together with the others', if all of them save on ranks.
    path, group = Path(root) / "ck", dist.group.WORLD
    for turn, (name, values) in enumerate(_UNLIKE.items()):
        # By turns the coordinator has the one and the other.
        options = {**_BESIDE.get(name, {}), name: values[(rank.rank + turn) % 2], "process_group": group}
        with writer_of(path, **options) as writer, raises(ConfigError, mentions=(name,), where=name):
            dcp.save(_state(rank), storage_writer=writer)
    with writer_of(path / str(rank.rank)) as writer, raises(ConfigError, mentions=("path",), where="folders"):
        dcp.save(_state(rank), storage_writer=writer)
    with writer_of(path) as writer:
        with raises(ConfigError, mentions=("path",), where="folders of one save"):
            dcp.save(_state(rank), checkpoint_id=path / str(rank.rank), storage_writer=writer)
        with succeeds("a save", where="alike, behind one that was not"):
            dcp.save(_state(rank), checkpoint_id=path, storage_writer=writer)


@requirement(
    "CKPT-747",
    "Ranks whose writers ask for different saves, another folder or another option that every rank has to have, MUST "
    "all be told which, with what each has; nothing is written, and the next save that is asked for alike is whole.",
)
def test_unlike(checkpoint: Any, rank_pool: Any, tmp_path: Path) -> None:
    rank_pool.run(_save_unlike, 2, str(tmp_path))
    assert_equal([path.name for path in tmp_path.iterdir()], ["ck"], where="the folder")
    assert_loads(checkpoint, tmp_path / "ck", _WHOLE)


def _save_with_own(rank: Rank, root: str) -> None:
    component, path = rank.component("checkpoint"), Path(root) / "ck"
    heard = list[int]()
    own = {"thread_count": 1 + rank.rank, "progress": None if rank.rank else (lambda done, total: heard.append(done))}
    with component.HuggingFaceStorageWriter(path, **own) as writer, succeeds("a save", where="threads, progress"):
        dcp.save(_state(rank), storage_writer=writer)
    assert_equal(bool(heard), rank.rank == 0, where="progress")


@requirement("CKPT-748", "Threads and a listener to progress MUST be each rank's own.")
def test_own(checkpoint: Any, rank_pool: Any, tmp_path: Path) -> None:
    rank_pool.run(_save_with_own, 2, str(tmp_path))
    assert_loads(checkpoint, tmp_path / "ck", _WHOLE)


def _save_training_unlike(rank: Rank, root: str) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    save_training = rank.component("checkpoint").save_training
    with raises(ConfigError, mentions=("path",), where="training"):
        save_training(Path(root) / str(rank.rank), model, optimizer, 1)
    save_training(Path(root) / "both", model, optimizer, 1)


@requirement(
    "CKPT-749",
    "Ranks that save their training into different folders MUST all be told, and none of the folders be made.",
)
def test_unlike_training(checkpoint: Any, rank_pool: Any, tmp_path: Path) -> None:
    rank_pool.run(_save_training_unlike, 2, str(tmp_path))
    assert_equal([path.name for path in tmp_path.iterdir()], ["both"], where="folders")
