"""What ``ci/test`` asks in turns is there: a line of no test would leave out nothing, in silence."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]


def _lines() -> list[str]:
    return [line for line in (_ROOT / "ci/in_turns").read_text().splitlines() if not line.startswith("#")]


def test_every_line_is_of_a_test() -> None:
    lines = _lines()
    assert len(lines) == len(set(lines)) > 100
    for line in lines:
        file, _, name = line.partition("::")
        assert re.search(rf"^def {name}\(", (_ROOT / "conformance" / file).read_text(), re.M), line


def test_no_test_is_asked_in_no_turn() -> None:
    """A line takes along tests whose names begin with it: those that have lines, too, are of the same turn."""
    turns = {line: number % 2 for number, line in enumerate(_lines())}
    torn = [
        (line, other) for line in turns for other in turns if other.startswith(line) and turns[line] != turns[other]
    ]
    assert torn == []


def test_both_turns_have_tests_of_each_component() -> None:
    for turn in (0, 1):
        counts = Counter(line.partition("/")[0] for line in _lines()[turn::2])
        assert sorted(counts) == ["checkpoint", "kvstore", "offload", "pipeline"]


@pytest.mark.parametrize("turn", ["2", "-1", "01", "none"])
def test_another_turn_is_refused(turn: str) -> None:
    ended = subprocess.run(["bash", _ROOT / "ci/test", turn], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (2, f"usage: ci/test [0|1|all]; got: {turn}\n")
