"""``plain_rows.cpp``, compiled on first use: what a plain loop over rows, bytes or ids reaches on this machine."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch

from conformance.harness.native import compile_once

__all__ = ["copy_bytes", "gather_rows", "sort_by_map"]

_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-pthread")


@cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(str(compile_once("plain_rows", Path(__file__).parent, ("plain_rows.cpp",), _FLAGS)))


def _call(function: str, *values: torch.Tensor | int) -> None:
    pointers = [ctypes.c_void_p(v.data_ptr()) if isinstance(v, torch.Tensor) else ctypes.c_int64(v) for v in values]
    _library()[function](*pointers)


def gather_rows(rows: torch.Tensor, places: torch.Tensor, out: torch.Tensor, thread_count: int) -> torch.Tensor:
    """``out[i] = rows[places[i]]``: uint8 [n, bytes], int64 [k], uint8 [k, bytes], bytes a multiple of 16."""
    _call("gather", rows, rows.shape[1], places, places.numel(), out, thread_count)
    return out


def copy_bytes(source: torch.Tensor, out: torch.Tensor, thread_count: int) -> torch.Tensor:
    """As many contiguous bytes as ``out`` has."""
    _call("copy", source, out, out.nbytes, thread_count)
    return out


def sort_by_map(ids: torch.Tensor, bucket_count: int) -> torch.Tensor:
    """Ids by bucket (id mod ``bucket_count``), sorted inside, through a map from bucket to list."""
    result = torch.empty_like(ids)
    _call("sort_by_map", ids, ids.numel(), bucket_count, result)
    return result
