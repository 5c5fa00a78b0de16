"""Pooling on a grid, under the prover: the host's bits in every schedule, and each planted fault is seen."""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance.provers.simt import Planted, build, device_usage, prove, why_no_nvcc, why_no_prover

needs_prover = pytest.mark.skipif(why_no_prover() is not None, reason=str(why_no_prover()))
needs_nvcc = pytest.mark.skipif(why_no_nvcc() is not None, reason=str(why_no_nvcc()))

_PROOF = Path(__file__).parent / "simt" / "pool.cpp"
_KERNEL, _PLAN = "pipeline/pool_kernel.h", "pipeline/pool_plan.h"

# A fault, and the kinds that a report of it may have.
_PLANTED = [
    (
        Planted("the mask of the first lanes for all", _KERNEL, "- lanes)) << first()", "- lanes))"),
        {"mask", "shuffle-outside-mask"},
    ),
    (
        Planted("ids are loaded past the bag", _KERNEL, "has_id = base + mine < end;", "has_id = true;"),
        {"out-of-bounds"},
    ),
    (
        Planted("ids outside are rows", _KERNEL, "const Id id = has_row ? given : Id{-1};", "const Id id = given;"),
        {"out-of-bounds", "misaligned"},
    ),
    (
        Planted("ids below zero are rows", _KERNEL, "k + r < count && row >= 0;", "k + r < count;"),
        {"out-of-bounds", "misaligned"},
    ),
    (
        Planted(
            "bags of any offsets",
            _KERNEL,
            "return offset < 0 ? 0 : offset < ids.size() ? offset : ids.size();",
            "return offset;",
        ),
        {"out-of-bounds", "no-end"},
    ),
    (
        Planted(
            "rows past the bag are added",
            _KERNEL,
            "is_loaded[r] = has_columns && k + r < count &&",
            "is_loaded[r] = has_columns &&",
        ),
        {"wrong-result"},
    ),
    (
        Planted("more blocks than were asked for", _PLAN, "max_blocks > 0 ?", "max_blocks > 1 ?"),
        {"wrong-result"},
    ),
    (
        Planted("vectors of rows at any address", _PLAN, "is_aligned(feature.rows) && ", ""),
        {"misaligned"},
    ),
    (
        Planted("lanes without columns store", _KERNEL, "if (has_columns) store(", "store("),
        {"race", "out-of-bounds", "wrong-result"},
    ),
    (
        Planted("a bag too many in each part", _KERNEL, "if (bag >= bag_count)", "if (bag > bag_count)"),
        {"race", "out-of-bounds", "wrong-result"},
    ),
    (
        Planted("rows are added from the last", _KERNEL, "id, k + r, lanes)", "id, count - 1 - k - r, lanes)"),
        {"wrong-result"},
    ),
    (
        Planted(
            "lanes without columns leave out a shuffle",
            _KERNEL,
            "const auto row = static_cast<int64_t>(simt::shuffle(mask(), id, k + r, lanes));",
            "const auto row = has_columns ? static_cast<int64_t>(simt::shuffle(mask(), id, k + r, lanes)) : 0;",
        ),
        {"returned-lane", "deadlock", "out-of-bounds", "wrong-result"},
    ),
]


@needs_prover
def test_pooling_has_the_bits_of_the_host() -> None:
    verdicts = prove(build(_PROOF), case_count=50, seed_count=10)
    assert len(verdicts) == 5
    for verdict in verdicts:
        assert verdict.faults == (), "\n".join(map(str, verdict.faults))
        assert verdict.runs == 1000


@needs_prover
@pytest.mark.parametrize(("planted", "kinds"), _PLANTED, ids=[planted.name for planted, _ in _PLANTED])
def test_a_planted_fault_is_seen(planted: Planted, kinds: set[str]) -> None:
    found = [
        fault
        for verdict in prove(build(_PROOF, planted=planted), case_count=50, seed_count=2)
        for fault in verdict.faults
    ]
    assert found
    assert {fault.kind for fault in found} <= kinds, "\n".join(map(str, found))
    # A wrong plan is seen before any kernel runs.
    assert all("Pool<" in fault.kernel or planted.file == _PLAN for fault in found)


@needs_nvcc
def test_nothing_is_spilled() -> None:
    found = device_usage(Path(__file__).parent / "simt" / "pool.cu", architectures=["80", "90", "100"])
    assert len(found) == 3 * 24
    assert [usage for usage in found if usage.spill_bytes > 0 or usage.stack_bytes > 0] == []
    assert max(usage.register_count for usage in found) <= 96
