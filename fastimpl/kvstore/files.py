"""``save`` and ``load`` through the fast checkpoint: rows are streamed, and read once where a table is empty.

Meaning: ``refimpl.kvstore.WholeTensors``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import Any

import torch

from fastimpl import ops
from fastimpl.checkpoint import HuggingFaceStorageWriter
from fastimpl.checkpoint.readio import read_exactly
from fastimpl.kvstore.filling import WaitingRows, fill
from fastimpl.regimes import regime
from twinproof.checkpoint.catalog import Catalog
from twinproof.checkpoint.format import buffer_of, torch_dtype
from twinproof.checkpoint.whole import refusals
from twinproof.kvstore.disk import LOAD_CHUNK_ROWS, LoadReport, SavedRows, SavePart, SaveReport, StoreFiles, check_store
from twinproof.kvstore.rows import Buckets
from twinproof.kvstore.statedict import rank_and_world
from twinproof.kvstore.store import KVStore
from twinproof.kvstore.views import KVTensor, LazyRows, dense_rows

__all__ = ["StreamedFiles", "load", "save"]

BLOCK_BYTES = regime(4 << 20, 4096)
CHUNK_BYTES = regime(8 << 20, 512)
# Of a table that is filled: only the ids of so many rows are in memory twice, and threads meet once for each such part.
FILL_ROWS = regime(1 << 20, 5)


def save(
    store: KVStore,
    path: str | os.PathLike[str],
    *,
    buckets: Buckets | None = None,
    since: int | None = None,
    form: str = "rows",
    process_group: Any = None,
    chunk_rows: int | None = None,
    **writer_options: Any,
) -> SaveReport:
    # One thread gathers rows while another writes; blocks bound what is in flight.
    writer_options.setdefault("block_bytes", BLOCK_BYTES)
    writer_options.setdefault("thread_count", min(2, torch.get_num_threads()))
    own = {"buckets": buckets, "since": since, "form": form, "process_group": process_group, "chunk_rows": chunk_rows}
    return StoreFiles(StreamedFiles()).save(store, path, **own, **writer_options)


def load(
    store: KVStore,
    path: str | os.PathLike[str],
    *,
    weights_only: bool = False,
    tables: tuple[str, ...] | None = None,
    process_group: Any = None,
    owned: tuple[int, int] | None = None,
    chunk_rows: int | None = None,
    verify_checksums: bool = False,
    clear: bool = False,
) -> LoadReport:
    check_store(store)
    # A chunk is small enough to be in a cache still when it is checked or written.
    widest = max(layout.row_bytes for layout in store.options.rows.values())
    files = StreamedFiles(FILL_ROWS if chunk_rows is None else chunk_rows)
    rows = max(1, min(LOAD_CHUNK_ROWS, CHUNK_BYTES // widest)) if chunk_rows is None else chunk_rows
    return StoreFiles(files).load(
        store,
        path,
        weights_only=weights_only,
        tables=tables,
        process_group=process_group,
        owned=owned,
        chunk_rows=rows,
        verify_checksums=verify_checksums,
        clear=clear,
    )


save.__doc__, load.__doc__ = StoreFiles.save.__doc__, StoreFiles.load.__doc__


class StreamedFiles:
    """Rows are read when they are due, and forgotten.

    Args:
        fill_rows: rows of an empty table that are read in one call.
    """

    writer_class = HuggingFaceStorageWriter

    def __init__(self, fill_rows: int = FILL_ROWS) -> None:
        self._fill_rows = fill_rows

    def tensors(self, part: SavePart) -> dict[str, torch.Tensor]:
        """Lazy tensors that know where this rank's rows stand among those of all ranks."""
        rank = rank_and_world(part.process_group)[0]
        names = {"rows": "row"}
        if part.form == "separate":
            names = {view: view for view in ("weight", "metadata", *part.source.layout(part.table).state_slots)}
        rows: dict[str, LazyRows] = {
            name: KVTensor.over(part.source, part.ids, view, table=part.table, chunk_rows=part.chunk_rows)
            for name, view in names.items()
        }
        rows["ids"] = dense_rows(part.ids)
        for lazy in rows.values():
            lazy.place(sum(part.row_counts), sum(part.row_counts[:rank]))
        rows["bucket_counts"] = dense_rows(part.bucket_counts)
        rows["bucket_counts"].place(part.bucket_total, part.first_bucket)
        if part.deleted is not None:
            rows["deleted"] = dense_rows(part.deleted)
            rows["deleted"].place(sum(part.deleted_counts), sum(part.deleted_counts[:rank]))
        return {f"{part.table}.{name}": value for name, value in rows.items()}

    def open(self, path: str) -> SavedRows:
        """Ranges are read by all threads, and checked in one pass. Bytes are valid until the next are read."""
        return SavedRows(path, read=_Ranges().read, fits=ops.saved_rows_fit)

    def chunks(
        self, saved: SavedRows, table: str, begin: int, end: int, chunk_rows: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return saved.chunks(table, begin, end, chunk_rows)

    def fill(
        self, store: KVStore, saved: SavedRows, table: str, rows: range, weights_only: bool, ahead: int
    ) -> WaitingRows | None:
        return fill(self._fill_rows, store, saved, table, rows, weights_only, ahead)


class _Ranges:
    """Ranges of stored tensors, each read by all threads at once; exactly these bytes."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8, device="cpu")

    def read(self, catalog: Catalog, name: str, start: int, length: int) -> torch.Tensor:
        """Rows [start, start + length). Whole rows come in memory that the next whole rows are read into."""
        record = catalog.tensors[name]
        chunk, dtype = record.chunks[0], torch_dtype(record.dtype)
        assert dtype is not None
        shape = (length, *chunk.sizes[1:])
        if dtype == torch.uint8:
            if self._bytes.numel() < math.prod(shape):
                self._bytes = torch.empty(math.prod(shape), dtype=dtype, device="cpu")
            result = self._bytes[: math.prod(shape)].view(shape)
        else:
            result = torch.empty(shape, dtype=dtype, device="cpu")
        first = chunk.begin + start * math.prod(shape[1:]) * dtype.itemsize
        with refusals("reading", chunk.file):
            descriptor = os.open(chunk.file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if not ops.file_read(descriptor, first, result):
                # What is wrong is said as for every other file.
                read_exactly(descriptor, [memoryview(buffer_of(result)).cast("B")], first, chunk.file)
        finally:
            os.close(descriptor)
        return result
