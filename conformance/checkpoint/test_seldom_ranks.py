"""Ranks as saves seldom find them: unusual shards, groups of other ranks, ends of groups, broken connections."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from conformance.checkpoint.cases import (
    FILE,
    PT,
    Tiled,
    load_ranks,
    make_groups_to_keep,
    mesh_of,
    oracle,
    random_bits,
    save,
    save_ranks,
    zeros_like,
)
from conformance.checkpoint.trainer import Said, Trainer
from conformance.harness import Rank, assert_equal, assert_same_bytes, assert_same_tensor, raises, requirement, succeeds
from conformance.harness.raising import errors_inside
from conformance.provers.ranks import RankPool
from twinproof.checkpoint import manager as manager_module
from twinproof.checkpoint.groups import group_to_save_in, idle_count
from twinproof.errors import ConfigError, MissingKeyError


def _shares(full: torch.Tensor, mesh: list[int], where: tuple[int, ...], places: list[Placement]) -> torch.Tensor:
    """What a rank has of a tensor: each placement's share of every block that the ones before it leave."""
    for size, at, place in zip(mesh, where, places, strict=True):
        if isinstance(place, Replicate):
            continue
        dim = getattr(place, "dim", 0)
        parts = torch.chunk(full, getattr(place, "split_factor", 1), dim)
        mine = [share for part in parts for share in torch.chunk(part, size, dim)[at : at + 1]]
        full = torch.cat(mine, dim) if mine else full.narrow(dim, 0, 0)
    return full.contiguous()


def _strided(dim: int, factor: int) -> Placement:
    from torch.distributed.tensor.placement_types import _StridedShard

    made: Placement = _StridedShard(dim, split_factor=factor)
    return made


# Shape, mesh, and for each mesh dimension a placement, or (dimension, split factor) of a strided shard.
_STRIDED: dict[str, tuple[list[int], list[int], list[Any]]] = {
    "columns, then rows in blocks": ([12, 6], [2, 2], [Shard(1), (0, 3)]),
    "rows in blocks, then columns": ([12, 6], [2, 2], [(0, 3), Shard(1)]),
    "blocks of both": ([8, 12], [2, 2], [(0, 2), (1, 3)]),
    "copies of blocks": ([12, 3], [2, 2], [Replicate(), (0, 3)]),
    "rows, then blocks of them": ([16, 3], [2, 2], [Shard(0), (0, 2)]),
    "blocks, then rows of them": ([16, 3], [2, 2], [(0, 2), Shard(0)]),
    "blocks of fewer rows than ranks": ([6, 2], [4], [(0, 2)]),
    "no rows": ([0, 2], [4], [(0, 2)]),
    "blocks of blocks": ([7, 2], [2, 2], [(0, 2), (0, 3)]),
}


def _save_strided(rank: Rank, path: str, name: str) -> None:
    shape, mesh, told = _STRIDED[name]
    places = [place if isinstance(place, Placement) else _strided(*place) for place in told]
    full, others = random_bits(torch.float32, shape, 3), {"b": random_bits(torch.int16, (5,), 4)}
    made = mesh_of(rank, mesh)
    where = made.get_coordinate()
    assert where is not None
    local = _shares(full, mesh, tuple(where), places)
    value, target = (
        DTensor.from_local(each, made, places, shape=full.shape, stride=full.stride(), run_check=False)
        for each in (local, zeros_like(local))
    )
    checkpoint, targets = rank.component("checkpoint"), {"b": torch.zeros(5, dtype=torch.int16), "w": target}
    with succeeds("a save and a load", where=f"{name}, rank {rank.rank}"):
        save_ranks(rank, {"w": value, **others}, Path(path), planner=checkpoint.HuggingFaceSavePlanner())
        load_ranks(rank, targets, Path(path), planner=checkpoint.HuggingFaceLoadPlanner())
    assert_same_tensor(target.to_local(), local, where=f"{name}, rank {rank.rank}")
    assert_same_tensor(targets["b"], others["b"], where=f"beside {name}, rank {rank.rank}")


