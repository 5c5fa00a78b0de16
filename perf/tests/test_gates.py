"""The gates themselves: strict data, arithmetic that can fail, controls that are refused, counters that CI holds."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from perf import checkpoint, kvstore, offload, pipeline
from perf.harness.bench import Bench
from perf.harness.cli import main
from perf.harness.comparison import judge_regression
from perf.harness.declarations import COMPONENTS, modules
from perf.harness.formulas import evaluate_bound, names_used
from perf.harness.gates import Control, Gate, Kind, read_gates
from perf.harness.judge import Machine, Outcome, Result, judge, needs_more_samples
from perf.harness.paired import Round
from perf.harness.progress import expected_work
from perf.harness.results import Evidence, read_evidence, write_evidence
from perf.harness.table import workload_lines
from perf.harness.workloads import Workload, read_workloads
from twinproof.errors import ConfigError, FormatError

MACHINE = Machine(("cpu",), "tmpfs")
NAME = "save-rows-2gib"
CLAIM = Gate(
    id="x",
    kind=Kind.CLAIM,
    sentence="It MUST be twice as fast.",
    workloads={"full": NAME},
    subject="ours",
    peer="torch",
    control=Control("torch", "torch"),
    hardware=("cpu",),
    evidence="none",
    floor=2.0,
    ceiling=10.0,
    filesystem="tmpfs",
)
COUNTER = replace(
    CLAIM, kind=Kind.COUNTER, peer=None, control=Control("torch"), metric="written_bytes", floor=None, ceiling=10.0
)


def _rounds(ours: float, torch: float, *, noise: float = 0.0, count: int = 7) -> list[Round]:
    return [
        {
            "ours": {"seconds": ours + noise * (i % 3), "written_bytes": ours},
            "torch": {"seconds": torch, "written_bytes": torch},
        }
        for i in range(count)
    ]


def _judge(gate: Gate, rounds: Sequence[Round], machine: Machine = MACHINE) -> Outcome:
    return judge(gate, "full", read_workloads(), {NAME: rounds}, machine)


@pytest.mark.parametrize(
    ("ours", "torch", "result"),
    [
        (1.0, 3.0, Result.PASS),
        (1.0, 1.5, Result.FAIL),
        (3.0, 1.0, Result.FAIL),
        (1.0, 50.0, Result.IMPLAUSIBLE),
    ],
)
def test_a_claim_is_judged(ours: float, torch: float, result: Result) -> None:
    outcome = _judge(CLAIM, _rounds(ours, torch))
    assert outcome.result is result
    assert outcome.failed is (result is not Result.PASS)
    assert outcome.control.result is Result.FAIL


def test_an_interval_around_the_floor_is_undecided_and_asks_for_more() -> None:
    outcome = _judge(CLAIM, _rounds(1.0, 2.5, noise=0.3))
    assert outcome.result is Result.UNDECIDED
    assert not outcome.failed
    assert needs_more_samples(outcome, CLAIM, MACHINE)


def test_a_control_that_is_let_through_fails_the_gate() -> None:
    outcome = _judge(replace(CLAIM, control=Control("ours", "torch")), _rounds(1.0, 3.0))
    assert outcome.result is Result.FAIL
    assert "let through" in outcome.reason
    assert _judge(replace(COUNTER, control=Control("ours")), _rounds(1.0, 30.0)).result is Result.FAIL


def test_what_was_not_measured_is_undecided() -> None:
    assert _judge(CLAIM, []).result is Result.UNDECIDED
    assert _judge(CLAIM, _rounds(1.0, 3.0, count=2)).result is Result.UNDECIDED
    assert _judge(replace(COUNTER, metric="read_bytes"), _rounds(1.0, 30.0)).result is Result.UNDECIDED
    assert _judge(replace(COUNTER, control=Control("plain")), _rounds(1.0, 30.0)).result is Result.UNDECIDED


def test_a_peer_that_is_absent_is_named_and_not_waited_for() -> None:
    rounds = [{"ours": found["ours"]} for found in _rounds(1.0, 3.0)]
    outcome = _judge(CLAIM, rounds)
    assert outcome.result is Result.UNDECIDED
    assert "torch was not measured" in outcome.reason
    assert not needs_more_samples(outcome, CLAIM, MACHINE)
    lines = "\n".join(workload_lines(read_workloads()[NAME], rounds))
    assert "torch            was not measured" in lines


def test_what_only_counts_is_shown_without_a_time() -> None:
    workload = next(found for found in read_workloads().values() if "pretend" in str(found))
    rounds = [{who: {"launches": 16.0} for who in workload.contenders}] * 2
    lines = workload_lines(workload, rounds)
    assert [line.split("not timed")[-1].strip() for line in lines[1:]] == ["launches 16"] * len(workload.contenders)


def test_counts_are_judged_by_their_worst_round() -> None:
    assert _judge(COUNTER, _rounds(10.0, 30.0)).result is Result.PASS
    assert _judge(COUNTER, [*_rounds(1.0, 30.0), *_rounds(11.0, 30.0, count=1)]).result is Result.FAIL
    assert _judge(replace(COUNTER, floor=2.0), _rounds(1.0, 30.0)).result is Result.IMPLAUSIBLE
    shares = replace(COUNTER, peer="torch", ceiling=0.2, control=Control("torch", "torch"))
    assert _judge(shares, _rounds(1.0, 10.0)).result is Result.PASS
    assert _judge(shares, _rounds(3.0, 10.0)).result is Result.FAIL


def test_growth_is_what_one_shape_adds_to_another() -> None:
    other = "save-rows-256mib"
    gate = replace(COUNTER, kind=Kind.MEMORY, against={"full": other}, ceiling=5.0)
    workloads = read_workloads()
    measured = {NAME: _rounds(12.0, 80.0), other: _rounds(8.0, 20.0)}
    assert judge(gate, "full", workloads, measured, MACHINE).result is Result.PASS
    measured[other] = _rounds(6.0, 20.0)
    assert judge(gate, "full", workloads, measured, MACHINE).result is Result.FAIL
    assert judge(gate, "full", workloads, {NAME: measured[NAME]}, MACHINE).result is Result.UNDECIDED


@pytest.mark.parametrize("machine", [Machine(("cpu-1",), "tmpfs"), Machine(("cpu",), "ext4"), Machine((), "")])
def test_an_unknown_machine_is_undecided_and_never_measured_again(machine: Machine) -> None:
    for rounds in (_rounds(1.0, 3.0), _rounds(3.0, 1.0), _rounds(1.0, 2.5, noise=0.3)):
        outcome = _judge(CLAIM, rounds, machine)
        assert outcome.result is Result.UNDECIDED
        assert not needs_more_samples(outcome, CLAIM, machine)


@pytest.mark.parametrize(
    "text", ["f(1)", "__import__('os')", "1 if 1 else 2", "2 **", "a ** 9", "[1]", "-a", "'a'", "1\0"]
)
def test_a_formula_is_arithmetic_only(text: str) -> None:
    with pytest.raises(FormatError):
        names_used(text, "here")


def test_formulas() -> None:
    assert names_used("1.5 * (a - 1) / b", "here") == {"a", "b"}
    assert evaluate_bound("1.5 * (a - 1) / b + 2", {"a": 5.0, "b": 3.0}) == 4.0
    assert evaluate_bound(3, {}) == 3.0


_ARGUMENTS = {
    "id": '"a"',
    "sentence": '"s"',
    "full": f'"{NAME}"',
    "subject": '"ours"',
    "peer": '"torch"',
    "floor": "1.0",
    "ceiling": "9.0",
    "control": '"torch"',
    "hardware": '("cpu",)',
    "evidence": '"e"',
}
_IMPORTS = """from dataclasses import replace
from perf.harness.gates import *
from perf.harness.workloads import Workload
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], str]]:
    """Makes a module of a text and returns its name."""
    monkeypatch.syspath_prepend(tmp_path)
    names: list[str] = []

    def make(text: str) -> str:
        names.append(f"declared_{len(names) + 1}")
        (tmp_path / f"{names[-1]}.py").write_text(text)
        importlib.invalidate_caches()
        return names[-1]

    yield make
    for name in names:
        sys.modules.pop(name, None)


