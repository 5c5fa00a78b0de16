"""Faults in what is refused: wrong values instead of an error."""

from __future__ import annotations

from typing import Any

import torch

from conformance.harness import PlantedBug, swap, wrap

BOTH = ("fastimpl", "refimpl")
BASE = "twinproof.offload.base:OffloaderBase"


def _bug(id: str, sentence: str, requirements: tuple[str, ...], patch: Any, target: Any = BOTH) -> PlantedBug:
    return PlantedBug(id, sentence, requirements, target, patch)


def _made_dense(offloader: Any) -> None:
    for param in offloader._known:
        source = param if offloader.masters is None else offloader.masters.pairs[param]
        if source.grad is not None and source.grad.layout is not torch.strided:
            source.grad = source.grad.to_dense()


def _as_if_plain(original: Any, optimizer: Any, param: Any, group: Any) -> Any:
    return original(optimizer, getattr(param, "_local_tensor", param), group)


def _taken_over_first(original: Any, offloader: Any) -> None:
    if not offloader._known:
        offloader.optimizer.step = offloader.optimizer.step
    original(offloader)


def _power_of_two(original: Any, offloader: Any, size_bytes: int) -> Any:
    return original(offloader, 1 << max(size_bytes - 1, 0).bit_length())[:size_bytes]


def _first_device(original: Any, offloader: Any, engine: Any) -> Any:
    return offloader.default_engine(torch.device("cpu")) if engine is None else original(offloader, engine)


PLANTED = (
    _bug(
        "first_device_taken",
        "Of several devices one is taken.",
        ("OPT-089",),
        wrap(f"{BASE}._engine_of", _first_device),
    ),
    _bug(
        "taken_over_before_there_is_memory",
        "Attachment that fails leaves a step that is not the optimizer's own.",
        ("OPT-035",),
        wrap(f"{BASE}._adopt_params", _taken_over_first),
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
        wrap("twinproof.offload.bookkeeping:expected_states", _as_if_plain),
    ),
    _bug(
        "quantized_taken_for_bytes",
        "facts 2, torchao low-bit: a state of several tensors is moved as if it were one.",
        ("OPT-244",),
        swap("twinproof.offload.loading:check_plain", lambda value, where: None),
    ),
    _bug(
        "host_memory_rounded",
        "pytorch #150517: each block of host memory is a power of two.",
        ("OPT-245",),
        wrap(f"{BASE}.host_empty", _power_of_two),
    ),
)
