"""Runs one program again and again in a folder that is put back each time, with a fault at another call."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from conformance.harness import Mismatch, assert_equal
from conformance.provers.faults import (
    CRASH_CALLS,
    WRITE_CALLS,
    Fault,
    FaultServer,
    Outcome,
    RankOutcomes,
    Trace,
    why_no_tracer,
)

__all__ = ["Crashes", "Struck", "sampled"]


@dataclass(frozen=True)
class Struck:
    """One run under one fault: the folder it left, what became of the process, and the point in words."""

    root: Path
    outcome: Outcome
    ranks: RankOutcomes | None
    where: str


class Crashes:
    """A program, its folder, and how to run it.

    Args:
        server: where processes are forked.
        folder: scratch space; the root that counts is ``root`` in it.
        prepare: fills the root before each run.
        function: the program.
        args: its arguments; ``{root}`` in a string is the root.
        world_size: so many ranks call ``function(rank, *args)``; 0 is a process without a group, and without a Rank.
        via: shim or tracer.
    """

    def __init__(
        self,
        server: FaultServer,
        folder: Path,
        prepare: Callable[[Path], object],
        function: Callable[..., object],
        *args: Any,
        world_size: int = 0,
        timeout_s: float = 30.0,
        via: Any = "shim",
    ) -> None:
        reason = why_no_tracer() if via == "tracer" else None
        if reason is not None:
            pytest.skip(reason)
        self.server, self.root, self.prepare = server, folder / "root", prepare
        self.function, self.args, self.world_size = function, args, world_size
        self.timeout_s, self.via = timeout_s, via

    def run(self, *faults: Fault, where: str = "") -> Struck:
        """Put the folder back and run under these faults."""
        shutil.rmtree(self.root, ignore_errors=True)
        self.root.mkdir(parents=True)
        self.prepare(self.root)
        args = [arg.format(root=self.root) if isinstance(arg, str) else arg for arg in self.args]
        options: dict[str, Any] = {"root": self.root, "faults": faults, "timeout_s": self.timeout_s, "via": self.via}
        if not self.world_size:
            return Struck(self.root, self.server.run_forked(self.function, *args, **options), None, where)
        ranks = self.server.run_ranks_forked(self.function, self.world_size, *args, **options)
        return Struck(self.root, ranks[0], ranks, where)

    def record(self) -> Trace:
        """The calls of a run without faults, which must succeed and be seen."""
        struck = self.run()
        for outcome in [struck.outcome] if struck.ranks is None else struck.ranks.outcomes:
            outcome.value()
        assert_equal(struck.outcome.trace.count(WRITE_CALLS) > 0, True, where="some write of the save is seen")
        return struck.outcome.trace

    def killed(self, points: Iterable[Fault] | None = None) -> Iterator[Struck]:
        """One run per crash point: killed before every call that changes files, and in the middle of every write."""
        if points is None:
            trace = self.record()
            points = [Fault(CRASH_CALLS, number, "kill") for number in range(1, trace.count(CRASH_CALLS) + 1)]
            points += [Fault(WRITE_CALLS, number, "torn") for number in range(1, trace.count(WRITE_CALLS) + 1)]
        for fault in points:
            struck = self.run(fault)
            outcomes = [struck.outcome] if struck.ranks is None else struck.ranks.outcomes
            if not any(outcome.killed for outcome in outcomes):
                raise Mismatch("a save makes other calls than the one before", got="not killed", expected=fault)
            yield self._named(struck, fault)

    def struck(self, points: Iterable[Fault]) -> Iterator[Struck]:
        """One run per fault that lets the process live; every fault must have met its call."""
        for fault in points:
            struck = self.run(fault)
            if not struck.outcome.trace.struck:
                raise Mismatch("a save makes other calls than the one before", got="not struck", expected=fault)
            yield self._named(struck, fault)

    @staticmethod
    def _named(struck: Struck, fault: Fault) -> Struck:
        event = struck.outcome.trace.struck[0]
        where = f"{fault.action} at call {fault.nth}: {event.call} {os.path.basename(event.path)} on rank {event.rank}"
        return Struck(struck.root, struck.outcome, struck.ranks, where)


def sampled(count: int, most: int) -> list[int]:
    """At most ``most`` of the numbers 1 to ``count``, the first and the last among them, evenly spread."""
    if count <= most:
        return list(range(1, count + 1))
    return sorted({1 + round(step * (count - 1) / (most - 1)) for step in range(most)})
