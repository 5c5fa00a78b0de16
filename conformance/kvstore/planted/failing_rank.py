"""Planted bugs of calls that fail on one rank."""

from __future__ import annotations

from conformance.harness import mutated, patched

group_of_a_failed_save = patched(
    "The group that a save makes for itself is given back where the save succeeds.",
    mutated(
        "twinproof.checkpoint.publish:group_to_save_in",
        "        try:\n            yield made\n        finally:\n            dist.destroy_process_group(made)\n",
        "        yield made\n        dist.destroy_process_group(made)\n",
    ),
    kills="KV-374",
    of="fastimpl",
)
