"""Fixtures of the meta tests: pytest runs inside pytest, over toy packages."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing import forkserver, resource_tracker
from textwrap import dedent

import pytest
import torch._dynamo
import torch.distributed.checkpoint

from conformance import harness
from conformance.provers import pretend_device

# A pytest inside of this one forgets what it imported; what was imported before it stays, and torch has to. So has the
# server that ranks are forked from: each run would start its own, which imports torch again.
_IMPORTED_FIRST = (
    torch,
    # Its operators can be registered once.
    torch._dynamo,
    forkserver,
    resource_tracker,
    pretend_device,
    *(getattr(harness, name) for name in harness.__all__),
)

_IMPLEMENTATION = '''
class checkpoint:
    """Two jobs that a planted bug can spoil."""

    @staticmethod
    def double(x):
        return 2 * x

    @staticmethod
    def sort(values):
        return sorted(values)
'''

_HEADER = """
import os
import pytest
from hypothesis import given, settings, strategies as st
from conformance.harness import *
"""


def pytest_configure(config: pytest.Config) -> None:
    # pytest refuses pytest_plugins in a conftest that is not at the top, and this one is not when the suite is run from
    # an installation; asking the manager is the same without that rule.
    if not config.pluginmanager.has_plugin("pytester"):
        config.pluginmanager.import_plugin("pytester")


@pytest.fixture
def toy(pytester: pytest.Pytester) -> Callable[..., pytest.RunResult]:
    """A toy package: ``toy(tests, "--option", planted=source)`` writes it and runs pytest with our plugin over it."""

    def run(tests: str, *arguments: str, planted: str | None = None, impl: str = _IMPLEMENTATION) -> pytest.RunResult:
        files = {"__init__": "", "impl": impl, "test_toy": _HEADER + dedent(tests)}
        if planted is not None:
            names = "PlantedBug, fault, patched, swap, wrap"
            files["planted"] = f"from conformance.harness import {names}\n{dedent(planted)}"
        folder = pytester.path / "toy"
        folder.mkdir(exist_ok=True)
        for name, text in files.items():
            (folder / f"{name}.py").write_text(dedent(text), encoding="utf-8")
        pytester.syspathinsert()
        options = ("-p", "conformance.harness.plugin", "--twinproof-impl", "toy.impl", "--twinproof-profile", "ci")
        return pytester.runpytest(*options, *arguments)

    return run
