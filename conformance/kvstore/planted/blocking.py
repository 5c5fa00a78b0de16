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
    first, second, over = threading.Lock(), threading.Lock(), threading.Event()

    def meet(one: threading.Lock, other: threading.Lock, original: Any, arguments: Any, options: Any) -> Any:
        with one:
            # Long enough for another thread to take the other lock.
            threading.Event().wait(0.002)
            while not other.acquire(timeout=0.05):
                # Threads that stayed would hold the store's own locks, which a fork of this process waits for.
                if over.is_set():
                    raise SystemExit
            try:
                return original(*arguments, **options)
            finally:
                other.release()

    def writing(original: Any, *arguments: Any, **options: Any) -> Any:
        return meet(first, second, original, arguments, options)

    def taking(original: Any, *arguments: Any, **options: Any) -> Any:
        return meet(second, first, original, arguments, options)

    with wrap(engines("write"), writing), wrap(engines("snapshot"), taking):
        try:
            yield
        finally:
            over.set()
