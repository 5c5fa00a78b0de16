"""The command line runs the suite it came with, and says so when it cannot."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from conformance.harness import cli, endings

_HOME = Path(__file__).parents[2]


def _twinproof(folder: Path, *words: str, path: str = "") -> subprocess.CompletedProcess[str]:
    """Run it as the installed script does: the script's folder is on the search path, the current one is not."""
    script = folder / "bin" / "twinproof"
    script.parent.mkdir()
    script.write_text("from conformance.harness.cli import main\nraise SystemExit(main())\n", encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [path, str(_HOME)]))}
    command = [sys.executable, str(script), *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_info(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info", "--json", "--impl", "refimpl"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["implementation"]["name"] == "refimpl"
    assert {"versions", "torch", "cpu", "gpus", "file_system", "memory_bytes"} <= facts.keys()
    assert cli.main(["info", "--impl", "no_such_module"]) == 0
    out = capsys.readouterr().out
    assert "no_such_module cannot be imported" in out
    assert "versions.torch" in out


@pytest.mark.night
def test_verify_runs_elsewhere_and_keeps_the_report(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("", encoding="utf-8")
    (tmp_path / "perf").mkdir()
    (tmp_path / "perf" / "__init__.py").write_text("raise RuntimeError('not ours')", encoding="utf-8")
    done = _twinproof(tmp_path, "verify", "--impl", "mine", "--report", "r.json", "-q", "-k", "no_test_of_this_name")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "no requirement was run on mine; that proves nothing" in done.stderr
    content = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))
    assert content["implementation"]["name"] == "mine"
    assert content["requirements"] == []
    assert "report written to r.json" in done.stdout


def test_tests_are_named_and_no_lost_report_is_announced(tmp_path: Path) -> None:
    """Without --report nothing is kept: the output must name no file that is gone."""
    (tmp_path / "mine.py").write_text("", encoding="utf-8")
    place = "conformance.offload.test_values"
    done = _twinproof(tmp_path, "verify", "--impl", "mine", place, "-q", "-rs", "-k", "odd_sizes")
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"conformance/offload/test_values\.py:\d+", done.stdout), done.stdout
    assert "report written" not in done.stdout
    assert not (tmp_path / ".pytest_cache").exists()


@pytest.mark.parametrize("name", ["perf", "fastimpl"])
def test_shadowing_packages_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "site" / name).mkdir(parents=True)
    (tmp_path / "site" / name / "__init__.py").write_text("", encoding="utf-8")
    done = _twinproof(tmp_path, "info", path=str(tmp_path / "site"))
    assert done.returncode == 2
    assert f"package {name} is shadowed: got {tmp_path}/site/{name}, expected {_HOME}/{name}" in done.stderr


