"""A script is watched to the end of its process: threads that nobody joins, atexit, os._exit, other folders."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from conformance.harness.cli import main
from conformance.provers.race import watch
from conformance.provers.race.script import run_script

# What works on a stream that waits for nobody, and the host's stream.
_WORK = """
import {names}
import torch
side, x = torch.cuda.Stream(), torch.ones(8, device="cuda")
torch.cuda.synchronize()
def work():
    with torch.cuda.stream(side):
        x.add_(1)
"""
# Each with the work at its end, which races with this one.
_ENDINGS = {
    "a thread": ("threading", "threading.Thread(target=lambda: (go.wait(), work())).start()"),
    "a thread of a thread": (
        "threading",
        "threading.Thread(target=lambda: (go.wait(), threading.Thread(target=work).start())).start()",
    ),
    "an executor": ("concurrent.futures", "pool = concurrent.futures.ThreadPoolExecutor(2); pool.submit(work)"),
    "atexit": ("atexit", "atexit.register(work)"),
    "atexit, partial": ("atexit, functools", "atexit.register(functools.partial(work))"),
    "atexit behind one that raises": ("atexit", "atexit.register(work); atexit.register(lambda: 1 / 0)"),
}


def _script(path: Path, names: str, *lines: str) -> Path:
    path.write_text(_WORK.format(names=names) + "\n".join(lines) + "\n", encoding="utf-8")
    return path


def _race(script: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, in the script's folder."""
    words = [sys.executable, "-P", "-m", "conformance.harness.cli", "race", *options, script.name]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.run(words, cwd=script.parent, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", _ENDINGS)
def test_what_comes_behind_the_last_line_is_judged(name: str, tmp_path: Path) -> None:
    names, line = _ENDINGS[name]
    go = "import threading; go = threading.Event()"
    threads = {*threading.enumerate()}
    report = run_script(_script(tmp_path / "script.py", names, go, line, "x.mul_(2)", "go.set()"))
    assert [hazard.kind for hazard in report.hazards] == ["race"], report.text()
    assert report.failure == ("ZeroDivisionError: division by zero at script.py:10" if "raises" in name else None)
    assert {*threading.enumerate()} <= threads


def test_an_object_that_has_every_attribute_is_registered_as_torchs_are(tmp_path: Path) -> None:
    lines = ["found = mock.MagicMock()", "atexit.register(found)", "atexit.unregister(found)"]
    assert run_script(_script(tmp_path / "script.py", "atexit; from unittest import mock", *lines)).failure is None


def test_what_is_registered_no_more_is_not_called(tmp_path: Path) -> None:
    lines = ["atexit.register(work)", "atexit.unregister(work)", "x.mul_(2)"]
    report = run_script(_script(tmp_path / "script.py", "atexit", *lines))
    assert (report.hazards, report.failure) == ([], None)


def test_an_error_in_a_thread_is_the_scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []
    monkeypatch.setattr(threading, "excepthook", told.append)
    lines = ["def fails(): raise ValueError('late')", "t = threading.Thread(target=fails)", "t.start()", "t.join()"]
    report = run_script(_script(tmp_path / "script.py", "threading", *lines))
    assert report.failure == "ValueError: late at script.py:9, in a thread"
    assert (report.status(), len(told)) == (2, 1)


def test_daemons_are_not_waited_for(tmp_path: Path) -> None:
    lines = ["stop = threading.Event()", "threading.Thread(target=stop.wait, daemon=True, name='idle').start()"]
    report = run_script(_script(tmp_path / "script.py", "threading", *lines))
    assert report.failure is None
    (idle,) = (each for each in threading.enumerate() if each.name == "idle")
    assert idle.daemon


def test_an_end_at_once_is_no_verdict(tmp_path: Path) -> None:
    script = _script(tmp_path / "script.py", "os", "work()", "os._exit(0)")
    done = _race(script)
    assert (done.returncode, done.stdout) == (2, "")
    assert "not judged: os._exit ended the script at once" in done.stderr


def test_a_forked_process_ends_at_once(tmp_path: Path) -> None:
    lines = ["child = os.fork()", "if not child: os._exit(0)", "assert os.waitpid(child, 0)[1] == 0"]
    assert run_script(_script(tmp_path / "script.py", "os", *lines)).failure is None


@pytest.mark.parametrize(
    ("last", "status"), [("sys.exit(3)", 3), ("sys.exit()", 0), ("sys.exit('no data')", 1), ("1 / 0", 1)]
)
def test_a_forked_process_judges_nothing_at_its_end(last: str, status: int, tmp_path: Path) -> None:
    """It would print a report of its own, and write the trace over its parent's."""
    child = f"if not child: print('child', flush=True); {last}"
    said = "print('its status', os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"
    done = _race(_script(tmp_path / "script.py", "os, sys", "child = os.fork()", child, said))
    lines = ["child", f"its status {status}", "no hazard: 1 launches on 2 streams"]
    assert (done.returncode, done.stdout.splitlines()) == (0, lines), done.stderr


def test_nothing_but_the_report_is_printed_with_json(tmp_path: Path) -> None:
    lines = ["print('script')", "os.write(1, b'descriptor\\n')", "subprocess.run(['echo', 'command'], check=True)"]
    done = _race(_script(tmp_path / "script.py", "os, subprocess", *lines), "--json")
    assert json.loads(done.stdout)["status"] == done.returncode == 0
    assert sorted(done.stderr.split()) == ["command", "descriptor", "script"]


@pytest.mark.parametrize(
    ("last", "failure", "told"),
    [
        ("inner()", "ZeroDivisionError: division by zero at script.py:9", "line 10, in <module>"),
        ("assert x is None", "AssertionError at script.py:10", "assert x is None"),
        ("sys.exit('no data')", "exit with status 1: no data", "no data\n"),
    ],
)
def test_what_a_script_fails_with_is_told_as_python_does(
    last: str, failure: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = run_script(_script(tmp_path / "script.py", "sys", "def inner(): 1 / 0", last))
    errors = capsys.readouterr().err
    assert (report.failure, report.status()) == (failure, 2)
    assert told in errors, errors
    # Lines of the prover would be no help.
    assert "runpy" not in errors, errors
    assert "conformance" not in errors, errors


def test_a_module_of_a_package_is_run_by_a_script_beside_it(tmp_path: Path) -> None:
    (tmp_path / "raced_by_a_test").mkdir()
    _script(tmp_path / "raced_by_a_test" / "job.py", "os; from .names import FACTOR", "work()", "x.mul_(FACTOR)")
    (tmp_path / "raced_by_a_test" / "names.py").write_text("FACTOR = 2\n", encoding="utf-8")
    script = tmp_path / "script.py"
    run = "run_module('raced_by_a_test.job', run_name='__main__', alter_sys=True)"
    script.write_text(f"import runpy\nrunpy.{run}\n", encoding="utf-8")
    report = run_script(script)
    assert [hazard.kind for hazard in report.hazards] == ["race"], report.text()


def test_a_trace_lies_where_it_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    script = _script(tmp_path / "script.py", "os", "os.chdir('elsewhere')")
    assert main(["race", "--trace", "trace.svg", str(script)]) == 0
    assert (tmp_path / "trace.svg").is_file()


def test_the_cost_of_an_op_does_not_grow() -> None:
    """Memory recorded for another stream, of a host that waits for nobody, is not looked at again and again."""
    looked = []
    for count in (200, 400):
        with watch() as report:
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            held = []
            covers = 0

            def counted(own: object, name: str, tick: int) -> bool:
                nonlocal covers
                covers += 1
                return own.get(name, 0) >= tick  # type: ignore[attr-defined,no-any-return]

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("conformance.provers.virtual_device.clocks.Clock.covers", counted)
                for _ in range(count):
                    x = torch.ones(8, device="cuda")
                    x.record_stream(side)
                    side.wait_stream(torch.cuda.current_stream())
                    with torch.cuda.stream(side):
                        x.add_(1)
                    del x
                    # Each a new peak.
                    held.append(torch.ones(64, device="cuda"))
            del held
        assert report.hazards == [], report.text()
        looked.append(covers)
    assert looked[1] <= 2.2 * looked[0], looked
