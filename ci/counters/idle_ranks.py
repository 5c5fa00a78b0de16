"""A plugin of pytest for ``ci/coverage``: a rank without work ends, and writes its counters, before it is killed."""

from __future__ import annotations

from multiprocessing.process import BaseProcess

_ENDS_S = 10.0
_kill = BaseProcess.kill


def _end_and_kill(process: BaseProcess) -> None:
    # Its pipe is closed by now: one that waits for work leaves, one that is stuck is killed as ever.
    process.join(_ENDS_S)
    if process.is_alive():
        _kill(process)


BaseProcess.kill = _end_and_kill  # type: ignore[method-assign]
