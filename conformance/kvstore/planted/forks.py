"""Faults that ``test_forks`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched

locks_are_not_held = patched(
    "A process is forked while a thread holds a lock of Python's, which is never free in the child.",
    mutated("twinproof.kvstore.eviction:_hold", "next(keeper)", "continue"),
    kills="KV-447",
)
steps_are_not_held = patched(
    "Of the locks of a store only those of its rows are held over a fork.",
    mutated("twinproof.kvstore.eviction:_hold", "sorted(_locks)", "sorted(key for key in tuple(_locks) if key[0] > 1)"),
    kills="KV-447",
)
locks_behind_an_interrupt = patched(
    "Locks behind the one at which a handler of a signal raises are not held over the fork.",
    mutated(
        "twinproof.kvstore.eviction:_hold",
        'vars(_held).get("is_whole")',
        'vars(_held).get("keepers")',
    ),
    kills="KV-489",
)
locks_that_nobody_notes = patched(
    "A lock that was taken as a handler of a signal raised is held for ever.",
    mutated(
        "twinproof.kvstore.eviction:_hold",
        'keeper = _keeping(lock)\n            vars(_held).setdefault("keepers", []).append(keeper)\n'
        "            next(keeper)",
        "lock.acquire()\n            keeper = _keeping(lock)\n            next(keeper)\n            lock.release()\n"
        '            vars(_held).setdefault("keepers", []).append(keeper)',
    ),
    kills="KV-489",
)
