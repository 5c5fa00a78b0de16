"""Faults that ``test_skip_gram`` must notice."""

from __future__ import annotations

from typing import Any

import torch

from conformance.harness import fault


@fault(kills="KV-110", at="conformance.kvstore.sharded:ShardedRows.sample_order")
def gradients_summed_in_rank_order(original: Any, rows: Any, samples: torch.Tensor) -> torch.Tensor:
    """An owner adds the gradients of a row as they arrive, by rank, so that the sum depends on the world's size."""
    return torch.arange(samples.numel())


@fault(kills="KV-110", at="load")
def counts_lost_at_resume(original: Any, store: Any, path: Any, **options: Any) -> Any:
    """A load leaves the counts behind, so that eviction takes rows that an uninterrupted run keeps."""
    report = original(store, path, **options)
    for table in store.tables:
        ids = store.ids(table)
        store.set_metadata(table, ids, store.metadata(table, ids) & (2**32 - 1))
    return report