@requirement(
    "CKPT-775",
    "Packed strided shards MUST be saved and loaded right together with shards of other dimensions, or of the same, "
    "with copies, beside other tensors, and where some ranks have nothing.",
)
def test_mixed_strided_shards(checkpoint: Any, rank_pool: Any, tmp_path: Path) -> None:
    for number, (name, (shape, _, _)) in enumerate(_STRIDED.items()):
        rank_pool.run(_save_strided, 4, str(tmp_path / f"{number}"), name)
        state = {"w": random_bits(torch.float32, shape, 3), "b": random_bits(torch.int16, (5,), 4)}
        assert_same_bytes(tmp_path / f"{number}" / FILE, oracle(state, PT), where=name)


def _save_sharded_later(rank: Rank, path: str) -> None:
    checkpoint, full = rank.component("checkpoint"), torch.arange(12.0).view(4, 3)
    mine = LocalShard.from_tensor_and_offsets(full[2 * rank.rank :][:2].clone(), [2 * rank.rank, 0], rank.rank)
    state = {"w": init_from_local_shards([mine], 4, 3)}
    group = dist.new_group(backend="gloo")
    with checkpoint.HuggingFaceStorageWriter(path) as writer, succeeds("a save", where=f"rank {rank.rank}"):
        future: Any = dcp.async_save(state, storage_writer=writer, process_group=group)
        mine.tensor.fill_(-1)
        future.result()
        for name, value in _not_stored().items():
            assert_equal(writer.stage({name: value})[name] is value, True, where=f"a {name} tensor is handed on")
    dist.destroy_process_group(group)


def _not_stored() -> dict[str, torch.Tensor]:
    sparse, meta = torch.eye(3).to_sparse(), torch.empty(2, device="meta")
    return {"sparse": sparse, "meta": meta, "quantized": torch.quantize_per_tensor(torch.eye(3), 0.1, 0, torch.qint8)}


@requirement(
    "CKPT-781",
    "An asynchronous save of torch's ShardedTensor MUST store the values of the call, whatever comes later; tensors "
    "that no file holds MUST be handed on as they are, not copied.",
)
def test_sharded_tensors_later(checkpoint: Any, rank_pool: Any, tmp_path: Path) -> None:
    rank_pool.run(_save_sharded_later, 2, str(tmp_path / "ck"))
    assert_same_bytes(tmp_path / "ck" / FILE, oracle({"w": torch.arange(12.0).view(4, 3)}, PT), where="w")


def _save_in_another_group(rank: Rank, path: str) -> None:
    checkpoint = rank.component("checkpoint")
    pair = dist.new_group([0, 1], backend="gloo")
    writer = checkpoint.HuggingFaceStorageWriter(path, process_group=pair)
    said = ("exactly the ranks that save", "got: 2 ranks", "expected: 3 ranks")
    with raises(ConfigError, mentions=said, where=f"rank {rank.rank}"):
        dcp.save({"w": torch.ones(2)}, storage_writer=writer)
    writer.close()
    if rank.rank < 2:
        with succeeds("a save", where=f"of two ranks, rank {rank.rank}"):
            writer = checkpoint.HuggingFaceStorageWriter(path, process_group=pair)
            dcp.save({"w": torch.ones(2)}, storage_writer=writer, process_group=pair)
    dist.barrier()


@requirement(
    "CKPT-782",
    "A writer whose group holds other ranks than those that save MUST be refused on all of them, with both numbers, "
    "and nothing be made; the ranks of the group alone can save with it.",
)
def test_writers_of_other_groups(checkpoint: Any, rank_pool: Any, tmp_path: Path) -> None:
    rank_pool.run(_save_in_another_group, 3, str(tmp_path / "ck"))
    assert_same_bytes(tmp_path / "ck" / FILE, oracle({"w": torch.ones(2)}, PT), where="by two ranks")
    assert_equal(os.listdir(tmp_path), ["ck"], where="what is there")


def _close_last(rank: Rank, path: str) -> None:
    checkpoint, trainer = rank.component("checkpoint"), Trainer(1)
    with succeeds("what is closed", where="writer and manager, behind the groups"):
        writer = checkpoint.HuggingFaceStorageWriter(f"{path}/ck")
        manager = trainer.manager(checkpoint, f"{path}/run", interval=1, last_save_in_hf=True)
        dcp.save({"w": torch.ones(2)}, storage_writer=writer)
        manager.save(1)
        dist.barrier()
        dist.destroy_process_group()
        for each in (writer, manager, writer, manager):
            each.close()
    with raises(ConfigError, mentions=("closed",), where="a manager that was closed so"):
        manager.save(2)


