"""The device's store on a CPU: the same kernels and the same host side, by the plain execution of ``simt.h``.

Test-only: the library is compiled here, with the system's compiler, and reached by ctypes. It shows what the kernels
compute, not how fast, and no race: for that are the proofs in ``conformance/meta/simt``.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch

from conformance.harness.native import compile_once
from conformance.provers.simt import include_folders
from fastimpl.kvstore.native import table_messages
from fastimpl.kvstore.store import DeviceRows, KVStore, device_rows, rows_of
from fastimpl.ops import KVHandle
from twinproof.kvstore.options import StoreOptions
from twinproof.kvstore.rows import RowEngine
from twinproof.kvstore.store import LockedRows

__all__ = ["LACKS", "SimtHandle", "SimtStore", "bind", "library"]

# What a store on a device does not promise.
LACKS = frozenset({"injected_allocation_failure", "large_batches", "operators", "shared_readers"})

_FLAGS = (
    "-std=c++20",
    "-O2",
    "-g0",
    "-shared",
    "-fPIC",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-strict-aliasing",
)
_ADDRESSES = ("kv_create", "kv_snapshot")
_NUMBERS = (
    "kv_begin_round", "kv_changed", "kv_clear", "kv_contains", "kv_delete", "kv_evict", "kv_ids", "kv_mark",
    "kv_removed", "kv_reserve", "kv_size", "kv_stats", "kv_update", "kv_write", "kv_write_metadata", "kv_write_rows",
)  # fmt: skip


@cache
def library() -> ctypes.CDLL:
    """The kernels and their host side, compiled once per content. Raises CompileError."""
    common, prover, sources = include_folders()
    plain = prover.parent / "plain"
    path = compile_once("simt-rows", Path(__file__).parent, ("rows.cpp",), _FLAGS, (), (plain, common, prover, sources))
    loaded = ctypes.CDLL(str(path))
    for name in _NUMBERS:
        getattr(loaded, name).restype = ctypes.c_int64
    for name in _ADDRESSES:
        getattr(loaded, name).restype = ctypes.c_void_p
    return loaded


def _argument(value: torch.Tensor | int) -> Any:
    if isinstance(value, torch.Tensor):
        return ctypes.c_void_p(value.data_ptr())
    return ctypes.c_int64(value)


class SimtHandle(KVHandle):
    """See ``KVHandle``."""

    def __init__(self, address: int) -> None:
        super().__init__(torch.empty(0, dtype=torch.int64))
        self._address = address

    @classmethod
    def create(cls, formats: torch.Tensor, shard_count: int) -> SimtHandle:
        return cls(library().kv_create(_argument(formats), _argument(formats.shape[0])))

    def _call(self, name: str, *arguments: torch.Tensor | int) -> int:
        call = getattr(library(), name)
        return int(call(ctypes.c_void_p(self._address), *map(_argument, arguments)))

    def _list(self, name: str, *arguments: torch.Tensor | int) -> torch.Tensor:
        found = torch.empty(self._call(name, *arguments), dtype=torch.int64)
        self._call_void("kv_fetch", found)
        return found

    def _call_void(self, name: str, *arguments: torch.Tensor | int) -> None:
        getattr(library(), name)(ctypes.c_void_p(self._address), *map(_argument, arguments))

    def _last(self) -> int:
        found = torch.empty(1, dtype=torch.int64)
        self._call_void("kv_fetch", found)
        return int(found)

    def close(self) -> None:
        self._call_void("kv_close")

    def read(self, table: int, ids: torch.Tensor, begin: int, end: int, out: torch.Tensor) -> None:
        if out.numel():
            self._call_void("kv_read", table, ids, ids.numel(), begin, end, out)
        torch.autograd.graph.increment_version(out)

    def contains(self, table: int, ids: torch.Tensor) -> torch.Tensor:
        return self._list("kv_contains", table, ids, ids.numel()) != 0

    def ids(self, table: int, first: int, last: int) -> torch.Tensor:
        return self._list("kv_ids", table, first, last)

    def size(self, table: int) -> int:
        return self._call("kv_size", table)

    def changes(self, table: int, since: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._list("kv_changed", table, since), self._list("kv_removed", table, since)

    def mark(self) -> int:
        return self._call("kv_mark")

    def write(self, table: int, ids: torch.Tensor, values: torch.Tensor, begin: int, now: int, visit: bool) -> int:
        return self._call("kv_write", table, ids, ids.numel(), values, begin, values.shape[1], now, int(visit))

    def write_rows(self, table: int, ids: torch.Tensor, rows: torch.Tensor) -> int:
        return self._call("kv_write_rows", table, ids, ids.numel(), rows)

    def write_metadata(self, table: int, ids: torch.Tensor, words: torch.Tensor, mask: int) -> int:
        return self._call("kv_write_metadata", table, ids, ids.numel(), words, mask)

    def update(self, table: int, ids: torch.Tensor, grads: torch.Tensor, hyper: torch.Tensor, now: int) -> int:
        return self._call("kv_update", table, ids, ids.numel(), grads, hyper, now)

    def delete(self, table: int, ids: torch.Tensor) -> tuple[int, int]:
        return self._counted("kv_delete", table, ids, ids.numel())

    def _counted(self, name: str, *arguments: torch.Tensor | int) -> tuple[int, int]:
        status = self._call(name, *arguments)
        return status, self._last() if status == 0 else 0

    def clear(self, table: int) -> int:
        return self._call("kv_clear", table)

    def begin_round(self, table: int, keep_count: int) -> tuple[torch.Tensor, list[int]]:
        found = self._list("kv_begin_round", table, keep_count)
        return found[4:].clone(), found[:4].tolist()

    def evict(self, table: int, ids: torch.Tensor, plan: torch.Tensor) -> tuple[int, int]:
        return self._counted("kv_evict", table, ids, ids.numel(), plan)

    def reserve(self, table: int, row_count: int) -> int:
        return self._call("kv_reserve", table, row_count)

    def stats(self) -> tuple[torch.Tensor, int]:
        return self._list("kv_stats"), 0

    def snapshot(self) -> SimtHandle | None:
        return SimtHandle(self._call("kv_snapshot"))


def _rows_of(options: StoreOptions) -> RowEngine:
    if options.device != "cpu":
        return rows_of(options)
    return LockedRows(DeviceRows(options, SimtHandle.create(table_messages(options), options.num_shards)))


class SimtStore(KVStore, engine=_rows_of):
    """A ``KVStore`` on the device that is run here; its ``device`` is still "cpu", where its tensors are."""


def bind(device: str) -> None:
    """Make every ``fastimpl.kvstore.KVStore`` lie on "simt" or "cuda", for the rest of the process.

    Its tensors stay on the CPU, and so tests run unchanged. Raises CompileError.
    """
    if device == "simt":
        library()
    KVStore._make_engine = staticmethod(_rows_of if device == "simt" else _rows_on_gpu)


def _rows_on_gpu(options: StoreOptions) -> RowEngine:
    return LockedRows(device_rows(options))
