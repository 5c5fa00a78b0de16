"""Faults that ``test_travel`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched

_MANAGER = "twinproof.checkpoint.manager:CheckpointManager.__getstate__"

managers_travel = patched(
    "A manager is copied with what it holds, or ends in a bare error of its lock.",
    mutated(_MANAGER, "if held:", "if False:"),
    kills=("CKPT-882", "CKPT-883"),
)
pending_saves_travel = patched(
    "A manager is copied while a save of it is on its way.",
    mutated(_MANAGER, '"a save on its way": self._pending,', ""),
    kills="CKPT-882",
)
no_manager_travels = patched(
    "A manager that holds nothing is refused as one that does.",
    mutated(_MANAGER, "if held:", "if True:"),
    kills="CKPT-882",
)
quantized_readers_stay = patched(
    "A reader of quantized weights holds a lock of its own.",
    mutated(
        "fastimpl.checkpoint.quantized:_AddedRanges.read",
        "with _ADDING:",
        "self._lock = threading.Lock()\n    with self._lock:",
    ),
    kills="CKPT-884",
    of="fastimpl",
)
