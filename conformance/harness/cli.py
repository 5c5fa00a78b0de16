"""``twinproof``: the suite without knowing pytest; refuses to start when other packages shadow ours.

``conformance`` and ``perf`` are common names. A folder or package of that name earlier on the path would be run instead
of this suite, and would pass.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

from conformance.harness import new_impl
from conformance.harness.endings import carried_out, check_writable
from conformance.harness.environment import environment, implementation_facts
from conformance.harness.page import Sources, read_sources, to_badge, to_html
from conformance.harness.report import (
    ReportError,
    check_comparable,
    read_json,
    regressions,
    sides,
    to_junit,
    to_markdown,
    verdict,
)
from conformance.harness.requirements import STEMS

__all__ = ["main"]

_HOME = Path(__file__).resolve().parents[2]
_SUITE = ("conformance", "perf")
_LIBRARY = ("twinproof", "refimpl", "fastimpl")
# Our packages go before the current folder, so that a ./perf or ./conformance there cannot stand in for them.
_LAUNCH = f"import sys; sys.path.insert(0, {str(_HOME)!r}); import pytest; sys.exit(pytest.main())"
_NEED_TESTS = ("verify", "planted", "bench")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0 when it found nothing wrong, 1 when it did, 2 when it could not be carried out."""
    words = list(sys.argv[1:] if argv is None else argv)
    return carried_out("twinproof", lambda: _run(words))


def _run(words: list[str]) -> int:
    try:
        _check_packages()
        if words[:1] and words[0] in _NEED_TESTS and not {"-h", "--help"} & set(words):
            _check_tests()
    except ImportError as error:
        print(f"twinproof: {error}", file=sys.stderr)
        return 2
    if words[:1] == ["bench"]:
        # Measuring brings its own options and dependencies; nothing else should pay for importing them.
        bench: Callable[[list[str]], int] = importlib.import_module("perf.harness.cli").main
        return bench(words[1:])
    if words[:1] == ["checkpoint"]:
        checkpoint: Callable[[list[str]], int] = importlib.import_module("fastimpl.checkpoint.__main__").main
        return checkpoint(words[1:])
    if words[:1] == ["race"]:
        race: Callable[[list[str]], int] = importlib.import_module("conformance.provers.race.cli").main
        return race(words[1:])
    parser = _parser()
    arguments, rest = parser.parse_known_args(words)
    if rest and not arguments.passes_on:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        code: int = arguments.run(arguments, rest)
    except ReportError as error:
        print(f"twinproof: {error}", file=sys.stderr)
        return 2
    return code


def _check_packages() -> None:
    for name in _SUITE:
        _check_place(name, _HOME)
    spec = importlib.util.find_spec("twinproof")
    if spec is None or spec.origin is None:
        raise ImportError("package twinproof is missing, the library that this suite judges: pip install twinproof")
    # A distribution of its own: it may lie in another folder than the suite, but there as a whole.
    for name in _LIBRARY:
        _check_place(name, Path(spec.origin).resolve().parents[1])
    _check_releases()


def _check_place(name: str, home: Path) -> None:
    spec = importlib.util.find_spec(name)
    if spec is None:
        raise ImportError(f"package {name} is missing; expected it in {home}")
    places = [Path(place).resolve() for place in spec.submodule_search_locations or [str(spec.origin)]]
    # py.typed is in each of ours; a stray folder of the same name is importable, but has none.
    if home / name not in places[:1] or not (home / name / "py.typed").is_file():
        got = ", ".join(map(str, places[:1])) or "nothing"
        raise ImportError(f"package {name} is shadowed: got {got}, expected {home / name}; change the search path")


def _check_releases() -> None:
    try:
        suite, library = (metadata.distribution(name) for name in ("twinproof-conformance", "twinproof"))
    except metadata.PackageNotFoundError:
        return  # A tree: both are of one commit.
    if Path(str(suite.locate_file(""))).resolve() == _HOME and suite.version != library.version:
        expected = f"twinproof {suite.version}, which twinproof-conformance {suite.version} judges"
        raise ImportError(f"the library is of another release: got twinproof {library.version}, expected {expected}")


