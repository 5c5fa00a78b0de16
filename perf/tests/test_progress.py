"""What a bench says while it runs, and what it says that it left out."""

from __future__ import annotations

import importlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import perf
from conformance.harness import RankPool
from perf.harness import cli
from perf.harness.bench import Bench
from perf.harness.gates import read_gates
from perf.harness.judge import Machine
from perf.harness.left_out import left_out_lines
from perf.harness.paired import Round
from perf.harness.progress import Progress, expected_work
from perf.harness.roofline import measure_roofline
from perf.harness.workloads import Workload, read_workloads
from perf.peers.packages import PACKAGES, missing_packages

WORKLOADS = read_workloads()
GATES = read_gates(WORKLOADS)
MACHINE = Machine(("cpu",), "tmpfs")


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _progress(stream: io.StringIO, seconds: list[float]) -> Progress:
    times: Iterator[float] = iter(seconds)
    return Progress({"small": 1.0, "large": 3.0, "last": 1.0}, stream, clock=lambda: next(times))


def _walk(progress: Progress) -> None:
    for name in ("small", "large"):
        progress.begin(name)
        progress.end(name)
    progress.begin("last")
    progress.begin("last", note="again")
    progress.end("last")


def test_time_left_follows_from_work_and_not_from_the_number_of_steps() -> None:
    stream = io.StringIO()
    _walk(_progress(stream, [100.0, 130.0, 220.0, 250.0]))
    # A fifth took 30 s, so four fifths take 120; then 120 s for four fifths leave 30; the clock goes on.
    assert stream.getvalue().splitlines() == [
        "[1/3] small: the first; time left is not known yet",
        "[2/3] large: 30 s gone, about 2 min 00 s left",
        "[3/3] last: 2 min 00 s gone, about 30 s left",
        "[3/3] last, again: 2 min 30 s gone, about 38 s left",
    ]


def test_a_terminal_has_one_line_that_ends_empty() -> None:
    stream = _Terminal()
    _walk(_progress(stream, [0.0, 30.0, 120.0, 130.0]))
    text = stream.getvalue()
    assert "\n" not in text
    shown = text.split("\r\x1b[K")
    assert [line.split(":")[0] for line in shown] == [
        "",
        "[1/3] small",
        "",
        "[2/3] large",
        "",
        "[3/3] last",
        "[3/3] last, again",
        "",
    ]


def test_expected_work_grows_with_bytes_rounds_and_contenders() -> None:
    workload = WORKLOADS["kv-get-288-1e5"]
    # What it takes to start is there however small the shape is.
    start = expected_work(replace(workload, shape=(1, 1), tensor_count=1, round_count=1, contenders=("ours",))) - 8
    assert start > 0

    def measured(**changes: Any) -> float:
        return expected_work(replace(workload, **changes)) - start

    assert measured(round_count=31) == 2 * measured()
    assert measured(contenders=workload.contenders[:1]) == measured() / len(workload.contenders)
    assert measured(tensor_count=8) == 2 * measured()
    # A plan for a thousand large tensors moves none of them; buckets are no columns.
    assert {expected_work(WORKLOADS[name]) for name in ("plan-1000", "scale-64", "kv-sort-1e7-10000")} == {start}


def test_progress_goes_to_stderr_and_can_be_switched_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is measured does not matter here.
    monkeypatch.setattr(Bench, "_measure", lambda self, pool, workload, seed: [])
    monkeypatch.setattr(cli, "measure_roofline", partial(measure_roofline, size_bytes=1 << 20, round_count=1))
    gate = next(gate.id for gate in GATES if gate.workloads.get("test") == "pretend-step-32")
    words = ["offload", "--form", "test", "--only", gate, "--fs", str(tmp_path)]
    assert cli.main(words) == 0
    shown = capsys.readouterr()
    assert shown.err == "[1/1] pretend-step-32: the first; time left is not known yet\n"
    assert "[1/1]" not in shown.out
    assert cli.main([*words, "--quiet"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--only", "kv-sort-torc"], ["no gate of that name", "kv-sort-torc;", "kv-sort-torch'"]),
        (["--only", "xyz"], ["no gate of that name", "--list-gates"]),
        (["--list-gates", "nosuch"], ["no gate of that class", "nosuch", "cpu"]),
        (["checkpoint", "--only", "kv-sort-torch"], ["several components", "checkpoint", "kvstore"]),
        (["--only", "kv-sort-torch", "open"], ["several components", "checkpoint", "kvstore"]),
        (["--short", "--only", "kv-sort-torch"], ["this form", "got: short", "['full']"]),
    ],
)
def test_gates_that_cannot_be_judged_are_named(
    capsys: pytest.CaptureFixture[str], words: list[str], said: list[str]
) -> None:
    assert cli.main(words) == 2
    text = capsys.readouterr().err
    assert all(word in text for word in said), text