@requirement(
    "CKPT-783",
    "A writer and a manager MUST be closed without an error where the program has ended its process groups before, as "
    "often as they are closed.",
)
def test_closed_behind_the_groups(checkpoint: Any, impl: ModuleType, tmp_path: Path) -> None:
    # Of its own: these ranks have no group any more.
    with RankPool(impl.__name__) as pool:
        pool.run(_close_last, 2, str(tmp_path))
    assert_equal((tmp_path / "ck" / FILE).exists(), True, where="what was saved")


def _over_new_groups(rank: Rank, path: str) -> None:
    checkpoint, trainer = rank.component("checkpoint"), Trainer(1)
    writers = [checkpoint.HuggingFaceStorageWriter(f"{path}/{number}") for number in range(2)]
    manager = trainer.manager(checkpoint, f"{path}/run", interval=1)
    manager.save(1)
    dist.barrier()
    dist.destroy_process_group()
    meeting, limit = f"file://{path}/meeting", timedelta(hours=5)
    dist.init_process_group("gloo", meeting, limit, rank.world_size, rank.rank)
    for name, act in {"save": partial(manager.save, 2), "load": manager.load}.items():
        with raises(ConfigError, mentions=("process group", "init_process_group"), where=name):
            act()
    with succeeds("a save over the new group, and what is closed", where="made before it"):
        dcp.save({"w": torch.ones(2)}, storage_writer=writers[0])
        groups = dist.distributed_c10d._world.pg_map
        assert_equal(writers[0].group in groups, True, where="a group of the new ones")
        waits = writers[0].group._get_backend(torch.device("cpu")).options._timeout
        assert_equal(waits, limit, where="how long the group waits for a rank that writes")
        for each in (*writers, manager) * 2:
            each.close()
        assert_equal(len(groups), 2, where="groups that are left: the default one, and one for the next save")
    dist.destroy_process_group()


@requirement(
    "CKPT-862",
    "Where the program has destroyed its default group and made it anew, a writer MUST save over a group of the new "
    "ones, which waits for a rank as long as that, a manager MUST refuse to save and load, by name, and both MUST be "
    "closed without an error.",
)
def test_groups_made_anew(impl: ModuleType, tmp_path: Path) -> None:
    # Of its own: these ranks have another group in the end.
    with RankPool(impl.__name__) as pool:
        pool.run(_over_new_groups, 2, str(tmp_path))
    assert_equal((tmp_path / "0" / FILE).exists(), True, where="what was saved")


class _Broken:
    """A message whose connection broke."""

    def wait(self, *_: object) -> bool:
        raise RuntimeError("connection closed by peer")


def _breaks(*_: object, **__: object) -> Any:
    raise RuntimeError("connection closed by peer")