@pytest.mark.parametrize("words", [[], ["unknown"], ["info", "--unknown"], ["compare", "one"]])
def test_usage_errors(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    assert caught.value.code == 2
    assert "usage: twinproof" in capsys.readouterr().err


_WITHOUT_PYTEST = """
import sys
from importlib import util

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("pytest", "_pytest", "hypothesis"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
find = util.find_spec
util.find_spec = lambda name, *more: None if name in ("pytest", "hypothesis") else find(name, *more)
from conformance.harness.cli import main
raise SystemExit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("words", "code"),
    [(["--help"], 0), (["info"], 0), (["verify", "--help"], 0), (["verify"], 2), (["bench"], 2), (["planted"], 2)],
)
def test_without_pytest(tmp_path: Path, words: list[str], code: int) -> None:
    environment = {**os.environ, "PYTHONPATH": str(_HOME)}
    command = [sys.executable, "-c", _WITHOUT_PYTEST, *words]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    assert code == 0 or "pip install twinproof-conformance" in done.stderr


@pytest.mark.parametrize(("versions", "said"), [(("1.0", "1.0"), ""), (("2.0", "1.0"), "got twinproof 1.0, expected")])
def test_releases_that_differ_are_refused(tmp_path: Path, versions: tuple[str, str], said: str) -> None:
    """An installed suite beside a library of another release."""
    for name in ("conformance", "perf"):
        shutil.copytree(_HOME / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
    for name in ("twinproof", "refimpl", "fastimpl"):
        (tmp_path / name).symlink_to(_HOME / name)
    for name, version in zip(("twinproof_conformance", "twinproof"), versions, strict=True):
        (tmp_path / f"{name}-{version}.dist-info").mkdir()
        text = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
        (tmp_path / f"{name}-{version}.dist-info" / "METADATA").write_text(text, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-P", "-m", "conformance.harness.cli", "--help"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == (2 if said else 0), done.stderr
    assert said in done.stderr


def test_a_library_elsewhere_is_ours(tmp_path: Path) -> None:
    """The library is a distribution of its own: it may be installed in another folder than the suite."""
    for name in ("twinproof", "refimpl", "fastimpl"):
        shutil.copytree(_HOME / name, tmp_path / "site" / name, ignore=shutil.ignore_patterns("__pycache__", "csrc"))
    done = _twinproof(tmp_path, "--help", path=str(tmp_path / "site"))
    assert done.returncode == 0, done.stderr
    shutil.rmtree(tmp_path / "site" / "refimpl")
    (tmp_path / "bin" / "twinproof").unlink()
    (tmp_path / "bin").rmdir()
    done = _twinproof(tmp_path, "--help", path=str(tmp_path / "site"))
    assert done.returncode == 2
    assert f"package refimpl is shadowed: got {_HOME}/refimpl, expected {tmp_path}/site/refimpl" in done.stderr


@pytest.mark.night
def test_a_run_that_dies_is_not_judged_by_an_earlier_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tmp_path / "report.json"
    words = ["verify", "conformance.offload.test_values", "-k", "odd_sizes", "-q", "-p", "no:cacheprovider"]
    assert cli.main([*words, "--impl", "refimpl", "--report", str(kept)]) == 0
    (tmp_path / "dying.py").write_text("import os\n\nos._exit(1)\n", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))
    assert cli.main([*words, "--impl", "dying", "--report", str(kept)]) == 2
    assert not kept.exists()


def test_bench_is_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[list[str]] = []

    class Bench:
        @staticmethod
        def main(words: list[str]) -> int:
            called.append(words)
            return 7

    monkeypatch.setitem(sys.modules, "perf.harness.cli", Bench)
    assert cli.main(["bench", "checkpoint", "--short"]) == 7
    assert called == [["checkpoint", "--short"]]


@pytest.mark.parametrize("words", [["verify"], ["bench"], ["checkpoint", "verify", "x"], ["info"]])
def test_an_interrupt_ends_without_a_traceback(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> None:
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("the interrupt did not arrive")

    monkeypatch.setattr(cli, "_check_packages", interrupted)
    # A shell's background job starts with interrupts ignored, and Python leaves them so.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert cli.main(words) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == "twinproof: interrupted\n"


_STRIKER = """
import os, signal

def pytest_runtest_logfinish(nodeid, location):
    # Behind the first test: what a terminal sends reaches every process of the group.
    os.killpg(0, signal.SIGINT)
"""


def test_an_interrupted_run_keeps_its_report(tmp_path: Path) -> None:
    (tmp_path / "striker.py").write_text(_STRIKER, encoding="utf-8")
    words = ["verify", "--impl", "refimpl", "conformance.offload.test_values", "-k", "odd_sizes", "-q", "-p", "striker"]
    # A shell's background job starts with interrupts ignored.
    launch = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    launch += "from conformance.harness.cli import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", launch, *words, "--report", str(tmp_path / "r.json")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(_HOME)])},
        capture_output=True,
        text=True,
        check=False,
        start_new_session=True,
    )
    assert done.returncode == 130, done.stdout + done.stderr
    assert done.stderr.endswith("twinproof: interrupted\n")
    found = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))
    assert [each["outcome"] for each in found["requirements"]] == ["passed"]
    assert found["exit_status"] == 2


@pytest.mark.parametrize(
    ("words", "is_named"),
    [
        ("", False),
        ("-q conformance.kvstore.test_layout", True),
        ("conformance -k x", True),
        ("-k x conformance.kvstore.test_layout::test_x", True),
        ("--co conformance.kvstore", True),
        ("conformance.kvstor", False),
        ("conformances.kvstore", False),
        ("--twinproof-ledger conformance.toml", False),
        ("-k conformance", False),
        ("-p conformance.meta", False),
        ("test_mine.py", True),
        ("-q test_mine.py::test_x", True),
        ("--twinproof-profile=quick test_mine.py", True),
        ("--twinproof-ledger test_mine.py", False),
        ("--junitxml test_mine.py", False),
    ],
)
def test_what_is_run_is_what_was_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, is_named: bool
) -> None:
    """Without a test that is named, all four components; a value of an option names none."""
    (tmp_path / "test_mine.py").write_text("", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    components = ["conformance.kvstore", "conformance.pipeline", "conformance.offload", "conformance.checkpoint"]
    assert cli._targets(words.split()) == ([] if is_named else components)


@pytest.mark.parametrize("words", ["--twinproof-planted none", "--twinproof-planted=none"])
def test_planted_bugs_that_are_not_planted_are_refused(
    words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "_run_apart", lambda command: pytest.fail("it ran"))
    assert cli.main(["planted", "conformance.offload.test_values", *words.split()]) == 2
    assert "got --twinproof-planted none, expected only, own or all" in capsys.readouterr().err


def test_nobody_is_no_implementation(tmp_path: Path) -> None:
    """As of a variable of a CI job that is not set: the library's own implementation would be judged instead."""
    done = _twinproof(tmp_path, "verify", "--impl", "", "conformance.offload.test_values", "-k", "odd_sizes", "-q")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "--twinproof-impl '': no module of that name" in done.stderr


def test_planted_bugs_of_nobody_are_told(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("", encoding="utf-8")
    done = _twinproof(tmp_path, "planted", "--impl", "mine", "conformance.offload.test_values", "-q", "-k", "odd_sizes")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "no planted bug of these modules is one of mine" in done.stderr


def test_a_file_that_cannot_be_written_is_told_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """1 would say that the suite found something wrong."""
    monkeypatch.setattr(cli, "_run_apart", lambda command: pytest.fail("it ran"))
    (tmp_path / "file").write_text("", encoding="utf-8")
    for path, said in ((tmp_path, "Is a directory"), (tmp_path / "file" / "r.json", "File exists")):
        for command in (["verify", "--impl", "refimpl", "--report"], ["planted", "--report"]):
            assert cli.main([*command, str(path)]) == 2
            err = capsys.readouterr().err
            assert re.fullmatch(
                f"twinproof: a file cannot be used: got {said}, expected .*; where: {tmp_path}.*\n", err
            )
    kept, new = tmp_path / "kept.json", tmp_path / "new" / "r.json"
    kept.write_text("{}", encoding="utf-8")
    endings.check_writable(kept)
    endings.check_writable(new)
    assert kept.read_text(encoding="utf-8") == "{}"
    assert not new.exists()


def test_what_stops_a_command_ends_it_with_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def raising() -> None:
        raise RuntimeError("nobody thought of it")

    monkeypatch.setattr(cli, "_check_packages", raising)
    assert cli.main(["info"]) == 2
    assert capsys.readouterr().err.endswith("RuntimeError: nobody thought of it\n")


def test_output_that_nobody_reads_ends_without_a_traceback() -> None:
    """As of ``twinproof info | head -1``."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-P", "-m", "conformance.harness.cli", "info", "--impl", "refimpl"]
    environment = {**os.environ, "PYTHONPATH": str(_HOME)}
    done = subprocess.run(command, env=environment, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")
