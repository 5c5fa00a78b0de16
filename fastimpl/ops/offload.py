"""The operators of offload, typed: Adam in one pass over host memory, and many tensors as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from twinproof.optimizers import AdamHyper

__all__ = [
    "SlabCounts",
    "SlabFacts",
    "adam_step",
    "copy_all",
    "copy_count",
    "host_slab",
    "pack",
    "register_fakes",
    "slab_counts",
    "slab_facts",
    "slot_step",
    "unpack",
]


class SlabFacts(NamedTuple):
    """Of a slab: whether it is pinned, the NUMA node that its pages were asked for, -1: none, and the errno of that."""

    is_pinned: bool
    node: int
    bind_error: int


class SlabCounts(NamedTuple):
    """Of all slabs of the process. ``kept_count`` were dropped during a graph capture and go later; ``wait_count``
    copies were waited for before pages went.
    """

    live_count: int
    live_bytes: int
    made_count: int
    freed_count: int
    kept_count: int
    wait_count: int


def register_fakes() -> None:
    """What most of them return is nothing; memory is memory, and a copy counts as one."""
    torch.library.register_fake("twinproof::offload_copy_count", lambda targets, sources: len(targets))
    torch.library.register_fake(
        "twinproof::offload_slab", lambda size, device, node: torch.empty(size, dtype=torch.uint8)
    )
    torch.library.register_fake("twinproof::offload_slab_facts", lambda memory: [0, 0, -1, 0])
    torch.library.register_fake("twinproof::offload_slab_counts", lambda: [0] * 6)
    for name in ("offload_adam_step", "offload_slot_step", "offload_copy", "offload_pack", "offload_unpack"):
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


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy tensor by tensor in one call, neighbours as one: on CUDA queued on the current stream, else done now.

    Args:
        targets: dense; CPU and one CUDA device, one of each pair at least on CUDA if any is. Apart. Written.
        sources: of their dtypes, shapes and strides. Those on the CPU should be pinned, and live until copied.

    Raises:
        RuntimeError: lists that do not fit each other; nothing is written then.
    """
    if not targets and not sources:
        return
    torch.ops.twinproof.offload_copy(targets, sources)
    torch.autograd.graph.increment_version(targets)


def copy_count(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> int:
    """How many copies ``copy_all`` makes of a list: what lies side by side on both ends, in one memory each, is one."""
    count: int = torch.ops.twinproof.offload_copy_count(targets, sources)
    return count


def host_slab(size_bytes: int, *, device: int = -1, node: int = -1) -> torch.Tensor:
    """Host memory on pages of its own, uint8 [size_bytes], zeroed, which goes when nothing of it is left.

    Args:
        size_bytes: 1 or more.
        device: the CUDA device that it is pinned for and lies near to; -1: ordinary memory.
        node: the NUMA node that it is to lie on; -1: the device's, where that is known. A wish: see ``slab_facts``.

    Raises:
        RuntimeError: no such size, or the driver refuses to pin so much.
    """
    memory: torch.Tensor = torch.ops.twinproof.offload_slab(size_bytes, device, node)
    return memory


def slab_facts(memory: torch.Tensor) -> SlabFacts | None:
    """Of the slab that a tensor lies in; None where it lies elsewhere."""
    is_slab, is_pinned, node, bind_error = torch.ops.twinproof.offload_slab_facts(memory)
    return SlabFacts(bool(is_pinned), node, bind_error) if is_slab else None


def slab_counts() -> SlabCounts:
    """Of all slabs."""
    return SlabCounts(*torch.ops.twinproof.offload_slab_counts())


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
