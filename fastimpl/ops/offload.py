"""The operators of offload, typed: Adam in one pass over host memory, and many tensors as one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from twinproof.optimizers import AdamHyper

__all__ = ["adam_step", "pack", "register_fakes", "slot_step", "unpack"]


def register_fakes() -> None:
    """Nothing is returned: under fake tensors there is nothing to make."""
    for name in ("offload_adam_step", "offload_slot_step", "offload_pack", "offload_unpack"):
        torch.library.register_fake(f"twinproof::{name}", lambda *args: None)


def adam_step(
    hyper: AdamHyper,
    grads: Sequence[torch.Tensor],
    masters: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
    max_exp_avg_sqs: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    *,
    isa: int = -1,
) -> None:
    """One step of Adam or AdamW in one pass over host memory, to the bit that of ``refimpl.optimizers.adam_step``.

    Args:
        hyper: the same for all of them.
        grads: of the masters' shapes and strides, all float32, all bfloat16 or all float16, CPU.
        masters: float32, dense. Written.
        exp_avgs: float32. Written.
        exp_avg_sqs: float32. Written.
        max_exp_avg_sqs: float32, with amsgrad; else empty. Written.
        weights: of one dtype as the gradients are; get the masters, rounded to nearest even. Or empty. Written.
        isa: 0 plain, 1 AVX2, 2 AVX-512, -1 the best that this machine has; changes no bit.

    Raises:
        RuntimeError: lists that do not fit each other, or an ``isa`` that this machine lacks; nothing is written then.
    """
    if not masters:
        return
    lists = (masters, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, weights)
    torch.ops.twinproof.offload_adam_step(grads, *lists, hyper.values, hyper.maximize, hyper.coupled, isa)
    for written in lists:
        torch.autograd.graph.increment_version(written)


def slot_step(
    kind: int,
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    states: Sequence[Sequence[torch.Tensor]],
    hyper_of: Sequence[int],
    hypers: Sequence[float],
) -> None:
    """One step of torch's SGD, Adam or Adagrad, with the bits of its foreach path on CUDA, on either device.

    Args:
        kind: a code of ``fastimpl.offload.slot_step``: SGD, SGD with momentum, Adam, Adam with amsgrad, Adagrad.
        params: float32, bfloat16 or float16, all of one dtype and device; dense. Written.
        grads: like the parameters, in dtype, shape and strides.
        states: three lists in torch's order, like the parameters too; empty where the kind has none. Written.
        hyper_of: for each parameter, which set of numbers it is stepped with.
        hypers: nine numbers a set: see ``SlotHyper`` in csrc/offload/foreach.h.

    Raises:
        RuntimeError: lists that do not fit each other; nothing is written then.
    """
    if not params:
        return
    torch.ops.twinproof.offload_slot_step(kind, params, grads, *states, hyper_of, hypers)
    for written in (params, *states):
        torch.autograd.graph.increment_version(written)


def pack(sources: Sequence[torch.Tensor], slab: torch.Tensor, offsets: Sequence[int]) -> None:
    """Copy the bytes of many tensors into one slab: one call, on CUDA a launch for each 160 of them.

    Args:
        sources: dense, of any dtypes, CPU or one CUDA device.
        slab: uint8 [n], same device. Written.
        offsets: first byte of each tensor in the slab; ascending, apart.

    Raises:
        RuntimeError: tensors with gaps, on another device, or places that do not fit; nothing is written then.
    """
    torch.ops.twinproof.offload_pack(sources, slab, offsets)
    torch.autograd.graph.increment_version(slab)


def unpack(targets: Sequence[torch.Tensor], slab: torch.Tensor, offsets: Sequence[int]) -> None:
    """The inverse of ``pack``: ``targets`` are written."""
    torch.ops.twinproof.offload_unpack(targets, slab, offsets)
    torch.autograd.graph.increment_version(targets)
