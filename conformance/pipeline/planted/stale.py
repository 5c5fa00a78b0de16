"""Faults that ``test_stale`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched

added_without_stash = patched(
    "A parameter that comes under the optimizer while gradients are stashed is looked for among them.",
    mutated("twinproof.pipeline.driver:TrainPipelineSemiSync._step_dense", "given.get(param)", "given[param]"),
    kills="PIPE-423",
)
evaluated_rows_trained = patched(
    "Rows that were looked up in evaluation are trained on, and have no way back.",
    mutated(
        "twinproof.pipeline.driver:TrainPipelineSemiSync.needs_lookup",
        "if batch.with_grad >= self._model.training:",
        "if True:",
    ),
    kills="PIPE-423",
)
nobody_recalled = patched(
    "Rows that were looked up ahead stay where the optimizer fails: they are stale by two updates.",
    mutated("twinproof.pipeline.driver:Pipeline._drop", "for other in self._queue:", "for other in ():"),
    kills="PIPE-423",
)
stash_outlives_a_reset = patched(
    "reset() keeps gradients that were stashed.",
    mutated("twinproof.pipeline.driver:TrainPipelineSemiSync.reset", "self._stash = None", "pass"),
    kills="PIPE-634",
)
stash_forgotten_for_good = patched(
    "Behind a reset() nothing is stashed.",
    mutated("twinproof.pipeline.driver:TrainPipelineSemiSync.reset", "self._stash = None", "self._stashes = False"),
    kills="PIPE-634",
)
starts_anew_behind_a_reset = patched(
    "start_batch counts from a reset on.",
    mutated(
        "twinproof.pipeline.driver:TrainPipelineSemiSync.is_semi_sync",
        "self.processed_count >= self._start_batch",
        "self._queue[0].index >= self._start_batch",
    ),
    kills="PIPE-681",
)
