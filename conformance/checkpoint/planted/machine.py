"""Faults that ``test_machine`` must notice."""

from __future__ import annotations

from conformance.checkpoint.planted.planting import nothing
from conformance.harness import patched, swap

leftovers_stay = patched(
    "What a save replaced stays beside it.",
    swap("twinproof.checkpoint.publish:Staging._drop", nothing),
    kills=("CKPT-100", "CKPT-328"),
)
