"""The inversion: only a comparison kills, whatever else happens is told apart, and the fault is gone afterwards."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator

import pytest
from hypothesis.errors import FlakyFailure

from conformance.harness import Mismatch, swap, wrap
from conformance.harness.planted import active_bug, bugs_beside, is_kill

_TESTS = """
@requirement("CKPT-001", "MUST double")
@pytest.mark.parametrize("n", [0, 1, 2])
def test_double(checkpoint, n):
    assert_equal(checkpoint.double(n), 2 * n)

@requirement("CKPT-002", "MUST sort")
@settings(max_examples=50)
@given(values=st.lists(st.integers()))
def test_sort(checkpoint, values, tmp_path):
    assert_equal(checkpoint.sort(values), sorted(values))

def on_rank(rank, n):
    assert_equal(rank.component("checkpoint").double(n), 2 * n)

@requirement("CKPT-003", "MUST double on every rank")
def test_ranks(rank_pool):
    rank_pool.run(on_rank, 2, 5)

@requirement("CKPT-004", "MUST be left alone")
def test_other(checkpoint):
    assert_equal(checkpoint.double(1), 2)
"""


def _planted(*bugs: str) -> str:
    around = """
    def add(original, x):
        return original(x) + 1

    def late(original, x):
        return original(x) + (x == 2)

    def crash(original, x):
        raise TypeError("boom")
    """
    return around + "\n    PLANTED = (" + ", ".join(bugs) + ",)"


def _bug(name: str, requirement: str, patch: str, target: str = "toy.impl") -> str:
    return f"PlantedBug('{name}', 'is wrong', ('{requirement}',), '{target}', {patch})"


def _around(function: str) -> str:
    return f"wrap('toy.impl:checkpoint.double', {function})"


def test_killed(toy: Callable[..., pytest.RunResult]) -> None:
    bugs = _planted(
        _bug("adds_one", "CKPT-001", _around("add")),
        _bug("only_the_last_case", "CKPT-001", _around("late")),
        _bug("unsorted", "CKPT-002", "swap('toy.impl:checkpoint.sort', staticmethod(list))"),
        _bug("on_a_rank", "CKPT-003", _around("add")),
        _bug("elsewhere", "CKPT-004", _around("add"), target="fastimpl"),
    )
    result = toy(_TESTS, "--twinproof-planted", "only", "-rA", planted=bugs)
    result.assert_outcomes(passed=8, deselected=1)
    result.stdout.fnmatch_lines(
        [
            "twinproof: planted bugs, by requirement: 4 killed",
            "PASSED *test_double[[]planted:adds_one-0]",
            "PASSED *test_sort[[]planted:unsorted]",
            "PASSED *test_ranks[[]planted:on_a_rank]",
        ]
    )
    result = toy(_TESTS, "--twinproof-planted", "all", planted=bugs)
    result.assert_outcomes(passed=14)
    result = toy(_TESTS, planted=bugs)
    result.assert_outcomes(passed=6)


def test_survived_crashed_and_unplantable(toy: Callable[..., pytest.RunResult]) -> None:
    bugs = _planted(
        _bug("harmless", "CKPT-001", _around("lambda original, x: original(x)")),
        _bug("harmless_property", "CKPT-002", "swap('toy.impl:checkpoint.sort', staticmethod(sorted))"),
        _bug("crashes_on_a_rank", "CKPT-003", _around("crash")),
        _bug("crashes", "CKPT-004", _around("crash")),
        _bug("nowhere", "CKPT-004", "swap('toy.impl:checkpoint.absent', None)"),
    )
    result = toy(_TESTS, "--twinproof-planted", "only", planted=bugs)
    # The first two of three cases pass: the verdict over a parametrised requirement falls with its last case.
    result.assert_outcomes(passed=2, failed=5)
    result.stdout.fnmatch_lines_random(
        [
            "survived: planted bug harmless went unnoticed by CKPT-001",
            "survived: planted bug harmless_property went unnoticed by CKPT-002",
            "no kill: RankError instead of a comparison, with planted bug crashes_on_a_rank",
            "no kill: TypeError instead of a comparison, with planted bug crashes",
            "no kill: AttributeError instead of a comparison, with planted bug nowhere",
            "twinproof: planted bugs, by requirement: 3 no kill, 2 survived",
        ]
    )


def test_what_is_no_kill(toy: Callable[..., pytest.RunResult]) -> None:
    tests = """
    import time

    def hang(rank):
        time.sleep(60)

    def die(rank):
        os._exit(3)

    @requirement("CKPT-001", "MUST not hang")
    def test_hang(rank_pool, checkpoint):
        if checkpoint.double(1) != 2:
            rank_pool.run(hang, 1, timeout_s=0.2)

    @requirement("CKPT-002", "MUST not die")
    def test_die(rank_pool, checkpoint):
        if checkpoint.double(1) != 2:
            rank_pool.run(die, 1)

    @requirement("CKPT-003", "MUST compare by our comparers")
    def test_assert(checkpoint):
        assert checkpoint.double(1) == 2

    @pytest.fixture
    def broken():
        raise Mismatch("in a fixture")

    @requirement("CKPT-004", "MUST fail in the test itself")
    def test_fixture(broken):
        pass

    @requirement("CKPT-005", "MUST run")
    def test_skipped(checkpoint):
        if checkpoint.double(1) != 2:
            pytest.skip("not here")
    """
    names = ("hang", "die", "plain_assert", "fixture", "skipped")
    bugs = [_bug(name, f"CKPT-00{number}", _around("add")) for number, name in enumerate(names, 1)]
    result = toy(tests, "--twinproof-planted", "only", planted=_planted(*bugs))
    result.assert_outcomes(failed=3, errors=1, skipped=1)
    kinds = {"hang": "RankTimeout", "die": "RankDied", "plain_assert": "AssertionError", "fixture": "Mismatch"}
    lines = [f"no kill: {kind} instead of a comparison, with planted bug {name}" for name, kind in kinds.items()]
    result.stdout.fnmatch_lines_random([*lines, "twinproof: *: 4 no kill, 1 skipped"])


def test_kills_are_comparisons_only() -> None:
    mismatch = Mismatch("m")
    assert is_kill(mismatch)
    assert not is_kill(AssertionError("m"))
    assert is_kill(types.SimpleNamespace(exceptions=(mismatch,)))  # type: ignore[arg-type]
    assert not is_kill(types.SimpleNamespace(exceptions=(mismatch, TypeError())))  # type: ignore[arg-type]
    assert not is_kill(FlakyFailure("flaky", [mismatch]))


class _Base:
    def inherited(self) -> str:
        return "right"


class _Subject(_Base):
    value = 1

    def method(self, x: int) -> int:
        return self.value + x

    @staticmethod
    def static(x: int) -> int:
        return x

    @classmethod
    def klass(cls, x: int) -> tuple[str, int]:
        return cls.__name__, x


@pytest.fixture
def _unchanged() -> Iterator[None]:
    before = dict(vars(_Subject))
    yield
    assert dict(vars(_Subject)) == before
    assert active_bug() is None


@pytest.mark.usefixtures("_unchanged")
def test_patches_keep_the_kind_of_what_they_replace() -> None:
    subject = _Subject()
    with wrap(f"{__name__}:_Subject.method", lambda original, self, x: original(self, x) * 10):
        assert subject.method(1) == 20
    with wrap(f"{__name__}:_Subject.static", lambda original, x: original(x) + 1):
        assert (_Subject.static(1), subject.static(1)) == (2, 2)
    with wrap(f"{__name__}:_Subject.klass", lambda original, cls, x: original(cls, x + 1)):
        assert subject.klass(1) == ("_Subject", 2)
    with wrap(f"{__name__}:_Subject.inherited", lambda original, self: "wrong"):
        assert (subject.inherited(), _Base().inherited()) == ("wrong", "right")
    patch = swap(f"{__name__}:_Subject.value", 5)
    with patch(), pytest.raises(ZeroDivisionError), patch():
        subject.method(0) / 0
    assert subject.method(0) == 1


@pytest.mark.parametrize("path", ["module", "module:", ":attribute", "a:b:c"])
def test_malformed_paths(path: str) -> None:
    with pytest.raises(ValueError, match="expected 'module:attribute'"):
        swap(path, None)


def test_a_component_without_bugs() -> None:
    assert bugs_beside("conformance.meta.test_planted") == ("conformance.meta.planted", ())
    assert bugs_beside("toplevel")[1] == ()
