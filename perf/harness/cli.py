"""``twinproof bench``: measure, print the table and the gates, keep the evidence, say what was left out.

What reads evidence (``bench compare``, ``history``, ``plot``, ``figures``) stands in ``evidence_cli``.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path

from conformance.harness.endings import carried_out, check_writable, where_raised
from perf.harness.bench import Bench
from perf.harness.declarations import COMPONENTS
from perf.harness.evidence_cli import COMMANDS
from perf.harness.gates import Gate, Kind, read_gates
from perf.harness.judge import Outcome, Result
from perf.harness.left_out import left_out_lines
from perf.harness.progress import Progress, expected_work
from perf.harness.results import collect, facts_of, machine_of, write_evidence
from perf.harness.roofline import measure_roofline
from perf.harness.table import gate_lines, workload_lines
from perf.harness.workloads import FORMS, Workload, read_workloads
from twinproof.errors import ConfigError, TwinproofError

__all__ = ["main"]

_SHARED_MEMORY = Path("/dev/shm")
# Until then a short run repeats what noise left undecided; the rest of its minute is for the workloads behind it.
_SHORT_S = 40.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``bench`` or one of its commands; 0: nothing is wrong, 1: a gate failed, 2: it could not be carried out."""
    words = list(sys.argv[1:] if argv is None else argv)
    return carried_out("twinproof bench", lambda: _run(words))


def _run(words: list[str]) -> int:
    try:
        other = COMMANDS.get(words[0]) if words else None
        return _bench(words) if other is None else other(words[1:])
    except TwinproofError as error:
        print(f"twinproof bench: {error}", file=sys.stderr)
        return 2


