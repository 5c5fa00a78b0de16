"""Two runs against each other: every pair that both judged, in each component, with and without regression gates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from perf.harness.cli import main
from perf.harness.comparison import KEPT_MIN, compare_evidence, judge_regression
from perf.harness.declarations import COMPONENTS
from perf.harness.gates import Gate, Kind, read_gates
from perf.harness.judge import Machine, Result
from perf.harness.results import Evidence, write_evidence
from perf.harness.workloads import read_workloads
from twinproof.errors import ConfigError

WORKLOADS = read_workloads()
GATES = [gate for gate in read_gates(WORKLOADS) if gate.kind.is_paired and "full" in gate.workloads]
MACHINE = Machine(("cpu",), "tmpfs")


def _of(component: str) -> list[Gate]:
    return [gate for gate in GATES if WORKLOADS[gate.workloads["full"]].component == component]


def _evidence(gates: Sequence[Gate], *, slower: float = 1.0, noise: float = 0.001) -> Evidence:
    """Rounds of the gates' workloads: a subject of a gate takes half of the time of those that are none."""
    subjects = {gate.subject for gate in gates}
    metrics = {gate.metric for gate in gates}
    rounds = {
        name: [
            {
                who: dict.fromkeys(metrics, (slower if who in subjects else 2.0) * (1 + noise * (number % (3 + index))))
                for index, who in enumerate(WORKLOADS[name].contenders)
            }
            for number in range(7)
        ]
        for name in {gate.workloads["full"] for gate in gates}
    }
    shapes = {name: WORKLOADS[name].as_dict() for name in rounds}
    fields = {"kind": "claim", "bound": 1.0, "result": "pass", "reason": ""}
    fields |= dict.fromkeys(("subject", "control"), dict.fromkeys(("value", "low", "high")))
    outcomes = [
        {**fields, "gate": gate.id, "workload": gate.workloads["full"]}
        for gate in gates
        if gate.kind is not Kind.REGRESSION
    ]
    return Evidence("fastimpl", "full", 0, MACHINE, {}, shapes, rounds, outcomes)


def _changes(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines of gates: the second paragraph."""
    return capsys.readouterr().out.split("\n\n")[1].splitlines()


def _pairs(gates: Sequence[Gate]) -> set[tuple[str, ...]]:
    return {(gate.workloads["full"], gate.subject, str(gate.peer), gate.metric) for gate in gates}


@pytest.mark.parametrize("component", COMPONENTS)
def test_evidence_is_the_same_as_itself(component: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bench.json"
    # Noise that decides nothing between two runs: that it is the same samples does.
    write_evidence(_evidence(_of(component), noise=0.3), path)
    assert main(["compare", str(path), str(path)]) == 0
    lines = _changes(capsys)
    assert [line.split()[0] for line in lines] == ["same"] * len(_pairs(_of(component)))


@pytest.mark.parametrize("component", COMPONENTS)
def test_every_pair_that_both_judged_is_compared(component: str) -> None:
    # One pair at a time, so that its peer is the subject of no other gate.
    for gate in _of(component):
        if gate.subject == gate.peer or gate.kind is Kind.REGRESSION:
            continue
        before = _evidence([gate])
        others = [before, _evidence([gate], noise=0.002), _evidence([gate], slower=0.5), _evidence([gate], slower=1.5)]
        words = []
        for after in others:
            (change,) = compare_evidence(before, after, [gate])
            words.append(change.text.split()[0])
            assert change.failed is (words[-1] == "slower")
            assert gate.id in change.text
        assert words == ["same", "same", "faster", "slower"], gate.id


@pytest.mark.parametrize("component", COMPONENTS)
def test_a_loss_ends_with_an_error(component: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gate = next(gate for gate in _of(component) if gate.kind is not Kind.REGRESSION)
    paths = [tmp_path / "before.json", tmp_path / "after.json"]
    for path, slower in zip(paths, (1.0, 1.2), strict=True):
        write_evidence(_evidence([gate], slower=slower), path)
    assert main(["compare", *map(str, paths)]) == 1
    assert [line.split()[0] for line in _changes(capsys)] == ["slower"]
    assert main(["compare", *map(str, reversed(paths))]) == 0
    assert [line.split()[0] for line in _changes(capsys)] == ["faster"]


def test_controls_are_refused_as_losses() -> None:
    gates = [gate for gate in GATES if gate.control.subject == gate.peer and gate.kind is not Kind.REGRESSION]
    assert len(gates) > 20
    for gate in gates:
        evidence = _evidence([gate])
        assert judge_regression(gate, evidence, evidence, who=gate.control).result is Result.FAIL, gate.id


def test_a_regression_gate_compares_its_pair_alone() -> None:
    regression = next(gate for gate in GATES if gate.id == "save-rows-regression")
    claim = next(gate for gate in GATES if gate.id == "save-rows-defaults")
    best = next(gate for gate in GATES if gate.id == "save-rows-best")
    evidence = _evidence([claim, best])
    texts = [change.text for change in compare_evidence(evidence, evidence, [claim, best, regression])]
    assert [text.split()[1] for text in texts] == ["save-rows-regression", "save-rows-best"]
    # Its bound is its own; others may lose a tenth.
    loose = replace(regression, floor=0.4)
    slower = _evidence([claim, best], slower=2.0)
    assert [change.failed for change in compare_evidence(evidence, slower, [loose, best])] == [False, True]
    assert KEPT_MIN == 0.9


def test_what_only_one_run_judged_is_not_compared() -> None:
    first, second = GATES[0], next(gate for gate in GATES if gate.workloads["full"] != GATES[0].workloads["full"])
    both, one = _evidence([first, second]), _evidence([first])
    assert len(compare_evidence(one, both, [first, second])) == 1
    with pytest.raises(ConfigError, match="in common"):
        compare_evidence(one, _evidence([second]), [first, second])
    with pytest.raises(ConfigError, match="in common"):
        compare_evidence(one, replace(one, outcomes=[]), [first, second])
    # A workload that could not be measured has its place in a run, and no samples.
    empty = replace(one, outcomes=[], rounds={name: [] for name in one.rounds})
    with pytest.raises(ConfigError, match=r"in common; got: \[\]; expected: \['"):
        compare_evidence(one, empty, [first, second])


def test_wide_intervals_and_other_shapes_are_undecided() -> None:
    gate = GATES[0]
    before, after = _evidence([gate]), _evidence([gate], noise=0.0)
    name = gate.workloads["full"]
    for number, found in enumerate(after.rounds[name]):
        found[gate.subject]["seconds"] *= 1 + number / 3
    (change,) = compare_evidence(before, after, [gate])
    assert change.text.startswith("undecided")
    other = replace(before, workloads={name: {**before.workloads[name], "shape": [1, 1]}})
    (change,) = compare_evidence(before, other, [gate])
    assert "the shape of" in change.text
    assert not change.failed
