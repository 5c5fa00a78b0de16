"""Says what is missing where the suite is collected without its plugin, once instead of once for each test."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    if not config.pluginmanager.has_plugin("conformance.harness.plugin"):
        # An error would be taken for a folder without tests: this file is found while the suite is being collected.
        pytest.exit(
            "the suite needs its plugin: pytest -p conformance.harness.plugin --pyargs conformance "
            "--twinproof-impl NAME, or: twinproof verify --impl NAME",
            returncode=pytest.ExitCode.USAGE_ERROR,
        )
