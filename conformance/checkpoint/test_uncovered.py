"""Checkpoints of torch's format that lack a part of what they say they have: refused while no target has changed."""

from __future__ import annotations

import dataclasses
import io
import math
import os
import pickle
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from conformance.checkpoint.cases import Tiled, load_with, mesh_of, part_of, random_bits, sharded
from conformance.checkpoint.trainer import Said, alone
from conformance.harness import Rank, assert_equal, assert_same_tensors, raises, requirement, succeeds
from conformance.harness.raising import errors_inside
from conformance.kvstore.cases import ids_of, random_rows, store_of
from twinproof.checkpoint.native import NativeStorageReader
from twinproof.errors import CorruptionError

Boxes = Sequence[tuple[tuple[int, ...], tuple[int, ...]]]

_VALUES = {
    "a": random_bits(torch.int32, (6, 8), 1),
    "b": random_bits(torch.int32, (5,), 2),
    "n": torch.tensor(7),
    "empty": torch.empty(0, 3),
}
WAYS = ("load_training", "a manager", "HuggingFaceLoadPlanner")


def _fresh() -> dict[str, torch.Tensor]:
    return {name: torch.full_like(value, 5) for name, value in _VALUES.items()}


def _trained(said: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer, dict[str, Any]]:
    torch.manual_seed(3)
    model = torch.nn.Linear(2, 2)
    return model, torch.optim.Adam(model.parameters(), lr=0.1), {"said": Said(said)}


def _save(checkpoint: Any, folder: Path) -> Path:
    """A checkpoint of torch's format, of a model and an object that has the values."""
    model, optimizer, states = _trained(dict(_VALUES))
    torch.autograd.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    with alone():
        checkpoint.save_training(folder / "step-1", model, optimizer, 1, states=states, durable=False)
    return folder / "step-1"


def _edit(folder: Path, change: Callable[[Metadata], object]) -> None:
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def _chunks(metadata: Metadata, fqn: str) -> list[ChunkStorageMetadata]:
    saved = metadata.state_dict_metadata[fqn]
    assert isinstance(saved, TensorStorageMetadata)
    return saved.chunks


def _chunked(folder: Path, fqn: str, value: torch.Tensor, boxes: Boxes) -> None:
    """Have the checkpoint hold these rectangles of a tensor, and nothing else of it."""

    def change(metadata: Metadata) -> None:
        held = metadata.storage_data
        info = next(held.pop(index) for index in list(held) if index.fqn == fqn)
        file = folder / info.relative_path
        for offsets, sizes in boxes:
            stream = io.BytesIO()
            torch.save(part_of(value, offsets, sizes).clone(), stream)
            place = dataclasses.replace(info, offset=file.stat().st_size, length=len(stream.getvalue()))
            held[MetadataIndex(fqn, torch.Size(offsets))] = place
            file.write_bytes(file.read_bytes() + stream.getvalue())
        chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes]
        _chunks(metadata, fqn)[:] = chunks

    _edit(folder, change)


def _load(checkpoint: Any, folder: Path, way: str, said: dict[str, Any], seen: Any = None) -> None:
    """Load into these targets; ``seen`` is told of the model and the optimizer that are loaded beside them."""
    model, optimizer, states = _trained(said)
    if seen is not None:
        seen(model, optimizer)
    with alone():
        if way == "load_training":
            checkpoint.load_training(folder, model, optimizer, states=states)
        elif way == "a manager":
            # Of the steps of its own folder a manager takes none whose files are cut short.
            first = {"initial_load_path": folder, "initial_load_model_only": False}
            options = {"optimizers": optimizer, "states": states, "interval": 1, "durable": False, **first}
            with checkpoint.CheckpointManager(folder.parent / "run", model=model, **options) as manager:
                assert_equal(manager.load(), True, where="a load")
        else:
            targets = {f"said.{name}": value for name, value in said.items()}
            load_with(dcp.FileSystemReader(folder), targets, checkpoint.HuggingFaceLoadPlanner())


