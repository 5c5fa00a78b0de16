"""Faults that ``test_tiling`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched

neighbours_overlap = patched(
    "Where a box ends is found without the carry of an addition.",
    mutated("twinproof.checkpoint.catalog:_overlap", "ao < bo + bs", "ao < bo ^ bs"),
    kills="CKPT-547",
)

missing_elements_taken = patched(
    "Rectangles that leave a gap are taken as a tiling.",
    mutated("twinproof.checkpoint.catalog:check_tiling", "volume != math.prod(shape)", "volume > math.prod(shape)"),
    kills=("CKPT-517", "CKPT-547"),
)
