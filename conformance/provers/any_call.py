"""Fails each call of the library's own Python in turn, on one rank, and says what became of it on every rank.

A call fails here for no reason that a test could think of, as it does where memory or threads run out, or where the
library is wrong. What the library promises then is that no rank waits for one that has gone.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any
from unittest import mock

import torch.distributed as dist

from conformance.harness.compare import assert_equal
from conformance.harness.raising import errors_inside
from twinproof.checkpoint.groups import idle_count

__all__ = ["PATIENCE", "Ended", "Strike", "Struck", "assert_told", "fail_each"]

_PARTS = re.compile(r"(\.<locals>\.<(listcomp|dictcomp|setcomp|lambda)>)+$")  # What stands in a function's own lines.
_PACKAGES = ("twinproof.", "fastimpl.", "refimpl.")
# Ranks that wait for one that is gone give up after so long: a comparison tells it.
PATIENCE = timedelta(seconds=5)
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
        "StreamedFiles.__init__",
        "StoreFiles.__init__",
        "Fingerprints.note",
        "Fingerprints.set_loaded",
        "StoreFiles.save",
        "held_by_several",
        "rank_and_world",
        "_is_group",
        "twinproof.kvstore.disk:_parts",
        "gathered",
        "_frame",
        "check_flags",
        "check_sums",
        "consolidate",
        "consolidate_safetensors_files_on_every_rank",
        "from_first",
        "gather",
        "gather_first",
        "load_native",
        "load_training",
        "on_any_rank",
        "raise_first",
        "rank_count_of",
        "save",
        "save_training",
        "scatter",
        "sendable",
        "several_ranks",
        "together",
    }
)


class Struck(BaseException):
    """What fails: nothing that only expects errors catches it."""


class Strike:
    """Fails one call of the library, in whichever thread; the calls are numbered from 1, and 0 fails none."""

    def __init__(self, number: int) -> None:
        self.number, self.count, self.where = number, 0, ""
        self._lock = threading.Lock()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        name = _PARTS.sub("", frame.f_code.co_qualname)
        # What a generator raises while it is closed nobody hears; a record's constructor does no work.
        if event != "call" or name.endswith("<genexpr>") or name.startswith("__create_fn__"):
            return
        module = frame.f_globals.get("__name__", "")
        # A name that others have too stands there with its module.
        # Groups are made, taken and noted in use before and behind all that ranks say to each other.
        if not module.startswith(_PACKAGES) or module == "twinproof.checkpoint.groups":
            return
        if name in _AGREEMENTS or f"{module}:{name}" in _AGREEMENTS:
            return
        with self._lock:
            self.count += 1
            is_it = self.count == self.number
        if is_it and not _is_closing(frame):
            self.where = frame.f_code.co_qualname
            raise Struck(self.where)

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


def _is_closing(frame: FrameType | None) -> bool:
    """Whether the call is one of those at the end, when nobody waits any more."""
    while frame is not None:
        if frame.f_code.co_name in ("close", "__exit__") and frame.f_globals.get("__name__", "").startswith(_PACKAGES):
            return True
        frame = frame.f_back
    return False


@dataclass(frozen=True)
class Ended:
    """What a program came to of which a call failed.

    Attributes:
        where: the call.
        errors: of each rank, the names of all errors inside the one that it raised.
        left: what it left behind.
        shown: what the next one finds.
    """

    where: str
    errors: list[list[str]]
    left: list[str]
    shown: Any

    @property
    def told(self) -> list[bool]:
        """Of each rank, whether it heard of the failure."""
        return ["Struck" in errors for errors in self.errors]


def _raised_by(run: Callable[[], object], strike: Strike) -> list[str]:
    try:
        with strike.falling():
            run()
    except BaseException as error:
        return [type(each).__name__ for each in errors_inside(error)]
    return []


def _groups() -> int:
    # Also of those that somebody forgot, but for what is there for the next save.
    return len(dist.distributed_c10d._world.pg_map) - idle_count()


def fail_each(
    make: Callable[[Any], Callable[[], object]], look: Callable[[], tuple[list[str], Any]], *, at: int, most: int | None
) -> list[Ended]:
    """Run a program again and again, each time with another call of rank ``at`` that fails. Called on every rank.

    Args:
        make: given a group of all ranks, the next program.
        look: what the last one left behind, and what the next one finds; first asked behind two that succeed.
        at: the rank.
        most: so many calls, evenly spread; None is each of them.
    """
    with mock.patch.object(dist.distributed_c10d, "default_pg_timeout", PATIENCE):
        group = dist.new_group(backend="gloo", timeout=PATIENCE)
        make(group)()
        look()
        dist.barrier()
        counting = Strike(0)
        run = make(group)
        with counting.falling():
            run()
        counts: list[int] = [0] * dist.get_world_size()
        dist.all_gather_object(counts, counting.count)
        look()
        dist.barrier()
        ended: list[Ended] = []
        step = 1 if most is None else max(1, counts[at] // most)
        for number in range(1 + step // 2, counts[at] + 1, step):
            ended.append(_ended(make(group), look, Strike(number if dist.get_rank() == at else 0), at))
            dist.barrier()
            if ended[-1].left or len(set(ended[-1].told)) > 1 or any("RuntimeError" in e for e in ended[-1].errors):
                return ended
        make(group)()
    return ended


def _ended(run: Callable[[], object], look: Callable[[], tuple[list[str], Any]], strike: Strike, at: int) -> Ended:
    group_count = _groups()
    found: list[Any] = [(_raised_by(run, strike), strike.where, _groups() - group_count)] * dist.get_world_size()
    dist.all_gather_object(found, found[0])
    left, shown = look()
    left += [f"{count} process groups on rank {rank}" for rank, (_, _, count) in enumerate(found) if count > 0]
    return Ended(found[at][1], [errors for errors, _, _ in found], left, shown)


def assert_told(ended: Ended, where: str) -> None:
    """Demand that all ranks were told or none, that nothing is left, and that nobody raised anything else."""
    where = f"{where}, {ended.where} fails"
    assert_equal(ended.told, [any(ended.told)] * len(ended.told), where=f"{where}: ranks told, of {ended.errors}")
    assert_equal(any(ended.told) or not any(ended.errors), True, where=f"{where}: other errors, {ended.errors}")
    assert_equal(ended.left, [], where=f"{where}: what is left")
