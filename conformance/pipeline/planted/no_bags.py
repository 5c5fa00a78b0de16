"""Faults that ``test_no_bags`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched

offsets_without_elements_kept = patched(
    "Offsets without elements are what a lookup is given.",
    mutated("twinproof.pipeline.jagged:Eager.bags", "offsets is None or offsets.numel() == 0", "offsets is None"),
    kills="PIPE-630",
)
lengths_of_none_missing = patched(
    "Of offsets without elements the lengths are not asked for.",
    mutated("twinproof.pipeline.jagged:Eager.bags", "self.lengths()", "self._lengths"),
    kills="PIPE-630",
)
longest_of_no_bags = patched(
    "Without bags the longest is one of them.",
    mutated("twinproof.pipeline.jagged:longest", "if lengths.numel() > 0 else 0", "if lengths.numel() > 0 else 1"),
    kills="PIPE-631",
)
offsets_of_torch_left_out = patched(
    "A traced lookup is given no offsets where there are no bags.",
    mutated(
        "twinproof.pipeline.modules:EmbeddingBagCollection._by_torch",
        "features.to_dict(compute_offsets=False)",
        "features.to_dict()",
    ),
    kills="PIPE-632",
)
dictionaries_of_nothing_tried = patched(
    "A dictionary without features is put together.",
    mutated("twinproof.pipeline.batches:_check_dict", "if part_count == 0:", "if part_count < 0:"),
    kills="PIPE-633",
)
weights_of_some_kept = patched(
    "Weights of some features are those of all.",
    mutated("twinproof.pipeline.batches:_check_dict", "if weighted_count not in (0, part_count):", "if False:"),
    kills="PIPE-633",
)
