"""Buckets: how ids are cut among ranks, and the order in which rows are saved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from twinproof.errors import ConfigError, ShapeError
from twinproof.kvstore.checks import check_ids, check_plain

__all__ = ["BucketSort", "Buckets", "bucket_of", "check_buckets", "rank_buckets"]

HASH_MODES = ("interleave", "chunk")


@dataclass(frozen=True)
class Buckets:
    """How ids fall into buckets.

    Args:
        total_count: buckets 0 to total_count - 1.
        hash_mode: "interleave": ``id mod total_count``, never negative; "chunk": ``id // bucket_size``, floored.
        bucket_size: ids of a bucket, for "chunk" only.

    Raises:
        ConfigError: a value outside these.
    """

    total_count: int = 1
    hash_mode: str = "interleave"
    bucket_size: int | None = None

    def __post_init__(self) -> None:
        if type(self.total_count) is not int or not 1 <= self.total_count < 2**31:
            raise ConfigError("not a bucket count", got=self.total_count, expected="an int >= 1", where="total_count")
        if self.hash_mode not in HASH_MODES:
            raise ConfigError("not a hash mode", got=self.hash_mode, expected=HASH_MODES, where="hash_mode")
        size = self.bucket_size
        if (self.hash_mode == "chunk") != (type(size) is int and 1 <= size < 2**63):
            raise ConfigError("bucket_size goes with chunk", got=size, expected="an int >= 1", where="bucket_size")


def bucket_of(ids: torch.Tensor, buckets: Buckets) -> torch.Tensor:
    """The bucket of each id, int64 [n]. Raises ConfigError for an id that "chunk" puts outside all buckets."""
    if buckets.hash_mode == "interleave":
        return ids.remainder(buckets.total_count)
    assert buckets.bucket_size is not None
    found = ids.div(buckets.bucket_size, rounding_mode="floor")
    outside = ids[(found < 0) | (found >= buckets.total_count)]
    if outside.numel():
        limit = buckets.total_count * buckets.bucket_size
        raise ConfigError("an id outside all buckets", got=outside[:10].tolist(), expected=f"0 to {limit - 1}")
    return found


def rank_buckets(total_count: int, world_size: int, rank: int) -> tuple[int, int]:
    """The buckets [begin, end) of a rank: contiguous, and the first ``total_count % world_size`` ranks have one more.

    Source of the rule: torchrec's sharding of virtual tables. Raises ConfigError.
    """
    if total_count < 0 or world_size < 1 or not 0 <= rank < world_size:
        raise ConfigError("not a rank of a world", got=(total_count, world_size, rank))
    share, extra = divmod(total_count, world_size)
    begin = rank * share + min(rank, extra)
    return begin, begin + share + (rank < extra)


def check_buckets(ids: torch.Tensor, buckets: Buckets, begin: int, end: int) -> None:
    """Demand that ids, int64 [n], are of buckets [begin, end). Raises ConfigError."""
    found = bucket_of(ids, buckets)
    outside = ids[(found < begin) | (found >= end)]
    if outside.numel():
        raise ConfigError("ids of other buckets", got=outside[:10].tolist(), expected=f"buckets {begin} to {end}")


class BucketSort:
    """``sort_ids_by_bucket`` of one implementation: the checks, and behind them its way to sort.

    Args:
        sort: see ``RowEngine.sort_ids``.
    """

    def __init__(self, sort: Callable[[torch.Tensor, Buckets, int, int], tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._sort = sort

    def sort_ids_by_bucket(
        self,
        ids: torch.Tensor,
        bucket_start: int = 0,
        bucket_end: int | None = None,
        total_buckets: int = 1,
        *,
        hash_mode: str = "interleave",
        bucket_size: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids in bucket order, ascending inside a bucket, and how many each bucket has.

        FBGEMM's ``get_bucket_sorted_indices_and_bucket_tensor``, whose order inside a bucket is free.

        Args:
            ids: int64 or int32, [n] or [n, 1]; duplicates are kept.
            bucket_start: first bucket of this rank.
            bucket_end: behind its last one; None is ``total_buckets``. Where it is ``bucket_start``, ``ids`` is empty.
            total_buckets: over all ranks.
            hash_mode: see ``Buckets``.
            bucket_size: see ``Buckets``.

        Returns:
            int64 [n, 1] ids and int64 [bucket_end - bucket_start, 1] counts.

        Raises:
            ConfigError: an id outside the rank's buckets, or a range outside all buckets. ShapeError, UnsupportedError.
        """
        buckets = Buckets(total_buckets, hash_mode, bucket_size)
        end = total_buckets if bucket_end is None else bucket_end
        if not 0 <= bucket_start <= end <= total_buckets:
            raise ConfigError(
                "not a range of buckets", got=(bucket_start, end), expected=f"within 0 to {total_buckets}"
            )
        return self._sort(check_ids(_flat(ids)), buckets, bucket_start, end)


def _flat(ids: Any) -> torch.Tensor:
    plain = check_plain(ids, "ids")
    if plain.dim() == 2 and plain.shape[1] == 1:
        return plain.reshape(-1)
    if plain.dim() != 1:
        raise ShapeError("ids are [n] or [n, 1]", got=tuple(plain.shape), where="ids")
    return plain
