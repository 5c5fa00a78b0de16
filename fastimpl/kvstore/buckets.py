"""Sorting ids by bucket in C++. Meaning: ``refimpl.kvstore.sort_ids``."""

from __future__ import annotations

import torch

from fastimpl import ops
from twinproof.kvstore.rows import Buckets, check_buckets
from twinproof.kvstore.store import BucketSort

__all__ = ["sort_ids", "sort_ids_by_bucket"]


def sort_ids(ids: torch.Tensor, buckets: Buckets, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``RowEngine.sort_ids``."""
    found, counts, outside_count = ops.sort_ids(ids, buckets.total_count, buckets.bucket_size or 0, begin, end)
    if outside_count:
        check_buckets(ids, buckets, begin, end)
    return found, counts


sort_ids_by_bucket = BucketSort(sort_ids).sort_ids_by_bucket
