"""Faults that ``test_surroundings`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched

counts_on_the_default_device = patched(
    "The count of a first step on the CPU lies on the default device of the process.",
    mutated("twinproof.offload.driver:prepare_states", 'dtype=scalar, device="cpu"', "dtype=scalar"),
    kills="OPT-378",
)
