"""Sorting ids by bucket in C++. Meaning: ``refimpl.kvstore.sort_ids_by_bucket``."""

from __future__ import annotations

import torch

from fastimpl import ops
from twinproof.kvstore import buckets as reference
from twinproof.kvstore.buckets import Buckets
from twinproof.kvstore.checks import check_ids

__all__ = ["sort_ids_by_bucket"]


def sort_ids_by_bucket(
    ids: torch.Tensor,
    bucket_start: int = 0,
    bucket_end: int | None = None,
    total_buckets: int = 1,
    *,
    hash_mode: str = "interleave",
    bucket_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    buckets = Buckets(total_buckets, hash_mode, bucket_size)
    end = total_buckets if bucket_end is None else bucket_end
    if 0 <= bucket_start <= end <= total_buckets:
        checked = check_ids(reference._flat(ids))
        size = buckets.bucket_size or 0
        found, counts, outside_count = ops.sort_ids(checked, total_buckets, size, bucket_start, end)
        if not outside_count:
            return found, counts
    # What is wrong, and how it is said, is the reference's.
    return reference.sort_ids_by_bucket(
        ids, bucket_start, bucket_end, total_buckets, hash_mode=hash_mode, bucket_size=bucket_size
    )


sort_ids_by_bucket.__doc__ = reference.sort_ids_by_bucket.__doc__
