"""Kernels that check, place and move ids, under the prover: the host's numbers, and each planted fault is seen."""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance.provers.simt import Planted, build, device_usage, prove, why_no_nvcc, why_no_prover

needs_prover = pytest.mark.skipif(why_no_prover() is not None, reason=str(why_no_prover()))
needs_nvcc = pytest.mark.skipif(why_no_nvcc() is not None, reason=str(why_no_nvcc()))

_FOLDER = Path(__file__).parent / "simt"
_CHECK, _PLACE, _MOVE, _BAG = (f"pipeline/{name}_kernel.h" for name in ("check", "place", "move", "bag"))
_WORDS, _WORDS_PLAN, _SORT = "common/words_kernel.h", "common/words_plan.h", "pipeline/step_plan.h"
_PROOFS = {"checks": 3, "places": 5, "moves": 5}

_MEMORY = {"out-of-bounds", "misaligned", "wrong-result"}
_RACE = {"race", "schedule-dependence", "wrong-result", "mixed-atomics"}
_LANES = {"mask", "returned-lane", "deadlock", "shuffle-outside-mask"}

# A program, a fault in a file: what stands there and what in its place, and the kinds that a report of it may have.
_FAULTS = [
    (
        "checks",
        "a count that is not atomic",
        _CHECK,
        "found.atomic_add(0, count);",
        "found.store(0, found.load(0) + count);",
        _RACE,
    ),
    (
        "checks",
        "the position of whoever is last",
        _CHECK,
        "found.atomic_min(1, least);",
        "found.atomic_exchange(1, least);",
        _RACE,
    ),
    (
        "checks",
        "the least of half a warp",
        _CHECK,
        "unsigned by = simt::kLanes / 2; by > 0; by /= 2) {",
        "unsigned by = 8; by > 0; by /= 2) {",
        _RACE,
    ),
    (
        "checks",
        "lanes that leave before they vote",
        _CHECK,
        "const int64_t first = least_of_warp(least);",
        "if (least == kNoPosition) return; const int64_t first = least_of_warp(least);",
        _LANES,
    ),
    ("checks", "the last offset may be any", _CHECK, "(at == last && begin != id_count) ||", "", _MEMORY),
    (
        "checks",
        "ids of wrong offsets are looked at",
        _CHECK,
        "const bool is_cut = found.atomic_load(0) >= 0;",
        "const bool is_cut = true;",
        _MEMORY,
    ),
    (
        "checks",
        "ids below zero pass",
        _CHECK,
        "is_cut && static_cast<uint64_t>(",
        "(is_cut && id < 0) || static_cast<uint64_t>(",
        _MEMORY,
    ),
    ("checks", "words of the first launch", _WORDS_PLAN, "source + begin * 8", "source", _MEMORY),
    ("checks", "a word too many", _WORDS, "i < count; i +=", "i <= count; i +=", _MEMORY | _RACE),
    (
        "checks",
        "words that nobody stores",
        _WORDS,
        "int64_t i = simt::thread(); i",
        "int64_t i = simt::lane() + 1; i",
        _MEMORY | _RACE,
    ),
    (
        "places",
        "an id behind its table is a row",
        _PLACE,
        "batch.has(feature, id) ? feature.base",
        "id >= 0 ? feature.base",
        _MEMORY,
    ),
    ("places", "gradients of ids outside", _PLACE, "if (batch.has(feature, id)) {", "{", _MEMORY),
    (
        "places",
        "the lanes of another group",
        _PLACE,
        "<< (group * kSums);",
        "<< ((group + 1) * kSums % simt::kLanes);",
        _LANES,
    ),
    (
        "places",
        "a fold in another order",
        _PLACE,
        "half = kSums / 2; half > 0; half /= 2) sum",
        "half = 1; half < kSums; half *= 2) sum",
        _MEMORY,
    ),
    ("places", "every lane stores the sum", _PLACE, "if (own == 0) out.store(at, sum);", "out.store(at, sum);", _RACE),
    (
        "places",
        "the last run is not looked at",
        _BAG,
        "int64_t low = first, high = last + 1;",
        "int64_t low = first, high = last;",
        _MEMORY,
    ),
    (
        "places",
        "warps that take the same places",
        _BAG,
        "(simt::block() * warps + simt::warp()) * kOfWarp; begin < count",
        "simt::block() * warps * kOfWarp; begin < count",
        _RACE,
    ),
    (
        "places",
        "a row of none that does not fit",
        _SORT,
        "row_count <= narrow_max",
        "row_count <= narrow_max + 1",
        _MEMORY,
    ),
    ("moves", "blocks outside of the data", _MOVE, "from >= 0 && from < data.size();", "from < data.size();", _MEMORY),
    ("moves", "the next block's values", _MOVE, "(at - starts.load(block));", "(at - starts.load(0));", _MEMORY),
    (
        "moves",
        "a block that goes on",
        _MOVE,
        "is_inside = at < starts.load(block + 1) && from >= 0 && from < data.size();",
        "is_inside = true;",
        _MEMORY,
    ),
    ("moves", "buckets that are none", _MOVE, "wanted >= 0 && wanted < bucket_count ? wanted : 0;", "wanted;", _MEMORY),
    (
        "moves",
        "lengths that are not atomic",
        _MOVE,
        "lengths.atomic_add(bucket * bags + bag, 1);",
        "lengths.store(bucket * bags + bag, lengths.load(bucket * bags + bag) + 1);",
        _RACE,
    ),
    (
        "moves",
        "ids of the place that they go to",
        _MOVE,
        "out_ids.store(to, local_ids.load(from));",
        "out_ids.store(to, local_ids.load(to));",
        _MEMORY,
    ),
    ("moves", "a weight for each id or none", _MOVE, "if (weights.size() > 0) out_weights", "out_weights", _MEMORY),
]


@needs_prover
@pytest.mark.parametrize("program", _PROOFS)
def test_ids_are_those_of_the_host(program: str) -> None:
    verdicts = prove(build(_FOLDER / f"{program}.cpp"), case_count=50, seed_count=10)
    assert len(verdicts) == _PROOFS[program]
    for verdict in verdicts:
        assert verdict.faults == (), "\n".join(map(str, verdict.faults))
        assert verdict.runs == 1000


@needs_prover
@pytest.mark.parametrize("fault", _FAULTS, ids=[fault[1] for fault in _FAULTS])
def test_a_planted_fault_is_seen(fault: tuple[str, str, str, str, str, set[str]]) -> None:
    program, *planted, kinds = fault
    made = build(_FOLDER / f"{program}.cpp", planted=Planted(*planted))
    found = [each for verdict in prove(made, case_count=50, seed_count=2) for each in verdict.faults]
    assert found
    assert {each.kind for each in found} <= kinds, "\n".join(map(str, found))


@needs_nvcc
def test_nothing_is_spilled() -> None:
    found = device_usage(_FOLDER / "ids.cu", architectures=["80", "90", "100"])
    assert len(found) == 3 * 15
    assert [usage for usage in found if usage.spill_bytes > 0 or usage.stack_bytes > 0] == []
    assert max(usage.register_count for usage in found) <= 64
