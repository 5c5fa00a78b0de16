"""Faults that ``test_manager_waits`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched

loaded_beside_a_save = patched(
    "A load does not wait for the save that is on its way, and finds the checkpoint before it.",
    mutated("twinproof.checkpoint.manager:CheckpointManager.load", "self.maybe_wait_for_saving()", "None"),
    kills="CKPT-625",
)
