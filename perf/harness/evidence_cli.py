"""The commands that read evidence: ``bench compare``, ``history``, ``plot`` and ``figures``. None measures anything."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from html import escape
from pathlib import Path

from perf.harness.comparison import compare_sides, notes, summary, unmatched
from perf.harness.figures import changed_pages, figure_lines, read_runs
from perf.harness.gates import read_gates
from perf.harness.history import history_lines, history_plot, series, without_ratio
from perf.harness.plots import bench_plot
from perf.harness.results import read_evidence, read_side
from perf.harness.workloads import read_workloads
from twinproof.errors import ConfigError

__all__ = ["COMMANDS"]

_COMPARE = """Compare what two commits measured: the ratio of each gate's subject to its peer, before and after; counts
and memory as they are. AFTER is slower where the whole interval of the change lies below what may be lost: a tenth,
where a gate does not say otherwise. A folder stands for its runs, at least three on each side, which are paired in
order of time. Ends with 1 when something got slower, larger or began to fail, and with 2 when nothing was decided."""


def _compare(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="twinproof bench compare", description=_COMPARE)
    parser.add_argument("before", type=Path, metavar="BEFORE", help="evidence (bench --json), or a folder of it")
    parser.add_argument("after", type=Path, metavar="AFTER", help="the same of what is compared with it")
    arguments = parser.parse_args(words)
    gates = read_gates(read_workloads())
    before, after = read_side(arguments.before), read_side(arguments.after)
    print("\n".join(notes(before, after)))
    changes = compare_sides(before, after, gates)
    print("\n".join(["", *(change.text for change in changes), "", *unmatched(before, after, gates), summary(changes)]))
    if any(change.failed for change in changes):
        return 1
    if all(change.word == "undecided" for change in changes):
        print("nothing was decided; that proves nothing", file=sys.stderr)
        return 2
    return 0


_HISTORY = """Show each gate's ratio over the runs whose evidence lies in these folders, and where it stepped. A step is
pointed out where random orders of the same runs show as large a difference in at most 5 %% of the cases, divided by the
number of gates: a whole table without a step has one pointed out at most that often."""


def _history(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="twinproof bench history", description=_HISTORY)
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER", help="folders of evidence, or files")
    parser.add_argument("--only", nargs="+", metavar="GATE", help="these gates (default: all that were measured)")
    parser.add_argument("--svg", type=Path, metavar="OUT", help="write a plot")
    parser.add_argument("--html", type=Path, metavar="OUT", help="write a page with the plot and the table")
    arguments = parser.parse_args(words)
    runs = [run for folder in arguments.folders for run in read_side(folder)]
    found = series(runs)
    if arguments.only is not None:
        unknown = sorted(set(arguments.only) - {each.gate for each in found})
        if unknown:
            expected = sorted({each.gate for each in found})
            raise ConfigError("no run has measured this gate", got=unknown, expected=expected, where="--only")
        found = [each for each in found if each.gate in arguments.only]
    if not found:
        where = [str(folder) for folder in arguments.folders]
        raise ConfigError("no run has measured a ratio", got=0, expected="a ratio or more", where=where)
    table = "\n".join(history_lines(found))
    print(table)
    for line in without_ratio(runs):
        print(line, file=sys.stderr)
    for path, make in ((arguments.svg, history_plot), (arguments.html, lambda of: _page(history_plot(of), table))):
        if path is not None:
            _write(path, make(found))
    return 0


def _page(plot: str, table: str) -> str:
    title = "Ratios over runs"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<style>body { font-family: system-ui, sans-serif; margin: 1rem; } pre { overflow-x: auto; }</style></head>\n"
        f"<body><h1>{title}</h1>\n{plot}\n<pre>{escape(table)}</pre>\n</body></html>"
    )


def _plot(words: list[str]) -> int:
    text = "Draw one run: each ratio with its interval, floor and control; each count beside its limit."
    parser = argparse.ArgumentParser(prog="twinproof bench plot", description=text)
    parser.add_argument("evidence", type=Path, metavar="EVIDENCE", help="written by bench --json")
    parser.add_argument("--svg", type=Path, metavar="OUT", required=True, help="where to")
    arguments = parser.parse_args(words)
    _write(arguments.svg, bench_plot(read_evidence(arguments.evidence)))
    return 0


def _write(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content + "\n", encoding="utf-8")
    print(f"plot: {path}")


_FIGURES = """# Figures

Made by `twinproof bench figures` from the evidence under `perf/results`; edit nothing here. A figure is the median over
the runs on one machine, with the least and the largest; a gate that fewer than three runs have judged claims
nothing yet. Ratios say how many times as fast the subject is, unless the gate's sentence speaks of something else.

"""


_FIGURES_HELP = """Make the page of all figures; and, in pages that people write, the tables between the lines
<!-- figures MACHINE: GATE GATE ... --> and <!-- end of figures -->, where MACHINE is a folder of results."""


def _figures(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="twinproof bench figures", description=_FIGURES_HELP)
    parser.add_argument("results", type=Path, help="folder of evidence")
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--into", type=Path, metavar="FILE", help="write the page (default: print it)")
    either.add_argument("--check", type=Path, metavar="FILE", help="end with 1 when this page says something else")
    parser.add_argument("--pages", type=Path, nargs="+", default=[], metavar="PAGE", help="pages with tables to fill")
    arguments = parser.parse_args(words)
    runs = read_runs(arguments.results)
    page = _FIGURES + "\n".join(figure_lines(runs)) + "\n"
    made = changed_pages(arguments.pages, runs)
    if arguments.check is not None:
        wrong = [path for path, content in {arguments.check: page, **made}.items() if _text(path) != content]
        for path in (arguments.check, *arguments.pages):
            print(f"{path}: {'not what the evidence says' if path in wrong else 'as the evidence says'}")
        return 1 if wrong else 0
    for path, content in made.items():
        path.write_text(content, encoding="utf-8")
    if arguments.into is not None:
        arguments.into.write_text(page, encoding="utf-8")
    elif not arguments.pages:
        print(page, end="")
    return 0


def _text(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.exists() else None


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "compare": _compare,
    "history": _history,
    "plot": _plot,
    "figures": _figures,
}
