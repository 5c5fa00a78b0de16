"""Reading a file that may be hostile: within bounds, by every way in, and beside the safetensors library."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors
import torch

from conformance.checkpoint.cases import own_count
from conformance.harness import Mismatch, assert_equal, assert_le

__all__ = ["bounded", "consolidate_into", "library_verdict", "read_metadata", "values_of"]

Values = dict[str, tuple[str, tuple[int, ...], bytes]]

_CPU_LIMIT_S = 1.0
# Opening a FIFO waits for a peer that never comes, without using processor time.
_HANG_LIMIT_S = 3.0
_SLACK_BYTES = 1 << 20
# Of the resident peak: pages that the allocator and tracemalloc themselves take.
_RESIDENT_SLACK_BYTES = 32 << 20


# A process of its own: a native reader may hold the interpreter's lock while it waits.
_WATCHDOG = """
import os, select, sys
if not select.select([0], [], [], float(sys.argv[1]))[0]:
    for path in sys.argv[2:]:
        os.close(os.open(path, os.O_RDWR))
    print("released")
"""


@contextmanager
def _released_from_fifos(folder: Path) -> Iterator[None]:
    """Be the peer that a reader of the folder's FIFOs waits for, after a while, and call that a mismatch."""
    fifos = [str(path) for path in folder.iterdir() if path.is_fifo()]
    if not fifos:
        yield
        return
    command = [sys.executable, "-I", "-S", "-c", _WATCHDOG, str(_HANG_LIMIT_S), *fifos]
    watchdog = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield
    finally:
        output, _ = watchdog.communicate()
    if output:
        raise Mismatch("the reader waits at a FIFO", got=f"no answer in {_HANG_LIMIT_S} s", expected="an error")


def _folder_bytes(folder: Path) -> int:
    # Allocated blocks, so that a sparse file does not pay for a reader that believes its length.
    return sum(entry.lstat().st_blocks * 512 for entry in folder.iterdir())


@contextmanager
def bounded(folder: Path, where: str) -> Iterator[None]:
    """Demand that the block takes under a second of processor time and at most twice the files' bytes and 1 MiB.

    Raises:
        Mismatch: beyond a bound, or after 3 s of waiting at a FIFO.
    """
    size_bytes = _folder_bytes(folder)
    Path("/proc/self/clear_refs").write_text("5")
    resident_bytes, started = own_count("status", "VmHWM") * 1024, time.process_time()
    tracemalloc.start()
    try:
        with _released_from_fifos(folder):
            yield
    finally:
        used_s = time.process_time() - started
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert_le(peak_bytes, 2 * size_bytes + _SLACK_BYTES, where=f"{where}: bytes allocated by Python")
    resident_growth_bytes = own_count("status", "VmHWM") * 1024 - resident_bytes
    assert_le(resident_growth_bytes, 2 * size_bytes + _RESIDENT_SLACK_BYTES, where=f"{where}: resident bytes")
    assert_le(used_s, _CPU_LIMIT_S, where=f"{where}: seconds of processor time")


@contextmanager
def consolidate_into(output: Path) -> Iterator[None]:
    """Demand that a failing consolidation leaves neither output nor leftovers beside it."""
    before = set(os.listdir(output.parent))
    try:
        yield
    finally:
        left = {name for name in os.listdir(output.parent) if name not in before}
        if output.is_dir() and not os.listdir(output):
            left.discard(output.name)
        assert_equal(sorted(left), [], where="left behind by a consolidation that failed")


def read_metadata(checkpoint: Any, folder: Path) -> Any:
    """What the implementation's reader says of a folder, before any tensor is asked for."""
    return checkpoint.HuggingFaceStorageReader(folder).read_metadata()


def library_verdict(content: bytes) -> Values | None:
    """What the safetensors library reads from these bytes; None where it refuses."""
    deserialize: Any = safetensors.deserialize
    try:
        found = deserialize(content)
    except safetensors.SafetensorError:
        return None
    return {name: (item["dtype"], tuple(item["shape"]), bytes(item["data"])) for name, item in found}


def values_of(tensors: dict[str, torch.Tensor]) -> Values:
    """The same form of tensors that an implementation loaded."""
    result: Values = {}
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        if tensor.dtype is torch.float4_e2m1fn_x2:
            shape = (*shape[:-1], 2 * shape[-1])
        content = bytes(tensor.reshape(-1).view(torch.uint8).tolist()) if tensor.numel() else b""
        result[name] = (_NAMES[tensor.dtype], shape, content)
    return result


_NAMES: dict[torch.dtype, Any] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.float4_e2m1fn_x2: "F4",
}
