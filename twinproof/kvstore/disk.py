"""``save`` and ``load``: whole rows through the checkpoint component, re-cut by bucket, all or nothing.

Prevents half-loaded stores: a load reads and checks every row that it is going to write, and makes room in all tables,
before it writes the first. The second reading comes from the page cache; memory stays at one chunk. On disk, for each
table, rows in bucket order and ids ascending inside a bucket::

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

import math
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from twinproof import regime
from twinproof.checkpoint.catalog import Catalog, check_present, crc32, verify_catalog
from twinproof.checkpoint.format import buffer_of, local_path, torch_dtype
from twinproof.checkpoint.groups import group_to_save_in
from twinproof.checkpoint.publish import raise_first, storage_error, together
from twinproof.checkpoint.whole import read_catalog, refusals
from twinproof.errors import (
    ConfigError,
    CorruptionError,
    DistributedError,
    MissingKeyError,
    TwinproofError,
    check_flags,
)
from twinproof.kvstore.deltas import (
    FORMS,
    LoadedPart,
    SavedContent,
    SaveNames,
    TableSummary,
    check_base,
    check_free_keys,
    check_load_fits,
    check_part,
    evict_for_load,
    named,
    new_id_count,
    note_load,
    part_after,
    read_content,
    reserve_for_load,
    summary_of,
)
from twinproof.kvstore.options import RowLayout, check_int, unpack_header
from twinproof.kvstore.rows import (
    Buckets,
    RowSource,
    TrackedSource,
    assemble_rows,
    bucket_of,
    check_convertible,
    check_row_range,
    chosen_buckets,
    convert_rows,
    nearest_bucket_of,
    rank_buckets,
    tables_of,
)
from twinproof.kvstore.statedict import check_agreed, gathered, rank_and_world
from twinproof.kvstore.store import KVStore
from twinproof.kvstore.views import check_keys, view_slice

__all__ = ["LoadReport", "PendingRows", "RowFiles", "SavePart", "SaveReport", "SavedRows", "SavedTable", "StoreFiles"]


LOAD_CHUNK_ROWS = regime(65536, 3)

Value = TypeVar("Value")
ReadRange = Callable[[Catalog, str, int, int], torch.Tensor]
# Whether rows, their ids, the ends of all buckets, the position of the first row and the bucket size fit each other.
RowsFit = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int, int], bool]


def read_range(catalog: Catalog, name: str, start: int, length: int) -> torch.Tensor:
    """Rows [start, start + length) of a stored tensor; exactly these bytes. Raises CorruptionError, StorageError."""
    record = catalog.tensors[name]
    chunk, dtype = record.chunks[0], torch_dtype(record.dtype)
    rows = torch.empty((length, *chunk.sizes[1:]), dtype=dtype, device="cpu")
    with refusals("reading", chunk.file), open(chunk.file, "rb") as file:
        file.seek(chunk.begin + start * math.prod(chunk.sizes[1:]) * rows.element_size())
        got = file.readinto(buffer_of(rows))
    if got != rows.nbytes:
        raise CorruptionError(
            "the file became shorter while it was read", got=got, expected=rows.nbytes, where=chunk.file
        )
    return rows


@dataclass(frozen=True)
class SavedTable:
    """One table on disk: its rows' layout, how many there are, how many each bucket has."""

    name: str
    layout: RowLayout
    row_count: int
    bucket_counts: torch.Tensor

    @cached_property
    def bucket_ends(self) -> torch.Tensor:
        """Where the rows of each bucket end, int64 [B]: asked for with every chunk, and worked out once."""
        return self.bucket_counts.cumsum(0)

    def rows_of(self, begin: int, end: int) -> tuple[int, int]:
        """The rows [first, behind last) of buckets [begin, end). Raises ConfigError."""
        total = self.bucket_counts.numel()
        if not (type(begin) is type(end) is int and 0 <= begin <= end <= total):
            raise ConfigError("not a range of buckets", got=(begin, end), expected=f"0 to {total}", where="begin, end")
        return int(self.bucket_counts[:begin].sum()), int(self.bucket_counts[:end].sum())


