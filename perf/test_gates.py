"""The gates themselves: strict data, arithmetic that can fail, and counters that CI holds on small shapes."""

from __future__ import annotations

from pathlib import Path

import pytest

from perf.harness.cli import main, run_workloads
from perf.harness.gates import Gate, evaluate, formula, judge, read_gates
from perf.harness.paired import Round
from perf.harness.workloads import Workload, read_workloads
from refimpl.errors import FormatError

# A count is exact on any machine; times are not judged in CI.
_COUNTED = ("save-rows-test", "save-columns-test", "save-4-byte-runs-test")
_TESTED = (*_COUNTED, "load-rows-test", "consolidate-rows-test", "open-2000x64-test", "plan-1000-test")


def _rounds(ours: float, torch: float, count: int = 7) -> list[Round]:
    return [{"ours": {"seconds": ours + i / 1000}, "torch": {"seconds": torch + i / 1000}} for i in range(count)]


def _workload() -> Workload:
    return read_workloads()["save-rows-test"]


def _claim(**changes: object) -> Gate:
    return Gate("x", "claim", "save-rows", "ours", "torch", "seconds", reference="torch", floor=2.0, ceiling=10.0)


@pytest.mark.parametrize(
    ("ours", "torch", "status"), [(1.0, 3.0, "pass"), (1.0, 1.5, "fail"), (1.0, 50.0, "fail"), (3.0, 1.0, "fail")]
)
def test_a_claim_is_judged(ours: float, torch: float, status: str) -> None:
    assert judge(_claim(), _workload(), _rounds(ours, torch)).status == status


def test_the_control_of_a_claim_fails() -> None:
    assert judge(_claim(), _workload(), _rounds(1.0, 3.0), control=True).status == "fail"


def test_what_was_not_measured_is_undecided() -> None:
    assert judge(_claim(), _workload(), []).status == "undecided"
    gate = Gate("x", "counter", "save-rows", "ours", "torch", "written_bytes", at_most="1")
    assert judge(gate, _workload(), _rounds(1.0, 1.0)).status == "undecided"


@pytest.mark.parametrize("text", ["payload", "__import__('os')", "1 if 1 else 2", "2 **", "payload_bytes ** 9", "[1]"])
def test_a_formula_is_arithmetic_only(text: str) -> None:
    with pytest.raises(FormatError):
        formula(text, {"payload_bytes": 1.0})


def test_formulas() -> None:
    assert formula("1.5 * payload_bytes / 3 + 8 - 2", {"payload_bytes": 6.0}) == 9.0


@pytest.mark.parametrize(
    "line", ['kind = "wish"', "surprise = 1", 'floor = "2"', "at_most = 3", "measure = 1", "", 'at_most = "1"']
)
def test_the_gate_file_is_strict(tmp_path: Path, line: str) -> None:
    fields = {"id": '"a"', "kind": '"claim"', "workload": '"w"', "subject": '"s"', "control": '"c"', "measure": '"m"'}
    fields |= {"reference": '"r"', "floor": "1.0"}
    key = line.split(" =")[0]
    if not line:
        del fields["floor"]
    lines = [f"{name} = {value}" for name, value in fields.items() if name != key] + [line]
    path = tmp_path / "gates.toml"
    path.write_text("version = 1\n[[gate]]\n" + "\n".join(lines) + "\n")
    with pytest.raises(FormatError):
        read_gates(path)


def test_every_gate_names_what_runs() -> None:
    workloads = read_workloads()
    for gate in read_gates():
        contenders = set(workloads[gate.workload].contenders)
        wanted = {gate.subject, gate.control} | ({gate.reference} if gate.reference else set())
        assert wanted <= contenders, gate.id


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Round]]:
    """Every job once, on tiny shapes; the jobs check every byte themselves."""
    workloads = read_workloads()
    return run_workloads([workloads[name] for name in _TESTED], tmp_path_factory.mktemp("bench"))


def test_counter_gates_hold_in_ci(measured: dict[str, list[Round]]) -> None:
    results = {name: measured[name] for name in _COUNTED}
    outcomes = [o for o in evaluate(read_gates(), read_workloads(), results, "test") if o.gate.kind == "counter"]
    assert len(outcomes) >= 5
    assert [f"{o.gate.id}: {o.text}" for o in outcomes if o.status != "pass"] == []


def test_counter_gates_fail_on_their_controls(measured: dict[str, list[Round]]) -> None:
    workloads = read_workloads()
    failed = set()
    for gate in read_gates():
        name = f"{gate.workload}-test"
        if (
            gate.kind == "counter"
            and name in _COUNTED
            and judge(gate, workloads[name], measured[name], control=True).status == "fail"
        ):
            failed.add(gate.measure)
    assert {"file_written_bytes", "file_write_calls"} <= failed


def test_plan_bytes_gate_fails_on_its_control(measured: dict[str, list[Round]]) -> None:
    rounds = measured["plan-1000-test"]
    ours, torch = (rounds[0][who]["plan_bytes"] for who in ("ours@8", "torch@8"))
    assert ours <= 0.2 * torch


def test_every_job_ran(measured: dict[str, list[Round]]) -> None:
    assert set(measured) == set(_TESTED)
    assert all(sample["seconds"] > 0 for rounds in measured.values() for found in rounds for sample in found.values())


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "bench.json"
    arguments = ["checkpoint", "--test", "--only", "open-2000x64-test", "--fs", str(tmp_path), "--json", str(report)]
    assert main(arguments) == 0
    assert "open-2000x64" in capsys.readouterr().out
    assert main(["compare", str(report), str(report)]) == 0