def _check_tests() -> None:
    absent = [name for name in ("pytest", "hypothesis") if importlib.util.find_spec(name) is None]
    if absent:
        raise ImportError(f"this command needs {' and '.join(absent)}: pip install twinproof-conformance")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="twinproof", description="Conformance and benchmarks of training plumbing.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, run: Callable[..., int], text: str, *, passes_on: bool = False) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(run=run, passes_on=passes_on)
        return command

    for name, run, text in (
        ("verify", _verify, "run every requirement on an implementation; further arguments go to pytest"),
        ("planted", _planted, "run every requirement against its planted bugs; further arguments go to pytest"),
    ):
        command = add(name, run, text, passes_on=True)
        command.add_argument("--impl", default="fastimpl", help="module, or registered name (default: fastimpl)")
        command.add_argument("--report", type=Path, metavar="FILE", help="keep the report as JSON")
    command = add("compare", _compare, "compare two reports; fails when something got worse")
    command.add_argument("before", type=Path)
    command.add_argument("after", type=Path)
    command = add("report", _report, "turn JSON reports into other forms; as HTML also evidence of benches")
    command.add_argument(
        "sources",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="reports: several implementations stand side by side, several runs of one are its history; for --html "
        "also the evidence of bench --json, and the mutation score of ci/mutate record",
    )
    command.add_argument("--history", type=Path, metavar="FOLDER", help="earlier reports, in any order; for --html")
    for name in _VIEWS:
        command.add_argument(f"--{name}", type=Path, metavar="OUT", help=f"write it as {name}")
    command = add("info", _info, "print what a bug report needs: versions, builds, hardware")
    command.add_argument("--impl", default="fastimpl")
    command.add_argument("--json", action="store_true")
    new_impl.add_options(add("new-impl", new_impl.run, "write a package with one component of your own, ready to run"))
    # Listed for --help; dispatched before parsing.
    add("bench", _info, "measure, print tables and gates; see twinproof bench --help")
    add("checkpoint", _info, "inspect, verify, diff, consolidate, clean; see twinproof checkpoint --help")
    add("race", _info, "find races of a script that uses torch's streams, without a GPU; see twinproof race --help")
    return parser


_VIEWS: dict[str, Callable[[Sources], str]] = {
    "html": to_html,
    "junit": lambda sources: to_junit(sources.reports),
    "markdown": lambda sources: to_markdown(sources.reports),
    "badge": lambda sources: to_badge(_reports(sources)),
}


def _reports(sources: Sources) -> Sequence[dict[str, Any]]:
    if not sources.reports:
        raise ReportError("got no report, expected at least one: a badge says a verdict")
    return sources.reports


def _verify(arguments: argparse.Namespace, rest: list[str]) -> int:
    return _pytest(arguments, rest, [])


def _planted(arguments: argparse.Namespace, rest: list[str]) -> int:
    words = [part for word in rest for part in word.split("=", 1)]
    if ("--twinproof-planted", "none") in pairwise(words):
        raise ReportError("planted: got --twinproof-planted none, expected only, own or all: no bug would be planted")
    return _pytest(arguments, rest, ["--twinproof-planted", "only"])


def _pytest(arguments: argparse.Namespace, rest: list[str], more: list[str]) -> int:
    """Run pytest apart: it must see our modules before anything has imported them, to show what asserts compared."""
    with tempfile.TemporaryDirectory(prefix="twinproof-") as folder:
        path = Path(folder) / "verdict.json"
        command = [sys.executable, "-c", _LAUNCH, "-p", "conformance.harness.plugin", "--pyargs", *_targets(rest)]
        command += ["--twinproof-impl", arguments.impl, "--twinproof-verdict", str(path), *more, *rest]
        # Tests are named from where the suite lies, which may be no place to write a cache into.
        command += ["--rootdir", str(_HOME), "-p", "no:cacheprovider"]
        if arguments.report is not None:
            check_writable(arguments.report)
            # A run that dies early must leave no report of an earlier one.
            arguments.report.unlink(missing_ok=True)
            command += ["--twinproof-report", str(arguments.report)]
        code, was_interrupted = _run_apart(command)
        if was_interrupted:
            raise KeyboardInterrupt
        # What a green run did, if anything, the report knows; 5 is pytest's "nothing was collected".
        if code not in (0, 1, 5):
            return 2
        if not path.exists():
            print(f"twinproof: pytest ended with {code} and left no report", file=sys.stderr)
            return 2
        found = verdict(read_json(path))
    if found.word == "nothing ran":
        print(f"twinproof: no requirement was run on {arguments.impl}; that proves nothing", file=sys.stderr)
        if more:
            print(f"twinproof: no planted bug of these modules is one of {arguments.impl}", file=sys.stderr)
    # What went wrong after the report was written is pytest's code alone.
    return max(found.exit_code, int(code == 1))


