"""Running somebody's script under a watch."""

from __future__ import annotations

import runpy
import sys
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

from conformance.provers.race import Report, watch
from conformance.provers.race.points import is_program

__all__ = ["run_script"]


def run_script(path: Path, arguments: Sequence[str] = ()) -> Report:
    """The report of a script that is run as ``python path arguments`` would run it, in this process.

    An exception, or an exit with another status than 0, is the report's ``failure``.
    """
    failure: str | None = None
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(sys, "argv", [str(path), *arguments]))
        stack.enter_context(mock.patch.object(sys, "path", [str(path.resolve().parent), *sys.path]))
        report = stack.enter_context(watch())
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as error:
            if error.code not in (None, 0):
                failure = f"exit with status {error.code}"
        except Exception as error:
            places = [frame for frame in traceback.extract_tb(error.__traceback__) if is_program(frame.filename)]
            where = f" at {Path(places[-1].filename).name}:{places[-1].lineno}" if places else ""
            failure = f"{type(error).__name__}: {error}{where}"
    report.failure = failure
    return report
