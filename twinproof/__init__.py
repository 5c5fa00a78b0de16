"""What both implementations share and users touch: errors, types, formats and policy.

``refimpl`` is the meaning, in plain PyTorch, and ``fastimpl`` the speed; both bind the classes here to an engine of
their own. This package imports neither of them.
"""

from __future__ import annotations

from importlib import metadata
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
