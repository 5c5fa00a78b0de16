"""The kernels of the fused step: the bits of the book under many schedules, and each planted fault is found."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from conformance.meta.simt_faults import PlantedTogether
from conformance.provers.simt import Planted, build, prove, why_no_prover
from twinproof.optimizers import FUSED_OPTIMIZERS

pytestmark = pytest.mark.skipif(why_no_prover() is not None, reason=str(why_no_prover()))

_SOURCES = Path(__file__).parent / "simt"
_HEADER = "pipeline/step_kernel.h"


@pytest.mark.parametrize("seed_count", [1, pytest.param(10, marks=pytest.mark.night)])
def test_steps_have_the_bits_of_the_book(seed_count: int) -> None:
    verdicts = prove(build(_SOURCES / "step.cpp"), case_count=24, seed_count=seed_count)
    assert [verdict.name for verdict in verdicts] == list(FUSED_OPTIMIZERS)
    for verdict in verdicts:
        assert verdict.faults == (), "\n".join(map(str, verdict.faults))
        assert verdict.runs == 2 * 24 * seed_count


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
        "memory.sums.store(rank, sum);\n    }\n    if (!FAULT) group.sync();",
        _EARLY,
    ),
    _Bug(
        "a momentum that every lane advances",
        "    if (rank == 0) {\n      const float mean",
        "    if (rank == 0 || FAULT) {\n      const float mean",
        ("race",),
    ),
    _Bug(
        "the mask of another group",
        "return ((1U << kLanesOfGroup) - 1) <<",
        "return (((FAULT ? 2U : 1U) << kLanesOfGroup) - 1) <<",
        ("mask", "returned-lane", "deadlock"),
    ),
    _Bug(
        "elements past the row",
        "const bool has_elements = e < table.dim;",
        "const bool has_elements = FAULT || e < table.dim;",
        ("out-of-bounds", "uninitialized"),
    ),
    _Bug(
        "another order of occurrences",
        "some + i < count ? some + i : count - 1;",
        "FAULT ? (some + i < count ? count - 1 - some - i : 0) : some + i < count ? some + i : count - 1;",
        ("wrong-result",),
    ),
    _Bug(
        "occurrences after a full group",
        "if (there < kLanesOfGroup) break;",
        "if (there < kLanesOfGroup + FAULT) break;",
        ("wrong-result",),
    ),
    _Bug(
        "a group takes one more", "behind = begin + kLongRun;", "behind = begin + kLongRun + FAULT;", ("wrong-result",)
    ),
    _Bug(
        "a row of no table",
        "if (row >= batch.row_count) return;",
        "if (row >= batch.row_count && !FAULT) return;",
        ("out-of-bounds", "misaligned"),
    ),
    _Bug(
        "a list that is not counted",
        "long_count.atomic_add(0, 1)",
        "(FAULT ? long_count.atomic_load(0) : long_count.atomic_add(0, 1))",
        ("wrong-result",),
    ),
    _Bug(
        "copies not waited for",
        "if (i == half) simt::wait_copies<0>();",
        "if (i == half && !FAULT) simt::wait_copies<0>();",
        ("race",),
    ),
    _Bug(
        "occurrences overwritten",
        "// Nobody still reads the occurrences before, or the row before.\n        simt::sync_block();",
        "if (!FAULT) simt::sync_block();",
        ("race",),
    ),
    _Bug(
        "a vector at an odd element",
        "simt::threads() + simt::thread()) * kVec;",
        "simt::threads() + simt::thread()) * kVec + FAULT;",
        ("misaligned", "out-of-bounds"),
    ),
)


_PLANTED = PlantedTogether(
    _SOURCES / "step_of_one.cpp",
    ("rowwise adagrad",),
    [Planted(bug.name, _HEADER, bug.old, bug.new) for bug in _BUGS],
    case_count=9,
    seed_count=25,
)


def test_without_a_fault_nothing_is_found() -> None:
    assert _PLANTED.found_without() == []


@pytest.mark.parametrize("number", range(1, len(_BUGS) + 1), ids=[bug.name for bug in _BUGS])
def test_planted_faults_are_found(number: int) -> None:
    found = _PLANTED.found(number)
    assert found
    assert {fault.kind for fault in found} <= set(_BUGS[number - 1].kinds), "\n".join(map(str, found))
