"""Batches of more than 4 GiB in a few MiB of memory: one small buffer that stands at every address again and again."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

import torch

__all__ = ["repeated"]

_PROT_NONE, _MAP_FIXED, _MAP_NORESERVE = 0, 0x10, 0x4000


def repeated(period_bytes: int, total_bytes: int) -> torch.Tensor:
    """A uint8 tensor [total_bytes] whose byte i is byte ``i % period_bytes`` of memory that exists once.

    Both sizes are multiples of the page, the total one of the period. Linux.
    """
    assert period_bytes % mmap.PAGESIZE == total_bytes % period_bytes == 0
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    base = _mapped(libc, None, total_bytes, _PROT_NONE, anonymous, -1)
    buffer = (ctypes.c_uint8 * total_bytes).from_address(base)
    # The tensor holds the buffer, and a failing test's report may still look at the tensor.
    weakref.finalize(buffer, libc.munmap, base, total_bytes)
    descriptor = os.memfd_create("repeated")
    try:
        os.ftruncate(descriptor, period_bytes)
        shared = mmap.MAP_SHARED | _MAP_FIXED
        for offset in range(0, total_bytes, period_bytes):
            _mapped(libc, base + offset, period_bytes, mmap.PROT_READ | mmap.PROT_WRITE, shared, descriptor)
    finally:
        os.close(descriptor)
    return torch.frombuffer(buffer, dtype=torch.uint8)


def _mapped(libc: ctypes.CDLL, address: int | None, size: int, protection: int, flags: int, descriptor: int) -> int:
    found: int = libc.mmap(address, size, protection, flags, descriptor, 0)
    if found == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return found