def test_gates_are_listed_by_class_component_and_form(capsys: pytest.CaptureFixture[str]) -> None:
    def listed(*words: str) -> set[str]:
        assert cli.main([*words, "--list-gates", "cpu"]) == 0
        return set(json.loads(capsys.readouterr().out))

    of_class = {gate.id: gate for gate in GATES if "cpu" in gate.hardware}
    assert listed() == set(of_class)
    kvstore = {name for name, gate in of_class.items() if name.startswith("kv-")}
    assert listed("kvstore") == kvstore != set()
    assert listed("kvstore", "--short") == {name for name in kvstore if "short" in of_class[name].workloads}
    assert listed("kvstore", "--form", "full") == {name for name in kvstore if "full" in of_class[name].workloads}
    for words in (["--only", "open"], ["--json", "x.json"], ["--gates"]):
        with pytest.raises(SystemExit) as caught:
            cli.main(["--list-gates", "cpu", *words])
        assert caught.value.code == 2
        assert f"{words[0]}: --list-gates measures nothing" in capsys.readouterr().err


def test_a_component_that_the_implementation_lacks_leaves_a_workload_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def run(pool: RankPool, job: Any, rank_count: int, workload: Workload, *given: Any, **options: Any) -> Any:
        calls.append(workload.name)
        raise pytest.skip.Exception("implementation mine has no checkpoint")

    monkeypatch.setattr(RankPool, "run", run)
    monkeypatch.setattr(cli, "measure_roofline", partial(measure_roofline, size_bytes=1 << 20, round_count=1))
    words = ["kvstore", "--only", "kv-sort-torch", "--quiet", "--fs", str(tmp_path)]
    assert cli.main(words) == 0
    said = capsys.readouterr().out
    assert len(calls) == 1
    assert f"  {calls[0]}: implementation mine has no checkpoint; undecided: kv-sort-torch" in said
    # A run that decided nothing is red where gates are asked for.
    assert cli.main([*words, "--gates"]) == 1


def test_an_implementation_may_lie_here_and_is_named_where_it_is_nowhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Bench, "_measure", lambda self, pool, workload, seed: [])
    monkeypatch.setattr(cli, "measure_roofline", partial(measure_roofline, size_bytes=1 << 20, round_count=1))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    words = ["kvstore", "--only", "kv-sort-torch", "--quiet", "--fs", str(tmp_path), "--impl", "lies_here"]
    assert cli.main(words) == 2
    assert "cannot be imported; got: No module named 'lies_here'" in capsys.readouterr().err
    (tmp_path / "lies_here.py").write_text("from refimpl import kvstore as kvstore\n", encoding="utf-8")
    importlib.invalidate_caches()
    assert cli.main(words) == 0
    del sys.modules["lies_here"]


def test_a_gate_brings_its_component(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []

    def measure(self: Bench, pool: RankPool, workload: Workload, seed: int) -> list[Round]:
        measured.append(workload.name)
        return []

    monkeypatch.setattr(Bench, "_measure", measure)
    monkeypatch.setattr(cli, "measure_roofline", partial(measure_roofline, size_bytes=1 << 20, round_count=1))
    for words in (["--only", "kv-sort-torch"], ["--gate", "kv-sort-torch"], ["offload", "--gate", "kv-sort-torch"]):
        assert cli.main([*words, "--quiet", "--fs", str(tmp_path)]) == 0
    assert measured == ["kv-sort-1e7"] * 3


def test_a_repeated_measurement_is_announced() -> None:
    workload, said = WORKLOADS["pretend-step-32"], io.StringIO()
    progress = Progress({workload.name: 1.0}, said)
    progress.begin_workload(workload, False)
    progress.begin_workload(workload, True)
    assert [", again, since noise" in line for line in said.getvalue().splitlines()] == [False, True]


def test_a_bench_says_what_it_measures_and_what_it_measures_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Bench, "_measure", lambda self, pool, workload, seed: [])
    monkeypatch.setattr(Bench, "_is_undecided", lambda self, name: True)
    gates = [gate for gate in GATES if gate.workloads.get("test") == "pretend-step-32"]
    bench = Bench("fastimpl", "offload", "test", WORKLOADS, gates, MACHINE, tmp_path)
    begun: list[tuple[str, bool]] = []
    done = [workload.name for workload in bench.run(lambda workload, again: begun.append((workload.name, again)))]
    assert done == bench.needed() == ["pretend-step-32"]
    assert begun == [("pretend-step-32", False), ("pretend-step-32", True)]


