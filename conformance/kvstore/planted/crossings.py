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
    mutated("twinproof.kvstore.disk:StoreFiles.load", "if not weights_only:\n", "if True:\n"),
    kills="KV-297",
)
every_table_is_cleared = patched(
    "A state dict of some tables clears the others, too.",
    mutated(
        "twinproof.kvstore.statedict:load_state_dict",
        "_remove_others(store, table, incoming.ids)",
        "[_remove_others(store, each, incoming.ids) for each in store.tables]",
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
group_decides_for_itself = patched(
    "The buckets that a load is told are passed over where it is given a group, too.",
    mutated("fastimpl.kvstore.files:load", "owned=owned,", "owned=owned if process_group is None else None,"),
    kills="KV-375",
)
all_ranks_decide = patched(
    "A load that is told no buckets takes those of its rank among all ranks, whatever its group is.",
    mutated("twinproof.kvstore.disk:StoreFiles.load", "rank_and_world(process_group)", "rank_and_world(None)"),
    kills="KV-375",
)
removed_by_rank = patched(
    "What a delta removes is that of the rank's own buckets, whatever buckets the load is told.",
    mutated(
        "twinproof.kvstore.disk:StoreFiles.load",
        "gone[table] = removed[(found >= begin) & (found < end)]",
        "mine = rank_buckets(total, world_size, rank); gone[table] = removed[(found >= mine[0]) & (found < mine[1])]",
    ),
    kills="KV-375",
)