def _run_apart(command: Sequence[str]) -> tuple[int, bool]:
    """The exit code of a process, and whether it was interrupted meanwhile.

    An interrupt of a terminal reaches the process, too, which ends by itself and reports what it has done. It is told
    of a second one here, for whoever sends interrupts to this process alone.
    """
    interrupt_count = 0

    def interrupted(*_: object) -> None:
        nonlocal interrupt_count
        interrupt_count += 1
        if interrupt_count > 1:
            child.send_signal(signal.SIGINT)

    with subprocess.Popen(command) as child:
        # A handler, which the process does not inherit.
        before = signal.signal(signal.SIGINT, interrupted)
        try:
            code = child.wait()
        finally:
            signal.signal(signal.SIGINT, before)
    return code, interrupt_count > 0


def _targets(rest: list[str]) -> list[str]:
    """The components, unless the caller named tests; the suite's own tests say nothing about an implementation."""
    named = any(_is_target(before, word) for before, word in zip(["", *rest], rest, strict=False))
    return [] if named else [f"conformance.{stem}" for stem in STEMS]


# Options of pytest and of its usual plugins whose value is the next word; all of ours have one.
_VALUED = frozenset(("-k", "-m", "-p", "-c", "-o", "-W", "-r", "-n", "--deselect", "--durations", "--maxfail", "--tb"))
_FLAGS = frozenset(("--lf", "--ff", "--co", "--collect-only", "--pdb", "--exitfirst", "--quiet", "--verbose"))


def _is_target(before: str, word: str) -> bool:
    """Whether a word is a test or a folder of them, and no value of the option before it."""
    is_short = before.startswith("-") and not before.startswith("--")
    if before in _VALUED or (before.startswith("--twinproof-") and "=" not in before) or word.startswith("-"):
        return False
    name = word.partition("::")[0]
    if name == "conformance" or name.startswith("conformance."):
        place = _HOME.joinpath(*name.split("."))
        return place.is_dir() or place.with_suffix(".py").is_file()
    # Of an option that is not known here, a path may be the value.
    return (not before.startswith("-") or is_short or "=" in before or before in _FLAGS) and Path(name).exists()


def _compare(arguments: argparse.Namespace, _: list[str]) -> int:
    before, after = read_json(arguments.before), read_json(arguments.after)
    check_comparable(before, after)
    print("\n".join(sides(before, after)))
    worse, other = regressions(before, after)
    for title, changes in (("worse", worse), ("changed", other)):
        for change in changes:
            print(f"{title:8} {change}")
    if not worse and not other:
        print("no difference in outcomes")
    return 1 if worse else 0


def _report(arguments: argparse.Namespace, _: list[str]) -> int:
    sources = read_sources(arguments.sources, history=arguments.history)
    chosen = {name: getattr(arguments, name) for name in _VIEWS if getattr(arguments, name) is not None}
    if "html" not in chosen and (sources.bench or sources.mutants or arguments.history is not None):
        raise ReportError("evidence of benches, a mutation score and --history are shown by --html alone")
    if not chosen:
        print(to_markdown(sources.reports), end="")
    for name, path in chosen.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_VIEWS[name](sources), encoding="utf-8")
    return 0


def _info(arguments: argparse.Namespace, _: list[str]) -> int:
    facts = environment()
    try:
        facts["implementation"] = implementation_facts(arguments.impl)
    except Exception as error:
        facts["implementation"] = f"{arguments.impl} cannot be imported: {error}"
    if arguments.json:
        print(json.dumps(facts, indent=1))
        return 0
    for name, value in facts.items():
        inner = value if isinstance(value, dict) else {"": value}
        for key, text in inner.items():
            lines = text if isinstance(text, list) else [text]
            for line in lines:
                print(f"{name + ('.' + key if key else ''):28} {line}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
