"""The kernels of the fused step: the bits of the book under many schedules, and each planted fault is found."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from conformance.provers.simt import Planted, build, prove, why_no_prover

pytestmark = pytest.mark.skipif(why_no_prover() is not None, reason=str(why_no_prover()))

_SOURCES = Path(__file__).parent / "simt"
_HEADER = "pipeline/step_kernel.h"


def test_steps_have_the_bits_of_the_book() -> None:
    verdicts = prove(build(_SOURCES / "step.cpp"), case_count=24, seed_count=10)
    assert len(verdicts) == 6
    for verdict in verdicts:
        assert verdict.faults == (), "\n".join(map(str, verdict.faults))
        assert verdict.runs == 480


@dataclass(frozen=True)
class _Bug:
    """``old`` becomes ``new``; what is found is one of ``kinds``."""

    name: str
    old: str
    new: str
    kinds: tuple[str, ...]


_EARLY = ("race", "uninitialized")  # A load that comes too early may be that of what nobody has written yet.
_BUGS = (
    _Bug(
        "sums folded without a barrier",
        "memory.sums.store(rank, sum);\n    }\n    group.sync();",
        "memory.sums.store(rank, sum);\n    }",
        _EARLY,
    ),
    _Bug(
        "a momentum that every lane advances",
        "    if (rank == 0) {\n      const float mean",
        "    {\n      const float mean",
        ("race",),
    ),
    _Bug(
        "the mask of another group",
        "return ((1U << kLanesOfGroup) - 1) <<",
        "return ((2U << kLanesOfGroup) - 1) <<",
        ("mask", "returned-lane", "deadlock"),
    ),
    _Bug(
        "elements past the row",
        "const bool has_elements = e < table.dim;",
        "const bool has_elements = true;",
        ("out-of-bounds", "uninitialized"),
    ),
    _Bug(
        "another order of occurrences",
        "some + i < count ? some + i : count - 1;",
        "some + i < count ? count - 1 - some - i : 0;",
        ("wrong-result",),
    ),
    _Bug(
        "occurrences after a full group",
        "if (there < kLanesOfGroup) break;",
        "if (there <= kLanesOfGroup) break;",
        ("wrong-result",),
    ),
    _Bug("a group takes one more", "behind = begin + kLongRun;", "behind = begin + kLongRun + 1;", ("wrong-result",)),
    _Bug("a row of no table", "if (row >= batch.row_count) return;", "", ("out-of-bounds", "misaligned")),
    _Bug("a list that is not counted", "long_count.atomic_add(0, 1)", "long_count.atomic_load(0)", ("wrong-result",)),
    _Bug("copies not waited for", "if (i == half) simt::wait_copies<0>();", "", ("race",)),
    _Bug(
        "occurrences overwritten",
        "// Nobody still reads the occurrences before, or the row before.\n        simt::sync_block();",
        "",
        ("race",),
    ),
    _Bug(
        "a vector at an odd element",
        "simt::threads() + simt::thread()) * kVec;",
        "simt::threads() + simt::thread()) * kVec + 1;",
        ("misaligned", "out-of-bounds"),
    ),
)


@pytest.mark.parametrize("bug", _BUGS, ids=lambda bug: bug.name)
def test_planted_faults_are_found(bug: _Bug) -> None:
    program = build(_SOURCES / "step_of_one.cpp", planted=Planted(bug.name, _HEADER, bug.old, bug.new))
    (verdict,) = prove(program, case_count=9, seed_count=25)
    assert verdict.faults
    assert {fault.kind for fault in verdict.faults} <= set(bug.kinds), "\n".join(map(str, verdict.faults))
