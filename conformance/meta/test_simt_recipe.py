"""The recipe of docs/simt.md runs as it stands, and fails as the page shows once its barrier is gone.

``ci/checks.py`` compares the page with ``simt/reverse.cpp`` and ``simt/reverse.txt``.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from conformance.provers import simt
from conformance.provers.simt import KINDS, why_no_prover

_SHOWN = Path(__file__).parent / "simt"
needs_prover = pytest.mark.skipif(why_no_prover() is not None, reason=str(why_no_prover()))


def _run(source: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "conformance.provers.simt", source.name, "--", "--seeds", "20", *arguments]
    return subprocess.run(command, cwd=source.parent, capture_output=True, text=True, timeout=300, check=False)


def _without_times(text: str) -> str:
    return re.sub(r"[\d.]+ s:", "", text)


@pytest.mark.night
@needs_prover
def test_the_recipe_runs(tmp_path: Path) -> None:
    recipe = (_SHOWN / "reverse.cpp").read_text(encoding="utf-8")
    source = tmp_path / "reverse.cpp"
    source.write_text(recipe, encoding="utf-8")
    done = _run(source)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(r"reverse: 400 runs, \d+ scheduling points, [\d.]+ s: no fault\n", done.stdout)

    barrier = "    simt::sync_block();\n"
    assert recipe.count(barrier) == 1
    source.write_text(recipe.replace(barrier, ""), encoding="utf-8")
    done = _run(source)
    assert done.returncode == 1
    assert _without_times(done.stdout) == _without_times((_SHOWN / "reverse.txt").read_text(encoding="utf-8"))
    token = re.search(r"--replay (\S+)", done.stdout)
    assert token is not None
    assert _without_times(_run(source, "--replay", token.group(1)).stdout) == _without_times(done.stdout)


def test_kinds_are_those_of_the_prover() -> None:
    header = Path(str(simt.__file__)).parent / "include" / "simt" / "fault.h"
    kinds = re.findall(r'\*k\w+ = "([\w-]+)"', header.read_text(encoding="utf-8"))
    assert sorted(kinds) == sorted(KINDS)
