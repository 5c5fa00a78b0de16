"""Programs of ``ci``, which are no package, as modules that a test can call."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

_FOLDER = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def program() -> Callable[[str], Any]:
    """``program("kernels")`` is ``ci/kernels.py``, imported once, under a name that no installed module has."""

    @cache
    def load(name: str) -> Any:
        spec = importlib.util.spec_from_file_location(f"ci_{name}", _FOLDER / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        # A dataclass looks itself up by the name of its module.
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module

    return load
