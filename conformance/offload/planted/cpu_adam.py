"""Faults that ``test_cpu_adam`` must notice."""

from __future__ import annotations

import unittest.mock
from collections.abc import Sequence
from typing import Any

import torch

from conformance.harness import fault
from conformance.offload.cases import BLOCK_ELEMENTS


@fault(kills="OPT-211", at="fastimpl.ops:adam_step")
def cpu_maximum_forgotten(original: Any, hyper: Any, *lists: Sequence[torch.Tensor], isa: int = -1) -> None:
    """The largest second moment is used but not stored."""
    kept = [tensor.clone() for tensor in lists[4]]
    original(hyper, *lists, isa=isa)
    for largest, before in zip(lists[4], kept, strict=True):
        largest.copy_(before)


@fault(kills="OPT-211", at="fastimpl.ops:adam_step")
def cpu_multiply_add_fused(original: Any, hyper: Any, *lists: Sequence[torch.Tensor], isa: int = -1) -> None:
    """Vector kernels use a fused multiply-add, which rounds once instead of twice."""
    before = [square.clone() for square in lists[3]]
    original(hyper, *lists, isa=isa)
    if isa == 0 or hyper.coupled:
        return
    for grad, square, old in zip(lists[0], lists[3], before, strict=True):
        exact = hyper.beta2 * old.double() + hyper.one_minus_beta2 * grad.float().square().double()
        square.copy_(torch.where(square.isfinite(), exact.float(), square))


@fault(kills="OPT-212", at="fastimpl.ops:adam_step")
def cpu_threads_uneven(original: Any, hyper: Any, *lists: Sequence[torch.Tensor], isa: int = -1) -> None:
    """The elements of all threads but the first are rounded differently."""
    original(hyper, *lists, isa=isa)
    for master in lists[1]:
        master[master.numel() // torch.get_num_threads() :].mul_(1.0000002)


@fault(kills="OPT-213", at="fastimpl.ops:adam_step")
def cpu_write_unseen(original: Any, *arguments: Any, **options: Any) -> None:
    """Version counters do not see what the operator wrote."""
    with unittest.mock.patch("torch.autograd.graph.increment_version"):
        original(*arguments, **options)


@fault(kills="OPT-214", at="fastimpl.ops:adam_step")
def cpu_moments_decayed_before_checks(original: Any, hyper: Any, *lists: Sequence[torch.Tensor], isa: int = -1) -> None:
    """A call that is refused has already changed the moments."""
    for average in lists[2]:
        average.mul_(hyper.beta1)
    original(hyper, *lists, isa=isa)


@fault(kills="OPT-367", at="fastimpl.ops:adam_step")
def cpu_last_left_out(original: Any, hyper: Any, *lists: Sequence[torch.Tensor], isa: int = -1) -> None:
    """An element that is left over for itself is not updated."""
    kept = [master.clone() for master in lists[1]]
    original(hyper, *lists, isa=isa)
    for master, before in zip(lists[1], kept, strict=True):
        if master.numel() > BLOCK_ELEMENTS and master.numel() % BLOCK_ELEMENTS == 1:
            master[-1:].copy_(before[-1:])
