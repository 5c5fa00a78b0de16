"""Faults that ``test_scripts`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched

gradients_of_the_model_before = patched(
    "Another model's dense gradients are not averaged: what is known of them is the model's before.",
    mutated("twinproof.pipeline.driver:Pipeline.detach", "self._dense = None", "pass"),
    kills="PIPE-149",
)
