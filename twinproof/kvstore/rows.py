"""Rows behind one small interface: what an engine of rows does, and the reading verbs that every source of rows has.

Prevents a second version of checks and errors: an engine gets checked arguments and moves bytes. The verbs, their
checks and everything that is made of several calls exist once, above it. Buckets cut ids among ranks and order them in
files; rows of one layout become rows of another, and state is dropped only where the caller said ``weights_only``.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

import torch

from twinproof.errors import ConfigError, MissingKeyError, ShapeError, UnsupportedError, check_kind
from twinproof.kvstore.options import (
    COUNT_MAX,
    HEADER_BYTES,
    ID_DTYPES,
    METADATA_OFFSET,
    EvictionPolicy,
    Header,
    RowLayout,
    StateSlot,
    StoreOptions,
    StoreStats,
    as_bytes,
    check_count,
    check_ids,
    check_int,
    check_matrix,
    check_tensor,
    from_bytes,
    pack_header,
)
from twinproof.optimizers import Hyper

__all__ = [
    "Buckets",
    "RoundPlan",
    "RowEngine",
    "RowReader",
    "RowSource",
    "RowStore",
    "Snapshot",
    "TrackedReader",
    "TrackedSource",
    "assemble_rows",
    "bucket_number",
    "bucket_of",
    "check_buckets",
    "check_convertible",
    "check_out",
    "check_remembered",
    "check_row_range",
    "check_trained",
    "chosen_buckets",
    "convert_rows",
    "nearest_bucket_of",
    "places_of",
    "rank_buckets",
    "separate",
    "table_of",
    "without_padding",
]


HASH_MODES = ("interleave", "chunk")


@dataclass(frozen=True)
class Buckets:
    """How ids fall into buckets.

    Args:
        total_count: buckets 0 to total_count - 1.
        hash_mode: "interleave": ``id mod total_count``, never negative; "chunk": ``id // bucket_size``, floored.
        bucket_size: ids of a bucket, for "chunk" only.

    Raises:
        ConfigError: a value outside these.
    """

    total_count: int = 1
    hash_mode: str = "interleave"
    bucket_size: int | None = None

    def __post_init__(self) -> None:
        if type(self.total_count) is not int or not 1 <= self.total_count < 2**31:
            most = f"an int from 1 to {2**31 - 1}"
            raise ConfigError("not a bucket count", got=self.total_count, expected=most, where="total_count")
        if self.hash_mode not in HASH_MODES:
            raise ConfigError("not a hash mode", got=self.hash_mode, expected=HASH_MODES, where="hash_mode")
        size = self.bucket_size
        if (self.hash_mode == "chunk") != (type(size) is int and 1 <= size < 2**63):
            most = f"an int from 1 to {2**63 - 1}" if self.hash_mode == "chunk" else "None"
            raise ConfigError("bucket_size goes with chunk", got=size, expected=most, where="bucket_size")


def chosen_buckets(buckets: Any) -> Buckets:
    """The buckets that are meant, None being one. Raises ConfigError for what is none."""
    if buckets is None:
        return Buckets()
    check_kind(buckets, Buckets, "buckets", "Buckets")
    return buckets  # type: ignore[no-any-return]


def bucket_of(ids: torch.Tensor, buckets: Buckets) -> torch.Tensor:
    """The bucket of each id, int64 [n].

    Raises:
        ConfigError: an id that "chunk" puts outside all buckets; what is no buckets. UnsupportedError: what is no
            tensor of ids.
    """
    chosen_buckets(buckets)
    if check_tensor(ids, "ids").dtype not in ID_DTYPES:
        raise UnsupportedError("not a dtype of ids", got=ids.dtype, expected=ID_DTYPES, where="ids")
    found = bucket_number(ids, buckets)
    if buckets.hash_mode == "interleave":
        return found
    assert buckets.bucket_size is not None
    outside = ids[(found < 0) | (found >= buckets.total_count)]
    if outside.numel():
        limit = buckets.total_count * buckets.bucket_size
        raise ConfigError(
            "an id outside all buckets", got=outside[:10].tolist(), expected=f"0 to {limit - 1}", where="ids"
        )
    return found


def bucket_number(ids: torch.Tensor, buckets: Buckets) -> torch.Tensor:
    """What ``bucket_of`` finds, of ids outside of all buckets too: the number that one there would have, int64 [n]."""
    # The size of a bucket may be more than an int32 holds.
    wide = ids.to(torch.int64)
    if buckets.hash_mode == "interleave":
        return wide.remainder(buckets.total_count)
    assert buckets.bucket_size is not None
    return wide.div(buckets.bucket_size, rounding_mode="floor")


def nearest_bucket_of(ids: torch.Tensor, buckets: Buckets) -> torch.Tensor:
    """``bucket_of`` without a look at the answer: an id outside all buckets is in the one that is nearest."""
    found = bucket_number(ids, buckets)
    return found if buckets.hash_mode == "interleave" else found.clamp_(0, buckets.total_count - 1)


def rank_buckets(total_count: int, world_size: int, rank: int) -> tuple[int, int]:
    """The buckets [begin, end) of a rank: contiguous, and the first ``total_count % world_size`` ranks have one more.

    Source of the rule: torchrec's sharding of virtual tables. Raises ConfigError.
    """
    for name, number in (("total_count", total_count), ("world_size", world_size), ("rank", rank)):
        check_int(number, name)
    if total_count < 0 or not 0 <= rank < world_size:
        got, expected = (total_count, world_size, rank), "0 <= total_count, 0 <= rank < world_size"
        raise ConfigError("not a rank of a world", got=got, expected=expected, where="total_count, world_size, rank")
    share, extra = divmod(total_count, world_size)
    begin = rank * share + min(rank, extra)
    return begin, begin + share + (rank < extra)


def check_buckets(ids: torch.Tensor, buckets: Buckets, begin: int, end: int) -> None:
    """Demand that ids, int64 [n], are of buckets [begin, end). Raises ConfigError."""
    found = bucket_of(ids, buckets)
    outside = ids[(found < begin) | (found >= end)]
    if outside.numel():
        cut = f"of the {buckets.total_count} that buckets= names, of save, state_dict or pipeline.key_value alike"
        expected = f"buckets {begin} to {end}, the end left out, {cut}"
        message = "ids of other buckets than this process has"
        raise ConfigError(message, got=outside[:10].tolist(), expected=expected, where="ids")


SOURCES = "a KVStore, a snapshot or SavedRows"
IN_ROW = "RowLayout(..., optimizer=...) in a KVStore(..., optimizer_in_row=True)"
ID_MIN, ID_MAX = -(2**63), 2**63 - 1


@dataclass(frozen=True)
class RoundPlan:
    """One eviction round over one table.

    ``ids``: int64 [n], the rows of the moment it began, ascending. ``now``: the clock then. ``mark``: rows written
    after it stay. ``cutoff``: for the score policy, the lowest (score bits, id) that is kept, None when all are.
    """

    table: str
    policy: EvictionPolicy
    now: int
    mark: int
    ids: torch.Tensor
    cutoff: tuple[int, int] | None = None


class RowReader(Protocol):
    """Rows that can be read. Arguments are checked: a known table, contiguous int64 ids [n] on the CPU."""

    def read(self, table: str, ids: torch.Tensor, begin: int, end: int, out: torch.Tensor) -> None:
        """Bytes [begin, end) of each row into ``out``, uint8 [n, end - begin]; of the initial row where an id is
        missing.
        """

    def find(self, table: str, ids: torch.Tensor) -> torch.Tensor:
        """Bool [n]: whether each id has a row."""

    def ids(self, table: str, begin: int, last: int) -> torch.Tensor:
        """The ids in [begin, last], both included, ascending."""

    def size(self, table: str) -> int:
        """The number of rows."""


class TrackedReader(RowReader, Protocol):
    """The rows of a store or of one of its moments, and what changed in them."""

    def changes(self, table: str, since: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Ids of rows that changed after mark ``since``, and ids that were removed after it; both ascending.

        And the first mark that could be asked about when they were listed: of one before it removed ids are missing.
        """

    def mark(self) -> int:
        """The number of the last change."""

    def step(self, table: str) -> int:
        """The step of the last ``update``, or what ``set_step`` said since; 0 before the first."""

    def close(self) -> None:
        """Give everything back. Twice is harmless; any other call then raises StoreClosedError."""


