"""Faults that ``test_scripts`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched

gradients_of_the_model_before = patched(
    "Another model's dense gradients are not averaged: what is known of them is the model's before.",
    mutated("twinproof.pipeline.driver:Pipeline.detach", "self._dense = None", "pass"),
    kills="PIPE-149",
)
rows_of_an_interrupted_call = patched(
    "Rows that were looked up in a call that a loader ended are those of the next.",
    mutated("fastimpl.pipeline.stages:undone_on_error", "batch.results, batch.with_grad = before", "pass"),
    kills="PIPE-148",
)
