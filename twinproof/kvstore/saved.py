"""Saved rows on disk: the schema of DESIGN section 2, checked before anything is believed, and read in ranges.

On disk, for each table, rows in bucket order and ids ascending inside a bucket::

    {table}.rows           U8  [N, row_bytes]     form "rows"
    {table}.weight         ..  [N, D]             form "separate", with {table}.metadata I64 [N, 1] and one
    {table}.{state}        ..  [N, count]           tensor for each optimizer state
    {table}.ids            I64 [N]
    {table}.bucket_counts  I64 [B]                from version 2
    {table}.deleted        I64 [M]                deltas only

``__metadata__`` has ``kvstore.version`` and ``kvstore.content`` (JSON). Version 3 told no steps of optimizers, version
2 named no moments and no bases; version 1 had one bucket, no deltas and only the form "rows".
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from twinproof.checkpoint.catalog import Catalog, read_catalog, read_chunk
from twinproof.checkpoint.format import torch_dtype
from twinproof.errors import ConfigError, CorruptionError, FormatError, MissingKeyError, VersionError
from twinproof.kvstore.buckets import Buckets, bucket_of
from twinproof.kvstore.convert import assemble_rows
from twinproof.kvstore.layout import RowLayout, unpack_header
from twinproof.kvstore.reading import RowSource
from twinproof.kvstore.views import check_keys, view_slice

__all__ = ["CONTENT_KEY", "FORMAT_VERSION", "VERSION_KEY", "SavedRows", "SavedTable", "content_metadata"]

VERSION_KEY, CONTENT_KEY = "kvstore.version", "kvstore.content"
FORMAT_VERSION = 4
KINDS, FORMS = ("full", "delta"), ("rows", "separate")

ReadRange = Callable[[Catalog, str, int, int], torch.Tensor]


def content_metadata(
    layouts: dict[str, RowLayout],
    buckets: Buckets,
    kind: str,
    form: str,
    moments: dict[str, str],
    bases: dict[str, tuple[str, ...]],
    steps: dict[str, int],
) -> dict[str, str]:
    """The two entries of ``__metadata__``; ``moments`` and ``bases`` by table, without those that have no name.

    ``steps``: the last step of each table whose rows have an optimizer.
    """
    content = {
        "bases": {table: list(names) for table, names in bases.items() if names},
        "buckets": [buckets.total_count, buckets.hash_mode, buckets.bucket_size],
        "form": form,
        "kind": kind,
        "layouts": {table: json.loads(layout.to_json()) for table, layout in layouts.items()},
        "moments": moments,
        "steps": steps,
    }
    return {
        VERSION_KEY: str(FORMAT_VERSION),
        CONTENT_KEY: json.dumps(content, sort_keys=True, separators=(",", ":")),
    }


def read_range(catalog: Catalog, name: str, start: int, length: int) -> torch.Tensor:
    """Rows [start, start + length) of a stored tensor; reads exactly these bytes."""
    record = catalog.tensors[name]
    dtype = torch_dtype(record.dtype)
    assert dtype is not None
    return read_chunk(record.chunks[0], dtype, start, length)


@dataclass(frozen=True)
class SavedTable:
    """One table on disk: its rows' layout, how many there are, how many each bucket has."""

    name: str
    layout: RowLayout
    row_count: int
    bucket_counts: torch.Tensor

    def rows_of(self, begin: int, end: int) -> tuple[int, int]:
        """The rows [first, behind last) of buckets [begin, end)."""
        return int(self.bucket_counts[:begin].sum()), int(self.bucket_counts[:end].sum())


