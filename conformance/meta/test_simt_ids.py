"""Kernels that check, place and move ids, under the prover: the host's numbers, and each planted fault is seen."""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance.meta.simt_faults import PlantedTogether
from conformance.provers.simt import Planted, build, device_usage, prove, why_no_nvcc, why_no_prover

needs_prover = pytest.mark.skipif(why_no_prover() is not None, reason=str(why_no_prover()))
needs_nvcc = pytest.mark.skipif(why_no_nvcc() is not None, reason=str(why_no_nvcc()))

_FOLDER = Path(__file__).parent / "simt"
_CHECK, _PLACE, _MOVE, _BAG = (f"pipeline/{name}_kernel.h" for name in ("check", "place", "move", "bag"))
_WORDS, _WORDS_PLAN, _SORT = "common/words_kernel.h", "common/words_plan.h", "pipeline/step_plan.h"
_PROOF_COUNT = 13

_MEMORY = {"out-of-bounds", "misaligned", "wrong-result"}
_RACE = {"race", "schedule-dependence", "wrong-result", "mixed-atomics"}
_LANES = {"mask", "returned-lane", "deadlock", "shuffle-outside-mask"}

# A fault in a file: what stands there and what in its place, and the kinds that a report of it may have.
_FAULTS = {
    "checks": [
        (
            Planted(
                "a count that is not atomic",
                _CHECK,
                "found.atomic_add(0, count);",
                "if (FAULT) found.store(0, found.load(0) + count); else found.atomic_add(0, count);",
            ),
            _RACE,
        ),
        (
            Planted(
                "the position of whoever is last",
                _CHECK,
                "found.atomic_min(1, least);",
                "if (FAULT) found.atomic_exchange(1, least); else found.atomic_min(1, least);",
            ),
            _RACE,
        ),
        (
            Planted(
                "the least of half a warp",
                _CHECK,
                "unsigned by = simt::kLanes / 2; by > 0; by /= 2) {",
                "unsigned by = FAULT ? 8 : simt::kLanes / 2; by > 0; by /= 2) {",
            ),
            _RACE,
        ),
        (
            Planted(
                "lanes that leave before they vote",
                _CHECK,
                "const int64_t first = least_of_warp(least);",
                "if (FAULT && least == kNoPosition) return;\n    const int64_t first = least_of_warp(least);",
            ),
            _LANES,
        ),
        (
            Planted(
                "the last offset may be any",
                _CHECK,
                "(at == last && begin != id_count) ||",
                "(at == last && begin != id_count && !FAULT) ||",
            ),
            _MEMORY,
        ),
        (
            Planted(
                "ids of wrong offsets are looked at",
                _CHECK,
                "const bool is_cut = found.atomic_load(0) >= 0;",
                "const bool is_cut = FAULT || found.atomic_load(0) >= 0;",
            ),
            _MEMORY,
        ),
        (
            Planted(
                "ids below zero pass",
                _CHECK,
                "is_cut && (rows < 0 || static_cast<uint64_t>(",
                "(FAULT && is_cut && id < 0) || (FAULT || is_cut) && (rows < 0 || static_cast<uint64_t>(",
            ),
            _MEMORY,
        ),
        (
            Planted(
                "a table of all ids has rows",
                _CHECK,
                "const int64_t rows = row_counts.load(feature);",
                "const int64_t rows = FAULT && row_counts.load(feature) < 0 ? 9 : row_counts.load(feature);",
            ),
            _MEMORY,
        ),
        (
            Planted("words of the first launch", _WORDS_PLAN, "source + begin * 8", "source + (FAULT ? 0 : begin * 8)"),
            _MEMORY,
        ),
        (
            Planted("a word too many", _WORDS, "i < count; i +=", "i < count + FAULT; i +="),
            _MEMORY | _RACE,
        ),
        (
            Planted(
                "words that nobody stores",
                _WORDS,
                "int64_t i = simt::thread(); i",
                "int64_t i = FAULT ? simt::lane() + 1 : simt::thread(); i",
            ),
            _MEMORY | _RACE,
        ),
    ],
    "places": [
        (
            Planted(
                "an id behind its table is a row",
                _PLACE,
                "batch.has(feature, id) ? feature.base",
                "(FAULT ? id >= 0 : batch.has(feature, id)) ? feature.base",
            ),
            _MEMORY,
        ),
        (
            Planted(
                "gradients of ids outside",
                _PLACE,
                "if (batch.has(feature, id)) {",
                "if (FAULT || batch.has(feature, id)) {",
            ),
            _MEMORY,
        ),
        (
            Planted(
                "the lanes of another group",
                _PLACE,
                "<< (group * kSums);",
                "<< (FAULT ? (group + 1) * kSums % simt::kLanes : group * kSums);",
            ),
            _LANES,
        ),
        (
            Planted(
                "a fold in another order",
                _PLACE,
                "half = kSums / 2; half > 0; half /= 2) sum",
                "half = FAULT ? 1 : kSums / 2; half > 0 && half < kSums; half = FAULT ? half * 2 : half / 2) sum",
            ),
            _MEMORY,
        ),
        (
            Planted(
                "every lane stores the sum",
                _PLACE,
                "if (own == 0) out.store(at, sum);",
                "if (own == 0 || FAULT) out.store(at, sum);",
            ),
            _RACE,
        ),
        (
            Planted(
                "the last run is not looked at",
                _BAG,
                "int64_t low = first, high = last + 1;",
                "int64_t low = first, high = last + (FAULT ? 0 : 1);",
            ),
            _MEMORY,
        ),
        (
            Planted(
                "warps that take the same places",
                _BAG,
                "(simt::block() * warps + simt::warp()) * kOfWarp; begin < count",
                "(simt::block() * warps + (FAULT ? 0 : simt::warp())) * kOfWarp; begin < count",
            ),
            _RACE,
        ),
        (
            Planted(
                "a row of none that does not fit", _SORT, "row_count <= narrow_max", "row_count <= narrow_max + FAULT"
            ),
            _MEMORY,
        ),
    ],
    "moves": [
        (
            Planted(
                "blocks outside of the data",
                _MOVE,
                "from >= 0 && from < data.size();",
                "(FAULT || from >= 0) && from < data.size();",
            ),
            _MEMORY,
        ),
        (
            Planted(
                "the next block's values",
                _MOVE,
                "(at - starts.load(block));",
                "(at - starts.load(FAULT ? 0 : block));",
            ),
            _MEMORY,
        ),
        (
            Planted(
                "a block that goes on",
                _MOVE,
                "is_inside = at < starts.load(block + 1) &&",
                "is_inside = FAULT || at < starts.load(block + 1) &&",
            ),
            _MEMORY,
        ),
        (
            Planted(
                "buckets that are none",
                _MOVE,
                "wanted >= 0 && wanted < bucket_count ? wanted : 0;",
                "FAULT || (wanted >= 0 && wanted < bucket_count) ? wanted : 0;",
            ),
            _MEMORY,
        ),
        (
            Planted(
                "lengths that are not atomic",
                _MOVE,
                "lengths.atomic_add(bucket * bags + bag, 1);",
                "if (FAULT) lengths.store(bucket * bags + bag, lengths.load(bucket * bags + bag) + 1);\n"
                "      else lengths.atomic_add(bucket * bags + bag, 1);",
            ),
            _RACE,
        ),
        (
            Planted(
                "ids of the place that they go to",
                _MOVE,
                "out_ids.store(to, local_ids.load(from));",
                "out_ids.store(to, local_ids.load(FAULT ? to : from));",
            ),
            _MEMORY,
        ),
        (
            Planted(
                "a weight for each id or none",
                _MOVE,
                "if (weights.size() > 0) out_weights",
                "if (weights.size() > 0 || FAULT) out_weights",
            ),
            _MEMORY,
        ),
    ],
}
# A proof that reaches the faults of each group; what another proof of it sees is beside.
_REACHES = {"checks": "checks", "places": "places", "moves": "blocks"}
_SEEN_BY = {
    "words of a launch": {"words of the first launch", "a word too many", "words that nobody stores"},
    "gradients of weights": {
        "gradients of ids outside",
        "the lanes of another group",
        "a fold in another order",
        "every lane stores the sum",
    },
    "four bytes where they fit": {"a row of none that does not fit"},
    "buckets": {
        "buckets that are none",
        "lengths that are not atomic",
        "ids of the place that they go to",
        "a weight for each id or none",
    },
}
_PROGRAM = PlantedTogether(
    _FOLDER / "ids.cpp",
    (*_REACHES.values(), *_SEEN_BY),
    [planted for faults in _FAULTS.values() for planted, _ in faults],
    case_count=50,
    seed_count=2,
)
_EACH = [(group, planted.name, kinds) for group, faults in _FAULTS.items() for planted, kinds in faults]
_NUMBERED = [
    pytest.param(
        number, next((proof for proof, seen in _SEEN_BY.items() if name in seen), _REACHES[group]), kinds, id=name
    )
    for number, (group, name, kinds) in enumerate(_EACH, start=1)
]