def _call(function: str, **changes: str | None) -> str:
    arguments = {**_ARGUMENTS, **changes}
    return f"{function}({', '.join(f'{name}={value}' for name, value in arguments.items() if value is not None)})"


def _read(module: Callable[[str], str], *gates: str) -> list[Gate]:
    text = "".join(f"    {gate},\n" for gate in gates)
    return read_gates(read_workloads(), [module(f"{_IMPORTS}GATES = (\n{text})\n")])


@pytest.mark.parametrize(
    ("function", "change"),
    [
        ("claim", {"surprise": "1"}),
        ("claim", {"control": None}),
        ("claim", {"evidence": None}),
        ("claim", {"floor": None}),
        ("claim", {"ceiling": None}),
        ("claim", {"peer": None}),
        ("claim", {"full": None}),
        ("wish", {}),
        ("counter", {}),
        ("counter", {"metric": '"seconds"', "filesystem": '"tmpfs"'}),
        ("memory", {"metric": '"seconds"'}),
        ("regression", {}),
        ("limit", {"floor": "True"}),
        ("claim", {"floor": "-1"}),
        ("claim", {"floor": '"payload * 2"'}),
        ("claim", {"floor": '"f(1)"'}),
        ("claim", {"ceiling": "[9.0]"}),
        ("claim", {"subject": '"nobody"'}),
        ("claim", {"control": '"nobody"'}),
        ("claim", {"control_peer": '"nobody"'}),
        ("claim", {"full": '"none"'}),
        ("claim", {"full": "1"}),
        ("claim", {"nightly": f'"{NAME}"'}),
        ("claim", {"hardware": "()"}),
        ("claim", {"hardware": '"cpu"'}),
        ("claim", {"sentence": '""'}),
    ],
)
def test_declarations_of_gates_are_strict(
    module: Callable[[str], str], function: str, change: dict[str, str | None]
) -> None:
    assert [gate.id for gate in _read(module, _call("claim"))] == ["a"]
    # The place is the line of the gate or, for what it refers to, its number and id.
    with pytest.raises(FormatError, match=r"where: .*(declared_2\.py:6|declared_2: gate 2 \(a\))"):
        _read(module, _call("claim", id='"first"'), _call(function, **change))


