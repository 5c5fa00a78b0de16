"""Faults that ``test_dtypes`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched

weights_as_given = patched(
    "Weights of a batch are looked up in their own dtype.",
    mutated("twinproof.pipeline.batches:select", "bags.weights.to(torch.float32)", "bags.weights"),
    kills=("PIPE-425", "PIPE-426"),
)
lookups_weights_as_given = patched(
    "Table-batched lookups take weights in their own dtype.",
    mutated(
        "twinproof.pipeline.modules:TableBatchedEmbeddingBags.forward",
        "per_sample_weights.to(torch.float32)",
        "per_sample_weights",
    ),
    kills="PIPE-425",
)
double_tables_read = patched(
    "Tables that were cast to float64 are handed to the lookup as they are.",
    mutated("twinproof.pipeline.config:readable", "if weight.dtype in _FLOATS.values() else", "if weight.numel() else"),
    kills="PIPE-427",
    of="fastimpl",
)
positions_as_cast = patched(
    "Gradients of weights by position that were cast are added in that dtype.",
    mutated("twinproof.pipeline.modules:_of_positions", "weight.to(torch.float32).index_select", "weight.index_select"),
    kills="PIPE-427",
)
