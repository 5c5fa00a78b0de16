"""Faults that ``test_concurrency`` must notice."""

from __future__ import annotations

import threading
from typing import Any

import torch

from conformance.harness import fault, mutated, patched, wrap
from conformance.kvstore.planted.planting import bytes_of, engines, keys_of


@fault(kills="KV-104", at="twinproof.kvstore.eviction:BackgroundEvictor._written")
def background_threshold_ignored(original: Any, evictor: Any, table: str) -> None:
    """The background evictor starts a round after every write."""
    trigger, evictor._trigger_rows = evictor._trigger_rows, 1
    try:
        original(evictor, table)
    finally:
        evictor._trigger_rows = trigger


def _pause() -> None:
    # Long enough for another thread to look between two halves; waiting on nothing gives up the interpreter lock.
    threading.Event().wait(0.002)


@fault(kills="KV-065", at=engines("write"))
def rows_written_in_halves(
    original: Any, store: Any, table: str, ids: Any, values: Any, begin: int, now: int, *, visit: bool
) -> None:
    """A row is written in two steps without a lock."""
    half = values.shape[1] // 2
    original(store, table, ids, values[:, :half].contiguous(), begin, now, visit=visit)
    _pause()
    original(store, table, ids, values[:, half:].contiguous(), begin + half, now, visit=False)


@fault(kills="KV-067", at=engines("write_rows"))
def loaded_rows_in_halves(original: Any, store: Any, table: str, rows: torch.Tensor) -> None:
    """A loaded row is written in two steps without a lock."""
    mixed, half = bytes_of(store, table, keys_of(rows)), rows.shape[1] // 2
    mixed[:, :half] = rows[:, :half]
    original(store, table, mixed)
    _pause()
    original(store, table, rows)


@fault(kills="KV-066", at=engines("write"))
def racing_writers_lose_counts(
    original: Any, store: Any, table: str, ids: Any, values: Any, begin: int, now: int, *, visit: bool
) -> None:
    """A count is read, then written, without a lock."""
    words = bytes_of(store, table, ids, 8, 16).contiguous().view(torch.int64)[:, 0]
    _pause()
    original(store, table, ids, values, begin, now, visit=visit)
    if visit:
        one = torch.ones_like(words) << 32
        store.write_metadata(table, ids, (words & ~(2**32 - 1)) + one, (2**31 - 1) << 32)


@fault(kills="KV-095", at=engines("write"))
def snapshot_inside_a_batch(
    original: Any, store: Any, table: str, ids: Any, values: Any, begin: int, now: int, *, visit: bool
) -> None:
    """A snapshot sees half of a batch."""
    half = ids.numel() // 2
    original(store, table, ids[:half], values[:half].contiguous(), begin, now, visit=visit)
    _pause()
    original(store, table, ids[half:], values[half:].contiguous(), begin, now, visit=visit)


def _step_left_as_it_was(original: Any, engine: Any, table: str, *arguments: Any) -> None:
    step = engine.step(table)
    original(engine, table, *arguments)
    engine.set_step(table, step)


_UPDATE = "self._engine.update(table, checked, floats, hyper, now)"
steps_behind_their_rows = patched(
    "A snapshot may come between an update and its step.",
    wrap(engines("update"), _step_left_as_it_was),
    mutated(
        "twinproof.kvstore.store:KVStore.apply_gradients",
        _UPDATE,
        f"{_UPDATE}\n        self._engine.set_step(table, number)",
    ),
    kills="KV-346",
)


@fault(kills="KV-346", at="twinproof.kvstore.store:KVStore.snapshot")
def rows_behind_their_steps(original: Any, store: Any) -> Any:
    """An update may come between the rows of a snapshot and its steps."""
    taken = original(store)
    taken.step_count = {table: store.step_count(table) for table in store.tables}.__getitem__
    return taken


step_numbered_before_its_turn = patched(
    "A module reads the number of its step before it is the turn of its thread.",
    mutated("twinproof.kvstore.modules:_StoreRows._step", "None if isinstance(self.store, KVStore) else ", ""),
    kills="KV-349",
)
next_step_is_the_last_again = patched(
    "The step after the last has the last one's number.",
    mutated("twinproof.kvstore.store:KVStore.apply_gradients", "step_count(table) + 1", "step_count(table) or 1"),
    kills="KV-349",
)


slices_carried_out_unlocked = patched(
    "A round holds its lock while it picks a slice, and not while it is carried out.",
    mutated(
        "twinproof.kvstore.eviction:EvictionRound.step",
        "self._evicted_count += self._engine.evict_some(self._plan, ids)",
        "self._lock.release(); self._evicted_count += self._engine.evict_some(self._plan, ids); self._lock.acquire()",
    ),
    kills="KV-368",
)


@fault(kills="KV-370", at="fastimpl.kvstore.files:StreamedFiles.open", of="fastimpl")
def chunks_of_all_loads_in_one_memory(original: Any, files: Any, path: str) -> Any:
    """All loads of a process read their chunks into one memory."""
    saved = original(files, path)
    _SHARED.append(saved._read_range)

    def read(*given: Any) -> Any:
        found = _SHARED[0](*given)
        _pause()
        return found

    saved._read_range = read
    return saved


# What the first load reads with.
_SHARED: list[Any] = []
