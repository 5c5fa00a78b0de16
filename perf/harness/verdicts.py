"""From ratios to words, so that nobody reads a difference into noise, nor noise into a difference.

The centre is the median of log-ratios. The interval is the one of order statistics, exact for any distribution, from
six pairs on; with three to five it is Student's on the log-ratios, which is wide. Fewer decide nothing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

__all__ = ["PAIRS_MIN", "SAME_WITHIN", "Comparison", "Interval", "Verdict", "compare", "digits", "interval_of"]

# A difference that a whole interval does not exceed is not worth a word.
SAME_WITHIN = 0.03
_CONFIDENCE = 0.95
# Two-sided 95 % points of Student's t for 2, 3 and 4 degrees of freedom.
_STUDENT = {3: 4.303, 4: 3.182, 5: 2.776}
# Fewer pairs than that have no interval.
PAIRS_MIN = min(_STUDENT)


class Verdict(str, Enum):
    """What a comparison says of its first side."""

    FASTER = "faster"
    SLOWER = "slower"
    SAME = "same"
    UNDECIDED = "undecided"


def digits(value: float, count: int = 3) -> str:
    """``value`` with so many significant digits, or with all in front of its point: 0.00452, 1.00, 1234."""
    return f"{value:.0f}" if abs(value) >= 10 ** (count - 1) else f"{value:#.{count}g}".rstrip(".")


@dataclass(frozen=True)
class Interval:
    """A ratio with its interval of at least 95 %. ``method`` is ``order`` or ``student``."""

    median: float
    low: float
    high: float
    pair_count: int
    method: str

    def __str__(self) -> str:
        return f"{digits(self.median)} [{digits(self.low)}, {digits(self.high)}]"


@dataclass(frozen=True)
class Comparison:
    """A verdict, the interval it rests on (None when there were too few pairs) and the reason in words."""

    verdict: Verdict
    interval: Interval | None
    reason: str


def interval_of(ratios: Sequence[float]) -> Interval | None:
    """The interval of the median ratio; None for fewer than three pairs.

    Raises:
        ValueError: for a ratio that is not positive and finite: an error is never a number.
    """
    wrong = [ratio for ratio in ratios if not (ratio > 0 and math.isfinite(ratio))]
    if wrong:
        raise ValueError(f"ratios must be positive and finite, got {wrong}")
    logs = sorted(math.log(ratio) for ratio in ratios)
    count = len(logs)
    if count < PAIRS_MIN:
        return None
    centre = statistics.median(logs)
    if count in _STUDENT:
        half = _STUDENT[count] * statistics.stdev(logs) / math.sqrt(count)
        low, high, method = centre - half, centre + half, "student"
    else:
        skip = _skipped(count)
        low, high, method = logs[skip], logs[count - 1 - skip], "order"
    return Interval(math.exp(centre), math.exp(low), math.exp(high), count, method)


def _skipped(count: int) -> int:
    """How many samples at each end lie outside the interval: the most that keep its coverage of the median."""
    skip, tail = 0, 0.5**count
    while True:
        wider = tail + math.comb(count, skip + 1) * 0.5**count
        if 1 - 2 * wider < _CONFIDENCE:
            return skip
        skip, tail = skip + 1, wider


def compare(ratios: Sequence[float], *, same_within: float = SAME_WITHIN) -> Comparison:
    """Judge the side whose time is the denominator: a ratio above one means that it is the faster one.

    Args:
        ratios: other's time / this one's time, by round.
        same_within: relative difference that counts as none.
    """
    interval = interval_of(ratios)
    if interval is None:
        return Comparison(Verdict.UNDECIDED, None, f"{len(ratios)} pairs are too few; at least {PAIRS_MIN}")
    upper, lower = 1 + same_within, 1 / (1 + same_within)
    if interval.low >= upper:
        return Comparison(Verdict.FASTER, interval, f"the whole interval lies above {upper:.2f}")
    if interval.high <= lower:
        return Comparison(Verdict.SLOWER, interval, f"the whole interval lies below {lower:.2f}")
    if interval.low > lower and interval.high < upper:
        return Comparison(Verdict.SAME, interval, f"the whole interval lies within {lower:.2f} and {upper:.2f}")
    borders = [f"{border:.2f}" for border in (lower, upper) if interval.low <= border <= interval.high]
    return Comparison(Verdict.UNDECIDED, interval, f"the interval contains the border {' and '.join(borders)}")
