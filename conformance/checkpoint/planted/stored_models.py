"""Faults that ``test_stored_models`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched

_WITH_MEMORY = "twinproof.checkpoint.plan:with_memory"
_REPLACED = "twinproof.checkpoint.plan:replaced"

rows_refused = patched(
    "Rows of a store are saved, and refused by a load.",
    mutated(_WITH_MEMORY, "return value.memory_for(sizes)", "return value"),
    kills="CKPT-698",
)
rows_that_are_there_alone = patched(
    "A load reads as many rows as the store has.",
    mutated(_WITH_MEMORY, "value.memory_for(sizes)", "value.memory_for(value.shape)"),
    kills="CKPT-698",
)
rows_of_all_ranks = patched(
    "Each rank gets the rows of all.",
    mutated(_WITH_MEMORY, "if table is None and rank_count > 1", "if False"),
    kills="CKPT-699",
)
state_dicts_without_metadata = patched(
    "Of a nested state dict the entries alone are handed on.",
    mutated(
        _REPLACED, "if not changed:\n                return value", "if not changed:\n                return inner"
    ),
    kills="CKPT-703",
)
path_begins_anew = patched(
    "The path of what is nested two levels deep lacks, or repeats, what it begins with.",
    mutated(_REPLACED, 'change, f"{name}.")', 'change, f"{path}{name}.")'),
    kills="CKPT-739",
)
lists_left_out = patched(
    "Rows of a store that stand in a list get no memory.",
    mutated(_REPLACED, "isinstance(value, list)", "False"),
    kills="CKPT-739",
)
places_count_from_one = patched(
    "What stands in a list is looked for one place behind its own.",
    mutated(_REPLACED, "in enumerate(value)", "in enumerate(value, start=1)"),
    kills="CKPT-739",
)
rows_of_steps_taken_back = patched(
    "A store among the states keeps the rows that the checkpoint does not list.",
    mutated("twinproof.checkpoint.native:give_back", 'hasattr(type(each), "load_key_value_state_dict")', "False"),
    kills=("CKPT-698", "CKPT-975"),
)
rows_of_all_loads_alone = patched(
    "A store's own load removes the rows that a state dict does not list.",
    mutated(
        "twinproof.kvstore.store:KVStore.load_state_dict", "tables=tables, clear=clear", "tables=tables, clear=True"
    ),
    kills="CKPT-975",
)
