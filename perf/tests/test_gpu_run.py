"""The runner of GPU steps, rehearsed with steps that hang, crash, print a gigabyte and fill the disk."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from fastimpl import ops
from perf.gpu import run, table
from perf.gpu.capture import CAPTURED
from perf.gpu.sanitizer import TOOLS
from perf.gpu.tests import OperatorsSeen, not_run
from perf.harness import steps as runner_module
from perf.harness.steps import PASSED, Outcome, Step, StepRunner, read_outcomes

HANGS = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open("{out}/child", "w").write(str(child.pid))
print("hanging", flush=True)
time.sleep(600)
"""
CRASHES = "import ctypes; print('before', flush=True); ctypes.string_at(0)"
GIGABYTE = """
import os
block = b"x" * (1 << 20)
for _ in range(1024):
    os.write(1, block)
print("\\nall said")
"""
FILLS = """
with open("{out}/filling", "wb") as file:
    for _ in range(64):
        file.write(b"x" * (1 << 20))
"""
LEAVES = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open("{out}/left", "w").write(str(child.pid))
print("over")
"""


def _fake(name: str, program: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "command": [sys.executable, "-S", "-c", program], "limit_s": 60.0, **more}


def _is_gone(pid: int) -> bool:
    """Killed; what nobody waits for yet counts as gone."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return True
    return state in "ZX"


def _run(folder: Path, steps: list[dict[str, Any]], *options: str) -> tuple[int, dict[str, Outcome]]:
    path = folder / "table.json"
    path.write_text(json.dumps(steps))
    code = run.main(["--out", str(folder / "out"), "--steps", str(path), *options])
    return code, read_outcomes(folder / "out")


def test_nothing_stops_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    megabyte = 1 << 20
    steps = [
        _fake("fails", "print('why'); raise SystemExit(3)"),
        _fake("hangs", HANGS, limit_s=6.0),
        _fake("crashes", CRASHES),
        _fake("prints", GIGABYTE),
        _fake("fills", FILLS, file_bytes=megabyte),
        _fake("leaves", LEAVES),
        {"name": "is-not-there", "command": ["/nowhere/program"], "limit_s": 1.0},
        _fake("needs", "print('not to be seen')", needs=["fails"]),
        _fake("good", "print('well'); print('the last line')"),
    ]
    before = dict(os.environ), signal.getsignal(signal.SIGTERM)
    code, found = _run(tmp_path, steps)
    assert (dict(os.environ), signal.getsignal(signal.SIGTERM)) == before
    said = capsys.readouterr().out
    out = tmp_path / "out"
    assert code == 1
    assert list(found) == [step["name"] for step in steps]
    assert {name: outcome.result for name, outcome in found.items()} == {
        "fails": "failed with exit code 3",
        "hangs": "killed at its limit of 6 s",
        "crashes": "died of SIGSEGV",
        "prints": PASSED,
        "fills": found["fills"].result,
        "leaves": PASSED,
        "is-not-there": "could not be started",
        "needs": "not run",
        "good": PASSED,
    }
    assert found["fills"].result in ("died of SIGXFSZ", "failed with exit code 1")
    assert (found["needs"].note, found["good"].note) == ("needs fails", "the last line")
    assert found["hangs"].note == 'in File "<string>", line 6 in <module>'
    assert found["crashes"].note.startswith("in File ")
    assert found["prints"].note == "all said"
    assert os.path.getsize(out / "logs/prints.log") < 2 * megabyte
    assert "bytes are left out" in (out / "logs/prints.log").read_text()
    assert os.path.getsize(out / "filling") <= megabyte
    # Where a step hung is in its log; neither it nor what a step started lives on.
    assert "hanging" in (out / "logs/hangs.log").read_text()
    for name in ("child", "left"):
        assert _is_gone(int((out / name).read_text())), name
    # The table comes last, and has every step.
    table_text = said[said.rindex("\nstep ") :]
    assert all(step["name"] in table_text for step in steps)
    assert table_text.strip().splitlines()[-1].startswith("9 steps, 3 passed, 6 not")
    with tarfile.open(out / "evidence.tar.gz") as archive:
        assert {"evidence/steps.jsonl", "evidence/logs/crashes.log"} <= set(archive.getnames())


def test_all_passed_is_the_only_success(tmp_path: Path) -> None:
    assert _run(tmp_path, [_fake("a", "pass"), _fake("b", "pass")])[0] == 0
    assert _run(tmp_path, [_fake("a", "pass"), _fake("c", "raise SystemExit(1)")])[0] == 1
    with pytest.raises(SystemExit) as nothing:
        _run(tmp_path, [])
    assert nothing.value.code == 2