def _full(*_: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextmanager
def _broken(kind: str, rank: int) -> Iterator[None]:
    # One message at a time, so that later ones are sent when it is known that something failed.
    with mock.patch("fastimpl.checkpoint.run.IN_FLIGHT_BYTES", 1):
        if kind == "a full disk":
            with mock.patch("os.pwritev", _full) if rank == 0 else nullcontext():
                yield
            return
        verb: Callable[..., Any] = _breaks if kind == "no message" else lambda *_, **__: _Broken()
        with mock.patch.object(dist, "isend", verb), mock.patch.object(dist, "irecv", verb):
            yield


def _share(rank: Rank, seed: int) -> dict[str, Any]:
    mesh, state = mesh_of(rank), dict[str, Any]()
    for number in range(6):
        full = random_bits(torch.float32, (8, 32), seed + number)
        local = torch.chunk(full, rank.world_size, 1)[rank.rank].contiguous()
        places: list[Placement] = [Shard(1)]
        state[f"{number}"] = DTensor.from_local(
            local, mesh, places, shape=full.shape, stride=full.stride(), run_check=False
        )
    return state


def _save_broken(rank: Rank, path: str, kind: str) -> list[str]:
    save_ranks(rank, _share(rank, 1), Path(path), block_bytes=256)
    texts: list[str] = []
    with _broken(kind, rank.rank):
        try:
            save_ranks(rank, _share(rank, 50), Path(path), block_bytes=256)
        except BaseException as error:
            texts = [f"{type(each).__name__}: {each}" for each in errors_inside(error)]
    targets = {name: torch.zeros(8, 32) for name in _share(rank, 1)}
    load_ranks(rank, targets, Path(path))
    for number, target in enumerate(targets.values()):
        assert_same_tensor(target, random_bits(torch.float32, (8, 32), 1 + number), where=f"{number}, the old one")
    with succeeds("a save", where=f"behind {kind}, rank {rank.rank}"):
        save_ranks(rank, _share(rank, 50), Path(path), block_bytes=256)
    return texts


@requirement(
    "CKPT-784",
    "Where messages between the ranks of a save cannot be sent or received, or a rank cannot write, every rank MUST be "
    "told what failed, the old checkpoint stay, and the next save succeed.",
    needs=("counted_io",),
)
def test_broken_exchange(checkpoint: Any, rank_pool: Any, tmp_path: Path) -> None:
    said: dict[str, list[tuple[str, ...]]] = {
        "no message": [("RuntimeError: connection closed",)] * 2,
        "no answer": [("DistributedError: a rank went away during the exchange",)] * 2,
        "a full disk": [
            ("StorageError: writing failed",),
            ("DistributedError: a sending rank failed", "where: rank 0"),
        ],
    }
    for kind, expected in said.items():
        found = rank_pool.run(_save_broken, 2, str(tmp_path / "ck"), kind)
        for rank, (texts, wanted) in enumerate(zip(found, expected, strict=True)):
            is_told = any(all(part in text for part in wanted) for text in texts)
            assert_equal(is_told, True, where=f"{kind}: rank {rank} is told {wanted}, of {[t[:150] for t in texts]}")
    assert_equal(os.listdir(tmp_path), ["ck"], where="what is left")


class _Columns(Tiled):
    """Some columns of all rows, which are read when they are due."""

    row_offset = 0

    def read_rows(self, start: int, length: int) -> torch.Tensor:
        (values,) = self.parts.values()
        return values[start : start + length]


def _save_columns(rank: Rank, path: str, world: int) -> None:
    full = random_bits(torch.float32, (60, 7), 1)
    begin, end = rank.rank * 7 // world, (rank.rank + 1) * 7 // world
    rows: Any = torch.Tensor._make_subclass(_Columns, torch.empty(0))
    rows.parts, rows.whole = {(0, begin): full[:, begin:end].contiguous()}, full.shape
    for block_bytes in (64, 4096):
        with succeeds("a save", where=f"blocks of {block_bytes}, rank {rank.rank}"):
            save_ranks(rank, {"w": rows}, Path(f"{path}-{block_bytes}"), block_bytes=block_bytes)


@requirement(
    "CKPT-795",
    "Rows that are read when they are due, of which each rank has some columns, MUST be stored at their places.",
)
def test_columns_of_rows(checkpoint: Any, rank_pool: Any, tmp_path: Path) -> None:
    for world in (1, 2, 3):
        rank_pool.run(_save_columns, world, str(tmp_path / f"{world}"), world)
        for block_bytes in (64, 4096):
            path = tmp_path / f"{world}-{block_bytes}" / FILE
            assert_same_bytes(path, oracle({"w": random_bits(torch.float32, (60, 7), 1)}, PT), where=path.parent.name)


def _groups_to_save_in(rank: Rank) -> None:
    world = dist.group.WORLD
    pair, everyone = dist.new_group([0, 1], backend="gloo"), dist.new_group(backend="gloo")
    for given in (None, everyone, world):
        with group_to_save_in(given) as group:
            assert_equal(group in (None, given, world), False, where="a group of its own, for all ranks")
            assert_equal((dist.get_world_size(group), dist.get_rank(group)), (3, rank.rank), where="its ranks")
        with group_to_save_in(given) as next_group:
            assert_equal(next_group is group, True, where="a group that was made is there for the next save")
    if rank.rank < 2:
        with group_to_save_in(pair) as group:
            assert_equal(group is pair, True, where="the group of some ranks")
        dist.barrier(pair)
        with (
            mock.patch.object(dist, "get_backend_config", return_value="cuda:nccl"),
            raises(ConfigError, mentions=("cuda:nccl", "gloo", "process_group"), where="a group without the CPU"),
            group_to_save_in(pair),
        ):
            assert_equal("a group", "none", where="a group without the CPU")
    dist.barrier(world)


def _group_alone(rank: Rank) -> None:
    for given in (None, dist.group.WORLD):
        with group_to_save_in(given) as group:
            assert_equal(group, None, where="a process alone")


@requirement(
    "CKPT-796",
    "A save by all ranks MUST have a group of its own, which it gives back; one by some of them theirs, which stays, "
    "and which MUST be refused by name where it carries nothing of the CPU; a process alone has none.",
)
def test_groups_of_saves(rank_pool: Any) -> None:
    rank_pool.run(_groups_to_save_in, 3)
    rank_pool.run(_group_alone, 1)
    with group_to_save_in(None) as group:
        assert_equal(group, None, where="a process without groups")


class _LostColumns(_Columns):
    """Columns that cannot be read at first, when messages are made of them, or cannot be had at all."""

    asked_count = 0

    def read_rows(self, start: int, length: int) -> torch.Tensor:
        self.asked_count += 1
        if self.asked_count <= 2:
            raise LookupError("columns are gone")
        return super().read_rows(start, length)

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        raise LookupError("columns are gone")


def _save_lost_columns(rank: Rank, path: str) -> list[str]:
    full = random_bits(torch.float32, (60, 6), 1)
    kind = _LostColumns if rank.rank == 0 else _Columns
    rows: Any = torch.Tensor._make_subclass(kind, torch.empty(0))
    rows.parts = {(0, 2 * rank.rank): full[:, 2 * rank.rank :][:, :2].contiguous()}
    rows.whole = full.shape
    try:
        save_ranks(rank, {"w": rows}, Path(path), block_bytes=64)
    except BaseException as error:
        return [f"{type(each).__name__}: {each}" for each in errors_inside(error)]
    return []


@requirement(
    "CKPT-797",
    "Where what a rank is to send to several others cannot be read, that rank MUST raise its own error, each other "
    "one be told that it failed, and nothing be left.",
)
def test_nothing_to_send(checkpoint: Any, rank_pool: Any, tmp_path: Path) -> None:
    for rank, texts in enumerate(rank_pool.run(_save_lost_columns, 3, str(tmp_path / "ck"))):
        wanted = "LookupError: columns are gone" if rank == 0 else "DistributedError"
        is_told = any(text.startswith(wanted) for text in texts)
        assert_equal(is_told, True, where=f"rank {rank} is told {wanted}, of {[text[:150] for text in texts]}")
    assert_equal(os.listdir(tmp_path), [], where="what is left")


# What a rank gives, and what the others give where it is of more than one option.
_REFUSED_ON_ONE: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "blocks": ("writer", {"block_bytes": 65}, {}),
    "text for a flag": ("writer", {"save_distributed": "no"}, {}),
    "empty text for a flag": ("writer", {"save_distributed": ""}, {}),
    "an interval": ("manager", {"interval": 0}, {}),
    "text for being on": ("manager", {"enable": "no"}, {}),
    "empty text for being on": ("manager", {"enable": ""}, {}),
    "names": ("manager", {"exclude_from_loading": ["nobody"]}, {}),
    "parts": ("manager", {"model": [torch.nn.Linear(1, 1), "part"]}, {}),
    "options of the last save": (
        "manager",
        {"last_save_in_hf": True, "hf_options": {"block_bytes": 65}},
        {"last_save_in_hf": True},
    ),
}


