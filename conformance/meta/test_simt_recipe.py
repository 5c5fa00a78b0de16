"""The recipe of docs/simt.md runs as it stands, and fails as the page says once its barrier is gone."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import conformance
from conformance.provers.simt import KINDS, why_no_prover

_PAGE = Path(conformance.__file__).parent.parent / "docs" / "simt.md"
pytestmark = [
    pytest.mark.skipif(why_no_prover() is not None, reason=str(why_no_prover())),
    pytest.mark.skipif(not _PAGE.is_file(), reason="an installation has no docs"),
]


def _run(source: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "conformance.provers.simt", source.name, "--", "--seeds", "20", *arguments]
    return subprocess.run(command, cwd=source.parent, capture_output=True, text=True, timeout=300, check=False)


def test_the_recipe_runs(tmp_path: Path) -> None:
    page = _PAGE.read_text(encoding="utf-8")
    recipe = re.search(r"```cpp\n(.*?)```", page, re.DOTALL)
    assert recipe is not None
    source = tmp_path / "reverse.cpp"
    source.write_text(recipe.group(1), encoding="utf-8")
    done = _run(source)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(r"reverse: 400 runs, \d+ scheduling points, [\d.]+ s: no fault\n", done.stdout)

    barrier = "    simt::sync_block();\n"
    assert recipe.group(1).count(barrier) == 1
    source.write_text(recipe.group(1).replace(barrier, ""), encoding="utf-8")
    done = _run(source)
    assert done.returncode == 1
    shown = re.search(r"```\n(reverse: 1 runs.*?)```", page, re.DOTALL)
    assert shown is not None
    assert _without_times(done.stdout) == _without_times(shown.group(1))
    token = re.search(r"--replay (\S+)", done.stdout)
    assert token is not None
    assert _without_times(_run(source, "--replay", token.group(1)).stdout) == _without_times(done.stdout)


def _without_times(text: str) -> str:
    return re.sub(r"[\d.]+ s:", "", text)


def test_the_page_names_every_kind() -> None:
    text = _PAGE.read_text(encoding="utf-8")
    assert [kind for kind in KINDS if f"`{kind}`" not in text] == []
