"""Pooling on a grid, under the prover: the host's bits in every schedule, and each planted fault is seen."""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance.meta.simt_faults import PlantedTogether
from conformance.provers.simt import Planted, build, device_usage, prove, why_no_nvcc, why_no_prover

needs_prover = pytest.mark.skipif(why_no_prover() is not None, reason=str(why_no_prover()))
needs_nvcc = pytest.mark.skipif(why_no_nvcc() is not None, reason=str(why_no_nvcc()))

_PROOF = Path(__file__).parent / "simt" / "pool.cpp"
_KERNEL, _PLAN = "pipeline/pool_kernel.h", "pipeline/pool_plan.h"

# A fault, and the kinds that a report of it may have.
_PLANTED = [
    (
        Planted(
            "the mask of the first lanes for all", _KERNEL, "- lanes)) << first()", "- lanes)) << (FAULT ? 0 : first())"
        ),
        {"mask", "shuffle-outside-mask"},
    ),
    (
        Planted(
            "ids are loaded past the bag",
            _KERNEL,
            "has_id = base + mine < end;",
            "has_id = FAULT || base + mine < end;",
        ),
        {"out-of-bounds"},
    ),
    (
        Planted(
            "ids outside are rows",
            _KERNEL,
            "const Id id = has_row ? given : Id{-1};",
            "const Id id = FAULT || has_row ? given : Id{-1};",
        ),
        {"out-of-bounds", "misaligned"},
    ),
    (
        Planted(
            "ids below zero are rows", _KERNEL, "k + r < count && row >= 0;", "k + r < count && (FAULT || row >= 0);"
        ),
        {"out-of-bounds", "misaligned"},
    ),
    (
        Planted(
            "bags of any offsets",
            _KERNEL,
            "return offset < 0 ? 0 : offset < ids.size() ? offset : ids.size();",
            "return FAULT ? offset : offset < 0 ? 0 : offset < ids.size() ? offset : ids.size();",
        ),
        {"out-of-bounds", "no-end"},
    ),
    (
        Planted(
            "rows past the bag are added",
            _KERNEL,
            "is_loaded[r] = has_columns && k + r < count &&",
            "is_loaded[r] = has_columns && (FAULT || k + r < count) &&",
        ),
        {"wrong-result"},
    ),
    (
        Planted(
            "more blocks than were asked for",
            _PLAN,
            "limited = max_blocks > 0;",
            "limited = max_blocks > (FAULT ? 1 : 0);",
        ),
        {"wrong-result"},
    ),
    (
        Planted(
            "vectors of rows at any address",
            _PLAN,
            "is_aligned(feature.rows) && ",
            "(FAULT || is_aligned(feature.rows)) && ",
        ),
        {"misaligned"},
    ),
    (
        Planted("lanes without columns store", _KERNEL, "if (has_columns) store(", "if (has_columns || FAULT) store("),
        {"race", "out-of-bounds", "wrong-result"},
    ),
    (
        Planted("a bag too many in each part", _KERNEL, "if (turn >= turns)", "if (turn >= turns + FAULT)"),
        {"race", "out-of-bounds", "wrong-result"},
    ),
    (
        Planted(
            "rows are added from the last",
            _KERNEL,
            "id, k + r, lanes)",
            "id, FAULT ? count - 1 - k - r : k + r, lanes)",
        ),
        {"wrong-result"},
    ),
    (
        Planted(
            "lanes without columns leave out a shuffle",
            _KERNEL,
            "const auto row = static_cast<int64_t>(simt::shuffle(",
            "const auto row = FAULT && !has_columns ? 0 : static_cast<int64_t>(simt::shuffle(",
        ),
        {"returned-lane", "deadlock", "out-of-bounds", "wrong-result"},
    ),
    (
        Planted(
            "few ids of a bag, and those of the next",
            _KERNEL,
            "i < ends[b + 1] - ends[b] ? ids.load",
            "FAULT || i < ends[b + 1] - ends[b] ? ids.load",
        ),
        {"out-of-bounds", "wrong-result"},
    ),
    (
        Planted(
            "few ids outside are rows",
            _KERNEL,
            "is_loaded[b] = static_cast<uint64_t>(row) <",
            "is_loaded[b] = FAULT || static_cast<uint64_t>(row) <",
        ),
        {"out-of-bounds", "misaligned"},
    ),
    (
        Planted("of many parts the first alone", _KERNEL, "listed.load(number)", "listed.load(FAULT ? 0 : number)"),
        {"race", "wrong-result", "out-of-bounds"},
    ),
    (
        Planted(
            "as many parts as are carried come as a list", _KERNEL, "count <= kCarried ?", "count + FAULT <= kCarried ?"
        ),
        {"out-of-bounds"},
    ),
    (
        Planted("more bags than are left", _KERNEL, "if (bag + b < bag_count)", "if (FAULT || bag + b < bag_count)"),
        {"race", "out-of-bounds", "wrong-result"},
    ),
    (
        Planted(
            "bags that are left out where some have many ids",
            _KERNEL,
            "bag + kBags < bag_count ? bag + kBags : bag_count;",
            "bag + kBags - FAULT < bag_count ? bag + kBags - FAULT : bag_count;",
        ),
        {"uninitialized", "wrong-result"},
    ),
]


@needs_prover
@pytest.mark.parametrize("seed_count", [1, pytest.param(10, marks=pytest.mark.night)])
def test_pooling_has_the_bits_of_the_host(seed_count: int) -> None:
    verdicts = prove(build(_PROOF), case_count=50, seed_count=seed_count)
    assert len(verdicts) == 5
    for verdict in verdicts:
        assert verdict.faults == (), "\n".join(map(str, verdict.faults))
        assert verdict.runs == 2 * 50 * seed_count


_PROGRAM = PlantedTogether(
    _PROOF,
    ("pool int32", "pool int64 weighted", "nothing to pool"),
    [planted for planted, _ in _PLANTED],
    case_count=50,
    seed_count=2,
)


@needs_prover
def test_without_a_fault_nothing_is_found() -> None:
    assert _PROGRAM.found_without() == []


@needs_prover
@pytest.mark.parametrize("number", range(1, len(_PLANTED) + 1), ids=[planted.name for planted, _ in _PLANTED])
def test_a_planted_fault_is_seen(number: int) -> None:
    planted, kinds = _PLANTED[number - 1]
    found = _PROGRAM.found(number)
    assert found
    assert {fault.kind for fault in found} <= kinds, "\n".join(map(str, found))
    # A wrong plan is seen before any kernel runs.
    assert all("Pool<" in fault.kernel or planted.file == _PLAN for fault in found)


@needs_nvcc
@pytest.mark.night  # ci/kernels.py judges the kernels as ci/setup has built them.
def test_nothing_is_spilled() -> None:
    found = device_usage(Path(__file__).parent / "simt" / "pool.cu", architectures=["80", "90", "100"])
    assert len(found) == 3 * 36
    assert [usage for usage in found if usage.spill_bytes > 0 or usage.stack_bytes > 0] == []
    assert max(usage.register_count for usage in found) <= 168
