"""``action.yml``, carried out as a runner would: each step's own lines, with pip's installations noted and not done."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
ACTION = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
FEW = "conformance.offload.test_values -k odd_sizes"
# Notes what pip would install; everything else is the real Python's.
_PYTHON = """#!/bin/sh
if [ "$1 $2 $3" = "-m pip install" ]; then shift 3; echo "$@" >> "$NOTED"; exit 0; fi
exec {python} "$@"
"""


@dataclass
class Runner:
    """What a runner knows of a job: a workspace, and what its steps leave behind."""

    folder: Path
    inputs: dict[str, str]
    outputs: dict[str, str] = field(default_factory=dict)
    used: list[str] = field(default_factory=list)
    summary: str = ""
    installed: str = ""
    failed: str = ""

    @property
    def workspace(self) -> Path:
        """The checkout of whoever uses the action."""
        return self.folder / "workspace"

    def value(self, text: str) -> str:
        """The text with each expression replaced; a name that a runner does not know is a KeyError."""
        known = {f"inputs.{name}": text for name, text in self.inputs.items()}
        known |= {"github.action_path": str(ROOT), "runner.os": "Linux", **self.outputs}
        return re.sub(r"\$\{\{ *([\w.]+) *\}\}", lambda found: known[found[1]], str(text))

    def carry_out(self) -> None:
        """Every step in order; after a failure only those that always run."""
        for step in ACTION["runs"]["steps"]:
            assert step.get("if", "always()") == "always()", "this runner knows no other condition"
            if self.failed and "if" not in step:
                continue
            if "uses" in step:
                self.used.append(step["uses"] + " " + " ".join(map(self.value, step["with"].values())))
            else:
                self._run(step)

    def _run(self, step: dict[str, Any]) -> None:
        assert step["shell"] == "bash"
        files = {name: self.folder / f"{step['id']}.{name}" for name in ("outputs", "summary", "lines", "noted")}
        for path in files.values():
            path.touch()
        files["lines"].write_text(step["run"], encoding="utf-8")
        environment = {
            **os.environ,
            "PATH": f"{self.folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        environment |= {"GITHUB_OUTPUT": str(files["outputs"]), "GITHUB_STEP_SUMMARY": str(files["summary"])}
        environment |= {"NOTED": str(files["noted"]), "PYTHONDONTWRITEBYTECODE": "1"}
        environment |= {name: self.value(text) for name, text in step.get("env", {}).items()}
        command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(files["lines"])]
        done = subprocess.run(command, cwd=self.workspace, env=environment, capture_output=True, text=True, check=False)
        for line in files["outputs"].read_text(encoding="utf-8").splitlines():
            name, _, text = line.partition("=")
            self.outputs[f"steps.{step['id']}.outputs.{name}"] = text
        self.summary += files["summary"].read_text(encoding="utf-8")
        self.installed += files["noted"].read_text(encoding="utf-8")
        if done.returncode != 0:
            self.failed = f"{step['id']}: {done.returncode}\n{done.stdout}{done.stderr}"


def run(tmp_path: Path, **inputs: str) -> Runner:
    """A job that uses the action; a workspace with a package ``mine``, which lacks verbs of the row store."""
    defaults = {name: given.get("default", "") for name, given in ACTION["inputs"].items()}
    assert inputs.keys() <= defaults.keys()
    runner = Runner(tmp_path, defaults | inputs)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").write_text(_PYTHON.format(python=sys.executable), encoding="utf-8")
    (tmp_path / "bin/python").chmod(0o755)
    runner.workspace.mkdir()
    made = [sys.executable, "-m", "conformance.harness.cli", "new-impl", "mine", "--component", "kvstore"]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    subprocess.run(made, cwd=runner.workspace, env={**os.environ, "PYTHONPATH": path}, check=True, capture_output=True)
    runner.carry_out()
    return runner


@pytest.mark.night
def test_a_package_that_holds(tmp_path: Path) -> None:
    job = run(tmp_path, impl="refimpl", tests=FEW, profile="quick", torch="torch==2.13.0")
    assert job.failed == ""
    assert job.installed.splitlines() == ["torch==2.13.0", f"{ROOT} {ROOT}/conformance", "."]
    assert job.summary.startswith("# Conformance of refimpl")
    assert "**passed**: " in job.summary
    assert job.value(ACTION["outputs"]["verdict"]["value"]) == "passed"
    folder = job.workspace / job.inputs["report"]
    assert (job.workspace / job.value(ACTION["outputs"]["page"]["value"])) == folder / "report.html"
    assert "<!doctype html>" in (folder / "report.html").read_text(encoding="utf-8")
    assert ElementTree.parse(folder / "junit.xml").getroot().tag == "testsuites"
    badge = ElementTree.parse(folder / "badge.svg").getroot()
    assert badge.attrib["aria-label"].startswith("twinproof: passed, ")
    cache, keep = job.used
    assert cache.startswith("actions/cache@")
    assert re.search(r" twinproof-Linux-3\.\d+\.\d+-[0-9a-f]{16}$", cache)
    assert keep.endswith(f"{job.inputs['artifact']} {job.inputs['report']} ignore")


@pytest.mark.night
def test_a_package_that_fails(tmp_path: Path) -> None:
    job = run(tmp_path, impl="mine", tests="conformance.kvstore.test_values -k duplicates", profile="quick")
    assert job.failed.startswith("verify: 1\n"), job.failed
    assert "**failed**: " in job.summary
    assert job.value(ACTION["outputs"]["verdict"]["value"]) == "failed"
    # The report is kept all the same.
    assert job.used[-1].startswith("actions/upload-artifact@")
    assert "failed" in (job.workspace / job.inputs["report"] / "badge.svg").read_text(encoding="utf-8")


@pytest.mark.night
def test_a_package_that_is_not_there(tmp_path: Path) -> None:
    job = run(tmp_path, impl="no_such_package", tests=FEW, profile="quick")
    assert job.failed.startswith("verify: 2\n"), job.failed
    assert job.value(ACTION["outputs"]["verdict"]["value"]) in ("no report", "not finished")
    assert "not finished" in job.summary or "no report" in job.summary


@pytest.mark.night
def test_a_ledger_is_handed_on(tmp_path: Path) -> None:
    job = run(tmp_path, impl="refimpl", tests=FEW, profile="quick", ledger="none.toml")
    assert job.failed.startswith("verify: 2\n"), job.failed
    assert "none.toml" in job.failed


@pytest.mark.night
def test_by_default_the_four_components_run(tmp_path: Path) -> None:
    job = run(tmp_path, impl="refimpl", profile="quick", tests=ACTION["inputs"]["tests"]["default"] + "--collect-only")
    found = json.loads((job.workspace / job.inputs["report"] / "report.json").read_text(encoding="utf-8"))
    modules = {entry["test"].split(".")[1] for entry in found["requirements"]}
    assert modules == {"checkpoint", "kvstore", "offload", "pipeline"}


def test_installing_ends_the_job(tmp_path: Path) -> None:
    job = run(tmp_path, impl="refimpl", tests=FEW, install="false")
    assert job.failed.startswith("install: 1\n")
    assert "steps.verify.outputs.verdict" not in job.outputs


@pytest.mark.parametrize("name", ACTION["inputs"])
def test_each_input_does_something(name: str) -> None:
    given = [
        text for step in ACTION["runs"]["steps"] for text in {**step.get("env", {}), **step.get("with", {})}.values()
    ]
    assert any(f"inputs.{name} " in str(text) for text in given)
    assert ACTION["inputs"][name].get("required") or "default" in ACTION["inputs"][name]