@pytest.mark.parametrize(
    "change",
    [
        "kind='wish'",
        "kind=1",
        "peer=None",
        "floor=None",
        "ceiling=None",
        "control=None",
        "control=Control('torch')",
        "workloads={}",
        "workloads={'nightly': 'save-rows-2gib'}",
        "against={'short': 'save-rows-256mib'}",
    ],
)
def test_a_gate_that_is_made_by_hand_is_checked_as_well(module: Callable[[str], str], change: str) -> None:
    assert len(_read(module, f"replace({_call('claim')}, id='b')")) == 1
    with pytest.raises(FormatError, match=r"declared_2\.py:5"):
        _read(module, f"replace({_call('claim')}, {change})")


_WORKLOAD = {
    "name": '"a"',
    "component": '"kvstore"',
    "job": '"get"',
    "shape": "(2, 3)",
    "round_count": "1",
    "contenders": '("ours", "torch")',
}


@pytest.mark.parametrize(
    "change",
    [
        {"round_count": "0"},
        {"round_count": None},
        {"tensor_count": "True"},
        {"tensor_cont": "2"},
        {"shape": "[2, 3]"},
        {"shape": "(2, 0)"},
        {"shard_dim": "2"},
        {"job": '""'},
        {"contenders": "()"},
        {"contenders": '("ours", "ours")'},
    ],
)
def test_declarations_of_workloads_are_strict(module: Callable[[str], str], change: dict[str, str | None]) -> None:
    def read(changes: dict[str, str | None], count: int = 1) -> dict[str, Workload]:
        arguments = {**_WORKLOAD, **changes}
        values = ", ".join(f"{name}={value}" for name, value in arguments.items() if value is not None)
        text = f"    Workload({values}),\n" * count
        return read_workloads([module(f"{_IMPORTS}WORKLOADS = (\n{text})\n")])

    assert read({})["a"].payload_bytes == 24
    with pytest.raises(ConfigError if "ours" in str(change) else FormatError, match=r"declared_2\.py:5"):
        read(change)
    with pytest.raises(FormatError, match="a name twice"):
        read({}, count=2)


