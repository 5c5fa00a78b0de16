"""Records that nobody can change, and arguments that have names."""

from __future__ import annotations

from typing import Any

from conformance.harness import assert_equal, requirement
from conformance.harness.declarations import changing_records, unnamed_arguments

# Counters, work under way, and what upstream's classes let users set.
CHANGING: dict[str, list[str]] = {
    "twinproof.pipeline": [
        "twinproof.pipeline.config:EmbeddingBagConfig",
        "twinproof.pipeline.config:EmbeddingConfig",
    ],
    "fastimpl.pipeline": [
        "fastimpl.pipeline.overlap:Timeline",
    ],
}


def _packages(component: Any) -> tuple[str, ...]:
    ours = component.__name__ if component.__name__.partition(".")[0] in ("refimpl", "fastimpl") else None
    return ("twinproof.pipeline", *([ours] if ours is not None else []))


@requirement("PIPE-378", "Records MUST be frozen, but for those that are known to change.")
def test_records(impl: Any, pipeline: Any) -> None:
    for package in _packages(pipeline):
        assert_equal(changing_records(package), CHANGING.get(package, []), where=f"records of {package} that change")


@requirement("PIPE-379", "Every argument MUST have a name that callers can give it by.")
def test_arguments(impl: Any, pipeline: Any) -> None:
    for package in _packages(pipeline):
        assert_equal(unnamed_arguments(package), [], where=f"arguments of {package} without names")
