"""Faults that ``test_batch_machine`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched

staggered_by_rows = patched(
    "Ranks that are staggered are read by rows: right where there are as many columns as rows.",
    mutated("twinproof.pipeline.batches:staggered", "view(stagger, -1)", "view(-1, stagger)"),
    kills="PIPE-364",
)
strides_by_rank_of_before = patched(
    "copy_ keeps the strides by rank of the batch before.",
    mutated("twinproof.pipeline.jagged:KeyedMoves.copy_", '"_stride_per_key_per_rank", ', ""),
    kills="PIPE-364",
)
full_batch_of_features = patched(
    "Features that differ in size have a full batch of as many samples as there are features.",
    mutated("twinproof.pipeline.batches:KeyedSizes.stride", "inverse[1].size(-1)", "inverse[1].size(0)"),
    kills="PIPE-364",
)
