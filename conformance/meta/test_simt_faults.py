"""Each detector of the SIMT prover fires on its fault: kind, kernel, the lines that take part, and a replay."""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance.provers.simt import KINDS, Planted, SimtError, Verdict, build, prove, replay, why_no_prover

pytestmark = pytest.mark.skipif(why_no_prover() is not None, reason=str(why_no_prover()))

_SOURCES = Path(__file__).parent / "simt"
# Few points end a loop that has no end.
_POINTS = 100_000

# Proof, kind, and what the lines of the report have in them, the later access first.
_FAULTS = [
    ("lost insert", "wrong-result", ["an id has one slot"]),
    ("no barrier", "race", ["sums.load(k)", "sums.store(simt::warp(), mine)"]),
    ("plain load of slots", "race", ["table.load(place)", "table.atomic_cas(place, 0, key)"]),
    ("no second barrier", "race", ["tile.store", "tile.load"]),
    ("vote instead of sync_warp", "race", ["tile.load(simt::lane() ^ 1)", "tile.store(simt::lane()"]),
    ("missing fence", "wrong-result", ["the payload that was published"]),
    ("block scope for another block", "race", ["flag.atomic_", "flag.atomic_"]),
    ("plain payload without release", "race", ["payload.", "payload."]),
    ("last block without release", "race", ["parts.load(b)", "parts.store(simt::block()"]),
    ("copies not waited for", "race", ["ring.load", "simt::copy_async<4>"]),
    ("one group too few", "race", ["ring.load", "simt::copy_async<4>"]),
    ("copies without a barrier", "race", ["ring.load", "simt::copy_async<4>"]),
    ("flags by stores", "wrong-result", ["one of two sees the other"]),
    ("outside of a span", "out-of-bounds", ["Slip::kOutside"]),
    ("span past its array", "out-of-bounds", ["Slip::kPastArray"]),
    ("past shared memory", "out-of-bounds", ["Slip::kPastShared"]),
    ("vector at an odd element", "misaligned", ["Slip::kVectorOffset"]),
    ("vector of a shifted array", "misaligned", ["Slip::kVector"]),
    ("shared memory that nobody wrote", "uninitialized", ["Slip::kSharedUnwritten"]),
    ("scratch that nobody wrote", "uninitialized", ["Slip::kScratchUnwritten"]),
    ("lane not in its mask", "mask", ["Slip::kNotInMask"]),
    ("masks that differ", "mask", ["Slip::kOtherMask", "Slip::kOtherMask"]),
    ("part that votes apart", "returned-lane", ["Slip::kOtherPart", "Slip::kOtherPart"]),
    ("collectives that differ", "mask", ["simt::sync_warp(kAllLanes)", "simt::ballot(kAllLanes, true)"]),
    ("shuffle from outside", "shuffle-outside-mask", ["simt::shuffle(0xFFFFU, l, 16)"]),
    ("returned lane in a mask", "returned-lane", ["simt::sync_warp(kAllLanes)"]),
    ("lane that is not there", "returned-lane", ["Slip::kNoSuchLane"]),
    ("width that is none", "misuse", ["Slip::kWidth"]),
    ("return before a barrier", "barrier-divergence", ["simt::sync_block()"]),
    ("two barriers", "barrier-divergence", ["simt::sync_block()", "simt::sync_block()"]),
    ("deadlock", "deadlock", ["simt::sync_warp(kAllLanes)", "simt::sync_block()"]),
    ("first come", "schedule-dependence", []),
    ("sum of floats by atomics", "schedule-dependence", []),
    ("wait for another block", "no-end", ["b.atomic_load(0) == 0"]),
    ("atomics of two sizes", "mixed-atomics", ["a."]),
    ("too many threads", "launch-limit", ["trial.launch"]),
    ("more than the kernel's threads", "launch-limit", ["trial.launch"]),
    ("no block", "launch-limit", ["trial.launch"]),
    ("too much shared memory", "launch-limit", ["trial.launch"]),
    ("pointer of the host", "not-device-memory", ["Slip::kScratchUnwritten"]),
]


@pytest.fixture(scope="module")
def wrong() -> Path:
    return build(_SOURCES / "wrong.cpp")


def _prove(program: Path, name: str, *policies: str, keep_going: bool = False) -> Verdict:
    (verdict,) = prove(
        program,
        only=name,
        policies=policies,
        case_count=2,
        seed_count=100,
        point_count_max=_POINTS,
        keep_going=keep_going,
    )
    return verdict


