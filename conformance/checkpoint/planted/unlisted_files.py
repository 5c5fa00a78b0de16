"""Faults that ``test_unlisted_files`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched, swap

_UNLISTED = "twinproof.checkpoint.format:with_unlisted"

newer_shards_passed_over = patched(
    "An index is read, whatever was saved over its files.",
    swap("twinproof.checkpoint.catalog:with_unlisted", lambda folder, catalog: catalog),
    kills=("CKPT-908", "CKPT-909", "CKPT-910"),
)
shards_are_files_like_others = patched(
    "Of shards beside an index a warning is given, and the index is read.",
    mutated(_UNLISTED, "if SHARDING_KEY in header.metadata:", "if False:"),
    kills=("CKPT-908", "CKPT-910"),
)
all_other_files_refused = patched(
    "Shards beside an index are refused, whatever tensors they hold.",
    mutated(_UNLISTED, "if header.entries.keys().isdisjoint(catalog.tensors):", "if not header.entries:"),
    kills=("CKPT-908", "CKPT-909"),
)
passed_over_in_silence = patched(
    "verify says nothing of files that the index does not name.",
    mutated(_UNLISTED, "catalog.passed_over = tuple(found)", "pass"),
    kills="CKPT-910",
)