@needs_prover
@pytest.mark.parametrize("seed_count", [1, pytest.param(10, marks=pytest.mark.night)])
def test_ids_are_those_of_the_host(seed_count: int) -> None:
    verdicts = prove(build(_FOLDER / "ids.cpp"), case_count=50, seed_count=seed_count)
    assert len(verdicts) == _PROOF_COUNT
    for verdict in verdicts:
        assert verdict.faults == (), "\n".join(map(str, verdict.faults))
        assert verdict.runs == 2 * 50 * seed_count


@needs_prover
def test_without_a_fault_nothing_is_found() -> None:
    assert _PROGRAM.found_without() == []


@needs_prover
@pytest.mark.parametrize(("number", "proof", "kinds"), _NUMBERED)
def test_a_planted_fault_is_seen(number: int, proof: str, kinds: set[str]) -> None:
    found = _PROGRAM.found(number, proof)
    assert found
    assert {each.kind for each in found} <= kinds, "\n".join(map(str, found))


@needs_nvcc
@pytest.mark.night  # ci/kernels.py judges the kernels as ci/setup has built them.
def test_nothing_is_spilled() -> None:
    found = device_usage(_FOLDER / "ids.cu", architectures=["80", "90", "100"])
    assert len(found) == 3 * 15
    assert [usage for usage in found if usage.spill_bytes > 0 or usage.stack_bytes > 0] == []
    assert max(usage.register_count for usage in found) <= 64
