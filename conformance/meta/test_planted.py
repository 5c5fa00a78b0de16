"""The inversion: only a comparison kills, whatever else happens is told apart, and the fault is gone afterwards."""

from __future__ import annotations

import contextlib
import re
import types
from collections.abc import Callable, Iterator

import pytest
from hypothesis.errors import FlakyFailure

from conformance.harness import Mismatch, fault, patched, swap, wrap
from conformance.harness.planted import PlantedBug, active_bug, bugs_beside, bugs_in, check_matrix, is_kill
from conformance.harness.requirements import Requirement

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


def test_a_dead_bug_is_not_killed_again(toy: Callable[..., pytest.RunResult]) -> None:
    tests = """
    @pytest.mark.parametrize("x", [1, 2, 3])
    @requirement("CKPT-001", "MUST double")
    def test_double(checkpoint, x):
        print("asked", x)
        assert_equal(checkpoint.double(x), 2 * x)
    """
    bugs = _planted(
        _bug("adds_one", "CKPT-001", _around("add")),
        _bug("only_the_second_case", "CKPT-001", _around("late")),
    )
    result = toy(tests, "--twinproof-planted", "only", "-s", planted=bugs)
    result.assert_outcomes(passed=6)
    # The first bug dies of its first case, and the second of its second: three of six cases run.
    asked = re.findall(r"asked (\d)", result.stdout.str())
    assert asked == ["1", "1", "2"]


def test_a_kill_is_no_failure_to_a_debugger(toy: Callable[..., pytest.RunResult], pytester: pytest.Pytester) -> None:
    # What pytest writes down of failures, and where --pdb stops, are those that somebody has to look at.
    pytester.makeconftest("""
    def pytest_exception_interact(node, call, report):
        print("looked at", node.name)
    """)
    bugs = _planted(_bug("adds_one", "CKPT-001", _around("add")), _bug("crashes", "CKPT-004", _around("crash")))
    result = toy(_TESTS, "--twinproof-planted", "only", "-s", planted=bugs)
    result.assert_outcomes(passed=3, failed=1)
    assert re.findall(r"looked at (\w+)", result.stdout.str()) == ["test_other"]


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


@pytest.mark.parametrize(
    ("paths", "targets", "shared"),
    [
        (("twinproof.errors:ConfigError",), ("refimpl", "fastimpl"), True),
        (("twinproof.errors:ConfigError",), ("fastimpl",), False),
        (("twinproof.errors:ConfigError", "fastimpl.kvstore:KVStore"), ("refimpl", "fastimpl"), False),
        (("torch:load",), ("refimpl", "fastimpl"), False),
        ((), ("refimpl", "fastimpl"), False),
    ],
)
def test_which_bugs_are_of_shared_code(paths: tuple[str, ...], targets: tuple[str, ...], shared: bool) -> None:
    bug = PlantedBug("a", "Is wrong.", ("KV-001",), targets, contextlib.nullcontext, paths)
    assert bug.shared is shared


def test_own_bugs_leave_out_those_of_shared_code(toy: Callable[..., pytest.RunResult]) -> None:
    places = "paths=('twinproof.errors:ConfigError',)"
    shared = (
        f"PlantedBug('shared', 'is wrong', ('CKPT-002',), ('toy.impl', 'fastimpl'), contextlib.nullcontext, {places})"
    )
    bugs = "\n    import contextlib" + _planted(_bug("adds_one", "CKPT-001", _around("add")), shared)
    result = toy(_TESTS, "--twinproof-planted", "own", planted=bugs)
    # The six tests as they are, and three cases of one bug.
    result.assert_outcomes(passed=9)
    result.stdout.fnmatch_lines(["twinproof: planted bugs, by requirement: 1 killed"])
    result = toy(_TESTS, "--twinproof-planted", "all", planted=bugs)
    result.assert_outcomes(passed=9, failed=1)
    result.stdout.fnmatch_lines(["survived: planted bug shared went unnoticed by CKPT-002"])


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


def test_faults_are_collected_and_killed(toy: Callable[..., pytest.RunResult]) -> None:
    bugs = """
    @fault(kills=("CKPT-001", "CKPT-004"), at="toy.impl:checkpoint.double", of="toy.impl")
    def adds_one(original, x):
        "Adds one."
        return original(x) + 1

    @fault(kills="CKPT-003", of="toy.impl")
    def plants_itself():
        "Is planted by itself."
        with wrap("toy.impl:checkpoint.double", lambda original, x: -x):
            yield

    listed = swap("toy.impl:checkpoint.sort", staticmethod(list))
    unsorted = patched("Sorts nothing.", listed, kills="CKPT-002", of="toy.impl")
    """
    result = toy(_TESTS, "--twinproof-planted", "only", planted=bugs)
    result.assert_outcomes(passed=6)
    result.stdout.fnmatch_lines(["twinproof: planted bugs, by requirement: 4 killed"])


