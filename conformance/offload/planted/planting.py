"""What several files of planted bugs use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from conformance.harness import wrap


class Altered:
    """The engine with one call left out, or changed: the ``nth`` of its kind during a method."""

    def __init__(self, engine: Any, call: str, nth: int, instead: Callable[..., Any] | None) -> None:
        self._engine, self._call, self._nth, self._instead = engine, call, nth, instead

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._engine, name)
        return self._count(found) if name == self._call else found

    def _count(self, original: Any) -> Any:
        def call(*arguments: Any) -> Any:
            self._nth -= 1
            if self._nth != 0:
                return original(*arguments)
            return self._instead(original, *arguments) if self._instead is not None else None

        return call


def altered(method: str, call: str, nth: int = 1, instead: Callable[..., Any] | None = None) -> Any:
    """Leave the ``nth`` call of an engine's verb out while a method of the offloader runs, or do something instead."""

    def around(original: Callable[..., Any], offloader: Any, *arguments: Any, **options: Any) -> Any:
        engine = offloader.engine
        offloader.engine = Altered(engine, call, nth, instead)
        try:
            return original(offloader, *arguments, **options)
        finally:
            offloader.engine = engine

    return wrap(f"fastimpl.offload.transfers:StreamedTransfers.{method}", around)
