"""The rules of the house, on toy trees: each fires on what it forbids and is silent on what it allows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(name="checks", scope="module")
def _checks(program: Callable[[str], Any]) -> Any:
    return program("checks")


@pytest.mark.parametrize(
    ("name", "line", "is_found"),
    [
        ("twinproof/kvstore/toy.py", "CHUNK_ROWS = 65536\n", True),
        ("twinproof/kvstore/toy.py", "_CHUNK_BYTES = 16 << 20  # Of rows.\n", True),
        ("twinproof/kvstore/toy.py", "CHUNK_ROWS = regime(65536, 3)\n", False),
        ("twinproof/kvstore/toy.py", "LEVELS = 9\n", False),
        ("twinproof/kvstore/deltas.py", "DIGEST_BYTES = 64\n", False),
        ("twinproof/kvstore/deltas.py", "CHUNK_ROWS = 64\n", True),
        ("fastimpl/kvstore/toy.py", "CHUNK_ROWS = 65536\n", True),
        ("refimpl/toy.py", "CHUNK_ROWS = 65536\n", False),
        ("fastimpl/csrc/kvstore/toy.h", "constexpr int64_t kRows = 4096;\n", True),
        ("fastimpl/csrc/kvstore/toy.h", "constexpr int64_t kRows = regime(4096, 2);\n", False),
        ("fastimpl/csrc/kvstore/toy.h", "  if (count < 512) {\n", True),
    ],
)
def test_numbers_that_decide_a_way_are_regimes(
    checks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, line: str, is_found: bool
) -> None:
    monkeypatch.setattr(checks, "ROOT", tmp_path)
    path = tmp_path / name
    path.parent.mkdir(parents=True)
    path.write_text(line)
    assert bool(list(checks.regimes([path]))) == is_found


_LIBRARY = """[project]
version = "1.0"
dependencies = ["torch>=2.11", "safetensors>=0.8"]
[tool.scikit-build]
wheel.packages = ["twinproof", "refimpl", "fastimpl"]
"""
_SUITE = """[project]
version = "1.0"
dependencies = ["twinproof==1.0", "pytest>=9"]
[tool.scikit-build]
wheel.packages = { "conformance" = "../conformance", "perf" = "../perf" }
"""


@pytest.mark.parametrize(
    ("name", "before", "after", "said"),
    [
        ("pyproject.toml", "", "", ""),
        ("pyproject.toml", '"safetensors>=0.8"', '"safetensors>=0.8", "numpy"', "got dependencies ['numpy'"),
        ("pyproject.toml", ', "fastimpl"', "", "got packages ['refimpl', 'twinproof']"),
        ("pyproject.toml", '"1.0"', '"1.1"', "must be 1.1"),
        ("conformance/pyproject.toml", "twinproof==1.0", "twinproof>=1.0", "must be 1.0"),
        ("conformance/pyproject.toml", ', "perf" = "../perf"', "", "got packages ['conformance']"),
        ("twinproof/toy.py", "", "import os\nfrom refimpl import pipeline\nimport torch.nn\n", ""),
        ("twinproof/toy.py", "", "def f():\n    import numpy\n", "toy.py:2: the library does not depend on numpy"),
        ("perf/toy.py", "", "import numpy\n", ""),
    ],
)
def test_two_distributions(
    checks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, before: str, after: str, said: str
) -> None:
    monkeypatch.setattr(checks, "ROOT", tmp_path)
    texts = {"pyproject.toml": _LIBRARY, "conformance/pyproject.toml": _SUITE}
    texts[name] = texts.get(name, "").replace(before, after, 1) if before else texts.get(name, after)
    for place, text in texts.items():
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text(text, encoding="utf-8")
    found = list(checks.distributions([tmp_path / place for place in texts]))
    assert [said in line for line in found] == [True] * bool(said), found
