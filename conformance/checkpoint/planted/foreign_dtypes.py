"""Faults that ``test_foreign_dtypes`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched

odd_width_is_plain = patched(
    "F4 of odd width is listed as plain F4.",
    mutated(
        "twinproof.checkpoint.catalog:_Builder.add_file",
        "kind, shape = entry.kind, entry.torch_shape()",
        "shape = entry.torch_shape()",
    ),
    kills="CKPT-743",
)
odd_ones_are_whole = patched(
    "An element of F4 of odd width counts as a byte.",
    mutated("twinproof.checkpoint.catalog:_bits", "UNPAIRED_F4: 4", "UNPAIRED_F4: 8"),
    kills="CKPT-743",
)
no_length = patched(
    "A chunk whose dtype torch lacks is listed as one of no bytes.",
    mutated(
        "twinproof.checkpoint.catalog:_stored", "_bits(dtype) // 8", "(_bits(dtype) // 8 if torch_dtype(dtype) else 0)"
    ),
    kills="CKPT-743",
)
