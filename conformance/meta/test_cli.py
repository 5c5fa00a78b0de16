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

from conformance.harness import cli

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
