"""Faults that ``test_foreign`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched

results_asked_in_one_step = patched(
    "Every module is asked for both steps at once.",
    mutated(
        "twinproof.pipeline.stages:looked_up", "if both is None else both(ctx, given)", "if False else both(ctx, given)"
    ),
    kills="PIPE-574",
)
shared_graphs_gone_back_twice = patched(
    "What shares a graph goes back through it one by one.",
    mutated(
        "twinproof.pipeline.driver:TrainPipelineSemiSync.embedding_backward",
        "torch.autograd.backward([looked_up for looked_up, _ in ways], [grad for _, grad in ways])",
        "[looked_up.backward(grad) for looked_up, grad in ways]",
    ),
    kills="PIPE-574",
)
untrained_tables_gone_back_to = patched(
    "A table that nobody trains is gone back to.",
    mutated("twinproof.pipeline.driver:TrainPipelineSemiSync.embedding_backward", " and up.requires_grad", ""),
    kills="PIPE-574",
)
results_cut_as_they_are = patched(
    "What cannot be cut off is driven as it is.",
    mutated(
        "twinproof.pipeline.stages:_each_tensor",
        'raise PipelineError("a lookup\'s result that cannot be cut off", got=got, expected=expected, where="lookup")',
        "return result",
    ),
    kills="PIPE-575",
)
lists_of_a_graph = patched(
    "Lists and dictionaries are those of the graph.",
    mutated(
        "twinproof.pipeline.stages:_evaluated",
        "return parts",
        "return torch.fx.immutable_collections.immutable_list(parts)",
    ),
    kills="PIPE-576",
)
lists_that_begin_alike = patched(
    "A list that begins as another is the same.",
    mutated("twinproof.pipeline.stages:_same", "len(one) == len(other) and ", ""),
    kills="PIPE-576",
)
numbers_and_words_alike = patched(
    "Numbers and words are not told apart.",
    mutated("twinproof.pipeline.stages:_same", "not isinstance(one, (int, float, str, bool)) or one == other", "True"),
    kills="PIPE-576",
)
lazy_results_not_kept = patched(
    "What a lazy result holds is not kept for the stream that reads it.",
    mutated("fastimpl.pipeline.stages:tensors_in", ' or hasattr(type(value), "wait")', ""),
    kills="PIPE-594",
    of="fastimpl",
)
other_results_not_kept = patched(
    "What no lookup of ours returns is not kept for the stream that reads it.",
    mutated(
        "fastimpl.pipeline.stages:StreamedStages.forward",
        "batch.results, ",
        '[each for each in batch.results.values() if hasattr(each, "key_dim")], ',
    ),
    kills="PIPE-594",
    of="fastimpl",
)
