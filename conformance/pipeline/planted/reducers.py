"""Faults that ``test_reducers`` must notice."""

from __future__ import annotations

from typing import Any

import torch

from conformance.harness import fault, mutated, patched


@fault(kills="PIPE-290", at="twinproof.pipeline.stages:DenseGradients.check")
def dense_trains_apart(original: Any, dense: Any) -> None:
    """Nobody has to reduce (torchrec)."""


@fault(kills="PIPE-291", at="twinproof.pipeline.stages:DenseGradients.__init__")
def reduced_ones_refused(original: Any, dense: Any, model: Any, optimizer: Any, **options: Any) -> None:
    """What is reduced is refused."""
    original(dense, model, optimizer, **options)
    dense.params = [param for param in model.parameters() if param.requires_grad]
    dense.names = ["a parameter"] * len(dense.params)


@fault(kills=("PIPE-292", "PIPE-293"), at="twinproof.pipeline.stages:DenseGradients.reduce")
def dense_not_reduced(original: Any, dense: Any, group: Any, world_size: int) -> None:
    """Asked for, and not done."""


@fault(kills="PIPE-292", at="twinproof.pipeline.stages:DenseGradients.reduce")
def absent_gradients_left_out(original: Any, dense: Any, group: Any, world_size: int) -> None:
    """A rank without a gradient does not count."""
    # The mean over those that have one.
    if world_size > 1:
        counts = torch.tensor([float(param.grad is not None) for param in dense.params])
        torch.distributed.all_reduce(counts, group=group)
        original(dense, group, world_size)
        for param, count in zip(dense.params, counts.tolist(), strict=True):
            if param.grad is not None:
                param.grad.mul_(world_size / count)


looked_at_once = patched(
    "Which parameters are to be reduced is asked once.",
    mutated("twinproof.pipeline.stages:DenseGradients.is_current", "return ", "return True or "),
    kills="PIPE-404",
)
thawed_unseen = patched(
    "A parameter that was frozen when it was first looked at is never reduced.",
    mutated("twinproof.pipeline.stages:_trained", "(id(param), param.requires_grad)", "(id(param), True)"),
    kills="PIPE-404",
)
ignored_by_ddp_counted = patched(
    "What DistributedDataParallel leaves out counts as reduced.",
    mutated("twinproof.pipeline.stages:_wrapped", "set(module.parameters_to_ignore)", "set()"),
    kills="PIPE-424",
)
ignored_by_fsdp_counted = patched(
    "What FullyShardedDataParallel leaves out counts as reduced.",
    mutated("twinproof.pipeline.stages:_by_fsdp", 'getattr(module, "_ignored_params", ())', "()"),
    kills="PIPE-424",
)
ignored_by_replicate_counted = patched(
    "What replicate leaves out counts as reduced.",
    mutated("twinproof.pipeline.stages:_by_replicate", "if id(param) not in ignored", "if ignored is not None"),
    kills="PIPE-424",
)
summed_before_divided = patched(
    "Dense gradients are summed over the ranks, and divided then.",
    mutated(
        "twinproof.pipeline.stages:DenseGradients.reduce",
        ".div_(world_size)\n        dist.all_reduce(flat, group=process_group)\n",
        "\n        dist.all_reduce(flat, group=process_group)\n        flat.div_(world_size)\n",
    ),
    kills="PIPE-433",
)


means_in_new_tensors = patched(
    "Means come in tensors of their own, and what held the gradients keeps the rank's.",
    mutated(
        "twinproof.pipeline.stages:DenseGradients.reduce",
        "param.grad = grad.copy_(part.view(grad.shape))",
        "param.grad = part.view(grad.shape)",
    ),
    kills="PIPE-540",
)


@fault(kills="PIPE-448", at="twinproof.pipeline.stages:DenseGradients.reduce")
def sparse_made_dense(original: Any, dense: Any, group: Any, world_size: int) -> None:
    """Sparse gradients are made dense without a word, and averaged."""
    for param in dense.params:
        param.grad = None if param.grad is None else param.grad.to_dense()
    original(dense, group, world_size)


only_parameters_of_the_model = patched(
    "Parameters that only a forward of the caller's uses are neither checked nor reduced.",
    mutated("twinproof.pipeline.driver:Pipeline._check_reducers", "self._forward is not None", "False"),
    kills="PIPE-491",
)

views_stashed_as_they_are = patched(
    "SemiSync stashes views of somebody else's memory.",
    mutated("twinproof.pipeline.driver:TrainPipelineSemiSync._step_dense", "and grad._is_view()", "and False"),
    kills="PIPE-507",
)

masters_are_somebody_else_s = patched(
    "A master counts as a parameter of nobody, and not as the one that it is rounded into.",
    mutated("twinproof.optimizers:_trained", "found = master_of.param if", "found = None if"),
    kills="PIPE-510",
)

gradients_of_masters_alone_cleared = patched(
    "Where an optimizer steps masters, their gradients are cleared, and not those of the model.",
    mutated("twinproof.offload.states:_take_grad", "if param is not None and master.is_driven:", "if False:"),
    kills="PIPE-511",
)

one_model_is_looked_at = patched(
    "Who reduces the gradients is asked of the first model alone.",
    mutated("twinproof.pipeline.driver:Pipeline.detach", "self._dense = None", "pass"),
    kills="PIPE-534",
)
hooks_of_gradients_unseen = patched(
    "Hooks of gradients do not count.",
    mutated("twinproof.pipeline.stages:_has_hook", "bool(param._backward_hooks) or ", ""),
    kills="PIPE-591",
)
nothing_reduced_all_the_same = patched(
    "Where nothing is to be reduced its place is asked for.",
    mutated("twinproof.pipeline.stages:DenseGradients.reduce", "if not self.params:", "if False:"),
    kills="PIPE-591",
)
