"""Faults of locks: readers that exclude each other, and two locks that are taken in either order."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from conformance.harness import PlantedBug, wrap
from conformance.kvstore.planted.planting import in_engines, shared


@contextmanager
def _exclusive_readers() -> Iterator[None]:
    lock = threading.RLock()

    def around(original: Any, *arguments: Any) -> Any:
        with lock:
            return original(*arguments)

    with wrap("fastimpl.kvstore.store:NativeReader.read", around):
        yield


@contextmanager
def _either_order() -> Iterator[None]:
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

    with in_engines("write", writing)(), in_engines("snapshot", taking)():
        yield


PLANTED = (
    PlantedBug(
        "readers_exclude_each_other",
        "Reading rows takes an exclusive lock (hazard 5).",
        ("KV-123",),
        "fastimpl",
        _exclusive_readers,
    ),
    shared(
        "locks_in_either_order",
        "A write and a snapshot take the same two locks in opposite orders.",
        ("KV-124",),
        _either_order,
    ),
)
