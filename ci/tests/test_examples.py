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


@pytest.mark.parametrize("stem", MISTAKES)
def test_each_deliberate_mistake_is_named(stem: str, tmp_path: Path) -> None:
    module, name, requirement, difference = MISTAKES[stem]
    command = [sys.executable, "-m", "conformance.harness.cli", "verify", "--impl", "mistakes", module, "-k", name]
    options = ["-q", "--tb=no", "--show-capture=no", "-p", "no:cacheprovider"]
    path = os.pathsep.join(filter(None, (str(EXAMPLES), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [*command, *options],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    cluster = next(line for line in done.stdout.splitlines() if requirement in line)
    assert difference in cluster
