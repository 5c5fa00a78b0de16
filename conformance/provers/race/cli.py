"""``twinproof race SCRIPT``: races of a script that uses torch's own streams, without a GPU."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from unittest import mock

from twinproof.errors import UnsupportedError

__all__ = ["main"]

_KINDS = ("value", "time", "address", "place")
_DESCRIPTION = """Run a Python script that uses torch.cuda streams on a device that exists only as a proof, and report
every pair of accesses that no event, wait or synchronize orders, with both lines. No GPU is needed."""
_EPILOG = """Exit status: 0 no hazard; 1 hazards; 2 not judged: the script failed, gave no work to a device, or has
points that are not covered and were not accepted."""


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    arguments = _parser().parse_args(list(argv))
    script: Path = arguments.script
    trace: Path | None = arguments.trace
    if trace is not None and trace.suffix not in (".svg", ".html"):
        return _refuse(f"--trace: got {trace}, expected a name that ends in .svg or .html")
    if not script.is_file():
        return _refuse(f"no such script: {script}")
    # A script may change the current folder.
    trace = None if trace is None else trace.absolute()
    # Torch has not looked for a device yet; it must not find one, whose work would not be seen.
    with mock.patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": ""}):
        from conformance.provers.race import to_html, to_svg
        from conformance.provers.race.script import run_script

        try:
            with _printing_to_stderr() if arguments.json else nullcontext():
                report = run_script(script, arguments.arguments)
        except UnsupportedError as error:
            return _refuse(str(error))
    accept = tuple(arguments.accept)
    if trace is not None:
        trace.parent.mkdir(parents=True, exist_ok=True)
        trace.write_text(to_svg(report) if trace.suffix == ".svg" else to_html(report, accept), encoding="utf-8")
    sys.stdout.write(json.dumps(report.to_json(accept), indent=1) + "\n" if arguments.json else report.text(accept))
    return report.status(accept)


@contextmanager
def _printing_to_stderr() -> Iterator[None]:
    """Nothing goes to the standard output here, neither of this process nor of those that it starts."""
    sys.stdout.flush()
    output = os.dup(1)
    os.dup2(2, 1)
    try:
        # Where the process's own output is another file than descriptor 1, too.
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(output, 1)
        os.close(output)


def _refuse(text: str) -> int:
    sys.stderr.write(f"twinproof race: {text}\n")
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="twinproof race", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("--json", action="store_true", help="print the report as JSON; the script prints to stderr")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="draw the trace into FILE.svg or FILE.html")
    parser.add_argument(
        "--accept", action="append", default=[], choices=_KINDS, metavar="KIND",
        help=f"points of this kind that are not covered are known and do not matter; one of {', '.join(_KINDS)}",
    )  # fmt: skip
    parser.add_argument("script", type=Path, metavar="SCRIPT")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENTS", help="of the script")
    return parser
