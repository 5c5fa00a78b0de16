"""Figures for documents, from evidence alone: the median of several runs, their range, and what was not decided.

Prevents a figure of the best run: what one run said is marked as such, and a verdict counts every run.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from perf.harness.judge import Result
from perf.harness.results import Evidence, read_evidence
from twinproof.errors import ConfigError

__all__ = ["RUNS_MIN", "figure_lines", "read_runs"]

RUNS_MIN = 3


def read_runs(folder: Path) -> list[tuple[str, Evidence]]:
    """(name, evidence) of every run below a folder of results. Raises ConfigError where there is none."""
    paths = sorted(folder.rglob("*.json"))
    found = [(str(path.relative_to(folder)), read_evidence(path)) for path in paths]
    if not found:
        raise ConfigError("no evidence", got=0, expected="results of a bench, as JSON", where=folder)
    return found


def machine_line(evidence: Evidence) -> str:
    """The machine as a document names it."""
    cpu = evidence.environment["cpu"]
    return f"{cpu['count']} cores of {cpu['model']}, {evidence.machine.filesystem}"


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
