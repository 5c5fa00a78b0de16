"""Records that nobody can change, and arguments that have names."""

from __future__ import annotations

from typing import Any

from conformance.harness import assert_equal, requirement
from conformance.harness.declarations import changing_records, unnamed_arguments

# Counters, work under way, and what upstream's classes let users set.
CHANGING: dict[str, list[str]] = {
    "twinproof.offload": [
        "twinproof.offload.driver:OffloadStats",
        "twinproof.offload.states:Bundle",
    ],
    "fastimpl.offload": [
        "fastimpl.offload.chunks:Chunk",
        "fastimpl.offload.cpu_step:_Work",
        "fastimpl.offload.layout:_Run",
        "fastimpl.offload.slot_step:_Call",
    ],
}


def _packages(component: Any) -> tuple[str, ...]:
    ours = component.__name__ if component.__name__.partition(".")[0] in ("refimpl", "fastimpl") else None
    return ("twinproof.offload", *([ours] if ours is not None else []))


@requirement("OPT-358", "Records MUST be frozen, but for those that are known to change.")
def test_records(impl: Any, offload: Any) -> None:
    for package in _packages(offload):
        assert_equal(changing_records(package), CHANGING.get(package, []), where=f"records of {package} that change")


@requirement("OPT-359", "Every argument MUST have a name that callers can give it by.")
def test_arguments(impl: Any, offload: Any) -> None:
    for package in _packages(offload):
        assert_equal(unnamed_arguments(package), [], where=f"arguments of {package} without names")
