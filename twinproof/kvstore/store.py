"""``KVStore``: verbs, checks and errors, over an engine of rows that each implementation brings.

An engine of one thread is made safe for many by ``LockedRows``; ``sort_ids_by_bucket`` is checked by ``BucketSort``.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar, Generic, TypeVar

import torch

from twinproof.errors import ConfigError, ShapeError, StoreClosedError, UnsupportedError, check_flags
from twinproof.kvstore.deltas import DeltaStore, Fingerprints
from twinproof.kvstore.eviction import ROWS, STEP, EvictionRound, lock_over_forks
from twinproof.kvstore.options import (
    HEADER_BYTES,
    TIMESTAMP_MAX,
    Clock,
    EvictionPolicy,
    EvictionStats,
    Initializer,
    RowLayout,
    StoreOptions,
    StoreStats,
    as_bytes,
    check_count,
    check_ids,
    check_int,
    check_matrix,
    check_plain,
    check_rows,
    check_strided,
    check_tensor,
)
from twinproof.kvstore.rows import (
    Buckets,
    RoundPlan,
    RowEngine,
    Snapshot,
    TrackedReader,
    check_trained,
    places_of,
    without_padding,
)
from twinproof.kvstore.statedict import load_state_dict, state_dict
from twinproof.optimizers import STEP_MAX, Hyper

__all__ = ["BucketSort", "KVStore", "LockedRows", "wall_clock"]


_Self = TypeVar("_Self", bound="KVStore")
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def wall_clock() -> int:
    """Unix seconds."""
    return int(time.time())


class KVStore(DeltaStore):
    """Key -> whole row, for several tables.

    Args:
        layouts: table name -> layout; the order fixes the table index of the initializer.
        optimizer_in_row: rows hold the optimizer state; else header and weight only.
        return_whole_row: state dicts and checkpoints carry whole rows (needs ``optimizer_in_row``).
        num_shards: parts of the map, for concurrency; never changes a result.
        seed: of the initializer.
        initializer: weights of missing ids; one, or one per table.
        eviction: the policy of ``evict()``; one, or one per table; None evicts nothing.
        clock: seconds for the timestamps of written rows; taken mod 2**32.
        capacity: rows at most, for each table or per table. A write beyond it evicts rows that are not in its batch:
            the lowest score under the score policy, the lowest count under count and ttl_count, else the oldest
            timestamp; ties by ascending id.
        track_changes: remember which rows change and which go, for delta checkpoints; see ``forget_changes``.
        device: where the rows lie: "cpu", or "cuda" where the implementation has kernels and the machine a GPU. There
            a call takes tensors of the CPU or of that device, all of one; what it returns is where the ids are.
        row_memory: of a store on a GPU: "device", or "host": rows lie in pinned memory of the host, where kernels read
            and write them over the link, and their index on the device.
        cache_rows: with ``row_memory="host"``: so many rows of each table, or per table, that ``prefetch`` brings near
            lie in the device's memory. Rounded up to a multiple of 16. Never changes a result.

    Every verb is atomic for each table, checks all arguments first and leaves the store as it was when it raises.
    Inputs are never changed and never kept. Ids are any int64. Whoever forks the process waits for the calls of other
    threads; the child has a store of its own, with the rows of that moment.

    Raises:
        ConfigError: see ``StoreOptions``; ``return_whole_row`` without ``optimizer_in_row``.
    """

    # An implementation binds its engine with ``class KVStore(store.KVStore, engine=Rows)``; ``Rows(options)`` makes the
    # rows of one store.
    _make_engine: ClassVar[Callable[[StoreOptions], RowEngine]]
    # Where its rows may lie.
    _devices: ClassVar[tuple[str, ...]] = ("cpu",)

    def __init_subclass__(
        cls,
        *,
        engine: Callable[[StoreOptions], RowEngine] | None = None,
        devices: tuple[str, ...] | None = None,
        **options: Any,
    ) -> None:
        super().__init_subclass__(**options)
        if engine is not None:
            cls._make_engine = staticmethod(engine)
        if devices is not None:
            cls._devices = devices

    def __init__(
        self,
        layouts: Mapping[str, RowLayout],
        *,
        optimizer_in_row: bool = False,
        return_whole_row: bool = False,
        num_shards: int = 8,
        seed: int = 0,
        initializer: Initializer | Mapping[str, Initializer] | None = None,
        eviction: EvictionPolicy | Mapping[str, EvictionPolicy | None] | None = None,
        clock: Clock = wall_clock,
        capacity: int | Mapping[str, int | None] | None = None,
        track_changes: bool = False,
        device: str = "cpu",
        row_memory: str = "device",
        cache_rows: int | Mapping[str, int] = 0,
    ) -> None:
        options = StoreOptions.make(
            layouts,
            optimizer_in_row=optimizer_in_row,
            num_shards=num_shards,
            seed=seed,
            initializer=Initializer() if initializer is None else initializer,
            eviction=eviction,
            clock=clock,
            capacity=capacity,
            track_changes=track_changes,
            device=device,
            row_memory=row_memory,
            cache_rows=cache_rows,
        )
        if device not in self._devices:
            raise ConfigError("not a device of this store", got=device, expected=self._devices, where="device")
        _check_whole_row(options, return_whole_row)
        self._engine = type(self)._make_engine(options)
        super().__init__(options, self._engine)
        self.return_whole_row = bool(return_whole_row)
        self.fingerprints = Fingerprints()
        # No two updates take one number. An engine takes a table's updates in turn anyway.
        self._step_locks = {table: lock_over_forks(STEP) for table in options.rows}
        # By numbers that ascend. Another thread, or a handler of a signal, may add and remove at any moment: each does
        # so by one call of a dictionary, and nothing is read and written back.
        self._listener_numbers = itertools.count()
        self._listeners: dict[int, Callable[[str], None]] = {}
        self._step_listeners: dict[int, Callable[[str], None]] = {}

    def add_listener(self, listener: Callable[[str], None], *, steps: bool = False) -> None:
        """Call ``listener(table)`` after every write that may have inserted rows, in the writing thread.

        With ``steps`` after every ``apply_gradients`` instead. A load of any kind calls it once for each table, behind
        all rows of all tables. What a listener raises, the verb raises when all were called; what it wrote stays.
        Raises ConfigError for what cannot be called.
        """
        check_flags(steps=steps)
        if not callable(listener):
            raise ConfigError("not a listener", got=listener, expected="a callable of one table", where="listener")
        (self._step_listeners if steps else self._listeners)[next(self._listener_numbers)] = listener

    def remove_listener(self, listener: Callable[[str], None]) -> None:
        """Undo ``add_listener``; one that is not there is passed over."""
        for listeners in (self._listeners, self._step_listeners):
            for number, known in listeners.copy().items():
                if known == listener:
                    listeners.pop(number, None)

    def tell_written(self, *tables: str) -> None:
        """Call the listeners for each table, also behind one that raises; verbs that may have inserted rows do."""
        with ExitStack() as told:
            for table in reversed(tables):
                told.callback(_tell, self._listeners, table)

    def now(self) -> int:
        """The clock's seconds, mod 2**32. Raises ConfigError where it tells none."""
        told = self.options.clock()
        try:
            return int(told) & TIMESTAMP_MAX
        except (TypeError, ValueError, OverflowError):
            raise ConfigError("a clock that tells no seconds", got=told, expected="a number", where="clock") from None

    def set_return_whole_row(self, enabled: bool) -> None:
        """Switch what state dicts carry, as for a warm start. Raises ConfigError without ``optimizer_in_row``."""
        check_flags(enabled=enabled)
        _check_whole_row(self.options, enabled)
        self.return_whole_row = bool(enabled)

    def set(self, table: str, ids: torch.Tensor, weights: torch.Tensor, *, count: int | None = None) -> None:
        """Write weights [n, D] of the first ``count`` ids (None: all); optimizer state stays, of a new row it is zero.

        Of duplicates the last wins, and the header's count grows by occurrences. The timestamp becomes now.

        Raises:
            CapacityError: more distinct ids than the table may hold. ConfigError, ShapeError, UnsupportedError.
        """
        layout, checked = self.layout(table), check_ids(ids, places=self.places)
        values = check_matrix(
            weights, checked.numel(), layout.embedding_dim, layout.weight_dtype, "weights", places_of(checked)
        )
        used = check_count(count, checked.numel())
        self._engine.write(table, checked[:used], as_bytes(values[:used]), HEADER_BYTES, self.now(), visit=True)
        self.tell_written(table)

    def set_rows(self, table: str, rows: torch.Tensor, *, tell: bool = True) -> None:
        """Write whole rows, uint8 [n, row_bytes]. The id is the key in each row's header.

        Timestamps and counts are taken from the rows; ``used`` is set in the store; padding is stored as zero. Without
        ``tell`` no listener is called: who writes in chunks calls ``tell_written`` behind the last.

        Raises:
            CapacityError, ConfigError, ShapeError, UnsupportedError.
        """
        check_flags(tell=tell)
        checked = check_rows(rows, self.layout(table).row_bytes, places=self.places)
        self._engine.write_rows(table, checked)
        if tell:
            self.tell_written(table)

    def set_state(self, table: str, name: str, ids: torch.Tensor, values: torch.Tensor) -> None:
        """Write one optimizer state, [n, count] in its dtype. Headers of rows that exist stay; of duplicates the last
        wins; a missing id gets a row with its initial weight.

        Raises:
            ConfigError: the stored row has no such state. CapacityError, ShapeError, UnsupportedError.
        """
        slot, checked = self.slot(table, name), check_ids(ids, places=self.places)
        raw = as_bytes(check_matrix(values, checked.numel(), slot.count, slot.dtype, "values", places_of(checked)))
        self._engine.write(table, checked, raw, slot.offset_bytes, self.now(), visit=False)
        self.tell_written(table)

    def place(self, table: str, ids: torch.Tensor, values: torch.Tensor, begin: int, *, tell: bool = True) -> None:
        """Write values [n, w] of any dtype at byte ``begin`` of the rows, as ``set_state`` does; for views.

        Padding among these bytes stays zero. Values are on the CPU, strided any way. ``tell``: see ``set_rows``. Raises
        ConfigError, ShapeError, UnsupportedError, CapacityError.
        """
        check_flags(tell=tell)
        checked, raw = check_ids(ids), as_bytes(check_strided(values, "values"))
        if raw.shape[0] != checked.numel():
            raise ShapeError(
                "values of another number of ids", got=raw.shape[0], expected=checked.numel(), where="values"
            )
        layout = self.layout(table)
        check_int(begin, "begin")
        if not HEADER_BYTES <= begin <= begin + raw.shape[1] <= layout.row_bytes:
            got, expected = (begin, raw.shape[1]), f"begin and width within bytes {HEADER_BYTES} to {layout.row_bytes}"
            raise ShapeError("not a range of the row's values", got=got, expected=expected, where=table)
        clean = without_padding(layout, raw, begin)
        self._engine.write(table, checked, clean, begin, self.now(), visit=False)
        if tell:
            self.tell_written(table)

    def set_scores(self, table: str, ids: torch.Tensor, scores: torch.Tensor) -> None:
        """Set the scores of rows that exist, float32 [n]; signs are dropped, missing ids are passed over.

        Of duplicates the last wins. Scores share their bits with the count: see ``EvictionPolicy.score``.
        """
        checked = check_ids(ids, places=self.places)
        if check_tensor(scores, "scores").shape != checked.shape:
            got, expected = tuple(scores.shape), tuple(checked.shape)
            raise ShapeError("one score per id", got=got, expected=expected, where="scores")
        bits = check_matrix(
            scores.reshape(-1, 1), checked.numel(), 1, torch.float32, "scores", places_of(checked)
        ).view(torch.int32)[:, 0]
        self.layout(table)
        self._engine.write_metadata(table, checked, (bits.to(torch.int64) & (2**31 - 1)) << 32, (2**31 - 1) << 32)

    def set_metadata(self, table: str, ids: torch.Tensor, words: torch.Tensor) -> None:
        """Set timestamps and counts of rows that exist, int64 [n, 1] as ``metadata`` gives them; used stays set."""
        checked = check_ids(ids, places=self.places)
        self.layout(table)
        values = check_matrix(words, checked.numel(), 1, torch.int64, "words", places_of(checked))[:, 0]
        self._engine.write_metadata(table, checked, values, -1)

    def apply_gradients(
        self,
        table: str,
        ids: torch.Tensor,
        grads: torch.Tensor,
        lr: float,
        step: int | None = None,
        *,
        eps: float = 1e-8,
        beta1: float = 0.9,
        beta2: float = 0.999,
    ) -> None:
        """One optimizer step on the rows of ids [n] with gradients [n, D] (float32, float16 or bfloat16).

        Duplicates are reduced first, in float32 and ascending position. Missing ids get rows: initial weight, zero
        state. Headers are visited as by ``set``. ``step`` counts from 1; without one it is that after the table's last,
        also where several threads train it.

        Raises:
            ConfigError: the table has no optimizer, or its state is not in the row. CapacityError, ShapeError,
                UnsupportedError.
        """
        layout, checked = self.layout(table), check_ids(ids, places=self.places)
        check_trained(self, table)
        values = check_matrix(grads, checked.numel(), layout.embedding_dim, _FLOATS, "grads", places_of(checked))
        floats, now = values.to(torch.float32), self.now()
        with self._step_locks[table]:
            number = self.step_count(table) + 1 if step is None else step
            hyper = Hyper(lr=lr, step=number, eps=eps, beta1=beta1, beta2=beta2)
            self._engine.update(table, checked, floats, hyper, now)
        try:
            self.tell_written(table)
        finally:
            _tell(self._step_listeners, table)

    def set_step_count(self, table: str, step: int) -> None:
        """Say which step the table's last one was, as when training is resumed. Raises ConfigError."""
        self.layout(table)
        if type(step) is not int or not 0 <= step <= STEP_MAX:
            raise ConfigError("not a number of steps", got=step, expected=f"an int from 0 to {STEP_MAX}", where=table)
        with self._step_locks[table]:
            self._engine.set_step(table, step)

    def delete(self, table: str, ids: torch.Tensor) -> int:
        """Remove rows; returns how many there were. Missing ids are passed over."""
        self.layout(table)
        return self._engine.delete(table, check_ids(ids, places=self.places))

    def clear(self, table: str) -> None:
        """Remove every row of the table, which is then no base of deltas on what it was loaded from."""
        self.layout(table)
        with self.fingerprints.forgetting(table):
            self._engine.clear(table)

    def forget_changes(self, *, before: int) -> None:
        """Give back the memory of changes that only marks before this one need: 16 bytes of each id that left.

        Without it a store with ``track_changes`` remembers them as long as it lives, since a delta may begin at any
        mark. A job that saves a delta every few minutes forgets after each what is before the mark of that save::

            report = save(store, path, since=mark)
            mark = report.mark
            store.forget_changes(before=mark)

        From then on ``changes`` and ``save`` refuse an older ``since`` by name; ``before`` itself can still be asked.
        Snapshots that were taken sooner keep what they show, and the memory of it until they are closed. No row and no
        mark changes; a mark that was forgotten already, or 0, is harmless. Each rank does this for its own store.

        Args:
            before: a mark, from ``mark()`` or a ``SaveReport``.

        Raises:
            ConfigError: without ``track_changes``, or no mark of this store. StoreClosedError.
        """
        self._check_mark(before, "before")
        self._engine.forget(before)
        self.fingerprints.forget_before(before)

    def reserve(self, table: str, row_count: int) -> None:
        """Make room, so that the table grows to ``row_count`` rows without allocating."""
        self.layout(table)
        if type(row_count) is not int or row_count < 0:
            raise ConfigError("not a number of rows", got=row_count, expected="an int >= 0", where="row_count")
        self._engine.reserve(table, row_count)

    def prefetch(self, table: str, ids: torch.Tensor) -> None:
        """Bring rows that a batch of ids [n] will need into the cache, see ``cache_rows``; no row changes.

        Call it with the ids of the next batch. Rows of this batch and the one before keep their places; others make
        room, the least lately asked for first. Ids without a row, and those without room, are passed over. On a GPU it
        runs on a stream of its own, beside what the caller's computes; later calls of the store come behind it.
        Without a cache it does nothing.

        Raises:
            ConfigError, ShapeError, UnsupportedError, StoreClosedError.
        """
        self.layout(table)
        self._engine.prefetch(table, check_ids(ids, places=self.places))

    def stats(self) -> StoreStats:
        """Exact counters."""
        return self._engine.stats()

    def snapshot(self) -> Snapshot:
        """A point in time: a context manager and a read-only ``TrackedSource`` that later writes do not change.

        The step of each table is that of its rows, also while other threads train.
        Several may be alive; each holds its memory until it is closed.
        """
        return Snapshot(self.options, self._engine.snapshot())

    def sort_ids(self, ids: torch.Tensor, buckets: Buckets, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """``sort_ids_by_bucket`` of checked ids, int64 [n]."""
        return self._engine.sort_ids(ids, buckets, begin, end)

    def start_eviction(
        self, table: str, *, policy: EvictionPolicy | None = None, slice_rows: int = 4096
    ) -> EvictionRound:
        """A round over the rows of this moment, in slices: see ``EvictionRound``. Raises ConfigError."""
        self.layout(table)
        chosen = policy if policy is not None else self.options.evictions[table]
        if not isinstance(chosen, EvictionPolicy):
            raise ConfigError("no eviction policy", got=chosen, expected="EvictionPolicy", where=table)
        return EvictionRound(self._engine, self._engine.begin_round(table, chosen, self.now()), slice_rows)

    def evict(self, table: str | None = None, *, policy: EvictionPolicy | None = None) -> dict[str, EvictionStats]:
        """One whole round, of one table or of every table that has a policy; what happened, by table.

        Args:
            table: None is all.
            policy: instead of the store's own.

        Raises:
            ConfigError: no policy for the table that was named.
        """
        names = [table] if table is not None else [t for t in self.tables if policy or self.options.evictions[t]]
        return {name: self.start_eviction(name, policy=policy).run() for name in names}

    def state_dict(
        self,
        *,
        buckets: Buckets | None = None,
        process_group: Any = None,
        snapshot: bool = True,
        chunk_rows: int | None = None,
        tables: tuple[str, ...] | None = None,
    ) -> dict[str, Any]:
        """Lazy tensors for torch's distributed checkpoint, of one moment; their ids in bucket order, then ascending.

        Per table: ``{table}.weight`` (whole rows uint8 [N, row_bytes] with ``return_whole_row``, else [N, D]),
        ``{table}.weight_id`` int64 [N, 1], ``{table}.bucket`` int64 [B, 1] row counts, ``{table}.metadata`` int64
        [N, 1], and a view per optimizer state in the row, read-only with ``return_whole_row``; where rows have an
        optimizer, ``{table}.step`` int64 [1], a plain tensor. Global sizes and offsets over all ranks, and the furthest
        step, are exchanged here, once, before any save plan is made.

        Args:
            buckets: how ids fall into buckets; None is one bucket. Ranks own contiguous ranges (``rank_buckets``).
            process_group: None is the default group, or this process alone.
            snapshot: views of a snapshot, which lives as long as they do; else of the store itself, writable.
            chunk_rows: rows of a chunk handed to the checkpoint, at most; None is 16 MiB worth.
            tables: only these; None is all of this store.

        Raises:
            ConfigError: an id outside this rank's buckets, ranks that ask for different buckets, tables or rows, or
                for what is none, or whose rows have different layouts; on every rank. A process that is not of the
                group.
        """
        return state_dict(self, self._engine, tables, buckets, process_group, snapshot=snapshot, chunk_rows=chunk_rows)

    def load_state_dict(
        self,
        state: Mapping[str, Any],
        *,
        weights_only: bool = False,
        tables: tuple[str, ...] | None = None,
        clear: bool = False,
    ) -> dict[str, int]:
        """Replace the listed ids' rows by those of a state dict, in either form; other rows stay.

        Whole rows: ``{table}.weight`` alone is the state, the optimizer views are not looked at. Lazy rows know their
        layout; plain uint8 rows carry none, and are taken for this table's where they have its width: that they are
        rows of these dtypes and of this optimizer is the caller's to know, only their keys are compared. Separate form:
        weights, states, and metadata where given (else timestamp now, count 0). Values of other dtypes are rounded to
        nearest even. The step comes along where it is given, but for ``weights_only``. Everything is checked before the
        first row is written, and room is made in all tables: where memory is short, nothing has changed. Two things may
        still end it between chunks of 65,536 rows, when each listed row is the old one or the new one: memory that a
        live snapshot's copies lack, and memory that went with rows which a capacity evicts: those go first. With
        ``clear`` other rows go last, so that for a while there is room for them and for the new ones. Where there is
        none, ``clear(table)`` before the load needs less, and gives up what is there.
        Views of this store show its rows as they are when the load begins; other lazy rows are read twice, first to see
        that they can be. A state dict is no base of a delta.

        Args:
            state: as from ``state_dict``, lazy or plain tensors, on the CPU.
            weights_only: leave every optimizer state at zero; needed when the state dict's optimizer is another. States
                in the state dict are not looked at.
            tables: only these; None is all of this store.
            clear: other rows of these tables go.

        Returns:
            Rows loaded, by table.

        Raises:
            MissingKeyError: names that are not there. CorruptionError: keys and ids disagree, or an id stands twice.
            ShapeError: other widths or numbers. ConfigError: another optimizer, where views of its states or rows tell
            of it; plain tensors of states do not, as long as their shapes are right. UnsupportedError: dtypes that are
            no weights, states or metadata. CapacityError: more rows than a table may hold.
        """
        begun: list[str] = []
        try:
            return load_state_dict(
                self, self._engine, state, begun, weights_only=weights_only, tables=tables, clear=clear
            )
        finally:
            # What ends it in the middle leaves rows, too.
            self.tell_written(*begun)

    def load_key_value_state_dict(self, state: Mapping[str, Any]) -> dict[str, int]:
        """``load_state_dict`` with ``clear``: what a load of training gives a store among its ``states``."""
        return self.load_state_dict(state, clear=True)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError(
            "a store is neither copied nor pickled", got=type(self).__name__, expected="state_dict()", where="pickle"
        )

    def __enter__(self: _Self) -> _Self:
        return self


def _tell(listeners: Mapping[int, Callable[[str], None]], table: str) -> None:
    if not listeners:
        return
    # What one raises is raised when all were called: an evictor hears of a write behind a user's listener that fails.
    with ExitStack() as told:
        for listener in reversed(dict(listeners).values()):
            told.callback(listener, table)


def _check_whole_row(options: StoreOptions, enabled: bool) -> None:
    check_flags(return_whole_row=enabled)
    if enabled and not options.optimizer_in_row:
        got, expected = "optimizer_in_row=False", "optimizer_in_row=True"
        raise ConfigError(
            "whole rows need the optimizer in the row", got=got, expected=expected, where="return_whole_row"
        )


Rows = TypeVar("Rows", bound=TrackedReader)


class _LockedReader(Generic[Rows]):
    """Rows that know neither threads nor closing, behind one lock and one flag."""

    def __init__(self, options: StoreOptions, rows: Rows, lock: threading.RLock | None = None) -> None:
        self.options, self._rows = options, rows
        self._lock = lock or lock_over_forks(ROWS)
        self.closed = False

    @contextmanager
    def _held(self, table: str | None = None) -> Iterator[Rows]:
        with self._lock:
            if self.closed:
                where = table or next(iter(self.options.rows))
                raise StoreClosedError("the store or snapshot was closed", got="closed", expected="open", where=where)
            yield self._rows

    def read(self, table: str, ids: torch.Tensor, begin: int, end: int, out: torch.Tensor) -> None:
        with self._held(table) as rows:
            rows.read(table, ids, begin, end, out)

    def find(self, table: str, ids: torch.Tensor) -> torch.Tensor:
        with self._held(table) as rows:
            return rows.find(table, ids)

    def ids(self, table: str, begin: int, last: int) -> torch.Tensor:
        with self._held(table) as rows:
            return rows.ids(table, begin, last)

    def size(self, table: str) -> int:
        with self._held(table) as rows:
            return rows.size(table)

    def changes(self, table: str, since: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        with self._held(table) as rows:
            return rows.changes(table, since)

    def mark(self) -> int:
        with self._held() as rows:
            return rows.mark()

    def step(self, table: str) -> int:
        with self._held(table) as rows:
            return rows.step(table)

    def close(self) -> None:
        with self._lock:
            if not self.closed:
                self.closed = True
                self._rows.close()


class LockedRows(_LockedReader[RowEngine]):
    """An engine of one thread, made safe for many: one call at a time, and snapshots that are counted."""

    def __init__(self, rows: RowEngine) -> None:
        super().__init__(rows.options, rows)
        self._snapshots: weakref.WeakSet[_LockedReader[TrackedReader]] = weakref.WeakSet()

    def write(self, table: str, ids: torch.Tensor, values: torch.Tensor, begin: int, now: int, *, visit: bool) -> None:
        with self._held(table) as rows:
            rows.write(table, ids, values, begin, now, visit=visit)

    def write_rows(self, table: str, rows: torch.Tensor) -> None:
        with self._held(table) as engine:
            engine.write_rows(table, rows)

    def write_metadata(self, table: str, ids: torch.Tensor, words: torch.Tensor, mask: int) -> None:
        with self._held(table) as rows:
            rows.write_metadata(table, ids, words, mask)

    def update(self, table: str, ids: torch.Tensor, grads: torch.Tensor, hyper: Hyper, now: int) -> None:
        with self._held(table) as rows:
            rows.update(table, ids, grads, hyper, now)

    def set_step(self, table: str, step: int) -> None:
        with self._held(table) as rows:
            rows.set_step(table, step)

    def delete(self, table: str, ids: torch.Tensor) -> int:
        with self._held(table) as rows:
            return rows.delete(table, ids)

    def clear(self, table: str) -> None:
        with self._held(table) as rows:
            rows.clear(table)

    def begin_round(self, table: str, policy: EvictionPolicy, now: int) -> RoundPlan:
        with self._held(table) as rows:
            return rows.begin_round(table, policy, now)

    def evict_some(self, plan: RoundPlan, ids: torch.Tensor) -> int:
        with self._held(plan.table) as rows:
            return rows.evict_some(plan, ids)

    def forget(self, mark: int) -> None:
        with self._held() as rows:
            rows.forget(mark)

    def snapshot(self) -> _LockedReader[TrackedReader]:
        with self._held() as rows:
            # A snapshot may read rows where the store has them.
            taken = _LockedReader(self.options, rows.snapshot(), self._lock)
            self._snapshots.add(taken)
            return taken

    def reserve(self, table: str, row_count: int) -> None:
        with self._held(table) as rows:
            rows.reserve(table, row_count)

    def prefetch(self, table: str, ids: torch.Tensor) -> None:
        with self._held(table) as rows:
            rows.prefetch(table, ids)

    def stats(self) -> StoreStats:
        with self._held() as rows:
            alive = sum(not taken.closed for taken in self._snapshots)
            return dataclasses.replace(rows.stats(), snapshot_count=alive)

    def sort_ids(self, ids: torch.Tensor, buckets: Buckets, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._rows.sort_ids(ids, buckets, begin, end)


class BucketSort:
    """``sort_ids_by_bucket`` of one implementation: the checks, and behind them its way to sort.

    Args:
        sort: see ``RowEngine.sort_ids``.
    """

    def __init__(self, sort: Callable[[torch.Tensor, Buckets, int, int], tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._sort = sort

    def sort_ids_by_bucket(
        self,
        ids: torch.Tensor,
        bucket_start: int = 0,
        bucket_end: int | None = None,
        total_buckets: int = 1,
        *,
        hash_mode: str = "interleave",
        bucket_size: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids in bucket order, ascending inside a bucket, and how many each bucket has.

        FBGEMM's ``get_bucket_sorted_indices_and_bucket_tensor``, whose order inside a bucket is free.

        Args:
            ids: int64 or int32, [n] or [n, 1]; duplicates are kept.
            bucket_start: first bucket of this rank.
            bucket_end: behind its last one; None is ``total_buckets``. Where it is ``bucket_start``, ``ids`` is empty.
            total_buckets: over all ranks.
            hash_mode: see ``Buckets``.
            bucket_size: see ``Buckets``.

        Returns:
            int64 [n, 1] ids and int64 [bucket_end - bucket_start, 1] counts.

        Raises:
            ConfigError: an id outside the rank's buckets, or a range outside all buckets. ShapeError, UnsupportedError.
        """
        buckets = Buckets(total_buckets, hash_mode, bucket_size)
        end = check_int(total_buckets if bucket_end is None else bucket_end, "bucket_end", 0, total_buckets)
        check_int(bucket_start, "bucket_start", 0, end)
        return self._sort(check_ids(_flat(ids)), buckets, bucket_start, end)


def _flat(ids: Any) -> torch.Tensor:
    plain = check_plain(ids, "ids")
    if plain.dim() == 2 and plain.shape[1] == 1:
        return plain.reshape(-1)
    if plain.dim() != 1:
        raise ShapeError("ids of another shape", got=tuple(plain.shape), expected="[n] or [n, 1]", where="ids")
    return plain
