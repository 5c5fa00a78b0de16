"""Batches of rows, read and written: by the store, by position, by torch alone, and copied where they lie."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from conformance.harness import Rank
from perf.harness.paired import Round, Sample, interleave, seconds_of
from perf.harness.workloads import Workload
from perf.kvstore.rows import TABLE, THREADS, Filled, clock, fill, fresh_memory, row_layout
from perf.peers.plain_rows import Workers, copy_bytes, gather_rows

__all__ = ["measure_fresh_sets", "measure_gets", "measure_sets", "measure_zipf_gets"]

Reader = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _readers(filled: Filled) -> dict[str, Reader]:
    rows, words = filled.matrix, filled.matrix.view(torch.int64)
    keys, order = filled.ids.sort()
    workers = Workers(THREADS)
    # Everybody fills the same memory: fresh pages would cost more than the rows.
    out = torch.empty(filled.batch, rows.shape[1], dtype=torch.uint8)
    out_words = out.view(torch.int64)

    def torch_store(places: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        # The best plain-torch formulation: sorted keys, searchsorted, index_select.
        return torch.index_select(words, 0, order[torch.searchsorted(keys, ids)], out=out_words)

    def some(places: torch.Tensor) -> torch.Tensor:
        # As many bytes, contiguous, from a random place of the same pool.
        start = int(places[0]) % (rows.shape[0] - filled.batch + 1)
        return rows[start : start + filled.batch]

    def by(count: int) -> Reader:
        def read(places: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            for keys, part in zip(ids.split(count), out.split(count), strict=True):  # type: ignore[no-untyped-call]
                filled.store.get_rows(TABLE, keys, out=part)
            return out

        return read

    return {
        "ours": lambda places, ids: filled.store.get_rows(TABLE, ids, out=out),
        "gather": lambda places, ids: gather_rows(rows, places, out, workers),
        "torch": torch_store,
        "one-by-one": by(1),
        "by-ten": by(10),
        "copy": lambda places, ids: out.copy_(some(places)),
        "memcpy": lambda places, ids: copy_bytes(some(places), out, workers),
    }


def _measure_gets(workload: Workload, filled: Filled, places_of: Callable[[], torch.Tensor], seed: int) -> list[Round]:
    readers = _readers(filled)

    def run_of(who: str) -> Callable[[], Sample]:
        def run() -> Sample:
            places = places_of()
            ids, found = filled.ids[places], []
            sample = seconds_of(lambda: found.append(readers[who](places, ids)))()
            if who not in ("copy", "memcpy"):
                filled.check(places, found[0], who)
            return sample

        return run

    contenders = {who: run_of(who) for who in workload.contenders}
    rounds = interleave(contenders, round_count=workload.round_count, seed=seed)
    filled.store.close()
    return rounds


def measure_gets(rank: Rank, workload: Workload, folder: str, round_count: int, seed: int) -> list[Round]:
    """Whole rows of a batch of ids, all of them present, uniform; ``gather`` knows their positions."""
    filled, generator = fill(rank, workload), torch.Generator().manual_seed(seed + 1)
    return _measure_gets(workload, filled, partial(filled.places, generator), seed)


def measure_zipf_gets(rank: Rank, workload: Workload, folder: str, round_count: int, seed: int) -> list[Round]:
    """The same with ids whose frequencies follow Zipf's law, exponent 1.05: duplicates, and rows in caches."""
    filled, generator = fill(rank, workload), torch.Generator().manual_seed(seed + 1)
    share = torch.arange(1, filled.ids.numel() + 1, dtype=torch.float64).pow(-1.05).cumsum(0)

    def places() -> torch.Tensor:
        drawn = torch.rand(filled.batch, generator=generator, dtype=torch.float64) * share[-1]
        return torch.searchsorted(share, drawn).clamp(max=filled.ids.numel() - 1)

    return _measure_gets(workload, filled, places, seed)


def measure_sets(rank: Rank, workload: Workload, folder: str, round_count: int, seed: int) -> list[Round]:
    """Whole rows written over rows that are there: by the store, by torch alone, and copied to one random place."""
    filled = fill(rank, workload)
    generator = torch.Generator().manual_seed(seed + 1)
    pool = fresh_memory(filled.matrix.shape).copy_(filled.matrix)
    words, (keys, order) = pool.view(torch.int64), filled.ids.sort()
    rows = torch.empty(filled.batch, pool.shape[1], dtype=torch.uint8)

    def run_of(who: str) -> Callable[[], Sample]:
        def run() -> Sample:
            places = torch.randperm(filled.ids.numel(), generator=generator)[: filled.batch]
            torch.index_select(filled.matrix, 0, places, out=rows)
            if who == "ours":
                return seconds_of(lambda: filled.store.set_rows(TABLE, rows))()
            if who == "by-ten":
                tens = rows.split(10)  # type: ignore[no-untyped-call]
                return seconds_of(lambda: [filled.store.set_rows(TABLE, ten) for ten in tens])()
            if who == "torch":
                ids, values = filled.ids[places], rows.view(torch.int64)
                return seconds_of(lambda: words.index_copy_(0, order[torch.searchsorted(keys, ids)], values))()
            start = int(places[0]) % (pool.shape[0] - filled.batch + 1)
            return seconds_of(lambda: pool[start : start + filled.batch].copy_(rows))()

        return run

    rounds = interleave({who: run_of(who) for who in workload.contenders}, round_count=round_count, seed=seed)
    filled.check(torch.arange(filled.ids.numel()), filled.store.get_rows(TABLE, filled.ids), "set_rows")
    filled.store.close()
    return rounds


def measure_fresh_sets(rank: Rank, workload: Workload, folder: str, round_count: int, seed: int) -> list[Round]:
    """Every row set for the first time, a batch at a time: ``ours`` after ``reserve``, ``unreserved`` without.

    ``touched`` and ``fresh`` copy the same rows into memory that was touched before, or that was not.
    """
    filled, kvstore = fill(rank, workload), rank.component("kvstore")
    filled.store.close()
    count, touched = filled.ids.numel(), fresh_memory(filled.matrix.shape).zero_()
    layout, workers = row_layout(kvstore, workload), Workers(THREADS)

    def set_rows(reserved: bool) -> Sample:
        with kvstore.KVStore({TABLE: layout}, optimizer_in_row=True, clock=clock) as store:
            if reserved:
                store.reserve(TABLE, count)
            batches = filled.matrix.split(filled.batch)  # type: ignore[no-untyped-call]
            sample = seconds_of(lambda: [store.set_rows(TABLE, rows) for rows in batches])()
            filled.check(torch.arange(count), store.get_rows(TABLE, filled.ids), "a filled store")
        return sample

    def copied(out: torch.Tensor) -> Sample:
        return seconds_of(lambda: copy_bytes(filled.matrix, out, workers))()

    contenders = {
        "ours": lambda: set_rows(True),
        "unreserved": lambda: set_rows(False),
        "touched": lambda: copied(touched),
        "fresh": lambda: copied(fresh_memory(filled.matrix.shape)),
        "torch": lambda: seconds_of(lambda: torch.cat([filled.matrix])[filled.ids.argsort()])(),
    }
    return interleave({who: contenders[who] for who in workload.contenders}, round_count=round_count, seed=seed)
