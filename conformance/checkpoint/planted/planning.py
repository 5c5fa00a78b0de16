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

files_in_order_not_counted = patched(
    "What a rank writes of files that are written front to back is not counted.",
    mutated("fastimpl.checkpoint.plan:_one_owner", "+= block.end - block.start", "+= 0"),
    kills="CKPT-504",
)

smaller_gaps_absorbed = patched(
    "Short gaps are written apart a little earlier.",
    mutated("fastimpl.checkpoint.plan:BlockRules.of", "block_bytes // 8", "block_bytes // 9"),
    kills="CKPT-505",
)

plans_counted_wrong = patched(
    "Places of replicas are not counted as what they take.",
    mutated("fastimpl.checkpoint.wire:PackedPlan.size_bytes", "8 * len(o)", "8 + len(o)"),
    kills="CKPT-506",
)

runs_by_remainder = patched(
    "Whether bytes are contiguous is told by their number alone, not by where they begin.",
    mutated("fastimpl.checkpoint.geometry:Geometry.is_run", "(skip + count - 1)", "(skip % count - 1)"),
    kills="CKPT-548",
)


places_of_31_bits = patched(
    "What is beyond 2 GiB is sent modulo 4 GiB.",
    mutated(
        "fastimpl.checkpoint.wire:_unpack",
        "list(zip(*columns, strict=True))",
        "[tuple((n + (1 << 31)) % (1 << 32) - (1 << 31) for n in row) for row in zip(*columns, strict=True)]",
    ),
    kills="CKPT-735",
    of="fastimpl",
)
