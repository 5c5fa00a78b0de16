"""A plugin of pytest for ``ci/flakes``: all tests in an order that a seed fixes, so that one which needs another fails.

    python -m pytest -p ci.shuffled --shuffle-seed 7 ...

Tests of different modules follow each other: what a module leaves behind is seen by the next. Planted variants stay
beside each other, since those behind the one that dies are not run.
"""

from __future__ import annotations

import random

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle-seed", type=int, required=True, help="fixes the order of all tests")


def pytest_report_header(config: pytest.Config) -> str:
    return f"shuffled: --shuffle-seed {config.getoption('shuffle_seed')}"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    together: dict[str, list[pytest.Item]] = {}
    for item in items:
        name, _, variant = item.nodeid.partition("[planted:")
        bug = variant.partition("]")[0].partition("-")[0]
        together.setdefault(f"{name}:{bug}" if variant else item.nodeid, []).append(item)
    # What one seed gives does not depend on the order of collection.
    groups = [together[key] for key in sorted(together)]
    random.Random(config.getoption("shuffle_seed")).shuffle(groups)
    items[:] = [item for group in groups for item in group]
