"""Faults that ``test_gradients`` must notice."""

from __future__ import annotations

from typing import Any

import torch

from conformance.harness import fault, mutated, patched


@fault(kills="OPT-025", at="twinproof.offload.offloader:OptimizerStateOffloader._check_gradients")
def sparse_gradients_made_dense(original: Any, offloader: Any) -> None:
    """Sparse gradients are stepped as if they were dense."""
    for param in offloader.plan.known:
        source = param if offloader.masters is None else offloader.masters.pairs[param]
        if source.grad is not None and source.grad.layout is not torch.strided:
            source.grad = source.grad.to_dense()


rounded_by_one_dtype = patched(
    "Weights of several dtypes are rounded to that of the first, where their gradients have one.",
    mutated(
        "fastimpl.offload.cpu_step:HostStep._update",
        "None if rounded is None else rounded.dtype",
        "rounded is None",
    ),
    kills="OPT-396",
)

graphs_that_end = patched(
    "A differentiable step takes gradients of a graph, which ends where its states move.",
    mutated("twinproof.offload.driver:check_gradients", "has_graph and grad is not None", "False"),
    kills="OPT-446",
)