class SavedRows(RowSource):
    """A saved store, read-only; a source for views, which find it again by its path in any process.

    Args:
        path: folder or file.
        read: how a range of a tensor's rows is read.
        fits: says sooner than the checks here that rows are right; what is wrong with others is said here.

    Rows are read when they are asked for. An id that was not saved is a MissingKeyError then; where the files were
    replaced since they were opened, that is a CorruptionError. ``load`` and views that are unpickled open them again.

    Raises:
        VersionError: a newer format. FormatError: no saved store. CorruptionError: tensors that contradict the
            content. MissingKeyError: tensors that are not there. FileNotFoundError, StorageError.
    """

    read_only = True

    def __init__(
        self, path: str | os.PathLike[str], *, read: ReadRange = read_range, fits: RowsFit | None = None
    ) -> None:
        local_path(path)
        self.path, self._read_range, self._fits = _from_anywhere(os.fspath(path)), read, fits
        self.catalog = read_catalog(self.path)
        self.content = content = read_content(self.catalog.metadata, self.path)
        self.version, self.buckets, self.kind, self.form = content.version, content.buckets, content.kind, content.form
        self.fingerprints, self.bases, self.steps = content.fingerprints, content.bases, content.steps
        self.saved = {name: self._table_of(name, layout) for name, layout in content.layouts.items()}
        super().__init__(content.layouts, _SavedReader(self))

    def _table_of(self, name: str, layout: RowLayout) -> SavedTable:
        ids = self._shape(f"{name}.ids", "I64", 1)
        names = {f"{name}.rows": "row"}
        if self.form == "separate":
            names = {f"{name}.{view}": view for view in ("weight", "metadata", *layout.state_slots)}
        for tensor, view in names.items():
            begin, end, dtype = view_slice(layout, view)
            shape = self._shape(tensor, None, 2)
            stored = torch_dtype(self.catalog.tensors[tensor].dtype)
            expected = (dtype, (ids[0], (end - begin) // dtype.itemsize))
            if (stored, shape) != expected:
                raise CorruptionError(
                    "not the rows of this layout", got=(stored, shape), expected=expected, where=tensor
                )
        counts = torch.tensor(list(ids), device="cpu")
        if self.version > 1:
            total = self._shape(f"{name}.bucket_counts", "I64", 1)[0]
            counts = self._read_range(self.catalog, f"{name}.bucket_counts", 0, total)
        if counts.numel() != self.buckets.total_count or int(counts.sum()) != ids[0] or bool((counts < 0).any()):
            raise CorruptionError("the bucket counts do not add up", got=int(counts.sum()), expected=ids[0], where=name)
        return SavedTable(name, layout, ids[0], counts)

    def _shape(self, name: str, dtype: str | None, rank: int) -> tuple[int, ...]:
        if name not in self.catalog.tensors:
            raise MissingKeyError("a tensor that was not saved", got=name, expected="a saved one", where=self.path)
        record = self.catalog.tensors[name]
        if (dtype is not None and record.dtype != dtype) or len(record.shape) != rank or len(record.chunks) != 1:
            got, expected = (record.dtype, record.shape, len(record.chunks)), (dtype, f"{rank} dimensions", 1)
            raise CorruptionError("not a tensor of this kind", got=got, expected=expected, where=name)
        return record.shape

    def saved_table(self, name: str) -> SavedTable:
        """One table. Raises MissingKeyError."""
        if not isinstance(name, str) or name not in self.saved:
            raise MissingKeyError(
                "the saved store has no such table", got=name, expected=sorted(self.saved), where=self.path
            )
        return self.saved[name]

    def rows(self, table: str, start: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids [length] and whole rows [length, row_bytes] from position ``start``, whatever the form.

        Raises:
            CorruptionError: keys and ids disagree, a row is unused, or an id stands in a wrong place. ShapeError: a
                range outside the rows. ConfigError, MissingKeyError.
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
        """Ids int64 [length] from position ``start``, not checked. Raises ShapeError, ConfigError, MissingKeyError."""
        row_count = self.saved_table(table).row_count
        check_row_range(0, check_int(start, "start"), check_int(length, "length"), row_count)
        return self._read_range(self.catalog, f"{table}.ids", start, length)

    def file_of(self, name: str) -> str:
        """The file that holds a tensor. Raises MissingKeyError."""
        if not isinstance(name, str) or name not in self.catalog.tensors:
            raise MissingKeyError("a tensor that was not saved", got=name, expected="a saved one", where=self.path)
        return self.catalog.tensors[name].chunks[0].file

    def _check(self, table: str, ids: torch.Tensor, rows: torch.Tensor, start: int) -> None:
        if self._fits is not None:
            ends = self.saved_table(table).bucket_ends
            if self._fits(rows, ids, ends, start, self.buckets.bucket_size or 0):
                return
        self.check_rows(table, ids, rows)
        self.check_order(table, ids, start)

    def check_rows(self, table: str, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Demand that rows have these keys and are in use. Raises CorruptionError."""
        check_keys(rows, ids, table)
        if not bool(unpack_header(rows).used.all()):
            where = f"{self.path}: {table}"
            raise CorruptionError("a row is not in use", got="used=False", expected="used=True", where=where)

    def check_order(self, table: str, ids: torch.Tensor, start: int) -> None:
        """Demand that ids from position ``start`` are in their buckets, ascending inside. Raises CorruptionError."""
        ends = self.saved_table(table).bucket_ends
        buckets = torch.searchsorted(ends, torch.arange(start, start + ids.numel(), device="cpu"), right=True)
        wrong = bucket_of(ids, self.buckets) != buckets
        unsorted = (ids[1:] <= ids[:-1]) & (buckets[1:] == buckets[:-1])
        if bool(wrong.any()) or bool(unsorted.any()):
            at = int(wrong.nonzero()[0] if bool(wrong.any()) else unsorted.nonzero()[0] + 1)
            got, where = f"id {int(ids[at])} at {start + at}", f"{self.path}: {table}.ids"
            raise CorruptionError(
                "ids that do not stand in bucket order", got=got, expected="buckets, ascending", where=where
            )

    def chunks(self, table: str, begin: int, end: int, chunk_rows: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Ids and whole rows of buckets [begin, end), at most ``chunk_rows`` at once; no other rows are read.

        Raises ConfigError for what is no range of buckets or no chunk.
        """
        return self.between(table, *self.saved_table(table).rows_of(begin, end), chunk_rows)

    def between(
        self, table: str, first: int, behind: int, chunk_rows: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The same of positions [first, behind). Raises ShapeError for a range outside the rows."""
        row_count = self.saved_table(table).row_count
        check_row_range(0, check_int(first, "first"), check_int(behind, "behind") - first, row_count)
        _check_chunk(chunk_rows)
        return self._between(table, first, behind, chunk_rows)

    def _between(
        self, table: str, first: int, behind: int, chunk_rows: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        seam = torch.zeros(0, dtype=torch.int64, device="cpu")
        for start in range(first, behind, chunk_rows):
            ids, rows = self.rows(table, start, min(chunk_rows, behind - start))
            # The last id of a chunk and the first of the next have an order, too.
            self.check_order(table, torch.cat([seam, ids[:1]]), start - seam.numel())
            seam = ids[-1:]
            yield ids, rows

    @contextmanager
    def held(self, tables: Iterable[str]) -> Iterator[None]:
        """Inside, the files of these tables are read that have the headers which were read, whatever replaces them.

        They stay open, and are read by the names of their descriptors: what is replaced or deleted has its bytes until
        the end. Raises CorruptionError for what was replaced before, or is written over in place when it is asked for;
        StorageError where this process may not have so many files open.
        """
        catalog, prefixes = self.catalog, tuple(f"{table}." for table in tables)
        files = {r.chunks[0].file: "" for name, r in catalog.tensors.items() if name.startswith(prefixes)}
        with ExitStack() as opened:
            # A file that is gone is said to be replaced, and not only to be missing.
            catalog.check_unchanged(files)
            for file in files:
                with refusals(f"holding {len(files)} files open, as a load does,", file):
                    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
                opened.callback(os.close, descriptor)
                files[file] = f"/proc/self/fd/{descriptor}"
            self.catalog = _moved(catalog, files)
            try:
                # All headers were read before: of several files none is of another moment.
                self.catalog.check_unchanged()
                yield
            except (CorruptionError, OSError) as error:
                where = error.where if isinstance(error, CorruptionError) else error.filename
                path = {place: file for file, place in files.items()}.get(str(where))
                if path is not None:
                    raise _said_of(error, path) from error
                raise
            finally:
                self.catalog = catalog

    def deleted(self, table: str) -> torch.Tensor:
        """The ids that a delta removes, int64 [M]; of a full save none. Raises MissingKeyError."""
        self.saved_table(table)
        if self.kind == "full":
            return torch.zeros(0, dtype=torch.int64, device="cpu")
        return self._read_range(self.catalog, f"{table}.deleted", 0, self._shape(f"{table}.deleted", "I64", 1)[0])

    def reopened(self) -> tuple[Callable[..., RowSource], tuple[Any, ...]] | None:
        """By their path."""
        return SavedRows, (self.path,)


def _moved(catalog: Catalog, files: Mapping[str, str]) -> Catalog:
    """What a catalog says of these files, for the same ones under other names."""
    tensors = {
        name: replace(record, chunks=[chunk._replace(file=files[chunk.file]) for chunk in record.chunks])
        for name, record in catalog.tensors.items()
        if record.chunks[0].file in files
    }
    return replace(catalog, tensors=tensors, headers={place: catalog.headers[file] for file, place in files.items()})


def _said_of(error: CorruptionError | OSError, file: str) -> Exception:
    """The same error of a file by its path."""
    if isinstance(error, OSError):
        return storage_error(error, "reading", file)
    return CorruptionError(error.message, got=error.got, expected=error.expected, where=file)


def _from_anywhere(path: str) -> str:
    """The same path, whatever the working folder is. Links are followed before "..", as the system does."""
    return path if os.path.isabs(path) else os.path.join(os.getcwd(), path)


class _SavedReader:
    """Single rows of a saved store, by id. Files that were replaced since have other rows at the positions it knows."""

    def __init__(self, saved: SavedRows) -> None:
        self._saved = saved
        # Ids in ascending order, and their positions: 16 bytes a row.
        self._ordered: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def _order(self, table: str) -> tuple[torch.Tensor, torch.Tensor]:
        if table not in self._ordered:
            ids = self._saved.read_ids(table, 0, self.size(table))
            self._saved.catalog.check_unchanged()
            found = ids.sort(stable=True)
            self._ordered[table] = found.values, found.indices
        return self._ordered[table]

    def read(self, table: str, ids: torch.Tensor, begin: int, end: int, out: torch.Tensor) -> None:
        missing = ids[~self.find(table, ids)]
        if missing.numel():
            got, where = missing[:10].tolist(), f"{self._saved.path}: {table}"
            raise MissingKeyError("ids that were not saved", got=got, expected="ids of the saved table", where=where)
        known, order = self._order(table)
        positions, of_ids = torch.unique(order[torch.searchsorted(known, ids)], return_inverse=True)
        by_position = of_ids.argsort(stable=True)
        ends = of_ids.bincount(minlength=positions.numel()).cumsum(0)
        for first, behind in _neighbours(positions):
            stored, rows = self._saved.rows(table, int(positions[first]), behind - first)
            asked = by_position[int(ends[first - 1]) if first else 0 : int(ends[behind - 1])]
            found, expected = stored[of_ids[asked] - first], ids[asked]
            if not torch.equal(found, expected):
                # Files of one size that were written within one tick of the clock look the same.
                self._saved.catalog.check_unchanged()
                at, where = (found != expected).nonzero()[0], f"{self._saved.path}: {table}"
                seen, wanted = int(found[at]), int(expected[at])
                raise CorruptionError("another row than before", got=seen, expected=wanted, where=where)
            out[asked] = rows[of_ids[asked] - first, begin:end]
        self._saved.catalog.check_unchanged()

    def find(self, table: str, ids: torch.Tensor) -> torch.Tensor:
        known, _ = self._order(table)
        if not known.numel():
            return torch.zeros_like(ids, dtype=torch.bool)
        return known[torch.searchsorted(known, ids).clamp(max=known.numel() - 1)] == ids

    def ids(self, table: str, begin: int, last: int) -> torch.Tensor:
        known, _ = self._order(table)
        return known[(known >= begin) & (known <= last)]

    def size(self, table: str) -> int:
        return self._saved.saved_table(table).row_count


def _neighbours(positions: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Runs [first, behind) of ascending positions, int64 [n], without a gap: at most ``LOAD_CHUNK_ROWS`` of each."""
    cuts = [0, *((positions.diff() != 1).nonzero()[:, 0] + 1).tolist(), positions.numel()]
    for first, behind in pairwise(cuts):
        for begin in range(first, behind, LOAD_CHUNK_ROWS):
            yield begin, min(begin + LOAD_CHUNK_ROWS, behind)


@dataclass(frozen=True)
class SaveReport:
    """What a save wrote from this rank: rows and removed ids by table, the mark for the next delta, phase times."""

    row_counts: dict[str, int]
    deleted_counts: dict[str, int]
    mark: int
    phase_seconds: dict[str, float] = field(compare=False)


@dataclass(frozen=True)
class LoadReport:
    """What a load brought to this rank: rows and removed ids by table, phase times."""

    row_counts: dict[str, int]
    deleted_counts: dict[str, int]
    phase_seconds: dict[str, float] = field(compare=False)


@dataclass(frozen=True)
class SavePart:
    """What one rank saves of one table, and where it stands among all ranks.

    ``ids``: int64 [n], in bucket order. ``bucket_counts``: int64 [B], of this rank's buckets, which begin at
    ``first_bucket`` of ``bucket_total``. ``deleted``: int64 [m], or None in a full save. ``form``: "rows" or
    "separate". ``row_counts`` and ``deleted_counts``: of every rank, by rank. ``chunk_rows``: rows read at once, at
    most; None is the implementation's choice.
    """

    source: TrackedSource
    table: str
    ids: torch.Tensor
    bucket_counts: torch.Tensor
    first_bucket: int
    bucket_total: int
    deleted: torch.Tensor | None
    form: str
    row_counts: list[int]
    deleted_counts: list[int]
    chunk_rows: int | None
    process_group: Any

    def of_all_ranks(self, value: Value) -> list[Value]:
        """Every rank's ``value``, by rank; every rank calls this."""
        return gathered(lambda: value, self.process_group)


class PendingRows(Protocol):
    """Checked rows beside an empty table, which nobody sees."""

    def publish(self) -> bool:
        """Make them the table's, in one step; False, and nothing done, if the table is not empty any more."""

    def close(self) -> None:
        """Let go of what the table did not take."""


class RowFiles(Protocol):
    """The way of rows into files and back: all that two implementations of ``save`` and ``load`` do differently.

    What is saved, by which rank, under which names, and when it is seen; what may be loaded, and that all of it is or
    nothing: that exists once, in ``StoreFiles``. An implementation may gather everything and slice it, or stream.
    """

    @property
    def writer_class(self) -> Any:
        """The implementation's ``HuggingFaceStorageWriter``."""

    def tensors(self, part: SavePart) -> dict[str, torch.Tensor]:
        """What a save writes of one table, by name, for ``torch.distributed.checkpoint.save``.

        ``{table}.rows``, or ``weight``, ``metadata`` and each state; ``ids``, ``bucket_counts``, and ``deleted`` of a
        delta. Every rank calls this, for the same tables in the same order.
        """

    def open(self, path: str) -> SavedRows:
        """The saved store at a path."""

    def chunks(
        self, saved: SavedRows, table: str, begin: int, end: int, chunk_rows: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Ids and whole rows of buckets [begin, end), checked, at most ``chunk_rows`` at once; no others are read."""

    def fill(
        self, store: KVStore, saved: SavedRows, table: str, rows: range, weights_only: bool, ahead: int
    ) -> PendingRows | None:
        """Read and check the rows of an empty table, positions ``rows``, beside it, so that they are read once.

        None: they have to be converted first, or the implementation knows no such way. ``ahead``: how many tables wait
        before this one. Raises what reading raises, and AllocationError.
        """


class StoreFiles:
    """``save`` and ``load`` of one implementation, over its way of rows into files.

    Args:
        files: see ``RowFiles``.
    """

    def __init__(self, files: RowFiles) -> None:
        self._files = files

    def save(
        self,
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
        """Save one moment of the store as HF safetensors, rows in bucket order, ids ascending inside a bucket.

        Equal contents give equal bytes. Called by every rank; each saves its own buckets (``rank_buckets``).

        Args:
            store: the store.
            path: folder; replaced at one instant.
            buckets: how ids fall into buckets; the same on every rank. None is one bucket.
            since: save only rows that changed after this mark, and which went (needs ``track_changes``).
            form: "rows", or "separate" for weight, metadata and each state as tensors of their own.
            process_group: None is the default group, or this process alone.
            chunk_rows: rows handed over at once, at most; None is 16 MiB worth.
            writer_options: further options of ``HuggingFaceStorageWriter``, but for ``export_dtype`` and
                ``enable_consolidation=False``: ``load`` takes rows as their layout says, in final files.

        Raises:
            ConfigError: an id outside this rank's buckets, changes that are not tracked, options that are none or
                whose files cannot be loaded, a process that is not of the group. On every rank: a delta of what the
                ranks together had loaded in part; ranks that ask for different buckets, forms or kinds, or whose rows
                have different layouts.
            CheckpointExistsError, StorageError. DistributedError: another rank failed; the rank at fault raises its
                own error. CheckpointException: torch's, with what is none of this project's errors and no OSError.
        """
        chosen = Buckets() if buckets is None else buckets
        started, named_by_user = time.perf_counter(), writer_options.pop("metadata", None) or {}
        rank, world_size = rank_and_world(process_group)
        with group_to_save_in(process_group) as group, ExitStack() as opened:

            def writer_with(metadata: Mapping[str, str]) -> Any:
                return self._files.writer_class(path, metadata=metadata, process_group=group, **writer_options)

            def begun() -> TrackedSource:
                check_store(store)
                chosen_buckets(buckets)
                # Options that the writer refuses are refused while the others listen.
                writer_with(named_by_user)
                check_free_keys(named_by_user)
                _check_writer_options(writer_options)
                return opened.enter_context(store.snapshot())

            plan = _parts(store, begun, chosen, since, form, process_group, chunk_rows)

            def planned() -> tuple[int, list[SavePart], dict[str, str], dict[str, torch.Tensor], Any]:
                source, parts, (fingerprints, bases, steps) = plan()
                state: dict[str, torch.Tensor] = {}
                for part in parts:
                    state |= self._files.tensors(part)
                kind = "full" if since is None else "delta"
                content = SavedContent(store.options.rows, chosen, kind, form, fingerprints, bases, steps)
                writer = opened.enter_context(writer_with(content.metadata() | named_by_user))
                return source.mark(), parts, fingerprints, state, writer

            mark, parts, fingerprints, state, writer = together(planned, group)
            planned_s = time.perf_counter()
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                try:
                    dcp.save(state, storage_writer=writer, process_group=process_group, no_dist=world_size == 1)
                except CheckpointException as error:
                    _raise_named(error, rank)
                    raise
        store.fingerprints.note(mark, fingerprints)
        counts = {part.table: part.ids.numel() for part in parts}
        deleted = {part.table: 0 if part.deleted is None else part.deleted.numel() for part in parts}
        phases = {"plan": planned_s - started, "write": time.perf_counter() - planned_s}
        return SaveReport(counts, deleted, mark, phases)

    def load(
        self,
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
        """Load the buckets that this rank owns, in either form; listed ids are replaced, other rows stay or go.

        A delta replaces its rows and removes its deleted ids. It loads only into tables whose last load was its base:
        the full save or delta whose mark it was given as ``since``; and only for buckets that the base was loaded for.
        Full loads of one save for several ranges count together. Where the base was loaded with ``weights_only``, its
        deltas are loaded so too. A delta that names no base (its store was at that mark neither saved nor loaded, or
        the format is older) loads anywhere: apply such deltas in the order in which they were saved. Timestamps, counts
        and the optimizer's step come from the file. The world may have another size than the one that saved. Every row
        is checked, and room is made in all tables, before the first is written: where memory is short, nothing has
        changed, but for what ``load_state_dict`` names and for rows that a delta removes, which go first. Values of
        other dtypes are rounded to nearest even. Who listens to the store is told behind the last row. Files that are
        replaced or deleted meanwhile are read as they were when the load began. In a table with a capacity the load is
        one batch: rows that it does not list make room for it. Each rank loads by itself and waits for no other, which
        does not hear of what it raises. A load of no bucket leaves a table that has rows what it was loaded from, and
        needs no base.

        Ids without a row get the loading store's initial weights, which no file holds: give it the seed, initializer
        and order of tables of the store that saved. One that loads a part of the tables has all of them, in that order,
        or at least those before; ``tables`` names the part.

        A store that follows another by deltas and missed one begins anew with a full save and ``clear``: without it,
        ids that went from the other store since would stay, and no later delta names them.

        Args:
            store: the store; it must have the same tables, or a part of them named by ``tables``.
            path: folder or file.
            weights_only: optimizer states become zero; needed when the saved optimizer is another.
            tables: only these; None demands that store and file have the same tables.
            process_group: None is the default group, or this process alone.
            owned: buckets [begin, end) of this rank; None is ``rank_buckets``.
            chunk_rows: rows in memory at once, at most; None is as many as the implementation takes.
            verify_checksums: compare all bytes of the files with the sums of a save with ``checksums=True`` before a
                row is written. A sum is of a whole tensor: every rank reads all of them once more.
            clear: of a full save: rows of these tables that this load does not list go, when all others are written.

        Raises:
            FormatError, VersionError: not a saved store, or a newer one. CorruptionError: torn, contradicting itself,
                replaced while its headers were read; or written over in place, which may be found when rows of both
                were written. MissingKeyError: a table that is not there. ConfigError: other layouts, no checksums where
                they are to be verified, or ``clear`` with a delta. CapacityError: more rows than a table may hold.
                DeltaBaseError: a delta on another base, or for buckets or states that its base was not loaded for.
                FileNotFoundError.
        """
        check_store(store)
        check_flags(weights_only=weights_only, verify_checksums=verify_checksums, clear=clear)
        chunk_rows = LOAD_CHUNK_ROWS if chunk_rows is None else chunk_rows
        _check_chunk(chunk_rows)
        started, (rank, world_size) = time.perf_counter(), rank_and_world(process_group)
        saved = self._files.open(os.fspath(local_path(path)))
        if tables is None and set(saved.tables) != set(store.tables):
            raise ConfigError(
                "other tables than the store's", got=sorted(saved.tables), expected=sorted(store.tables), where=path
            )
        if clear and saved.kind != "full":
            raise ConfigError("a delta says itself which rows go", got=True, expected=False, where=f"clear, {path}")
        names = tables_of(store.tables, tables)
        total = saved.buckets.total_count
        begin, end = rank_buckets(total, world_size, rank) if owned is None else _pair(owned)
        if not 0 <= begin <= end <= total:
            raise ConfigError("not a range of buckets", got=(begin, end), expected=total, where="owned")
        asked = {table: _part(store, saved, table, begin, end, weights_only) for table in names}
        # Of no bucket nothing comes: rows that are there stay what they were loaded from.
        named_anew = [table for table in names if clear or asked[table].ranges or not store.size(table)]
        gone = {}
        for table in names:
            _check_table(store, saved, table, begin, end, weights_only=weights_only, where=f"{path}: {table}")
            if table in named_anew:
                check_base(store, table, saved.bases.get(table, ()), f"{path}: {table}")
            check_part(store, saved.content, table, asked[table], f"{path}: {table}")
            removed = saved.deleted(table)
            # An id may have gone because it was outside of all buckets.
            found = nearest_bucket_of(removed, saved.buckets)
            gone[table] = removed[(found >= begin) & (found < end)]
        if verify_checksums:
            check_present(saved.catalog, path)
            verify_catalog(saved.catalog, path, crc32)
        job = _Load(self._files, store, saved, names, begin, end, chunk_rows, weights_only, clear)
        with ExitStack() as told, ExitStack() as opened:
            opened.enter_context(saved.held(names))
            waiting, listed = job.read(opened, gone)
            saved.catalog.check_unchanged()
            checked, mark, sizes = time.perf_counter(), store.mark(), {table: store.size(table) for table in names}
            # What an earlier load brought goes with ``clear``.
            parts = asked if clear else {t: part_after(store, saved.content, t, asked[t]) for t in names}
            for table in named_anew:
                store.fingerprints.set_loaded(table, None)
            # What a delta removes goes first: it may be what makes room.
            deleted = {table: store.delete(table, ids) if ids.numel() else 0 for table, ids in gone.items()}
            counts = {}
            # Behind all rows and the names of what was loaded: a listener may raise. What ends it leaves rows, too.
            begun = list[str]()
            told.callback(lambda: store.tell_written(*begun))
            for table in names:
                if job.row_count(table):
                    begun.append(table)
                counts[table], cleared_count = job.write(table, waiting.get(table), listed.get(table))
                deleted[table] += cleared_count
                if not weights_only:
                    store.set_step_count(table, saved.steps.get(table, store.step_count(table)))
            saved.catalog.check_unchanged()
            known = {table: counts[table] for table in named_anew}
            note_load(store, saved.content, known, mark, {} if clear else sizes, parts, weights_only)
        return LoadReport(counts, deleted, {"check": checked - started, "write": time.perf_counter() - checked})


def _raise_named(error: CheckpointException, rank: int) -> None:
    """Raise what torch's checkpoint wraps, as it was raised.

    Raises this rank's own error, where it is one of this project or of the system; DistributedError, where others
    failed. Else torch's is to be raised.
    """
    failures = {at: failure for at, (failure, _) in error.failures.items()}
    # A rank that waited for another may say no more than that.
    own = {at: failure for at, failure in failures.items() if not isinstance(failure, DistributedError)}
    first = own or failures
    if rank not in first:
        raise_first([first.get(at) for at in range(1 + max(first))])
    mine = first[rank]
    if isinstance(mine, TwinproofError | OSError):
        raise mine from mine.__cause__


def _part(store: KVStore, saved: SavedRows, table: str, begin: int, end: int, weights_only: bool) -> LoadedPart:
    """What a load of these buckets brings. Rows without states are whole, whatever was asked for."""
    ranges = ((begin, end),) if begin < end else ()
    return LoadedPart(saved.buckets, ranges, weights_only and bool(store.layout(table).state_slots))


def _pair(owned: Any) -> tuple[int, int]:
    if not isinstance(owned, Sequence) or len(owned) != 2 or any(type(bound) is not int for bound in owned):
        raise ConfigError("not a range of buckets", got=owned, expected="(begin, end)", where="owned")
    return owned[0], owned[1]


def check_store(store: Any) -> None:
    """Demand a store. Raises ConfigError."""
    if not isinstance(store, KVStore):
        raise ConfigError("not a store", got=type(store).__name__, expected="a KVStore", where="store")


def _check_writer_options(options: Mapping[str, Any]) -> None:
    """Refuse options whose files ``load`` would refuse. Raises ConfigError."""
    for name, kept in (("export_dtype", None), ("enable_consolidation", True)):
        if options.get(name, kept) != kept:
            raise ConfigError("rows saved so could not be loaded", got=options[name], expected=repr(kept), where=name)


def _check_chunk(chunk_rows: Any) -> None:
    if type(chunk_rows) is not int or chunk_rows < 1:
        raise ConfigError("not a chunk", got=chunk_rows, expected="rows >= 1", where="chunk_rows")


def _parts(
    store: KVStore,
    begin: Callable[[], TrackedSource],
    buckets: Buckets,
    since: int | None,
    form: str,
    process_group: Any,
    chunk_rows: int | None,
) -> Callable[[], tuple[TrackedSource, list[SavePart], SaveNames]]:
    """What gives the moment of a save, this rank's part of every table, and names that all ranks agree on.

    The ranks tell each other of their parts here, in one exchange. What one rank must not be asked is found in it,
    where the others hear of it; what is given later is worked out by each alone.
    """
    rank, world_size = rank_and_world(process_group)
    sorted_ids: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    deleted: dict[str, torch.Tensor] = {}
    moment: list[TrackedSource] = []

    def local_parts() -> tuple[Any, dict[str, TableSummary]]:
        source = begin()
        moment.append(source)
        if form not in FORMS:
            raise ConfigError("not a form", got=form, expected=FORMS, where="form")
        if chunk_rows is not None:
            _check_chunk(chunk_rows)
        first, behind = rank_buckets(buckets.total_count, world_size, rank)
        for table in store.tables:
            ids, gone = (source.ids(table), None) if since is None else source.changes(table, since)
            sorted_ids[table] = store.sort_ids(ids, buckets, first, behind)
            if gone is not None:
                deleted[table] = gone
        asked = {"buckets": buckets, "form": form, "delta": since is not None, "tables": tuple(sorted_ids)}
        # Rows of another layout would be read by this one's.
        asked |= {"layouts": store.options.rows, "changes are tracked": store.options.track_changes}
        return asked, {
            t: summary_of(store, source, t, ids[:, 0], deleted.get(t), since) for t, (ids, _) in sorted_ids.items()
        }

    told = gathered(local_parts, process_group)

    def planned() -> tuple[TrackedSource, list[SavePart], SaveNames]:
        check_agreed([asked for asked, _ in told])
        by_rank = [summaries for _, summaries in told]
        first_bucket, _ = rank_buckets(buckets.total_count, world_size, rank)
        (source,) = moment
        parts = [
            SavePart(
                source=source,
                table=table,
                ids=ids[:, 0],
                bucket_counts=counts[:, 0],
                first_bucket=first_bucket,
                bucket_total=buckets.total_count,
                deleted=deleted.get(table),
                form=form,
                row_counts=[found[table].row_count for found in by_rank],
                deleted_counts=[found[table].deleted_count for found in by_rank],
                chunk_rows=chunk_rows,
                process_group=process_group,
            )
            for table, (ids, counts) in sorted_ids.items()
        ]
        return source, parts, named(store, by_rank, since)

    return planned


def _check_table(
    store: KVStore, saved: SavedRows, table: str, begin: int, end: int, *, weights_only: bool, where: str
) -> None:
    found = saved.saved_table(table)
    check_convertible(found.layout, store.layout(table), weights_only=weights_only, where=where)
    first, behind = found.rows_of(begin, end)
    check_load_fits(store, table, behind - first)


@dataclass(frozen=True)
class _Load:
    """One load: ``read`` sees and checks every row before ``write`` writes the first."""

    files: RowFiles
    store: KVStore
    saved: SavedRows
    names: tuple[str, ...]
    begin: int
    end: int
    chunk_rows: int
    weights_only: bool
    clear: bool

    def row_count(self, table: str) -> int:
        """How many rows it brings."""
        first, behind = self.saved.saved_table(table).rows_of(self.begin, self.end)
        return behind - first

    def read(
        self, opened: ExitStack, gone: Mapping[str, torch.Tensor]
    ) -> tuple[dict[str, PendingRows], dict[str, torch.Tensor]]:
        """Rows that wait beside empty tables; and of all other tables the ids, where others go or make room.

        For these there is room then. ``gone``: by table, the ids that go before any is written, int64 [n].
        """
        waiting: dict[str, PendingRows] = {}
        listed: dict[str, torch.Tensor] = {}
        new_counts: dict[str, int] = {}
        for table in self.names:
            first, behind = self.saved.saved_table(table).rows_of(self.begin, self.end)
            filled = None
            if self.saved.kind == "full" and self.store.size(table) == 0:
                rows, ahead = range(first, behind), len(waiting)
                filled = self.files.fill(self.store, self.saved, table, rows, self.weights_only, ahead)
            if filled is not None:
                waiting[table] = opened.enter_context(closing(filled))
                continue
            listed[table], new_counts[table] = self._ids(table)
        # Of all tables first: memory that is short between two chunks or tables would leave half of the load.
        for table, new_count in new_counts.items():
            reserve_for_load(self.store, table, new_count, int(self.store.contains(table, gone[table]).sum()))
        return waiting, listed

    def write(self, table: str, waiting: PendingRows | None, ids: torch.Tensor | None) -> tuple[int, int]:
        """Write one table's rows; how many, and how many others went. ``waiting`` or ``ids`` is what ``read`` found."""
        if waiting is not None and waiting.publish():
            return self.row_count(table), 0
        other_count = 0
        if self._needs_ids(table):
            # Room is made now: another thread may have written to this table since.
            ids = self._ids(table)[0] if ids is None else ids
            if self.clear:
                other_count = self.store.size(table) - int(self.store.contains(table, ids).sum())
            evict_for_load(self.store, table, ids)
        source, target = self.saved.saved_table(table).layout, self.store.layout(table)
        row_count = 0
        for some, rows in self._chunks(table):
            found = convert_rows(rows, source, target, weights_only=self.weights_only)
            self.store.set_rows(table, found.contiguous(), tell=False)
            row_count += some.numel()
        if not self.clear:
            return row_count, 0
        assert ids is not None
        present = self.store.ids(table)
        self.store.delete(table, present[~torch.isin(present, ids)].contiguous())
        return row_count, other_count

    def _needs_ids(self, table: str) -> bool:
        """Whether others go or make room."""
        return self.clear or self.store.options.capacities[table] is not None

    def _ids(self, table: str) -> tuple[torch.Tensor, int]:
        """Reads and checks every row. The ids where others go or make room, else none: they would fill memory.

        And how many of all ids have no row yet.
        """
        is_needed, new_count = self._needs_ids(table), 0
        kept = [torch.zeros(0, dtype=torch.int64, device="cpu")]
        for ids, _ in self._chunks(table):
            new_count += new_id_count(self.store, table, ids)
            if is_needed:
                kept.append(ids)
        return torch.cat(kept), new_count

    def _chunks(self, table: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return self.files.chunks(self.saved, table, self.begin, self.end, self.chunk_rows)
