"""The plugin does what a requirement asks for, says enough when one fails, and nothing to anybody else."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from conformance.harness.failures import _program

_HOME = Path(__file__).parents[2]


def test_absent_components_and_names_skip_by_name(toy: Callable[..., pytest.RunResult]) -> None:
    tests = """
    @requirement("KV-001", "MUST exist")
    def test_component(kvstore):
        kvstore.KVStore

    @requirement("CKPT-001", "MUST exist")
    def test_name(checkpoint):
        checkpoint.save_file

    @requirement("CKPT-002", "MUST exist")
    def test_typo(checkpoint):
        checkpoint.save_flie
    """
    reference = "import sys, types\n"
    reference += "module = sys.modules['refimpl.checkpoint'] = types.ModuleType('refimpl.checkpoint')\n"
    reference += "module.__all__ = ['save_file']\n"
    result = toy(tests, "-rs", impl=reference + "class checkpoint: pass")
    result.assert_outcomes(skipped=2, failed=1)
    result.stdout.fnmatch_lines_random(
        [
            "*implementation toy.impl has no kvstore*",
            "*implementation toy.impl has no checkpoint.save_file*",
            "*AttributeError*save_flie*",
        ]
    )


@pytest.mark.parametrize(
    ("declared", "skipped"),
    [("", 1), ("CAPABILITIES = frozenset({'cuda'})", 1), ("checkpoint.CAPABILITIES = {'cuda', 'mmap'}", 0)],
)
def test_capabilities_are_data(toy: Callable[..., pytest.RunResult], declared: str, skipped: int) -> None:
    tests = """
    @requirement("CKPT-001", "MUST map", needs=("cuda", "mmap"))
    def test_mapped(checkpoint):
        pass
    """
    result = toy(tests, "-rs", impl=f"class checkpoint: pass\n{declared}")
    result.assert_outcomes(passed=1 - skipped, skipped=skipped)
    if skipped:
        result.stdout.fnmatch_lines(["*implementation toy.impl lacks *mmap*"])


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        ("CAPABILITIES = 'mmap'", "CAPABILITIES of toy.impl, checkpoint: got 'mmap', expected a set of words"),
        ("checkpoint.CAPABILITIES = 3", "CAPABILITIES of toy.impl, checkpoint: got 3, expected a set of words"),
        ("CAPABILITIES = {'mmap', 4}", "CAPABILITIES of toy.impl, checkpoint: got {*}, expected a set of words"),
        ("CAPABILITIES = ['stream', 'mmap']", "*checkpoint: words that*know: got stream, expected such as streams*"),
        ("CAPABILITIES = {'q7'}", "*checkpoint: words that*know: got q7, expected of bag_kernels, *, streams*"),
    ],
)
def test_capabilities_that_the_suite_does_not_know_are_told(
    toy: Callable[..., pytest.RunResult], declared: str, said: str
) -> None:
    """What they stand for would be skipped, as if nothing had been declared."""
    tests = """
    @requirement("CKPT-001", "MUST map", needs=("mmap",))
    def test_mapped(checkpoint):
        pass
    """
    result = toy(tests, impl=f"class checkpoint: pass\n{declared}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*{said}"])


def test_on_another_device_run_the_tests_that_take_one(toy: Callable[..., pytest.RunResult]) -> None:
    tests = """
    @requirement("OPT-001", "MUST be there")
    def test_there(device):
        import torch
        assert_equal(torch.zeros(1, device=device).device.type, "pretend", where="place")

    @requirement("OPT-002", "MUST run")
    def test_here():
        pass
    """
    toy(tests, "--twinproof-device", "pretend").assert_outcomes(passed=1, deselected=1)
    result = toy(tests)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*expected: 'pretend'*"])
    wrong = tests.replace('"pretend"', '"cpu"')
    toy(wrong, "--twinproof-device", "pretend").stdout.fnmatch_lines(["*--twinproof-device pretend*"])


def test_on_the_pretend_device_all_tests_of_pipeline_and_checkpoint_run(toy: Callable[..., pytest.RunResult]) -> None:
    tests = """
    @requirement("PIPE-001", "MUST be put there")
    def test_modules(pipeline, rank_pool):
        assert_equal((pipeline.device, rank_pool.run(place, 1)), ("pretend", ["pretend"]), where="place")

    @requirement("CKPT-001", "MUST be looked up there, in the memory that it has")
    def test_lookups(checkpoint):
        import torch
        from torch.distributed.checkpoint import DefaultSavePlanner
        from torch.distributed.checkpoint.metadata import MetadataIndex

        planner, value = DefaultSavePlanner(), torch.zeros(3)
        planner.set_up_planner({"w": value}, is_coordinator=True)
        found = planner.lookup_object(MetadataIndex("w"))
        assert_equal(found.device.type, "pretend", where="place")
        found.fill_(2)
        assert_equal(value.tolist(), [2] * 3, where="memory")

    def place(rank):
        return rank.component("pipeline").device
    """
    toy(tests, "--twinproof-device", "pretend", impl="class pipeline: pass\nclass checkpoint: pass").assert_outcomes(
        passed=2
    )


def test_a_failure_says_enough(toy: Callable[..., pytest.RunResult]) -> None:
    tests = """
    @requirement("CKPT-005", "MUST stay small")
    @given(size=st.integers(0, 1000))
    def test_small(impl, size):
        assert_equal(size < 100, True, where="size")
    """
    result = toy(tests, "--twinproof-profile", "ci")
    result.assert_outcomes(failed=1)
    lines = [
        "*- twinproof -*",
        "requirement  CKPT-005: MUST stay small",
        "difference   values differ",
        "got          False",
        "expected     True",
        "where        size",
        "*size=100,",
        "reproduce    python -m pytest -p * --pyargs toy.test_toy::test_small --twinproof-impl toy.impl *",
        "environment  toy.impl *; python *torch *",
    ]
    result.stdout.fnmatch_lines(lines)


def test_a_program_is_without_hypothesis_explanation() -> None:
    error = AssertionError("wrong")
    # Before Python 3.11 errors have no add_note, and Hypothesis sets the attribute.
    error.__dict__["__notes__"] = [
        "Falsifying example: f(",
        "    x=0,",
        ")",
        "Explanation:",
        "    These lines were run:",
        "        a.py:1",
        "Seed: 5",
    ]
    assert _program(error) == "Falsifying example: f(\n    x=0,\n)\nSeed: 5"


@pytest.mark.parametrize(("options", "is_shown"), [((), False), (("--log-level=DEBUG",), True)])
def test_a_failure_does_not_drown_in_logs(
    toy: Callable[..., pytest.RunResult], options: tuple[str, ...], is_shown: bool
) -> None:
    """torch.distributed.checkpoint sets its logger to DEBUG, whatever the root's level is."""
    tests = """
    import logging

    @requirement("CKPT-001", "MUST be right")
    def test_wrong():
        logger = logging.getLogger("torch.distributed.checkpoint.of_a_test")
        logger.setLevel(logging.DEBUG)
        logger.debug("noise of a save")
        logger.warning("what matters")
        assert_equal(1, 2, where="here")
    """
    result = toy(tests, *options)
    result.assert_outcomes(failed=1)
    assert any(line.startswith("DEBUG ") for line in result.outlines) == is_shown
    result.stdout.fnmatch_lines(["*what matters*"])


