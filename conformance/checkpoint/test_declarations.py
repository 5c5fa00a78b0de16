"""Records that nobody can change, and arguments that have names."""

from __future__ import annotations

from typing import Any

from conformance.harness import assert_equal, requirement
from conformance.harness.declarations import changing_records, unnamed_arguments

# Counters, work under way, and what upstream's classes let users set.
CHANGING: dict[str, list[str]] = {
    "twinproof.checkpoint": [
        "twinproof.checkpoint.catalog:Catalog",
        "twinproof.checkpoint.catalog:TensorRecord",
        "twinproof.checkpoint.manager:_Pending",
        "twinproof.checkpoint.plan:GlobalTensor",
    ],
    "fastimpl.checkpoint": [
        "fastimpl.checkpoint.blockio:LocalPart",
        "fastimpl.checkpoint.exchange:Round",
        "fastimpl.checkpoint.plan:Block",
        "fastimpl.checkpoint.plan:SavePieces",
        "fastimpl.checkpoint.readio:LoadStats",
        "fastimpl.checkpoint.run:FileSet",
        "fastimpl.checkpoint.run:SaveStats",
    ],
}


def _packages(component: Any) -> tuple[str, ...]:
    ours = component.__name__ if component.__name__.partition(".")[0] in ("refimpl", "fastimpl") else None
    return ("twinproof.checkpoint", *([ours] if ours is not None else []))


@requirement("CKPT-518", "Records MUST be frozen, but for those that are known to change.")
def test_records(impl: Any, checkpoint: Any) -> None:
    for package in _packages(checkpoint):
        assert_equal(changing_records(package), CHANGING.get(package, []), where=f"records of {package} that change")


@requirement("CKPT-519", "Every argument MUST have a name that callers can give it by.")
def test_arguments(impl: Any, checkpoint: Any) -> None:
    for package in _packages(checkpoint):
        assert_equal(unnamed_arguments(package), [], where=f"arguments of {package} without names")
