"""One suite of upstream's, run once: ``python -m conformance.peers.upstream.one SUITE CHECKOUT IMPL OUT``.

The test files are copied to a folder of their own, with a call before their first import that puts our names in place
of upstream's, and one at their end that takes them back: upstream's own modules go on with their own. A process that a
test starts imports the same copy, and two variables of the environment tell it what to do. ``IMPL`` is ``-`` for
upstream.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import shutil
import sys
import tempfile
import types
import unittest
from pathlib import Path
from typing import Any

import pytest

from conformance.peers.upstream.suites import SUITES, Suite

__all__ = ["main", "restore", "substitute"]

_SUITE, _IMPL = "TWINPROOF_UPSTREAM_SUITE", "TWINPROOF_UPSTREAM_IMPL"
_CALL = f"import {__name__} as _twinproof_upstream; _twinproof_upstream.{{}}()\n"
_replaced: list[tuple[Any, str, Any]] = []


def suite_of(name: str) -> Suite:
    """``project/name``."""
    return next(suite for suite in SUITES if f"{suite.project}/{suite.name}" == name)


def substitute() -> None:
    """Put our names in place of upstream's, as the environment says."""
    suite, implementation = suite_of(os.environ[_SUITE]), os.environ[_IMPL]
    for name in suite.modules:
        importlib.import_module(name)
    if implementation == "-":
        return
    ours = importlib.import_module(f"{implementation}.{suite.stem}")
    names = [name for name in ours.__all__ if suite.takes(name)]
    roots = tuple({name.split(".")[0] for name in suite.modules}) if suite.project == "torchrec" else ()
    modules = [m for n, m in list(sys.modules.items()) if n in suite.modules or n.split(".")[0] in roots]
    for module in modules:
        for name in names:
            # Upstream's own of that name, wherever it was imported to; never another thing that is called the same.
            value = vars(module).get(name)
            if getattr(value, "__name__", None) == name and value is not getattr(ours, name):
                _replaced.append((module, name, value))
                setattr(module, name, getattr(ours, name))


def restore() -> None:
    """Take our names back."""
    while _replaced:
        module, name, value = _replaced.pop()
        setattr(module, name, value)


class _Record:
    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}
        self.messages: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        name = "::".join([Path(report.nodeid.split("::")[0]).name, *report.nodeid.split("::")[1:]])
        if report.when == "call" or report.outcome != "passed":
            if self.outcomes.get(name) != "failed":
                self.outcomes[name] = report.outcome
            if report.outcome == "failed":
                lines = [line[1:].strip() for line in str(report.longrepr).splitlines() if line.startswith("E ")]
                self.messages[name] = " ".join(lines[:3])[:300]

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            name = Path(str(report.nodeid)).name
            self.outcomes[name], self.messages[name] = "failed", str(report.longrepr)[-300:]


def _copied(suite: Suite, checkout: Path, folder: Path) -> list[Path]:
    """The folder of the test files, with the calls in them."""
    target = folder / "tests"
    shutil.copytree(checkout / suite.folder, target)
    for path in target.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        for old, new in suite.replaced:
            text = text.replace(old, new)
        path.write_text(text, encoding="utf-8")
    found = []
    for name in suite.files:
        path = target / name
        if not path.exists():
            continue
        text = path.read_text(encoding="utf-8")
        body = ast.parse(text).body
        first = next(
            n
            for n in body
            if isinstance(n, (ast.Import, ast.ImportFrom)) and getattr(n, "module", None) != "__future__"
        )
        lines = text.splitlines(keepends=True)
        lines.insert(first.lineno - 1, _CALL.format("substitute"))
        last = next((n.lineno for n in body if isinstance(n, ast.If) and "__main__" in ast.dump(n.test)), None)
        text_end = len(lines) if last is None else last
        lines.insert(text_end, "\n" + _CALL.format("restore"))
        path.write_text("".join(lines), encoding="utf-8")
        found.append(path)
    return found


def _find_packages(suite: Suite, checkout: Path, folder: Path) -> None:
    for place, path in [(suite.folder, folder / "tests"), *((name, checkout / name) for name in suite.packages)]:
        dotted = place.replace("/", ".")
        if suite.project == "torchrec":
            package = types.ModuleType(dotted)
            package.__path__ = [str(path)]
            sys.modules[dotted] = package


def _lift_gpu_skips() -> None:
    real = unittest.skipIf

    def skip_if(condition: object, reason: str) -> Any:
        needs_one = "gpu" in reason.lower() and "two" not in reason
        return (lambda test: test) if condition and needs_one else real(condition, reason)

    unittest.skipIf = skip_if


def main(words: list[str]) -> int:
    """Run one suite and write what came of each test."""
    name, checkout, implementation, out = words
    suite = suite_of(name)
    os.environ[_SUITE], os.environ[_IMPL] = name, implementation
    record = _Record()
    with tempfile.TemporaryDirectory(prefix="twinproof-upstream-") as made:
        folder = Path(made)
        files = _copied(suite, Path(checkout), folder)
        for module in suite.modules:
            importlib.import_module(module)
        _find_packages(suite, Path(checkout), folder)
        if suite.lifts_gpu_skips:
            _lift_gpu_skips()
        os.chdir(folder)
        options = ["-q", "-p", "no:cacheprovider", "--tb=short", "--import-mode=importlib", "-W", "ignore"]
        options += ["--continue-on-collection-errors"]
        pytest.main([*options, "--rootdir", str(folder), *map(str, files)], plugins=[record])
        os.chdir("/")
    found = {"outcomes": record.outcomes, "messages": record.messages}
    Path(out).write_text(json.dumps(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    # The copies import this module by its name: there must be one of it only.
    sys.exit(importlib.import_module("conformance.peers.upstream.one").main(sys.argv[1:]))
