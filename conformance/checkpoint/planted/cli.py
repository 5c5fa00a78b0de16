"""Faults that ``test_cli`` must notice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from conformance.harness import fault


@fault(kills="CKPT-107", at="fastimpl.checkpoint.__main__:main")
def exit_status_always_zero(original: Callable[..., int], *arguments: Any) -> int:
    """The command line ends with 0 whatever it found."""
    original(*arguments)
    return 0