@pytest.mark.parametrize("text", ["", "{} = 3", "{} = ()", "{} = ('a',)", "{} = [1]", "=", "import no_such_module"])
def test_modules_that_declare_nothing_are_refused(module: Callable[[str], str], text: str) -> None:
    name = module(text.replace("{}", "GATES = WORKLOADS"))
    with pytest.raises(FormatError, match=r"declared_1\.py"):
        read_gates(read_workloads(), [name])
    with pytest.raises(FormatError, match=r"declared_1\.py"):
        read_workloads([name])
    with pytest.raises(FormatError, match="no such module"):
        read_workloads(["no_such_module"])


def test_an_id_twice_is_refused_across_modules(module: Callable[[str], str]) -> None:
    extra = module(f"{_IMPORTS}GATES = ({_call('claim', id=repr('open'))},)")
    with pytest.raises(FormatError, match=r"an id twice.*gate 1"):
        read_gates(read_workloads(), [*modules("gates"), extra])


def test_every_shape_is_used_and_every_job_exists() -> None:
    workloads = read_workloads()
    gates = read_gates(workloads)
    used = {name for gate in gates for name in [*gate.workloads.values(), *(gate.against or {}).values()]}
    assert used == set(workloads)
    rooms = {"checkpoint": checkpoint, "kvstore": kvstore, "offload": offload, "pipeline": pipeline}
    jobs = {(name, job) for name, room in rooms.items() for job in room.JOBS}
    assert {(workload.component, workload.job) for workload in workloads.values()} == jobs
    assert {gate.kind for gate in gates} == set(Kind)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """Everything that is counted in CI, run once; the jobs check every byte themselves."""
    workloads = read_workloads()
    machine, folder = Machine(("cpu",), "any"), tmp_path_factory.mktemp("bench")
    bench = Bench("fastimpl", "checkpoint", "test", workloads, read_gates(workloads), machine, folder)
    for _ in bench.run():
        pass
    return bench


def test_counters_hold_and_their_controls_are_refused(bench: Bench) -> None:
    outcomes = bench.outcomes()
    assert len(outcomes) >= 10
    wrong = [f"{o.gate}: {o.reason} ({o.subject.value} and {o.bound})" for o in outcomes if o.result is not Result.PASS]
    assert wrong == []
    assert {o.control.result for o in outcomes} == {Result.FAIL}


@pytest.mark.parametrize("component", COMPONENTS)
def test_every_component_has_a_short_form(component: str) -> None:
    workloads = read_workloads()
    machine = Machine(("cpu",), "tmpfs")
    gates = Bench("fastimpl", component, "short", workloads, read_gates(workloads), machine, Path()).chosen_gates()
    assert len(gates) >= 3
    assert {"cpu"} <= {name for gate in gates for name in gate.hardware}
    # A gate that a package of others decides is undecided where that is not installed.
    others = ("fbgemm", "deepspeed", "torchrec", "lmdb", "rocksdb", "fastsafetensors", "runai")
    alone = [gate for gate in gates if gate.peer not in others]
    assert len(alone) >= 3
    assert all(workloads[gate.workloads["short"]].payload_bytes <= 512 << 20 for gate in gates if "plan" not in gate.id)


# Jobs of each component that its short form has: the verbs that people look for a slowdown in.
MAIN_JOBS = {
    "checkpoint": {"save", "load", "load-fresh", "consolidate", "count"},
    "kvstore": {"get", "set", "save", "load"},
    "offload": {"step", "snapshot", "adam_bf16", "adam_fp32", "pretend_step"},
    "pipeline": {"train-rowwise", "train-adagrad", "seed-table", "pretend-step"},
}
# Two cores of the published machines pass over a GiB of work a second, as the bench foretells work.
SHORT_WORK_BYTES = 64 << 30


@pytest.mark.parametrize("component", COMPONENTS)
def test_a_short_form_has_the_main_verbs_and_takes_a_minute(component: str) -> None:
    workloads = read_workloads()
    machine = Machine(("cpu",), "tmpfs")
    bench = Bench("fastimpl", component, "short", workloads, read_gates(workloads), machine, Path())
    needed = [workloads[name] for name in bench.needed()]
    assert MAIN_JOBS[component] <= {workload.job for workload in needed}
    assert sum(map(expected_work, needed)) <= SHORT_WORK_BYTES