def test_the_budget_ends_the_run_and_the_table_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = [_fake("long", "import time; time.sleep(600)"), _fake("late", "pass"), _fake("later", "pass")]
    begun = time.monotonic()
    code, found = _run(tmp_path, steps, "--budget", "2")
    assert time.monotonic() - begun < 30
    assert (code, found["long"].result) == (1, "killed at its limit of 2 s, which the budget cut")
    assert [found[name].note for name in ("late", "later")] == ["no time was left"] * 2
    assert "late " in capsys.readouterr().out


def test_resume_runs_only_what_did_not_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    counts = "path = '{out}/%s'; open(path, 'a').write('x')"
    steps = [
        _fake("passes", counts % "passes"),
        _fake("fails", counts % "fails" + "; raise SystemExit(1)"),
        _fake("always", counts % "always", always=True),
        _fake("lists", 'print(\'["a", "b"]\')', each=_fake("each-{}", counts % "{}")),
    ]
    assert _run(tmp_path, steps)[0] == 1
    steps[1] = _fake("fails", counts % "fails")
    code, found = _run(tmp_path, steps, "--resume")
    out = tmp_path / "out"
    sizes = {name: os.path.getsize(out / name) for name in ("passes", "fails", "always", "a", "b")}
    assert (code, sizes) == (0, {"passes": 1, "fails": 2, "always": 2, "a": 1, "b": 1})
    assert "passed, kept" in capsys.readouterr().out
    assert {name: outcome.result for name, outcome in found.items()}["each-b"] == PASSED
    # Without --resume everything is run again.
    _run(tmp_path, steps)
    assert os.path.getsize(out / "passes") == 2


def test_a_result_of_other_sources_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _run(tmp_path, [_fake("a", "pass")])
    path = tmp_path / "out/steps.jsonl"
    path.write_text(path.read_text().replace(run.tree_digest(run._ROOT), "of another tree"))
    _run(tmp_path, [_fake("a", "raise SystemExit(1)")], "--resume")
    assert "passed, kept from other sources" in capsys.readouterr().out


def test_a_line_that_was_cut_short_is_none(tmp_path: Path) -> None:
    _run(tmp_path, [_fake("a", "pass")])
    path = tmp_path / "out/steps.jsonl"
    path.write_text(path.read_text() + '{"name": "b", "resu')
    assert set(_run(tmp_path, [_fake("c", "pass")], "--resume")[1]) == {"a", "c"}


@pytest.mark.parametrize("printed", ["no list", "{}", "[1]", ""])
def test_a_step_that_names_no_steps_is_a_problem(
    printed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    each = _fake("each-{}", "pass")
    code, found = _run(tmp_path, [_fake("lists", f"print({printed!r})", each=each), _fake("good", "pass")])
    assert (code, found["good"].result) == (1, PASSED)
    assert "its last line is no list of names" in capsys.readouterr().out


def _start(folder: Path, steps: list[dict[str, Any]], **more: Any) -> subprocess.Popen[str]:
    (folder / "table.json").write_text(json.dumps(steps))
    command = [
        sys.executable,
        "-m",
        "perf.gpu.run",
        "--out",
        str(folder / "out"),
        "--steps",
        str(folder / "table.json"),
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **more)


def test_a_full_disk_takes_the_records_and_not_the_run(tmp_path: Path) -> None:
    def small() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))

    steps = [_fake(f"step-{number}", "print('said')") for number in range(4)]
    process = _start(tmp_path, steps, preexec_fn=small)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 1, said
    assert "steps.jsonl has no line of step-3" in said
    assert "4 steps, 4 passed, 0 not" in said


def test_asked_to_end_it_kills_the_step_and_prints_the_table(tmp_path: Path) -> None:
    steps = [_fake("good", "pass"), _fake("hangs", HANGS), _fake("late", "pass")]
    process = _start(tmp_path, steps)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("good: passed")
    while not (tmp_path / "out/child").exists():
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=60)
    found = read_outcomes(tmp_path / "out")
    assert process.returncode == 1
    assert (found["hangs"].result, found["late"].note) == ("stopped", "the run was stopped")
    assert said.strip().splitlines()[-1].startswith("3 steps, 1 passed")


