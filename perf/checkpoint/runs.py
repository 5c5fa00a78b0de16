"""One run of one contender on one rank: from barrier to barrier, counted, and checked when it matters."""

from __future__ import annotations

import contextlib
import logging
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from perf.checkpoint.model import remove_folder
from perf.harness.counters import Counters
from perf.harness.paired import Round, Sample, interleave

__all__ = ["Run", "measure", "run_in", "thread_count_of"]

_BEST_THREADS = 4


def thread_count_of(contender: str) -> int:
    """``x-best`` runs with four threads, ``x`` with one, which is everybody's default."""
    return _BEST_THREADS if contender.endswith("-best") else 1


@dataclass
class Run:
    """A contender on this rank.

    Attributes:
        work: what is measured, on every rank.
        check: raises when the last work did not do all of it. Called after the last run, which is a timed one.
        prepare: what must be undone or renewed before each run.
        finish: frees what the last run left behind.
        last: number of the last run, the thrown away one being 0.
    """

    work: Callable[[], object]
    check: Callable[[], None]
    prepare: Callable[[], None]
    finish: Callable[[], None]
    last: int
    _count: int = field(default=0, init=False)
    _counters: Counters = field(default_factory=Counters, init=False)

    def __call__(self) -> Sample:
        """Run once; every rank returns its own counts and the time until the slowest was done."""
        self.prepare()
        dist.barrier()
        self._counters.start()
        # Counting begins at different moments on different ranks; the clock may not.
        dist.barrier()
        begun = time.perf_counter()
        self.work()
        counted = self._counters.stop()
        dist.barrier()
        seconds = time.perf_counter() - begun
        if self._count == self.last:
            self.check()
        self._count += 1
        dist.barrier()
        self.finish()
        return {"seconds": seconds, **counted}


def run_in(path: Path, rank: int, *, work: Callable[[], object], check: Callable[[], None], last: int) -> Run:
    """A contender with a folder of its own, which rank 0 makes anew before each run and removes after it."""

    def remove() -> None:
        if rank == 0:
            remove_folder(path)

    def renew() -> None:
        remove()
        if rank == 0:
            path.mkdir()

    return Run(work=work, check=check, prepare=renew, finish=remove, last=last)


def measure(runs: Mapping[str, Run], round_count: int, seed: int) -> list[Round]:
    """Interleave the contenders on this rank; the peers' warnings about their own defaults are not of interest."""
    with _quiet():
        return interleave(runs, round_count=round_count, seed=seed)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("torch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
