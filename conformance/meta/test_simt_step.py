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
_HEADER, _BATCH, _FEW = (f"pipeline/{name}.h" for name in ("step_kernel", "step_batch", "step_few_kernel"))


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
    header: str = _HEADER


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
        _BATCH,
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
    _Bug(
        "squares read before all are there",
        "squares);\n    }\n    group.sync();",
        "squares);\n    }\n    if (!FAULT) group.sync();",
        _EARLY,
        _FEW,
    ),
    _Bug(
        "squares overwritten before all are read",
        "// The squares of the next rows overwrite these.\n    group.sync();",
        "if (!FAULT) group.sync();",
        ("race",),
        _FEW,
    ),
    _Bug(
        "running sums added in another order",
        "half = kSums / 2; half > 0; half /= 2) sum",
        "half = FAULT ? 1 : kSums / 2; half > 0 && half < kSums; half = FAULT ? half * 2 : half / 2) sum",
        ("wrong-result",),
        _FEW,
    ),
    _Bug(
        "few occurrences, the last first",
        "rows.lane[r] + turn : rows.lane[r];",
        "rows.lane[r] + (FAULT ? rows.length[r] - 1 - turn : turn) : rows.lane[r];",
        ("wrong-result",),
        _FEW,
    ),
    _Bug(
        "a row that ends in another group",
        "ends == 0 ? kLanesOfGroup : simt",
        "ends == 0 ? (FAULT ? 1 : kLanesOfGroup) : simt",
        ("wrong-result", "race"),
        _FEW,
    ),
    _Bug(
        "few occurrences of no table",
        "is_first = mine.row < batch.row_count &&",
        "is_first = (FAULT || mine.row < batch.row_count) &&",
        ("out-of-bounds", "misaligned"),
        _FEW,
    ),
    _Bug(
        "rows of two tables as one's",
        "simt::ballot(group.mask(), mine.table == number);",
        "simt::ballot(group.mask(), FAULT ? mine.table >= 0 : mine.table == number);",
        ("out-of-bounds", "misaligned", "wrong-result", "race"),
        _FEW,
    ),
    _Bug(
        "rows wider than a group",
        "if (table.dim > kElements) continue;",
        "if (table.dim > kElements && !FAULT) continue;",
        ("wrong-result",),
        _FEW,
    ),
    _Bug(
        "the momentum of the row before",
        "group.rank() == i * kSums && rows.length[r] > 0",
        "group.rank() == (FAULT ? 0 : i * kSums) && rows.length[r] > 0",
        ("wrong-result",),
        _FEW,
    ),
    _Bug(
        "rows that are done twice",
        "list(group, is_first && (done >> simt::lane() & 1) == 0, at);",
        "list(group, is_first && (FAULT || (done >> simt::lane() & 1) == 0), at);",
        ("wrong-result", "race"),
        _FEW,
    ),
    _Bug(
        "a list of others that is not counted",
        "begin = other_count.atomic_add(0, simt::count_lanes(others));",
        "begin = other_count.atomic_add(0, FAULT ? 1 : simt::count_lanes(others));",
        ("wrong-result", "race"),
        _FEW,
    ),
    _Bug(
        "others of a group at one place",
        "simt::count_lanes(others & (own - 1)), at);",
        "(FAULT ? 0 : simt::count_lanes(others & (own - 1))), at);",
        ("wrong-result", "race", "uninitialized"),
        _FEW,
    ),
    _Bug(
        "listed rows left out",
        "number < count; number += simt::blocks() * groups)\n      step(",
        "number < count - FAULT; number += simt::blocks() * groups)\n      step(",
        ("wrong-result",),
    ),
)


_PLANTED = PlantedTogether(
    _SOURCES / "step_of_one.cpp",
    ("rowwise adagrad",),
    [Planted(bug.name, bug.header, bug.old, bug.new) for bug in _BUGS],
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
