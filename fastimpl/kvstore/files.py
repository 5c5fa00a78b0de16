"""``save`` and ``load`` through the fast checkpoint. Meaning: ``refimpl.kvstore.files``."""

from __future__ import annotations

import math
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from fastimpl import ops
from fastimpl.checkpoint import HuggingFaceStorageWriter
from fastimpl.checkpoint.readio import read_exactly
from fastimpl.kvstore.buckets import sort_ids_by_bucket
from refimpl.checkpoint.catalog import Catalog
from refimpl.checkpoint.layout import torch_dtype
from refimpl.checkpoint.memory import buffer_of
from refimpl.kvstore import files as reference
from refimpl.kvstore.base import KVStoreBase
from refimpl.kvstore.files import LoadReport, SaveReport
from refimpl.kvstore.saved import SavedRows

__all__ = ["load", "save"]

PART_BYTES = 1 << 20  # Less is not worth another thread.
BLOCK_BYTES = 4 << 20


def save(store: KVStoreBase, path: str | os.PathLike[str], **options: Any) -> SaveReport:
    # One thread gathers rows while another writes; blocks bound what is in flight.
    options.setdefault("block_bytes", BLOCK_BYTES)
    options.setdefault("thread_count", min(2, torch.get_num_threads()))
    return reference.save_with(HuggingFaceStorageWriter, store, path, sort_ids=sort_ids_by_bucket, **options)


def load(store: KVStoreBase, path: str | os.PathLike[str], **options: Any) -> LoadReport:
    with ThreadPoolExecutor(max_workers=torch.get_num_threads()) as pool:

        def read(catalog: Catalog, name: str, start: int, length: int) -> torch.Tensor:
            return _read_range(pool, catalog, name, start, length)

        return reference.load_with(lambda found: FastSavedRows(found, read=read), store, path, **options)


class FastSavedRows(SavedRows):
    """Saved rows that are checked in one pass; what is wrong, and how it is said, is the reference's."""

    def _check(self, table: str, ids: torch.Tensor, rows: torch.Tensor, start: int) -> None:
        ends = self.saved_table(table).bucket_counts.cumsum(0)
        if not ops.saved_rows_fit(rows, ids, ends, start, self.buckets.bucket_size or 0):
            super()._check(table, ids, rows, start)


def _read_range(pool: ThreadPoolExecutor, catalog: Catalog, name: str, start: int, length: int) -> torch.Tensor:
    """Rows [start, start + length) of a stored tensor, by all threads at once; exactly these bytes."""
    record = catalog.tensors[name]
    chunk, dtype = record.chunks[0], torch_dtype(record.dtype)
    assert dtype is not None
    result = torch.empty((length, *chunk.sizes[1:]), dtype=dtype)
    buffer = memoryview(buffer_of(result)).cast("B")
    first = chunk.begin + start * math.prod(chunk.sizes[1:]) * dtype.itemsize
    step = max(PART_BYTES, -(-len(buffer) // torch.get_num_threads()))
    descriptor = os.open(chunk.file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts = range(0, len(buffer), step)
        jobs = [pool.submit(read_exactly, descriptor, [buffer[at : at + step]], first + at, chunk.file) for at in parts]
        for job in jobs:
            job.exception()  # Every thread has ended before the descriptor closes.
        for job in jobs:
            job.result()
    finally:
        os.close(descriptor)
    return result


save.__doc__, load.__doc__ = reference.save.__doc__, reference.load.__doc__
