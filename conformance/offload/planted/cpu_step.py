"""Faults of steps on the CPU, of the one-pass Adam under them, and of packing."""

from __future__ import annotations

import dataclasses
import unittest.mock
from collections.abc import Sequence
from typing import Any

import torch

from conformance.harness import PlantedBug, swap, wrap

BOTH = ("fastimpl", "refimpl")
SHARED = "twinproof.offload.driver"
STEP = "fastimpl.offload.cpu_step"
ADAM = "fastimpl.ops:adam_step"


def _bug(id: str, sentence: str, requirements: tuple[str, ...], patch: Any, target: Any = "fastimpl") -> PlantedBug:
    return PlantedBug(id, sentence, requirements, target, patch)


def _first_rate(original: Any, update: Any, optimizer: Any) -> Any:
    rate = float(update.group["lr"])
    first = vars(update.bundle).setdefault("first_rate", rate)
    hyper = original(update, optimizer)
    return dataclasses.replace(hyper, step_size=hyper.step_size * first / rate)


def _uncorrected(original: Any, kind: Any, **options: Any) -> Any:
    return original(kind, **{**options, "step": 1_000_000})


def _hidden_count(original: Any, update: Any, optimizer: Any) -> Any:
    counter = optimizer.state[update.bundle.param]["step"]
    update.bundle.count = vars(update.bundle).get("count", 0) + 1
    counter.fill_(update.bundle.count - 1)
    hyper = original(update, optimizer)
    counter.zero_()
    return hyper


def _cut_off(original: Any, hyper: Any, *lists: Sequence[torch.Tensor], isa: int = -1) -> None:
    original(hyper, *lists, isa=isa)
    for master, weight in zip(lists[1], lists[5], strict=False):
        if weight.dtype is torch.bfloat16:
            bits = (master.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)
            weight.copy_(torch.where(master.isnan(), weight, bits))


def _largest_forgotten(original: Any, hyper: Any, *lists: Sequence[torch.Tensor], isa: int = -1) -> None:
    kept = [tensor.clone() for tensor in lists[4]]
    original(hyper, *lists, isa=isa)
    for largest, before in zip(lists[4], kept, strict=True):
        largest.copy_(before)


def _contracted(original: Any, hyper: Any, *lists: Sequence[torch.Tensor], isa: int = -1) -> None:
    before = [square.clone() for square in lists[3]]
    original(hyper, *lists, isa=isa)
    if isa == 0 or hyper.coupled:
        return
    for grad, square, old in zip(lists[0], lists[3], before, strict=True):
        exact = hyper.beta2 * old.double() + hyper.one_minus_beta2 * grad.float().square().double()
        square.copy_(torch.where(square.isfinite(), exact.float(), square))


