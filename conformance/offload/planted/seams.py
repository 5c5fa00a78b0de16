"""Faults that ``test_seams`` must notice."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from conformance.harness import fault
from conformance.offload.cases import TASK_BYTES
from conformance.offload.planted.planting import Altered

_PAYLOAD = 0x7FFF8000


@fault(kills="OPT-292", at="fastimpl.ops:pack")
def last_piece_left_out(original: Any, sources: Any, slab: torch.Tensor, offsets: Any) -> None:
    """Of a tensor of whole pieces and a byte, the byte is left out."""
    before = slab.clone()
    original(sources, slab, offsets)
    for source, offset in zip(sources, offsets, strict=True):
        if source.nbytes > TASK_BYTES and source.nbytes % TASK_BYTES == 1:
            slab[offset + source.nbytes - 1] = before[offset + source.nbytes - 1]


@fault(kills="OPT-292", at="fastimpl.ops:unpack")
def whole_pieces_are_no_task(original: Any, targets: Any, slab: torch.Tensor, offsets: Any) -> None:
    """Of a tensor of several whole pieces, the last one stays in the slab."""
    kept = [target.clone() for target in targets]
    original(targets, slab, offsets)
    for target, before in zip(targets, kept, strict=True):
        if target.nbytes > TASK_BYTES and target.nbytes % TASK_BYTES == 0:
            end = target.view(-1).view(torch.uint8)[-TASK_BYTES:]
            end.copy_(before.view(-1).view(torch.uint8)[-TASK_BYTES:])


@fault(kills="OPT-293", at="twinproof.offload.driver:Update.advance")
def cpu_decay_of_the_first_group(original: Any, update: Any, optimizer: Any) -> Any:
    """A step on the CPU takes the weight decay of the first group for all."""
    decay = optimizer.param_groups[0]["weight_decay"]
    return original(dataclasses.replace(update, group={**update.group, "weight_decay": decay}), optimizer)


@fault(kills="OPT-293", at="fastimpl.offload.cpu_step:HostStep._update")
def cpu_first_dtype_for_all(original: Any, step: Any, work: Any, pairs: Any) -> None:
    """Weights of float16 that are stepped beside others of bfloat16 are rounded as those."""
    original(step, work, pairs)
    kinds = {weight.dtype for _, weight in pairs}
    for _, weight in pairs if torch.bfloat16 in kinds else ():
        if weight.dtype is torch.float16:
            weight.copy_(weight.to(torch.bfloat16))


@fault(kills="OPT-294", at="fastimpl.offload.cpu_step:HostStep._make_slots")
def cpu_slots_grow_at_once(original: Any, step: Any, works: Any) -> Any:
    """Host slots that are too small are let go while weights still leave them."""
    engine = step.engine
    step.engine = Altered(engine, "synchronize", 1, None)
    try:
        return original(step, works)
    finally:
        step.engine = engine


@fault(kills="OPT-295", at="fastimpl.ops:adam_step")
def cpu_long_payloads_carry(original: Any, hyper: Any, *lists: Sequence[torch.Tensor], isa: int = -1) -> None:
    """A NaN whose payload is all ones is rounded up, past all NaNs, to a zero."""
    original(hyper, *lists, isa=isa)
    for master, weight in zip(lists[1], lists[5], strict=False):
        payload = master.view(torch.int32) & 0x7FFFFFFF
        weight.masked_fill_(master.isnan() & (payload > _PAYLOAD), 0.0)