def test_every_kind_has_a_fault() -> None:
    assert {kind for _, kind, _ in _FAULTS} == set(KINDS)


@pytest.mark.parametrize(("name", "kind", "lines"), _FAULTS, ids=[name for name, _, _ in _FAULTS])
def test_a_fault_is_reported_and_replays(wrong: Path, name: str, kind: str, lines: list[str]) -> None:
    verdict = _prove(wrong, name, "random", keep_going=True)
    kinds = [fault.kind for fault in verdict.faults]
    assert kind in kinds, "\n".join(map(str, verdict.faults))
    fault = verdict.faults[kinds.index(kind)]
    assert fault.kernel.startswith("cases::")
    found = fault.lines()
    # Which of two accesses comes later is up to the schedule.
    assert len(found) == 2 or kind != "race"
    assert all(any(word in line for line in found) for word in lines), found
    if kind == "race":
        assert fault.places[0].thread != fault.places[1].thread or fault.places[0].block != fault.places[1].block
    # What differs from another run needs that run.
    if kind != "schedule-dependence":
        again = replay(wrong, only=name, token=fault.replay, point_count_max=_POINTS).faults
        assert [(f.kind, f.message, f.places) for f in again] == [(fault.kind, fault.message, fault.places)]


@pytest.mark.parametrize(("name", "kind", "lines"), _FAULTS, ids=[name for name, _, _ in _FAULTS])
def test_priorities_find_it_too(wrong: Path, name: str, kind: str, lines: list[str]) -> None:
    """A thread that runs ahead may load what nobody has written yet, where others see the race."""
    verdict = _prove(wrong, name, "priority")
    assert len(verdict.faults) == 1
    assert verdict.faults[0].kind in (kind, "uninitialized")
    assert verdict.faults[0].replay.startswith("priority/")


@pytest.mark.parametrize("outcome", ["0 0", "0 1", "1 0", "1 1"])
def test_an_exhaustive_search_meets_every_outcome(wrong: Path, outcome: str) -> None:
    for how, possible in (("stores", True), ("changes", outcome != "1 1")):
        verdict = _prove(wrong, f"{how} {outcome}", "exhaustive", keep_going=True)
        assert verdict.is_complete
        assert bool(verdict.faults) is possible
        for fault in verdict.faults:
            again = replay(wrong, only=verdict.name, token=fault.replay).faults
            assert [f.places for f in again] == [fault.places]


def test_a_search_that_was_cut_is_not_complete(wrong: Path) -> None:
    (verdict,) = prove(wrong, only="changes 1 1", policies=["exhaustive"], case_count=1, run_count_max=2)
    assert not verdict.is_complete
    assert verdict.runs == 2


def test_what_cannot_be_run_is_no_verdict(wrong: Path, tmp_path: Path) -> None:
    with pytest.raises(SimtError, match="no proof named"):
        prove(wrong, only="nothing of this name")
    with pytest.raises(SimtError, match="no token of a report"):
        replay(wrong, only="deadlock", token="random/1")
    with pytest.raises(ValueError, match="policies"):
        prove(wrong, policies=["fair"])
    crashing = tmp_path / "crash.cpp"
    crashing.write_text("#include <cstdlib>\nint main() { std::abort(); }\n", encoding="utf-8")
    with pytest.raises(SimtError, match="exit status -6"):
        prove(build(crashing))
    (tmp_path / "bad.cpp").write_text("int main() { return none; }\n", encoding="utf-8")
    with pytest.raises(SimtError, match="none"):
        build(tmp_path / "bad.cpp")


def test_a_fault_is_planted_in_one_place() -> None:
    source, place = _SOURCES / "right.cpp", "if (is_second_barrier_there) simt::sync_block();"
    program = build(source, planted=Planted("no second barrier", "kernels.h", place, ""))
    (verdict,) = prove(program, only="rounds", case_count=1)
    assert [fault.kind for fault in verdict.faults] == ["race"]
    assert prove(build(source), only="rounds", case_count=1)[0].faults == ()
    with pytest.raises(SimtError, match=r"has \d+ places, expected 1"):
        build(source, planted=Planted("everywhere", "kernels.h", "simt::", ""))
    with pytest.raises(SimtError, match="is in none of"):
        build(source, planted=Planted("nowhere", "no/such.h", "a", "b"))
