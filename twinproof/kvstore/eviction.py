"""Eviction rounds: a plan made at one moment, carried out in slices, by hand or by a background thread.

Prevents rounds that evict by stale statistics: a row that was written after its round began stays. Training waits for a
slice at most, never for a round: between slices the store is free.

Locks of the whole store are made here, for rounds are its lowest part: ``lock_over_forks``. Prevents a child that waits
for ever: a process that is forked, as a loader's workers are, has one thread, and a lock that another one held would be
held by nobody who lives. So whoever forks waits until no other thread is inside a call, and holds the locks over the
fork; the child has rows between two calls, as a snapshot has. The locks of the rows in C++ are held so behind these, by
``csrc/kvstore/handles.h``: a call takes them in that order.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import TracebackType
from typing import Any, Protocol

from twinproof.errors import ConfigError, StoreClosedError, UnsupportedError
from twinproof.kvstore.options import EvictionPolicy, EvictionStats, StoreStats
from twinproof.kvstore.rows import RoundPlan, RowEngine

__all__ = ["ROUND", "ROWS", "STEP", "BackgroundEvictor", "EvictableStore", "EvictionRound", "lock_over_forks"]

logger = logging.getLogger("twinproof.kvstore")

# In the order in which a call takes them: of a round, of a table's steps, of an engine's rows.
ROUND, STEP, ROWS = range(3)

_Key = tuple[int, int]
_numbers = itertools.count()
_locks: dict[_Key, weakref.ref[threading.RLock]] = {}
# Of the thread that forks: another one may be about to.
_held = threading.local()


def lock_over_forks(rank: int) -> threading.RLock:
    """A lock that its owner's process is not forked in. ``rank``: one of those above; of one rank the older is first.

    Nobody may hold it while waiting for a thread that forks.
    """
    lock, key = threading.RLock(), (rank, next(_numbers))

    def forget(_: object) -> None:
        _locks.pop(key, None)

    _locks[key] = weakref.ref(lock, forget)
    return lock


def _keeping(lock: threading.RLock) -> Iterator[None]:
    # A frame for each. What a handler of a signal raises as the lock is had finds it inside of its ``with``, and who
    # closes the frame, or loses it, lets go of the lock if it is held, and never of another's hold on it.
    with lock:
        yield


def _hold() -> None:
    if vars(_held).get("is_whole"):
        return
    # Some are held, where a handler of a signal raised: who waited for others now would wait out of turn.
    _release()
    # A copy: others make and lose locks meanwhile.
    for key in sorted(_locks):
        found = _locks.get(key)
        lock = None if found is None else found()
        if lock is not None:
            keeper = _keeping(lock)
            vars(_held).setdefault("keepers", []).append(keeper)
            next(keeper)
    _held.is_whole = True


def _release() -> None:
    _held.is_whole = False
    keepers = vars(_held).get("keepers", [])
    while keepers:
        keepers[-1].close()
        keepers.pop()


# Twice: Python forks the process whatever a handler of a signal raises in one, and the other then does all. By name:
# what they do is looked up when a process is forked. In the child the thread that forked is the same.
for _ in range(2):
    os.register_at_fork(before=lambda: _hold(), after_in_parent=lambda: _release(), after_in_child=lambda: _release())


class EvictionRound:
    """One round: ``step`` looks at the next slice, ``run`` at all that is left; between steps the store is free.

    Args:
        engine: the rows.
        plan: what the engine began.
        slice_rows: rows looked at in a step, at least 1.

    ``pause`` makes ``step`` do nothing until ``resume``; both in any order and number. ``cancel`` ends the round.
    """

    def __init__(self, engine: RowEngine, plan: RoundPlan, slice_rows: int = 4096) -> None:
        if type(slice_rows) is not int or slice_rows < 1:
            raise ConfigError("not a slice", got=slice_rows, expected="rows >= 1", where="slice_rows")
        self._engine, self._plan, self._slice_rows = engine, plan, slice_rows
        self._lock = lock_over_forks(ROUND)
        self._going = threading.Event()
        self._going.set()
        self._processed_count = self._evicted_count = 0

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError(
            "a round is neither copied nor pickled",
            got=type(self).__name__,
            expected="start_eviction()",
            where="pickle",
        )

    @property
    def done(self) -> bool:
        """Whether every row was looked at, or the round was cancelled."""
        return self._processed_count >= self._plan.ids.numel()

    @property
    def stats(self) -> EvictionStats:
        """What it did so far."""
        return EvictionStats(self._processed_count, self._evicted_count)

    def pause(self) -> None:
        """Make the following steps do nothing; who is in ``run`` waits."""
        self._going.clear()

    def resume(self) -> None:
        """Undo ``pause``."""
        self._going.set()

    def cancel(self) -> None:
        """End the round; rows not yet looked at stay."""
        with self._lock:
            self._plan = replace(self._plan, ids=self._plan.ids[: self._processed_count])
        self._going.set()

    def step(self) -> bool:
        """Look at the next slice; whether there is more to do. A paused round does nothing and has more to do."""
        with self._lock:
            if not self._going.is_set() or self.done:
                return not self.done
            ids = self._plan.ids[self._processed_count : self._processed_count + self._slice_rows]
            self._evicted_count += self._engine.evict_some(self._plan, ids)
            self._processed_count += ids.numel()
            return not self.done

    def run(self) -> EvictionStats:
        """Look at all that is left, even if it was paused; what the round did. Waits while another thread pauses it."""
        self.resume()
        while self.step():
            self._going.wait()
        return self.stats


class EvictableStore(Protocol):
    """What the evictor asks of a store; see ``KVStore``."""

    def start_eviction(self, table: str, *, policy: EvictionPolicy | None, slice_rows: int) -> EvictionRound:
        """A round over the rows of this moment."""

    def size(self, table: str) -> int:
        """The number of rows of the table."""

    def stats(self) -> StoreStats:
        """Exact counters."""

    def add_listener(self, listener: Callable[[str], None], *, steps: bool = False) -> None:
        """Call ``listener(table)`` after writes, or after steps."""

    def remove_listener(self, listener: Callable[[str], None]) -> None:
        """Undo ``add_listener``."""


# Rounds of an evictor that are told one by one: in a job of months there are more than anybody reads.
ROUNDS_KEPT = 1000


class _Worker:
    """The thread of an evictor, and what it needs: it keeps neither the evictor nor its store.

    Attributes:
        untold: what a round raised, in words, while nobody has heard of it.
        rounds: what the last ``ROUNDS_KEPT`` did; ``round_count`` and ``totals`` are of all.
    """

    def __init__(self, evictor: BackgroundEvictor, table: str) -> None:
        self.condition = threading.Condition()
        # The thread waits for calls, one a round that is due and one at the end. Such a queue may be put into by what
        # interrupts the thread itself, as a collection of garbage that finds its evictor; a condition loses that.
        self._calls: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.due = self.busy = self.closed = False
        self.untold: str | None = None
        self.rounds: list[EvictionStats] = []
        self.round_count, self.totals = 0, EvictionStats(0, 0)
        self._table, self._evictor = table, weakref.ref(evictor)
        self._thread = threading.Thread(target=self._work, name=f"kvstore-evict-{table}", daemon=True)

    def start(self) -> None:
        """Start the thread, which ends with the evictor or the program, whichever comes first."""
        self._thread.start()
        _working.add(self)

    @property
    def is_over(self) -> bool:
        """Whether no round will run; so it is in a forked process, where the thread does not live."""
        return self.closed or not self._thread.is_alive()

    def call(self) -> None:
        """Have a round run, behind the one that is running."""
        # In a forked process the lock may be held for ever, by a thread that does not live there.
        if self._thread.is_alive():
            with self.condition:
                if not self.due:
                    self.due = True
                    self._calls.put(None)

    def end(self) -> None:
        """Ask the thread to end after the slice that is running; who waits for a round waits no longer."""
        self._ask_to_end()
        if self._thread.is_alive():
            with self.condition:
                self.condition.notify_all()

    def _ask_to_end(self) -> None:
        self.closed = True
        self._calls.put(None)

    def join(self) -> None:
        """Wait until the thread, which was asked to, has ended."""
        self._thread.join()

    def abandon(self) -> None:
        """End with nobody there who waits, or could be told what a round raised: it is logged."""
        self._ask_to_end()
        untold, self.untold = self.untold, None
        if untold is not None:
            logger.warning("a round over table %s failed, and nobody asked: %s", self._table, untold)

    def _work(self) -> None:
        while True:
            self._calls.get()
            if self.closed:
                return
            with self.condition:
                self.due, self.busy = False, True
            try:
                self._round()
            except BaseException as error:
                # Of any class: whoever waits would wait for ever for a thread that has ended.
                self._keep(error)
            with self.condition:
                self.busy = False
                self.condition.notify_all()

    def _round(self) -> None:
        # Held while a round is planned; its slices hold the rows alone.
        evictor = self._evictor()
        found = None if evictor is None else evictor._begin()
        del evictor
        if found is None:
            return
        while not self.closed and found.step():
            pass
        self.rounds.append(found.stats)
        del self.rounds[:-ROUNDS_KEPT]
        last, before = found.stats, self.totals
        self.totals = EvictionStats(
            before.processed_count + last.processed_count, before.evicted_count + last.evicted_count
        )
        self.round_count += 1

    def _keep(self, error: BaseException) -> None:
        # A store that was closed has nothing to evict.
        self.untold = None if isinstance(error, StoreClosedError) else f"{type(error).__name__}: {error}"
        evictor = self._evictor()
        if evictor is None:
            self.abandon()
        else:
            # Not here: its traceback holds the store.
            evictor._failure = error


# Those whose thread lives, with or without an evictor.
_working: weakref.WeakSet[_Worker] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """End the threads before the interpreter does: one that came back from an operator then would abort the program."""
    working = list(_working)
    for worker in working:
        worker.end()
    for worker in working:
        worker.join()
        worker.abandon()


class BackgroundEvictor:
    """Runs an eviction round over a table when one of the triggers given says so; a context manager.

    A round that cannot bring the table below a threshold is not repeated before the next write. Its store keeps it: one
    that is not closed ends with the store, or with the program, after the slice that is running. What a round raised
    that nobody heard of is then logged.

    Args:
        store: the store.
        table: the table that is watched.
        trigger_rows: after a write that left the table with more rows than this.
        trigger_bytes: after a write to the table that left the store with more bytes of rows, of all tables, than this.
        trigger_steps: after every so many calls of ``apply_gradients`` on the table.
        policy: instead of the table's own.
        slice_rows: rows looked at while the store is held.

    Raises:
        ConfigError: no policy, or numbers out of range.
    """

    def __init__(
        self,
        store: EvictableStore,
        table: str,
        *,
        trigger_rows: int | None = None,
        trigger_bytes: int | None = None,
        trigger_steps: int | None = None,
        policy: EvictionPolicy | None = None,
        slice_rows: int = 1024,
    ) -> None:
        if not hasattr(store, "start_eviction"):
            raise ConfigError("not a store", got=type(store).__name__, expected="a KVStore", where="store")
        triggers = {"trigger_rows": trigger_rows, "trigger_bytes": trigger_bytes, "trigger_steps": trigger_steps}
        for name, value in triggers.items():
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError("not a threshold", got=value, expected="an int >= 1", where=name)
        if all(value is None for value in triggers.values()):
            raise ConfigError("nothing would ever run a round", got=None, expected=sorted(triggers), where="triggers")
        # A round that is thrown away checks the policy and the slice here, not in the thread.
        store.start_eviction(table, policy=policy, slice_rows=slice_rows)
        self._store, self._table, self._step_count = store, table, 0
        self._trigger_rows, self._trigger_bytes, self._trigger_steps = trigger_rows, trigger_bytes, trigger_steps
        self._policy, self._slice_rows = policy, slice_rows
        self._failure: BaseException | None = None
        self._worker = _Worker(self, table)
        # The thread is asked to end when nobody has the evictor any more; at exit it is waited for.
        weakref.finalize(self, self._worker.abandon).atexit = False
        self._worker.start()
        if trigger_rows is not None or trigger_bytes is not None:
            store.add_listener(self._written)
        if trigger_steps is not None:
            store.add_listener(self._stepped, steps=True)

    def _written(self, table: str) -> None:
        if table == self._table and (self._has_many_rows() or self._has_many_bytes()):
            self._make_due()

    def _has_many_rows(self) -> bool:
        return self._trigger_rows is not None and self._store.size(self._table) > self._trigger_rows

    def _has_many_bytes(self) -> bool:
        return self._trigger_bytes is not None and self._store.stats().row_bytes > self._trigger_bytes

    def _stepped(self, table: str) -> None:
        if table != self._table:
            return
        # It listens to steps only then.
        assert self._trigger_steps is not None
        self._step_count += 1
        if self._step_count % self._trigger_steps == 0:
            self._make_due()

    def _make_due(self) -> None:
        self._worker.call()

    def _begin(self) -> EvictionRound:
        return self._store.start_eviction(self._table, policy=self._policy, slice_rows=self._slice_rows)

    @property
    def rounds(self) -> list[EvictionStats]:
        """What each round did, of the last 1,000; a list of its own."""
        return self._worker.rounds[-ROUNDS_KEPT:]

    @property
    def round_count(self) -> int:
        """How many rounds there were."""
        return self._worker.round_count

    @property
    def totals(self) -> EvictionStats:
        """What all rounds did together."""
        return self._worker.totals

    def wait(self) -> list[EvictionStats]:
        """Wait until nothing is due; the rounds so far, as ``rounds`` tells them.

        Raises what a round raised; ConfigError in a forked process, where the thread does not live.
        """
        worker = self._worker
        if not worker.is_over:
            with worker.condition:
                worker.condition.wait_for(lambda: worker.is_over or not (worker.due or worker.busy))
        if worker.is_over and not worker.closed:
            raise ConfigError(
                "a forked process has no thread of this evictor, and nothing is evicted",
                got=f"process {os.getpid()}",
                expected="an evictor that was made in this process",
                where=self._table,
            )
        if self._failure is not None:
            worker.untold = None
            raise self._failure
        return self.rounds

    def close(self) -> None:
        """End after the slice that is running; twice is harmless. Raises what a round raised and nobody waited for."""
        self._end()
        self._tell()

    def _tell(self) -> None:
        failure, untold, self._worker.untold = self._failure, self._worker.untold, None
        if failure is not None and untold is not None:
            raise failure

    def _end(self) -> None:
        self._store.remove_listener(self._written)
        self._store.remove_listener(self._stepped)
        self._worker.end()
        self._worker.join()

    def __enter__(self) -> BackgroundEvictor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()
        if error is None:
            self._tell()
