"""Faults that ``test_cpu_step`` must notice."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from conformance.harness import fault, mutated, patched, wrap


@fault(kills="OPT-201", at="twinproof.offload.driver:Update.advance")
def cpu_rate_captured(original: Any, update: Any, optimizer: Any) -> Any:
    """A step on the CPU keeps using the learning rate of the first step."""
    rate = float(update.group["lr"])
    first = vars(update.bundle).setdefault("first_rate", rate)
    hyper = original(update, optimizer)
    return dataclasses.replace(hyper, step_size=hyper.step_size * first / rate)


@fault(kills="OPT-202", at="twinproof.optimizers:AdamHyper.of")
def cpu_bias_uncorrected(original: Any, kind: Any, **options: Any) -> Any:
    """A step on the CPU leaves out Adam's bias correction."""
    return original(kind, **{**options, "step": 1_000_000})


@fault(kills="OPT-206", at="twinproof.offload.driver:Update.advance")
def cpu_count_hidden(original: Any, update: Any, optimizer: Any) -> Any:
    """The step count is kept beside the state, and a checkpoint holds zero."""
    counter = optimizer.state[update.bundle.param]["step"]
    update.bundle.count = vars(update.bundle).get("count", 0) + 1
    counter.fill_(update.bundle.count - 1)
    hyper = original(update, optimizer)
    counter.zero_()
    return hyper


@fault(kills=("OPT-201", "OPT-211"), at="fastimpl.ops:adam_step")
def cpu_weights_cut_off(original: Any, hyper: Any, *lists: Sequence[torch.Tensor], isa: int = -1) -> None:
    """bfloat16 weights are masters with their low bits cut off, not rounded."""
    original(hyper, *lists, isa=isa)
    for master, weight in zip(lists[1], lists[5], strict=False):
        if weight.dtype is torch.bfloat16:
            bits = (master.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)
            weight.copy_(torch.where(master.isnan(), weight, bits))


counted_beyond_float32 = patched(
    "A step on the CPU counts on where float32 no longer does.",
    mutated(
        "twinproof.offload.driver:Update.advance",
        "before + 1 if (before := float(count)) < 1 << 24 else float(count + 1)",
        "float(count) + 1",
    ),
    kills="OPT-581",
)


