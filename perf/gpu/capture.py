"""What NVIDIA's ncu says of an operator's kernels: how much of the memory's peak they reach, and what limits them.

    python -m perf.gpu.capture pipeline_pool --json capture.json

``perf.gpu.bandwidth`` says how an operator compares with a copy; the counters here say why. Clocks are left alone, and
only our kernels are looked at, by the namespace they stand in. The tool comes with the CUDA toolkit. It needs the
driver's leave to read counters, which many hosts keep for administrators: it then says ERR_NVGPUCTRPERM, and the step
fails with it.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from conformance.harness.environment import environment
from perf.gpu.sanitizer import find_tool

__all__ = ["CAPTURED", "Launch", "launches_in", "main"]

# The kernels whose speed most depends on how their loads are issued.
CAPTURED = ("pipeline_pool", "pipeline_step", "offload_slot_step")
_NAME = "ncu"
_METRICS = (
    "gpu__time_duration.sum",
    "dram__bytes.sum",
    "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
    "launch__registers_per_thread",
)
_LAUNCHES = 200
_LINES_SHOWN = 40


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel: its metrics by name, in the units that ncu names beside them."""

    number: int
    kernel: str
    metrics: dict[str, str]


def launches_in(text: str) -> Iterator[Launch]:
    """Launches in the CSV that ``ncu --csv`` prints, behind whatever the program prints itself: a line a metric."""
    lines = text.splitlines()
    begins = [number for number, line in enumerate(lines) if line.startswith('"ID"')]
    if not begins:
        return
    metrics: dict[tuple[int, str], dict[str, str]] = {}
    for row in csv.DictReader(lines[begins[0] :]):
        if not (row["ID"] or "").isdigit() or not row.get("Metric Name"):
            continue
        found = metrics.setdefault((int(row["ID"]), row["Kernel Name"]), {})
        found[row["Metric Name"]] = f"{row['Metric Value']} {row['Metric Unit']}".strip()
    for (number, kernel), values in metrics.items():
        yield Launch(number, kernel, values)


def main(argv: Sequence[str] | None = None) -> int:
    """0 when the operator ran, and ncu has every metric of at least one launch of ours."""
    parser = argparse.ArgumentParser(prog="perf.gpu.capture", description="ncu around one operator.")
    parser.add_argument("operator")
    parser.add_argument("--device", default="cuda", help="cpu: a rehearsal, in which the tool sees no kernel")
    parser.add_argument("--count", type=int, default=1_000_000, help="of ids or elements")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep what was found, as evidence")
    given = parser.parse_args(argv)
    ncu = find_tool(_NAME)
    if ncu is None:
        print(f"{_NAME} is not here: it comes with the CUDA toolkit")
        return 1
    options = [
        "--csv",
        "--page",
        "details",
        "--print-units",
        "base",
        "--clock-control",
        "none",
        "--metrics",
        ",".join(_METRICS),
    ]
    chosen = ["--kernel-name-base", "demangled", "--kernel-name", "regex:fastimpl", "--launch-count", str(_LAUNCHES)]
    words = [given.operator, "--device", given.device, "--counts", str(given.count)]
    command = [ncu, *options, *chosen, sys.executable, "-m", "perf.gpu.operators", *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    found = list(launches_in(done.stdout))
    whole = [launch for launch in found if set(_METRICS) <= set(launch.metrics)]
    if given.json is not None:
        kept = {"environment": environment(), "operator": given.operator, "launches": [asdict(each) for each in found]}
        given.json.write_text(json.dumps(kept, indent=1, default=str) + "\n", encoding="utf-8")
    if not whole or done.returncode != 0:
        print("\n".join(done.stdout.splitlines()[-_LINES_SHOWN:]))
    print(f"{given.operator}: exit status {done.returncode}, {len(found)} launches, {len(whole)} with every metric")
    return 0 if whole and done.returncode == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
