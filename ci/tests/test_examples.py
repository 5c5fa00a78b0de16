"""The deliberate mistakes of ``examples/mistakes.py`` are named by the requirement that stands for each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
# Of each component: a test that sees the mistake, its requirement, and the first difference.
MISTAKES = {
    "kvstore": ("conformance.kvstore.test_values", "test_duplicates", "KV-014", "bytes differ first at offset #"),
    "checkpoint": ("conformance.checkpoint.test_values", "test_special_floats", "CKPT-002", "# of # elements differ"),
    "offload": ("conformance.offload.test_values", "test_groups", "OPT-006", "elements differ"),
    "pipeline": ("conformance.pipeline.test_bags", "test_heavy_duplicates", "PIPE-017", "# of # elements differ"),
}


@pytest.fixture(name="verified", scope="module")
def _verified(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """The tests of all mistakes in one run: what each takes alone is the start of Python and torch."""
    modules, names = [module for module, *_ in MISTAKES.values()], [name for _, name, *_ in MISTAKES.values()]
    command = [sys.executable, "-m", "conformance.harness.cli", "verify", "--impl", "mistakes", *modules]
    options = ["-k", " or ".join(names), "-q", "--tb=no", "--show-capture=no", "-p", "no:cacheprovider"]
    path = os.pathsep.join(filter(None, (str(EXAMPLES), os.environ.get("PYTHONPATH"))))
    return subprocess.run(
        [*command, *options],
        cwd=tmp_path_factory.mktemp("verified"),
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("stem", MISTAKES)
def test_each_deliberate_mistake_is_named(stem: str, verified: subprocess.CompletedProcess[str]) -> None:
    _, _, requirement, difference = MISTAKES[stem]
    assert verified.returncode == 1, verified.stdout + verified.stderr
    cluster = next(line for line in verified.stdout.splitlines() if requirement in line)
    assert difference in cluster
