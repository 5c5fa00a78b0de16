"""Faults that ``test_frozen`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched

_TRAINED = "twinproof.pipeline.sharded:_Trained"
_SHARDED = "twinproof.pipeline.sharded:ShardedEmbeddingBagCollection"

frozen_tables_step = patched(
    "Tables that require no gradient are stepped by the backward.",
    mutated(f"{_TRAINED}._step", "len(kept) == len(self._names)", "True"),
    kills=("PIPE-517", "PIPE-519"),
)

neighbours_freeze = patched(
    "With one table its neighbours in the same lookup are frozen.",
    mutated(f"{_TRAINED}._step", "self._step_some(kept, bags, grad)", "pass"),
    kills="PIPE-517",
)

flags_go_with_parameters = patched(
    "A table is thawed where its parameter is made anew.",
    mutated(f"{_SHARDED}.named_parameters", "name not in self._frozen_now()", "True"),
    kills=("PIPE-517", "PIPE-518"),
)

replicas_thaw = patched(
    "A replicated table is trained though it required no gradient when it was cut.",
    mutated(f"{_SHARDED}._make_tables", "replica.weight.requires_grad_(weight.requires_grad)", "pass"),
    kills="PIPE-518",
)

copies_thaw = patched(
    "A copy of a module trains tables that the original was told to freeze.",
    mutated(f"{_SHARDED}.__getstate__", "set(self._frozen_now())", "set(self._frozen)"),
    kills="PIPE-518",
)

frozen_tables_thaw_where_moved = patched(
    "Who is moved forgets what was frozen since it was last looked at.",
    mutated(f"{_SHARDED}._apply", "self._frozen_now()", "pass"),
    kills="PIPE-528",
)

means_beside_frozen_tables_are_sums = patched(
    "A table of means is stepped as one of sums where its neighbour is frozen.",
    mutated(f"{_TRAINED}._step_some", "lookup.tables[index].is_mean", "False"),
    kills="PIPE-530",
)
made_for_frozen = patched(
    "Gradients of all tables are made, and those of frozen ones are dropped.",
    mutated("twinproof.pipeline.modules:Pooled.backward", "if ctx.needs_input_grad[5 + index]", "if True"),
    kills="PIPE-664",
)
sent_for_frozen = patched(
    "Gradients of all replicas are summed over ranks, and those of frozen ones are dropped.",
    mutated(
        "twinproof.pipeline.sharded:ShardedEmbeddingBagCollection._replicated_outputs",
        "trained = [param for param in params if param.requires_grad]",
        "params = trained = [p if p.requires_grad else p.detach().requires_grad_() for p in params]",
    ),
    kills="PIPE-664",
)
places_of_all_tables = patched(
    "Tables beside a frozen one are numbered from the last.",
    mutated(
        "twinproof.pipeline.jagged:of_tables",
        "[places[feature_tables[feature]]",
        "[len(kept) - 1 - places[feature_tables[feature]]",
    ),
    kills="PIPE-664",
)
weights_beside_trained_tables = patched(
    "Gradients of the weights are made where some table is trained alone.",
    mutated(
        "twinproof.pipeline.modules:Pooled.backward",
        "if ctx.needs_input_grad[4]:",
        "if ctx.needs_input_grad[4] and ctx.needs_input_grad[5]:",
    ),
    kills="PIPE-645",
)
used_as_in_the_first_step = patched(
    "Which parameters any rank uses is asked in the first step alone.",
    mutated(
        "twinproof.pipeline.stages:DenseGradients.reduce",
        "counts: list[int] = present.tolist()",
        "counts: list[int] = vars(self).setdefault('known', present.tolist())",
    ),
    kills="PIPE-684",
)
