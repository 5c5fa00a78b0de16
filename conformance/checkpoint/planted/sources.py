"""Faults that ``test_sources`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched

casts_begin_at_the_first_element = patched(
    "A range of cast values is counted from the byte before it.",
    mutated("fastimpl.checkpoint.source:Source.dense", "begin // width", "begin % width"),
    kills="CKPT-508",
)

first_rows_in_place = patched(
    "Rows that are filled in place are always the first ones.",
    mutated("fastimpl.checkpoint.source:LazySource.fill", "(self._first + first, last", "(self._first, last"),
    kills="CKPT-509",
)

cut_rows_left_out = patched(
    "A row that the end of a range cuts is left as it was.",
    mutated(
        "fastimpl.checkpoint.source:LazySource.fill",
        "if head_bytes + whole_bytes < end - begin:",
        "if head_bytes + whole_bytes > end - begin:",
    ),
    kills="CKPT-509",
)
