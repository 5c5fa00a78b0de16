"""Batches of whole rows got from and set in embedded databases, against the store; a database that is not installed is
left out, which leaves its gates undecided.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import torch

from conformance.harness import Rank
from perf.harness.paired import Round, Sample, interleave, seconds_of
from perf.harness.workloads import Workload
from perf.kvstore.rows import TABLE, Filled, fill
from perf.peers.databases import Database, filled_database, installed

_BATCH = "-batch"

__all__ = ["measure_database_gets", "measure_database_sets"]


@contextmanager
def _opened(rank: Rank, workload: Workload, folder: str) -> Iterator[tuple[Filled, dict[str, Database]]]:
    """The store and every database that is there, with the same rows."""
    filled = fill(rank, workload)
    with ExitStack() as stack:
        stack.callback(filled.store.close)
        databases = {}
        for name in dict.fromkeys(name.removesuffix(_BATCH) for name in workload.contenders):
            if installed(name):
                databases[name] = filled_database(name, Path(folder), filled.ids, filled.matrix)
                stack.enter_context(closing(databases[name]))
        yield filled, databases


def _present(workload: Workload, databases: dict[str, Database]) -> list[str]:
    """The contenders that are databases; ``lmdb-batch`` is another way to ask the same ``lmdb``."""
    return [name for name in workload.contenders if name.removesuffix(_BATCH) in databases]


def measure_database_gets(rank: Rank, workload: Workload, folder: str, round_count: int, seed: int) -> list[Round]:
    """A batch of ids, all of them present: ``ours`` into the caller's memory."""
    with _opened(rank, workload, folder) as (filled, databases):
        generator = torch.Generator().manual_seed(seed + 1)
        out = torch.empty(filled.batch, filled.matrix.shape[1], dtype=torch.uint8)

        def run_ours() -> Sample:
            places = filled.places(generator)
            ids = filled.ids[places]
            sample = seconds_of(lambda: filled.store.get_rows(TABLE, ids, out=out))()
            filled.check(places, out, "ours")
            return sample

        def run_of(who: str) -> Callable[[], Sample]:
            database = databases[who.removesuffix(_BATCH)]
            get = database.get_batch if who.endswith(_BATCH) else database.get

            def run() -> Sample:
                places = filled.places(generator)
                ids, found = filled.ids[places], list[torch.Tensor]()
                sample = seconds_of(lambda: found.append(get(ids)))()
                filled.check(places, found[0], who)
                return sample

            return run

        contenders = {"ours": run_ours, **{who: run_of(who) for who in _present(workload, databases)}}
        return interleave(contenders, round_count=round_count, seed=seed)


def measure_database_sets(rank: Rank, workload: Workload, folder: str, round_count: int, seed: int) -> list[Round]:
    """Whole rows written over rows that are there."""
    with _opened(rank, workload, folder) as (filled, databases):
        generator = torch.Generator().manual_seed(seed + 1)

        def run_of(who: str) -> Callable[[], Sample]:
            def run() -> Sample:
                places = torch.randperm(filled.ids.numel(), generator=generator)[: filled.batch]
                ids, rows = filled.ids[places], filled.matrix[places]
                if who == "ours":
                    return seconds_of(lambda: filled.store.set_rows(TABLE, rows))()
                database = databases[who.removesuffix(_BATCH)]
                set_rows = database.set_batch if who.endswith(_BATCH) else database.set
                sample = seconds_of(lambda: set_rows(ids, rows))()
                # What it does in the background must not be paid for by whoever comes next.
                database.settle()
                return sample

            return run

        contenders = {who: run_of(who) for who in ("ours", *_present(workload, databases))}
        rounds = interleave(contenders, round_count=round_count, seed=seed)
        places = filled.places(generator)
        filled.check(places, filled.store.get_rows(TABLE, filled.ids[places]), "set_rows")
        for who, database in databases.items():
            filled.check(places, database.get(filled.ids[places]), who)
        return rounds
