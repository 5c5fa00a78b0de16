"""Faults that ``test_device`` must notice."""

from __future__ import annotations

from typing import Any

import torch

from conformance.harness import fault, mutated, patched

_HANDLE = "conformance.kvstore.simt:SimtHandle"


@fault(kills="KV-162", at="twinproof.kvstore.store:KVStore.__init__")
def absent_device_is_the_cpu(original: Any, store: Any, layouts: Any, *, device: Any = "cpu", **options: Any) -> None:
    """A device that is not there is the CPU, without a word."""
    original(store, layouts, **options)


@fault(kills="KV-163", at="fastimpl.kvstore.store:DeviceRows.write_rows")
def first_of_duplicates_wins(original: Any, rows_of: Any, table: str, rows: torch.Tensor) -> None:
    """Of whole rows with one key the first is kept."""
    original(rows_of, table, rows.flip(0).contiguous())


@fault(kills="KV-164", at="conformance.kvstore.simt:SimtHandle.ids", of="fastimpl")
def ids_without_their_sign(original: Any, handle: Any, table: int, first: int, last: int) -> torch.Tensor:
    """Ids are listed in the order of words without a sign, as a radix sort leaves them."""
    found: torch.Tensor = original(handle, table, first, last)
    return torch.cat([found[found >= 0], found[found < 0]])


@fault(kills="KV-165", at="conformance.kvstore.simt:table_messages", of="fastimpl")
def always_the_oldest_goes(original: Any, options: Any) -> torch.Tensor:
    """A full table evicts by time, whatever its policy."""
    messages: torch.Tensor = original(options)
    messages[:, -1] = 0
    return messages


@fault(kills="KV-166", at="fastimpl.kvstore.store:check_status")
def failed_memory_is_success(original: Any, status: int, table: str, capacity: int | None = None) -> None:
    """A verb for which there was no memory says nothing."""
    if status >= 0:
        original(status, table, capacity)


@fault(kills="KV-285", at=f"{_HANDLE}.snapshot", of="fastimpl")
def a_snapshot_copies_every_row(original: Any, handle: Any) -> Any:
    """A snapshot keeps every row at once, as if all were about to change."""
    taken = original(handle)
    ids = handle.ids(0, -(2**63), 2**63 - 1)
    handle.write_metadata(0, ids, torch.zeros_like(ids), 0)
    return taken


@fault(kills="KV-286", at=f"{_HANDLE}.snapshot", of="fastimpl")
def a_snapshot_ends_with_the_first_failure(original: Any, handle: Any) -> Any:
    """Where memory for what a snapshot keeps fails, rows of the change are in the store all the same."""
    taken = original(handle)

    def write(table: int, ids: torch.Tensor, *arguments: Any) -> int:
        status: int = type(handle).write(handle, table, ids, *arguments)
        if status == -1:
            handle.fail_after(table, -1)
            type(handle).write(handle, table, ids[:1].clone(), arguments[0][:1].clone(), *arguments[1:])
        return status

    handle.write = write
    return taken


no_library_has_kernels = patched(
    "A library that was built with CUDA is taken for one that was built without.",
    mutated("fastimpl.kvstore.store:device_rows", '"kvstore_create" not in ops.cuda_operators()', "True"),
    kills="KV-411",
    of="fastimpl",
)
