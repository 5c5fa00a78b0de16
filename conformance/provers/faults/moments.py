"""What happens when something comes between two looks that a program takes at the file system.

Runs in one process and one thread: Python's own audit events (``open``, ``os.rename``, ``os.listdir``, ...) are the
moments, so every interruption is at a place that can be named and met again. Calls that a C library makes are not seen.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from conformance.provers.faults.model import FaultError

__all__ = ["Interruption", "each_moment", "interrupted"]

_MOMENTS_MIN = 2


class Interruption:
    """Does something once, before the n-th event that names a path which begins with a prefix.

    Attributes:
        seen_count: events until then, or until the end.
    """

    def __init__(self, prefix: Path, nth: int, action: Callable[[], object]) -> None:
        self.seen_count, self.is_over = 0, False
        self._prefix, self._nth, self._action = os.fspath(prefix), nth, action

    def __call__(self, arguments: tuple[Any, ...]) -> None:
        """One event."""
        names = [os.fsdecode(a) for a in arguments if isinstance(a, (str, bytes, os.PathLike))]
        if self.is_over or not any(name.startswith(self._prefix) for name in names):
            return
        self.seen_count += 1
        if self.seen_count == self._nth:
            self.is_over = True
            self._action()


_waiting: list[Interruption] = []
_installed: list[bool] = []


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    for each in list(_waiting):
        each(arguments)


@contextmanager
def interrupted(prefix: Path, nth: int, action: Callable[[], object]) -> Iterator[Interruption]:
    """Run the action in the middle of what the block does: before its n-th look at a path with this prefix."""
    if not _installed:
        # An audit hook cannot be taken back; without interruptions it does nothing.
        sys.addaudithook(_audit)
        _installed.append(True)
    waiting = Interruption(prefix, nth, action)
    _waiting.append(waiting)
    try:
        yield waiting
    finally:
        waiting.is_over = True
        _waiting.remove(waiting)


def each_moment(attempt: Callable[[int], Interruption]) -> int:
    """Call ``attempt(n)`` for n = 1, 2, ... until there is no n-th moment; the answer is how many there were.

    Raises:
        FaultError: fewer than two moments were seen: nothing was proved.
    """
    nth = 1
    while attempt(nth).seen_count >= nth:
        nth += 1
    if nth - 1 < _MOMENTS_MIN:
        raise FaultError(f"only {nth - 1} moments were seen, of at least {_MOMENTS_MIN}")
    return nth - 1
