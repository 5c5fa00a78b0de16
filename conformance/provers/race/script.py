"""Running somebody's script under a watch, to the end of its threads and of what it has registered with ``atexit``."""

from __future__ import annotations

import atexit
import functools
import inspect
import os
import runpy
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any
from unittest import mock

from conformance.provers.race import Report, watch
from conformance.provers.race.points import is_program

__all__ = ["run_script"]


def run_script(path: Path, arguments: Sequence[str] = ()) -> Report:
    """The report of a script that is run as ``python path arguments`` would run it, in this process.

    Threads that it leaves are waited for, and functions of its own that it has registered with ``atexit`` are called,
    as when its process ends. An exception, in a thread, too, or an exit with another status than 0 is the report's
    ``failure``; it is told on the error output, as Python tells it. ``os._exit`` ends this process with status 2:
    nothing is judged.

    Raises:
        SystemExit: in a process that the script has forked and that has come to its end, too. Its parent is judged.
    """
    process = os.getpid()
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(sys, "argv", [str(path), *arguments]))
        stack.enter_context(mock.patch.object(sys, "path", [str(path.resolve().parent), *sys.path]))
        ending = stack.enter_context(_Ending().noted())
        report = stack.enter_context(watch())
        # What its module holds goes with the process, behind everything.
        _held = ending.carried_out(lambda: runpy.run_path(str(path), run_name="__main__"))
        # Nothing that comes behind the script changes it.
        status = ending.status
        ending.wait_for_threads()
        ending.call_functions()
    if os.getpid() != process:
        raise SystemExit(status)
    report.failure = ending.failure
    return report


class _Ending:
    """What a script leaves to the end of its process, what has failed first, and the process's exit status."""

    def __init__(self) -> None:
        self.failure: str | None = None
        self.status = 0
        self._known = {*threading.enumerate()}
        self._functions: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []

    def carried_out(self, work: Callable[[], Any]) -> Any:
        """What it returns; what it raises is told, as Python does, and noted."""
        try:
            return work()
        except SystemExit as error:
            if error.code not in (None, 0):
                self._exits(error.code)
        except Exception as error:
            traceback.print_exception(type(error), error, _of_program(error.__traceback__))
            self.status = 1
            self._fails(_said(error))
        return None

    @contextmanager
    def noted(self) -> Iterator[_Ending]:
        """Inside of this block what a script registers, and what its threads raise, comes here."""
        register, unregister, hook, end, process = (
            atexit.register,
            atexit.unregister,
            threading.excepthook,
            os._exit,
            os.getpid(),
        )

        def registered(function: Callable[..., Any], *args: Any, **options: Any) -> Callable[..., Any]:
            if _is_of_program(function):
                self._functions.append((function, args, options))
                return function
            return register(function, *args, **options)

        def unregistered(function: Callable[..., Any]) -> None:
            self._functions = [each for each in self._functions if each[0] != function]
            unregister(function)

        def hooked(args: Any) -> None:
            hook(args)
            if isinstance(args.exc_value, Exception):
                self._fails(f"{_said(args.exc_value)}, in a thread")

        def ended(status: int) -> None:
            if os.getpid() != process:
                end(status)
            os.write(2, b"twinproof race: not judged: os._exit ended the script at once\n")
            end(2)

        with (
            mock.patch.object(atexit, "register", registered),
            mock.patch.object(atexit, "unregister", unregistered),
            mock.patch.object(threading, "excepthook", hooked),
            mock.patch.object(os, "_exit", ended),
        ):
            yield self

    def wait_for_threads(self) -> None:
        """Those that are no daemons, and those of executors when they have done what they were given."""
        futures = sys.modules.get("concurrent.futures.thread")
        while left := [each for each in threading.enumerate() if each not in self._known and not each.daemon]:
            if futures is None:
                left[0].join()
                continue
            # As at the end of a process: such a thread ends when nothing is left in its queue.
            with mock.patch.object(futures, "_shutdown", True):
                for thread, queue in list(futures._threads_queues.items()):
                    if thread in left:
                        queue.put(None)
                left[0].join()

    def call_functions(self) -> None:
        """The last one first. One that raises is told, and the others are called all the same."""
        while self._functions:
            function, args, options = self._functions.pop()
            self.carried_out(functools.partial(function, *args, **options))

    def _exits(self, code: object) -> None:
        if isinstance(code, int):
            self.status = code
            self._fails(f"exit with status {code}")
            return
        # What is no number is a message.
        sys.stderr.write(f"{code}\n")
        self.status = 1
        self._fails(f"exit with status 1: {code}")

    def _fails(self, text: str) -> None:
        self.failure = self.failure or text


def _said(error: BaseException) -> str:
    places = [frame for frame in traceback.extract_tb(error.__traceback__) if is_program(frame.filename)]
    where = f" at {Path(places[-1].filename).name}:{places[-1].lineno}" if places else ""
    text = f": {error}" if str(error) else ""
    return f"{type(error).__name__}{text}{where}"


def _of_program(trace: TracebackType | None) -> TracebackType | None:
    """A traceback without what lies before the program's first line: nothing of the program is in it."""
    while trace is not None and not is_program(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return trace


def _is_of_program(function: Any) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(inspect.unwrap(getattr(function, "__func__", function)), "__code__", None)
    return code is not None and is_program(code.co_filename)
