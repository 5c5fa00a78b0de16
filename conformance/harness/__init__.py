"""The machinery of the suite, independent of any component.

What a test module needs stands here; the rest of the package serves the plugin and the command line. Importing it does
not import torch, and a name is imported when it is first asked for: the command line works without pytest.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from conformance.harness.compare import (
        Mismatch,
        assert_equal,
        assert_le,
        assert_same_bytes,
        assert_same_tensor,
        assert_same_tensors,
    )
    from conformance.harness.derived import assert_within_derived
    from conformance.harness.flags import assert_flags_are_no_text
    from conformance.harness.mutants import mutated
    from conformance.harness.pairs import pairs_of
    from conformance.harness.planted import PlantedBug, fault, patched, swap, wrap
    from conformance.harness.profiles import examples, run_machine
    from conformance.harness.raising import Raised, assert_refused, raises, succeeds
    from conformance.harness.requirements import Requirement, RequirementError, collect_requirements, requirement
    from conformance.provers.ranks.pool import Rank, RankDied, RankError, RankPool, RankTimeout

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
    "assert_flags_are_no_text",
    "assert_le",
    "assert_refused",
    "assert_same_bytes",
    "assert_same_tensor",
    "assert_same_tensors",
    "assert_within_derived",
    "collect_requirements",
    "examples",
    "fault",
    "mutated",
    "pairs_of",
    "patched",
    "raises",
    "requirement",
    "run_machine",
    "succeeds",
    "swap",
    "wrap",
]

_HOMES = {
    "compare": (
        "Mismatch",
        "assert_equal",
        "assert_le",
        "assert_same_bytes",
        "assert_same_tensor",
        "assert_same_tensors",
    ),
    "derived": ("assert_within_derived",),
    "flags": ("assert_flags_are_no_text",),
    "mutants": ("mutated",),
    "pairs": ("pairs_of",),
    "planted": ("PlantedBug", "fault", "patched", "swap", "wrap"),
    "profiles": ("examples", "run_machine"),
    "raising": ("Raised", "assert_refused", "raises", "succeeds"),
    "conformance.provers.ranks": ("Rank", "RankDied", "RankError", "RankPool", "RankTimeout"),
    "requirements": ("Requirement", "RequirementError", "collect_requirements", "requirement"),
}


def __getattr__(name: str) -> Any:
    home = next((home for home, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(home if "." in home else f"{__name__}.{home}"), name)
