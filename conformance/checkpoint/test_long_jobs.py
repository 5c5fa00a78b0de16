"""M. What happens in runs of weeks: readers beside writers, two writers, save after save."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import BlockingAsyncStager

import twinproof.checkpoint.groups as groups
import twinproof.checkpoint.manager as manager_module
from conformance.checkpoint.cases import load, make_groups_to_keep, mesh_of, own_count, save, zeros_like
from conformance.checkpoint.crash_folders import NEW, OLD, leftovers, save_seed, state_in
from conformance.checkpoint.crash_programs import MAPPING, make_state
from conformance.checkpoint.trainer import Trainer
from conformance.harness import Mismatch, Rank, assert_equal, assert_le, assert_same_tensors, raises, requirement
from conformance.harness.raising import errors_inside
from conformance.provers.faults import Interruption, each_moment, interrupted
from twinproof.errors import ConfigError, DistributedError, TwinproofError

# One process saves and loads here, and torch's threads warn of it when they like.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def _one_of(targets: dict[str, torch.Tensor], *seeds: int) -> int | None:
    for seed in seeds:
        try:
            assert_same_tensors(targets, make_state(seed))
        except Mismatch:
            continue
        return seed
    return None


def _is_named(error: BaseException) -> bool:
    return any(isinstance(inner, TwinproofError) for inner in errors_inside(error))


def _targets() -> dict[str, torch.Tensor]:
    return {name: zeros_like(value) for name, value in make_state(OLD).items()}


class _File:
    """``save_file`` and ``load_file``."""

    def __init__(self, checkpoint: Any, path: Path) -> None:
        self.checkpoint, self.path = checkpoint, path

    def save(self, seed: int) -> None:
        self.checkpoint.save_file(make_state(seed), self.path)

    def load(self) -> dict[str, torch.Tensor]:
        return dict(self.checkpoint.load_file(self.path))


class _Folder(_File):
    """A save to two files, and a load."""

    def save(self, seed: int) -> None:
        save_seed(self.checkpoint, self.path, seed)

    def load(self) -> dict[str, torch.Tensor]:
        targets = _targets()
        load(self.checkpoint, targets, self.path)
        return targets


class _Shards(_File):
    """A save of shards, and their consolidation."""

    def save(self, seed: int) -> None:
        options = {"enable_consolidation": False, "fqn_to_index_mapping": MAPPING}
        save(self.checkpoint, make_state(seed), self.path, **options)

    def load(self) -> dict[str, torch.Tensor]:
        final = self.path.with_name("final")
        self.checkpoint.consolidate_safetensors_files(self.path, final, MAPPING)
        targets = _targets()
        load(self.checkpoint, targets, final)
        return targets


@requirement(
    "CKPT-470",
    "A load during which the checkpoint is replaced, at any moment, MUST give the old state whole, the new one whole, "
    "or a named error: never parts of both.",
)
@pytest.mark.parametrize("kind", [_File, _Folder, _Shards])
def test_replaced_while_read(checkpoint: Any, tmp_path: Path, kind: Callable[[Any, Path], _File]) -> None:
    outcomes = set()

    def once(nth: int) -> Interruption:
        place = kind(checkpoint, tmp_path / f"{nth}" / "ck")
        place.path.parent.mkdir()
        place.save(OLD)
        with interrupted(place.path, nth, lambda: place.save(NEW)) as hook:
            try:
                seed = _one_of(place.load(), OLD, NEW)
            except BaseException as error:
                if not _is_named(error):
                    raise
                outcomes.add("named error")
                return hook
        if seed is None:
            raise Mismatch("parts of two checkpoints", got="a mixture", expected=[OLD, NEW], where=f"moment {nth}")
        outcomes.add(f"{seed}")
        return hook

    each_moment(once)
    assert_equal({f"{OLD}", f"{NEW}"} - outcomes, set(), where="outcomes that were not seen")


def _load_apart(rank: Rank, path: str) -> str:
    """Rank 0 reads, then the checkpoint is replaced, then rank 1 reads."""
    checkpoint = rank.component("checkpoint")
    turns = dist.new_group(backend="gloo")
    targets, reader = _targets(), checkpoint.HuggingFaceStorageReader(path)
    read = reader.read_data

    def read_in_turn(*arguments: Any, **options: Any) -> Any:
        if rank.rank == 1:
            dist.barrier(group=turns)
        result = read(*arguments, **options)
        if rank.rank == 0:
            # By this rank alone: a writer that distributes would make a group with the rank that waits.
            save(checkpoint, make_state(NEW), Path(path), save_distributed=False, fqn_to_index_mapping=MAPPING)
            dist.barrier(group=turns)
        return result

    reader.read_data = read_in_turn
    try:
        dcp.load(dict(targets), storage_reader=reader)
    except BaseException as error:
        return "named error" if _is_named(error) else f"{type(error).__name__}: {error}"
    return str(_one_of(targets, OLD, NEW))


@requirement(
    "CKPT-471",
    "Ranks that read a checkpoint while it is replaced MUST all load the same state whole, or all raise a named error.",
)
def test_replaced_between_ranks(checkpoint: Any, rank_pool: Any, tmp_path: Path) -> None:
    save_seed(checkpoint, tmp_path / "ck", OLD)
    said = rank_pool.run(_load_apart, 2, str(tmp_path / "ck"))
    assert_equal(len(set(said)), 1, where=f"outcomes by rank: {said}")
    assert_equal(said[0] in ("named error", f"{OLD}", f"{NEW}"), True, where=f"outcomes by rank: {said}")


@requirement(
    "CKPT-472",
    "Of two saves to one folder that run at once, one MUST be there whole when both ended, whichever moment of the one "
    "the other falls into, and nothing else be left.",
)
@pytest.mark.parametrize("first", [True, False], ids=["first save", "overwriting"])
def test_two_savers(checkpoint: Any, tmp_path: Path, first: bool) -> None:
    def once(nth: int) -> Interruption:
        path = tmp_path / f"{nth}" / "ck"
        path.parent.mkdir()
        if not first:
            save_seed(checkpoint, path, OLD)
        errors: list[BaseException] = []

        def attempt(seed: int) -> None:
            try:
                save_seed(checkpoint, path, seed)
            except BaseException as error:
                errors.append(error)

        with warnings.catch_warnings(), interrupted(path.parent, nth, lambda: attempt(NEW)) as hook:
            warnings.simplefilter("ignore")
            attempt(NEW + 100)
        unnamed = [f"{type(error).__name__}: {error}" for error in errors if not _is_named(error)]
        assert_equal(unnamed, [], where=f"moment {nth}: errors without a name")
        assert_equal(len(errors) < 2, True, where=f"moment {nth}: one of the two succeeds")
        seed = state_in(checkpoint, path, (NEW, NEW + 100), where=f"moment {nth}")
        assert_equal(seed in (NEW, NEW + 100), True, where=f"moment {nth}: one of the two is there")
        assert_equal(leftovers(path.parent, "ck"), [], where=f"moment {nth}: leftovers")
        return hook

    each_moment(once)


_EXTRA_BYTES = 32 << 20


def _held() -> dict[str, int]:
    gc.collect()
    # But for what is there for the next save.
    in_use = len(dist.distributed_c10d._world.pg_map) - groups.idle_count() if dist.is_initialized() else 0
    descriptors = len(os.listdir("/proc/self/fd"))
    return {"groups": in_use, "descriptors": descriptors, "threads": threading.active_count()}


def _save_again_and_again(rank: Rank, folder: str, in_hf: bool) -> tuple[dict[str, int], dict[str, int], int]:
    trainer = Trainer(1, mesh_of(rank))
    trainer.model.register_buffer("extra", torch.ones(_EXTRA_BYTES // 4))
    held, resident = [], []
    options = {"async_mode": "async", "interval": 1, "keep_latest_k": 2, "last_save_in_hf": in_hf}
    with trainer.manager(rank.component("checkpoint"), folder, **options) as manager:
        for step in range(1, 13):
            trainer.step()
            manager.save(step, last_step=in_hf)
            if step in (2, 12):
                manager.maybe_wait_for_saving()
                held.append(_held())
                resident.append(own_count("status", "VmRSS") << 10)
    return held[0], held[1], resident[1] - resident[0]


@pytest.mark.night
@requirement(
    "CKPT-473",
    "Ten asynchronous saves back to back MUST leave neither process groups, descriptors and threads nor memory that "
    "grows with their number, on one rank and on two, for native and for HF saves.",
)
@pytest.mark.parametrize("in_hf", [False, True], ids=["native", "hf"])
def test_no_growth(checkpoint: Any, rank_pool: Any, tmp_path: Path, in_hf: bool) -> None:
    for rank_count in (1, 2):
        folder = str(tmp_path / f"{rank_count}")
        for early, late, growth_bytes in rank_pool.run(_save_again_and_again, rank_count, folder, in_hf):
            for kind, count in late.items():
                # What one save leaves, ten leave ten times.
                assert_le(count, early[kind] + 2, where=f"{rank_count} ranks: {kind} after 10 more saves")
            # Ten copies would be ten times this; the allocator may keep a few that it will use again.
            assert_le(growth_bytes, 3 * _EXTRA_BYTES, where=f"{rank_count} ranks: memory after 10 more saves")
        assert_equal(sorted(os.listdir(folder)), ["step-11", "step-12"], where="what is kept")


def _count_groups(rank: Rank, path: str) -> list[int]:
    make_groups_to_keep()
    counts = [_held()["groups"]]
    for options in ({}, {"save_distributed": False}, {"process_group": dist.group.WORLD}):
        with rank.component("checkpoint").HuggingFaceStorageWriter(path, **options) as writer:
            counts.append(_held()["groups"])
        writer.close()
        counts.append(_held()["groups"])
    return counts


@pytest.mark.night
@requirement(
    "CKPT-516",
    "A writer MUST make one process group where several ranks save and none was given, none otherwise, and have given "
    "it back when it was closed, once or twice.",
)
def test_groups_of_writers(checkpoint: Any, rank_pool: Any, tmp_path: Path) -> None:
    for rank_count in (1, 2):
        for counts in rank_pool.run(_count_groups, rank_count, str(tmp_path / "ck")):
            own = 1 if rank_count > 1 else 0
            assert_equal([count - counts[0] for count in counts], [0, own, 0, 0, 0, 0, 0], where=f"{rank_count} ranks")


def _left_by_errors(rank: Rank, path: str) -> list[dict[str, int]]:
    make_groups_to_keep()
    checkpoint, held = rank.component("checkpoint"), [_held()]
    makers: tuple[Any, ...] = (
        lambda: checkpoint.HuggingFaceStorageWriter(f"{path}/ck"),
        lambda: checkpoint.CheckpointManager(f"{path}/run", model=torch.nn.Linear(2, 2), interval=1),
    )
    kept = []
    for make in makers:
        with contextlib.suppress(ZeroDivisionError), make() as made:
            # One that is gone gives back what it has, too.
            kept.append(made)
            raise ZeroDivisionError
        held.append(_held())
    return held


@requirement(
    "CKPT-718",
    "A block of a writer or a manager that is left by an error MUST give back its process group, threads and "
    "descriptors.",
)
def test_blocks_left_by_errors(rank_pool: Any, tmp_path: Path) -> None:
    for held in rank_pool.run(_left_by_errors, 2, str(tmp_path)):
        for who, after in zip(("writer", "manager"), held[1:], strict=True):
            for what, count in after.items():
                assert_le(count, held[0][what], where=f"{what} behind the block of a {who}")


class _Stager(BlockingAsyncStager):
    """In place of the stager that a manager makes: those that are not closed are in a list."""

    open: ClassVar[list[Any]] = []

    def __init__(self, *arguments: Any) -> None:
        super().__init__()
        _Stager.open.append(self)

    def close(self) -> None:
        """Off the list."""
        _Stager.open.remove(self)


# What a writer refuses, and what a manager does: of its own options, and of those that it hands to its writer.
_NO_WRITERS: tuple[dict[str, Any], ...] = (
    {"max_shard_size": "5 apples"},
    {"max_shard_size": 100, "fqn_to_index_mapping": {"weight": 1}},
    {"fqn_to_index_mapping": {"weight": 0}},
    {"metadata": {"format": "np"}},
    {"metadata": [1]},
    {"single_file": True, "checksums": True},
    {"single_file": True, "enable_consolidation": False},
    {"thread_count": 0},
    {"thread_count_consolidation": 0},
    {"write_mode": "sideways"},
    {"block_bytes": 65},
    {"page_align": "yes"},
    {"progress": "bar"},
)
_NO_MANAGERS: tuple[dict[str, Any], ...] = (
    {"interval": 0},
    {"keep_latest_k": -1},
    {"async_mode": "threads"},
    {"stager": BlockingAsyncStager()},
    {"states": {"model": 3}},
    {"exclude_from_loading": ["nobody"]},
    {"export_dtype": "int8"},
    {"thread_count": 0},
    {"last_save_in_hf": True, "hf_options": {"max_shards": 3}},
    {"last_save_in_hf": True, "hf_options": {"durable": False}},
    *({"last_save_in_hf": True, "hf_options": options} for options in _NO_WRITERS),
    {"last_save_in_hf": True, "hf_options": {"block_bytes": 65}, "async_mode": "async_with_pinned_mem"},
)


@contextmanager
def _left(found: dict[str, int], what: str) -> Iterator[None]:
    """Note what there is more of at the end of a block than at its beginning."""
    before = {**_held(), "stagers": len(_Stager.open)}
    yield
    after = {**_held(), "stagers": len(_Stager.open)}
    found |= {f"{kind} behind {what}": after[kind] - before[kind] for kind in after}


@contextmanager
def _accelerated() -> Iterator[None]:
    """As on a machine with an accelerator, where a manager may make a stager of its own."""
    _Stager.open.clear()
    available = mock.patch.object(torch.accelerator, "is_available", return_value=True)
    with available, mock.patch.object(manager_module, "DefaultStager", _Stager):
        yield


@_accelerated()
def _left_by_refusals(rank: Rank, path: str) -> dict[str, int]:
    checkpoint, found = rank.component("checkpoint"), dict[str, int]()
    make_groups_to_keep()
    for options in _NO_WRITERS:
        with _left(found, f"a writer of {options}"), raises(ConfigError, where=f"a writer of {options}"):
            checkpoint.HuggingFaceStorageWriter(f"{path}/ck", **options)
    make = partial(checkpoint.CheckpointManager, f"{path}/run", model=torch.nn.Linear(1, 1))
    for options in _NO_MANAGERS:
        with _left(found, f"a manager of {options}"), raises(ConfigError, where=f"a manager of {options}"):
            make(**{"interval": 1, **options})
    given = _Stager()
    with raises(ConfigError, where="a manager with a stager of its caller's"):
        make(interval=1, last_save_in_hf=True, hf_options={"block_bytes": 65}, async_mode="async", stager=given)
    assert_equal(_Stager.open, [given], where="stagers that are open behind a manager with one of its caller's")
    given.close()
    return found


@_accelerated()
def _left_by_the_system(rank: Rank, path: str) -> dict[str, int]:
    """Of managers for which there is no memory, on any rank, or no thread, on the first, which tells the others."""
    found = dict[str, int]()
    make = partial(
        rank.component("checkpoint").CheckpointManager,
        f"{path}/run",
        model=torch.nn.Linear(1, 1),
        interval=1,
        async_mode="async_with_pinned_mem",
    )
    no_memory = mock.patch.object(manager_module, "DefaultStager", side_effect=MemoryError)
    with _left(found, "memory that is not there"), no_memory, raises(MemoryError, where="no memory"):
        make()
    no_thread = mock.patch.object(threading.Thread, "start", side_effect=RuntimeError)
    error = RuntimeError if rank.rank == 0 else DistributedError
    with _left(found, "a thread that does not start"), no_thread, raises(error, where="no thread"):
        make().close()
    return found


@requirement(
    "CKPT-728",
    "A writer or a manager whose construction fails, because of any option, or because there is no memory or thread, "
    "MUST leave no thread, process group, descriptor or stager, on one rank and on several.",
)
def test_refused_constructions(rank_pool: Any, tmp_path: Path) -> None:
    for rank_count in (1, 2):
        for work in (_left_by_refusals, _left_by_the_system):
            for found in rank_pool.run(work, rank_count, str(tmp_path)):
                more = {what: count for what, count in found.items() if count > 0}
                assert_equal(more, {}, where=f"left on {rank_count} ranks")
    assert_equal(sorted(tmp_path.iterdir()), [], where="what was made of folders")


@requirement(
    "CKPT-610",
    "A file that is replaced by one of other dtypes, of the same length, while it is loaded MUST give the old tensors, "
    "the new ones, or a named error: never values of one under the dtype of the other.",
)
def test_other_dtypes_while_read(checkpoint: Any, tmp_path: Path) -> None:
    old, new = {"w": torch.arange(64, dtype=torch.float32)}, {"w": torch.arange(100, 164, dtype=torch.int32)}
    loads: dict[str, Callable[[Path], dict[str, torch.Tensor]]] = {
        "load_file": lambda path: dict(checkpoint.load_file(path)),
        "a reader": lambda path: {"w": _read(checkpoint, path)},
    }
    for what, read in loads.items():

        def once(nth: int, what: str = what, read: Callable[[Path], dict[str, torch.Tensor]] = read) -> Interruption:
            path = tmp_path / what / f"{nth}" / "m.safetensors"
            path.parent.mkdir(parents=True)
            checkpoint.save_file(old, path)
            with interrupted(path, nth, lambda: checkpoint.save_file(new, path)) as hook:
                try:
                    found = read(path)["w"]
                except BaseException as error:
                    if not _is_named(error):
                        raise
                    return hook
            expected = old["w"] if found.dtype == torch.float32 else new["w"]
            assert_same_tensors({"w": found}, {"w": expected}, where=f"{what}, moment {nth}")
            return hook

        each_moment(once)


def _read(checkpoint: Any, path: Path) -> torch.Tensor:
    target = torch.zeros(64)
    load(checkpoint, {"w": target}, path)
    return target


def _make_while_others_connect(rank: Rank, folder: str) -> list[str]:
    """What rank 0 does while rank 1 has not come back from ``new_group``: waits for it, or returns."""
    checkpoint, store = rank.component("checkpoint"), dist.distributed_c10d._get_default_store()
    makers: dict[str, Callable[[], Any]] = {
        "writer": lambda: checkpoint.HuggingFaceStorageWriter(folder),
        "manager": lambda: checkpoint.CheckpointManager(folder, model=torch.nn.Linear(2, 2), interval=9),
    }
    new_group = dist.new_group
    found = list[str]()
    for count, (kind, make) in enumerate(makers.items(), 1):
        # The group and its store outlive this call.
        name = f"{folder}: {kind}"

        def make_group(*arguments: Any, name: str = name, **options: Any) -> Any:
            made = new_group(*arguments, **options)
            store.set(f"{name}: connected", "")
            found.append(store.get(name).decode())
            return made

        def waits(verb: Callable[..., Any], name: str = name) -> Callable[..., Any]:
            def wait(*arguments: Any, **options: Any) -> Any:
                store.set(name, "waits")
                return verb(*arguments, **options)

            return wait

        changed = {"barrier": waits(dist.barrier), "all_reduce": waits(dist.all_reduce)}
        if rank.rank == 1:
            changed = {"new_group": make_group}
        with pytest.MonkeyPatch.context() as patch:
            # As in a process that has made no group before.
            patch.setattr(groups, "_pools", weakref.WeakKeyDictionary())
            for attribute, value in changed.items():
                patch.setattr(dist, attribute, value)
            made = make()
        if rank.rank == 1 and len(found) < count:
            # Nothing to connect to: rank 0 waits for nobody.
            found.append("no group")
            store.set(f"{name}: connected", "")
        if rank.rank == 0 and not store.check([name]):
            store.set(name, "returns")
        store.wait([f"{name}: connected"])
        made.close()
    return found


@requirement(
    "CKPT-642",
    "A writer and a manager of several ranks MUST be there on no rank before all ranks have connected to their group: "
    "one that is closed at once would break the connections of the others.",
)
def test_groups_are_connected(checkpoint: Any, rank_pool: Any, tmp_path: Path) -> None:
    said = rank_pool.run(_make_while_others_connect, 2, str(tmp_path / "ck"))
    for kind, what in zip(("writer", "manager"), said[1], strict=True):
        assert_equal(what in ("waits", "no group"), True, where=f"{kind}: rank 0 {what}")
