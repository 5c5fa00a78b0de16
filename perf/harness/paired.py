"""Interleaved measurement, because a machine that changes between two blocks is measured instead of the code.

Separate blocks err by tens of percent on a shared machine, interleaved pairs by less than one. So
every contender runs once per round, rounds shuffle the order, and only ratios within one round are ever used. The
first round is thrown away: it pays for first touches of memory, imports and connections.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from perf.harness.nvml import Gpu, Unavailable, counts_between, throttled
from twinproof.errors import ConfigError

__all__ = ["Round", "Sample", "interleave", "merge_ranks", "ratios", "seconds_of"]

# What one run of one contender measured: ``seconds`` always, counts by name beside it.
Sample = dict[str, float]
# Contender -> sample.
Round = dict[str, Sample]

# These are properties of one process; everything else adds up over ranks.
_BY_MAXIMUM = (
    "seconds",
    "rss_growth_bytes",
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "nvml_used_bytes",
    "nvml_growth_bytes",
    "open_fd_count",
    "thread_count",
)


def seconds_of(function: Callable[[], Any]) -> Callable[[], Sample]:
    """Turn a plain function into a contender that measures its own wall time."""

    def run() -> Sample:
        begun = time.perf_counter()
        function()
        return {"seconds": time.perf_counter() - begun}

    return run


def interleave(
    contenders: Mapping[str, Callable[[], Sample]],
    *,
    round_count: int,
    seed: int,
    warm_up: bool = True,
    gpu: Gpu | Unavailable | None = None,
) -> list[Round]:
    """Run every contender once per round, in an order drawn per round.

    Ranks of one job call this with the same seed and names, and thus keep the same order.

    Args:
        contenders: name -> one run, which returns its own sample: a job between barriers knows best when it began.
        round_count: rounds that count.
        seed: of the order.
        warm_up: run one more round first and forget it.
        gpu: read around every run. What it used of its memory and its link (``counts_between``) joins the sample,
            where the run has not measured it more closely, and a round in which its clock
            was held down by power or heat is dropped, and measured once more at the end: at most ``round_count`` times.
            For jobs of one rank, since ranks would have to agree on it.
    """
    if not contenders or round_count < 1:
        got, expected = f"{len(contenders)} contenders, {round_count} rounds", "at least one of each"
        raise ConfigError("nothing to measure", got=got, expected=expected, where="contenders, round_count")
    order = random.Random(seed)
    names = list(contenders)
    watched = gpu if isinstance(gpu, Gpu) else None
    rounds: list[Round] = []
    with _collecting_what_is_new():
        for number in range(2 * round_count + warm_up):
            order.shuffle(names)
            found: Round = {}
            is_throttled = False
            for name in names:
                # Garbage of one contender must not be collected on another's time.
                gc.collect()
                found[name], reasons = _watched(contenders[name], watched)
                is_throttled |= bool(reasons)
            if number >= warm_up and not is_throttled:
                rounds.append({name: found[name] for name in contenders})
            if len(rounds) == round_count:
                break
    return rounds


@contextmanager
def _collecting_what_is_new() -> Iterator[None]:
    """Collections look at objects made from here on: torch's modules alone are a tenth of a second for each."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _watched(run: Callable[[], Sample], gpu: Gpu | None) -> tuple[Sample, tuple[str, ...]]:
    """One sample, with what the GPU did around it; and why its clock was held down."""
    if gpu is None:
        return run(), ()
    before = gpu.sample()
    sample = run()
    after = gpu.sample()
    return {**counts_between(before, after), **sample}, throttled([before, after])


def merge_ranks(by_rank: Sequence[Sequence[Round]]) -> list[Round]:
    """One list of rounds from every rank's: a job is as slow as its slowest rank, and moves what all ranks move."""
    merged: list[Round] = []
    for rounds in zip(*by_rank, strict=True):
        merged.append({name: _merge([found[name] for found in rounds]) for name in rounds[0]})
    return merged


def _merge(samples: Sequence[Sample]) -> Sample:
    return {
        key: (max if key in _BY_MAXIMUM else sum)(sample[key] for sample in samples)
        for key in samples[0]
        if all(key in sample for sample in samples)
    }


def ratios(rounds: Sequence[Round], slow: str, fast: str, *, key: str = "seconds") -> list[float]:
    """``slow / fast`` within each round. A contender against itself is taken across neighbouring rounds.

    The ratio of one sample to itself is 1 and says nothing; the next round's sample is an independent measurement of
    the same thing, which makes same-against-same a real control.
    """
    found = [r for r in rounds if slow in r and fast in r and key in r[slow] and key in r[fast]]
    if slow == fast:
        if len(found) < 2:
            return []
        return [a[slow][key] / b[fast][key] for a, b in zip(found, [*found[1:], found[0]], strict=True)]
    return [r[slow][key] / r[fast][key] for r in found if r[fast][key] > 0]
