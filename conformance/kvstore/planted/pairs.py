"""Faults that ``test_pairs`` must notice."""

from __future__ import annotations

from typing import Any

from conformance.harness import fault, mutated, patched

times_lost_in_conversions = patched(
    "Rows that are converted to another layout lose their times and counts.",
    mutated(
        "twinproof.kvstore.rows:convert_rows",
        "assemble_rows(target, words[:, 0], words[:, 1], values)",
        "assemble_rows(target, words[:, 0], torch.zeros_like(words[:, 1]), values)",
    ),
    kills="KV-336",
)


@fault(kills="KV-336", at="twinproof.kvstore.store:load_state_dict")
def cleared_tables_keep_their_step(original: Any, store: Any, engine: Any, state: Any, **options: Any) -> Any:
    """A table that is cleared by a load keeps the step that it had."""
    steps = {table: store.step_count(table) for table in store.tables}
    found = original(store, engine, state, **options)
    if options["clear"]:
        for table in found:
            store.set_step_count(table, steps[table])
    return found
