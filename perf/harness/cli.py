"""``twinproof bench``: run the workloads of a component, print the table and the gates, write the evidence."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from conformance.harness.environment import environment
from conformance.harness.ranks import RankPool
from perf.checkpoint import JOBS
from perf.harness.gates import Outcome, evaluate, read_gates
from perf.harness.paired import Round, merge_ranks
from perf.harness.workloads import Workload, read_workloads

__all__ = ["main", "run_workloads"]

_TIMEOUT_S = 900.0


def _of_form(workloads: Mapping[str, Workload], component: str, form: str) -> list[Workload]:
    suffixes = ("-short", "-test")
    wanted = [w for w in workloads.values() if w.component == component]
    if form == "full":
        return [w for w in wanted if not w.name.endswith(suffixes)]
    return [w for w in wanted if w.name.endswith(f"-{form}")]


Report = Callable[[Workload, Sequence[Round]], None]


def _say_nothing(workload: Workload, rounds: Sequence[Round]) -> None:
    """For callers that look at the results themselves."""


def run_workloads(
    workloads: Sequence[Workload], folder: Path, *, seed: int = 0, impl: str = "fastimpl", report: Report = _say_nothing
) -> dict[str, list[Round]]:
    """Measure each workload on its own ranks; returns merged rounds by workload name."""
    results: dict[str, list[Round]] = {}
    pool = RankPool(impl)
    try:
        for workload in workloads:
            with tempfile.TemporaryDirectory(dir=folder) as work:
                arguments = (workload, work, workload.round_count, seed)
                by_rank = pool.run(JOBS[workload.job], workload.rank_count, *arguments, timeout_s=_TIMEOUT_S)
            results[workload.name] = merge_ranks(by_rank)
            report(workload, results[workload.name])
    finally:
        pool.close()
    return results


def _median(rounds: Sequence[Round], who: str) -> float:
    return statistics.median(found[who]["seconds"] for found in rounds)


def _print_times(workload: Workload, rounds: Sequence[Round]) -> None:
    print(workload)
    for who in workload.contenders:
        print(f"    {who:<16} {_median(rounds, who):9.4f} s", flush=True)


def _print_outcomes(outcomes: Sequence[Outcome]) -> None:
    print(f"\n{'gate':<34} {'outcome':<10} got")
    for outcome in outcomes:
        print(f"{outcome.gate.id:<34} {outcome.status:<10} {outcome.text}")


def _bench(options: argparse.Namespace) -> int:
    form = "test" if options.test else "short" if options.short else "full"
    every = read_workloads()
    chosen = [w for w in _of_form(every, options.component, form) if not options.only or w.name in options.only]
    results = run_workloads(chosen, options.fs or _memory_folder(), report=_print_times)
    outcomes = evaluate(read_gates(), every, results, form)
    _print_outcomes(outcomes)
    if options.json is not None:
        evidence = {
            "version": 1,
            "form": form,
            "environment": environment(),
            "workloads": [w.as_dict() for w in chosen],
            "rounds": results,
            "gates": [{"id": o.gate.id, "status": o.status, "got": o.got, "text": o.text} for o in outcomes],
        }
        options.json.write_text(json.dumps(evidence, indent=1, default=str) + "\n")
    return 1 if options.gates and any(o.status == "fail" for o in outcomes) else 0


def _memory_folder() -> Path:
    shared = Path("/dev/shm")
    return shared if shared.is_dir() else Path(tempfile.gettempdir())


def _compare(options: argparse.Namespace) -> int:
    """Gates that passed in the first file and do not in the second."""
    before, after = (_gates_of(path) for path in (options.before, options.after))
    worse = [
        gate for gate in before if before[gate]["status"] == "pass" and after.get(gate, {}).get("status") == "fail"
    ]
    for gate in sorted(before.keys() & after.keys()):
        print(f"{gate:<34} {before[gate]['status']:<10} -> {after[gate]['status']:<10} {after[gate]['text']}")
    return 1 if worse else 0


def _gates_of(path: Path) -> dict[str, dict[str, Any]]:
    return {gate["id"]: gate for gate in json.loads(path.read_text())["gates"]}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a bench or compare two; returns 1 for a failed gate (with ``--gates``) or a regression."""
    parser = argparse.ArgumentParser(prog="twinproof bench", description=__doc__)
    commands = parser.add_subparsers(required=True)
    bench = commands.add_parser("checkpoint", help="measure HF checkpoints against torch's")
    bench.add_argument("--short", action="store_true", help="small shapes, under a minute")
    bench.add_argument("--test", action="store_true", help="tiny shapes, for counters only")
    bench.add_argument("--only", action="append", metavar="WORKLOAD")
    bench.add_argument("--fs", type=Path, help="folder to write in (default: memory)")
    bench.add_argument("--json", type=Path, help="write the evidence: hardware, shapes, all samples, outcomes")
    bench.add_argument("--gates", action="store_true", help="exit 1 when a gate fails")
    bench.set_defaults(action=_bench, component="checkpoint")
    compare = commands.add_parser("compare", help="outcomes of two evidence files")
    compare.add_argument("before", type=Path)
    compare.add_argument("after", type=Path)
    compare.set_defaults(action=_compare)
    options = parser.parse_args(argv)
    return int(options.action(options))


if __name__ == "__main__":
    sys.exit(main())
