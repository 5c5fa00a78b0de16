"""Tests of the suite that a GPU is needed for: a skip of what must run is a failure here.

python -m perf.gpu.tests conformance.offload.test_cuda --must OPT-110 OPT-111

Each failure is printed when it comes: a run that its limit ends leaves what it found so far.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from perf.gpu.operators import provenance, tensors_in

__all__ = ["OperatorsSeen", "main", "not_run"]

_SHOWN_CHARS = 4000  # Of a failure: its end names what differs.
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


class _AtOnce:
    """Says what failed, and where, without waiting for the end of the run."""

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self._terminal: Any = session.config.pluginmanager.get_plugin("terminalreporter")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            text = f"\nfailed: {report.nodeid}, {report.when}\n{report.longreprtext[-_SHOWN_CHARS:]}\n"
            self._terminal.write(text, flush=True)


class OperatorsSeen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Which operators of ours this thread calls with tensors of a type of device, by name."""

    def __init__(self, device_type: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device_type, self.names = device_type, set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "twinproof" and any(each.device.type == self.device_type for each in tensors_in(args)):
            self.names.add(func._schema.name.split("::")[1])
        return func(*args, **(kwargs or {}))


def not_run(report: dict[str, Any], must: Sequence[str]) -> Iterator[str]:
    """What stands in a report of each requirement in ``must`` that did not pass."""
    found = {requirement["id"]: requirement["outcome"] for requirement in report["requirements"]}
    for name in must:
        if found.get(name) != "passed":
            yield f"{name}: {found.get(name, 'not collected')}, expected passed"


def main(argv: Sequence[str] | None = None) -> int:
    """0 when the modules passed and nothing of ``must`` was skipped."""
    parser = argparse.ArgumentParser(prog="perf.gpu.tests", description="Tests that need a GPU.")
    parser.add_argument("modules", nargs="+", metavar="MODULE", help="or packages, or single tests of a module")
    parser.add_argument("--device", help="as --twinproof-device of the suite")
    parser.add_argument("--must", nargs="+", default=[], metavar="ID", help="requirements that may not be skipped")
    parser.add_argument("--operators", type=Path, metavar="FILE", help="keep which CUDA operators ran, as evidence")
    given = parser.parse_args(argv)
    seen = OperatorsSeen("cuda")
    with tempfile.TemporaryDirectory(prefix="twinproof-") as folder:
        report = Path(folder) / "report.json"
        # In this process: where it hangs, a signal to it finds the test.
        os.environ.update(_ENVIRONMENT)
        options = ["--twinproof-impl", "fastimpl", "--twinproof-verdict", str(report)]
        if given.device is not None:
            options += ["--twinproof-device", given.device]
        with seen if given.operators is not None else nullcontext():
            code = int(pytest.main([*_OPTIONS, "--pyargs", *given.modules, *options], plugins=[_AtOnce()]))
        if not report.exists():
            print(f"pytest ended with {code} and left no report")
            return 1
        wrong = list(not_run(json.loads(report.read_text(encoding="utf-8")), given.must))
    if given.operators is not None and not code and not wrong:
        # ``ci/checks.py`` looks for an operator's name here before it is called proven.
        found = {
            **provenance(),
            "cuda_operators_run": sorted(seen.names),
            "modules": given.modules,
        }
        given.operators.write_text(json.dumps(found, indent=1, default=str) + "\n", encoding="utf-8")
    print("\n".join(wrong) or f"pytest ended with {code}; {', '.join(given.must)} ran")
    return 1 if code or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