def _refused_on_one(rank: Rank, path: str) -> dict[str, str]:
    """What each construction raises here of which one rank refuses an option; and how many groups it leaves."""
    checkpoint, found = rank.component("checkpoint"), dict[str, str]()
    kinds: dict[str, Callable[..., Any]] = {
        "writer": partial(checkpoint.HuggingFaceStorageWriter, f"{path}/ck"),
        "manager": partial(checkpoint.CheckpointManager, f"{path}/run"),
    }
    usual: dict[str, dict[str, Any]] = {"writer": {}, "manager": {"model": torch.nn.Linear(1, 1), "interval": 1}}
    groups = dist.distributed_c10d._world.pg_map
    make_groups_to_keep()
    for at in range(rank.world_size):
        for name, (kind, bad, good) in _REFUSED_ON_ONE.items():
            before, error = len(groups) - idle_count(), "nothing"
            try:
                kinds[kind](**usual[kind] | (bad if rank.rank == at else good)).close()
            except Exception as raised:
                error = type(raised).__name__
            found[f"{name} of a {kind} on rank {at}"] = f"{error}, {len(groups) - idle_count() - before} groups"
    return found


@requirement(
    "CKPT-809",
    "Any argument of a writer without a group of its caller's, or of a manager, that one rank alone refuses MUST be "
    "told to all ranks where they construct theirs: none waits, and no group stays.",
)
def test_refused_on_one_rank(checkpoint: Any, rank_pool: Any, tmp_path: Path) -> None:
    with succeeds("an answer of all ranks", where="two ranks"):
        found = rank_pool.run(_refused_on_one, 2, str(tmp_path), timeout_s=60)
    for rank, errors in enumerate(found):
        expected = {
            where: f"{'ConfigError' if where.endswith(str(rank)) else 'DistributedError'}, 0 groups" for where in errors
        }
        assert_equal(errors, expected, where=f"rank {rank}")
    assert_equal(os.listdir(tmp_path), [], where="what was made")


