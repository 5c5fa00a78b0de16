"""Faults that ``test_surroundings`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched

places_of_blocks_on_the_default_device = patched(
    "What lies where in a block is told on the default device of the process.",
    mutated("fastimpl.checkpoint.blockio:LocalPart.place", ', device="cpu"', ""),
    kills="CKPT-622",
)
