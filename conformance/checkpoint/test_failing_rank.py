"""An error at any call of the library's own code, on one rank: no rank waits for it, and nothing half-done is left.

The errors of the file system, and of what a user gives, are those of ``test_crash_errors``. Here a call fails for no
reason that a test could think of, as it does where memory or threads run out, or where the library is wrong.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from conformance.checkpoint import crash_programs as programs
from conformance.checkpoint.cases import random_bits
from conformance.checkpoint.crash_folders import NEW, OLD, leftovers, tree
from conformance.harness import Rank, assert_equal, requirement
from conformance.harness.raising import errors_inside

_PACKAGES = ("twinproof.", "fastimpl.", "refimpl.")
# Here ranks wait for each other, or for what is under way, or nobody waits any more: who fails at such a call cannot
# tell the others. None of these does work of its own; what they call is no part of the list.
_AGREEMENTS = frozenset(
    {
        "CheckpointManager._agreed",
        "CheckpointManager._check_open",
        "CheckpointManager._load",
        "CheckpointManager._load_native",
        "CheckpointManager._rank",
        "CheckpointManager._save",
        "CheckpointManager._saved",
        "CheckpointManager._saves_at",
        "CheckpointManager.load",
        "CheckpointManager.maybe_wait_for_saving",
        "CheckpointManager.save",
        "Exchange._post",
        "Exchange.start",
        "GatherAndSave.write",
        "HuggingFaceStorageReader.checkpoint_id",
        "HuggingFaceStorageWriter._check_replicas",
        "HuggingFaceStorageWriter._instructed",
        "HuggingFaceStorageWriter._settled",
        "HuggingFaceStorageWriter._told",
        "HuggingFaceStorageWriter._written",
        "HuggingFaceStorageWriter.checkpoint_id",
        "HuggingFaceStorageWriter.finish",
        "HuggingFaceStorageWriter.settle",
        "HuggingFaceStorageWriter.write_data",
        "NativeStorageWriter.checkpoint_id",
        "PlannedWrites.write",
        "Round.size_bytes",
        "Runner._rounds",
        "Runner._work",
        "Runner.run",
        "WriterOptions.writes_shards",
        "_Cleaner._ask_again",
        "_Cleaner.clean",
        "_Cleaner.let_go",
        "_frame",
        "check_flags",
        "compare_checksums",
        "consolidate",
        "consolidate_safetensors_files_on_every_rank",
        "gather",
        "gather_first",
        "load_native",
        "load_training",
        "on_any_rank",
        "raise_first",
        "rank_count_of",
        "save_training",
        "scatter",
        "sendable",
        "several_ranks",
        "together",
    }
)


_KINDS: dict[str, dict[str, Any]] = {
    "replicas and sums": {"checksums": True, "check_replicas": True, "thread_count": 2, "block_bytes": 4096},
    "in sequence": {"write_mode": "sequential", "block_bytes": 1024},
    "shards": {"enable_consolidation": False, "checksums": True},
}


class _Struck(BaseException):
    """What fails: nothing that only expects errors catches it."""


class _Strike:
    """Fails one call of the library, in whichever thread; the calls are numbered from 1, and 0 fails none."""

    def __init__(self, number: int) -> None:
        self.number, self.count, self.where = number, 0, ""
        self._lock = threading.Lock()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_qualname.removesuffix(".<locals>.<listcomp>").removesuffix(".<locals>.<lambda>")
        # What a generator raises while it is closed nobody hears; a record's constructor does no work.
        if event != "call" or name.endswith("<genexpr>") or name.startswith("__create_fn__"):
            return
        if not frame.f_globals.get("__name__", "").startswith(_PACKAGES) or name in _AGREEMENTS:
            return
        with self._lock:
            self.count += 1
            is_it = self.count == self.number
        if is_it:
            self.where = frame.f_code.co_qualname
            raise _Struck(self.where)

    @contextmanager
    def falling(self) -> Iterator[None]:
        """Inside of this block."""
        threading.setprofile(self)
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)


@dataclass(frozen=True)
class _Ended:
    """What a save came to of which a call failed."""

    where: str  # The call.
    errors: list[list[str]]  # Of each rank, the names of all errors inside the one that it raised.
    left: list[str]  # Beside the checkpoint.
    shown: int | None  # The seed of what the folder holds; None for neither.

    @property
    def is_broken(self) -> bool:
        """Whether ranks disagree, so that the group cannot be used any more."""
        return len({"_Struck" in errors for errors in self.errors}) > 1 or "RuntimeError" in self.errors[0]


def _save(rank: Rank, folder: str, seed: int, group: Any, options: dict[str, Any]) -> Callable[[], object]:
    writer = rank.component("checkpoint").HuggingFaceStorageWriter(
        folder, fqn_to_index_mapping=programs.MAPPING, process_group=group, **options
    )
    # A rank has one chunk of a tensor in a shard.
    is_cut = options.get("enable_consolidation", True)
    state = programs.share_of(rank.rank, rank.world_size, seed) if is_cut else programs.make_state(seed)
    return lambda: dcp.save(state, storage_writer=writer, process_group=group)


def _content(folder: str) -> dict[str, bytes]:
    return {name: found[-1] for name, found in tree(Path(folder)).items()}


def _raised_by(run: Callable[[], object], strike: _Strike) -> list[str]:
    try:
        with strike.falling():
            run()
    except BaseException as error:
        return [type(each).__name__ for each in errors_inside(error)]
    return []


def _impatient() -> Any:
    """A group in which ranks that wait for one that is gone give up: a comparison tells it."""
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=5))


def _counted(run: Callable[[], object], at: int, group: Any) -> int:
    """The calls of rank ``at`` that can fail."""
    counting = _Strike(0)
    with counting.falling():
        run()
    counts: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(counts, counting.count)
    return counts[at]


def _fail_each(rank: Rank, folder: str, at: int, step: int, options: dict[str, Any]) -> list[_Ended]:
    """Save by turns two states over each other, each time with another call of rank ``at`` that fails."""
    group = _impatient()
    _save(rank, folder, NEW, group, options)()
    contents = {NEW: _content(folder)}
    count = _counted(_save(rank, folder, OLD, group, options), at, group)
    contents[OLD] = _content(folder)
    shown: int | None = OLD
    ended: list[_Ended] = []
    for number in range(1 + at, count + 1, step):
        strike = _Strike(number if rank.rank == at else 0)
        run = _save(rank, folder, NEW if shown == OLD else OLD, group, options)
        found: list[Any] = [_raised_by(run, strike)] * rank.world_size
        dist.all_gather_object(found, (found[0], strike.where))
        shown = next((seed for seed, content in contents.items() if content == _content(folder)), None)
        left = leftovers(Path(folder).parent, Path(folder).name)
        ended.append(_Ended(found[at][1], [errors for errors, _ in found], left, shown))
        dist.barrier()
        if left or shown is None or ended[-1].is_broken:
            break
    return ended


@requirement(
    "CKPT-730",
    "Where any call of the library's own code fails on one rank of a save, in any of its threads, every rank MUST be "
    "told in time and the checkpoint before it stay, or the save be whole; nothing MUST be left beside it.",
)
@pytest.mark.parametrize("step", [13, pytest.param(1, marks=pytest.mark.night)])
@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("kind", sorted(_KINDS))
def test_any_call_of_a_save(checkpoint: Any, rank_pool: Any, tmp_path: Path, kind: str, at: int, step: int) -> None:
    by_rank = rank_pool.run(_fail_each, 2, str(tmp_path / "ck"), at, step, _KINDS[kind], timeout_s=600)
    before = OLD
    for each in by_rank[at]:
        where = f"{kind}, {each.where} fails on rank {at}"
        told = ["_Struck" in errors for errors in each.errors]
        assert_equal(told, [any(told)] * 2, where=f"{where}: ranks that are told, of {each.errors}")
        assert_equal(any(told) or not any(each.errors), True, where=f"{where}: other errors, {each.errors}")
        assert_equal(each.left, [], where=f"{where}: what is left")
        other = NEW if before == OLD else OLD
        assert_equal(each.shown in ({before, other} if any(told) else {other}), True, where=f"{where}: the state")
        before = each.shown
    assert_equal(len(by_rank[at]) > 1, True, where="calls that failed")


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
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=5), made._group)

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


def _fail_each_of(rank: Rank, root: str, what: str, at: int, step: int) -> list[_Ended]:
    """Run a program again and again, each time with another call of rank ``at`` that fails."""
    group, folder = _impatient(), Path(root)
    shards = {**_KINDS["shards"], "process_group": group}
    programs.save_together(rank, str(folder / "ck"), NEW, {"process_group": group})
    with rank.component("checkpoint").HuggingFaceStorageWriter(folder / "shards", **shards) as writer:
        dcp.save(programs.make_state(NEW), storage_writer=writer, process_group=group)
    _save_training(rank, folder, group)()
    _PROGRAMS["manager.save"](rank, folder, group)()
    make = _PROGRAMS[what]
    make(rank, folder, group)()
    count = _counted(make(rank, folder, group), at, group)
    kept = _folders(folder)
    ended: list[_Ended] = []
    for number in range(1 + at, count + 1, step):
        strike = _Strike(number if rank.rank == at else 0)
        found: list[Any] = [_raised_by(make(rank, folder, group), strike)] * rank.world_size
        dist.all_gather_object(found, (found[0], strike.where))
        ended.append(_Ended(found[at][1], [errors for errors, _ in found], sorted(_folders(folder) - kept), None))
        dist.barrier()
        if ended[-1].left or ended[-1].is_broken:
            return ended
    make(rank, folder, group)()
    return ended


@requirement(
    "CKPT-731",
    "Where any call of the library's own code fails on one rank of a load, of a merge on every rank, or of a save or "
    "load of a training or a manager, in any thread, every rank MUST be told in time; the next one MUST succeed.",
)
@pytest.mark.parametrize("step", [13, pytest.param(1, marks=pytest.mark.night)])
@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("what", sorted(_PROGRAMS))
def test_any_call_of_others(checkpoint: Any, rank_pool: Any, tmp_path: Path, what: str, at: int, step: int) -> None:
    by_rank = rank_pool.run(_fail_each_of, 2, str(tmp_path), what, at, step, timeout_s=600)
    for each in by_rank[at]:
        where = f"{what}, {each.where} fails on rank {at}"
        told = ["_Struck" in errors for errors in each.errors]
        assert_equal(told, [any(told)] * 2, where=f"{where}: ranks that are told, of {each.errors}")
        assert_equal(each.left, [], where=f"{where}: what is left")
    assert_equal(len(by_rank[at]) > 0, True, where="calls that failed")
