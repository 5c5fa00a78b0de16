"""Faults that ``test_seams`` must notice."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch

from conformance.harness import fault, mutated, patched, wrap
from conformance.kvstore.cases import CHECKED_ROWS, SERIAL_IDS, STREAMED_BYTES
from conformance.kvstore.planted.planting import bytes_of, engines, keys_of

_COUNT_BITS = 0x7FFFFFFF << 32


@fault(kills="KV-190", at=engines("evict_some"))
def newer_counts_decayed(original: Any, store: Any, plan: Any, ids: torch.Tensor) -> int:
    """Counts of rows that were written after the round began are decayed."""
    before = bytes_of(store, plan.table, ids, 8, 16).view(torch.int64)[:, 0]
    evicted = int(original(store, plan, ids))
    after = bytes_of(store, plan.table, ids, 8, 16).view(torch.int64)[:, 0]
    same = (before == after) & store.find(plan.table, ids)
    fewer = (((after & _COUNT_BITS) >> 32).double() * plan.policy.decay).floor().long() << 32
    store.write_metadata(plan.table, ids[same], fewer[same], _COUNT_BITS)
    return evicted


@fault(kills="KV-191", at=engines("snapshot"))
def pushed_out_of_snapshots(original: Any, store: Any) -> Any:
    """Rows that make room for others in a full table go from its snapshots too."""
    taken, find, ids = original(store), store.find, store.ids
    found, listed = taken.find, taken.ids

    def is_full(table: str) -> bool:
        return store.options.capacities[table] is not None

    taken.find = lambda table, keys: found(table, keys) & find(table, keys) if is_full(table) else found(table, keys)
    taken.ids = lambda table, begin, last: (
        ids(table, begin, last)[found(table, ids(table, begin, last))] if is_full(table) else listed(table, begin, last)
    )
    return taken


_LOG_LIMIT = 4096


def _delete_logged(original: Any, store: Any, table: str, ids: torch.Tensor) -> int:
    there = set(ids[store.find(table, ids)].tolist())
    count = int(original(store, table, ids))
    log = store.__dict__.setdefault("_planted_log", [])
    log.extend((key, store.mark()) for key in there)
    return count


def _changes_by_first_removal(original: Any, store: Any, table: str, since: int) -> Any:
    changed, removed, first_mark = original(store, table, since)
    log = store.__dict__.get("_planted_log", [])
    if len(log) > _LOG_LIMIT:
        first = dict(reversed(log))
        kept = [key for key in removed.tolist() if first.get(key, since + 1) > since]
        removed = torch.tensor(kept, dtype=torch.int64)
    return changed, removed, first_mark


@fault(kills="KV-192")
def first_removals_kept() -> Iterator[None]:
    """A log of removals that is made shorter keeps the first of an id's removals, not the last."""
    with wrap(engines("delete"), _delete_logged), wrap(engines("changes"), _changes_by_first_removal):
        yield


