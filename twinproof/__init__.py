"""What both implementations share and users touch: errors, types, formats and policy.

``refimpl`` is the meaning, in plain PyTorch, and ``fastimpl`` the speed; both bind the classes here to an engine of
their own. This package imports neither of them.
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

from twinproof import errors
from twinproof.errors import *  # noqa: F403

__all__ = [*errors.__all__, "__version__", "build_info"]

try:
    __version__ = metadata.version("twinproof")
except metadata.PackageNotFoundError:
    __version__ = "0+unknown"


def build_info() -> dict[str, Any]:
    """Versions, architectures and flags of the built library, as ``fastimpl.build_info`` gives them."""
    # At run time, because the fast implementation is built upon this package.
    from importlib import import_module

    found: dict[str, Any] = import_module("fastimpl").build_info()
    return found


# The test of lowered regimes puts this file beside the modules of the copy that it installs.
MARKER = "lowered"


def are_lowered() -> bool:
    """Whether this copy of the package is for tests."""
    return (Path(__file__).parent / MARKER).is_file()


def regime(shipped: int, lowered: int) -> int:
    """``shipped``; in a copy for tests ``lowered``. Results are the same; only which way leads to them is not."""
    return lowered if are_lowered() else shipped
