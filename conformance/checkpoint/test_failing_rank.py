"""An error at any call of the library's own code, on one rank: no rank waits for it, and nothing half-done is left.

The errors of the file system, and of what a user gives, are those of ``test_crash_errors``.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Shard

from conformance.checkpoint import crash_programs as programs
from conformance.checkpoint.cases import mesh_of, random_bits, sharded
from conformance.checkpoint.crash_folders import NEW, OLD, leftovers, tree
from conformance.harness import Rank, assert_equal, requirement
from conformance.harness.raising import errors_inside
from conformance.provers.any_call import PATIENCE, Ended, assert_told, fail_each

_KINDS: dict[str, dict[str, Any]] = {
    "replicas and sums": {"checksums": True, "check_replicas": True, "thread_count": 2, "block_bytes": 4096},
    "in sequence": {"write_mode": "sequential", "block_bytes": 1024},
    "shards": {"enable_consolidation": False, "checksums": True},
}


def _save(rank: Rank, folder: Path, seed: int, group: Any, options: dict[str, Any]) -> Callable[[], object]:
    writer = rank.component("checkpoint").HuggingFaceStorageWriter(
        folder, fqn_to_index_mapping=programs.MAPPING, process_group=group, **options
    )
    # A rank has one chunk of a tensor in a shard.
    is_cut = options.get("enable_consolidation", True)
    state = programs.share_of(rank.rank, rank.world_size, seed) if is_cut else programs.make_state(seed)
    return lambda: dcp.save(state, storage_writer=writer, process_group=group)


class _Turns:
    """Saves two states over each other by turns, and knows which of them a folder shows."""

    def __init__(self, rank: Rank, folder: Path, options: dict[str, Any]) -> None:
        self.rank, self.folder, self.options = rank, folder, options
        self.shown: int | None = NEW
        self._contents: dict[int, dict[str, bytes]] = {}

    def make(self, group: Any) -> Callable[[], object]:
        """A save of the state that is not there."""
        self._wanted = OLD if self.shown == NEW else NEW
        return _save(self.rank, self.folder, self._wanted, group, self.options)

    def look(self) -> tuple[list[str], int | None]:
        """What lies beside the folder, and whose state it shows; None for neither."""
        content = {name: found[-1] for name, found in tree(self.folder).items()}
        # The first two saves succeed.
        if len(self._contents) < 2:
            self._contents[self._wanted] = content
        self.shown = next((seed for seed, known in self._contents.items() if known == content), None)
        return leftovers(self.folder.parent, self.folder.name), self.shown


def _fail_each(rank: Rank, folder: str, at: int, most: int | None, options: dict[str, Any]) -> list[Ended]:
    turns = _Turns(rank, Path(folder), options)
    return fail_each(turns.make, turns.look, at=at, most=most)


@requirement(
    "CKPT-730",
    "Where any call of the library's own code fails on one rank of a save, in any of its threads, every rank MUST be "
    "told in time and the checkpoint before it stay, or the save be whole; nothing MUST be left beside it.",
)
@pytest.mark.parametrize("most", [17, pytest.param(None, marks=pytest.mark.night)])
@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("kind", sorted(_KINDS))
def test_any_call_of_a_save(
    checkpoint: Any, rank_pool: Any, tmp_path: Path, kind: str, at: int, most: int | None
) -> None:
    by_rank = rank_pool.run(_fail_each, 2, str(tmp_path / "ck"), at, most, _KINDS[kind], timeout_s=600)
    before: Any = NEW
    for each in by_rank[at]:
        where = f"{kind} on rank {at}"
        assert_told(each, where)
        other = NEW if before == OLD else OLD
        found = each.shown in ({before, other} if any(each.told) else {other})
        assert_equal(found, True, where=f"{where}, {each.where} fails: the state")
        before = each.shown
    assert_equal(len(by_rank[at]) > 1, True, where="calls that failed")


def _progress_fails(rank: Rank, folder: str, at: int, options: dict[str, Any]) -> list[tuple[str, list[bool]]]:
    """For each call of progress that raises on rank ``at``: which ranks were told, and nothing else."""
    group = dist.new_group(backend="gloo", timeout=PATIENCE)
    state = {"w": sharded(random_bits(torch.float32, (64, 256), 1), mesh_of(rank), [Shard(1)])}
    make = rank.component("checkpoint").HuggingFaceStorageWriter

    def ended(number: int) -> tuple[int, list[bool]]:
        called = 0

        def tell(done: int, total: int) -> None:
            nonlocal called
            called += 1
            if rank.rank == at and called == number:
                raise ZeroDivisionError

        told = False
        try:
            writer = make(folder, process_group=group, progress=tell, **options)
            # One message at a time: what was sent ahead reaches the others anyway.
            with mock.patch("fastimpl.checkpoint.run.IN_FLIGHT_BYTES", 1):
                dcp.save(state, storage_writer=writer, process_group=group)
        except BaseException as error:
            names = [type(each).__name__ for each in errors_inside(error)]
            told = "ZeroDivisionError" in names and "RuntimeError" not in names
        found: list[tuple[int, bool]] = [(0, False)] * rank.world_size
        dist.all_gather_object(found, (called, told))
        return found[at][0], [each for _, each in found]

    count, told = ended(0)
    by_call = [("none", told)]
    for number in sorted({1, 2, count // 2, count - 1, count} & {*range(1, count + 1)}):
        by_call.append((f"{number} of {count}", ended(number)[1]))
        # A rank that was not told stands elsewhere in its program.
        if not all(by_call[-1][1]):
            break
    return by_call


@requirement(
    "CKPT-875",
    "What the progress function of one rank raises, at any of its calls, MUST be told on every rank in time, whichever "
    "rank owns the block and whether other ranks send bytes of it; the next save MUST succeed.",
)
@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("kind", sorted(_KINDS))
def test_progress_of_one_rank(checkpoint: Any, rank_pool: Any, tmp_path: Path, kind: str, at: int) -> None:
    # Small blocks, so that each rank owns some of which others have bytes.
    options = {**_KINDS[kind], "block_bytes": 1024}
    by_call = rank_pool.run(_progress_fails, 2, str(tmp_path / "ck"), at, options)[at]
    assert_equal(by_call[0], ("none", [False, False]), where=f"{kind}: progress that raises nothing")
    # The reference's first rank may write all.
    assert_equal(len(by_call) > 1 or at == 1, True, where=f"{kind}: calls of progress on rank {at}")
    for number, told in by_call[1:]:
        assert_equal(told, [True, True], where=f"{kind}, rank {at} raises at call {number}: ranks told")


class _Trained:
    """A model, its optimizer and a state of its own, behind one step; another seed has other values."""

    def __init__(self, seed: int) -> None:
        self.model = torch.nn.Linear(3, 2)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=seed)
        for number, value in enumerate(self.model.parameters()):
            with torch.no_grad():
                value.copy_(random_bits(torch.int32, tuple(value.shape), seed + number) % 1000 / 1000)
            value.grad = value.detach().clone()
        self.optimizer.step()
        self.schedule = {"schedule": torch.optim.lr_scheduler.ConstantLR(self.optimizer)}


def _load(rank: Rank, root: Path, group: Any) -> Callable[[], object]:
    targets = programs.share_of(rank.rank, rank.world_size, NEW, fill=False)
    reader = rank.component("checkpoint").HuggingFaceStorageReader(root / "ck", thread_count=2)
    return lambda: dcp.load(targets, storage_reader=reader, process_group=group)


def _merge(rank: Rank, root: Path, group: Any) -> Callable[[], object]:
    merge = rank.component("checkpoint").consolidate_safetensors_files_on_every_rank
    return lambda: merge(root / "shards", root / "merged", programs.MAPPING, 2, group)


def _save_training(rank: Rank, root: Path, group: Any) -> Callable[[], object]:
    trained, save = _Trained(1), rank.component("checkpoint").save_training
    return lambda: save(root / "t", trained.model, trained.optimizer, 3, states=trained.schedule, process_group=group)


def _load_training(rank: Rank, root: Path, group: Any) -> Callable[[], object]:
    trained, load = _Trained(2), rank.component("checkpoint").load_training
    return lambda: load(root / "t", trained.model, trained.optimizer, states=trained.schedule, process_group=group)


def _managed(rank: Rank, root: Path, verb: Callable[[Any], object]) -> Callable[[], object]:
    trained, manager = _Trained(1), rank.component("checkpoint").CheckpointManager
    given = {"model": trained.model, "optimizers": trained.optimizer, "states": trained.schedule}
    made = manager(root / "m", interval=1, last_save_in_hf=True, **given)

    def run() -> None:
        try:
            verb(made)
        finally:
            sys.setprofile(None)
            made.close()

    return run


_PROGRAMS: dict[str, Callable[[Rank, Path, Any], Callable[[], object]]] = {
    "manager.save": lambda rank, root, _: _managed(rank, root, lambda manager: manager.save(3)),
    "manager.save in HF": lambda rank, root, _: _managed(rank, root, lambda manager: manager.save(4, last_step=True)),
    "manager.load": lambda rank, root, _: _managed(rank, root, lambda manager: manager.load(3)),
    "load": _load,
    "merge": _merge,
    "save_training": _save_training,
    "load_training": _load_training,
}


def _folders(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_dir()}


def _fail_each_of(rank: Rank, root: str, what: str, at: int, most: int | None) -> list[Ended]:
    folder = Path(root)
    programs.save_together(rank, str(folder / "ck"), NEW, {})
    with rank.component("checkpoint").HuggingFaceStorageWriter(folder / "shards", **_KINDS["shards"]) as writer:
        dcp.save(programs.make_state(NEW), storage_writer=writer)
    _save_training(rank, folder, None)()
    _PROGRAMS["manager.save"](rank, folder, None)()
    kept: list[set[str]] = []

    def look() -> tuple[list[str], None]:
        # The first two succeed: what they make is there to stay.
        found = _folders(folder)
        if len(kept) < 2:
            kept.append(found)
        return sorted(found - kept[-1]), None

    # Groups of the library's own, too: ranks that wait in them for one that is gone give up.
    with mock.patch("twinproof.checkpoint.groups._patience", return_value=PATIENCE):
        return fail_each(lambda group: _PROGRAMS[what](rank, folder, group), look, at=at, most=most)


@requirement(
    "CKPT-731",
    "Where any call of the library's own code fails on one rank of a load, of a merge on every rank, or of a save or "
    "load of a training or a manager, in any thread, every rank MUST be told in time; the next one MUST succeed.",
)
@pytest.mark.parametrize("most", [17, pytest.param(None, marks=pytest.mark.night)])
@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("what", sorted(_PROGRAMS))
def test_any_call_of_others(
    checkpoint: Any, rank_pool: Any, tmp_path: Path, what: str, at: int, most: int | None
) -> None:
    by_rank = rank_pool.run(_fail_each_of, 2, str(tmp_path), what, at, most, timeout_s=600)
    for each in by_rank[at]:
        assert_told(each, f"{what} on rank {at}")
    assert_equal(len(by_rank[at]) > 0, True, where="calls that failed")


_COLLECTIVES = (
    "all_gather_object",
    "all_reduce",
    "barrier",
    "broadcast_object_list",
    "gather_object",
    "scatter_object_list",
)


def _groups_of_calls(rank: Rank, root: str) -> dict[str, tuple[int, int]]:
    """Of each program, how many collectives it calls, and how many of them over the default group."""
    folder, used = Path(root), list[Any]()
    programs.save_together(rank, str(folder / "ck"), NEW, {})
    with rank.component("checkpoint").HuggingFaceStorageWriter(folder / "shards", **_KINDS["shards"]) as writer:
        dcp.save(programs.make_state(NEW), storage_writer=writer)

    def noted(original: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*args: Any, **options: Any) -> Any:
            bound = inspect.signature(original).bind(*args, **options)
            used.append(bound.arguments.get("group"))
            return original(*args, **options)

        return noting

    found: dict[str, tuple[int, int]] = {}
    group = dist.new_group(backend="gloo")
    for what in sorted(_PROGRAMS, key=lambda name: ("save" not in name, name)):
        run = _PROGRAMS[what](rank, folder, group)
        used.clear()
        with ExitStack() as stack:
            for name in _COLLECTIVES:
                stack.enter_context(mock.patch.object(dist, name, noted(getattr(dist, name))))
            run()
        found[what] = len(used), sum(each in (None, dist.group.WORLD) for each in used)
    return found


@requirement(
    "CKPT-876",
    "A save, load or merge, of a training or a manager too, MUST NOT call a collective over another group than the one "
    "that it was given, or made: ranks outside of it would be waited for.",
)
def test_no_other_group(checkpoint: Any, rank_pool: Any, tmp_path: Path) -> None:
    for rank, found in enumerate(rank_pool.run(_groups_of_calls, 2, str(tmp_path))):
        for what, (count, outside_count) in found.items():
            where = f"{what} on rank {rank}: collectives, and those over the default group"
            assert_equal((count > 0, outside_count), (True, 0), where=where)