def test_places_are_resolved_at_collection(toy: Callable[..., pytest.RunResult]) -> None:
    bugs = """
    gone = patched("Is gone.", swap("toy.impl:checkpoint.absent", None), kills="CKPT-002", of="toy.impl")
    """
    result = toy(_TESTS, "--twinproof-planted", "only", planted=bugs)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*planted bug gone: toy.impl:checkpoint.absent names nothing (AttributeError: *"])


def _module(**contents: object) -> types.ModuleType:
    module = types.ModuleType("conformance.kvstore.planted.values")
    vars(module).update(contents)
    return module


def _wrong(original: Callable[..., int], self: _Subject, x: int) -> int:
    """Is wrong."""
    return original(self, x) + 1


def test_a_fault_says_where_and_what() -> None:
    shared = fault(kills="KV-001", at=f"{__name__}:_Subject.method")(_wrong)
    public = fault(kills="KV-001", at="KVStore.set")(_wrong)
    fast = fault(kills="KV-001", at="KVStore.set", of="fastimpl", id="other")(_wrong)
    bound = patched("Is two.", swap("refimpl.kvstore:decayed", 2), kills=("KV-001", "KV-002"))
    module = _module(shared=shared, public=public, fast=fast, bound=bound, helper=_wrong)
    bugs = {bug.id: bug for bug in bugs_in(module)}
    assert list(bugs) == ["shared", "public", "other", "bound"]
    assert bugs_in(module) == tuple(bugs.values())
    assert {bug.module for bug in bugs.values()} == {module.__name__}
    assert (bugs["shared"].sentence, bugs["shared"].requirements) == ("Is wrong.", ("KV-001",))
    assert [bug.targets for bug in bugs.values()] == [("refimpl", "fastimpl")] * 2 + [("fastimpl",), ("refimpl",)]
    assert bugs["public"].paths == ("refimpl.kvstore:KVStore.set", "fastimpl.kvstore:KVStore.set")
    assert bugs["other"].paths == ("fastimpl.kvstore:KVStore.set",)
    with bugs["shared"].patch():
        assert _Subject().method(1) == 3
    assert _Subject().method(1) == 2


@pytest.mark.parametrize("profile", ["quick", "half", "ci", "nightly"])
def test_planted_bugs_have_the_examples_of_ci(toy: Callable[..., pytest.RunResult], profile: str) -> None:
    tests = """
    @requirement("CKPT-001", "MUST double")
    @examples(40)
    @given(st.integers())
    def test_double(checkpoint, n):
        assert_equal(checkpoint.double(n), 2 * n)
    """
    planted = """
    calls = []

    def late(original, x):
        calls.append(x)
        return original(x) + (len(calls) >= COUNT)

    PLANTED = (PlantedBug('late', 'is wrong', ('CKPT-001',), 'toy.impl', wrap('toy.impl:checkpoint.double', late)),)
    """
    arguments = ("--twinproof-planted", "only", "--twinproof-profile", profile)
    toy(tests, *arguments, planted=planted.replace("COUNT", "40")).assert_outcomes(passed=1)
    toy(tests, *arguments, planted=planted.replace("COUNT", "41")).assert_outcomes(failed=1)


def test_several_places_are_planted_and_cleared_together() -> None:
    patch = wrap((f"{__name__}:_Subject.method", f"{__name__}:_Subject.absent"), _wrong)
    with pytest.raises(AttributeError), patch:
        raise AssertionError("not planted")
    assert _Subject().method(1) == 2
    with swap((f"{__name__}:_Subject.value", f"{__name__}:_Subject.inherited"), 5):
        assert [getattr(_Subject, name) for name in ("value", "inherited")] == [5, 5]
    assert (_Subject.value, _Subject().inherited()) == (1, "right")


def _undocumented(original: Callable[..., None]) -> None:
    original()


def _two_sentences(original: Callable[..., None]) -> None:
    """Is wrong.

    At length.
    """


@pytest.mark.parametrize(
    ("kills", "at", "function", "message"),
    [
        ("KV-8", "KVStore.set", _wrong, "kills requirements such as KV-008"),
        ("FOO-001", "a:b", _wrong, "kills requirements such as KV-008"),
        ((), "a:b", _wrong, "kills requirements such as KV-008"),
        ("KV-001", "a:b:c", _wrong, "expected 'module:attribute'"),
        ("KV-001", "a:b", _undocumented, "the docstring must say what is wrong"),
        ("KV-001", "a:b", _two_sentences, "one sentence"),
        ("KV-001", (), _wrong, "a fault without a place must be a generator"),
    ],
)
def test_malformed_faults(kills: str, at: str, function: Callable[..., None], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fault(kills=kills, at=at)(function)


def test_malformed_replacements_and_ids() -> None:
    with pytest.raises(ValueError, match="needs a patch"):
        patched("Is wrong.", kills="KV-001")
    with pytest.raises(ValueError, match="one sentence"):
        patched("is wrong", swap("a:b", 1), kills="KV-001")
    with pytest.raises(ValueError, match="expected lower-case words"):
        bugs_in(_module(Upper=patched("Is wrong.", swap("a:b", 1), kills="KV-001")))


def test_a_bug_lies_in_the_file_of_a_test_that_kills_it() -> None:
    requirement = Requirement("KV-001", "MUST hold", (), "conformance.kvstore.test_values", "test")

    def bug(file: str, path: str) -> PlantedBug:
        folder = "conformance.kvstore.planted"
        return PlantedBug("a", "Is wrong.", ("KV-001",), "refimpl", swap(path, 1), (path,), f"{folder}.{file}")

    here = f"{__name__}:_Subject.value"
    assert check_matrix([bug("values", here)], [requirement]) == []
    (misplaced,) = check_matrix([bug("views", here)], [requirement])
    assert "no requirement in test_views kills it" in misplaced
    (unresolved,) = check_matrix([bug("values", "conformance.meta:gone")], [requirement])
    assert "conformance.meta:gone names nothing" in unresolved
