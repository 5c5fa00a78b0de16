"""Tests of the suite that a GPU is needed for: a skip of what must run is a failure here.

python -m perf.gpu.tests conformance.offload.test_cuda --must OPT-110 OPT-111
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

__all__ = ["main", "not_run"]

# Plugins of the machine's, and options of the tree's, are not what is asked for.
_ENVIRONMENT = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
_OPTIONS = (
    "-q",
    "-rs",
    "-W",
    "default",
    "-p",
    "conformance.harness.plugin",
    "-p",
    "no:cacheprovider",
    "-o",
    "addopts=",
)


def not_run(report: dict[str, Any], must: Sequence[str]) -> Iterator[str]:
    """What stands in a report of each requirement in ``must`` that did not pass."""
    found = {requirement["id"]: requirement["outcome"] for requirement in report["requirements"]}
    for name in must:
        if found.get(name) != "passed":
            yield f"{name}: {found.get(name, 'not collected')}, expected passed"


def main(argv: Sequence[str] | None = None) -> int:
    """0 when the module passed and nothing of ``must`` was skipped."""
    parser = argparse.ArgumentParser(prog="perf.gpu.tests", description="Tests that need a GPU.")
    parser.add_argument("module")
    parser.add_argument("--device", help="as --twinproof-device of the suite")
    parser.add_argument("--must", nargs="+", default=[], metavar="ID", help="requirements that may not be skipped")
    given = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="twinproof-") as folder:
        report = Path(folder) / "report.json"
        # In this process: where it hangs, a signal to it finds the test.
        os.environ.update(_ENVIRONMENT)
        options = ["--twinproof-impl", "fastimpl", "--twinproof-verdict", str(report)]
        if given.device is not None:
            options += ["--twinproof-device", given.device]
        code = int(pytest.main([*_OPTIONS, "--pyargs", given.module, *options]))
        if not report.exists():
            print(f"pytest ended with {code} and left no report")
            return 1
        wrong = list(not_run(json.loads(report.read_text(encoding="utf-8")), given.must))
    print("\n".join(wrong) or f"pytest ended with {code}; {', '.join(given.must)} ran")
    return 1 if code or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
