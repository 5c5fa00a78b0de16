"""Faults that ``test_stream_programs`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched

prepared_not_kept = patched(
    "What ran ahead of the model is not kept for the forward's stream.",
    mutated("fastimpl.pipeline.stages:StreamedStages.forward", ", batch.prepared]", "]"),
    kills="PIPE-368",
)
edits_overtake_an_evaluation = patched(
    "SemiSync, evaluating, lets edits overtake the lookup of the next batch.",
    mutated("fastimpl.pipeline.schedules:semi_sync", "s.wait_for_lookup(following)", "pass"),
    kills="PIPE-368",
)
edits_overtake_an_interrupted_call = patched(
    "Edits behind a loader's error overtake the lookup that the call had begun.",
    mutated("fastimpl.pipeline.stages:undone_on_error", "stages.wait_for_lookup(batch)", "pass"),
    kills="PIPE-368",
)
