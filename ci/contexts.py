"""A plugin of pytest for ``ci/mutation.py``: coverage is told which test runs, those of Hypothesis among them."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: Any) -> Iterator[None]:
    """What runs for a test, its fixtures too, is its context; variants of one test are one."""
    coverage = importlib.import_module("coverage").Coverage.current()
    if coverage is not None:
        coverage.switch_context(item.nodeid.partition("[")[0])
    try:
        return (yield)
    finally:
        if coverage is not None:
            coverage.switch_context("")