class SavedRows(RowSource):
    """A saved store, read-only; a source for views, which find it again by its path in any process.

    Args:
        path: folder or file.
        read: how ranges of a tensor are read; the fast version has its own.

    Raises:
        VersionError: a newer format. FormatError: no saved store. CorruptionError: tensors that contradict the
            content. MissingKeyError: tensors that are not there. FileNotFoundError.
    """

    read_only = True

    def __init__(self, path: str | os.PathLike[str], *, read: ReadRange = read_range) -> None:
        self.path, self._read_range = os.fspath(path), read
        self.catalog = read_catalog(self.path)
        self.version, content = _content(self.catalog, self.path)
        try:
            total, mode, size = content.get("buckets", [1, "interleave", None])
            self.buckets = Buckets(total, mode, size)
            self.kind, self.form = content.get("kind", "full"), content.get("form", "rows")
            self.moments = {str(table): str(name) for table, name in content.get("moments", {}).items()}
            self.bases = {str(table): tuple(map(str, names)) for table, names in content.get("bases", {}).items()}
            self.steps = {str(table): _step(count) for table, count in content.get("steps", {}).items()}
            layouts = {name: RowLayout.from_json(json.dumps(value)) for name, value in content["layouts"].items()}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise FormatError("not the content of a saved store", got=str(error)[:200], where=self.path) from None
        if self.kind not in KINDS or self.form not in FORMS or not layouts:
            raise FormatError("not the content of a saved store", got=(self.kind, self.form), where=self.path)
        self.saved = {name: self._table_of(name, layout) for name, layout in layouts.items()}
        self._positions: dict[str, dict[int, int]] = {}

    def _table_of(self, name: str, layout: RowLayout) -> SavedTable:
        ids = self._shape(f"{name}.ids", "I64", 1)
        names = {f"{name}.rows": "row"}
        if self.form == "separate":
            names = {f"{name}.{view}": view for view in ("weight", "metadata", *layout.state_slots)}
        for tensor, view in names.items():
            begin, end, dtype = view_slice(layout, view)
            shape = self._shape(tensor, None, 2)
            stored = torch_dtype(self.catalog.tensors[tensor].dtype)
            if (stored, shape) != (dtype, (ids[0], (end - begin) // dtype.itemsize)):
                expected = (dtype, (ids[0], (end - begin) // dtype.itemsize))
                raise CorruptionError(
                    "not the rows of this layout", got=(stored, shape), expected=expected, where=tensor
                )
        counts = torch.tensor(list(ids))
        if self.version > 1:
            total = self._shape(f"{name}.bucket_counts", "I64", 1)[0]
            counts = self._read_range(self.catalog, f"{name}.bucket_counts", 0, total)
        if counts.numel() != self.buckets.total_count or int(counts.sum()) != ids[0] or bool((counts < 0).any()):
            raise CorruptionError("the bucket counts do not add up", got=int(counts.sum()), expected=ids[0], where=name)
        return SavedTable(name, layout, ids[0], counts)

    def _shape(self, name: str, dtype: str | None, rank: int) -> tuple[int, ...]:
        if name not in self.catalog.tensors:
            raise MissingKeyError("a tensor of the saved store is not there", got=name, where=self.path)
        record = self.catalog.tensors[name]
        if (dtype is not None and record.dtype != dtype) or len(record.shape) != rank or len(record.chunks) != 1:
            raise CorruptionError("not a tensor of this kind", got=(record.dtype, record.shape), where=name)
        return record.shape

    def saved_table(self, name: str) -> SavedTable:
        """One table. Raises MissingKeyError."""
        if name not in self.saved:
            raise MissingKeyError("the saved store has no such table", got=name, expected=sorted(self.saved))
        return self.saved[name]

    def rows(self, table: str, start: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids [length] and whole rows [length, row_bytes] from position ``start``, whatever the form.

        Raises:
            CorruptionError: keys and ids disagree, a row is unused, or an id stands in a wrong place.
        """
        layout, ids = self.saved_table(table).layout, self.read_ids(table, start, length)
        if self.form == "rows":
            rows = self._read_range(self.catalog, f"{table}.rows", start, length)
        else:
            names = ("weight", "metadata", *layout.state_slots)
            parts = {n: self._read_range(self.catalog, f"{table}.{n}", start, length) for n in names}
            rows = assemble_rows(layout, ids, parts["metadata"][:, 0], parts)
        self._check(table, ids, rows, start)
        return ids, rows

    def read_ids(self, table: str, start: int, length: int) -> torch.Tensor:
        """Ids int64 [length] from position ``start``, not checked."""
        return self._read_range(self.catalog, f"{table}.ids", start, length)

    def _check(self, table: str, ids: torch.Tensor, rows: torch.Tensor, start: int) -> None:
        check_keys(rows, ids, table)
        if not bool(unpack_header(rows).used.all()):
            raise CorruptionError("a row is not in use", where=f"{self.path}: {table}")
        self._check_order(table, ids, start)

    def _check_order(self, table: str, ids: torch.Tensor, start: int) -> None:
        ends = self.saved_table(table).bucket_counts.cumsum(0)
        buckets = torch.searchsorted(ends, torch.arange(start, start + ids.numel()), right=True)
        wrong = bucket_of(ids, self.buckets) != buckets
        unsorted = (ids[1:] <= ids[:-1]) & (buckets[1:] == buckets[:-1])
        if bool(wrong.any()) or bool(unsorted.any()):
            raise CorruptionError("ids that do not stand in bucket order", where=f"{self.path}: {table}.ids")

    def chunks(self, table: str, begin: int, end: int, chunk_rows: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Ids and whole rows of buckets [begin, end), at most ``chunk_rows`` at once; no other rows are read."""
        return self.between(table, *self.saved_table(table).rows_of(begin, end), chunk_rows)

    def between(
        self, table: str, first: int, behind: int, chunk_rows: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The same of positions [first, behind)."""
        seam = torch.zeros(0, dtype=torch.int64)
        for start in range(first, behind, chunk_rows):
            ids, rows = self.rows(table, start, min(chunk_rows, behind - start))
            # The last id of a chunk and the first of the next have an order, too.
            self._check_order(table, torch.cat([seam, ids[:1]]), start - seam.numel())
            seam = ids[-1:]
            yield ids, rows

    def deleted(self, table: str) -> torch.Tensor:
        """The ids that a delta removes, int64 [M]; of a full save none."""
        if self.kind == "full":
            return torch.zeros(0, dtype=torch.int64)
        return self._read_range(self.catalog, f"{table}.deleted", 0, self._shape(f"{table}.deleted", "I64", 1)[0])

    # --- as a source of views

    @property
    def tables(self) -> tuple[str, ...]:
        return tuple(self.saved)

    def layout(self, table: str) -> RowLayout:
        if table not in self.saved:
            raise ConfigError("no such table", got=table, expected=sorted(self.saved), where="table")
        return self.saved[table].layout

    def descriptor(self) -> dict[str, Any] | None:
        return {"path": os.path.abspath(self.path)}

    def _places(self, table: str) -> dict[int, int]:
        if table not in self._positions:
            ids = self._read_range(self.catalog, f"{table}.ids", 0, self.saved[table].row_count)
            self._positions[table] = {key: position for position, key in enumerate(ids.tolist())}
        return self._positions[table]

    def _read(self, table: str, ids: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        places = self._places(table)
        missing = [key for key in ids.tolist() if key not in places]
        if missing:
            raise MissingKeyError("ids that were not saved", got=missing[:10], where=f"{self.path}: {table}")
        found = [self.rows(table, places[key], 1)[1][:, begin:end] for key in ids.tolist()]
        return torch.cat(found) if found else torch.zeros(0, end - begin, dtype=torch.uint8)

    def _find(self, table: str, ids: torch.Tensor) -> torch.Tensor:
        return torch.tensor([key in self._places(table) for key in ids.tolist()], dtype=torch.bool)

    def _ids(self, table: str, begin: int, last: int) -> torch.Tensor:
        return torch.tensor(sorted(k for k in self._places(table) if begin <= k <= last), dtype=torch.int64)

    def _size(self, table: str) -> int:
        return self.saved[table].row_count


def _step(count: Any) -> int:
    if type(count) is not int or count < 0:
        raise ValueError(f"not a number of steps: {count!r}")
    return count


def _content(catalog: Catalog, path: str) -> tuple[int, dict[str, Any]]:
    text = catalog.metadata.get(VERSION_KEY)
    if text is None or not text.isdecimal() or not int(text) >= 1:
        raise FormatError("not a saved store", got=text, expected=f"{VERSION_KEY} in __metadata__", where=path)
    if int(text) > FORMAT_VERSION:
        raise VersionError(
            "saved by a newer version", got=int(text), expected=f"1 to {FORMAT_VERSION}", where=f"{path}: {VERSION_KEY}"
        )
    try:
        content = json.loads(catalog.metadata[CONTENT_KEY])
    except (KeyError, ValueError) as error:
        raise FormatError("not the content of a saved store", got=str(error), where=path) from None
    if not isinstance(content, dict):
        raise FormatError("not the content of a saved store", got=type(content).__name__, where=path)
    return int(text), content
