"""Faults that ``test_averaged`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched

_SHARDED = "twinproof.pipeline.sharded:ShardedEmbeddingBagCollection"

averaged_in_silence = patched(
    "An averaged model keeps the tables that it was made with.",
    mutated(f"{_SHARDED}._check_averaged", "sorted(cut - self._frozen_now())", "[]"),
    kills="PIPE-746",
)
every_table_is_refused = patched(
    "Tables that are not trained are in an averaged model's way.",
    mutated(f"{_SHARDED}._check_averaged", "cut - self._frozen_now()", "cut"),
    kills="PIPE-746",
)
every_copy_is_refused = patched(
    "Any copy is taken for that of an averaged model.",
    mutated(f"{_SHARDED}._check_averaged", "if all(", "if False and all("),
    kills="PIPE-747",
)
copies_of_local_weights = patched(
    "The weights that a collection gives are copies.",
    mutated(f"{_SHARDED}.local_weights", "return [weight for", "return [weight.clone() for"),
    kills="PIPE-747",
)
