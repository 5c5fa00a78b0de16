"""Faults that ``test_tiling`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched

neighbours_overlap = patched(
    "Where a box ends is found without the carry of an addition.",
    mutated("twinproof.checkpoint.catalog:_overlap", "ao < bo + bs", "ao < bo ^ bs"),
    kills="CKPT-517",
)
