"""Writes of a save, seen from below by the preloaded shim: exact, whatever else the processes write.

``/proc/self/io`` also counts what gloo sends to other ranks; the shim sees which file, which offset and which rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

from conformance.harness import Rank
from conformance.provers.faults import FaultServer, Trace, why_no_shim
from perf.checkpoint.model import Model, remove_folder
from perf.checkpoint.saving import save_work
from perf.harness.paired import Round, Sample
from perf.harness.workloads import Workload

__all__ = ["measure_counts", "samples_of"]

_SUFFIX = ".safetensors"
_PAGE_BYTES = 4096
_TIMEOUT_S = 300.0


def measure_counts(rank: Rank, workload: Workload, folder: str, round_count: int, seed: int) -> list[Round]:
    """Count the writes of each contender's save once per round, in fresh processes that rank 0 starts.

    The order does not matter to counts, hence ``seed`` is not used. Without a compiler for the shim nothing is counted.
    """
    found: list[list[Round] | None] = [None]
    if rank.rank == 0:
        found = [_count(rank.implementation, workload, Path(folder), round_count)]
    # The others have added nothing, but say so under the same names.
    dist.broadcast_object_list(found, src=0)
    rounds = found[0] or []
    if rank.rank == 0:
        return rounds
    return [{who: dict.fromkeys(sample, 0.0) for who, sample in names.items()} for names in rounds]


def _count(implementation: str, workload: Workload, folder: Path, round_count: int) -> list[Round]:
    if why_no_shim() is not None:
        return [{who: {"seconds": 0.0} for who in workload.contenders} for _ in range(round_count)]
    # What a DTensor imports with its first operator would take each process longer than its save.
    with FaultServer(implementation, ["torch._dynamo", f"{implementation}.checkpoint", __name__]) as server:
        return [
            {who: _sample(server, workload, who, folder / "root") for who in workload.contenders}
            for _ in range(round_count)
        ]


def _sample(server: FaultServer, workload: Workload, who: str, root: Path) -> Sample:
    remove_folder(root)
    (root / who).mkdir(parents=True)
    ranks = server.run_ranks_forked(
        _save_once, workload.rank_count, workload, who, str(root / who), root=root, timeout_s=_TIMEOUT_S
    )
    ranks.values()
    remove_folder(root)
    return {"seconds": max(outcome.finished_s for outcome in ranks.outcomes), **samples_of(ranks.trace)}


def _save_once(rank: Rank, workload: Workload, who: str, path: str) -> None:
    model = Model(workload)
    save_work(rank, model, dict(model.state()), who, Path(path))()
    dist.barrier()
    model.check_folder(Path(path), who)


def samples_of(trace: Trace) -> Sample:
    """Calls, bytes, pages that several ranks wrote to, and shared mappings, of the tensor files in a trace."""
    writers: dict[tuple[int, int], set[int]] = {}
    for inode, start, end, rank in _written(trace):
        for page in range(start // _PAGE_BYTES, -(-end // _PAGE_BYTES)):
            writers.setdefault((inode, page), set()).add(rank)
    writes = trace.writes(_SUFFIX)
    return {
        "file_write_calls": float(len(writes)),
        "file_written_bytes": float(sum(event.result for event in writes if event.succeeded)),
        "shared_page_count": float(sum(len(ranks) > 1 for ranks in writers.values())),
        "store_mapping_count": float(trace.count("mmap", suffix=_SUFFIX)),
    }


def _written(trace: Trace) -> Iterator[tuple[int, int, int, int]]:
    """(inode, start, end, rank) of every write; calls without an offset go on where their process was."""
    positions: dict[tuple[int, int], int] = {}
    for event in trace.writes(_SUFFIX):
        if not event.succeeded:
            continue
        own = (event.pid, event.inode)
        start = positions.get(own, 0) if event.offset < 0 else event.offset
        positions[own] = start + event.result if event.offset < 0 else positions.get(own, 0)
        yield event.inode, start, start + event.result, event.rank
