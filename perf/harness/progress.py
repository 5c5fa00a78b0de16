"""How far a bench has come and how long it will take, on stderr: its output stays what somebody may keep.

Nothing is written while a workload is measured: a clock that ticks on a core is noise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TextIO

from perf.harness.workloads import Workload

__all__ = ["Progress", "expected_work"]

_CLEAR = "\r\x1b[K"
_MINUTE_S = 60
# What starting ranks, importing torch and making inputs takes, as bytes that a contender could pass over meanwhile.
_START_BYTES = 4 << 30
# Jobs whose shape is no tensor: plans for tensors that nobody makes, and ids into buckets.
_NO_TENSORS = ("plan", "scale", "sort")


def expected_work(workload: Workload) -> float:
    """What a workload takes beside another, roughly: bytes of all contenders and rounds, the warm-up's too."""
    passes = len(workload.contenders) * (workload.round_count + 1)
    return _START_BYTES + (0 if workload.job in _NO_TENSORS else passes * workload.payload_bytes)


class Progress:
    """A line on a terminal, rewritten for each workload; elsewhere, a line for each.

    Args:
        work: what each step takes beside the others, by name.
        stream: where to.
        clock: seconds from any moment on.
    """

    def __init__(
        self, work: Mapping[str, float], stream: TextIO, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._work, self._stream, self._clock = dict(work), stream, clock
        self._is_terminal = stream.isatty()
        self._begun = clock()
        self._done: list[str] = []

    def begin(self, name: str, *, note: str = "") -> None:
        """Say that ``name`` is measured now; ``note`` where it is not for the first time."""
        words = f"[{len(self._done) + 1}/{len(self._work)}] {name}{', ' + note if note else ''}: {self._left()}"
        if self._is_terminal:
            self._stream.write(_CLEAR + words)
        else:
            self._stream.write(words + "\n")
        self._stream.flush()

    def begin_workload(self, workload: Workload, is_repeated: bool) -> None:
        """:meth:`begin`, as ``Bench.run`` calls it."""
        self.begin(workload.name, note="again, since noise left a gate undecided" if is_repeated else "")

    def end(self, name: str) -> None:
        """``name`` is done: what follows on stdout begins on an empty line."""
        self._done.append(name)
        if self._is_terminal:
            self._stream.write(_CLEAR)
            self._stream.flush()

    def _left(self) -> str:
        done = sum(self._work[name] for name in self._done)
        if not done:
            return "the first; time left is not known yet"
        gone_s = self._clock() - self._begun
        left_s = gone_s * (sum(self._work.values()) - done) / done
        return f"{_duration(gone_s)} gone, about {_duration(left_s)} left"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), _MINUTE_S)
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"
