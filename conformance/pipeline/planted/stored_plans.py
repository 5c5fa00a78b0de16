"""Faults that ``test_stored_plans`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched

buckets_of_the_first = patched(
    "Key-value tables are all dealt by the buckets of the first.",
    mutated("fastimpl.pipeline.route:_key_of", "first_buckets[shard.table]", "0"),
    kills="PIPE-365",
)
whole_stores_saved = patched(
    "The state has every table of the stores.",
    mutated("twinproof.pipeline.sharded:TableParts.key_value_state_dict", "tables=(table.name,)", "tables=None"),
    kills="PIPE-366",
)

eps_of_the_store = patched(
    "Rows of key-value tables are stepped with the store's own eps.",
    mutated("twinproof.pipeline.modules:StoreRows.step", '"eps": hyper.eps, ', ""),
    kills="PIPE-458",
)
betas_of_the_store = patched(
    "Rows of key-value tables are stepped with the store's own second beta.",
    mutated("twinproof.pipeline.modules:StoreRows.step", ', "beta2": hyper.beta2', ""),
    kills="PIPE-458",
)
sizes_of_buckets_ignored = patched(
    "Buckets of one number and one way to deal are taken for the same, whatever their size.",
    mutated(
        "fastimpl.pipeline.route:_first_buckets",
        "first.setdefault(sharding.buckets, table)",
        "first.setdefault(getattr(sharding.buckets, 'total_count', None), table)",
    ),
    kills="PIPE-768",
    of="fastimpl",
)
