"""``bench compare`` as people call it: machines, missing workloads, counts, several runs a side, exit codes."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from perf.harness.cli import main
from perf.harness.comparison import Change, compare_evidence, compare_sides, notes, unmatched
from perf.harness.gates import Gate, Kind, read_gates
from perf.harness.judge import Machine, judge
from perf.harness.paired import Round
from perf.harness.results import Evidence, differences, hardware_of, read_evidence, write_evidence
from perf.harness.workloads import read_workloads
from twinproof.errors import ConfigError

WORKLOADS = read_workloads()
GATES = read_gates(WORKLOADS)
BY_ID = {gate.id: gate for gate in GATES}
MACHINE = Machine(("cpu",), "tmpfs")
XEON: dict[str, Any] = {"cpu": {"count": 2, "model": "Xeon"}, "torch": {"threads": 2}, "versions": {"torch": "2.13.0"}}
CLAIM, OTHER = BY_ID["save-rows-defaults"], BY_ID["open"]
COUNT = next(g for g in GATES if g.kind is Kind.COUNTER and g.id == "save-rows-write-calls")
ZERO = BY_ID["save-rows-shared-pages"]
MEMORY = BY_ID["save-memory"]
GROWTH = BY_ID["save-memory-4x"]


def _rounds(gate: Gate, subject: float, control: float, *, noise: float = 0.001, seed: int = 0) -> list[Round]:
    draw = random.Random(seed)
    who = {gate.subject: subject, gate.control.subject: control}
    if gate.peer is not None:
        who.setdefault(gate.peer, control)
    return [
        {name: {gate.metric: value * (1 + draw.uniform(-noise, noise))} for name, value in who.items()}
        for _ in range(7)
    ]


def _run(
    measured: Mapping[str, Sequence[Round]],
    *,
    gates: Sequence[Gate],
    created: str = "2026-01-01T00:00:00+00:00",
    **facts: Any,
) -> Evidence:
    shapes = {name: WORKLOADS[name].as_dict() for name in measured}
    outcomes = [judge(gate, "full", WORKLOADS, measured, MACHINE).as_dict() for gate in gates]
    rounds = {name: list(found) for name, found in measured.items()}
    return Evidence("fastimpl", "full", 0, MACHINE, {**XEON, **facts}, shapes, rounds, outcomes, created)


def _claimed(seconds: float, *, gate: Gate = CLAIM, noise: float = 0.001, seed: int = 0, **facts: Any) -> Evidence:
    rounds = _rounds(gate, seconds, 10.0, noise=noise, seed=seed)
    return _run({gate.workloads["full"]: rounds}, gates=[gate], **facts)


def _counted(gate: Gate, count: float, **facts: Any) -> Evidence:
    return _run({gate.workloads["full"]: _rounds(gate, count, 1e12, noise=0)}, gates=[gate], **facts)


def _one(changes: list[Change]) -> tuple[str, bool]:
    (change,) = changes
    assert change.text.split()[0] == change.word
    return change.word, change.failed


def _call(tmp_path: Path, before: Evidence, after: Evidence) -> int:
    paths = [tmp_path / "before.json", tmp_path / "after.json"]
    for path, evidence in zip(paths, (before, after), strict=True):
        write_evidence(evidence, path)
    return main(["compare", *map(str, paths)])


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (100.0, 100.0, ("same", False)),
        (100.0, 50.0, ("less", False)),
        # A tenth of what the gate allows (128 calls) is 12.8.
        (100.0, 112.0, ("ok", False)),
        (100.0, 113.0, ("more", True)),
    ],
)
def test_counts_are_compared_as_they_are(before: float, after: float, expected: tuple[str, bool]) -> None:
    assert _one(compare_evidence(_counted(COUNT, before), _counted(COUNT, after), GATES)) == expected


def test_of_what_must_be_zero_one_is_more() -> None:
    assert _one(compare_evidence(_counted(ZERO, 0.0), _counted(ZERO, 0.0), GATES)) == ("same", False)
    changes = compare_evidence(_counted(ZERO, 0.0), _counted(ZERO, 1.0), GATES)
    assert [(change.word, change.failed) for change in changes] == [("more", True), ("fails", True)]


def test_growth_is_compared_less_its_base() -> None:
    name, base = GROWTH.workloads["full"], (GROWTH.against or {})["full"]

    def grown(large: float, small: float) -> Evidence:
        measured = {name: _rounds(GROWTH, large, 9e9, noise=0), base: _rounds(GROWTH, small, 1e9, noise=0)}
        return _run(measured, gates=[GROWTH])

    mi = float(1 << 20)
    # Both grew by as much: what one shape adds to the other is the same.
    assert _one(compare_evidence(grown(50 * mi, 40 * mi), grown(60 * mi, 50 * mi), GATES)) == ("same", False)
    assert _one(compare_evidence(grown(50 * mi, 40 * mi), grown(60 * mi, 40 * mi), GATES)) == ("more", True)


def test_times_and_memory_of_other_machines_are_undecided_and_counts_are_not() -> None:
    epyc: dict[str, Any] = {"cpu": {"count": 2, "model": "EPYC"}}
    slower = compare_evidence(_claimed(1.0), _claimed(2.0, **epyc), GATES)
    # Its ratio, and that its claim fails there.
    assert [(change.word, change.failed) for change in slower] == [("undecided", False)] * 2
    assert "2 x Xeon, tmpfs and 2 x EPYC" in slower[0].text
    assert "fails on another machine" in slower[1].text
    more = float(60 << 20)
    assert _one(compare_evidence(_counted(MEMORY, 1.0), _counted(MEMORY, more, **epyc), GATES)) == ("undecided", False)
    assert _one(compare_evidence(_counted(MEMORY, 1.0), _counted(MEMORY, more), GATES)) == ("more", True)
    assert _one(compare_evidence(_counted(COUNT, 10.0), _counted(COUNT, 90.0, **epyc), GATES)) == ("more", True)
    lines = notes([_claimed(1.0)], [_claimed(1.0, versions={"torch": "2.14.0"}, **epyc)])
    assert "other machines" in lines[2]
    assert "torch 2.13.0 and 2.14.0" in lines[3]


@pytest.mark.parametrize(
    "change",
    [{"cpu": {"count": 4, "model": "Xeon"}}, {"torch": {"threads": 1}}],
)
def test_cores_and_threads_make_another_machine(change: dict[str, Any]) -> None:
    assert hardware_of(_claimed(1.0)) != hardware_of(_claimed(1.0, **change))
    other_disk = replace(_claimed(1.0), machine=Machine(("cpu",), "ext4"))
    a_gpu = replace(_claimed(1.0), machine=Machine(("cpu", "cuda", "nvidia-h200"), "tmpfs"))
    assert len({hardware_of(run) for run in (_claimed(1.0), other_disk, a_gpu)}) == 3


_SAID: dict[str, Any] = {
    "cpu": {**XEON["cpu"], "flags": ["avx2", "avx512f"]},
    "torch": {"threads": 2, "capability": "AVX512"},
    "memory_bytes": 24 << 30,
    "variables": {"FASTIMPL_X": "1", "TWINPROOF_Y": "1"},
}
_OTHER_OF_ONE_NAME = [
    ({"cpu": {**XEON["cpu"], "flags": ["avx2"]}}, "cpu flags: avx2 avx512f and avx2"),
    ({"torch": {"threads": 2, "capability": "AVX2"}}, "torch's vectors: AVX512 and AVX2"),
    ({"memory_bytes": 3 << 30}, f"memory_bytes: {24 << 30} and {3 << 30}"),
    ({"variables": {}}, "variables: FASTIMPL_X=1 and none"),
]


@pytest.mark.parametrize(("changed", "said"), _OTHER_OF_ONE_NAME)
def test_unlike_machines_of_one_name_are_told(
    changed: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A hypervisor calls generations of processors "AMD EPYC"."""
    before, after = _claimed(1.0, **_SAID), _claimed(1.001, seed=1, **{**_SAID, **changed})
    assert _call(tmp_path, before, after) == 2
    out = capsys.readouterr().out
    assert out.splitlines()[3] == f"  {said}"
    assert f": other machines of one name, by {said.partition(': ')[0]}\n" in out
    with pytest.raises(ConfigError, match="belong together"):
        compare_sides([before, replace(after, created="2026-01-02"), before], [before] * 3, GATES)


