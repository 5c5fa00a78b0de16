"""A requirement that is written wrongly is found at once, and every requirement of the suite is sound and traced."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.harness import PlantedBug, RequirementError, collect_requirements, requirement, swap
from conformance.harness.capabilities import WORDS
from conformance.harness.implementation import capabilities
from conformance.harness.ledger import builtin_ledger
from conformance.harness.planted import all_planted, check_matrix, untraced
from conformance.harness.requirements import STEMS, Requirement, check_unique, requirement_of


def _proof() -> None:
    """Stands for a test."""


def _requirement(identifier: str, function: str = "test", module: str = "m") -> Requirement:
    return Requirement(identifier, "MUST", (), module, function)


@pytest.mark.parametrize("identifier", ["CKPT-1", "CKPT-0012", "XYZ-001", "ckpt-001", "CKPT001", ""])
def test_wrong_ids(identifier: str) -> None:
    with pytest.raises(RequirementError, match="three digits"):
        requirement(identifier, "MUST be")


@pytest.mark.parametrize("sentence", ["is", "SHOULD", "MUSTER", "must"])
def test_sentences_without_must(sentence: str) -> None:
    with pytest.raises(RequirementError, match="must say MUST"):
        requirement("CKPT-001", sentence)


def test_only_functions_and_only_once() -> None:
    with pytest.raises(RequirementError, match="only test functions"):
        requirement("KV-001", "MUST")(type("Test", (), {}))
    once = requirement("KV-001", "MUST NOT stop")(lambda: None)
    with pytest.raises(RequirementError, match="already proves"):
        requirement("KV-002", "MUST")(once)
    with pytest.raises(RequirementError, match="collection of names"):
        requirement("KV-001", "MUST", needs="cuda")


def test_what_is_recorded_also_below_given() -> None:
    marked = requirement("OPT-007", "MUST hold", needs=("cuda",))(_proof)
    try:
        expected = Requirement("OPT-007", "MUST hold", ("cuda",), __name__, "_proof")
        assert requirement_of(marked) == expected
        assert expected.stem == "offload"
    finally:
        del marked.__requirement__  # type: ignore[attr-defined]

    @given(st.integers())
    @requirement("PIPE-001", "MUST hold")
    def inner(value: int) -> None:
        """Stands for a property."""

    found = requirement_of(inner)
    assert found is not None
    assert found.id == "PIPE-001"


def test_a_requirement_names_a_test_that_can_be_run() -> None:
    """Also where it was written above ``@given``."""
    wrong = [each for each in collect_requirements() if not each.function.isidentifier()]
    assert wrong == []


def test_ids_are_proven_once_and_stand_in_their_component() -> None:
    check_unique([_requirement("KV-001"), _requirement("KV-001")])
    with pytest.raises(RequirementError, match="proven twice: m::test and m::other"):
        check_unique([_requirement("KV-001"), _requirement("KV-001", "other")])
    with pytest.raises(RequirementError, match="belongs to kvstore"):
        check_unique([_requirement("KV-001", module="conformance.checkpoint.test_x")])


def _bug(identifier: str, *requirements: str, target: str | tuple[str, ...] = "refimpl") -> PlantedBug:
    return PlantedBug(identifier, "is wrong", requirements, target, swap("m:a", None))


def test_rules_of_the_kill_matrix() -> None:
    known = [_requirement("KV-001"), _requirement("KV-002")]
    assert check_matrix([_bug("a", "KV-001"), _bug("b", "KV-001", "KV-002")], known) == []
    assert check_matrix([_bug("a", "KV-001"), _bug("a", "KV-002")], known) == ["planted bug a is listed twice"]
    assert check_matrix([_bug("a", "KV-003")], known) == ["planted bug a names KV-003, which no test proves"]
    assert "cannot be imported" in check_matrix([_bug("a", "KV-001", target=("refimpl", "no.such"))], known)[0]
    crowd = check_matrix([_bug(name, "KV-001") for name in "abcd"], known)
    assert crowd == ["KV-001 is named by 4 planted bugs, at most 3 allowed: a, b, c, d"]
    assert untraced(known, [_bug("a", "KV-001")]) == ("KV-002",)


@pytest.mark.parametrize("requirements", [(), ("KV-001", "KV-002", "KV-003", "KV-004")])
def test_a_bug_names_one_to_three_requirements(requirements: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="1 to 3 requirements"):
        _bug("a", *requirements)


def test_the_suite_itself_is_sound() -> None:
    found = collect_requirements()
    assert len({value.id for value in found}) == len(found)
    assert check_matrix(all_planted(), found) == []


def test_every_requirement_has_a_planted_bug() -> None:
    # Those that need a GPU are killed on one; here they are skipped by name.
    assert untraced(collect_requirements(), all_planted()) == ()


def undeclared_needs(found: Iterable[Requirement]) -> list[str]:
    """Capabilities that fastimpl does not have: what asks for one would be skipped everywhere, its planted bugs too."""
    return [
        f"{each.id}: {need}"
        for each in found
        for need in each.needs
        if need != "cuda" and need not in capabilities("fastimpl", each.stem)
    ]


def test_every_capability_that_is_needed_is_declared() -> None:
    asked = Requirement("CKPT-001", "MUST", ("cuda", "streams", "staged_copies"), "m", "test")
    assert undeclared_needs([asked]) == ["CKPT-001: streams"]
    assert undeclared_needs(collect_requirements()) == []


def test_the_words_of_capabilities_are_those_that_are_needed() -> None:
    needed: dict[str, set[str]] = {stem: set() for stem in STEMS}
    for each in collect_requirements():
        needed[each.stem] |= set(each.needs)
    assert {stem: set(words) for stem, words in WORDS.items()} == needed


def unresolved_targets(bugs: Iterable[PlantedBug]) -> list[str]:
    """Bugs that can no longer be planted, each with the reason: what they change was renamed or is gone."""
    found: list[str] = []
    for bug in bugs:
        try:
            with bug.patch():
                pass
        except Exception as error:
            found.append(f"{bug.id}: {type(error).__name__}: {error}")
    return found


def test_every_target_of_a_planted_bug_resolves() -> None:
    gone = PlantedBug("gone", "Is gone.", ("CKPT-001",), "refimpl", swap("conformance.meta:no_such_name", None))
    assert unresolved_targets([gone]) != []
    assert unresolved_targets(all_planted()) == []


@pytest.mark.parametrize("name", ["refimpl", "fastimpl"])
def test_our_own_implementations_have_no_ledger(name: str) -> None:
    assert builtin_ledger(name) == ()
    assert importlib.util.find_spec(name) is not None
