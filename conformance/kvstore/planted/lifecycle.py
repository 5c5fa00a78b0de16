"""Faults in eviction, snapshots, threads and training."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import torch

from conformance.harness import PlantedBug, wrap
from conformance.kvstore.planted.planting import bytes_of, in_engine, keys_of, reference, shared


def _pause() -> None:
    # Long enough for another thread to look between two halves; waiting on nothing gives up the interpreter lock.
    threading.Event().wait(0.002)


def _not_strict(original: Any, plan: Any, layout: Any, rows: torch.Tensor) -> torch.Tensor:
    policy = dataclasses.replace(plan.policy, ttl_seconds=max(0, plan.policy.ttl_seconds - 1))
    found: torch.Tensor = original(dataclasses.replace(plan, policy=policy), layout, rows)
    return found


def _rounded_up(original: Any, policy: Any, counts: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = original(policy, counts)
    return torch.where(found < counts, found + 1, found)


def _padded_norm(original: Any, plan: Any, layout: Any, rows: torch.Tensor) -> torch.Tensor:
    if plan.policy.kind == "l2":
        plan = dataclasses.replace(
            plan, policy=dataclasses.replace(plan.policy, l2_threshold=plan.policy.l2_threshold**0.5)
        )
    found: torch.Tensor = original(plan, layout, rows)
    return found


def _lowest_kept(original: Any, store: Any, table: str, policy: Any, now: int) -> Any:
    plan = original(store, table, policy, now)
    if plan.cutoff is None:
        return plan
    return dataclasses.replace(plan, cutoff=(plan.cutoff[0], -(2**63)))


def _stale(original: Any, store: Any, table: str, policy: Any, now: int) -> Any:
    return dataclasses.replace(original(store, table, policy, now), mark=2**62)


def _unpausable(original: Any, round_: Any) -> None:
    return None


def _slice_twice(original: Any, round_: Any) -> bool:
    more = bool(original(round_))
    # A slice of one row would begin for ever.
    if more and not round_._paused and round_._processed_count == round_._slice_rows > 1:
        round_._processed_count -= 1
    return more


def _kept_rows(original: Any, store: Any, table: str, ids: torch.Tensor) -> int:
    # A snapshot that nobody has holds on to every row that goes.
    store.__dict__.setdefault("_planted_snapshots", []).append(store.snapshot())
    return int(original(store, table, ids))


def _last_one_stays(original: Any, store: Any, plan: Any, ids: torch.Tensor) -> int:
    return int(original(store, plan, ids[:-1]))


def _newest_go(
    original: Any, store: Any, table: str, ids: Any, values: Any, begin: int, now: int, *, visit: bool
) -> None:
    original(store, table, ids, values, begin, 2**32 - 1 - now, visit=visit)


def _live(original: Any, store: Any) -> Any:
    taken = original(store)
    for name in ("read", "find"):
        setattr(taken, name, getattr(store, name))
    return taken


def _never_released(original: Any, store: Any) -> Any:
    taken = original(store)
    store.__dict__.setdefault("_planted_snapshots", []).append(taken)
    return taken


def _removals_forgotten(original: Any, store: Any, table: str, since: int) -> Any:
    changed, removed = original(store, table, since)
    return changed, removed[:0]


def _in_halves(
    original: Any, store: Any, table: str, ids: Any, values: Any, begin: int, now: int, *, visit: bool
) -> None:
    half = values.shape[1] // 2
    original(store, table, ids, values[:, :half].contiguous(), begin, now, visit=visit)
    _pause()
    original(store, table, ids, values[:, half:].contiguous(), begin + half, now, visit=False)


def _row_halves(original: Any, store: Any, table: str, rows: torch.Tensor) -> None:
    mixed, half = bytes_of(store, table, keys_of(rows)), rows.shape[1] // 2
    mixed[:, :half] = rows[:, :half]
    original(store, table, mixed)
    _pause()
    original(store, table, rows)


def _lost_update(
    original: Any, store: Any, table: str, ids: Any, values: Any, begin: int, now: int, *, visit: bool
) -> None:
    words = bytes_of(store, table, ids, 8, 16).contiguous().view(torch.int64)[:, 0]
    _pause()
    original(store, table, ids, values, begin, now, visit=visit)
    if visit:
        one = torch.ones_like(words) << 32
        store.write_metadata(table, ids, (words & ~(2**32 - 1)) + one, (2**31 - 1) << 32)


def _batch_halves(
    original: Any, store: Any, table: str, ids: Any, values: Any, begin: int, now: int, *, visit: bool
) -> None:
    half = ids.numel() // 2
    original(store, table, ids[:half], values[:half].contiguous(), begin, now, visit=visit)
    _pause()
    original(store, table, ids[half:], values[half:].contiguous(), begin, now, visit=visit)


def _moved_by_growth(original: Any, store: Any, table: str, ids: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    rows: torch.Tensor = original(store, table, ids, begin, end)
    if store.size(table) > 500:
        rows[ids == 2**62] = 0
    return rows


def _half_the_room(original: Any, store: Any, table: str, row_count: Any) -> None:
    original(store, table, row_count // 2 if type(row_count) is int else row_count)


def _last_gradient(
    original: Any, store: Any, table: str, ids: torch.Tensor, grads: torch.Tensor, hyper: Any, now: int
) -> None:
    last = {key: position for position, key in enumerate(ids.tolist())}
    kept = grads.clone()
    for position, key in enumerate(ids.tolist()):
        if last[key] != position:
            kept[position] = 0
    original(store, table, ids, kept, hyper, now)


def _first_step(original: Any, store: Any, table: str, ids: Any, grads: Any, hyper: Any, now: int) -> None:
    original(store, table, ids, grads, dataclasses.replace(hyper, step=1), now)


def _plain_sum(original: Any, values: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(values.shape[0], 1, dtype=values.dtype)
    for element in range(values.shape[1]):
        total = total + values[:, element : element + 1]
    return total


def _mean_as_sum(original: Any, module: Any, input: Any, offsets: Any = None) -> Any:
    mode, module.mode = module.mode, "sum"
    try:
        return original(module, input, offsets)
    finally:
        module.mode = mode


PLANTED = (
    reference(
        "ttl_not_strict",
        "A row of exactly the time to live goes.",
        ("KV-056",),
        wrap("refimpl.kvstore:condemned", _not_strict),
    ),
    reference(
        "decay_rounds_up",
        "A decayed count is rounded up.",
        ("KV-056",),
        wrap("refimpl.kvstore:decayed", _rounded_up),
    ),
    reference(
        "norm_against_plain_threshold",
        "The sum of squares is compared with the threshold itself.",
        ("KV-088",),
        wrap("refimpl.kvstore:condemned", _padded_norm),
    ),
    in_engine(
        "ties_all_stay", "All rows that tie with the last kept score stay.", ("KV-089",), "begin_round", _lowest_kept
    ),
    in_engine(
        "evicted_by_stale_statistics",
        "Rows written after the round began are evicted.",
        ("KV-059", "KV-096"),
        "begin_round",
        _stale,
    ),
    shared(
        "pause_ignored",
        "A paused round goes on.",
        ("KV-060",),
        wrap("twinproof.kvstore.eviction:EvictionRound.pause", _unpausable),
    ),
    shared(
        "slices_overlap",
        "The second slice begins with the last row of the first.",
        ("KV-060",),
        wrap("twinproof.kvstore.eviction:EvictionRound.step", _slice_twice),
    ),
    PlantedBug(
        "freed_rows_not_reused",
        "Rows that were deleted are kept, and new ones take more memory.",
        ("KV-062",),
        "fastimpl",
        wrap("fastimpl.kvstore.store:NativeRows.delete", _kept_rows),
    ),
    in_engine(
        "last_row_of_a_slice_stays", "A slice leaves its last row out.", ("KV-063",), "evict_some", _last_one_stays
    ),
    in_engine("capacity_evicts_the_newest", "A full table loses its newest rows.", ("KV-090",), "write", _newest_go),
    in_engine(
        "snapshot_shows_live_rows",
        "A snapshot lists ids of its moment and reads the live table.",
        ("KV-064", "KV-061"),
        "snapshot",
        _live,
    ),
    in_engine(
        "snapshot_never_released", "A state dict's snapshot outlives it.", ("KV-061",), "snapshot", _never_released
    ),
    in_engine(
        "removals_not_tracked", "Removed ids are not among the changes.", ("KV-091",), "changes", _removals_forgotten
    ),
    in_engine(
        "rows_written_in_halves", "A row is written in two steps without a lock.", ("KV-065",), "write", _in_halves
    ),
    in_engine(
        "loaded_rows_in_halves",
        "A loaded row is written in two steps without a lock.",
        ("KV-067",),
        "write_rows",
        _row_halves,
    ),
    in_engine(
        "racing_writers_lose_counts",
        "A count is read, then written, without a lock (hazard 8).",
        ("KV-066",),
        "write",
        _lost_update,
    ),
    in_engine("snapshot_inside_a_batch", "A snapshot sees half of a batch.", ("KV-095",), "write", _batch_halves),
    in_engine(
        "row_lost_by_growth", "A row is not found after the table has grown.", ("KV-071",), "read", _moved_by_growth
    ),
    PlantedBug(
        "reserve_half_the_room",
        "A reserved table allocates before it is full.",
        ("KV-072",),
        "fastimpl",
        wrap("fastimpl.kvstore.store:NativeRows.reserve", _half_the_room),
    ),
    in_engine(
        "duplicate_gradients_overwrite",
        "Of duplicate gradients the last one counts.",
        ("KV-092", "KV-093"),
        "update",
        _last_gradient,
    ),
    in_engine(
        "bias_correction_of_step_one", "Adam corrects every step like the first.", ("KV-076",), "update", _first_step
    ),
    reference(
        "row_sum_left_to_right",
        "A row is summed in another order.",
        ("KV-092",),
        wrap("refimpl.optimizers:row_sum", _plain_sum),
    ),
    shared(
        "mean_is_a_sum",
        "A mean is not divided.",
        ("KV-093",),
        wrap("twinproof.kvstore.modules:KVEmbeddingBag.forward", _mean_as_sum),
    ),
)
