"""Interrupts of steps and loads, as of Ctrl-C or a signal's handler: no value of before or after them is lost."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any
from unittest import mock

import pytest
import torch

from conformance.harness import assert_equal, assert_same_tensor, requirement, succeeds
from conformance.offload.cases import values
from twinproof.engine import InlineEngine
from twinproof.offload import driver, states
from twinproof.optimizers import AdamHyper

SHAPES = ((4, 6), (6, 2))


class _Device(InlineEngine):
    """The CPU in the place of a device; a call of its verbs is interrupted, before it does something or behind that."""

    stands_for_device = True
    number = count = 0
    is_behind = False

    def _interrupt(self, *, is_behind: bool) -> None:
        self.count += is_behind == self.is_behind
        if self.count == self.number and is_behind == self.is_behind:
            raise KeyboardInterrupt

    def record(self, event: Any, stream: Any) -> None:
        self._interrupt(is_behind=False)

    def wait(self, stream: Any, event: Any) -> None:
        self._interrupt(is_behind=False)

    def synchronize(self, event: Any) -> None:
        self._interrupt(is_behind=False)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._interrupt(is_behind=False)
        super().copy(target, source)
        self._interrupt(is_behind=True)

    def device_empty(self, size_bytes: int) -> torch.Tensor:
        self._interrupt(is_behind=False)
        return super().device_empty(size_bytes)


class _Arm:
    """Parameters that an offloaded optimizer has stepped once, with gradients for a second step."""

    def __init__(self, offload: Any, kind: str, way: str) -> None:
        dtype = torch.bfloat16 if "masters" in way else torch.float32
        made = [values(shape, i, dtype) for i, shape in enumerate(SHAPES)]
        if "of one tensor" in way:
            whole = torch.cat([value.reshape(-1) for value in made])
            parts = torch.split(whole, [value.numel() for value in made])
            made = [part.view(shape) for part, shape in zip(parts, SHAPES, strict=True)]
        self.params = [torch.nn.Parameter(value) for value in made]
        self.masters = offload.MasterWeights(self.params) if "masters" in way else None
        self.stepped = self.params if self.masters is None else list(self.masters.parameters())
        self.engine = _Device()
        extra = {"momentum": 0.9} if kind == "SGD" else {}
        self.optimizer: Any = getattr(torch.optim, kind)(self.stepped, lr=0.1, **extra)
        self.offloader = offload.OptimizerStateOffloader(
            self.optimizer,
            engine=self.engine,
            master_weights=self.masters,
            chunk_bytes=1 << 16 if "cpu" in way else 100,
            step_device="cpu" if "cpu" in way else "device",
        )
        self.give(1)
        self.optimizer.step()
        self.give(2)

    def give(self, seed: int) -> None:
        """Gradients for a step."""
        for i, param in enumerate(self.params):
            param.grad = values(param.shape, 100 * seed + i, param.dtype)

    def told(self) -> list[dict[str, torch.Tensor]]:
        """What the optimizer steps, by parameter, and its states."""
        states = self.offloader.snapshot()["state"]
        return [{"weight": w.detach().clone(), **states.get(i, {})} for i, w in enumerate(self.stepped)]


def _same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def _assert_whole(arm: _Arm, before: Any, after: Any, where: str) -> None:
    """Each parameter is whole, and the next step, with gradients of its own, is that of a plain optimizer."""
    found = arm.told()
    for number, told in enumerate(found):
        moments = [name for name, other in (("before", before), ("after", after)) if _same(told, other[number])]
        assert_equal(bool(moments), True, where=f"parameter {number} is that of before or of after, {where}")
    arm.give(4)
    with succeeds("the next step", where=where):
        arm.optimizer.step()
    if arm.masters is None and arm.offloader.options.step_device == "device":
        weights = [torch.nn.Parameter(told["weight"]) for told in found]
        plain = type(arm.optimizer)(weights, lr=0.1)
        plain.load_state_dict(
            {
                "state": {i: {k: v for k, v in told.items() if k != "weight"} for i, told in enumerate(found)},
                "param_groups": arm.optimizer.state_dict()["param_groups"],
            }
        )
        for weight, param in zip(weights, arm.params, strict=True):
            weight.grad = param.grad
        plain.step()
        for number, (weight, param) in enumerate(zip(weights, arm.params, strict=True)):
            assert_same_tensor(param.detach(), weight.detach(), where=f"parameter {number} a step later, {where}")


def _each_interrupt(make: Callable[[], _Arm], act: Callable[[_Arm], object]) -> None:
    """Interrupt it at each verb of the engine in turn."""
    before, done = make().told(), make()
    act(done)
    after = done.told()
    for is_behind in (False, True):
        number, was_reached = 0, True
        while was_reached:
            number += 1
            arm = make()
            arm.engine.number, arm.engine.count, arm.engine.is_behind = number, 0, is_behind
            with suppress(KeyboardInterrupt):
                act(arm)
            was_reached, arm.engine.number = arm.engine.count >= number, 0
            _assert_whole(arm, before, after, f"an interrupt {'behind' if is_behind else 'at'} verb {number}")
        assert_equal(number > 2, True, where="verbs of the engine")


def _step(arm: _Arm) -> None:
    arm.optimizer.step()


def _at_each_call(
    place: Any, name: str, error: type[BaseException], make: Callable[[], _Arm], act: Callable[[_Arm], object]
) -> Iterator[tuple[int, _Arm]]:
    """Yield arms whose ``act`` ended with ``error`` at the first call of a function, at the second, and so on.

    The last has made fewer calls, and so was not ended.
    """
    calls, number, found = [0], 0, getattr(place, name)
    while calls[0] >= number:
        number, arm, calls = number + 1, make(), [0]

        def ended(*args: Any, number: int = number, calls: list[int] = calls, **options: Any) -> Any:
            calls[0] += 1
            if calls[0] == number:
                raise error
            return found(*args, **options)

        with mock.patch.object(place, name, ended), suppress(error):
            act(arm)
        yield number, arm


@requirement(
    "OPT-531",
    "Behind an interrupt at any verb of the engine in a step in which states move, each parameter and all its states "
    "MUST be those of before the step, or all of them those of after it, and the next step MUST go on from there.",
)
@pytest.mark.parametrize("kind", ["SGD", "Adam"])
def test_step_on_the_device(offload: Any, kind: str) -> None:
    _each_interrupt(lambda: _Arm(offload, kind, "device"), _step)


@requirement(
    "OPT-532",
    "Behind an interrupt in a step on the CPU, while a counter advances or the library is at work, each parameter, its "
    "counter and its moments MUST be those of before the step, or all of them those of after it.",
)
@pytest.mark.parametrize("way", ["cpu", "cpu with masters"])
def test_step_on_the_cpu(offload: Any, way: str) -> None:
    def make() -> _Arm:
        return _Arm(offload, "AdamW", way)

    before, done = make().told(), make()
    _step(done)
    after = done.told()
    # Right behind what the library does Python looks for signals; of the reference nothing is interrupted there.
    for place, name in ((torch.autograd.graph, "increment_version"), (AdamHyper, "of")):
        for number, arm in _at_each_call(place, name, KeyboardInterrupt, make, _step):
            _assert_whole(arm, before, after, f"an interrupt at call {number} of {name}")


@requirement(
    "OPT-535",
    "Where a step on the CPU fails at a parameter that torch steps by itself, or in the library, each parameter, its "
    "counter and its moments MUST be those of before the step, or all of them those of after it.",
    needs=("fused_cpu_adam",),
)
@pytest.mark.parametrize("turned", [0, 1, 2])
def test_rows_of_torch(offload: Any, turned: int) -> None:
    def make() -> _Arm:
        arm = _Arm(offload, "AdamW", "cpu")
        for param in arm.params[:turned]:
            state = arm.optimizer.state[param]
            state["exp_avg"] = state["exp_avg"].t().contiguous().t()
        return arm

    before, done = make().told(), make()
    _step(done)
    after, failed_count = done.told(), 0
    for module in ("fastimpl.ops", "fastimpl.offload.cpu_step"):
        for number, arm in _at_each_call(importlib.import_module(module), "adam_step", MemoryError, make, _step):
            _assert_whole(arm, before, after, f"memory is short at call {number} of adam_step in {module}")
            failed_count += number > 1
    assert_equal(failed_count, turned + (turned < 2), where="calls that failed")


@requirement(
    "OPT-533",
    "An interrupt while it is noted what masters have written to their parameters MUST leave no parameter that counts "
    "as changed behind its master's back, also where parameters are views of one tensor.",
)
@pytest.mark.parametrize("way", ["step", "load"])
def test_interrupted_note(offload: Any, way: str) -> None:
    def make() -> _Arm:
        return _Arm(offload, "AdamW", "cpu with masters of one tensor")

    def load(arm: _Arm) -> None:
        arm.offloader.load_masters([weight.detach() + 1 for weight in arm.stepped])

    for number, arm in _at_each_call(states, "version_of", KeyboardInterrupt, make, load if way == "load" else _step):
        arm.give(3)
        with succeeds("the next step", where=f"an interrupt at look {number}"):
            arm.optimizer.step()
    assert_equal(number > 2, True, where="looks at versions")


@requirement(
    "OPT-534",
    "A load that is interrupted, or for which memory is short, MUST leave each parameter the states that it had, or "
    "all of those that are loaded, and MUST succeed when it is made anew.",
)
def test_interrupted_load(offload: Any) -> None:
    def make() -> _Arm:
        return _Arm(offload, "Adam", "device")

    def load(arm: _Arm) -> None:
        arm.offloader.load_state_dict({**arm.optimizer.state_dict(), "state": state})

    before = make().told()
    state = {i: {n: v + 1 for n, v in told.items() if n != "weight"} for i, told in enumerate(before)}
    after = [{"weight": told["weight"], **state[i]} for i, told in enumerate(before)]
    for number, arm in _at_each_call(driver, "copied", MemoryError, make, load):
        where = f"memory is short at copy {number}"
        for i, told in enumerate(arm.told()):
            is_whole = _same(told, before[i]) or _same(told, after[i])
            assert_equal(is_whole, True, where=f"parameter {i} has the states of before or of after, {where}")
        load(arm)
        for told, expected in zip(arm.told(), after, strict=True):
            assert_equal(_same(told, expected), True, where=f"loaded anew, {where}")
    assert_equal(number > 4, True, where="copies of a load")