@fault(kills="OPT-205", at="twinproof.offload.driver:_in_order")
def cpu_weights_decayed_before_checks(original: Any, grad: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A step that is refused has already decayed the weights."""
    weight.mul_(0.99)
    found: torch.Tensor = original(grad, weight)
    return found


@fault(kills="OPT-207", at="twinproof.offload.driver:Update")
def cpu_parameter_remembered(original: Any, bundle: Any, group: Any, weight: Any, grad: Any, has_master: bool) -> Any:
    """A step on the CPU keeps using the memory that a parameter had in the first step, as torchao's does."""
    return original(bundle, group, vars(bundle).setdefault("weight", weight), grad, has_master)


@fault(kills="OPT-203", at="twinproof.offload.offloader:OptimizerStateOffloader._run")
def cpu_states_sent(original: Any, offloader: Any, arithmetic: Any) -> None:
    """A step on the CPU moves the states to the device and back."""
    original(offloader, arithmetic)
    if offloader.options.step_device == "cpu":
        offloader.to_device(offloader.bundles)
        offloader.to_host(offloader.bundles)


@fault(kills="OPT-204", at="twinproof.offload.offloader:check_cpu_step")
def cpu_refuses_nothing(original: Any, optimizer: Any) -> None:
    """A step on the CPU accepts every optimizer and steps it as Adam."""


@fault(kills="OPT-208", at="twinproof.offload.driver:select")
def cpu_fraction_ignored(original: Any, bundles: Any, fraction: float) -> Any:
    """A step on the CPU ignores the fraction and steps every parameter there."""
    return original(bundles, 1.0)


@fault(kills="OPT-208", at="fastimpl.offload.cpu_step:HostStep.run")
def cpu_rest_forgotten(original: Any, step: Any, chunks: Any, step_rest: Any) -> None:
    """Parameters that were not selected for the CPU are not stepped at all."""
    original(step, chunks, lambda: None)


@fault(kills="OPT-201", at="fastimpl.offload.cpu_step:unpack")
def cpu_weight_kept_in_slot(original: Any, targets: Any, slab: Any, offsets: Any) -> None:
    """A parameter that is alone in its chunk keeps its old weight."""
    if len(targets) > 1:
        original(targets, slab, offsets)


@fault(kills="OPT-209", at="fastimpl.offload.cpu_step:HostStep._update")
def cpu_weight_copied(original: Any, step: Any, work: Any, pairs: Any) -> None:
    """Without a device, a copy of the weight is stepped."""
    original(step, work, [(grad, weight.clone()) for grad, weight in pairs])


class _Deaf:
    """The engine without one kind of call."""

    def __init__(self, engine: Any, call: str) -> None:
        self._engine, self._call = engine, call

    def __getattr__(self, name: str) -> Any:
        return (lambda *_: None) if name == self._call else getattr(self._engine, name)


def _without(call: str) -> Any:
    def around(original: Any, step: Any, *arguments: Any) -> Any:
        engine = step.engine
        step.engine = _Deaf(engine, call)
        try:
            return original(step, *arguments)
        finally:
            step.engine = engine

    return around


cpu_gradient_read_early = patched(
    "The host does not wait for the gradients before it steps.",
    wrap("fastimpl.offload.cpu_step:HostStep._await", _without("synchronize")),
    kills="OPT-210",
)
cpu_gradient_sent_early = patched(
    "Gradients are copied to the host before they are packed.",
    wrap("fastimpl.offload.cpu_step:HostStep._send_down", _without("wait")),
    kills="OPT-210",
)
cpu_weight_taken_early = patched(
    "Nothing waits until the new weights are on the device (torchao #1649).",
    wrap("fastimpl.offload.cpu_step:HostStep._send_up", _without("wait")),
    kills="OPT-210",
)


@fault(kills="OPT-299", at="fastimpl.offload.cpu_step:_have_one_order")
def cpu_formats_mixed(original: Any, row: Any) -> bool:
    """A step on the CPU takes the memory of a permuted moment for that of a contiguous one."""
    for moment in row[2:4]:
        torch.as_strided(moment, row[1].shape, row[1].stride()).copy_(moment.clone())
    return bool(original(row))


@fault(kills="OPT-374", at="fastimpl.ops:adam_step")
def strides_of_one_compared(original: Any, hyper: Any, *lists: Sequence[torch.Tensor], isa: int = -1) -> None:
    """The operator refuses tensors whose strides differ where a dimension has one element."""
    for row in zip(*filter(None, lists), strict=True):
        if len({tensor.stride() for tensor in row}) > 1:
            raise RuntimeError("not a CPU tensor with the shape and strides of its master")
    original(hyper, *lists, isa=isa)


decay_of_the_class = patched(
    "A step on the CPU decays as the optimizer's class does by default, whatever the group says.",
    mutated(
        "twinproof.offload.driver:Update.advance",
        'group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW))',
        "isinstance(optimizer, torch.optim.AdamW)",
    ),
    kills="OPT-388",
)

options_of_the_first_group = patched(
    "A step on the CPU asks the first group alone whether the largest squares count.",
    mutated("twinproof.offload.driver:Update.states", 'self.group["amsgrad"]', 'optimizer.param_groups[0]["amsgrad"]'),
    kills="OPT-388",
)

largest_squares_of_some = patched(
    "One call steps parameters of one chunk with and without largest squares, where their other options are equal.",
    mutated("fastimpl.offload.cpu_step:HostStep._update", "largest is None, ", ""),
    kills="OPT-421",
)


@fault(kills="OPT-425", at="fastimpl.offload.cpu_step:HostStep.run", of="fastimpl")
def rest_before_the_check(original: Any, step: Any, chunks: Any, step_rest: Callable[[], None]) -> None:
    """What torch steps is stepped before anybody has looked at the others."""
    step_rest()
    original(step, chunks, lambda: None)


listed_twice_stepped_once = patched(
    "A parameter that is listed twice is taken, and stepped once.",
    mutated(
        "twinproof.offload.driver:check_cpu_step", 'if len(set(group["params"])) < len(group["params"]):', "if False:"
    ),
    kills="OPT-434",
)


first_dtype_alone = patched(
    "Of each group that the CPU steps the first parameter's dtype is looked at.",
    mutated(
        "twinproof.offload.driver:check_cpu_step", 'for param in group["params"]:', 'for param in group["params"][:1]:'
    ),
    kills="OPT-455",
)
