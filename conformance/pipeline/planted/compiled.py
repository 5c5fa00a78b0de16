"""Faults that ``test_compiled`` must notice."""

from __future__ import annotations

from conformance.harness import patched, swap


def _never() -> bool:
    return False


# torch.compile traces into a plain function that stands here; a wrapper of the original it refuses.
lookups_are_traced = patched(
    "A compiler looks into lookups, and makes a graph of each step and length.",
    swap("torch.compiler:is_compiling", _never),
    kills="PIPE-116",
    of="fastimpl",
)
