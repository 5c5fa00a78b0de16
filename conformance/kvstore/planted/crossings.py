"""Faults that ``test_crossings`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched

weights_of_the_first_table_alone = patched(
    "weights_only is honoured for the first table of a load alone.",
    mutated(
        "twinproof.kvstore.disk:_Load.write",
        "weights_only=self.weights_only",
        "weights_only=self.weights_only and table == self.names[0]",
    ),
    kills="KV-297",
)
steps_before_rows_are_read = patched(
    "A load sets the steps before it has read the rows.",
    mutated(
        "twinproof.kvstore.disk:StoreFiles.load",
        "gone = {}",
        "gone = {}; [store.set_step_count(each, count) for each, count in saved.steps.items() if each in names]",
    ),
    kills="KV-297",
)
steps_of_weights_alone = patched(
    "The step comes along with weights alone.",
    mutated(
        "twinproof.kvstore.disk:StoreFiles.load", "for table in names if not weights_only else ()", "for table in names"
    ),
    kills="KV-297",
)
every_table_is_cleared = patched(
    "A state dict of some tables clears the others, too.",
    mutated(
        "twinproof.kvstore.statedict:load_state_dict",
        "store.clear(table)",
        "[store.clear(each) for each in store.tables]",
    ),
    kills="KV-298",
)
cleared_before_all_is_read = patched(
    "A state dict clears tables before it has looked at all of them.",
    mutated(
        "twinproof.kvstore.statedict:load_state_dict",
        "names = tables_of(store.tables, tables)",
        "names = tables_of(store.tables, tables); [store.clear(each) for each in names if clear]",
    ),
    kills="KV-298",
)
