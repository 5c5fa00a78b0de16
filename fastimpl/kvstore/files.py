"""``save`` and ``load`` through the fast checkpoint. Meaning: ``twinproof.kvstore.files``."""

from __future__ import annotations

import math
import os
from functools import partial
from typing import Any

import torch

from fastimpl import ops
from fastimpl.checkpoint import HuggingFaceStorageWriter
from fastimpl.checkpoint.readio import read_exactly
from fastimpl.kvstore.buckets import sort_ids_by_bucket
from fastimpl.kvstore.filling import fill
from twinproof.checkpoint.catalog import Catalog
from twinproof.checkpoint.format import buffer_of, torch_dtype
from twinproof.kvstore import files as reference
from twinproof.kvstore.base import KVStoreBase
from twinproof.kvstore.files import LoadReport, SaveReport
from twinproof.kvstore.saved import SavedRows

__all__ = ["load", "save"]

BLOCK_BYTES = 4 << 20
CHUNK_BYTES = 8 << 20
# Of a table that is filled: only the ids of so many rows are in memory twice, and threads meet once for each such part.
FILL_ROWS = 1 << 20


def save(store: KVStoreBase, path: str | os.PathLike[str], **options: Any) -> SaveReport:
    # One thread gathers rows while another writes; blocks bound what is in flight.
    options.setdefault("block_bytes", BLOCK_BYTES)
    options.setdefault("thread_count", min(2, torch.get_num_threads()))
    return reference.save_with(HuggingFaceStorageWriter, store, path, sort_ids=sort_ids_by_bucket, **options)


def load(store: KVStoreBase, path: str | os.PathLike[str], **options: Any) -> LoadReport:
    # A chunk is small enough to be in a cache still when it is checked or written.
    widest = max(layout.row_bytes for layout in store.options.rows.values())
    fill_rows = options.get("chunk_rows", FILL_ROWS)
    options.setdefault("chunk_rows", max(1, min(reference.LOAD_CHUNK_ROWS, CHUNK_BYTES // widest)))
    return reference.load_with(
        lambda found: FastSavedRows(found, read=_Ranges().read), store, path, fill=partial(fill, fill_rows), **options
    )


class FastSavedRows(SavedRows):
    """Saved rows, read by all threads and checked in one pass. Matrices of bytes are valid until the next is read.

    What is wrong, and how it is said, is the reference's.
    """

    def _check(self, table: str, ids: torch.Tensor, rows: torch.Tensor, start: int) -> None:
        ends = self.saved_table(table).bucket_counts.cumsum(0)
        if not ops.saved_rows_fit(rows, ids, ends, start, self.buckets.bucket_size or 0):
            super()._check(table, ids, rows, start)


class _Ranges:
    """Ranges of stored tensors, each read by all threads at once; exactly these bytes."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def read(self, catalog: Catalog, name: str, start: int, length: int) -> torch.Tensor:
        """Rows [start, start + length). Whole rows come in memory that the next whole rows are read into."""
        record = catalog.tensors[name]
        chunk, dtype = record.chunks[0], torch_dtype(record.dtype)
        assert dtype is not None
        shape = (length, *chunk.sizes[1:])
        if dtype == torch.uint8 and len(shape) == 2:
            if self._bytes.numel() < math.prod(shape):
                self._bytes = torch.empty(math.prod(shape), dtype=dtype)
            result = self._bytes[: math.prod(shape)].view(shape)
        else:
            result = torch.empty(shape, dtype=dtype)
        first = chunk.begin + start * math.prod(shape[1:]) * dtype.itemsize
        descriptor = os.open(chunk.file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if not ops.file_read(descriptor, first, result):
                # What is wrong is said as for every other file.
                read_exactly(descriptor, [memoryview(buffer_of(result)).cast("B")], first, chunk.file)
        finally:
            os.close(descriptor)
        return result


save.__doc__, load.__doc__ = reference.save.__doc__, reference.load.__doc__
