"""The machinery of the suite, independent of any component.

What a test module needs stands here; the rest of the package serves the plugin and the command line. Importing it does
not import torch, so that suites which merely have twinproof installed pay nothing.
"""

from conformance.harness.compare import (
    Mismatch,
    assert_equal,
    assert_le,
    assert_same_bytes,
    assert_same_tensor,
    assert_same_tensors,
)
from conformance.harness.derived import assert_within_derived
from conformance.harness.planted import PlantedBug, swap, wrap
from conformance.harness.profiles import examples, run_machine
from conformance.harness.raising import Raised, raises
from conformance.harness.ranks import Rank, RankDied, RankError, RankPool, RankTimeout
from conformance.harness.requirements import Requirement, RequirementError, collect_requirements, requirement

__all__ = [
    "Mismatch",
    "PlantedBug",
    "Raised",
    "Rank",
    "RankDied",
    "RankError",
    "RankPool",
    "RankTimeout",
    "Requirement",
    "RequirementError",
    "assert_equal",
    "assert_le",
    "assert_same_bytes",
    "assert_same_tensor",
    "assert_same_tensors",
    "assert_within_derived",
    "collect_requirements",
    "examples",
    "raises",
    "requirement",
    "run_machine",
    "swap",
    "wrap",
]
