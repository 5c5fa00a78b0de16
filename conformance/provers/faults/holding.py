"""Proof that a system call leaves the interpreter to other threads: it is held until one of them has run.

Counting how far another thread gets while a file is written measures the machine's load as much as the lock. Here a
call that is struck by the fault ``hold`` returns only when Python code of another thread has let it go, so that one
run decides: with the interpreter's lock given up it goes on at once, and with the lock held it never does.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from conformance.provers.faults.model import FaultError

__all__ = ["letting_go"]


@contextmanager
def letting_go() -> Iterator[None]:
    """While entered, a Python thread lets every held call of this process go on. For use in forked processes, once.

    Raises:
        FaultError: the shim is not preloaded here.
    """
    shim = ctypes.CDLL(None)
    if not hasattr(shim, "twinproof_faults_await_held"):
        raise FaultError("calls are held by the shim, which is not preloaded in this process")

    def let_go() -> None:
        # Between the two calls this thread needs the interpreter's lock, which is what is to be shown.
        while held := shim.twinproof_faults_await_held():
            shim.twinproof_faults_release(held)

    thread = threading.Thread(target=let_go, name="lets held calls go")
    thread.start()
    try:
        yield
    finally:
        shim.twinproof_faults_end_holding()
        thread.join()
