"""Several saves and loads with the same objects."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import settings

from conformance.checkpoint.sequences import SequenceMachine, program_on
from conformance.harness import assert_equal, examples, requirement, run_machine
from conformance.provers.faults import FaultServer


@requirement(
    "CKPT-500",
    "One writer and one reader MUST serve any sequence of saves and loads of other states, orders, shapes, shardings "
    "and folders as fresh ones would, saves that fail on one rank among them, and hold no state and no file.",
)
def test_any_sequence(checkpoint: Any, rank_pool: Any, tmp_path: Path) -> None:
    class Machine(SequenceMachine):
        pool, root = rank_pool, tmp_path

    # Few programs are drawn, and some of them hold nothing.
    few, more = ({f"w{place}": ("F32", (4, 3), place) for place in range(count)} for count in (1, 3))
    steps = [
        ("save", "a", few, 0, None),
        ("save", "b", more, 0, 1),
        ("save", "b", more, 1, None),
        ("load", "a", few, 1),
    ]
    (tmp_path / "first").mkdir()
    rank_pool.run(program_on, 2, str(tmp_path / "first"), {"checksums": True}, 2, False, steps)
    run_machine(Machine, settings=settings(examples(5), stateful_step_count=5))


class RecordedRanks:
    """Ranks whose calls on files are recorded, in place of a pool of ranks."""

    def __init__(self, server: FaultServer, root: Path) -> None:
        self._server, self._root = server, root

    def run(self, function: Callable[..., object], world: int, *args: Any) -> None:
        """All ranks, then a look at the order of what they wrote, synced and showed."""
        found = self._server.run_ranks_forked(function, world, *args, root=self._root, timeout_s=60.0)
        for outcome in found.outcomes:
            outcome.value()
        trace = found[0].trace
        wrong = [
            f"{item.kind}: {item.path.removeprefix(trace.root)}: {item.detail}" for item in trace.order_violations()
        ]
        assert_equal(wrong, [], where="what a power cut could destroy")


@requirement(
    "CKPT-501",
    "Each of several durable saves with one writer, by all ranks, MUST sync its files before it shows them, the first "
    "as the last, whatever was saved, loaded or failed before.",
)
def test_synced_in_any_sequence(checkpoint: Any, server: FaultServer, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()

    class Machine(SequenceMachine):
        pass

    Machine.pool, Machine.root = RecordedRanks(server, root), root
    run_machine(Machine, settings=settings(examples(3), stateful_step_count=3))
