"""The order of ``ci/flakes``, on a toy: its seed fixes it, and it finds a test that needs another one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_NEEDY = """
import state

def test_first():
    state.ready = True

def test_needs_the_first():
    assert state.ready
"""
_OTHERS = """
import pytest

@pytest.mark.parametrize("n", range(6))
def test_alone(n):
    pass

@pytest.mark.parametrize("n", ["planted:a-1", "planted:a-2", "planted:a-3", "planted:b-1", "planted:b-2"])
def test_planted(n):
    pass
"""


def _run(folder: Path, seed: int) -> tuple[int, list[str]]:
    (folder / "state.py").write_text("ready = False\n")
    (folder / "test_needy.py").write_text(_NEEDY)
    (folder / "test_others.py").write_text(_OTHERS)
    words = [sys.executable, "-m", "pytest", "-v", "-p", "ci.shuffled", "--shuffle-seed", str(seed), "-c", "/dev/null"]
    words += ["-p", "no:cacheprovider", "--rootdir", str(folder), str(folder)]
    environment = {"PYTHONPATH": f"{_ROOT}:{folder}", "PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert f"--shuffle-seed {seed}" in done.stdout
    return done.returncode, re.findall(r"^(\S+?::\S+) (?:PASSED|FAILED)", done.stdout, re.MULTILINE)


@pytest.mark.night
def test_orders(tmp_path: Path) -> None:
    runs = {seed: _run(tmp_path, seed) for seed in range(6)}
    assert _run(tmp_path, 3) == runs[3]
    orders = [order for _, order in runs.values()]
    assert len({tuple(order) for order in orders}) == len(orders)
    for order in orders:
        assert sorted(order) == sorted(orders[0])
        assert len(order) == 13
        bugs = [name.partition("planted:")[2][:1] for name in order if "planted:" in name]
        assert "".join(bugs) in ("aaabb", "bbaaa")
    # A test that needs another fails exactly in the orders in which it comes first.
    for code, order in runs.values():
        names = [name.partition("::")[2] for name in order]
        assert (code == 0) == (names.index("test_first") < names.index("test_needs_the_first"))
    assert {code for code, _ in runs.values()} == {0, 1}


def test_a_seed_is_demanded(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "pytest", "-p", "ci.shuffled", "-c", "/dev/null", str(tmp_path)]
    done = subprocess.run(words, cwd=_ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 4
    assert "--shuffle-seed" in done.stderr