def test_the_header_says_what_runs(toy: Callable[..., pytest.RunResult]) -> None:
    result = toy("@requirement('CKPT-001', 'MUST')\ndef test_it(impl): pass")
    result.stdout.fnmatch_lines(["twinproof: toy.impl *", "twinproof: profile ci, seed derandomised, *ledger empty"])
    result = toy("@requirement('CKPT-001', 'MUST')\ndef test_it(impl): pass", "--twinproof-profile=nightly")
    result.stdout.fnmatch_lines(["twinproof: profile nightly, seed [0-9]*"])


@pytest.mark.parametrize(("profile", "count"), [("quick", 5), ("half", 10), ("dev", 5), ("ci", 20), ("nightly", 200)])
def test_profiles_scale_examples(toy: Callable[..., pytest.RunResult], profile: str, count: int) -> None:
    tests = """
    calls = []

    @requirement("CKPT-001", "MUST count")
    @examples(20)
    @given(st.integers(), st.integers())
    def test_count(a, b):
        calls.append(a)

    def test_counted():
        print("examples:", len(calls))
    """
    toy(tests, "--twinproof-profile", profile, "-s").stdout.fnmatch_lines([f"*examples: {count}*"])


@pytest.mark.parametrize(
    ("left", "said"),
    [
        ("gc.disable()", "garbage collector"),
        ("torch.set_grad_enabled(False)", "gradients"),
        ("torch.set_default_dtype(torch.float64)", "default dtype"),
        ("torch.use_deterministic_algorithms(True)", "deterministic algorithms"),
        ("torch.set_num_threads(torch.get_num_threads() + 1)", "threads of an operator"),
        ("threading.Thread(target=stopped.wait, name='checkpoint-read_0').start()", "threads of ours"),
        ("opened.append(open(tmp_path / 'left', 'w'))", "/left"),
    ],
)
def test_the_process_is_left_as_it_was(toy: Callable[..., pytest.RunResult], left: str, said: str) -> None:
    tests = f"""
    import gc, threading, torch

    stopped, opened = threading.Event(), []

    @requirement("KV-001", "MUST hold")
    def test_leaves(tmp_path):
        {left}

    @requirement("KV-002", "MUST hold")
    def test_next(): pass

    def test_stop():
        stopped.set()
        [each.close() for each in opened]
    """
    result = toy(tests)
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines([f"*{said}'*", "where* behind the test*"])


