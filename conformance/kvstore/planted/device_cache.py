"""Faults that ``test_device_cache`` must notice."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from conformance.harness import fault, mutated, patched


@fault(kills="KV-171", at="twinproof.kvstore.options:StoreOptions._check")
def rows_lie_anywhere(original: Any, options: Any) -> None:
    """Where rows are to lie, and what is to be near, is not looked at."""
    plain = {"row_memory": "device", "cache_rows": dict.fromkeys(options.layouts, 0)}
    original(dataclasses.replace(options, **plain))


@fault(kills="KV-172", at="conformance.kvstore.simt:MovingHandle.prefetch", of="fastimpl")
def rows_are_lost_on_their_way(original: Any, handle: Any, table: int, ids: torch.Tensor) -> int:
    """The last row of a prefetch never arrives."""
    status: int = original(handle, table, ids)
    if ids.numel() > 10:
        handle.operators().kvstore_delete(handle.tensor, table, ids[-1:].clone())
    return status


@fault(kills="KV-173", at="conformance.kvstore.simt:table_messages", of="fastimpl")
def rows_stay_on_the_device(original: Any, options: Any) -> torch.Tensor:
    """Rows lie in the device's memory, wherever they were to lie."""
    return original(dataclasses.replace(options, row_memory="device"))  # type: ignore[no-any-return]


@fault(kills="KV-173", at="conformance.kvstore.simt:table_messages", of="fastimpl", id="cache_of_every_size_is_none")
def no_cache(original: Any, options: Any) -> torch.Tensor:
    """There is no cache, however many rows it was to have."""
    return original(  # type: ignore[no-any-return]
        dataclasses.replace(options, cache_rows=dict.fromkeys(options.layouts, 0))
    )


@fault(kills="KV-174", at="KVStore.prefetch")
def prefetched_rows_are_there(original: Any, store: Any, table: str, ids: torch.Tensor) -> None:
    """A prefetch of ids without a row gives them one."""
    original(store, table, ids)
    missing = [key for key in ids.tolist() if key not in store.ids(table).tolist()]
    if missing:
        found = torch.tensor(missing)
        store.set(table, found, store.get(table, found))


@fault(kills="KV-175", at="conformance.kvstore.simt:SimtHandle.prefetch", of="fastimpl")
def a_prefetch_counts_rows(original: Any, handle: Any, table: int, ids: torch.Tensor) -> int:
    """Each prefetch asks the device how many rows there are."""
    status: int = original(handle, table, ids)
    handle.size(table)
    return status


@fault(kills="KV-176", at="fastimpl.kvstore.device:DeviceHandle.prefetch")
def a_prefetch_on_the_callers_stream(original: Any, handle: Any, table: int, ids: Any) -> int:
    """A prefetch runs on the caller's stream, and what the caller queues next comes behind it."""
    from fastimpl.ops import KVHandle

    return KVHandle.prefetch(handle, table, handle._there(ids))


@fault(kills="KV-176", at="fastimpl.kvstore.device:DeviceHandle.prefetch", id="ids_are_not_waited_for")
def no_edge(original: Any, handle: Any, table: int, ids: Any) -> int:
    """The stream of prefetches does not wait for the ids that the caller's stream still makes."""
    made: Any = torch.cuda.Stream

    def stream(*arguments: Any) -> Any:
        found = made(*arguments)
        found.wait_stream = lambda other: None
        return found

    torch.cuda.Stream = stream  # type: ignore[assignment, misc]
    try:
        status: int = original(handle, table, ids)
    finally:
        torch.cuda.Stream = made  # type: ignore[misc]
    return status


scores_not_ranked = patched(
    "The C++ side is told that rows of a table with scores are ranked by time.",
    mutated("fastimpl.kvstore.native:_table_message", '("score", "count", "ttl_count")', '("count", "ttl_count")'),
    kills="KV-231",
)