def _assert_refused(checkpoint: Any, folder: Path, way: str, mentions: Sequence[str], where: str) -> None:
    """The load is refused by name; targets, model and optimizer are as they were."""
    said, beside = _fresh(), []
    with raises(CorruptionError, mentions=mentions, where=where):
        _load(checkpoint, folder, way, said, lambda *given: beside.extend(given))
    assert_same_tensors(said, _fresh(), where=f"{where}: targets")
    model, optimizer = beside
    fresh, _, _ = _trained({})
    assert_same_tensors(dict(model.state_dict()), dict(fresh.state_dict()), where=f"{where}: the model")
    assert_equal(len(optimizer.state), 0, where=f"{where}: states of the optimizer")


# Volumes alone do not say it: the chunks of the last have as many elements as the tensor.
_GAPS: dict[str, tuple[str, Boxes, str]] = {
    "a half": ("a", [((0, 0), (3, 8))], "24 of 48"),
    "all of it": ("a", [], "0 of 48"),
    "a corner": ("a", [((0, 0), (3, 8)), ((3, 0), (3, 4))], "36 of 48"),
    "one in the middle": ("b", [((0,), (2,)), ((3,), (2,))], "4 of 5"),
    "a number": ("n", [], "0 of 1"),
    "a corner beside chunks that overlap": ("a", [((0, 0), (4, 8)), ((2, 0), (4, 4))], "40 of 48"),
}


@requirement(
    "CKPT-877",
    "A checkpoint of torch's format whose chunks leave elements of a target out MUST be refused by name before a "
    "target has changed, by load_training, a manager, and HuggingFaceLoadPlanner with torch's own reader.",
)
@pytest.mark.parametrize("way", WAYS)
def test_gaps(checkpoint: Any, tmp_path: Path, way: str) -> None:
    for number, (what, (name, boxes, told)) in enumerate(_GAPS.items()):
        folder = _save(checkpoint, tmp_path / f"{number}")
        _chunked(folder, f"said.{name}", _VALUES[name], boxes)
        mentions = ("leave elements of targets out", f"'said.{name}': '{told} elements'", f"where: said.{name}")
        _assert_refused(checkpoint, folder, way, mentions, f"{way}, without {what}")
    for name in ("a", "b"):
        _chunked(folder, f"said.{name}", _VALUES[name], [])
    mentions = ("'said.a': '0 of 48 elements'", "'said.b': '0 of 5 elements'", "where: 2 tensors")
    _assert_refused(checkpoint, folder, way, mentions, f"{way}, without two tensors")


_LEGAL: dict[str, tuple[str, Boxes]] = {
    "a grid": ("a", [((0, 0), (3, 4)), ((0, 4), (3, 4)), ((3, 0), (3, 4)), ((3, 4), (3, 4))]),
    "bricks": ("a", [((0, 0), (3, 3)), ((0, 3), (3, 5)), ((3, 0), (3, 6)), ((3, 6), (3, 2))]),
    "chunks that overlap": ("a", [((0, 0), (4, 8)), ((2, 0), (4, 8)), ((1, 1), (2, 2))]),
    "most of it twice": ("b", [((0,), (3,)), ((1,), (4,)), ((3,), (1,))]),
    "no chunk of what is empty": ("empty", []),
}


