"""``plain_rows.cpp``, compiled on first use: what a plain loop over rows, bytes or ids reaches on this machine."""

from __future__ import annotations

import ctypes
import weakref
from functools import cache
from pathlib import Path

import torch

from conformance.harness.native import compile_once

__all__ = ["Workers", "copy_bytes", "gather_rows", "sort_by_map"]

_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-pthread")


@cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(str(compile_once("plain_rows", Path(__file__).parent, ("plain_rows.cpp",), _FLAGS)))


class Workers:
    """Threads that wait for work as long as this object lives, so that no call pays for starting them.

    Args:
        thread_count: the caller included.
    """

    def __init__(self, thread_count: int) -> None:
        library = _library()
        library.start_workers.restype = ctypes.c_void_p
        self.pointer: int = library.start_workers(ctypes.c_int64(thread_count))
        weakref.finalize(self, library.end_workers, ctypes.c_void_p(self.pointer))


def _call(function: str, *values: torch.Tensor | int | Workers) -> None:
    def argument(value: torch.Tensor | int | Workers) -> ctypes.c_void_p | ctypes.c_int64:
        if isinstance(value, torch.Tensor):
            return ctypes.c_void_p(value.data_ptr())
        return ctypes.c_void_p(value.pointer) if isinstance(value, Workers) else ctypes.c_int64(value)

    _library()[function](*map(argument, values))


def gather_rows(rows: torch.Tensor, places: torch.Tensor, out: torch.Tensor, workers: Workers) -> torch.Tensor:
    """``out[i] = rows[places[i]]``: uint8 [n, bytes], int64 [k], uint8 [k, bytes], bytes a multiple of 8."""
    _call("gather", rows, rows.shape[1], places, places.numel(), out, workers)
    return out


def copy_bytes(source: torch.Tensor, out: torch.Tensor, workers: Workers) -> torch.Tensor:
    """As many contiguous bytes as ``out`` has."""
    _call("copy", source, out, out.nbytes, workers)
    return out


def sort_by_map(ids: torch.Tensor, bucket_count: int) -> torch.Tensor:
    """Ids by bucket (id mod ``bucket_count``), sorted inside, through a map from bucket to list."""
    result = torch.empty_like(ids)
    _call("sort_by_map", ids, ids.numel(), bucket_count, result)
    return result
