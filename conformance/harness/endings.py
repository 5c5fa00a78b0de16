"""How a command ends: 1 says that it found something wrong, so that nothing else ends with 1, as a traceback would."""

from __future__ import annotations

import os
import select
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

__all__ = ["INTERRUPTED", "NOT_CARRIED_OUT", "PIPE_CLOSED", "carried_out", "check_writable", "where_raised"]

NOT_CARRIED_OUT = 2
# What a shell reports of a process that an interrupt ended, or that wrote to a pipe that nobody reads any more.
INTERRUPTED, PIPE_CLOSED = 130, 141


def carried_out(name: str, run: Callable[[], int]) -> int:
    """The exit code of a command: what ``run`` returns, else of what stopped it; ``name`` begins the message."""
    try:
        code = run()
        # What a closed pipe refuses is seen here, not when the interpreter ends.
        sys.stdout.flush()
    except KeyboardInterrupt:
        sys.stderr.write(f"{name}: interrupted\n")
        return INTERRUPTED
    except OSError as error:
        if isinstance(error, BrokenPipeError) and _is_unread():
            # What is left in the buffer has nowhere to go, and would be tried again at the end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return PIPE_CLOSED
        if error.filename is None:
            traceback.print_exc()
        else:
            sys.stderr.write(f"{name}: {_said(error)}\n")
        return NOT_CARRIED_OUT
    except Exception:
        traceback.print_exc()
        return NOT_CARRIED_OUT
    return code


def _is_unread() -> bool:
    """Whether the reader of our output is gone: a pipe to another process breaks as well."""
    poll = select.poll()
    try:
        poll.register(sys.stdout.fileno(), select.POLLOUT)
    except (OSError, ValueError):
        return False
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _said(error: OSError) -> str:
    return f"a file cannot be used: got {error.strerror or error}, expected one that can be; where: {error.filename}"


def check_writable(path: Path) -> None:
    """Try that a file can be written, before anything is done that would be lost; missing folders are made.

    A file that is there stays as it is. One that is not is not made.

    Raises:
        OSError: naming the path.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    was_there = path.exists()
    with path.open("a", encoding="utf-8"):
        pass
    if not was_there:
        path.unlink()


def where_raised(error: BaseException) -> str:
    """File and line of the innermost place of an error that was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "nowhere"
