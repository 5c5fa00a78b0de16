"""A component of one's own: the package that is written for it, and what the suite says of it."""

from __future__ import annotations

import inspect
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from conformance.harness import Mismatch, cli, new_impl
from conformance.harness.failures import first_difference
from conformance.harness.requirements import STEMS

_HOME = Path(__file__).parents[2]
# Of each component: a test that depends on a verb to be written, and the first such verb.
_DEPENDS = {
    "kvstore": ("conformance.kvstore.test_values", "test_duplicates", "Rows.write"),
    "checkpoint": ("conformance.checkpoint.test_values", "test_special_floats", "Save.write"),
    "offload": ("conformance.offload.test_values", "test_groups", "Transfers.to_host"),
    "pipeline": ("conformance.pipeline.test_bags", "test_heavy_duplicates", "Lookup.pool"),
}


def _verify(folder: Path, implementation: str, module: str, name: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "conformance.harness.cli", "verify", "--impl", implementation, module, "-k", name]
    options = ["-q", "--tb=no", "--show-capture=no", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(folder), str(_HOME)))}
    done = subprocess.run(
        [*command, *options], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.night
@pytest.mark.parametrize("stem", STEMS)
def test_a_new_package_is_short_and_fails_for_its_verbs(stem: str, tmp_path: Path) -> None:
    words = ["new-impl", "mine", "--component", stem, "--into", str(tmp_path)]
    assert cli.main(words) == 0
    text = "".join(path.read_text(encoding="utf-8") for path in sorted((tmp_path / "mine").iterdir()))
    assert len(text.splitlines()) <= 60
    verbs = re.findall(r'NotImplementedError\("(\w+\.\w+):', text)
    assert len(verbs) >= 2
    module, name, verb = _DEPENDS[stem]
    code, output = _verify(tmp_path, "mine", module, name)
    # Names that are not written are the reference's: nothing is missing.
    assert "missing:" not in output
    assert code == 1, output
    assert "failures by their first difference" in output
    assert f"NotImplementedError: {verb}" in output
    assert cli.main(words) == 2, "a second time it is refused"


def _parameters(function: Callable[..., object]) -> list[tuple[str, object]]:
    return [(name, each.kind) for name, each in inspect.signature(function).parameters.items()]


@pytest.mark.parametrize("stem", STEMS)
def test_verbs_take_what_those_of_the_reference_take(stem: str, tmp_path: Path) -> None:
    assert cli.main(["new-impl", "mine", "--component", stem, "--into", str(tmp_path)]) == 0
    scope = runpy.run_path(str(tmp_path / "mine" / f"{stem}.py"), run_name="mine")
    found = {
        f"{each.__name__}.{name}": (function, getattr(each.__mro__[1], name))
        for each in scope.values()
        if isinstance(each, type) and each.__module__ == "mine"
        for name, function in vars(each).items()
        if inspect.isfunction(function) and not name.startswith("_")
    }
    assert len(found) >= 2
    for verb, (mine, reference) in found.items():
        assert _parameters(mine) == _parameters(reference), verb


def test_names_that_cannot_be_imported_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # A package with the name of torch, of the library or of a module of Python would be found in its place.
    for name in ("my-store", "class", "1st", "torch", "fastimpl", "queue", "sys"):
        assert cli.main(["new-impl", name, "--component", "kvstore", "--into", str(tmp_path)]) == 2
        assert name in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_every_component_has_a_template() -> None:
    assert sorted(new_impl.TEMPLATES) == sorted(STEMS)


def test_missing_names_are_listed_at_once(toy: Callable[..., pytest.RunResult]) -> None:
    tests = """
    @requirement("OPT-001", "MUST exist")
    def test_there(offload):
        offload.MasterWeights
    """
    result = toy(tests, impl="class offload:\n    MasterWeights = object")
    names = "missing: OffloadStats, OptimizerStateOffloader, Residency"
    result.stdout.fnmatch_lines([f"twinproof: offload provides 1 of 4 names; {names}"])
    result.assert_outcomes(passed=1)
    whole = "class offload:\n    MasterWeights = OffloadStats = OptimizerStateOffloader = Residency = object"
    assert "provides" not in toy(tests, impl=whole).stdout.str()


def test_failures_of_one_cause_are_one_cluster(toy: Callable[..., pytest.RunResult]) -> None:
    tests = """
    @requirement("OPT-001", "MUST be equal")
    @pytest.mark.parametrize("value", [1, 2, 3])
    def test_values(value):
        raise Mismatch(f"{value} of 9 elements differ (torch.float32, shape ({value},))", got=value, expected=0)

    @requirement("OPT-002", "MUST be equal too")
    def test_more():
        raise Mismatch("7 of 8 elements differ", got=7, expected=0)

    @requirement("OPT-003", "MUST work")
    def test_other():
        raise ValueError("not 5")
    """
    lines = toy(tests).stdout.str().splitlines()
    first = lines.index("twinproof: failures by their first difference")
    assert lines[first + 1].strip() == "requirements 2, tests 4: # of # elements differ  [OPT-001, OPT-002]"
    assert lines[first + 2].strip() == "requirements 1, tests 1: ValueError: not #  [OPT-003]"


def test_what_a_difference_is() -> None:
    from_rank = RuntimeError("rank 1 failed:\nTraceback\n  File x, line 3\npkg.errors.PlanError: gaps; got: 3\nmore")
    grouped = ValueError("outer")
    vars(grouped)["exceptions"] = (Mismatch("a bound is exceeded", got=1, expected=2),)
    assert first_difference(None) == ""
    assert first_difference(KeyError("x17")) == "KeyError: 'x#'"
    assert first_difference(from_rank) == "pkg.errors.PlanError: gaps; got: #"
    assert first_difference(grouped) == "a bound is exceeded"