@requirement(
    "CKPT-878",
    "A checkpoint of torch's format MUST load, bit for bit, where its chunks have each element that is asked for: cut "
    "in any way, some of them several times; what nobody asks for, and what has no elements, may be missing.",
)
@pytest.mark.parametrize("way", WAYS)
def test_no_gaps(checkpoint: Any, tmp_path: Path, way: str) -> None:
    for number, (what, (name, boxes)) in enumerate(_LEGAL.items()):
        folder, said = _save(checkpoint, tmp_path / f"{number}"), _fresh()
        _chunked(folder, f"said.{name}", _VALUES[name], boxes)
        with succeeds("a load", where=f"{way}, {what}"):
            _load(checkpoint, folder, way, said)
        assert_same_tensors(said, _VALUES, where=f"{way}, {what}")
    folder = _save(checkpoint, tmp_path / "parts")
    _chunked(folder, "said.a", _VALUES["a"], [((0, 0), (4, 8)), ((4, 6), (2, 2))])
    asked: Boxes = [((0, 2), (3, 6)), ((3, 7), (3, 1)), ((6, 0), (0, 8))]
    parts = {offsets: torch.full(sizes, 5, dtype=torch.int32) for offsets, sizes in asked}
    with succeeds("a load", where=f"{way}, parts"):
        _load(checkpoint, folder, way, {**_fresh(), "a": Tiled.of((6, 8), parts, torch.int32)})
    expected = {f"{box}": part_of(_VALUES["a"], *box) for box in asked}
    assert_same_tensors({f"{box}": parts[box[0]] for box in asked}, expected, where=f"{way}, parts")
    if way == "HuggingFaceLoadPlanner":
        with succeeds("a load", where="another tensor"):
            _load(checkpoint, folder, way, {"b": torch.zeros(5, dtype=torch.int32)})


def _lost(metadata: Metadata) -> None:
    for index in [index for index in metadata.storage_data if index.fqn == "said.b"]:
        del metadata.storage_data[index]


def _move_to_the_end(folder: Path, fqn: str) -> None:
    """Have a tensor's bytes lie behind those of all others, in whatever order a load asks for them."""

    def change(metadata: Metadata) -> None:
        index = next(index for index in metadata.storage_data if index.fqn == fqn)
        info = metadata.storage_data[index]
        file = folder / info.relative_path
        moved, end_bytes = file.read_bytes()[info.offset : info.offset + info.length], file.stat().st_size
        with open(file, "ab") as appended:
            appended.write(moved)
        metadata.storage_data[index] = dataclasses.replace(info, offset=end_bytes)

    _edit(folder, change)


def _garbled(folder: Path, metadata: Metadata) -> None:
    # The last that is read: whatever stands there, targets have changed by then.
    info = next(info for index, info in metadata.storage_data.items() if index.fqn == "weight")
    with open(folder / info.relative_path, "r+b") as file:
        file.seek(info.offset)
        file.write(bytes(info.length))