def _save_without_retention(rank: Rank, path: str, mode: str) -> tuple[list[bool], list[str]]:
    said: list[str] = []
    trainer, checkpoint = Trainer(1), rank.component("checkpoint")
    with trainer.manager(checkpoint, path, interval=1, keep_latest_k=1, async_mode=mode) as manager:
        # The other ranks have none.
        cleaner = manager._cleaner or mock.Mock()
        warn = mock.patch.object(manager_module.logger, "warning", lambda text, *given: said.append(text % given))
        full = mock.patch.object(cleaner, "clean", side_effect=MemoryError("no memory"))
        with warn, full, succeeds("saves", where=f"{mode}, rank {rank.rank}"):
            saved = [manager.save(step) for step in (1, 2)]
            manager.maybe_wait_for_saving()
        with succeeds("a save", where=f"{mode}, rank {rank.rank}, afterwards"):
            saved.append(manager.save(3))
    return saved, said


@requirement(
    "CKPT-810",
    "Where retention cannot be asked for behind a save, each rank MUST be told that it has saved, the failure be "
    "logged, and what is old be deleted behind the next save.",
)
def test_saves_without_retention(checkpoint: Any, rank_pool: Any, tmp_path: Path) -> None:
    for mode in ("disabled", "async"):
        folder = tmp_path / mode
        with succeeds("an answer of all ranks", where=mode):
            found = rank_pool.run(_save_without_retention, 2, str(folder), mode, timeout_s=60)
        assert_equal([saved for saved, _ in found], [[True] * 3] * 2, where=f"{mode}: saves that were made")
        told = [[str(folder) in text and "no memory" in text for text in said] for _, said in found]
        assert_equal(told, [[True, True], []], where=f"{mode}: what is logged")
        assert_equal(os.listdir(folder), ["step-3"], where=f"{mode}: what is kept")


def _save_alone(rank: Rank, path: str) -> None:
    checkpoint = rank.component("checkpoint")
    with checkpoint.HuggingFaceStorageWriter(f"{path}/ck") as writer:
        # No other rank is asked, or waits.
        if rank.rank == 1:
            said = ("exactly the ranks that save", "got: 2 ranks", "expected: 1 ranks")
            with raises(ConfigError, mentions=said, where="no_dist, on one rank"):
                dcp.save({"w": torch.ones(2)}, storage_writer=writer, no_dist=True)
        dist.barrier()
    if rank.rank == 1:
        with checkpoint.HuggingFaceStorageWriter(f"{path}/own", save_distributed=False) as writer:
            dcp.save({"w": torch.ones(2)}, storage_writer=writer, no_dist=True)


@requirement(
    "CKPT-841",
    "A rank that saves alone by a writer of all ranks MUST be refused at once, with both numbers, and nothing be made; "
    "by one with save_distributed=False it can save.",
)
def test_one_rank_alone(checkpoint: Any, rank_pool: Any, tmp_path: Path) -> None:
    rank_pool.run(_save_alone, 2, str(tmp_path))
    assert_same_bytes(tmp_path / "own" / FILE, oracle({"w": torch.ones(2)}, PT), where="by a writer of its own")
    assert_equal(os.listdir(tmp_path), ["own"], where="what is there")


