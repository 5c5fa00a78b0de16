"""Faults that ``test_planning`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched

long_runs_behind_short_ones = patched(
    "A short run ends the search for long ones.",
    mutated("fastimpl.checkpoint.plan:_direct_runs", "continue", "break"),
    kills="CKPT-510",
)

own_bytes_not_counted = patched(
    "What ranks other than the first write by themselves is not counted.",
    mutated("fastimpl.checkpoint.plan:_Balance.count_blocks", "block.owner >= 0", "block.owner <= 0"),
    kills="CKPT-511",
)

names_counted_as_small_numbers = patched(
    "Names are counted by identity, which small numbers alone have.",
    mutated("twinproof.checkpoint.format:_unique", "len(result) != len(pairs)", "len(result) is not len(pairs)"),
    kills="CKPT-512",
)
