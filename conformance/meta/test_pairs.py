"""Cases in which every pair of options meets."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations, product
from typing import Any

import pytest

from conformance.harness import pairs_of

OPTIONS: dict[str, list[Any]] = {"a": [1, 2, 3], "b": [1, 2], "c": [1, 2, 3, 4], "d": [0, 1], "e": [None, [1], "x"]}


def _met(cases: list[dict[str, Any]], first: str, second: str) -> set[tuple[str, str]]:
    return {(repr(case[first]), repr(case[second])) for case in cases}


def test_every_pair_meets_in_few_cases() -> None:
    cases = pairs_of(OPTIONS)
    for first, second in combinations(OPTIONS, 2):
        expected = {(repr(a), repr(b)) for a, b in product(OPTIONS[first], OPTIONS[second])}
        assert _met(cases, first, second) == expected, (first, second)
    assert len(cases) <= 16
    assert pairs_of(OPTIONS) == cases


def test_cases_that_are_not_allowed_are_left_out_and_nothing_else() -> None:
    def allowed(case: Mapping[str, Any]) -> bool:
        return not (case["a"] == 3 and case["d"] == 1)

    cases = pairs_of(OPTIONS, allowed=allowed)
    assert all(map(allowed, cases))
    assert _met(cases, "a", "d") == {("1", "0"), ("2", "0"), ("3", "0"), ("1", "1"), ("2", "1")}
    assert _met(cases, "c", "e") == {(repr(a), repr(b)) for a, b in product(OPTIONS["c"], OPTIONS["e"])}


def test_what_would_be_no_case_is_refused() -> None:
    with pytest.raises(ValueError, match="without values"):
        pairs_of({"a": [1], "b": []})
    with pytest.raises(ValueError, match="no case"):
        pairs_of(OPTIONS, allowed=lambda case: False)
