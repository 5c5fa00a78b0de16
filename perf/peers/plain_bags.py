"""``plain_bags.cpp``, compiled on first use: the rows of a batch read once, which is what no pooling can undercut."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch

from conformance.harness.native import compile_once

__all__ = ["read_rows"]

_FLAGS = ("-std=c++17", "-O3", "-mavx2", "-fPIC", "-shared", "-pthread")


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(compile_once("plain_bags", Path(__file__).parent, ("plain_bags.cpp",), _FLAGS)))
    library["read_rows"].restype = ctypes.c_uint64
    return library


def read_rows(rows: torch.Tensor, places: torch.Tensor, thread_count: int) -> int:
    """The sum, modulo 2**64, of the 8-byte words of ``rows[places]``: any dtype [n, multiple of 8 bytes], int64 [k]."""
    row_bytes = rows.shape[1] * rows.element_size()
    pointers = [ctypes.c_void_p(rows.data_ptr()), ctypes.c_int64(row_bytes), ctypes.c_void_p(places.data_ptr())]
    found: int = _library().read_rows(*pointers, ctypes.c_int64(places.numel()), ctypes.c_int64(thread_count))
    return found