def test_one_test_per_id(toy: Callable[..., pytest.RunResult]) -> None:
    tests = """
    @requirement("KV-001", "MUST hold")
    def test_a(): pass

    @requirement("KV-001", "MUST hold")
    def test_b(): pass
    """
    result = toy(tests)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*KV-001 is proven twice: toy.test_toy::test_a and toy.test_toy::test_b*"])


def test_an_unknown_implementation_is_a_usage_error(toy: Callable[..., pytest.RunResult]) -> None:
    result = toy("@requirement('KV-001', 'MUST')\ndef test_a(): pass", "--twinproof-impl", "no.such.module")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["*--twinproof-impl no.such.module: no module of that name; registered implementations: *"]
    )


_ONE = "@requirement('CKPT-001', 'MUST')\ndef test_it(impl): pass"


def test_an_implementation_that_cannot_be_imported_is_a_usage_error(toy: Callable[..., pytest.RunResult]) -> None:
    result = toy(_ONE, impl="import math\nraise RuntimeError('no gpu')")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    said = "toy.impl cannot be imported: got RuntimeError: no gpu, expected an implementation; where: *impl.py:2"
    result.stderr.fnmatch_lines([f"*{said}"])
    for name in (".", "../x"):
        result = toy(_ONE, "--twinproof-impl", name)
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        result.stderr.fnmatch_lines([f"*--twinproof-impl {name}: no module of that name*"])


@pytest.mark.parametrize("at", ["__init__", "checkpoint"])
def test_a_part_that_cannot_be_imported_is_a_usage_error(
    toy: Callable[..., pytest.RunResult], pytester: pytest.Pytester, at: str
) -> None:
    package = pytester.mkpydir("parts")
    (package / f"{at}.py").write_text("import of_nobody\n", encoding="utf-8")
    kept = pytester.path / "r.json"
    result = toy(_ONE, "--twinproof-impl", "parts", "--twinproof-report", str(kept))
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    name = "parts" if at == "__init__" else "parts.checkpoint"
    said = f"{name} cannot be imported: got ModuleNotFoundError: No module named 'of_nobody'*{at}.py:1"
    result.stderr.fnmatch_lines([f"*{said}"])


@pytest.mark.parametrize(
    ("profile", "seconds", "said"),
    [
        ("thousand", "-5", "got -5, expected a number above 0"),
        ("thousand", "nan", "got nan, expected a number above 0"),
        ("thousand", "inf", "got inf, expected a number above 0"),
        ("quick", "5", "got the profile quick, expected thousand*"),
    ],
)
def test_seconds_without_effect_are_a_usage_error(
    toy: Callable[..., pytest.RunResult], profile: str, seconds: str, said: str
) -> None:
    result = toy(_ONE, "--twinproof-profile", profile, f"--twinproof-seconds={seconds}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*--twinproof-seconds: {said}"])


def test_a_report_that_cannot_be_written_is_a_usage_error(toy: Callable[..., pytest.RunResult], tmp_path: Path) -> None:
    result = toy(_ONE, "--twinproof-report", str(tmp_path))
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--twinproof-report: got *Is a directory*, expected a file that can be written*"])
    assert "passed" not in result.stdout.str()


