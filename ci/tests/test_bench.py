"""``ci/bench`` refuses what cannot decide anything before it builds or measures."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["HEAD", "--pairs", "2"], "--pairs 2 decides nothing: expected 1, or at least 3"),
        (["HEAD", "kvstore", "--pairs", "0"], "bash ci/bench BASE"),
        (["HEAD", "perf/bench_kvstore.py"], "bash ci/bench BASE"),
        (["perf/bench_kvstore.py"], "perf/bench_kvstore.py is a file, expected a commit"),
        (["no-such-commit"], "no commit is called no-such-commit"),
    ],
)
def test_a_comparison_that_cannot_be_made_is_refused(words: list[str], message: str) -> None:
    # Whatever it did instead would take minutes.
    command = ["bash", str(ROOT / "ci/bench"), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
