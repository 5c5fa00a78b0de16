"""The ledger is strict: everything that could silently waive more, or nothing, is an error with its place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from conformance.harness.ledger import LedgerError, builtin_ledger, read_ledger, read_ledgers

_ENTRY = """
[[deviation]]
requirement = "CKPT-001"
kind = "xfail"
reason = "adds one"
tracker = "#7"
since = 2026-01-31
"""
_TESTS = """
@requirement("CKPT-001", "MUST double")
@pytest.mark.parametrize("n", [0, 1])
def test_double(impl, n):
    assert_equal(impl.checkpoint.double(n), 2 * n + n)

@requirement("CKPT-002", "MUST sort")
def test_sort(impl):
    assert_equal(impl.checkpoint.sort([2, 1]), [1, 2])

@requirement("CKPT-003", "MUST widen")
def test_factor(tolerance_factor):
    assert_equal(tolerance_factor, 3.0)
"""


def _write(path: Path, *entries: str, version: str = "version = 1") -> Path:
    path.write_text("\n".join([version, *entries]), encoding="utf-8")
    return path


def test_a_right_ledger(tmp_path: Path) -> None:
    scoped = _ENTRY + "scope = { dtype = ['int8', 'int16'], n = 1 }"
    (entry,) = read_ledger(_write(tmp_path / "l.toml", scoped))
    assert (entry.requirement, entry.kind, entry.tracker) == ("CKPT-001", "xfail", "#7")
    assert entry.covers({"dtype": torch.int8, "n": 1, "more": 0})
    assert not entry.covers({"dtype": torch.int32, "n": 1})
    assert not entry.covers({"dtype": torch.int8})
    assert read_ledger(_write(tmp_path / "empty.toml")) == ()


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (_ENTRY + "owner = 'me'", r"unknown keys \['owner'\]"),
        (_ENTRY.replace('tracker = "#7"', ""), r"missing keys \['tracker'\]"),
        (_ENTRY.replace('"#7"', '""'), "tracker is empty"),
        (_ENTRY.replace('"#7"', "7"), "tracker is 7; expected str"),
        (_ENTRY.replace("2026-01-31", '"2026-01-31"'), "since is '2026-01-31'; expected date"),
        (_ENTRY.replace("2026-01-31", "2026-01-31T00:00:00"), "since is .* expected date"),
        (_ENTRY.replace('"xfail"', '"ignore"'), "kind is 'ignore'; expected one of"),
        (_ENTRY.replace('"xfail"', '"tolerance"'), "finite factor > 1 belongs to kind tolerance"),
        (_ENTRY.replace('"xfail"', '"tolerance"') + "factor = inf", "finite factor > 1"),
        (_ENTRY.replace('"xfail"', '"tolerance"') + "factor = nan", "finite factor > 1"),
        (_ENTRY + "factor = 3", "factor > 1 belongs to kind tolerance"),
        (_ENTRY + "scope = 'cuda'", "scope is 'cuda'; expected dict"),
        (_ENTRY + "scope = { dtype = [] }", r"scope.dtype is \[\]"),
        (_ENTRY + _ENTRY, r"deviation 2 \(CKPT-001\): repeats CKPT-001 of .*deviation 1"),
        ("deviation = 3", "deviation is a int"),
        ("[deviations]", r"unknown keys \['deviations'\]"),
        ("[[deviation", r"l\.toml: .*array"),
    ],
)
def test_wrong_ledgers(tmp_path: Path, entry: str, message: str) -> None:
    with pytest.raises(LedgerError, match=message) as caught:
        read_ledger(_write(tmp_path / "l.toml", entry))
    assert "l.toml" in str(caught.value)


@pytest.mark.parametrize("version", ["", "version = 2", "version = '1'", "version = true"])
def test_wrong_versions(tmp_path: Path, version: str) -> None:
    with pytest.raises(LedgerError, match="version is"):
        read_ledger(_write(tmp_path / "l.toml", version=version))


def test_unreadable_and_repeated_files(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match=r"absent\.toml"):
        read_ledger(tmp_path / "absent.toml")
    path = _write(tmp_path / "l.toml", _ENTRY)
    with pytest.raises(LedgerError, match="repeats"):
        read_ledgers([path, path])


def test_adapters_bring_their_ledger_by_name() -> None:
    peers = Path(__file__).parent.parent / "peers"
    for path in peers.glob("*.toml"):
        assert builtin_ledger(f"conformance.peers.{path.stem}") == (path,)
        for package in ("elsewhere.", "conformance.", ""):
            assert builtin_ledger(f"{package}{path.stem}") == ()
        read_ledger(path)


def test_kinds_change_outcomes(toy: Callable[..., pytest.RunResult], tmp_path: Path) -> None:
    entries = [
        _ENTRY + "scope = { n = 1 }",
        _ENTRY.replace("001", "002").replace("xfail", "quarantine"),
        _ENTRY.replace("001", "003").replace("xfail", "tolerance") + "factor = 3",
    ]
    ledger = _write(tmp_path / "l.toml", *entries)
    result = toy(_TESTS, "--twinproof-ledger", str(ledger), "-rsx")
    result.assert_outcomes(passed=2, skipped=1, xfailed=1)
    result.stdout.fnmatch_lines(["*quarantine: adds one (#7, since 2026-01-31)*", "*xfail: adds one (#7*"])


def test_an_xfail_that_passes_fails(toy: Callable[..., pytest.RunResult], tmp_path: Path) -> None:
    # n = 0 doubles and triples to the same: that case passes by luck, and the entry has no scope that leaves it out.
    ledger = _write(tmp_path / "l.toml", _ENTRY)
    result = toy(_TESTS, "--twinproof-ledger", str(ledger), "-k", "double")
    result.assert_outcomes(failed=1, xfailed=1, deselected=2)
    result.stdout.fnmatch_lines(
        [
            "*XPASS(strict)*",
            "difference   an entry of a ledger says that this fails; it passes by now: take the entry out",
            "got          passed",
            "expected     xfail: adds one (#7, since 2026-01-31)",
            f"where        {ledger}*",
            "*requirements 1, tests 1: an entry of a ledger says that this fails*CKPT-001*",
        ]
    )


@pytest.mark.parametrize("change", [("001", "099"), ("2026-01-31", "2026-01-31\nscope = { n = 5 }")])
def test_an_entry_that_matches_nothing(
    toy: Callable[..., pytest.RunResult], tmp_path: Path, change: tuple[str, str]
) -> None:
    ledger = _write(tmp_path / "l.toml", _ENTRY.replace(*change))
    result = toy(_TESTS, "--twinproof-ledger", str(ledger))
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*deviation 1 (CKPT-0?[19]): matches no test*"])


def test_a_tolerance_of_what_has_none_is_an_error(toy: Callable[..., pytest.RunResult], tmp_path: Path) -> None:
    """It would waive nothing, in silence."""
    entry = _ENTRY.replace("xfail", "tolerance") + "factor = 3"
    result = toy(_TESTS, "--twinproof-ledger", str(_write(tmp_path / "l.toml", entry)))
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*deviation 1 (CKPT-001): widens nothing; its requirement has no derived tolerance*"])


_MACHINE = """
from pathlib import Path
from hypothesis.stateful import RuleBasedStateMachine, rule

