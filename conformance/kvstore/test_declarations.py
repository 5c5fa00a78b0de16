"""Records that nobody can change, and arguments that have names."""

from __future__ import annotations

from typing import Any

from conformance.harness import assert_equal, requirement
from conformance.harness.declarations import changing_records, unnamed_arguments

# Counters, work under way, and what upstream's classes let users set.
CHANGING: dict[str, list[str]] = {
    "refimpl.kvstore": [
        "refimpl.kvstore:DictReader",
    ],
}


def _packages(component: Any) -> tuple[str, ...]:
    ours = component.__name__ if component.__name__.partition(".")[0] in ("refimpl", "fastimpl") else None
    return ("twinproof.kvstore", *([ours] if ours is not None else []))


@requirement("KV-228", "Records MUST be frozen, but for those that are known to change.")
def test_records(impl: Any, kvstore: Any) -> None:
    for package in _packages(kvstore):
        assert_equal(changing_records(package), CHANGING.get(package, []), where=f"records of {package} that change")


@requirement("KV-229", "Every argument MUST have a name that callers can give it by.")
def test_arguments(impl: Any, kvstore: Any) -> None:
    for package in _packages(kvstore):
        assert_equal(unnamed_arguments(package), [], where=f"arguments of {package} without names")
