"""Faults in what is refused: wrong values instead of an error."""

from __future__ import annotations

from typing import Any

import torch

from conformance.harness import PlantedBug, swap, wrap

BOTH = ("fastimpl", "refimpl")
BASE = "twinproof.offload.offloader:OptimizerStateOffloader"


def _bug(id: str, sentence: str, requirements: tuple[str, ...], patch: Any, target: Any = BOTH) -> PlantedBug:
    return PlantedBug(id, sentence, requirements, target, patch)


def _made_dense(offloader: Any) -> None:
    for param in offloader.plan.known:
        source = param if offloader.masters is None else offloader.masters.pairs[param]
        if source.grad is not None and source.grad.layout is not torch.strided:
            source.grad = source.grad.to_dense()


def _as_if_plain(original: Any, optimizer: Any, param: Any, group: Any) -> Any:
    return original(optimizer, getattr(param, "_local_tensor", param), group)


def _taken_over_first(original: Any, plan: Any, transfers: Any) -> None:
    if not plan.known:
        plan.optimizer.step = plan.optimizer.step
    original(plan, transfers)


def _power_of_two(original: Any, plan: Any, size_bytes: int) -> Any:
    return original(plan, 1 << max(size_bytes - 1, 0).bit_length())[:size_bytes]


def _first_device(original: Any, optimizer: Any, step_device: str, engine: Any, transfers: Any) -> Any:
    if engine is None:
        return transfers.default_engine(torch.device("cpu"))
    return original(optimizer, step_device, engine, transfers)


PLANTED = (
    _bug(
        "first_device_taken",
        "Of several devices one is taken.",
        ("OPT-089",),
        wrap("twinproof.offload.offloader:_engine_of", _first_device),
    ),
    _bug(
        "taken_over_before_there_is_memory",
        "Attachment that fails leaves a step that is not the optimizer's own.",
        ("OPT-035",),
        wrap("twinproof.offload.plan:MovePlan.adopt", _taken_over_first),
    ),
    _bug(
        "sparse_gradients_made_dense",
        "Sparse gradients are stepped as if they were dense.",
        ("OPT-025",),
        swap(f"{BASE}._check_gradients", _made_dense),
    ),
    _bug(
        "sharded_factors",
        "Adafactor's factors are taken of each shard.",
        ("OPT-086",),
        wrap("twinproof.offload.plan:expected_states", _as_if_plain),
    ),
    _bug(
        "quantized_taken_for_bytes",
        "torchao low-bit: a state of several tensors is moved as if it were one.",
        ("OPT-244",),
        swap("twinproof.offload.plan:check_plain", lambda value, where: None),
    ),
    _bug(
        "host_memory_rounded",
        "pytorch #150517: each block of host memory is a power of two.",
        ("OPT-245",),
        wrap("twinproof.offload.plan:MovePlan.host_empty", _power_of_two),
    ),
)
