"""Faults that ``test_kept_apart`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched

columns_of_the_callers_lists = patched(
    "Columns keep the caller's list of widths.",
    mutated("twinproof.pipeline.batches:KeyedTensor.__init__", "list(length_per_key)", "length_per_key"),
    kills="PIPE-627",
)
batches_of_the_callers_lists = patched(
    "A batch keeps the caller's list of where features begin.",
    mutated("twinproof.pipeline.batches:KeyedJaggedTensor.__init__", "list(offset_per_key)", "offset_per_key"),
    kills="PIPE-627",
)
names_of_the_callers_rows = patched(
    "A batch keeps the caller's names of inverse indices.",
    mutated("twinproof.pipeline.batches:KeyedJaggedTensor.__init__", "(list(rows[0]), rows[1])", "rows"),
    kills="PIPE-627",
)
features_written_into_the_table = patched(
    "A module writes into the configuration that it is made of.",
    mutated("twinproof.pipeline.config:check_tables", "copy.copy(own_config(kind, table))", "own_config(kind, table)"),
    kills="PIPE-628",
)
groups_of_one_are_views = patched(
    "A group of one name is a view of its column.",
    mutated(
        "twinproof.pipeline.batches:_regrouped",
        "torch.cat(columns, dim=keyed_tensors[0].key_dim())",
        "columns[0] if len(columns) == 1 else torch.cat(columns, dim=keyed_tensors[0].key_dim())",
    ),
    kills="PIPE-647",
)