@fault(kills="KV-193", at=engines("write_rows"))
def padding_streamed(original: Any, store: Any, table: str, rows: torch.Tensor) -> None:
    """Rows that are written past the caches keep what their caller had in their padding."""
    original(store, table, rows)
    layout = store.options.rows[table]
    block_bytes = -(-(layout.row_bytes + 8) // 64) * 64
    if rows.shape[0] * block_bytes < STREAMED_BYTES:
        return
    ranges = layout.value_ranges
    for (_, begin), (end, _) in pairwise([*ranges, (layout.row_bytes, 0)]):
        if begin < end:
            store.write(table, keys_of(rows), rows[:, begin:end].contiguous(), begin, 0, visit=False)


@fault(kills="KV-219", at=engines("read"))
def reads_streamed_by_lines(
    original: Any, store: Any, table: str, ids: torch.Tensor, begin: int, end: int, out: torch.Tensor
) -> None:
    """Rows that are read past the caches begin at a multiple of 16 bytes."""
    shift = begin % 16 if out.nbytes >= STREAMED_BYTES else 0
    original(store, table, ids, begin - shift, end - shift, out)


@fault(kills="KV-194", at=engines("write"))
def parts_written_in_any_order(
    original: Any, store: Any, table: str, ids: torch.Tensor, values: Any, begin: int, now: int, *, visit: bool
) -> None:
    """Of duplicates in the parts of two threads, the first wins."""
    parts = [slice(None)]
    if torch.get_num_threads() > 1 and ids.numel() >= SERIAL_IDS:
        parts = [slice(ids.numel() // 2, None), slice(ids.numel() // 2)]
    for part in parts:
        original(store, table, ids[part], values[part], begin, now, visit=visit)


@fault(kills="KV-194", at=engines("update"))
def parts_added_in_any_order(
    original: Any, store: Any, table: str, ids: torch.Tensor, grads: torch.Tensor, hyper: Any, now: int
) -> None:
    """Gradients of one row are added in the order in which threads find them."""
    if torch.get_num_threads() > 1 and ids.numel() >= SERIAL_IDS:
        half = ids.numel() // 2
        ids, grads = torch.cat([ids[half:], ids[:half]]), torch.cat([grads[half:], grads[:half]])
    original(store, table, ids, grads, hyper, now)


@fault(kills="KV-195", at="fastimpl.kvstore.store:NativeReader.ids")
def id_lost_between_threads(original: Any, store: Any, table: str, begin: int, last: int) -> torch.Tensor:
    """The last row of a thread's share of a large table is not listed."""
    found: torch.Tensor = original(store, table, begin, last)
    half = found.numel() // 2
    return torch.cat([found[: half - 1], found[half:]]) if found.numel() > 65536 else found


@fault(kills="KV-195", at=engines("snapshot"))
def large_moments_of_today(original: Any, store: Any) -> Any:
    """A snapshot of a table that threads share lists no row that changed or went since."""
    taken = original(store)
    listed = taken.ids

    def ids(table: str, begin: int, last: int) -> torch.Tensor:
        found: torch.Tensor = listed(table, begin, last)
        is_shared = torch.get_num_threads() > 1 and store.size(table) >= 2 * 65536
        return found[store.find(table, found)] if is_shared else found

    taken.ids = ids
    return taken


@fault(kills="KV-195", at="fastimpl.kvstore.store:NativeReader.ids")
def first_share_passes_over_none(original: Any, store: Any, table: str, begin: int, last: int) -> torch.Tensor:
    """Where threads share a table, the first of them lists rows before the range too."""
    is_shared = torch.get_num_threads() > 1 and store.size(table) >= 2 * 65536
    found: torch.Tensor = original(store, table, -(2**63) if is_shared else begin, last)
    return found


@fault(kills="KV-196", at="fastimpl.kvstore.files:StreamedFiles.open")
def shares_checked_alone(original: Any, files: Any, path: str) -> Any:
    """Each thread compares the ids of its own share of saved rows only."""
    saved = original(files, path)
    fits = saved._fits

    def fits_in_parts(rows: Any, ids: Any, ends: Any, start: int, bucket_size: int) -> bool:
        cuts = range(0, ids.numel(), CHECKED_ROWS)
        parts = [(rows[at : at + CHECKED_ROWS], ids[at : at + CHECKED_ROWS], start + at) for at in cuts]
        return all(fits(some, keys, ends, at, bucket_size) for some, keys, at in parts)

    saved._fits = fits_in_parts
    return saved


@fault(kills="KV-197", at=engines("begin_round"))
def threshold_squared_in_float32(original: Any, store: Any, table: str, policy: Any, now: int) -> Any:
    """The threshold of l2 is squared in float32."""
    square = float(torch.tensor(policy.l2_threshold) ** 2)
    return original(store, table, dataclasses.replace(policy, l2_threshold=math.sqrt(square)), now)


@fault(kills="KV-198", at=engines("update"))
def long_payloads_carry(
    original: Any, store: Any, table: str, ids: torch.Tensor, grads: torch.Tensor, hyper: Any, now: int
) -> None:
    """A NaN whose payload is all ones is rounded up, past all NaNs, to a zero."""
    original(store, table, ids, grads, hyper, now)
    layout = store.options.rows[table]
    if layout.weight_dtype is torch.float32 or not ids.numel():
        return
    end = 16 + layout.weight_bytes
    weights = bytes_of(store, table, ids, 16, end).view(layout.weight_dtype)
    weights[(grads.view(torch.int32) & 0x7FFFFFFF) > 0x7FFF8000] = 0
    store.write(table, ids, weights.view(torch.uint8), 16, now, visit=False)


@fault(kills="KV-199", at="twinproof.kvstore.eviction:_Worker._round")
def rounds_end_the_thread(original: Any, worker: Any) -> None:
    """What is no Exception ends the evictor's thread, and nobody hears of it."""
    try:
        original(worker)
    except Exception:
        raise
    except BaseException:
        worker.rounds.clear()


@fault(kills="KV-200", at="fastimpl.ops:file_read")
def short_files_are_read(original: Any, file: int, begin: int, dense: torch.Tensor) -> bool:
    """A thread that finds the end of a file has read its share."""
    original(file, begin, dense)
    return True


@fault(kills="KV-201", at=engines("update"))
def refused_gradients_stamp(
    original: Any, store: Any, table: str, ids: torch.Tensor, grads: torch.Tensor, hyper: Any, now: int
) -> None:
    """A batch of gradients that is refused has stamped the rows that are there."""
    store.write_metadata(table, ids, torch.full_like(ids, now), 0xFFFFFFFF)
    original(store, table, ids, grads, hyper, now)


@fault(kills="KV-211", at="fastimpl.kvstore.files:StreamedFiles.chunks")
def last_row_alone_not_loaded(original: Any, *arguments: Any) -> Iterator[Any]:
    """A last row that would be read alone is not loaded."""
    chunks = list(original(*arguments))
    return iter(chunks[:-1] if len(chunks) > 1 and chunks[-1][0].numel() == 1 else chunks)


@fault(kills="KV-211", at="fastimpl.kvstore.files:StreamedFiles.chunks")
def rows_of_the_first_buckets(
    original: Any, files: Any, saved: Any, table: str, begin: int, end: int, chunk_rows: int
) -> Iterator[Any]:
    """Of some buckets as many are read, from the first on."""
    found: Iterator[Any] = original(files, saved, table, 0, end - begin, chunk_rows)
    return found


chunks_beyond_the_bound = patched(
    "A chunk has a row more than fits.",
    mutated("twinproof.kvstore.views:LazyRows._make", "CHUNK_BYTES // row_bytes", "CHUNK_BYTES // row_bytes + 1"),
    kills="KV-212",
)

last_row_alone_not_handed_over = patched(
    "A last row that would be a chunk alone is not handed over.",
    mutated("twinproof.kvstore.views:LazyRows.chunks", "range(0, self.shape[0],", "range(0, self.shape[0] - 1 or 1,"),
    kills="KV-212",
)
