"""Results that are on their way: torchrec's ``Awaitable``, so that pipelines for either drive both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

__all__ = ["Awaitable", "Ready", "fuse_input_dists"]

Value = TypeVar("Value")


class Awaitable(Generic[Value]):
    """``wait()`` gives the value, the same one each time; the work is done once."""

    def __init__(self, finish: Callable[[], Value]) -> None:
        self._finish: Callable[[], Value] | None = finish
        self._value: Value
        self._failure: Exception | None = None

    def wait(self) -> Value:
        """The value; what ``finish`` raised is raised each time."""
        if self._finish is not None:
            finish, self._finish = self._finish, None
            try:
                self._value = finish()
            except Exception as error:
                self._failure = error
        if self._failure is not None:
            raise self._failure
        return self._value


class Ready(Awaitable[Value]):
    """A value that is here already."""

    def __init__(self, value: Value) -> None:
        super().__init__(lambda: value)


def fuse_input_dists(dists: Sequence[Awaitable[Any]]) -> None:
    """Exchange the sizes of several modules of one group at once: what ``input_dist`` returned, not waited for yet.

    Every rank calls this with the same modules in the same order. Here each module exchanged its own at once.
    """
