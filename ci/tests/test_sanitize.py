"""Every kind of sanitizer that ci/sanitize names can be configured: it runs at night alone."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KINDS = re.findall(r"^for kind in (.*); do$", (ROOT / "ci/sanitize").read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("kind", ["", *KINDS[0].split()])
def test_kernel_tests_are_configured(kind: str, tmp_path: Path) -> None:
    folder = Path(sys.executable).parent
    cmake, ninja = (shutil.which(name, path=str(folder)) or shutil.which(name) for name in ("cmake", "ninja"))
    if cmake is None or ninja is None:
        pytest.skip("needs cmake and ninja")
    words = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}", f"-DSANITIZE={kind}"]
    command = [cmake, "-S", ROOT / "fastimpl/csrc/tests", "-B", tmp_path, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rules = (tmp_path / "build.ninja").read_text(encoding="utf-8")
    assert set(re.findall(r"-fsanitize=(\S*)", rules)) == ({kind} if kind else set())