def test_a_step_that_no_signal_ends_does_not_hold_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "_signal", lambda process, number: None)
    monkeypatch.setattr(subprocess.Popen, "send_signal", lambda process, number: None)
    monkeypatch.setattr(runner_module, "_DYING_S", 0.2)
    hangs = Step("hangs", (sys.executable, "-S", "-c", "import time; time.sleep(30)"), 1.0)
    good = Step("good", (sys.executable, "-S", "-c", "pass"), 30.0)
    runner = StepRunner(tmp_path, budget_s=60, sources="s", root=tmp_path, environment={}, say=lambda line: None)
    runner.run([hangs, good])
    for process in runner.left_behind:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    results = [outcome.result for outcome in runner.results]
    assert results == ["could not be killed at its limit of 1 s", PASSED]


def test_results_are_synced_before_the_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    real = os.fsync

    def sync(number: int) -> None:
        seen.append(os.fstat(number).st_size)
        real(number)

    monkeypatch.setattr(os, "fsync", sync)
    runner = StepRunner(tmp_path, budget_s=60, sources="s", root=tmp_path, environment={}, say=lambda line: None)
    runner.run([Step(name, (sys.executable, "-S", "-c", "pass"), 30) for name in "ab"])
    assert len(seen) == 2
    assert 0 < seen[0] < seen[1] == (tmp_path / "steps.jsonl").stat().st_size


def test_the_table_of_steps() -> None:
    steps = table.all_steps()
    names = [step.name for step in steps if step.phase == 1]
    assert names[:3] == ["facts", "library", "launch"]
    assert names.index("operators") < names.index("tests:offload") < names.index("kernels")
    assert [step.name for step in steps if step.phase == 3][-1] == "table"
    last = [*(f"capture:{name}" for name in CAPTURED), *(f"sanitizer:{name}" for name in TOOLS)]
    assert [step.name for step in steps if step.phase == 4] == ["library", *last]
    assert [step.name for step in steps if step.phase == 5] == [
        "library",
        *(f"tests:all-{stem}" for stem in table.STEMS),
    ]
    assert {step.phase for step in steps} == set(table.PHASES)
    for step in steps:
        known = {other.name for other in steps if other.phase == step.phase}
        assert set(step.needs) <= known
        assert step.each is None or set(step.each.needs) <= known
        assert step.limit_s <= 540
    # A table that imports torch would end with it.
    program = "import sys; sys.modules['torch'] = None; from perf.gpu import run, table; table.all_steps()"
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=60)


def test_only_takes_along_what_a_step_needs() -> None:
    chosen = run._chosen(table.all_steps(), [1], ["tests:offload"])
    assert [step.name for step in chosen] == ["library", "tests:offload"]
    named = run._chosen(table.all_steps(), [1], ["operators"])
    assert [step.name for step in named] == ["library", "launch", "operators"]
    both = run._chosen(table.all_steps(), [1, 2], None)
    assert [step.name for step in both].count("library") == 1


def test_a_skip_of_what_must_run_is_a_failure() -> None:
    report = {"requirements": [{"id": "OPT-110", "outcome": "skipped"}, {"id": "OPT-111", "outcome": "passed"}]}
    assert list(not_run(report, ["OPT-110", "OPT-111", "OPT-112"])) == [
        "OPT-110: skipped, expected passed",
        "OPT-112: not collected, expected passed",
    ]


def test_operators_are_seen_by_the_device_of_their_tensors() -> None:
    rows, out = torch.arange(6.0).reshape(2, 3), torch.zeros(24, dtype=torch.uint8)
    with OperatorsSeen("cpu") as here, OperatorsSeen("cuda") as there:
        ops.strided_gather(rows.t(), 0, out)
        rows.add_(1)
    assert here.names == {"checkpoint_gather"}
    assert there.names == set()


def test_a_failure_is_said_when_it_comes(tmp_path: Path) -> None:
    # The second test ends the process, as a limit does: what the first found has been printed by then.
    program = "import os\ndef test_first(): assert 1 == 2\ndef test_second(): os._exit(3)\n"
    (tmp_path / "of_a_gpu.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "-m", "perf.gpu.tests", "of_a_gpu"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 3
    assert "test_first, call" in done.stdout
    assert "assert 1 == 2" in done.stdout


def test_the_summary_is_markdown(tmp_path: Path) -> None:
    summary = tmp_path / "summary.md"
    _run(tmp_path, [_fake("a", "print('x | y')")], "--summary", str(summary))
    lines = summary.read_text().splitlines()
    assert lines[0] == "| step | result | s | last line |"
    assert lines[2].startswith("| a | passed | ")
    assert lines[2].endswith("| x \\| y |")
