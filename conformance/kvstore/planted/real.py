"""Faults that only a whole job shows: training on several ranks, killed and resumed."""

from __future__ import annotations

from typing import Any

import torch

from conformance.harness import wrap
from conformance.kvstore.planted.planting import exported, shared


def _by_rank(original: Any, rows: Any, samples: torch.Tensor) -> torch.Tensor:
    return torch.arange(samples.numel())


def _counts_lost(original: Any, store: Any, path: Any, **options: Any) -> Any:
    report = original(store, path, **options)
    for table in store.tables:
        ids = store.ids(table)
        store.set_metadata(table, ids, store.metadata(table, ids) & (2**32 - 1))
    return report


PLANTED = (
    shared(
        "gradients_summed_in_rank_order",
        "An owner adds the gradients of a row as they arrive, by rank, so that the sum depends on the world's size.",
        ("KV-110",),
        wrap("conformance.kvstore.sharded:ShardedRows.sample_order", _by_rank),
    ),
    exported(
        "counts_lost_at_resume",
        "A load leaves the counts behind, so that eviction takes rows that an uninterrupted run keeps.",
        ("KV-110",),
        "load",
        _counts_lost,
    ),
)