class RowEngine(TrackedReader, Protocol):
    """The rows of a store: all that two implementations do differently.

    A dictionary of rows and a map in C++ agree on these verbs and share no line below them; ``KVStore`` is made of
    nothing else. Arguments are checked, as for ``RowReader``; values are contiguous and of the right width, ``now`` is
    in 0..2**32 - 1. Each call is atomic for its table, and changes nothing when it raises.
    """

    options: StoreOptions

    def write(self, table: str, ids: torch.Tensor, values: torch.Tensor, begin: int, now: int, *, visit: bool) -> None:
        """Place values, uint8 [n, w], at [begin, begin + w) of the ids' rows; of duplicates the last wins.

        A missing id gets a row first: its initial row, used, timestamp ``now``, count 0. With ``visit``, timestamps
        become ``now`` and counts grow by occurrences, saturating (not under the score policy); without, headers stay.
        Raises CapacityError before any change.
        """

    def write_rows(self, table: str, rows: torch.Tensor) -> None:
        """Replace whole rows, uint8 [n, row_bytes], by the keys in their headers; of duplicates the last wins.

        Header and values are taken as they are, but ``used`` is set and padding is zero. Raises CapacityError.
        """

    def write_metadata(self, table: str, ids: torch.Tensor, words: torch.Tensor, mask: int) -> None:
        """Set the bits ``mask`` of bytes 8-15 of the rows that exist to ``words`` (int64 [n]); used stays set."""

    def update(self, table: str, ids: torch.Tensor, grads: torch.Tensor, hyper: Hyper, now: int) -> None:
        """One step of the table's optimizer with gradients, float32 [n, D]; duplicates are reduced first, in
        ascending position. Rows are visited as ``write`` does. Raises CapacityError.

        The table's step becomes ``hyper.step`` with the rows: no handler of a signal, and no snapshot, sees one of them
        without the other.
        """

    def set_step(self, table: str, step: int) -> None:
        """Say which step the table's last one was."""

    def delete(self, table: str, ids: torch.Tensor) -> int:
        """Remove rows; how many there were."""

    def clear(self, table: str) -> None:
        """Remove every row of the table."""

    def begin_round(self, table: str, policy: EvictionPolicy, now: int) -> RoundPlan:
        """The rows of this moment, and what decides about them."""

    def evict_some(self, plan: RoundPlan, ids: torch.Tensor) -> int:
        """Evict those of the ids that the plan condemns and that were not written since; decay the others' counts."""

    def forget(self, mark: int) -> None:
        """Give back what only marks before this one need, of every table. No snapshot's view changes, and no row."""

    def snapshot(self) -> TrackedReader:
        """The rows of this moment, which later writes do not change; they hold memory until they are closed."""

    def reserve(self, table: str, row_count: int) -> None:
        """Make room, so that the table grows to ``row_count`` rows without allocating. Raises ConfigError."""

    def prefetch(self, table: str, ids: torch.Tensor) -> None:
        """Bring rows near, where some lie farther than others. Changes none."""

    def stats(self) -> StoreStats:
        """Exact counters."""

    def sort_ids(self, ids: torch.Tensor, buckets: Buckets, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids of buckets [begin, end) in bucket order, ascending inside, [n, 1]; how many each bucket has, [B, 1].

        Raises ConfigError for ids of other buckets, see ``check_buckets``.
        """


def tables_of(known: tuple[str, ...], tables: Any) -> tuple[str, ...]:
    """The tables that are meant, without names all that are known. Raises ConfigError for what is no list of names."""
    if tables is None:
        return known
    # The letters of a name would be names.
    if isinstance(tables, str) or not isinstance(tables, Iterable):
        raise ConfigError("tables come in a list", got=tables, expected="a list of names, or None", where="tables")
    names = tuple(tables)
    for name in names:
        if not isinstance(name, str):
            raise ConfigError("not the name of a table", got=name, expected=known, where="table")
    return names


def table_of(tables: tuple[str, ...], table: str | None) -> str:
    """The table that is meant, without a name the only one. Raises ConfigError."""
    if table is not None:
        return table
    if len(tables) > 1:
        raise ConfigError("there are several tables", got=None, expected=tables, where="table")
    (only,) = tables
    return only


def check_index(value: Any, where: str) -> None:
    """Demand what torch takes for a whole number: an int, one of numpy's, a tensor of one. Raises ConfigError."""
    try:
        operator.index(value)
    except (TypeError, RuntimeError, ValueError):
        raise ConfigError("not a whole number", got=value, expected="an int", where=where) from None


def check_row_range(dim: int, start: int, length: int, row_count: int) -> None:
    """Demand rows [start, start + length) of ``row_count``, and dimension 0. Raises ShapeError, ConfigError."""
    check_index(dim, "dim")
    check_index(start, "start")
    check_index(length, "length")
    if dim != 0:
        raise ShapeError("only rows can be narrowed", got=dim, expected=0, where="dim")
    if start < 0 or length < 0 or start + length > row_count:
        raise ShapeError(
            "a range outside the rows", got=(start, length), expected=f"within {row_count} rows", where="start, length"
        )


def places_of(ids: torch.Tensor) -> tuple[str, ...]:
    """Where the other tensors of a call lie: where its ids do."""
    return (ids.device.type,)


def check_out(out: Any, ids: torch.Tensor, width: int, dtype: torch.dtype) -> None:
    """Demand memory [n, width] that rows of ids [n] can be read into. Raises ShapeError, UnsupportedError."""
    check_matrix(out, ids.numel(), width, dtype, "out", places_of(ids))
    # What is written to lazy rows, or to another wrapper of tensors, goes to a copy that nobody keeps.
    if type(out).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        got = type(out).__name__
        raise UnsupportedError("nothing can be read into this tensor", got=got, expected="a plain one", where="out")


class RowSource:
    """Rows by table and id. Reading never inserts: a missing id reads as its initial row (key, initial weight, zeros).

    Of a store or a moment, that is. Saved rows know no initial weights: an id that was not saved is a MissingKeyError.

    Args:
        layouts: table name -> layout of its rows as they are stored.
        reader: the rows.

    Attributes:
        read_only: whether views of this source drop their writes.
        places: types of the devices that the tensors of a call may lie on; all of one call lie on one, and what it
            returns lies where the ids do.
    """

    read_only = False
    places: tuple[str, ...] = ("cpu",)

    def __init__(self, layouts: Mapping[str, RowLayout], reader: RowReader) -> None:
        self._layouts, self._reader = layouts, reader

    @property
    def tables(self) -> tuple[str, ...]:
        """Names of the tables, in order of construction."""
        return tuple(self._layouts)

    def layout(self, table: str) -> RowLayout:
        """The layout of the table's rows as stored: without optimizer state unless ``optimizer_in_row``."""
        if not isinstance(table, str) or table not in self._layouts:
            raise ConfigError("no such table", got=table, expected=sorted(self._layouts), where="table")
        return self._layouts[table]

    def slot(self, table: str, state: str) -> StateSlot:
        """Where a state lies in the row. Raises ConfigError when the stored row has no such state."""
        slots = self.layout(table).state_slots
        if not isinstance(state, str) or state not in slots:
            expected = sorted(slots) or f"a state: {IN_ROW}"
            raise ConfigError("the row holds no such state", got=state, expected=expected, where=table)
        return slots[state]

    def _ids(self, ids: torch.Tensor) -> torch.Tensor:
        """Checked ids, int64 [n]. Raises ShapeError, UnsupportedError."""
        return check_ids(ids, places=self.places)

    def _read(
        self, table: str, ids: torch.Tensor, begin: int, end: int, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Bytes [begin, end) of each row, uint8 [n, end - begin], fresh or in ``out``."""
        rows = torch.empty(ids.numel(), end - begin, dtype=torch.uint8, device=ids.device) if out is None else out
        self._reader.read(table, ids, begin, end, rows)
        return rows

    def get(
        self, table: str, ids: torch.Tensor, *, out: torch.Tensor | None = None, count: int | None = None
    ) -> torch.Tensor:
        """Weights [n, D] of ids [n], in the weight dtype; initial ones where a store has no such id.

        Args:
            table: the table.
            ids: int64 or int32 [n], any values, duplicates allowed.
            out: a plain tensor, filled and returned instead of a fresh one; rows past ``count`` are left alone.
            count: only the first ``count`` ids are read; rows of a fresh result past it are zero.

        Raises:
            MissingKeyError: an id that is not among saved rows. ConfigError, ShapeError, UnsupportedError,
            StoreClosedError.
        """
        layout, checked = self.layout(table), self._ids(ids)
        used = check_count(count, checked.numel())
        if out is not None:
            check_out(out, checked, layout.embedding_dim, layout.weight_dtype)
        result = out
        if result is None:
            shape = (checked.numel(), layout.embedding_dim)
            result = torch.empty(shape, dtype=layout.weight_dtype, device=checked.device)
            result[used:] = 0
        end = HEADER_BYTES + layout.weight_bytes
        # Memory of a caller's may have any strides where it has one row or column, or no row.
        raw = result[:used].view(torch.uint8) if out is None else as_bytes(out[:used])
        self._read(table, checked[:used], HEADER_BYTES, end, raw)
        return result

    def get_rows(
        self,
        table: str,
        ids: torch.Tensor,
        *,
        offset_bytes: int = 0,
        width_bytes: int | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Whole rows, uint8 [n, row_bytes]; or ``width_bytes`` of each from ``offset_bytes``; into ``out`` if given.

        A missing id reads as an unused row: its key, timestamp, count and used bit 0, the initial weight, zero state.

        Raises:
            ShapeError: a range outside the row. MissingKeyError: an id that is not among saved rows. ConfigError,
            UnsupportedError, StoreClosedError.
        """
        row_bytes, checked = self.layout(table).row_bytes, self._ids(ids)
        end = check_int(offset_bytes, "offset_bytes")
        end = row_bytes if width_bytes is None else end + check_int(width_bytes, "width_bytes")
        if not 0 <= offset_bytes <= end <= row_bytes:
            raise ShapeError(
                "not a range of the row", got=(offset_bytes, end), expected=f"within {row_bytes} bytes", where=table
            )
        if out is not None:
            check_out(out, checked, end - offset_bytes, torch.uint8)
        return self._read(table, checked, offset_bytes, end, out)

    def get_state(self, table: str, name: str, ids: torch.Tensor) -> torch.Tensor:
        """One optimizer state of ids [n], [n, count] in its own dtype; zeros where a store has no such id.

        Raises:
            ConfigError: the stored row has no such state. MissingKeyError: an id that is not among saved rows.
            ShapeError, UnsupportedError, StoreClosedError.
        """
        slot, checked = self.slot(table, name), self._ids(ids)
        return from_bytes(self._read(table, checked, slot.offset_bytes, slot.end_bytes), slot.dtype)

    def metadata(self, table: str, ids: torch.Tensor) -> torch.Tensor:
        """Bytes 8-15 of each header as int64 [n, 1]: ``timestamp | count << 32 | used << 63``, as FBGEMM exports it."""
        self.layout(table)
        return from_bytes(self._read(table, self._ids(ids), METADATA_OFFSET, HEADER_BYTES), torch.int64)

    def get_scores(self, table: str, ids: torch.Tensor) -> torch.Tensor:
        """The scores of ids, float32 [n]: the 31 bits of the count as a non-negative float32.

        Raises:
            MissingKeyError: ids without a row.
        """
        checked = self._ids(ids)
        missing = checked[~self.contains(table, checked)]
        if missing.numel():
            raise MissingKeyError(
                "ids without a score", got=missing[:10].tolist(), expected="ids with a row", where=table
            )
        return ((self.metadata(table, checked)[:, 0] >> 32) & COUNT_MAX).to(torch.int32).view(torch.float32)

    def contains(self, table: str, ids: torch.Tensor) -> torch.Tensor:
        """Bool [n]: whether each id has a row."""
        self.layout(table)
        return self._reader.find(table, self._ids(ids))

    def ids(self, table: str, begin: int = ID_MIN, last: int = ID_MAX) -> torch.Tensor:
        """The ids of the table in [begin, last], both included, ascending, int64 [n]. Raises ConfigError."""
        self.layout(table)
        return self._reader.ids(table, check_int(begin, "begin"), check_int(last, "last"))

    def size(self, table: str) -> int:
        """The number of rows of the table."""
        self.layout(table)
        return self._reader.size(table)

    def reopened(self) -> tuple[Callable[..., RowSource], tuple[Any, ...]] | None:
        """A function and its arguments that give these rows in another process; None where there is no such way."""
        return None


def check_remembered(since: int, first_mark: int) -> None:
    """Demand a mark that is not before the first whose changes are remembered. Raises ConfigError."""
    if since < first_mark:
        most = f"a mark from {first_mark} on, or a save without since"
        raise ConfigError("changes that the store was told to forget", got=since, expected=most, where="since")


class TrackedSource(RowSource):
    """A store or a snapshot of one: it also knows what changed since some moment, and how far its optimizers are.

    Args:
        options: the checked options; ``options.rows[table]`` is the layout of the rows as they are stored.
        reader: the rows, their changes and their steps.
    """

    def __init__(self, options: StoreOptions, reader: TrackedReader) -> None:
        super().__init__(options.rows, reader)
        self.options, self._tracked = options, reader
        self.places = tuple(dict.fromkeys(("cpu", torch.device(options.device).type)))

    def step_count(self, table: str) -> int:
        """The step of the table's last ``apply_gradients``, or of what was loaded since; 0 before the first."""
        self.layout(table)
        return self._tracked.step(table)

    def mark(self) -> int:
        """The present moment for ``changes``: an int that grows with every change."""
        return self._tracked.mark()

    def changes(self, table: str, since: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids of rows with any byte written after ``mark()`` gave ``since``, and ids removed after it; ascending.

        Raises:
            ConfigError: without ``track_changes``; a mark from the future, or one that ``KVStore.forget_changes``
                forgot.
        """
        self.layout(table)
        self._check_mark(since, "since")
        changed, removed, first_mark = self._tracked.changes(table, since)
        # Asked now: another thread may have the store forget them while they are listed.
        check_remembered(since, first_mark)
        return changed, removed

    def _check_mark(self, mark: Any, where: str) -> None:
        """Demand a mark of a store that tracks its changes. Raises ConfigError."""
        if not self.options.track_changes:
            raise ConfigError("changes are not tracked", got=False, expected=True, where="track_changes")
        if type(mark) is not int or not 0 <= mark <= self.mark():
            raise ConfigError("not a mark of this store", got=mark, expected=f"0 to {self.mark()}", where=where)

    def close(self) -> None:
        """Give everything back; twice is harmless. Any verb that reads or writes rows then raises StoreClosedError."""
        self._tracked.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def check_trained(source: RowSource, table: str) -> None:
    """Demand that the table's rows have an optimizer. Raises ConfigError."""
    if source.layout(table).optimizer == "none":
        got = "none"
        if isinstance(source, TrackedSource):
            asked, is_in_row = source.options.layouts[table].optimizer, source.options.optimizer_in_row
            got = f"RowLayout(..., optimizer={asked!r}), optimizer_in_row={is_in_row}"
        raise ConfigError("this table's rows have no optimizer", got=got, expected=IN_ROW, where=table)


class Snapshot(TrackedSource):
    """A point in time: the rows of one moment, which later writes do not change; a context manager."""

    read_only = True

    def __enter__(self) -> Snapshot:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError(
            "a snapshot is neither copied nor pickled", got=type(self).__name__, expected="state_dict()", where="pickle"
        )


class RowStore(TrackedSource, ABC):
    """A source of rows that can be changed: what views, state dicts and loads ask of a store. ``KVStore`` is one."""

    return_whole_row: bool

    @abstractmethod
    def now(self) -> int:
        """The clock's seconds, mod 2**32."""

    @abstractmethod
    def set_rows(self, table: str, rows: torch.Tensor, *, tell: bool = True) -> None:
        """Write whole rows by the keys in their headers."""

    @abstractmethod
    def place(self, table: str, ids: torch.Tensor, values: torch.Tensor, begin: int, *, tell: bool = True) -> None:
        """Write values of any dtype at a byte of the rows; headers of rows that exist stay."""

    @abstractmethod
    def tell_written(self, *tables: str) -> None:
        """Call who listens to the writes of these tables; behind writes without ``tell`` their caller does."""

    @abstractmethod
    def set_metadata(self, table: str, ids: torch.Tensor, words: torch.Tensor) -> None:
        """Set timestamps and counts of rows that exist."""

    @abstractmethod
    def set_step_count(self, table: str, step: int) -> None:
        """Say which step the table's last one was."""

    @abstractmethod
    def delete(self, table: str, ids: torch.Tensor) -> int:
        """Remove rows; returns how many there were."""

    @abstractmethod
    def clear(self, table: str) -> None:
        """Remove every row of the table."""

    @abstractmethod
    def reserve(self, table: str, row_count: int) -> None:
        """Make room for so many rows."""

    @abstractmethod
    def snapshot(self) -> Snapshot:
        """A point in time that later writes do not change."""


def check_convertible(source: RowLayout, target: RowLayout, *, weights_only: bool, where: str) -> None:
    """Demand that rows of ``source`` can be stored as ``target``; dtypes may differ. Raises ConfigError."""
    if source.embedding_dim != target.embedding_dim:
        raise ConfigError("another width", got=source.embedding_dim, expected=target.embedding_dim, where=where)
    same = set(source.state_slots) == set(target.state_slots)
    same = same and (not source.state_slots or source.optimizer == target.optimizer)
    if not same and not weights_only:
        # The store may have been asked for one, which it then keeps in no row.
        expected = f"{target.optimizer}, or {IN_ROW}" if target.optimizer == "none" else target.optimizer
        raise ConfigError(
            "other optimizer state than the store's rows; weights_only=True loads weights alone",
            got=source.optimizer,
            expected=expected,
            where=where,
        )


def separate(layout: RowLayout, rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """Weight and states of whole rows, each [n, count] in its dtype."""
    ranges = {"weight": (HEADER_BYTES, HEADER_BYTES + layout.weight_bytes, layout.weight_dtype)}
    ranges |= {name: (slot.offset_bytes, slot.end_bytes, slot.dtype) for name, slot in layout.state_slots.items()}
    return {name: from_bytes(rows[:, begin:end], dtype) for name, (begin, end, dtype) in ranges.items()}


def without_padding(layout: RowLayout, raw: torch.Tensor, begin: int) -> torch.Tensor:
    """Bytes [begin, begin + w) of rows, uint8 [n, w], with zeros where rows have padding; the same where they have none
    there.
    """
    end = begin + raw.shape[1]
    parts = [(max(first, begin) - begin, min(behind, end) - begin) for first, behind in layout.value_ranges]
    values = [(first, behind) for first, behind in parts if first < behind]
    if sum(behind - first for first, behind in values) == raw.shape[1]:
        return raw
    result = torch.zeros_like(raw)
    for first, behind in values:
        result[:, first:behind] = raw[:, first:behind]
    return result


def assemble_rows(
    layout: RowLayout, ids: torch.Tensor, words: torch.Tensor, values: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """Whole rows from ids [n], header words [n] (bytes 8-15), weight and states.

    Values of another dtype are rounded to nearest even; a state that is not given is zero.
    """
    rows = torch.zeros(ids.numel(), layout.row_bytes, dtype=torch.uint8, device="cpu")
    nothing = torch.zeros_like(ids)
    rows[:, :HEADER_BYTES] = pack_header(Header(ids, nothing, nothing, nothing == 0))
    used = from_bytes(rows[:, METADATA_OFFSET:HEADER_BYTES], torch.int64)
    rows[:, METADATA_OFFSET:HEADER_BYTES] = as_bytes(used | words.reshape(-1, 1))
    rows[:, HEADER_BYTES : HEADER_BYTES + layout.weight_bytes] = _raw(values["weight"], layout.weight_dtype)
    for name, slot in layout.state_slots.items():
        if name in values:
            rows[:, slot.offset_bytes : slot.end_bytes] = _raw(values[name], slot.dtype)
    return rows


def _raw(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return as_bytes(values.to(dtype))


def convert_rows(rows: torch.Tensor, source: RowLayout, target: RowLayout, *, weights_only: bool) -> torch.Tensor:
    """Whole rows of ``source`` as ``target``; with ``weights_only`` every state of the result is zero."""
    if source == target and not (weights_only and target.state_slots):
        return rows
    values = separate(source, rows)
    if weights_only:
        values = {"weight": values["weight"]}
    words = from_bytes(rows[:, :HEADER_BYTES], torch.int64)
    return assemble_rows(target, words[:, 0], words[:, 1], values)