def _pytest(folder: Path, *arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{_HOME}:{path}" if path else str(_HOME)}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_inert_for_everybody_else(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_theirs="""
        import sys
        from hypothesis import given, settings, strategies as st

        default = settings.default

        @given(st.integers())
        def test_theirs(request, number):
            assert settings.default is default
            assert settings.get_current_profile_name() == "default"
            assert "torch" not in sys.modules
            assert not {"impl", "rank_pool", "planted_bug"} & set(request.fixturenames)
        """
    )
    done = _pytest(pytester.path, "-p", "conformance.harness.plugin", "-p", "no:benchmark")
    assert "1 passed" in done.stdout, done.stdout
    assert "twinproof" not in done.stdout


def test_not_loaded_by_an_installation(pytester: pytest.Pytester) -> None:
    """Whoever has it installed and did not ask for it has neither its options nor its imports."""
    registered = [point.value for point in entry_points(group="pytest11")]
    assert not [value for value in registered if value.startswith("conformance")]
    pytester.makepyfile(
        test_theirs="""
        import sys

        def test_theirs(request):
            assert not [name for name in sys.modules if name.startswith("conformance")]
            assert request.config.getoption("--report") == "theirs"
        """
    )
    options = ("impl", "report", "profile", "ledger", "planted")
    lines = [f"    parser.addoption('--{name}', default='theirs')" for name in options]
    pytester.makeconftest("def pytest_addoption(parser):\n" + "\n".join(lines))
    done = _pytest(pytester.path)
    assert "1 passed" in done.stdout, done.stdout + done.stderr


def test_options_do_not_collide(pytester: pytest.Pytester) -> None:
    """Every short name belongs to the host, also where the plugin is loaded."""
    options = ("impl", "report", "profile", "ledger", "planted")
    lines = [f"    parser.addoption('--{name}', default='theirs')" for name in options]
    pytester.makeconftest("def pytest_addoption(parser):\n" + "\n".join(lines))
    pytester.makepyfile(
        test_it="""
        from conformance.harness import requirement
        @requirement("KV-001", "MUST")
        def test_it(request):
            assert request.config.getoption("--profile") == "mine"
            assert request.config.getoption("--twinproof-profile") == "dev"
        """
    )
    arguments = ("--profile", "mine", "--twinproof-profile", "dev", "--twinproof-impl", "refimpl")
    done = _pytest(pytester.path, "-p", "conformance.harness.plugin", *arguments)
    assert "1 passed" in done.stdout, done.stdout + done.stderr


_SOME = ("checkpoint.test_layout", "offload.test_values", "pipeline.test_bags")


@pytest.mark.parametrize(
    "modules", [_SOME, pytest.param(("checkpoint", "offload", "pipeline"), marks=pytest.mark.night, id="whole suite")]
)
def test_what_is_lacked_is_skipped_by_name(pytester: pytest.Pytester, modules: tuple[str, ...]) -> None:
    """Two names of one component, nothing declared: whatever else the suite has is a skip that says what is lacking."""
    package = pytester.mkpydir("mine")
    (package / "kvstore.py").write_text("from refimpl.kvstore import KVStore, RowLayout\n", encoding="utf-8")
    targets = [f"conformance.{name}" for name in (*modules, "kvstore.test_ops", "kvstore.test_allocation")]
    options = ("-p", "conformance.harness.plugin", "--twinproof-impl", "mine", "-rs")
    done = _pytest(pytester.path, *options, "--pyargs", *targets, path=pytester.path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "failed" not in done.stdout.splitlines()[-1]
    assert "error" not in done.stdout.splitlines()[-1]
    for reason in ("mine has no checkpoint", "mine lacks injected_allocation_failure", "mine lacks operators"):
        assert reason in done.stdout, done.stdout


def test_the_suite_says_what_it_misses(pytester: pytest.Pytester) -> None:
    """Without the plugin the suite's tests have no fixtures: one sentence says so, not an error for each test."""
    done = _pytest(pytester.path, "--pyargs", "conformance.offload.test_gradients")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR, done.stdout + done.stderr
    said = done.stdout + done.stderr
    assert "-p conformance.harness.plugin" in said
    assert "twinproof verify" in said
