"""Figures for documents, from evidence alone: the median of several runs, their range, and what was not decided.

Prevents a figure of the best run: what one run said is marked as such, and a verdict counts every run.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from perf.harness.gates import Kind
from perf.harness.judge import Result
from perf.harness.results import Evidence, read_evidence
from twinproof.errors import ConfigError

__all__ = ["RUNS_MIN", "changed_pages", "figure_lines", "read_runs"]

RUNS_MIN = 3


def read_runs(folder: Path) -> list[tuple[str, Evidence]]:
    """(name, evidence) of every run below a folder of results. Raises ConfigError where there is none.

    What lies in folders ``operators`` says which operators a GPU has run, and no figure.
    """
    paths = sorted(path for path in folder.rglob("*.json") if path.parent.name != "operators")
    found = [(str(path.relative_to(folder)), read_evidence(path)) for path in paths]
    if not found:
        raise ConfigError("no evidence", got=0, expected="results of a bench, as JSON", where=folder)
    return found


def machine_line(evidence: Evidence) -> str:
    """The machine as a document names it."""
    cpu, gpus = evidence.environment["cpu"], evidence.environment.get("gpus")
    named = [str(gpu["name"]) for gpu in gpus] if isinstance(gpus, list) else []
    return ", ".join([*named, f"{cpu['count']} cores of {cpu['model']}", evidence.machine.filesystem])


def _value(outcome: dict[str, Any]) -> float | None:
    value: float | None = outcome["subject"]["value"]
    return value


def figure_lines(runs: Sequence[tuple[str, Evidence]]) -> Iterator[str]:
    """A table for each machine: each gate's median over the runs, its range, the bound, the runs' verdicts."""
    by_machine: dict[str, dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for _, evidence in runs:
        if evidence.form == "full":
            for outcome in evidence.outcomes:
                by_machine[machine_line(evidence)][outcome["gate"]].append(outcome)
    for machine, gates in by_machine.items():
        yield from (f"### {machine}", "")
        yield "| gate | what it says | median [range] | bound | runs | verdicts |"
        yield "| --- | --- | --- | --- | --- | --- |"
        for gate, outcomes in gates.items():
            yield _gate_line(gate, outcomes)
        yield ""


def _gate_line(gate: str, outcomes: Sequence[dict[str, Any]]) -> str:
    values = [value for outcome in outcomes if (value := _value(outcome)) is not None]
    figure = "not measured"
    if values:
        figure = f"{statistics.median(values):.3g}"
        if len(values) > 1:
            figure += f" [{min(values):.3g}, {max(values):.3g}]"
    counts = Counter(Result(outcome["result"]).value for outcome in outcomes)
    verdicts = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items()))
    marked = str(len(outcomes)) if len(values) >= RUNS_MIN else f"{len(outcomes)}, too few for a claim"
    sentence = outcomes[-1]["sentence"]
    return f"| `{gate}` | {sentence} | {figure} | {outcomes[-1]['bound']:.3g} | {marked} | {verdicts} |"


_BLOCK = re.compile(r"(<!-- figures (?P<machine>\S+): (?P<gates>[^>]*?) -->\n).*?(<!-- end of figures -->)", re.DOTALL)
_MARK = re.compile(r"<!-- (?P<end>end of )?figures\b")


def changed_pages(pages: Iterable[Path], runs: Sequence[tuple[str, Evidence]]) -> dict[Path, str]:
    """Each page with its tables of figures made anew: every figure beside its limit and its verdicts.

    Raises:
        ConfigError: a page without a table or with half of one, a machine without results, a gate that no full run
            there has judged.
    """
    return {page: _filled(page, runs) for page in pages}


def _filled(page: Path, runs: Sequence[tuple[str, Evidence]]) -> str:
    text = page.read_text(encoding="utf-8")
    _check_marks(text, page)
    filled, count = _BLOCK.subn(lambda found: f"{found[1]}{_short_table(found, page, runs)}{found[4]}", text)
    if not count:
        raise ConfigError(
            "a page without a table of figures", got=0, expected="<!-- figures MACHINE: ... -->", where=page
        )
    return filled


def _check_marks(text: str, page: Path) -> None:
    """Begin and end take turns: a table without its end would swallow the words behind it, up to the next one's."""
    open_at = None
    for number, line in enumerate(text.splitlines(), start=1):
        for mark in _MARK.finditer(line):
            if bool(mark["end"]) == (open_at is None):
                what = "an end of figures without a table" if mark["end"] else "a table of figures without its end"
                where = f"{page}:{open_at or number}"
                raise ConfigError(what, got=line, expected="begin and end in turns", where=where)
            open_at = None if mark["end"] else number
    if open_at is not None:
        expected = "<!-- end of figures -->"
        raise ConfigError(
            "a table of figures without its end", got="end of page", expected=expected, where=f"{page}:{open_at}"
        )


def _short_table(found: re.Match[str], page: Path, runs: Sequence[tuple[str, Evidence]]) -> str:
    machine = found["machine"]
    here = [run for name, run in runs if name.split("/")[0] == machine and run.form == "full"]
    if not here:
        expected = sorted({name.split("/")[0] for name, run in runs if run.form == "full"})
        raise ConfigError("no full run of this machine", got=machine, expected=expected, where=page)
    lines = ["| what must hold | measured | limit | verdicts |", "| --- | --- | --- | --- |"]
    for gate in found["gates"].split():
        outcomes = [outcome for run in here for outcome in run.outcomes if outcome["gate"] == gate]
        if not outcomes:
            raise ConfigError("no full run has judged this gate", got=gate, expected=machine, where=page)
        lines.append(_short_line(gate, outcomes))
    return "\n".join(["", *lines, "", ""])


def _short_line(gate: str, outcomes: Sequence[dict[str, Any]]) -> str:
    """One run shows its interval, several the least and the largest of their medians."""
    subjects = [outcome["subject"] for outcome in outcomes if _value(outcome) is not None]
    values = [subject["value"] for subject in subjects]
    figure = "not measured"
    if values:
        bounds = (min(values), max(values)) if len(values) > 1 else (subjects[0]["low"], subjects[0]["high"])
        around = "" if bounds[0] is None else f" [{_short(bounds[0])}, {_short(bounds[1])}]"
        figure = f"{_short(statistics.median(values))}{around}"
    last = outcomes[-1]
    limit = f"{'at least' if Kind(last['kind']).is_paired else 'at most'} {_short(last['bound'])}"
    counts = Counter(Result(outcome["result"]) for outcome in outcomes)
    words = {Result.FAIL: "**not reached**", Result.IMPLAUSIBLE: "**implausible**"}
    shown = [words.get(result, result.value) for result, _ in counts.items()]
    if len(outcomes) > 1:
        shown = [f"{count} {word}" for (_, count), word in zip(counts.items(), shown, strict=True)]
    return f"| `{gate}`: {last['sentence']} | {figure} | {limit} | {', '.join(shown)} |"


def _short(value: float) -> str:
    if abs(value) >= 1 << 20:
        return f"{value / 2**20:,.4g} Mi"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