@requirement(
    "CKPT-879",
    "load_training and a manager MUST refuse by name, before a target has changed, metadata that does not say where a "
    "chunk is, and files that are missing or too short; other bytes than the metadata says MUST be told by the folder.",
)
@pytest.mark.parametrize("way", WAYS[:2])
def test_files_of_chunks(checkpoint: Any, tmp_path: Path, way: str) -> None:
    folder = _save(checkpoint, tmp_path / "lost")
    _edit(folder, _lost)
    told = ("does not say where", "said.b", os.fspath(folder / ".metadata"))
    _assert_refused(checkpoint, folder, way, told, f"{way}, lost chunks")
    folder = _save(checkpoint, tmp_path / "files")
    file = next(folder.glob("*.distcp"))
    size_bytes = file.stat().st_size
    for length in (size_bytes - 1, size_bytes // 2, 0):
        os.truncate(file, length)
        mentions = ("too short", f"got: {length} bytes", f"expected: >= {size_bytes} bytes", f"where: {file}")
        _assert_refused(checkpoint, folder, way, mentions, f"{way}, {length} bytes")
    for number, name in enumerate(("bias", "said.b", "weight")):
        moved = _save(checkpoint, tmp_path / f"moved-{number}")
        _move_to_the_end(moved, name)
        last = next(moved.glob("*.distcp"))
        length = last.stat().st_size - 1
        os.truncate(last, length)
        mentions = ("too short", f"got: {length} bytes", f"expected: >= {length + 1} bytes", f"where: {last}")
        _assert_refused(checkpoint, moved, way, mentions, f"{way}, {name} at the end")
    file.unlink()
    _assert_refused(checkpoint, folder, way, ("is missing", f"where: {file}"), f"{way}, no file")
    folder = _save(checkpoint, tmp_path / "garbled")
    _garbled(folder, pickle.loads((folder / ".metadata").read_bytes()))
    with raises(
        CorruptionError, mentions=("has not what the metadata says", f"where: {folder}"), where=f"{way}, zeros"
    ):
        _load(checkpoint, folder, way, _fresh())


def _without_second(name: str, metadata: Metadata) -> None:
    del _chunks(metadata, name)[1]


@requirement(
    "CKPT-880",
    "A checkpoint of torch's format that leaves out rows of a store, or their ids, MUST be refused by name by a load "
    "through KVLoadPlanner and by load_training, and the store have the rows that it had.",
)
def test_rows_left_out(checkpoint: Any, kvstore: Any, tmp_path: Path) -> None:
    ids, saved = ids_of(range(6)), store_of(kvstore)
    saved.set_rows("t", random_rows(saved, range(6), 1))
    rows = saved.get_rows("t", ids)
    with alone():
        state = saved.state_dict(chunk_rows=2)
        dcp.save(dict(state), storage_writer=dcp.FileSystemWriter(tmp_path / "views"), no_dist=True)
    kept = (tmp_path / "views" / ".metadata").read_bytes()
    for name, others in (("t.weight", ("t.weight_id",)), ("t.weight_id", ("t.weight",)), ("t.weight_id", ())):
        store = store_of(kvstore)
        store.set("t", ids, torch.ones(6, 6))
        held, where = store.get_rows("t", ids), f"views, {name} beside {others}"
        _edit(tmp_path / "views", partial(_without_second, name))
        # Ids are a plain tensor, as a store that has none yet asks for them first.
        views = {**store.state_dict(snapshot=False), "t.weight_id": torch.zeros(6, 1, dtype=torch.int64)}
        asked = {each: views[each] for each in (name, *others)}
        with raises(CorruptionError, mentions=("leave elements", f"where: {name}"), where=where):
            load_with(dcp.FileSystemReader(tmp_path / "views"), asked, kvstore.KVLoadPlanner())
        assert_same_tensors({"rows": store.get_rows("t", ids)}, {"rows": held}, where=where)
        assert_equal(int(views["t.weight_id"].abs().sum()), 0, where=f"{where}: ids")
        (tmp_path / "views" / ".metadata").write_bytes(kept)
    model, optimizer, _ = _trained({})
    with alone():
        given = (tmp_path / "states", model, optimizer)
        checkpoint.save_training(*given, 1, states={"store": saved}, durable=False)
    _edit(tmp_path / "states", lambda metadata: _chunks(metadata, "store.t.weight").clear())
    with raises(CorruptionError, mentions=("leave elements", "where: store.t.weight"), where="load_training"), alone():
        checkpoint.load_training(*given, states={"store": saved})
    assert_same_tensors({"rows": saved.get_rows("t", ids)}, {"rows": rows}, where="load_training")


def _load_on_ranks(rank: Rank, folder: str, told: Sequence[str]) -> None:
    checkpoint, mesh = rank.component("checkpoint"), mesh_of(rank)
    said = Said({"a": sharded(torch.zeros(6, 8, dtype=torch.int32), mesh, [Shard(0)]), "b": torch.zeros(5)})
    model, optimizer, _ = _trained({})
    with raises(CorruptionError, mentions=told, where=f"rank {rank.rank}"):
        checkpoint.load_training(folder, model, optimizer, states={"said": said})
    changed = [math.prod(part.shape) for part in (said.said["a"].to_local(), said.said["b"]) if part.any()]
    assert_equal(changed, [], where="elements that changed")


def _save_on_ranks(rank: Rank, folder: str) -> None:
    model, optimizer, _ = _trained({})
    said = Said({"a": sharded(_VALUES["a"], mesh_of(rank), [Shard(0)]), "b": torch.ones(5)})
    rank.component("checkpoint").save_training(folder, model, optimizer, 1, states={"said": said}, durable=False)


@requirement(
    "CKPT-881",
    "Where one rank's part of a checkpoint of torch's format is missing, chunks or file, each rank of a load MUST hear "
    "of it by name, and no rank have changed a target.",
)
def test_part_of_a_rank(checkpoint: Any, rank_pool: Any, tmp_path: Path) -> None:
    del checkpoint  # Ranks import it themselves; asked for so that an implementation without one skips.
    for place in ("file", "chunk"):
        rank_pool.run(_save_on_ranks, 2, str(tmp_path / place))
    file = next((tmp_path / "file").glob("__1_*.distcp"))
    file.unlink()
    rank_pool.run(_load_on_ranks, 2, str(tmp_path / "file"), ("is missing", file.name))
    _edit(tmp_path / "chunk", lambda metadata: _chunks(metadata, "said.a").pop())
    rank_pool.run(_load_on_ranks, 2, str(tmp_path / "chunk"), ("leave elements", "'said.a': '0 of 24 elements'"))


def _outside(rank: Rank, folder: str) -> None:
    """A tensor that the first rank alone holds is loaded by both."""
    checkpoint, mesh = rank.component("checkpoint"), DeviceMesh("cpu", [0])
    model, optimizer, _ = _trained({})

    def said(value: torch.Tensor) -> Said:
        local = value if rank.rank == 0 else value[:0]
        whole = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=value.shape, stride=value.stride())
        return Said({"a": whole, "b": torch.zeros(5)})

    checkpoint.save_training(folder, model, optimizer, 1, states={"said": said(_VALUES["a"])}, durable=False)
    fresh = said(torch.zeros_like(_VALUES["a"]))
    with succeeds("a load", where=f"rank {rank.rank}"):
        checkpoint.load_training(folder, model, optimizer, states={"said": fresh})
    local = fresh.said["a"].to_local()
    if rank.rank == 0:
        assert_same_tensors({"a": local}, {"a": _VALUES["a"]}, where="the rank that holds it")
    else:
        assert_equal(local.numel(), 0, where="elements of the other rank")