@requirement("CKPT-001", "MUST agree after any program")
def test_programs(impl):
    class Machine(RuleBasedStateMachine):
        failures = 0

        @rule(x=st.integers())
        def step(self, x):
            Machine.failures += 1
            assert_equal(impl.checkpoint.double(x), None)

    try:
        run_machine(Machine)
    finally:
        Path("failures").write_text(str(Machine.failures))
"""


@pytest.mark.parametrize("expected", [False, True])
def test_a_machine_that_is_expected_to_fail_ends_at_its_first_failure(
    toy: Callable[..., pytest.RunResult], pytester: pytest.Pytester, tmp_path: Path, expected: bool
) -> None:
    ledger = _write(tmp_path / "l.toml", *([_ENTRY] if expected else []))
    result = toy(_MACHINE, "--twinproof-ledger", str(ledger))
    result.assert_outcomes(**{"xfailed" if expected else "failed": 1})
    # Once to find it and once to report it; otherwise also to shrink it.
    assert (int((pytester.path / "failures").read_text()) <= 2) == expected


def test_a_malformed_ledger_stops_the_run(toy: Callable[..., pytest.RunResult], tmp_path: Path) -> None:
    result = toy(_TESTS, "--twinproof-ledger", str(_write(tmp_path / "l.toml", version="")))
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*ledger: *version is None*"])
