"""The rules of the house, on toy trees: each fires on what it forbids and is silent on what it allows."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

_PATH = Path(__file__).parents[1] / "checks.py"


@pytest.fixture(name="checks", scope="module")
def _checks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ci_checks", _PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