class _Adapter:
    """One whose names cannot be taken back on this rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return state_dict

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        if self.rank == 1:
            raise ValueError("no way back")
        return hf_state_dict


def _load_adapted(rank: Rank, path: str) -> None:
    checkpoint, trainer = rank.component("checkpoint"), Trainer(1)
    options = {"initial_load_path": f"{path}/ck", "state_dict_adapter": _Adapter(rank.rank)}
    manager = trainer.manager(checkpoint, f"{path}/run", **options)
    with manager, raises(BaseException, mentions=("no way back",), where=f"rank {rank.rank}"):
        manager.load()


@requirement(
    "CKPT-842",
    "What an adapter raises on one rank of a manager's load, when it takes back what was loaded, MUST be raised there "
    "and told to every other rank.",
)
def test_adapters_that_fail(checkpoint: Any, rank_pool: Any, tmp_path: Path) -> None:
    save(checkpoint, Trainer(2).weights(), tmp_path / "ck")
    rank_pool.run(_load_adapted, 2, str(tmp_path))


def _on_first(rank: Rank, full: torch.Tensor) -> Any:
    """A tensor of which the first rank has all, and another has no shard, as of a table that is not cut."""
    mine = [LocalShard.from_tensor_and_offsets(full.clone(), [0, 0], 0)] if rank.rank == 0 else []
    return init_from_local_shards(mine, *full.shape)


def _values_of(table: Any) -> list[Any]:
    return [shard.tensor.tolist() for shard in table.local_shards()]


def _without_shards(rank: Rank, path: str) -> None:
    checkpoint, full, model = rank.component("checkpoint"), torch.arange(6.0).view(3, 2), torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)

    def states(table: torch.Tensor, epoch: int) -> dict[str, Any]:
        said = {"t": _on_first(rank, table), "many": [_on_first(rank, table), torch.full((2,), float(epoch))]}
        return {"table": Said(said), "plain": Said({"epoch": epoch})}

    def loaded(way: str) -> dict[str, Any]:
        target, where = states(torch.zeros(3, 2), 0), f"{way}, rank {rank.rank}"
        with succeeds("a load", where=where):
            if way == "load_training":
                checkpoint.load_training(Path(path) / "step-1", model, optimizer, states=target)
            else:
                given = {"optimizers": optimizer, "states": {**target, "train_state": Said({"step": torch.tensor(0)})}}
                with checkpoint.CheckpointManager(path, model=model, interval=1, **given) as manager:
                    manager.load()
        return target

    checkpoint.save_training(Path(path) / "step-1", model, optimizer, 1, states=states(full, 3), durable=False)
    mine = [full.tolist()] if rank.rank == 0 else []
    for way in ("load_training", "a manager"):
        found = loaded(way)
        table, (listed, beside) = found["table"].said["t"], found["table"].said["many"]
        assert_equal([_values_of(table), _values_of(listed)], [mine, mine], where=f"{way}, rank {rank.rank}")
        assert_equal(beside.tolist(), [3.0, 3.0], where=f"{way}: beside it")
        assert_equal(found["plain"].said, {"epoch": 3}, where=f"{way}: without a tensor")


@requirement(
    "CKPT-947",
    "A ShardedTensor of which a rank has no shard MUST be loaded by load_training and a manager, in a list and by "
    "itself, with all that is beside it, states without a tensor included.",
)
def test_ranks_without_shards(checkpoint: Any, rank_pool: Any, tmp_path: Path) -> None:
    rank_pool.run(_without_shards, 2, str(tmp_path))


def _asked_without_shards(rank: Rank, path: str) -> None:
    planner = rank.component("checkpoint").HuggingFaceLoadPlanner
    full, folder = torch.arange(6.0).view(3, 2), Path(path)
    save_ranks(rank, {"t": _on_first(rank, full), "b": torch.ones(2)}, folder)
    for is_flat in (True, False):
        asking, target = planner(flatten_state_dict=is_flat), _on_first(rank, torch.zeros(3, 2))
        load_ranks(rank, {"t": target, "b": torch.zeros(2)}, folder, planner=asking)
        assert_equal(asking.unexpected_keys, [], where=f"what was not asked for, flat {is_flat}, rank {rank.rank}")
        assert_equal(_values_of(target), [full.tolist()][rank.rank :], where=f"rank {rank.rank}")
    with raises(MissingKeyError, mentions=("u",), where=f"a name that is not there, rank {rank.rank}"):
        load_ranks(rank, {"u": _on_first(rank, full)}, folder, planner=planner())


@requirement(
    "CKPT-948",
    "HuggingFaceLoadPlanner MUST take a ShardedTensor of which a rank has no shard for one that this rank asks for: "
    "it is not unexpected, and is missing on every rank where the checkpoint lacks it.",
)
def test_asked_without_shards(checkpoint: Any, rank_pool: Any, tmp_path: Path) -> None:
    rank_pool.run(_asked_without_shards, 2, str(tmp_path / "ck"))
