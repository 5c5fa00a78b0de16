"""The garbage collector, held off while many small objects are made that all stay alive."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["collector_paused"]


class _Pauses:
    """Those that go on at a time: the process has one collector, and only the first of them saw how it was."""

    def __init__(self) -> None:
        # A handler of a signal may save while its thread holds the lock.
        self.lock, self.count, self.was_enabled = threading.RLock(), 0, False

    def end_in_a_child(self) -> None:
        """Of a forked process no pause goes on: the threads that had begun them are not there."""
        if self.count and self.was_enabled:
            gc.enable()
        self.lock, self.count = threading.RLock(), 0


_pauses = _Pauses()
os.register_at_fork(after_in_child=_pauses.end_in_a_child)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Plans and catalogs are such objects; the collector would walk them over and over. Usable as a decorator."""
    with _pauses.lock:
        _pauses.count += 1
        if _pauses.count == 1:
            _pauses.was_enabled = gc.isenabled()
            gc.disable()
    try:
        yield
    finally:
        with _pauses.lock:
            if _pauses.count == 1 and _pauses.was_enabled:
                gc.enable()
            # A process that was forked in here has ended it already.
            _pauses.count = max(_pauses.count - 1, 0)