@pytest.mark.parametrize(
    ("repeats", "until_s", "may"), [(True, None, True), (False, None, False), (True, 60.0, True), (True, 59.9, False)]
)
def test_a_short_run_repeats_while_its_minute_lasts(repeats: bool, until_s: float | None, may: bool) -> None:
    bench = Bench(
        "fastimpl",
        "kvstore",
        "short",
        {},
        [],
        Machine(("cpu",), "any"),
        Path(),
        repeats=repeats,
        repeats_until_s=until_s,
    )
    # 40 seconds are gone, of which this workload took 20.
    assert bench.may_repeat(100.0, 120.0, 140.0) is may


@pytest.mark.night
@pytest.mark.parametrize(("component", "gate"), [("kvstore", "kv-map-bytes"), ("pipeline", "pipe-table-allocated")])
def test_counters_hold_in_the_short_form(component: str, gate: str, tmp_path: Path) -> None:
    workloads = read_workloads()
    chosen = [found for found in read_gates(workloads) if found.id == gate]
    name = chosen[0].workloads["short"]
    workloads[name] = replace(workloads[name], round_count=1)
    bench = Bench("fastimpl", component, "short", workloads, chosen, Machine(("cpu",), "any"), tmp_path)
    assert [workload.name for workload in bench.run()] == [name]
    (outcome,) = bench.outcomes()
    assert (outcome.result, outcome.control.result) == (Result.PASS, Result.FAIL), outcome.reason


@pytest.mark.parametrize(("component", "count"), [("offload", 8), ("pipeline", 28)])
def test_counters_of_the_pretend_device_hold_and_their_controls_are_refused(
    component: str, count: int, tmp_path: Path
) -> None:
    workloads = read_workloads()
    chosen = [found for found in read_gates(workloads) if "-pretend-" in found.id]
    bench = Bench("fastimpl", component, "test", workloads, chosen, Machine(("cpu",), "any"), tmp_path)
    for _ in bench.run():
        pass
    outcomes = bench.outcomes()
    wrong = [f"{o.gate}: {o.reason} ({o.subject.value} and {o.bound})" for o in outcomes if o.result is not Result.PASS]
    assert wrong == []
    assert len(outcomes) == count
    assert {o.control.result for o in outcomes} == {Result.FAIL}


def _evidence(workload: Workload, rounds: list[Round]) -> Evidence:
    return Evidence(
        "fastimpl", "full", 0, MACHINE, {}, {workload.name: workload.as_dict()}, {workload.name: rounds}, []
    )


def test_regressions_are_seen_and_their_control_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workloads = read_workloads()
    before, slower = (_evidence(workloads[NAME], _rounds(ours, 6.0)) for ours in (1.0, 1.5))
    gate = next(gate for gate in read_gates(workloads) if gate.id == "save-rows-regression")
    assert judge_regression(gate, before, before).result is Result.PASS
    assert judge_regression(gate, before, slower).result is Result.FAIL
    assert judge_regression(gate, before, before, who=gate.control).result is Result.FAIL
    elsewhere = replace(before, machine=Machine(("cpu",), "ext4"))
    assert judge_regression(gate, before, elsewhere).result is Result.UNDECIDED
    paths = []
    for name, evidence in (("before", before), ("slower", slower)):
        paths.append(str(tmp_path / f"{name}.json"))
        write_evidence(evidence, Path(paths[-1]))
    assert read_evidence(Path(paths[0])).rounds == before.rounds
    assert main(["compare", paths[0], paths[0]]) == 0
    assert main(["compare", *paths]) == 1
    assert "slower" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "[]", '{"version": 2}', '{"version": 1, "machine": {}}'])
def test_what_is_no_evidence_is_refused(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    assert main(["compare", str(path), str(path)]) == 2
    assert "x.json" in capsys.readouterr().err


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "out" / "bench.json"
    arguments = [
        "checkpoint",
        "--form",
        "test",
        "--only",
        "plan-64-bytes",
        "--fs",
        str(tmp_path),
        "--json",
        str(report),
    ]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "plan-64-bytes" in text
    assert "refused" in text
    found: dict[str, Any] = json.loads(report.read_text())
    assert found["outcomes"][0]["result"] == "pass"
    assert found["details"]["roofline"]["copy_bytes_per_s"] > 0
    assert found["environment"]["cpu"]["count"] >= 1
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
