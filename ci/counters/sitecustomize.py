"""For ``ci/coverage``: a process that leaves without ``exit()`` writes the counters of the library first.

Ranks, and children of a fork server, leave by ``os._exit``, or kill themselves. What is killed by another one writes
nothing.
"""

import ctypes
import os
import signal
import sys

_exit, _kill = os._exit, os.kill


def _write() -> None:
    ops = sys.modules.get("fastimpl.ops")
    path = None if ops is None else ops.library_path()
    if path is not None:
        try:
            library = ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD)
        except OSError:
            return  # It was never loaded here.
        library.fastimpl_write_counters()


def _write_and_exit(status: int) -> None:
    _write()
    _exit(status)


def _write_and_kill(pid: int, number: int) -> None:
    if pid == os.getpid() and number == signal.SIGKILL:
        _write()
    _kill(pid, number)


os._exit, os.kill = _write_and_exit, _write_and_kill  # type: ignore[assignment]