def _uneven_threads(original: Any, hyper: Any, *lists: Sequence[torch.Tensor], isa: int = -1) -> None:
    original(hyper, *lists, isa=isa)
    for master in lists[1]:
        master[master.numel() // torch.get_num_threads() :].mul_(1.0000002)


def _unseen(original: Any, *arguments: Any, **options: Any) -> None:
    with unittest.mock.patch("torch.autograd.graph.increment_version"):
        original(*arguments, **options)


def _written_first(original: Any, hyper: Any, *lists: Sequence[torch.Tensor], isa: int = -1) -> None:
    for average in lists[2]:
        average.mul_(hyper.beta1)
    original(hyper, *lists, isa=isa)


def _decayed_first(original: Any, grad: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    weight.mul_(0.99)
    found: torch.Tensor = original(grad, weight)
    return found


def _remembered(original: Any, bundle: Any, group: Any, weight: Any, grad: Any, has_master: bool) -> Any:
    return original(bundle, group, vars(bundle).setdefault("weight", weight), grad, has_master)


def _gradient_remembered(original: Any, bundle: Any, group: Any, weight: Any, grad: Any, has_master: bool) -> Any:
    return original(bundle, group, weight, vars(bundle).setdefault("grad", grad), has_master)


def _takes_scale(original: Any, offloader: Any, optimizer: Any, **options: Any) -> None:
    original(offloader, optimizer, **options)
    optimizer._step_supports_amp_scaling = True


def _states_too(original: Any, offloader: Any, arithmetic: Any) -> None:
    original(offloader, arithmetic)
    if offloader.options.step_device == "cpu":
        offloader.to_device(offloader.bundles)
        offloader.to_host(offloader.bundles)


def _unchecked(optimizer: Any) -> None:
    """Nothing is refused."""


def _all_of_it(original: Any, bundles: Any, fraction: float) -> Any:
    return original(bundles, 1.0)


def _rest_forgotten(original: Any, step: Any, chunks: Any, step_rest: Any) -> None:
    original(step, chunks, lambda: None)


def _kept_in_slot(original: Any, targets: Any, slab: Any, offsets: Any) -> None:
    if len(targets) > 1:
        original(targets, slab, offsets)


def _copied_weights(original: Any, step: Any, work: Any, pairs: Any) -> None:
    original(step, work, [(grad, weight.clone()) for grad, weight in pairs])


def _unwrapped(original: Any, optimizer: Any, update: Any, home: Any) -> None:
    original(optimizer, update, home)
    state = optimizer.state[update.bundle.param]
    for name in update.state_names:
        state[name] = getattr(state[name], "_local_tensor", state[name])


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


def _last_forgotten(original: Any, sources: Any, slab: Any, offsets: Any) -> None:
    original(sources[:-1] or sources, slab, offsets[:-1] or offsets)


def _one_more_byte(original: Any, sources: Any, slab: Any, offsets: Any) -> None:
    original(sources, slab, offsets)
    if sources and offsets[-1] + sources[-1].nbytes < slab.numel():
        slab[offsets[-1] + sources[-1].nbytes] = 0


def _packed_before_refusal(original: Any, sources: Any, slab: Any, offsets: Any) -> None:
    slab[:32].zero_()
    original(sources, slab, offsets)


def _single_runs(original: Any, items: Any) -> Any:
    for item in items:
        yield from original([item])


PLANTED = (
    _bug("cpu_rate_captured", "On the CPU the learning rate of the first step.", ("OPT-201",),
         wrap(f"{SHARED}:Update.advance", _first_rate), BOTH),
    _bug("cpu_bias_uncorrected", "Moments are used as if training had gone on for ever.", ("OPT-202",),
         wrap("twinproof.optimizers:AdamHyper.of", _uncorrected), BOTH),
    _bug("cpu_count_hidden", "The step count is kept beside the state, and a checkpoint holds zero.", ("OPT-206",),
         wrap(f"{SHARED}:Update.advance", _hidden_count), BOTH),
    _bug("cpu_weights_cut_off", "bfloat16 weights are the upper half of the masters.", ("OPT-201", "OPT-211"),
         wrap(ADAM, _cut_off)),
    _bug("cpu_maximum_forgotten", "The largest second moment is used and not kept.", ("OPT-211",),
         wrap(ADAM, _largest_forgotten)),
    _bug("cpu_multiply_add_fused", "Vector units with a fused multiply-add round once less.", ("OPT-211",),
         wrap(ADAM, _contracted)),
    _bug("cpu_threads_uneven", "What the other threads did rounds otherwise.", ("OPT-212",),
         wrap(ADAM, _uneven_threads)),
    _bug("cpu_write_unseen", "Version counters do not see what the operator wrote.", ("OPT-213",), wrap(ADAM, _unseen)),
    _bug("cpu_moments_decayed_before_checks", "A refused call has changed moments.", ("OPT-214",),
         wrap(ADAM, _written_first)),
    _bug("cpu_weights_decayed_before_checks", "A refused step has decayed weights.", ("OPT-205",),
         wrap(f"{SHARED}:_in_order", _decayed_first), BOTH),
    _bug("cpu_parameter_remembered", "torchao: the memory of a parameter is taken once.", ("OPT-207",),
         wrap(f"{SHARED}:Update", _remembered), BOTH),
    _bug("cpu_gradient_remembered", "The memory of a gradient is taken once; FSDP2 makes it anew for each step.",
         ("OPT-217",), wrap(f"{SHARED}:Update", _gradient_remembered), BOTH),
    _bug("cpu_scale_promised", "Says that it unscales, as fused kernels do, and steps with scaled gradients.",
         ("OPT-216",), wrap("twinproof.offload.offloader:OptimizerStateOffloader.__init__", _takes_scale), BOTH),
    _bug("cpu_states_sent", "The states go up and down with the weights.", ("OPT-203",),
         wrap("twinproof.offload.offloader:OptimizerStateOffloader._run", _states_too), BOTH),
    _bug("cpu_refuses_nothing", "Whatever it is, it is stepped as Adam.", ("OPT-204",),
         swap("twinproof.offload.offloader:check_cpu_step", _unchecked), BOTH),
    _bug("cpu_fraction_ignored", "Everything is stepped on the CPU.", ("OPT-208",),
         wrap("twinproof.offload.plan:select", _all_of_it), BOTH),
    _bug("cpu_rest_forgotten", "What was not selected is not stepped.", ("OPT-208",),
         wrap(f"{STEP}:HostStep.run", _rest_forgotten)),
    _bug("cpu_weight_kept_in_slot", "A parameter that is alone in its chunk keeps its old weight.", ("OPT-201",),
         wrap(f"{STEP}:unpack", _kept_in_slot)),
    _bug("cpu_weight_copied", "Without a device, a copy of the weight is stepped.", ("OPT-209",),
         wrap(f"{STEP}:HostStep._update", _copied_weights)),
    _bug("cpu_shard_unwrapped", "States of a first step are plain tensors, which no checkpoint reshards.", ("OPT-215",),
         wrap(f"{STEP}:prepare_states", _unwrapped)),
    _bug("cpu_gradient_read_early", "On the CPU the host steps with gradients on their way.", ("OPT-210",),
         wrap(f"{STEP}:HostStep._await", _without("synchronize"))),
    _bug("cpu_gradient_sent_early", "Gradients leave before they are packed.", ("OPT-210",),
         wrap(f"{STEP}:HostStep._send_down", _without("wait"))),
    _bug("cpu_weight_taken_early", "torchao #1649: nothing waits for the weights.", ("OPT-210",),
         wrap(f"{STEP}:HostStep._send_up", _without("wait"))),
    _bug("packing_forgets_the_last", "One tensor is left out.", ("OPT-221",),
         wrap("fastimpl.offload.packing:pack", _last_forgotten)),
    _bug("packing_writes_behind", "A copy is one byte too long.", ("OPT-221",),
         wrap("fastimpl.offload.packing:pack", _one_more_byte)),
    _bug("packing_for_each", "Every tensor is a run of its own.", ("OPT-223",),
         wrap("fastimpl.offload.packing:_runs", _single_runs)),
    _bug("home_by_hearsay", "What lies on the device counts as home.", ("OPT-224",),
         swap("fastimpl.offload.layout:ChunkLayout.is_home", lambda layout, bound: True)),
    _bug("packing_before_checks", "A refused call has written.", ("OPT-222",),
         wrap("fastimpl.offload.packing:pack", _packed_before_refusal)),
)  # fmt: skip