def test_what_one_run_does_not_say_is_no_difference(tmp_path: Path) -> None:
    """Evidence of earlier versions has fewer facts; two kernels leave a program not quite as much memory."""
    old, new = _claimed(1.0), _claimed(1.0, **_SAID)
    near = _claimed(1.0, **{**_SAID, "memory_bytes": 23 << 30, "variables": {"FASTIMPL_X": "1"}})
    unread = _claimed(1.0, **{**_SAID, "memory_bytes": "unavailable"})
    for other in (old, near, unread, _claimed(1.0, cpu=XEON["cpu"], variables={"FASTIMPL_X": "1"})):
        assert differences(other, new) == differences(new, other) == {}
    assert _call(tmp_path, old, new) == 0
    for path in sorted((Path(__file__).parents[1] / "results").rglob("*.json")):
        if "rounds" in path.read_text(encoding="utf-8"):
            assert hardware_of(read_evidence(path)), path


def test_another_implementation_is_named() -> None:
    lines = notes([_claimed(1.0)], [replace(_claimed(1.0), implementation="mine")])
    assert lines[2:] == ["other implementations, whose ratios are not changes of one: fastimpl and mine"]


def test_one_run_three_times_is_not_three_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in "abc":
        write_evidence(_claimed(1.0), tmp_path / "runs" / f"{name}.json")
    assert main(["compare", str(tmp_path / "runs"), str(tmp_path / "runs")]) == 2
    assert "one run stands twice in a side" in capsys.readouterr().err


