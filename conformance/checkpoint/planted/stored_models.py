"""Faults that ``test_stored_models`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched

_WITH_MEMORY = "twinproof.checkpoint.plan:with_memory"

rows_refused = patched(
    "Rows of a store are saved, and refused by a load.",
    mutated(_WITH_MEMORY, "return value.memory_for(saved.size)", "return value"),
    kills="CKPT-698",
)
rows_that_are_there_alone = patched(
    "A load reads as many rows as the store has.",
    mutated(_WITH_MEMORY, "value.memory_for(saved.size)", "value.memory_for(value.shape)"),
    kills="CKPT-698",
)
rows_of_all_ranks = patched(
    "Each rank gets the rows of all.",
    mutated(_WITH_MEMORY, "rank_count > 1", "False"),
    kills="CKPT-699",
)
state_dicts_without_metadata = patched(
    "Of a nested state dict the entries alone are handed on.",
    mutated(
        _WITH_MEMORY, "if not changed:\n                return value", "if not changed:\n                return inner"
    ),
    kills="CKPT-703",
)
