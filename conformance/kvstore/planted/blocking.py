"""Faults that ``test_blocking`` must notice."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

from conformance.harness import fault, wrap
from conformance.kvstore.planted.planting import engines


@fault(kills="KV-123", of="fastimpl")
def readers_exclude_each_other() -> Iterator[None]:
    """Reading rows takes an exclusive lock."""
    lock = threading.RLock()

    def around(original: Any, *arguments: Any) -> Any:
        with lock:
            return original(*arguments)

    with wrap("fastimpl.kvstore.store:NativeReader.read", around):
        yield


@fault(kills="KV-124")
def locks_in_either_order() -> Iterator[None]:
    """A write and a snapshot take the same two locks in opposite orders."""
    first, second = threading.Lock(), threading.Lock()

    def meet(one: threading.Lock, other: threading.Lock, original: Any, arguments: Any, options: Any) -> Any:
        with one:
            # Long enough for another thread to take the other lock.
            threading.Event().wait(0.002)
            with other:
                return original(*arguments, **options)

    def writing(original: Any, *arguments: Any, **options: Any) -> Any:
        return meet(first, second, original, arguments, options)

    def taking(original: Any, *arguments: Any, **options: Any) -> Any:
        return meet(second, first, original, arguments, options)

    with wrap(engines("write"), writing), wrap(engines("snapshot"), taking):
        yield
