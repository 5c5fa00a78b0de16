"""The SIMT prover gives no false alarm: right kernels pass a thousand schedules, and small ones all schedules."""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance.provers.simt import build, prove, why_no_prover

pytestmark = pytest.mark.skipif(why_no_prover() is not None, reason=str(why_no_prover()))

_RIGHT = Path(__file__).parent / "simt" / "right.cpp"
_SMALL = ("flags by changes", "message by release", "message by fence", "histogram")


def test_right_kernels_pass_a_thousand_schedules() -> None:
    verdicts = prove(build(_RIGHT), case_count=10, seed_count=50)
    assert len(verdicts) == 12
    for verdict in verdicts:
        assert verdict.faults == (), "\n".join(map(str, verdict.faults))
        assert verdict.runs == 1000
        assert verdict.points > verdict.runs


@pytest.mark.parametrize("name", _SMALL)
def test_small_kernels_pass_all_schedules(name: str) -> None:
    (verdict,) = prove(build(_RIGHT), only=name, policies=["exhaustive"], case_count=1)
    assert verdict.faults == ()
    assert verdict.is_complete
    assert verdict.runs > 1


@pytest.mark.night
def test_both_switches_of_stacks_are_the_same_machine(tmp_path: Path) -> None:
    """Where there is no assembly for the processor, ucontext takes its place."""
    slow = tmp_path / "slow.cpp"
    slow.write_text(f'#define SIMT_UCONTEXT\n#include "{_RIGHT}"\n', encoding="utf-8")
    for verdict, other in zip(
        prove(build(_RIGHT), case_count=1, seed_count=5),
        prove(build(slow, includes=[_RIGHT.parent]), case_count=1, seed_count=5),
        strict=True,
    ):
        assert (verdict.runs, verdict.points, verdict.faults) == (other.runs, other.points, other.faults)
