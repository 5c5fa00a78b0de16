"""Every pair of options in few cases: what two options do to each other is missed by tests that vary one at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

__all__ = ["pairs_of"]

_Pair = frozenset[tuple[str, int]]


def pairs_of(
    options: Mapping[str, Sequence[Any]], *, allowed: Callable[[Mapping[str, Any]], bool] = lambda case: True
) -> list[dict[str, Any]]:
    """Cases in which every two values of any two options meet at least once; the same ones each time.

    Each case begins with a pair that was not met yet and takes, option by option, the value that meets most of what is
    left. The number of cases is near the product of the two longest options.

    Args:
        options: name -> values, the usual one first.
        allowed: whether a case may be; pairs that meet in no allowed case are left out.

    Raises:
        ValueError: an option without values, or no case is allowed.
    """
    empty = [name for name, values in options.items() if not values]
    if empty:
        raise ValueError(f"options without values: {empty}")

    def valued(case: Mapping[str, int]) -> dict[str, Any]:
        return {name: options[name][case.get(name, 0)] for name in options}

    left = {
        frozenset({(first, i), (second, j)})
        for first, second in combinations(options, 2)
        for i in range(len(options[first]))
        for j in range(len(options[second]))
    }
    cases: list[dict[str, Any]] = []
    for pair in sorted(left, key=sorted):
        if pair not in left:
            continue
        case = _grown(dict(pair), options, left, lambda case: allowed(valued(case)))
        if case is not None:
            cases.append(valued(case))
            left -= _met(case)
    if not cases:
        raise ValueError("no case is allowed")
    return cases


def _met(case: Mapping[str, int]) -> set[_Pair]:
    return {frozenset(pair) for pair in combinations(case.items(), 2)}


def _grown(
    case: dict[str, int],
    options: Mapping[str, Sequence[Any]],
    left: set[_Pair],
    allowed: Callable[[Mapping[str, int]], bool],
) -> dict[str, int] | None:
    """The case with all other options; None where the usual values of the others do not make it an allowed one."""
    if not allowed(case):
        return None
    for name, values in options.items():
        if name in case:
            continue
        new = {i: len(_met({**case, name: i}) & left) for i in range(len(values)) if allowed({**case, name: i})}
        case[name] = max(new, key=lambda i: (new[i], -i))
    return case
