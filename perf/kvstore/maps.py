"""Ids: into bucket order, and what finding a row by its id costs in memory."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from conformance.harness import Mismatch, Rank
from perf.harness.counters import status_bytes, trim_heap
from perf.harness.paired import Round, Sample, interleave, seconds_of
from perf.harness.workloads import Workload
from perf.kvstore.rows import TABLE, THREADS, clock, row_layout
from perf.peers.plain_rows import sort_by_map

__all__ = ["measure_overhead", "measure_sorts"]


def measure_sorts(rank: Rank, workload: Workload, folder: str, round_count: int, seed: int) -> list[Round]:
    """``shape[0]`` ids into the order of ``shape[1]`` buckets, sorted inside: ``ours``; ``map``, through a map from
    bucket to list; and ``torch``, which only sorts them.
    """
    torch.set_num_threads(THREADS)
    kvstore = rank.component("kvstore")
    count, buckets = workload.shape
    ids = torch.randint(-(2**62), 2**62, (count,), generator=torch.Generator().manual_seed(0))
    jobs: dict[str, Callable[[], object]] = {
        "ours": lambda: kvstore.sort_ids_by_bucket(ids, 0, buckets, buckets),
        "map": lambda: sort_by_map(ids, buckets),
        "torch": ids.sort,
    }
    rounds = interleave({w: seconds_of(jobs[w]) for w in workload.contenders}, round_count=round_count, seed=seed)
    got, counts = kvstore.sort_ids_by_bucket(ids, 0, buckets, buckets)
    if not torch.equal(got.flatten(), sort_by_map(ids, buckets)) or int(counts.sum()) != count:
        raise Mismatch("ids are not in bucket order")
    return rounds


def measure_overhead(rank: Rank, workload: Workload, folder: str, round_count: int, seed: int) -> list[Round]:
    """``map_bytes_per_row``, and ``unaccounted_share``: how far what is reported is from the growth of resident memory.

    ``ours`` grows batch by batch and reports by ``stats()``; ``dict`` is a Python dict from id to position.
    """
    torch.set_num_threads(THREADS)
    kvstore = rank.component("kvstore")
    layout, count = row_layout(kvstore, workload), workload.shape[0] * workload.tensor_count
    ids = torch.randperm(count, generator=torch.Generator().manual_seed(0)) * 0x9E3779B1 - 2**40
    rows = torch.zeros(workload.shape[0], layout.row_bytes, dtype=torch.uint8)

    def resident() -> int:
        trim_heap()
        return status_bytes("VmRSS") or 0

    def ours() -> Sample:
        before = resident()
        with kvstore.KVStore({TABLE: layout}, optimizer_in_row=True, clock=clock) as store:
            for some in ids.split(workload.shape[0]):  # type: ignore[no-untyped-call]
                rows.view(torch.int64)[:, 0] = some
                store.set_rows(TABLE, rows)
            stats, grown = store.stats(), resident() - before
        reported = stats.allocated_bytes + stats.map_bytes
        return {"map_bytes_per_row": stats.map_bytes / count, "unaccounted_share": abs(grown - reported) / grown}

    def plain_dict() -> Sample:
        before = resident()
        made = {key: place for place, key in enumerate(ids.tolist())}
        grown = resident() - before
        return {"map_bytes_per_row": grown / count, "unaccounted_share": abs(grown - sys.getsizeof(made)) / grown}

    jobs = {"ours": ours, "dict": plain_dict}

    def run_of(who: str) -> Callable[[], Sample]:
        def run() -> Sample:
            found: Sample = {}
            return seconds_of(lambda: found.update(jobs[who]()))() | found

        return run

    return interleave({who: run_of(who) for who in workload.contenders}, round_count=round_count, seed=seed)