def _lines(component: str, form: str, absent: set[str]) -> list[str]:
    """As if everything but these contenders had been measured."""
    bench = Bench("fastimpl", component, form, WORKLOADS, GATES, MACHINE, Path())
    rounds = {
        name: [{who: {"seconds": 1.0} for who in WORKLOADS[name].contenders if who.split("-")[0] not in absent}]
        for name in bench.needed()
        if "gpu" not in name
    }
    return list(left_out_lines(form, bench.chosen_gates(), WORKLOADS, rounds, MACHINE, {}))


def test_what_is_not_installed_is_named_with_its_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    lines = _lines("kvstore", "full", {"lmdb"})
    assert lines[0] == "left out"
    assert "  lmdb: lmdb is not installed (pip install lmdb); undecided: kv-lmdb-get, kv-lmdb-set" in lines
    assert any(line.startswith("  lmdb-batch: lmdb is not installed") for line in lines)
    assert "fbgemm_gpu" in "\n".join(_lines("pipeline", "full", {"fbgemm"}))
    assert _lines("kvstore", "full", set()) == []


def test_what_is_installed_and_absent_is_not_called_uninstalled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert "  lmdb: it was not measured on this machine; undecided: kv-lmdb-get, kv-lmdb-set" in _lines(
        "kvstore", "full", {"lmdb"}
    )


def test_what_needs_a_gpu_is_named_with_its_reason() -> None:
    bench = Bench("fastimpl", "offload", "full", WORKLOADS, GATES, MACHINE, Path())
    name = "offload-gpu-moves-1gib"
    (_, line) = left_out_lines("full", bench.chosen_gates(), WORKLOADS, {name: []}, MACHINE, {})
    assert line.startswith(f"  {name}: nothing was measured: it is for cuda, and this is cpu; undecided: offload-gpu-")


def test_every_package_of_others_is_known() -> None:
    """A contender that needs a package says so in ``missing_packages``: none is told from its absence alone."""
    firsts = {who.split("-")[0] for workload in WORKLOADS.values() for who in workload.contenders}
    assert set(PACKAGES) <= firsts
    assert missing_packages("ours") == ()


_HIDES = """
from importlib.machinery import PathFinder

found = PathFinder.find_spec
PathFinder.find_spec = classmethod(lambda _, name, *more: None if name in {hidden} else found(name, *more))
"""
_RUNS = """
import sys
from dataclasses import replace
from pathlib import Path
from perf.harness.bench import Bench
from perf.harness.gates import read_gates
from perf.harness.judge import Machine
from perf.harness.left_out import left_out_lines
from perf.harness.table import gate_lines
from perf.harness.workloads import Workload, read_workloads

if __name__ == "__main__":
    folder, shape = Path(sys.argv[1]), sys.argv[2]
    workloads = read_workloads()
    workloads[shape] = replace(workloads[shape], round_count=3, shape=(64, 64))
    gates = [gate for gate in read_gates(workloads) if gate.workloads.get("short") == shape]
    machine = Machine(("cpu",), "tmpfs")
    bench = Bench("fastimpl", "checkpoint", "short", workloads, gates, machine, folder, repeats=False)
    for _ in bench.run():
        pass
    left_out = left_out_lines("short", gates, workloads, bench.rounds, machine, {})
    print("\\n".join([*gate_lines(bench.outcomes()), *left_out]))
"""


@pytest.mark.night
def test_a_short_form_without_any_package_of_others_still_judges(tmp_path: Path) -> None:
    """Hidden in the process and in its ranks, as if nobody had installed them."""
    hidden = {module for package in PACKAGES.values() for module in package.modules}
    (tmp_path / "sitecustomize.py").write_text(_HIDES.replace("{hidden}", repr(hidden)))
    (tmp_path / "run.py").write_text(_RUNS)
    shape = "load-1-file-64mib"
    found = subprocess.run(
        [sys.executable, "-P", str(tmp_path / "run.py"), str(tmp_path), shape],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(perf.__file__).parents[1])])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    lines = found.stdout.splitlines()
    left_out = lines[lines.index("left out") :]
    absent = [who for who in WORKLOADS[shape].contenders if who in PACKAGES]
    assert len(absent) >= 2
    for who in absent:
        assert any(line.startswith(f"  {who}: ") and "not installed (pip install" in line for line in left_out)
    # What needs none of them has a value with its interval, and a control.
    judged = [line for line in lines if " (must be >= " in line]
    assert any("] (must be" in line and "; control -" not in line for line in judged)
    assert any(" - (must be" in line for line in judged)
