"""Sizes and counts at which code takes another way, of a build for tests or of one that is shipped."""

from __future__ import annotations

from fastimpl.ops import build_facts

__all__ = ["are_lowered", "regime"]


def are_lowered() -> bool:
    """Whether the library was built for tests, with ``-DREGIMES=lowered``: each way is taken by ordinary tests."""
    return build_facts().get("regimes") == "lowered"


def regime(shipped: int, lowered: int) -> int:
    """``shipped``; in a build for tests ``lowered``. Results are the same; only which way leads to them is not."""
    return lowered if are_lowered() else shipped
