"""Faults that ``test_device_growth`` must notice."""

from __future__ import annotations

from typing import Any

from conformance.harness import fault

_HANDLE = "conformance.kvstore.simt:SimtHandle"


@fault(kills="KV-167", at=f"{_HANDLE}.write", of="fastimpl")
def a_write_reads_the_count(original: Any, handle: Any, table: int, *arguments: Any) -> int:
    """Each write asks the device how many rows there are."""
    status: int = original(handle, table, *arguments)
    handle.size(table)
    return status


@fault(kills="KV-167", at=f"{_HANDLE}.update", of="fastimpl")
def a_step_makes_room_anew(original: Any, handle: Any, table: int, ids: Any, *arguments: Any) -> int:
    """A step of the optimizer makes room for all ids once more, whatever room there is."""
    handle.reserve(table, 1000 + 1000 * ids.numel())
    status: int = original(handle, table, ids, *arguments)
    return status


@fault(kills="KV-168", at=f"{_HANDLE}.delete", of="fastimpl")
def late_counts_lose_deletes(original: Any, handle: Any, table: int, ids: Any) -> tuple[int, int]:
    """While a count is on its way, a delete finds the rows of the last count that was known."""
    from conformance.kvstore.simt import copies_under_way

    found: tuple[int, int] = original(handle, table, ids[:0] if copies_under_way() else ids)
    return found


@fault(kills="KV-421", at=f"{_HANDLE}.update", of="fastimpl")
def large_batches_lose_their_end(original: Any, handle: Any, table: int, ids: Any, grads: Any, *rest: Any) -> int:
    """Of a batch whose scratch memory is no part of a piece, the last id is not stepped."""
    count = min(ids.numel(), 1 << 19)
    status: int = original(handle, table, ids[:count].clone(), grads[:count].clone(), *rest)
    return status