_EPILOG = """commands that read evidence (what --json wrote); each has its own --help:
  twinproof bench compare BEFORE AFTER        what got slower between two runs, or two folders of runs
  twinproof bench plot EVIDENCE --svg OUT     the gates of one run as a picture
  twinproof bench history FOLDER...           ratios over many runs, and where they stepped
  twinproof bench figures FOLDER              the page of figures of all runs

exit codes: 0 nothing is wrong (without --gates: it was measured), 1 a gate failed, 2 it could not be carried out
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="twinproof bench",
        description="Measure a component against its peers and judge its gates.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("component", nargs="?", choices=COMPONENTS, help=f"default: that of --only, or {COMPONENTS[0]}")
    parser.add_argument("--impl", default="fastimpl", help="module under test (default: fastimpl)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--short", action="store_const", const="short", dest="form", help="small shapes: a minute on 2 cores"
    )
    form.add_argument("--form", choices=FORMS, help="which shapes (default: full)")
    parser.add_argument("--fs", type=Path, help="folder to write in (default: shared memory, else temporary files)")
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")
    parser.add_argument("--json", type=Path, metavar="OUT", help="keep every sample as evidence")
    parser.add_argument("--gates", action="store_true", help="end with 1 when a gate failed, or when none was decided")
    parser.add_argument("--only", nargs="+", metavar="GATE", help="gates to judge; only their shapes are measured")
    parser.add_argument("--gate", metavar="GATE", help="this gate, of whatever component, and no other")
    parser.add_argument(
        "--list-gates",
        metavar="CLASS",
        help="print the gates of a hardware class as JSON, and end; of a component or form, where given",
    )
    parser.add_argument(
        "--no-repeat", action="store_true", help="do not measure again where noise left a gate undecided"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the order of contenders")
    parser.add_argument(
        "--table", action="store_true", help="pipeline: the table of schedules of torchrec PR 2916, and no gates"
    )
    parser.add_argument(
        "--overlap", type=Path, metavar="STEM", help="pipeline: what schedules hide, as STEM.json, .trace.json and .svg"
    )
    parser.add_argument(
        "--stage-ms", nargs="+", default=[], metavar="STAGE=MS", help="durations for --overlap where there is no GPU"
    )
    return parser


def _import_tested(name: str) -> None:
    """The module under test may lie in the folder that this runs in, as for ``verify``. Raises ConfigError."""
    sys.path.append(os.getcwd())
    try:
        importlib.import_module(name)
    except Exception as error:
        got = str(error) if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
        where = (
            name if isinstance(error, ModuleNotFoundError) and error.name == name else f"{name}, {where_raised(error)}"
        )
        raise ConfigError(
            "the module under test cannot be imported", got=got, expected="installed, or here", where=where
        ) from error


def _bench(words: list[str]) -> int:
    parser = _parser()
    arguments = parser.parse_args(words)
    _refuse_unused(parser, arguments)
    folder = arguments.fs or (_SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir()))
    if not folder.is_dir():
        raise ConfigError("no such folder", got=folder, expected="one to write in", where="--fs")
    if arguments.json is not None:
        # A measurement is not lost for its file.
        check_writable(arguments.json)
    if arguments.table or arguments.overlap is not None:
        if arguments.component != "pipeline":
            parser.error("--table and --overlap belong to pipeline")
        _show_schedules(arguments, folder)
        return 0
    workloads = read_workloads()
    gates = read_gates(workloads)
    if arguments.list_gates is not None:
        print(json.dumps([gate.id for gate in _listed(arguments, gates, workloads)]))
        return 0
    arguments.form = arguments.form or "full"
    gates = _chosen(arguments, gates, workloads)
    begun = time.monotonic()
    _import_tested(arguments.impl)
    facts = facts_of(folder, arguments.impl)
    bench = Bench(
        implementation=arguments.impl,
        component=arguments.component,
        form=arguments.form,
        workloads=workloads,
        gates=gates,
        machine=machine_of(facts),
        folder=folder,
        seed=arguments.seed,
        repeats=not arguments.no_repeat,
        repeats_until_s=_SHORT_S if arguments.form == "short" else None,
    )
    if not bench.chosen_gates():
        shapes = {pair for gate in gates if gate.kind is not Kind.REGRESSION for pair in gate.workloads.items()}
        judged = sorted({form for form, shape in shapes if workloads[shape].component == arguments.component})
        raise ConfigError(
            "none of the gates is judged in this form", got=arguments.form, expected=judged, where="--form"
        )
    print(
        f"{arguments.impl} on {', '.join(bench.machine.classes)}, {bench.machine.filesystem}, {facts['cpu']['model']}"
    )
    roofline = measure_roofline(folder).as_dict()
    print(", ".join(f"{name.split('_')[0]} {rate / 1e9:.2f} GB/s" for name, rate in roofline.items()), flush=True)
    own_lines = getattr(importlib.import_module(f"perf.{bench.component}"), "LINES", {})
    progress = None
    if not arguments.quiet:
        progress = Progress({name: expected_work(workloads[name]) for name in bench.needed()}, sys.stderr)
    for workload in bench.run(None if progress is None else progress.begin_workload):
        if progress is not None:
            progress.end(workload.name)
        if workload.name in bench.lacking:
            continue
        lines_of = own_lines.get(workload.job, workload_lines)
        print("\n".join(["", *lines_of(workload, bench.rounds[workload.name])]), flush=True)
    outcomes = bench.outcomes()
    failed = [outcome for outcome in outcomes if outcome.failed]
    duration_s = time.monotonic() - begun
    absent = left_out_lines(bench.form, bench.chosen_gates(), workloads, bench.rounds, bench.machine, bench.lacking)
    print("\n".join(["", *gate_lines(outcomes), "", *absent]))
    undecided_count = sum(outcome.result is Result.UNDECIDED for outcome in outcomes)
    print(f"{len(outcomes)} gates, {len(failed)} failed, {undecided_count} undecided, {duration_s:.0f} s")
    if arguments.json is not None:
        evidence = collect(
            implementation=arguments.impl,
            form=arguments.form,
            seed=arguments.seed,
            facts=facts,
            workloads=workloads,
            rounds=bench.rounds,
            outcomes=outcomes,
            details={"roofline": roofline, "repeated": bench.repeated, "duration_s": duration_s},
        )
        write_evidence(evidence, arguments.json)
        print(f"evidence: {arguments.json}")
    return _verdict(outcomes) if arguments.gates else 0


def _refuse_unused(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """End with 2 where an option would have no effect beside the others: whoever gave it waits for what never comes."""
    judging = {
        "--gates": arguments.gates,
        "--only": arguments.only is not None,
        "--gate": arguments.gate is not None,
        "--no-repeat": arguments.no_repeat,
        "--short or --form": arguments.form is not None,
        "--impl": arguments.impl != parser.get_default("impl"),
        "--json": arguments.json is not None and not arguments.table,
    }
    unused = []
    if arguments.table or arguments.overlap is not None:
        unused = [f"{name}: --table and --overlap judge no gates" for name, given in judging.items() if given]
    if arguments.list_gates is not None:
        of_measuring = {name: given for name, given in judging.items() if name != "--short or --form"}
        more = {
            "--table": arguments.table,
            "--overlap": arguments.overlap is not None,
            "--fs": arguments.fs is not None,
        }
        unused += [
            f"{name}: --list-gates measures nothing" for name, given in {**of_measuring, **more}.items() if given
        ]
    if arguments.stage_ms and arguments.overlap is None:
        unused.append("--stage-ms: it is for --overlap")
    if arguments.only is not None and arguments.gate is not None:
        unused.append("--only: --gate is one gate and no other")
    if unused:
        parser.error(f"no effect has {'; '.join(unused)}")


def _listed(arguments: argparse.Namespace, gates: list[Gate], workloads: Mapping[str, Workload]) -> list[Gate]:
    """The gates of a hardware class; of the component and the form that are named, where one is.

    Raises:
        ConfigError: no gate is of that class.
    """
    classes = sorted({name for gate in gates for name in gate.hardware})
    if arguments.list_gates not in classes:
        raise ConfigError("no gate of that class", got=arguments.list_gates, expected=classes, where="--list-gates")
    form = None if arguments.form is None else {arguments.form}
    return [
        gate
        for gate in gates
        if arguments.list_gates in gate.hardware
        and (form is None or form & gate.workloads.keys())
        and arguments.component in (None, *(workloads[shape].component for shape in gate.workloads.values()))
    ]


def _chosen(arguments: argparse.Namespace, gates: list[Gate], workloads: Mapping[str, Workload]) -> list[Gate]:
    """The gates that ``--gate`` or ``--only`` name; their component becomes the one that is measured.

    Raises:
        ConfigError: no gate of that name, or gates of several components.
    """
    names = arguments.only if arguments.gate is None else [arguments.gate]
    if names is None:
        arguments.component = arguments.component or COMPONENTS[0]
        return gates
    by_id = {gate.id: gate for gate in gates}
    for name in names:
        if name not in by_id:
            near = get_close_matches(name, by_id, n=3) or "bench --list-gates cpu prints them"
            raise ConfigError("no gate of that name", got=name, expected=near, where="gates")
    chosen = [by_id[name] for name in names]
    components = {workloads[shape].component for gate in chosen for shape in gate.workloads.values()}
    if arguments.gate is None and arguments.component is not None:
        components.add(arguments.component)
    if len(components) > 1:
        raise ConfigError("gates of several components", got=sorted(components), expected="one", where=names)
    (arguments.component,) = components
    return chosen


def _verdict(outcomes: Sequence[Outcome]) -> int:
    """0 where gates were decided and none failed; a run that decided nothing is as red as a gate that failed."""
    if any(outcome.failed for outcome in outcomes):
        return 1
    if all(outcome.result is Result.UNDECIDED for outcome in outcomes):
        print("no gate was decided; that proves nothing", file=sys.stderr)
        return 1
    return 0


def _show_schedules(arguments: argparse.Namespace, folder: Path) -> None:
    """What is looked at and not judged."""
    if arguments.table:
        pr2916_report = importlib.import_module("perf.pipeline.pr2916_report")
        pr2916_report.print_table(folder=folder, seed=arguments.seed, evidence=arguments.json, say=print)
    if arguments.overlap is not None:
        overlap = importlib.import_module("perf.pipeline.overlap")
        overlap.write_overlap(arguments.overlap, overlap.stage_durations(arguments.stage_ms), print)


if __name__ == "__main__":
    sys.exit(main())
