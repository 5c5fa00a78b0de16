"""Whole-row saves against a plain write of the same bytes, and the bucket order against a plain sort."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from conformance.harness import Mismatch, Rank
from perf.harness.paired import Round, Sample, interleave, seconds_of
from perf.harness.workloads import Workload
from perf.kvstore.rows import TABLE, THREADS, fill
from refimpl.checkpoint.memory import buffer_of

__all__ = ["measure_saves", "measure_sorts"]

_BLOCK_BYTES = 8 << 20
_BUCKETS = 100


def _write(rows: torch.Tensor, path: Path) -> None:
    data = buffer_of(rows)
    with path.open("wb", buffering=0) as file:
        for start in range(0, len(data), _BLOCK_BYTES):
            file.write(data[start : start + _BLOCK_BYTES])
        os.fsync(file.fileno())


def measure_saves(rank: Rank, workload: Workload, folder: str, round_count: int, seed: int) -> list[Round]:
    """The whole store to files: ``ours``; ``separate``, weight and state apart; ``plain``, the bytes of one matrix."""
    filled, kvstore = fill(rank, workload), rank.component("kvstore")
    buckets = kvstore.Buckets(_BUCKETS)

    def run_of(who: str) -> Callable[[], Sample]:
        path = Path(folder) / who

        def run() -> Sample:
            shutil.rmtree(path, ignore_errors=True)
            if who != "plain":
                options = {"buckets": buckets, "form": "rows" if who == "ours" else who, "save_distributed": False}
                return seconds_of(lambda: kvstore.save(filled.store, path, **options))()
            path.mkdir()
            return seconds_of(lambda: _write(filled.matrix, path / "rows"))()

        return run

    rounds = interleave({who: run_of(who) for who in workload.contenders}, round_count=round_count, seed=seed)
    with kvstore.KVStore(filled.store.options.layouts, optimizer_in_row=True) as other:
        kvstore.load(other, Path(folder) / "ours")
        filled.check(torch.arange(filled.ids.numel()), other.get_rows(TABLE, filled.ids), "a saved and loaded store")
    filled.store.close()
    return rounds


def measure_sorts(rank: Rank, workload: Workload, folder: str, round_count: int, seed: int) -> list[Round]:
    """``shape[0]`` ids into bucket order, ids sorted inside: ``ours``, and ``torch``, which only sorts them."""
    torch.set_num_threads(THREADS)
    kvstore = rank.component("kvstore")
    ids = torch.randint(-(2**62), 2**62, (workload.shape[0],), generator=torch.Generator().manual_seed(0))
    jobs: dict[str, Callable[[], object]] = {
        "ours": lambda: kvstore.sort_ids_by_bucket(ids, 0, _BUCKETS, _BUCKETS),
        "torch": ids.sort,
    }
    rounds = interleave({w: seconds_of(jobs[w]) for w in workload.contenders}, round_count=round_count, seed=seed)
    got, counts = kvstore.sort_ids_by_bucket(ids, 0, _BUCKETS, _BUCKETS)
    found = got.flatten().remainder(_BUCKETS)
    if not bool((found.diff() >= 0).all()) or int(counts.sum()) != ids.numel():
        raise Mismatch("ids are not in bucket order")
    return rounds
