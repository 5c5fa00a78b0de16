"""Faults that ``test_tables`` must notice."""

from __future__ import annotations

from typing import Any

import torch

from conformance.harness import fault, mutated, patched, swap
from twinproof.pipeline.config import _TAKEN


@fault(kills="PIPE-220", at="twinproof.pipeline.config:EmbeddingConfig.check")
def settings_not_checked(original: Any, *args: Any, **options: Any) -> None:
    """Settings without effect are taken."""


@fault(kills="PIPE-221", at="twinproof.pipeline.config:initialized")
def returned_weights_dropped(original: Any, table: Any, weight: torch.Tensor) -> torch.Tensor:
    """What init_fn returns is dropped."""
    table.init_fn(weight)
    return weight


@fault(kills="PIPE-222", at="twinproof.pipeline.sharded:optimizer_in_backward")
def optimizer_of_parameters_ignored(original: Any, params: Any) -> None:
    """The optimizer that parameters carry is ignored."""


@fault(kills="PIPE-223", at="twinproof.pipeline.sharded:ShardedEmbeddingBagCollection.named_parameters")
def cut_tables_without_names(original: Any, module: Any, *args: Any, **options: Any) -> Any:
    """Cut tables are no named parameters."""
    return torch.nn.Module.named_parameters(module, *args, **options)


generator_seeded = patched(
    "First weights by init_fn seed the generator of the program.",
    mutated("twinproof.pipeline.sharding:initial_shard", "torch.random.fork_rng(devices=[])", "torch.no_grad()"),
    kills="PIPE-408",
)

one_seed_of_all_tables = patched(
    "First weights by init_fn are drawn from the same seed for every table.",
    mutated("twinproof.pipeline.sharding:initial_shard", "torch.manual_seed(seed + index)", "torch.manual_seed(seed)"),
    kills="PIPE-414",
)

maximised_in_silence = patched(
    "An optimizer in the backward that maximizes is cut as one that minimizes.",
    swap("twinproof.pipeline.config:_TAKEN", (*_TAKEN, "maximize")),
    kills="PIPE-418",
)

first_weights_broadcast = patched(
    "First weights that can be broadcast are taken.",
    mutated(
        "twinproof.pipeline.config:initialized", "made.shape != weight.shape", "made.shape[-1:] != weight.shape[-1:]"
    ),
    kills="PIPE-483",
)

rows_of_another_optimizer = patched(
    "A store is taken whatever states its rows have.",
    mutated(
        "twinproof.pipeline.modules:KeyValueBags.__init__",
        "if found != (table.embedding_dim, table.dtype, kind):",
        "if found != (table.embedding_dim, table.dtype, layout.optimizer):",
    ),
    kills="PIPE-486",
)

optimizers_by_their_kind = patched(
    "Optimizers of one kind are taken for one, whatever their hyperparameters: all tables step with the first's.",
    mutated("twinproof.pipeline.config:optimizer_in_backward", "one != found[0]", "one.kind != found[0].kind"),
    kills="PIPE-497",
)

optimizers_as_they_were_made = patched(
    "The optimizer in the backward has the hyperparameters that the table's own was made with.",
    mutated(
        "twinproof.pipeline.config:_as_fused",
        "(group,) = type(optimizer).__name__, optimizer.param_groups",
        "group = type(optimizer).__name__, optimizer.defaults",
    ),
    kills="PIPE-546",
)
replicas_as_they_were_made = patched(
    "The optimizer of a replicated table has the hyperparameters that the table's own was made with.",
    mutated("twinproof.pipeline.config:carry_over", 'if key != "params"', "if not key"),
    kills="PIPE-546",
)
options_of_schedulers_refused = patched(
    "What a scheduler keeps beside the options of an optimizer is refused.",
    mutated("twinproof.pipeline.config:_as_fused", "if key in optimizer.defaults", ""),
    kills="PIPE-546",
)

strided_weights_are_copied = patched(
    "Weights that are not contiguous are copied.",
    mutated(
        "twinproof.pipeline.modules:TableBatchedEmbeddingBags.__init__", "weights[index]", "weights[index].contiguous()"
    ),
    kills="PIPE-559",
)
weights_are_copied = patched(
    "The tables are a copy of what was given.",
    mutated("twinproof.pipeline.modules:TableBatchedEmbeddingBags._hold", "weight.detach()", "weight.detach().clone()"),
    kills="PIPE-559",
)
weights_of_any_type = patched(
    "A weight may be of any type.",
    mutated("twinproof.pipeline.config:check_given", "not isinstance(weight, torch.Tensor)", "False"),
    kills="PIPE-559",
)

shards_in_whole_tables = patched(
    "A shard of rows that an init_fn made keeps the memory of the whole table.",
    mutated(
        "twinproof.pipeline.sharding:initial_shard",
        "part.clone(memory_format=torch.contiguous_format)",
        "part.contiguous()",
    ),
    kills="PIPE-648",
)

first_weights_with_gradients = patched(
    "init_fn is called with gradients: what writes into the weight fails when first weights are made again.",
    mutated("twinproof.pipeline.config:initialized", "torch.no_grad()", "torch.enable_grad()"),
    kills="PIPE-649",
)
rates_of_the_number_of_a_step = patched(
    "The learning rate of a step is remembered by its number.",
    mutated(
        "twinproof.pipeline.config:InBackwardOptimizer.hyper",
        "return self._hyper(self.step_count)",
        'known = vars(self).get("known")\n'
        "    if known is None or known.step != self.step_count:\n"
        "        known = self.known = self._hyper(self.step_count)\n"
        "    return known",
    ),
    kills="PIPE-683",
)

states_are_left_behind = patched(
    "A cut leaves the states of an optimizer that has stepped behind, in silence.",
    mutated("twinproof.pipeline.config:_as_fused", 'if states.get("step", 0) > 0', "if not states"),
    kills="PIPE-774",
)
