"""Prints the table "At scale" of ``docs/checkpoint.md``: ``python -m perf.checkpoint.scale_table [PLACEMENT ...]``."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator

from perf.checkpoint.placements import PLACEMENTS
from perf.checkpoint.scale import costs_by_formula, costs_of_plan, make_plans, options_of
from perf.harness.paired import Sample

__all__ = ["table_lines"]

_COLUMNS: dict[str, tuple[str, float]] = {
    "saved_bytes": ("written, GB", 1e9),
    "rank_bytes": ("by the busiest rank, GB", 1e9),
    "max_over_mean": ("max / mean", 1),
    "exchanged_bytes": ("exchanged, GB", 1e9),
    "sent_max_bytes": ("sent by one rank at most, MB", 1e6),
    "message_count": ("messages", 1),
    "block_count": ("blocks", 1),
    "turn_count": ("rounds", 1),
    "file_count": ("files", 1),
    "rank_file_count": ("files that one rank opens at most", 1),
    "plan_bytes": ("plan, all ranks up and down, MB", 1e6),
    "rank_plan_bytes": ("plan that one rank receives at most, kB", 1e3),
    "rss_growth_bytes": ("growth of the coordinator, MiB", 1 << 20),
}


def table_lines(names: Iterable[str], folder: str) -> Iterator[str]:
    """A Markdown table: for each placement what was counted, and the formula's bound where there is one."""
    options, columns = options_of(folder), []
    for name in names:
        plans = make_plans(PLACEMENTS[name])
        columns.append((name, plans, costs_of_plan(plans, options), costs_by_formula(plans.placement)))
    yield "| " + " | ".join(["", *(f"`{name}`" for name, *_ in columns)]) + " |"
    yield "| --- " * (len(columns) + 1) + "|"
    yield _row("ranks", (str(len(plans.local)) for _, plans, _, _ in columns))
    yield _row("chunks", (str(plans.chunk_count) for _, plans, _, _ in columns))
    for key, (label, unit) in _COLUMNS.items():
        yield _row(label, (_cell(key, unit, counted, bound) for _, _, counted, bound in columns))
    times = ((plans.torch_cpu_s, counted["cpu_seconds"]) for _, plans, counted, _ in columns)
    yield _row("planning, torch's and ours, s of CPU", (f"{theirs:.1f} + {ours:.1f}" for theirs, ours in times))


def _row(label: str, cells: Iterable[str]) -> str:
    return "| " + " | ".join([label, *cells]) + " |"


def _cell(key: str, unit: float, counted: Sample, bound: Sample) -> str:
    if key not in counted:
        return "-"
    text = _number(counted[key] / unit)
    return f"{text} (at most {_number(bound[key] / unit)})" if key in bound else text


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 or value == math.floor(value) else f"{value:.3g}"


if __name__ == "__main__":
    for line in table_lines(sys.argv[1:] or list(PLACEMENTS)[:2], "unused"):
        sys.stdout.write(f"{line}\n")
