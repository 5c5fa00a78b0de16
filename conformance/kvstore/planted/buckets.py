"""Faults that ``test_buckets`` must notice."""

from __future__ import annotations

from typing import Any

import torch

from conformance.harness import fault, mutated, patched
from conformance.kvstore.planted.planting import engines
from twinproof.kvstore import rows as shared_rows


@fault(kills="KV-035", at="twinproof.kvstore.disk:_SavedReader.ids")
def saved_ids_are_local(original: Any, saved: Any, table: str, begin: int, last: int) -> torch.Tensor:
    """Saved rows list ids that count from the first one (FBGEMM 4739)."""
    found: torch.Tensor = original(saved, table, begin, last)
    return found - found[:1]


@fault(kills="KV-029", at="twinproof.kvstore.options:StoreOptions.make")
def shards_change_the_seed(original: Any, cls: Any, layouts: Any, **options: Any) -> Any:
    """Initial weights depend on the number of shards."""
    return original(cls, layouts, **(options | {"seed": options["seed"] + options["num_shards"]}))


@fault(kills="KV-031", at=engines("ids"))
def range_without_its_end(original: Any, store: Any, table: str, begin: int, last: int) -> torch.Tensor:
    """A range of ids leaves out its last one."""
    found: torch.Tensor = original(store, table, begin, last)
    return found[found < last] if last < 2**63 - 1 else found


@fault(kills="KV-036", at=engines("delete"))
def delete_in_every_table(original: Any, store: Any, table: str, ids: torch.Tensor) -> int:
    """Deleting removes the id from every table."""
    removed = int(original(store, table, ids))
    for other in store.options.rows:
        if other != table:
            original(store, other, ids)
    return removed


@fault(kills="KV-032", at="sort_ids_by_bucket")
def bucket_order_by_arrival(original: Any, ids: Any, *arguments: Any, **options: Any) -> Any:
    """Ids inside a bucket stand in the order of arrival."""
    found, counts = original(ids, *arguments, **options)
    ends = counts[:, 0].cumsum(0).tolist()
    parts = [found[begin:end].flip(0) for begin, end in zip([0, *ends], ends, strict=False)]
    return (torch.cat(parts) if parts else found), counts


@fault(kills="KV-216", at="sort_ids_by_bucket")
def last_bucket_has_the_largest(original: Any, ids: Any, *arguments: Any, **options: Any) -> Any:
    """Of many buckets that lie behind all ids the last is given the largest id that there is."""
    found, counts = original(ids, *arguments, **options)
    if counts.numel() > 512 and found.numel() and int(found[-1]) == 2**63 - 1:
        counts[counts[:, 0].nonzero()[-1]] -= 1
        counts[-1] += 1
    return found, counts


@fault(kills="KV-033", at="twinproof.kvstore.rows:bucket_of")
def negative_ids_mirrored(original: Any, ids: torch.Tensor, kinds: Any) -> torch.Tensor:
    """The bucket of a negative id is that of its absolute value."""
    if kinds.hash_mode == "interleave":
        return ids.abs().remainder(kinds.total_count)
    return shared_rows.bucket_of(ids, kinds)


@fault(kills="KV-033", at="twinproof.kvstore.rows:bucket_of")
def outside_ids_clamped(original: Any, ids: torch.Tensor, kinds: Any) -> torch.Tensor:
    """Ids outside all chunks fall into the nearest."""
    if kinds.hash_mode == "chunk":
        ids = ids.clamp(0, kinds.total_count * kinds.bucket_size - 1)
    found: torch.Tensor = original(ids, kinds)
    return found


@fault(kills="KV-034", at="rank_buckets")
def remainder_on_the_last_rank(original: Any, total_count: int, world_size: int, rank: int) -> tuple[int, int]:
    """All left-over buckets go to the last rank."""
    share = total_count // world_size
    return rank * share, total_count if rank == world_size - 1 else (rank + 1) * share


negative_ranks_taken = patched(
    "A negative rank has a range of buckets.",
    mutated("twinproof.kvstore.rows:rank_buckets", "not 0 <= rank < world_size", "not rank < world_size"),
    kills="KV-234",
)
