"""Faults that ``test_forks`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched

locks_are_not_held = patched(
    "A process is forked while a thread holds a lock of Python's, which is never free in the child.",
    mutated("twinproof.kvstore.eviction:_hold", "lock.acquire()", "continue"),
    kills="KV-447",
)
steps_are_not_held = patched(
    "Of the locks of a store only those of its rows are held over a fork.",
    mutated("twinproof.kvstore.eviction:_hold", "sorted(_locks)", "sorted(key for key in tuple(_locks) if key[0] > 1)"),
    kills="KV-447",
)
