"""Sizes and counts at which shared code takes another way, of a copy for tests or of one that is shipped.

Prevents a way that no test takes: a copy for tests has sizes that ordinary tests cross. The results are the same.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["MARKER", "are_lowered", "regime"]

# The test of lowered regimes puts this file beside the modules of the copy that it installs.
MARKER = "lowered"


def are_lowered() -> bool:
    """Whether this copy of the package is for tests."""
    return (Path(__file__).parent / MARKER).is_file()


def regime(shipped: int, lowered: int) -> int:
    """``shipped``; in a copy for tests ``lowered``. Results are the same; only which way leads to them is not."""
    return lowered if are_lowered() else shipped
