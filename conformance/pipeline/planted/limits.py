"""Faults that ``test_limits`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched

zero_is_no_bound = patched(
    "A lower bound of zero is taken for none.",
    mutated(
        "twinproof.pipeline.config:EmbeddingConfig.get_weight_init_min",
        "self.weight_init_min is None",
        "not self.weight_init_min",
    ),
    kills="PIPE-371",
)

zero_is_no_upper_bound = patched(
    "An upper bound of zero is taken for none.",
    mutated(
        "twinproof.pipeline.config:EmbeddingConfig.get_weight_init_max",
        "self.weight_init_max is None",
        "not self.weight_init_max",
    ),
    kills="PIPE-371",
)

more_columns_taken = patched(
    "Columns beyond the widths are taken.",
    mutated("twinproof.pipeline.batches:KeyedTensor._check", "sum(widths) != shape", "sum(widths) > shape"),
    kills="PIPE-372",
)

more_weights_taken = patched(
    "Weights beyond the ids are taken.",
    mutated("twinproof.pipeline.jagged:check_ids", "weights.shape != bags", "weights.shape < bags"),
    kills="PIPE-372",
)

as_many_ranks_as_columns_refused = patched(
    "A rank for each column is refused.",
    mutated("twinproof.pipeline.sharding:ColumnWise.check", "<= table.embedding_dim", "!= table.embedding_dim"),
    kills="PIPE-373",
)

no_rank_taken = patched(
    "A table is cut over no rank.",
    mutated("twinproof.pipeline.sharding:ColumnWise.check", "not 1 <= len", "not 0 <= len"),
    kills="PIPE-373",
)

smaller_begins_taken = patched(
    "Begins of features that are too small are taken.",
    mutated("twinproof.pipeline.jagged:KeyedMoves._check_features", "!= begins", "< begins"),
    kills="PIPE-374",
)

samples_of_wrong_ids_by_halves = patched(
    "The samples of a table are counted as if tables were powers of two.",
    mutated("twinproof.pipeline.modules:_outside_error", "// len(row_counts)", ">> len(row_counts)"),
    kills="PIPE-375",
)

shapes_of_no_parts = patched(
    "A part is said to be none.",
    mutated(
        "twinproof.pipeline.sharded:TableShard.__repr__",
        "self._local is None else tuple(self._local.shape)",
        "self.dim() == 2 else ()",
    ),
    kills="PIPE-377",
)

kinds_not_told = patched(
    "A kind that there is not is refused without those that there are.",
    mutated("twinproof.pipeline.sharding:TableSharding.__post_init__", "expected=tuple(KINDS), ", ""),
    kills="PIPE-451",
)
more_weights_permuted = patched(
    "A batch with more weights than values is permuted.",
    mutated("twinproof.pipeline.jagged:KeyedMoves._check_order", "self._check_weights()", "pass"),
    kills="PIPE-452",
)
