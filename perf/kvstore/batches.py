"""Batches of rows, read and written: by the store, by position, by torch alone, and copied where they lie."""

from __future__ import annotations

from collections.abc import Callable

import torch

from conformance.harness import Rank
from perf.harness.paired import Round, Sample, interleave, seconds_of
from perf.harness.workloads import Workload
from perf.kvstore.rows import TABLE, Filled, fill

__all__ = ["measure_gets", "measure_sets"]


def _readers(filled: Filled) -> dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]:
    weights = filled.weights()
    words = weights.view(torch.int64)
    keys, order = filled.ids.sort()
    # Everybody fills the same memory: fresh pages would cost more than the rows.
    out = torch.empty(filled.batch, words.shape[1], dtype=torch.int64)
    floats = out.view(torch.float32)

    def torch_store(places: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        # The best plain-torch formulation: sorted keys, searchsorted, index_select.
        return torch.index_select(words, 0, order[torch.searchsorted(keys, ids)], out=out)

    def copy(places: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        # As many bytes, contiguous, from a random place of the same pool.
        start = int(places[0]) % (words.shape[0] - filled.batch + 1)
        return out.copy_(words[start : start + filled.batch])

    return {
        "ours": lambda places, ids: filled.store.get(TABLE, ids, out=floats),
        "gather": lambda places, ids: torch.index_select(words, 0, places, out=out),
        "torch": torch_store,
        "copy": copy,
    }


def measure_gets(rank: Rank, workload: Workload, folder: str, round_count: int, seed: int) -> list[Round]:
    """Weights of a batch of ids, all of them present; ``gather`` knows their positions."""
    filled = fill(rank, workload)
    readers = _readers(filled)
    generator = torch.Generator().manual_seed(seed + 1)

    def run_of(who: str) -> Callable[[], Sample]:
        def run() -> Sample:
            places = filled.places(generator)
            ids, found = filled.ids[places], []
            sample = seconds_of(lambda: found.append(readers[who](places, ids)))()
            if who != "copy":
                filled.check_weights(places, found[0], who)
            return sample

        return run

    rounds = interleave({who: run_of(who) for who in workload.contenders}, round_count=round_count, seed=seed)
    filled.store.close()
    return rounds


def measure_sets(rank: Rank, workload: Workload, folder: str, round_count: int, seed: int) -> list[Round]:
    """Whole rows written over rows that are there: by the store, by torch alone, and copied to one random place."""
    filled = fill(rank, workload)
    generator = torch.Generator().manual_seed(seed + 1)
    pool = filled.matrix.clone()
    words, (keys, order) = pool.view(torch.int64), filled.ids.sort()

    def run_of(who: str) -> Callable[[], Sample]:
        def run() -> Sample:
            places = torch.randperm(filled.ids.numel(), generator=generator)[: filled.batch]
            rows = filled.matrix[places]
            if who == "ours":
                return seconds_of(lambda: filled.store.set_rows(TABLE, rows))()
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
