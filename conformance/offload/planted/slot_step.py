"""Faults that ``test_slot_step`` must notice."""

from __future__ import annotations

import unittest.mock
from typing import Any

import torch

from conformance.harness import fault, mutated, patched, swap
from conformance.offload.cases import BLOCK_ELEMENTS
from conformance.offload.planted.planting import altered


@fault(kills="OPT-272", at="fastimpl.ops:slot_step")
def slot_step_not_fused(original: Any, kind: int, params: Any, grads: Any, states: Any, *numbers: Any) -> None:
    """A gradient is added by a product and a sum, each of which rounds."""
    before = [param.clone() for param in params]
    original(kind, params, grads, states, *numbers)
    for param, old, first in zip(params, before, states[0], strict=False):
        if kind == 1 and param.dtype is torch.float32:
            param.copy_(old + torch.tensor(-0.1) * first)


@fault(kills="OPT-272", at="fastimpl.offload.slot_step:hyper_of")
def slot_flags_of_maximize_lost(original: Any, kind: str, group: Any, *arguments: Any, **options: Any) -> Any:
    """An optimizer that maximizes minimizes."""
    return original(kind, {**group, "maximize": False}, *arguments, **options)


@fault(kills="OPT-273", at="fastimpl.ops:slot_step")
def slot_threads_uneven(original: Any, kind: int, params: Any, *lists: Any) -> None:
    """The elements of all threads but the first are rounded differently."""
    original(kind, params, *lists)
    for param in params:
        param[param.numel() // torch.get_num_threads() :].mul_(1.02)


@fault(kills="OPT-274", at="fastimpl.offload.slot_step:SlotUpdates._call")
def slot_numbers_of_the_first_group(original: Any, updates: Any, kind: str, call: Any) -> None:
    """All parameters of a chunk are stepped with the numbers of its first group."""
    call.groups[:] = call.groups[:1] * len(call.groups)
    original(updates, kind, call)


@fault(kills="OPT-274", at="fastimpl.offload.slot_step:SlotUpdates.begin")
def slot_reasons_kept(original: Any, updates: Any) -> None:
    """What was said of the first step is said of every step."""
    if updates.plan.counts.step_count > 0:
        updates.end = lambda: None
    original(updates)


slot_updated_before_it_arrives = patched(
    "The update in a slot does not wait for its chunk to arrive.", altered("_update_chunk", "wait"), kills="OPT-275"
)


@fault(kills="OPT-276", at="fastimpl.offload.slot_step:SlotUpdates._call")
def slot_call_for_each_parameter(original: Any, updates: Any, kind: str, call: Any) -> None:
    """A call is made for each parameter."""
    for i in range(len(call.params)):
        some = slice(i, i + 1)
        columns = tuple(column[some] for column in call.states)
        original(
            updates, kind, type(call)(call.params[some], call.grads[some], columns, call.steps[some], call.groups[some])
        )


@fault(kills="OPT-277", at="fastimpl.offload.slot_step:_why_not_group")
def slot_options_not_looked_at(original: Any, optimizer: Any, group: Any) -> str:
    """Only the class of an optimizer decides."""
    return "" if type(optimizer) in (torch.optim.SGD, torch.optim.AdamW) else str(original(optimizer, group))


@fault(kills="OPT-277", at="fastimpl.offload.slot_step:_why_not_group")
def slot_single_steps_taken(original: Any, optimizer: Any, group: Any) -> str:
    """With fused=False, where torch steps each tensor by itself, the kernel takes over."""
    reason: str = original(optimizer, group)
    return "" if reason == "fused=False" else reason


@fault(kills="OPT-278", at="fastimpl.offload.slot_step:_why_not_param")
def slot_forms_not_looked_at(original: Any, *arguments: Any, **options: Any) -> str:
    """Strides, dtypes and ranks of parameters are taken as they come, one by one."""
    return ""


@fault(kills="OPT-279", at="fastimpl.offload.slot_step:SlotUpdates._why_nowhere")
def slot_taken_unasked(original: Any, updates: Any) -> str:
    """The kernel updates wherever it can."""
    return ""


first_release_left_out = patched(
    "The first release of torch that was read is left to torch.",
    swap("fastimpl.offload.slot_step:_READ", ((2, 12), (2, 13))),
    kills="OPT-330",
)


@fault(kills="OPT-280", at="fastimpl.ops:slot_step")
def slot_momentum_damped_twice(
    original: Any, kind: int, params: Any, grads: Any, states: Any, of: Any, hypers: Any
) -> None:
    """The momentum decays by the numbers of the weights."""
    numbers = [value * 0.999 if i % 9 == 3 else value for i, value in enumerate(hypers)]
    original(kind, params, grads, states, of, numbers)


@fault(kills="OPT-281", at="fastimpl.ops:slot_step")
def slot_write_unseen(original: Any, *arguments: Any) -> None:
    """Version counters do not see what the operator wrote."""
    with unittest.mock.patch("torch.autograd.graph.increment_version"):
        original(*arguments)


@fault(kills="OPT-282", at="fastimpl.ops:slot_step")
def slot_decayed_before_checks(original: Any, kind: int, params: Any, *lists: Any) -> None:
    """A call that is refused has already decayed the weights."""
    for param in params:
        param.mul_(0.5)
    original(kind, params, *lists)


other_orders_left_to_torch = patched(
    "A parameter whose dimensions lie in another order is taken for one with gaps.",
    mutated("twinproof.offload.states:is_dense", "== tensor.stride()", "> tensor.stride()"),
    kills="OPT-353",
)

gaps_taken_for_orders = patched(
    "Strides that leave gaps are taken for another order of dimensions.",
    mutated("twinproof.offload.states:is_dense", "== tensor.stride()", "<= tensor.stride()"),
    kills="OPT-353",
)


devices_by_the_alphabet = patched(
    "CUDA is taken for a device on which torch rounds otherwise.",
    mutated("fastimpl.offload.slot_step:SlotUpdates._why_nowhere", 'device.type != "cuda"', 'device.type <= "cuda"'),
    kills="OPT-355",
)


@fault(kills="OPT-366", at="fastimpl.ops:slot_step")
def slot_half_as_less(original: Any, kind: int, params: Any, grads: Any, states: Any, sets: Any, hypers: Any) -> None:
    """A weight of exactly one half takes the form of smaller weights."""
    below = [0.5 - 2**-25 if at % 9 == 2 and number == 0.5 else number for at, number in enumerate(hypers)]
    original(kind, params, grads, states, sets, below)


@fault(kills="OPT-366", at="fastimpl.ops:slot_step")
def slot_last_left_out(original: Any, kind: int, params: Any, *lists: Any) -> None:
    """An element that is left over for itself is not updated."""
    kept = [param.clone() for param in params]
    original(kind, params, *lists)
    for param, before in zip(params, kept, strict=True):
        if param.numel() > BLOCK_ELEMENTS and param.numel() % BLOCK_ELEMENTS == 1:
            param.view(-1)[-1:].copy_(before.view(-1)[-1:])


dtypes_of_gradients_not_looked_at = patched(
    "A gradient of another dtype than its parameter's goes into the kernel.",
    mutated(
        "fastimpl.offload.slot_step:_why_not_param", "if not is_rounded and grad.dtype != param.dtype:", "if False:"
    ),
    kills="OPT-427",
)


orders_of_states_not_looked_at = patched(
    "States whose elements lie in another order than their parameter's are given to the kernel.",
    mutated(
        "fastimpl.offload.slot_step:_add",
        "state.dtype, state.shape, state.stride()) != form",
        "state.dtype, state.shape, local.stride()) != form",
    ),
    kills="OPT-456",
    of="fastimpl",
)
