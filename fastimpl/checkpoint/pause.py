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
        self.lock, self.going, self.was_enabled = threading.RLock(), set[object](), False

    def begin(self, pause: object) -> None:
        """Let one more go on. Where a handler of a signal ends this in the middle, ``end`` undoes what it did."""
        with self.lock:
            if not self.going:
                self.was_enabled = gc.isenabled()
            self.going.add(pause)
            if self.going == {pause}:
                gc.disable()

    def end(self, pause: object) -> None:
        """Let it end: of one that goes on no more, nothing is left to do."""
        with self.lock:
            if self.going == {pause} and self.was_enabled:
                gc.enable()
            self.going.discard(pause)

    def end_in_a_child(self) -> None:
        """Of a forked process no pause goes on: the threads that had begun them are not there."""
        if self.going and self.was_enabled:
            gc.enable()
        self.lock, self.going = threading.RLock(), set()


_pauses = _Pauses()
os.register_at_fork(after_in_child=_pauses.end_in_a_child)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Plans and catalogs are such objects; the collector would walk them over and over. Usable as a decorator."""
    pause = object()
    try:
        _pauses.begin(pause)
        yield
    finally:
        try:
            _pauses.end(pause)
        except BaseException:
            # Of a handler of a signal: the collector would be off as long as the process lives.
            _pauses.end(pause)
            raise
