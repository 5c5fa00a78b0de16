"""Makes ``bench_*.py`` part of every run of the suite: a bench that nobody executes has stopped working unnoticed."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    # A file named on the command line is collected by pytest itself.
    if file_path.match("bench_*.py") and not parent.session.isinitpath(file_path):
        module: pytest.Module = pytest.Module.from_parent(parent, path=file_path)
        return module
    return None
