"""A store on a GPU beside a copy of as many bytes in the same run.

``get`` reads the whole rows of a batch of ids, uniform over the store; ``export`` every row, in the order in which the
store lists its ids; ``insert`` writes rows that are not there, into room that was reserved; ``host`` reads as ``get``
does, rows that lie in pinned memory of the host without a cache, beside a copy over the link.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import fastimpl.kvstore
from conformance.harness import Mismatch, Rank
from fastimpl import ops
from perf.gpu.beside import beside_a_copy
from perf.harness.paired import Round
from perf.harness.workloads import Workload
from perf.kvstore.rows import TABLE, clock, row_layout

__all__ = ["KERNELS", "measure_kernel", "rounds_of"]

KERNELS = ("get", "export", "insert", "host")
_CALLS = 8
_ID_BYTES, _FLOAT_BYTES = 8, 4


def measure_kernel(name: str, rank: Rank, workload: Workload, folder: str, round_count: int, seed: int) -> list[Round]:
    """Nothing is measured without a GPU and the store's kernels, which leaves the gate undecided."""
    if not torch.cuda.is_available() or "kvstore_read" not in ops.cuda_operators():
        return []
    return rounds_of(torch.device("cuda"), name, workload, round_count, seed)


def rounds_of(device: torch.device, name: str, workload: Workload, round_count: int, seed: int) -> list[Round]:
    """``seconds`` of each contender, on a store of the workload's rows. Raises Mismatch for rows that are not right."""
    layout, batch = row_layout(fastimpl.kvstore, workload), workload.shape[0]
    count, generator = batch * workload.tensor_count, torch.Generator().manual_seed(seed)
    # A store on the CPU has its rows there anyway.
    place = {"row_memory": "host"} if name == "host" and device.type != "cpu" else {}
    options: dict[str, Any] = {"optimizer_in_row": True, "clock": clock, "device": device.type, **place}
    with fastimpl.kvstore.KVStore({TABLE: layout}, **options) as store:
        # Ids of a batch that is inserted are outside of those that are there.
        room = count if name != "insert" else count + 5 * _CALLS * batch
        store.reserve(TABLE, room)
        ids = torch.randperm(count, generator=generator)
        for some in torch.split(ids, batch):
            weights = torch.rand(some.numel(), layout.embedding_dim, generator=generator)
            store.set(TABLE, some.to(device), weights.to(device))
        call, clean, moved_bytes = _call(store, name, ids, batch, room, device)
        return beside_a_copy(
            call,
            moved_bytes,
            device,
            contenders=workload.contenders,
            round_count=round_count,
            seed=seed,
            call_count=_CALLS,
            clean=clean,
            over_link=name == "host",
        )


def _call(
    store: Any, name: str, ids: torch.Tensor, batch: int, room: int, device: torch.device
) -> tuple[Callable[[], object], Callable[[], object], int]:
    """One call, what ends a sample, and the least bytes that a call reads and writes."""
    layout = store.layout(TABLE)
    if name == "insert":
        weights, made = torch.ones(batch, layout.embedding_dim, device=device), [ids.numel()]

        def insert() -> None:
            fresh = torch.arange(made[0], made[0] + batch, device=device)
            store.set(TABLE, fresh, weights)
            made[0] += batch

        def remove() -> None:
            store.delete(TABLE, torch.arange(ids.numel(), made[0], device=device))
            # Rows that go give room back; the next sample, too, writes into room that was reserved.
            store.reserve(TABLE, room)
            made[0] = ids.numel()

        return insert, remove, batch * (_ID_BYTES + _FLOAT_BYTES * layout.embedding_dim + layout.row_bytes)
    wanted = (store.ids(TABLE) if name == "export" else ids[:batch]).to(device)
    out = torch.empty(wanted.numel(), layout.row_bytes, dtype=torch.uint8, device=device)
    store.get_rows(TABLE, wanted, out=out)
    if not torch.equal(out[:, :_ID_BYTES].contiguous().view(torch.int64)[:, 0], wanted):
        raise Mismatch("rows of other ids were read")
    # Over the link go the rows alone.
    id_bytes = 0 if name == "host" else _ID_BYTES
    moved_bytes = wanted.numel() * (id_bytes + 2 * layout.row_bytes)
    return lambda: store.get_rows(TABLE, wanted, out=out), lambda: None, moved_bytes