@pytest.mark.parametrize(
    "changed",
    [
        {"outcomes": [{}]},
        {"outcomes": ["pass"]},
        {"outcomes": [{**_claimed(1.0).outcomes[0], "subject": {"value": "1"}}]},
        {"rounds": {"a": [{"ours": 1.0}]}},
        {"rounds": {"a": {"ours": {"seconds": 1.0}}}},
    ],
)
def test_evidence_with_parts_of_another_shape_is_refused(
    changed: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "odd.json"
    write_evidence(replace(_claimed(1.0), **changed), path)
    for words in (["compare", str(path)], ["history"], ["plot", "--svg", str(tmp_path / "x.svg")]):
        assert main([*words, str(path)]) == 2
        err = capsys.readouterr().err
        assert re.match(r"twinproof bench: not the (outcome of a gate|rounds of a workload)", err)
        assert "odd.json: " in err
        assert "Traceback" not in err


def test_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _call(tmp_path, _claimed(1.0), _claimed(1.001, seed=1)) == 0
    assert _call(tmp_path, _claimed(1.0), _claimed(1.5)) == 1
    capsys.readouterr()
    # A comparison that decided nothing proves nothing.
    assert _call(tmp_path, _claimed(1.0), _claimed(1.5, cpu={"count": 2, "model": "EPYC"})) == 2
    assert "nothing was decided" in capsys.readouterr().err
    assert _call(tmp_path, _claimed(1.0), replace(_claimed(1.0), form="short")) == 2
    assert "other forms" in capsys.readouterr().err
    assert main(["compare", str(tmp_path / "absent.json"), str(tmp_path / "after.json")]) == 2
    assert "absent.json" in capsys.readouterr().err


def test_a_gate_that_begins_to_fail_is_worse_and_one_that_still_fails_is_no_change(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The floor is 6: 10 s of torch against 1.6 s, and against 1.72 s, which keeps 0.93 of it.
    passes, fails = _claimed(1.6), _claimed(1.72)
    changes = compare_evidence(passes, fails, GATES)
    assert [(change.word, change.failed) for change in changes] == [("ok", False), ("fails", True)]
    assert [change.word for change in compare_evidence(fails, passes, GATES)] == ["faster", "mended"]
    assert _call(tmp_path, fails, fails) == 0
    text = capsys.readouterr().out
    assert f"fail on both sides, which is no change: {CLAIM.id}" in text
    assert "1 compared: 1 same" in text


def test_what_only_one_side_measured_is_named() -> None:
    names = [gate.workloads["full"] for gate in (CLAIM, OTHER)]
    rounds = [_rounds(gate, 1.0, 10.0) for gate in (CLAIM, OTHER)]
    both = _run(dict(zip(names, rounds, strict=True)), gates=[CLAIM, OTHER])
    one = _run({names[0]: rounds[0]}, gates=[CLAIM])
    assert unmatched([both], [one], GATES) == [f"only before: {names[1]} (workloads)"]
    assert unmatched([one], [both], GATES) == [f"only after: {names[1]} (workloads)"]
    # The peer is not installed there.
    alone = [{"ours": found["ours"]} for found in rounds[1]]
    without = _run({names[0]: rounds[0], names[1]: alone}, gates=[CLAIM, OTHER])
    assert unmatched([both], [without], GATES) == [f"measured before and not after: {OTHER.id}"]
    assert unmatched([without], [both], GATES) == [f"measured after and not before: {OTHER.id}"]
    assert unmatched([without], [without], GATES) == [f"measured on neither side: {OTHER.id}"]
    assert unmatched([both], [both], GATES) == []


def _side(tmp_path: Path, name: str, seconds: Sequence[float], hour: int) -> list[Evidence]:
    """Runs at odd or even hours; written in the reverse order of their names."""
    found = []
    for number, value in enumerate(seconds):
        created = f"2026-01-01T{2 * number + hour:02}:00:00+00:00"
        found.append(replace(_claimed(value, seed=number), created=created))
        write_evidence(found[-1], tmp_path / name / f"{9 - number}.json")
    return found


def test_runs_are_paired_in_order_of_time_so_that_drift_cancels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drift = (1.0, 1.3, 0.8, 1.1)
    before = _side(tmp_path, "before", drift, 0)
    after = _side(tmp_path, "after", [1.25 * value for value in drift], 1)
    (change,) = compare_sides(before, after, GATES)
    assert (change.word, change.failed) == ("slower", True)
    # Paired in any other order, the drift would leave it undecided.
    shuffled = [replace(run, created=f"2026-01-0{9 - number}") for number, run in enumerate(after)]
    assert _one(compare_sides(before, shuffled, GATES)) == ("undecided", False)
    assert main(["compare", str(tmp_path / "before"), str(tmp_path / "after")]) == 1
    assert "the last of 4 runs" in capsys.readouterr().out
    assert main(["compare", str(tmp_path / "before"), str(tmp_path / "before")]) == 0


def test_runs_that_differ_by_themselves_are_not_a_difference(tmp_path: Path) -> None:
    # Within a run every round agrees; between runs of one program the ratio moves by a tenth.
    before = _side(tmp_path, "before", (1.0, 1.1, 0.95), 0)
    after = _side(tmp_path, "after", (1.15, 1.02, 1.12), 1)
    assert _one(compare_sides(before, after, GATES)) == ("undecided", False)
    assert _one(compare_sides(before[:1], after[:1], GATES)) == ("slower", True)


def test_sides_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    runs = _side(tmp_path, "runs", (1.0, 1.0, 1.0), 0)
    assert _one(compare_sides(runs[:2], [replace(run, rounds=_claimed(1.1).rounds) for run in runs[:2]], GATES)) == (
        "undecided",
        False,
    )
    elsewhere = replace(runs[1], environment={**XEON, "cpu": {"count": 2, "model": "EPYC"}})
    for side, message in (
        (runs[:2], "as many runs"),
        ([], "no evidence"),
        ([runs[0], elsewhere, runs[2]], "belong together"),
        ([runs[0], _claimed(1.0, gate=OTHER), runs[2]], "other workloads"),
    ):
        with pytest.raises(ConfigError, match=message):
            compare_sides(runs, side, GATES)
    with pytest.raises(ConfigError, match="no evidence"):
        compare_sides([], runs, GATES)
    (tmp_path / "empty").mkdir()
    assert main(["compare", str(tmp_path / "empty"), str(tmp_path / "runs")]) == 2
