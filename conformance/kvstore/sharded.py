"""A store whose rows are dealt to the ranks of a group by bucket; just enough of one for the embedding modules.

Prevents sums that depend on the number of ranks: gradients arrive with the number of their sample, and the owner of a
row adds them in the order of these.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

__all__ = ["ShardedRows", "owner_of", "recut"]


def owner_of(kvstore: Any, ids: torch.Tensor, buckets: Any, world_size: int) -> torch.Tensor:
    """The rank of each id, int64 [n]: id -> bucket -> rank."""
    ends = [kvstore.rank_buckets(buckets.total_count, world_size, rank)[1] for rank in range(world_size)]
    return torch.bucketize(kvstore.bucket_of(ids, buckets), torch.tensor(ends), right=True)


class _Route:
    """Who gets which of n values, and back. Called by every rank of the group."""

    def __init__(self, owners: torch.Tensor, group: Any) -> None:
        self._group = group
        self._order = owners.argsort(stable=True)
        sent = torch.bincount(owners, minlength=dist.get_world_size(group))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        self._sent, self._received = sent.tolist(), received.tolist()

    def there(self, values: torch.Tensor) -> torch.Tensor:
        """What all ranks send to this one, by rank, each rank's in its own order."""
        result = values.new_empty((sum(self._received), *values.shape[1:]))
        dist.all_to_all_single(result, values[self._order], self._received, self._sent, group=self._group)
        return result

    def back(self, answers: torch.Tensor) -> torch.Tensor:
        """One answer for each value that came ``there``; returns those to this rank's own, in its own order."""
        sorted_answers = answers.new_empty((sum(self._sent), *answers.shape[1:]))
        dist.all_to_all_single(sorted_answers, answers, self._sent, self._received, group=self._group)
        return torch.empty_like(sorted_answers).index_copy_(0, self._order, sorted_answers)


class ShardedRows:
    """What ``KVEmbeddingBag`` asks of a store, asked of the ranks that own the rows. Every verb is collective.

    Args:
        kvstore: the implementation.
        store: this rank's rows.
        buckets: how ids fall into buckets; ``rank_buckets`` says whose they are.
        group: the ranks.
    """

    def __init__(self, kvstore: Any, store: Any, buckets: Any, group: Any) -> None:
        self._kvstore, self._store, self._buckets, self._group = kvstore, store, buckets, group
        self._samples = torch.zeros(0, dtype=torch.int64)

    @property
    def tables(self) -> tuple[str, ...]:
        """The store's."""
        found: tuple[str, ...] = self._store.tables
        return found

    def layout(self, table: str) -> Any:
        """The store's."""
        return self._store.layout(table)

    def step_count(self, table: str) -> int:
        """The store's: every rank takes every step."""
        count: int = self._store.step_count(table)
        return count

    def set_step_count(self, table: str, step: int) -> None:
        """The store's."""
        self._store.set_step_count(table, step)

    def begin(self, samples: torch.Tensor) -> None:
        """The numbers of this rank's samples, among all ranks', until the next call; each has equally many ids."""
        self._samples = samples

    def _route(self, ids: torch.Tensor) -> _Route:
        owners = owner_of(self._kvstore, ids, self._buckets, dist.get_world_size(self._group))
        return _Route(owners, self._group)

    def get(self, table: str, ids: torch.Tensor) -> torch.Tensor:
        """Weights [n, D] of ids [n], from their owners."""
        route = self._route(ids)
        return route.back(self._store.get(table, route.there(ids)))

    def apply_gradients(
        self, table: str, ids: torch.Tensor, grads: torch.Tensor, lr: float, step: int, **options: float
    ) -> None:
        """The owners' step with every rank's gradients [n, D] of ids [n], in the order of samples."""
        route = self._route(ids)
        samples = self._samples.repeat_interleave(ids.numel() // max(1, self._samples.numel()))
        order = self.sample_order(route.there(samples))
        every_id, every_grad = route.there(ids)[order], route.there(grads)[order]
        self._store.apply_gradients(table, every_id, every_grad, lr, step, **options)

    def sample_order(self, samples: torch.Tensor) -> torch.Tensor:
        """Positions of received gradients, by sample; those of one sample come from one rank and stay as they are."""
        return samples.argsort(stable=True)


def recut(kvstore: Any, store: Any, buckets: Any, group: Any) -> None:
    """Send each row of every table to the rank of ``group`` that owns it; rows that another rank owns leave."""
    for table in store.tables:
        ids = store.ids(table)
        owners = owner_of(kvstore, ids, buckets, dist.get_world_size(group))
        rows = _Route(owners, group).there(store.get_rows(table, ids))
        store.delete(table, ids[owners != dist.get_rank(group)])
        store.set_rows(table, rows)
