"""Readers at once: what a second thread that reads adds, in the store and in a gather that has nothing to lock."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from conformance.harness import Rank
from perf.harness.paired import Round, Sample, interleave, seconds_of
from perf.harness.workloads import Workload
from perf.kvstore.rows import TABLE, fill
from perf.peers.plain_rows import Workers, gather_rows

__all__ = ["measure_readers"]

_BATCHES = 16


def _together(jobs: list[Callable[[], None]]) -> float:
    threads = [threading.Thread(target=job) for job in jobs[1:]]

    def run() -> None:
        for thread in threads:
            thread.start()
        jobs[0]()
        for thread in threads:
            thread.join()

    return seconds_of(run)()["seconds"]


def measure_readers(rank: Rank, workload: Workload, folder: str, round_count: int, seed: int) -> list[Round]:
    """``shared_seconds``: the time of two readers at once over the time of the same batches one after the other.

    ``ours`` is the store, ``gather`` reads by known position, ``locked`` is the store behind one lock; each reader has
    one thread.
    """
    filled = fill(rank, workload)
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(seed + 1)
    places = [[filled.places(generator) for _ in range(_BATCHES)] for _ in range(2)]
    ids = [[filled.ids[some] for some in batches] for batches in places]
    outs = [torch.empty(filled.batch, filled.matrix.shape[1], dtype=torch.uint8) for _ in range(2)]
    lock, alone = threading.Lock(), [Workers(1), Workers(1)]

    def read(who: str, reader: int) -> None:
        for some, keys in zip(places[reader], ids[reader], strict=True):
            if who == "gather":
                gather_rows(filled.matrix, some, outs[reader], alone[reader])
            elif who == "ours":
                filled.store.get_rows(TABLE, keys, out=outs[reader])
            else:
                with lock:
                    filled.store.get_rows(TABLE, keys, out=outs[reader])

    def both(who: str) -> None:
        read(who, 0)
        read(who, 1)

    def run_of(who: str) -> Callable[[], Sample]:
        def run() -> Sample:
            one = _together([lambda: both(who)])
            two = _together([lambda: read(who, 0), lambda: read(who, 1)])
            for reader in range(2):
                filled.check(places[reader][-1], outs[reader], who)
            return {"seconds": two, "shared_seconds": two / one, "one_seconds": one}

        return run

    rounds = interleave(
        {who: run_of(who) for who in workload.contenders if who != "one"}, round_count=round_count, seed=seed
    )
    for found in rounds:
        # The same work by one reader, as a contender of its own.
        found["one"] = {"seconds": found["ours"]["one_seconds"]}
    filled.store.close()
    return rounds
