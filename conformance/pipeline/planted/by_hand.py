"""Faults that ``test_by_hand`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched

absent_batches_sent = patched(
    "A stage that is given no batch looks for its context.",
    mutated(
        "twinproof.pipeline.driver:Pipeline.start_sparse_data_dist",
        "None if batch is None else self._found(context)",
        "self._found(context)",
    ),
    kills="PIPE-566",
)
absent_batches_looked_up = patched(
    "A lookup of no batch looks for its context.",
    mutated("twinproof.pipeline.driver:LookupPipeline.start_embedding_lookup", "if batch is not None:", "if True:"),
    kills="PIPE-566",
)
early_without_a_batch = patched(
    "A pipeline in which nothing is in flight looks up early.",
    mutated("twinproof.pipeline.driver:TrainPipelineSemiSync.is_semi_sync", "len(self._queue) > 0 and ", ""),
    kills="PIPE-566",
)
current_batch_recalled = patched(
    "What takes the place of the current batch forgets what was looked up for it.",
    mutated("twinproof.pipeline.driver:Pipeline._replace", "in_flight is self._current or ", ""),
    kills="PIPE-567",
)
half_removed_batch_recalled = patched(
    "A batch whose context was removed is looked for among those in flight.",
    mutated("twinproof.pipeline.driver:Pipeline._replace", " or in_flight not in self._queue", ""),
    kills="PIPE-567",
)
ended_loaders_asked = patched(
    "A loader that has ended is asked again.",
    mutated("twinproof.pipeline.config:LoaderEnds._take_loader", "if self._dataloader_exhausted:", "if False:"),
    kills="PIPE-568",
)
own_contexts_lost = patched(
    "A context that a copy gives in place of the pipeline's is lost.",
    mutated("twinproof.pipeline.driver:Pipeline.enqueue_batch", " and made.context is context", ""),
    kills="PIPE-569",
)
copies_always_asked = patched(
    "A copy that did not ask the pipeline's is taken for one that did.",
    mutated("twinproof.pipeline.driver:Pipeline.enqueue_batch", "made is not None and ", ""),
    kills="PIPE-569",
)
removed_batch_removed_again = patched(
    "A batch that was removed is removed again behind an error.",
    mutated("twinproof.pipeline.driver:Pipeline._drop", "if in_flight in self._queue:", "if True:"),
    kills="PIPE-570",
)
any_site_taken = patched(
    "With torchrec there every site is taken.",
    mutated(
        "twinproof.pipeline.driver:Pipeline.register_backward_hook",
        " or not isinstance(site, injection.InjectionSite)",
        "",
    ),
    kills="PIPE-571",
)
sites_in_wrappers = patched(
    "Sites are looked for from the wrapper on.",
    mutated("twinproof.pipeline.driver:Pipeline.register_backward_hook", "unwrapped(self._model)", "self._model"),
    kills="PIPE-571",
)
inserted_at_the_end = patched(
    "A batch that is inserted anywhere is appended.",
    mutated("twinproof.pipeline.torchrec_models:QueueView.insert", " and at_end", ""),
    kills="PIPE-572",
)
contexts_to_the_first = patched(
    "A context is the first batch's, which has one.",
    mutated("twinproof.pipeline.torchrec_models:QueueView.insert", " if batch.given_context is None", ""),
    kills="PIPE-572",
)
contexts_of_replaced_batches = patched(
    "A batch in the place of another gets a context of its own.",
    mutated(
        "twinproof.pipeline.driver:Pipeline._replace",
        "made.index, made.given_context = in_flight.index, in_flight.given_context",
        "made.index = in_flight.index",
    ),
    kills="PIPE-721",
)

contexts_replace_batches = patched(
    "A context in place of another takes its batch's place.",
    mutated("twinproof.pipeline.torchrec_models:QueueView.__setitem__", "if self._is_batches:", "if True:"),
    kills="PIPE-572",
)
second_calls_are_changed_ones = patched(
    "A second call is taken for one that a hook changed.",
    mutated("twinproof.pipeline.driver:Pipeline._result_of", "if ahead is not None:", "if True:"),
    kills="PIPE-573",
)

contexts_inserted_anywhere = patched(
    "A context goes to the first batch without one, wherever it is to be inserted.",
    mutated(
        "twinproof.pipeline.torchrec_models:QueueView.insert",
        "(at_end or self._items()[index : index + 1] == lacking)",
        "True",
    ),
    kills="PIPE-704",
)
only_behind_the_last = patched(
    "A context is taken at the end alone.",
    mutated(
        "twinproof.pipeline.torchrec_models:QueueView.insert",
        "(at_end or self._items()[index : index + 1] == lacking)",
        "at_end",
    ),
    kills="PIPE-704",
)

slices_assigned = patched(
    "A slice that is assigned is taken for one batch.",
    mutated(
        "twinproof.pipeline.torchrec_models:QueueView._at",
        "if isinstance(index, slice):",
        "if isinstance(index, slice):\n        return self._queue[1]\n    if False:",
    ),
    kills="PIPE-704",
)
