"""The device's store on a CPU: the same kernels, the same host side and the same operators, without a GPU.

Test-only: ``kvstore.cu`` is compiled here as C++, beside a CUDA made of the CPU (``include/``), with kernels run by the
plain execution of ``simt.h``; its operators get a namespace of their own. It shows what they compute, not how fast, no
race, and no order of streams: of races are the proofs in ``conformance/meta/simt``.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

from conformance.harness.native import CompileError, cache_folder, compile_once
from conformance.provers.simt import include_folders
from fastimpl.kvstore.device import DeviceHandle
from fastimpl.kvstore.native import table_messages
from fastimpl.kvstore.store import DeviceRows, KVStore, LockedDeviceRows, device_rows, rows_of
from twinproof.kvstore.options import StoreOptions
from twinproof.kvstore.rows import RowEngine

__all__ = [
    "LACKS",
    "CachedStore",
    "MovingHandle",
    "SimtHandle",
    "SimtStore",
    "bind",
    "copies_under_way",
    "held_bytes",
    "host_waits",
    "late_copies",
    "load_operators",
    "store_in",
]

# What a store on a device does not promise.
LACKS = frozenset({"large_batches", "operators", "shared_readers"})

_NAMESPACE = "twinproof_simt"
_TORCH = Path(torch.__file__).parent
_FLAGS = (
    "-std=c++20", "-Og", "-g0", "-shared", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-fno-strict-aliasing",
    "-DTORCH_TARGET_VERSION=0x020b000000000000", "-DTORCH_STABLE_ONLY", "-isystem", str(_TORCH / "include"),
)  # fmt: skip
_LIBRARIES = (f"-L{_TORCH / 'lib'}", "-ltorch_cpu")
_REGISTERED = "STABLE_TORCH_LIBRARY_IMPL(twinproof, CUDA, m) {"
# What a test may ask of the CUDA that is made of the CPU.
_ASKED = """
namespace {
int64_t host_waits() { return fake::host().wait_count(); }
int64_t copies_under_way() { return fake::host().copy_count(); }
int64_t held_bytes(bool is_pinned) { return fake::host().held_bytes(is_pinned); }
void hold_copies(bool is_held) { fake::host().hold_copies(is_held); }
}  // namespace
STABLE_TORCH_LIBRARY_FRAGMENT(%s, m) {
  m.def("host_waits() -> int");
  m.def("copies_under_way() -> int");
  m.def("held_bytes(bool is_pinned) -> int");
  m.def("hold_copies(bool is_held) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(%s, CompositeExplicitAutograd, m) {
  m.impl("host_waits", TORCH_BOX(&host_waits));
  m.impl("copies_under_way", TORCH_BOX(&copies_under_way));
  m.impl("held_bytes", TORCH_BOX(&held_bytes));
  m.impl("hold_copies", TORCH_BOX(&hold_copies));
}
"""


def _launchers(sources: Path) -> str:
    """``kvstore.cu`` with its operators defined in our namespace, for the CPU. Raises CompileError."""
    text = (sources / "kvstore/kvstore.cu").read_text(encoding="utf-8")
    schemas = (sources / "schemas.cpp").read_text(encoding="utf-8")
    names = re.findall(r'm\.impl\("(\w+)"', text)
    found = {
        match.group(1): match.group() for match in re.finditer(r'm\.def\(\s*"(\w+)\((?:[^"]*"\s*")*[^"]*"\);', schemas)
    }
    if text.count(_REGISTERED) != 1 or not names or not set(names) <= set(found):
        raise CompileError(f"kvstore.cu: its operators are not those of schemas.cpp: {names}")
    definitions = "\n".join(found[name] for name in names)
    ours = f"STABLE_TORCH_LIBRARY({_NAMESPACE}, m) {{\n{definitions}\n}}\n"
    ours += _ASKED % (_NAMESPACE, _NAMESPACE)
    return text.replace(_REGISTERED, f"{ours}STABLE_TORCH_LIBRARY_IMPL({_NAMESPACE}, CPU, m) {{")


@cache
def load_operators() -> None:
    """Compile the launchers, once per content, and register their operators. Raises CompileError."""
    common, prover, sources = include_folders()
    text = _launchers(sources)
    folder = cache_folder() / f"simt-rows-{hashlib.sha256(text.encode()).hexdigest()[:24]}"
    folder.mkdir(exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=folder, delete=False, encoding="utf-8") as made:
        made.write(text)
    os.replace(made.name, folder / "rows.cpp")
    includes = (Path(__file__).parent / "include", prover.parent / "plain", common, prover, sources)
    # The fake's own header has an ending that no digest of headers looks for.
    fake = (includes[0] / "common/device_call.cuh").read_bytes()
    flags = (*_FLAGS, f"-DSIMT_FAKE={int(hashlib.sha256(fake).hexdigest()[:7], 16)}")
    torch.ops.load_library(str(compile_once("simt-rows", folder, ("rows.cpp",), flags, _LIBRARIES, includes)))  # type: ignore[no-untyped-call]


def host_waits() -> int:
    """How often a host of stores has waited so far: allocations, copies of memory that is not pinned, and waits."""
    return int(SimtHandle.operators().host_waits())


def held_bytes(*, pinned: bool) -> int:
    """Bytes that stores hold for long in memory of the device, or in pinned memory of the host."""
    return int(SimtHandle.operators().held_bytes(pinned))


def copies_under_way() -> int:
    """How many copies to pinned memory have not arrived."""
    return int(SimtHandle.operators().copies_under_way())


@contextmanager
def late_copies(*, is_late: bool = True) -> Iterator[None]:
    """Copies to pinned memory do not arrive here until the host waits; with ``is_late`` False they are at once."""
    SimtHandle.operators().hold_copies(is_late)
    try:
        yield
    finally:
        SimtHandle.operators().hold_copies(False)


class SimtHandle(DeviceHandle):
    """The same handle over the operators of this library; the device is the CPU."""

    @classmethod
    def operators(cls) -> Any:
        """Ours."""
        load_operators()
        return getattr(torch.ops, _NAMESPACE)


def _rows_of(options: StoreOptions) -> RowEngine:
    if options.device != "cpu":
        return rows_of(options)
    return LockedDeviceRows(DeviceRows(options, SimtHandle.create(table_messages(options), options.num_shards)))


class SimtStore(KVStore, engine=_rows_of):
    """A ``KVStore`` on the device that is run here; its ``device`` is still "cpu", where its tensors are."""


class _Moving(DeviceHandle):
    """Ids are prefetched before their rows are read or changed, so that rows move all the time."""

    def read(self, table: int, ids: torch.Tensor, begin: int, end: int, out: torch.Tensor) -> None:
        self.prefetch(table, ids)
        super().read(table, ids, begin, end, out)

    def write(self, table: int, ids: torch.Tensor, values: torch.Tensor, begin: int, now: int, visit: bool) -> int:
        self.prefetch(table, ids[: ids.numel() // 2])
        return super().write(table, ids, values, begin, now, visit)

    def write_rows(self, table: int, ids: torch.Tensor, rows: torch.Tensor) -> int:
        self.prefetch(table, ids[::2].contiguous())
        return super().write_rows(table, ids, rows)

    def update(
        self, table: int, ids: torch.Tensor, grads: torch.Tensor, hyper: torch.Tensor, now: int, step: int
    ) -> int:
        self.prefetch(table, ids)
        return super().update(table, ids, grads, hyper, now, step)

    def delete(self, table: int, ids: torch.Tensor) -> tuple[int, int]:
        self.prefetch(table, ids + 1)
        return super().delete(table, ids)

    def snapshot(self) -> Any:
        """A moment has no cache."""
        taken = super().snapshot()
        return None if taken is None else self.still(taken.tensor)

    @classmethod
    def still(cls, tensor: torch.Tensor) -> DeviceHandle:
        """A handle of rows that stay where they are."""
        return DeviceHandle(tensor)


class MovingHandle(_Moving, SimtHandle):
    """The same over the operators of this library."""

    @classmethod
    def still(cls, tensor: torch.Tensor) -> DeviceHandle:
        """The same over the operators of this library."""
        return SimtHandle(tensor)


def _cached(options: StoreOptions) -> StoreOptions:
    return dataclasses.replace(options, row_memory="host", cache_rows=dict.fromkeys(options.layouts, 16))


def _rows_behind_a_cache(options: StoreOptions) -> RowEngine:
    if options.device != "cpu":
        return rows_of(options)
    cached = _cached(options)
    return LockedDeviceRows(DeviceRows(cached, MovingHandle.create(table_messages(cached), options.num_shards)))


class CachedStore(KVStore, engine=_rows_behind_a_cache):
    """The same with rows in host memory, behind a cache of one set that is always in use."""


def store_in(layouts: Any, handle: type[SimtHandle], memory: dict[str, Any]) -> KVStore:
    """A store on the device that is run here, whose options are also these: ``row_memory``, ``cache_rows``."""

    def engine(options: StoreOptions) -> RowEngine:
        chosen = dataclasses.replace(options, **memory)
        return LockedDeviceRows(DeviceRows(chosen, handle.create(table_messages(chosen), options.num_shards)))

    class Store(KVStore, engine=engine):
        pass

    return Store(layouts, optimizer_in_row=True, clock=lambda: 1000, seed=7)


def _rows_on_gpu(options: StoreOptions) -> RowEngine:
    return LockedDeviceRows(device_rows(options))


def _rows_of_host_on_gpu(options: StoreOptions) -> RowEngine:
    return LockedDeviceRows(device_rows(_cached(options), _Moving))


def _rows_on_pretend(options: StoreOptions) -> RowEngine:
    if options.device != "cpu":
        return rows_of(options)
    from conformance.kvstore.simt.places import rows_on_pretend

    return rows_on_pretend(options)


_ENGINES = {
    "pretend": _rows_on_pretend,
    "simt": _rows_of,
    "simt-host": _rows_behind_a_cache,
    "cuda": _rows_on_gpu,
    "cuda-host": _rows_of_host_on_gpu,
}


def bind(device: str) -> None:
    """Make every ``fastimpl.kvstore.KVStore`` lie on "simt", "pretend" or "cuda", for the rest of the process.

    With "-host" behind, its rows lie in host memory, behind a cache of 16 that is always in use. Its tensors stay on
    the CPU, and so tests run unchanged. Raises CompileError.
    """
    if not device.startswith("cuda"):
        load_operators()
    KVStore._make_engine = staticmethod(_ENGINES[device])