@requirement(
    "CKPT-896",
    "A rank outside of the mesh of a tensor MUST load a checkpoint of torch's format beside those that hold it.",
)
def test_ranks_outside_a_mesh(checkpoint: Any, rank_pool: Any, tmp_path: Path) -> None:
    del checkpoint
    rank_pool.run(_outside, 2, str(tmp_path / "ck"))


class _Refusing(DefaultLoadPlanner):
    """A planner that raises when it is given what was read."""

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        """Raises."""
        raise RuntimeError("of a planner")


@requirement(
    "CKPT-897",
    "What a planner raises while a checkpoint of torch's format is read MUST reach the caller as it is, and not as "
    "damage of the checkpoint; an archive that lacks its end is damage.",
)
def test_errors_of_planners(checkpoint: Any, tmp_path: Path) -> None:
    folder = _save(checkpoint, tmp_path)
    target = {"weight": torch.zeros(2, 2)}
    with raises(RuntimeError, mentions=("of a planner",), where="a load") as caught, alone():
        dcp.load(target, storage_reader=NativeStorageReader(folder), planner=_Refusing())
    assert caught.outer is not None
    kinds = {type(each) for each in errors_inside(caught.outer)}
    assert_equal(CorruptionError in kinds, False, where="what is told")
    # What torch's reader in C++ says of the end of an archive that is gone is no error of a planner.
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    info = next(info for index, info in metadata.storage_data.items() if index.fqn == "weight")
    file = folder / info.relative_path
    data = bytearray(file.read_bytes())
    data[info.offset + info.length - 64 : info.offset + info.length] = bytes(64)
    file.write_bytes(data)
    told = ("has not what the metadata says", "PytorchStreamReader")
    with raises(CorruptionError, mentions=told, where="an archive without an end"), alone():
        dcp.load(target, storage_reader=NativeStorageReader(folder))
