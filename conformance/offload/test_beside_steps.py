"""What handlers of signals and other threads find of an optimizer, and write to it, in the middle of a step."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Collection
from typing import Any
from unittest import mock

import pytest
import torch

from conformance.harness import assert_equal, assert_same_tensor, requirement, succeeds
from conformance.offload.cases import values
from twinproof.engine import InlineEngine

VARIANTS: dict[str, dict[str, Any]] = {
    "at once": {},
    "in chunks": {"chunk_bytes": 1},
    "in part": {"fraction": 0.3},
    "part on the cpu": {"fraction": 0.3, "step_device": "cpu"},
    "masters": {"chunk_bytes": 1},
}
_ADAM: Any = importlib.import_module("torch.optim.adam")  # Torch hides the module behind the class's name.
_SHAPES = ((4, 6), (3, 4), (5,))


class _Arm:
    """Three groups of one parameter each; what somebody sees at every call of torch's formula, and writes there."""

    def __init__(self, offload: Any, variant: str, *, is_plain: bool) -> None:
        dtype = torch.bfloat16 if variant == "masters" else torch.float32
        self.params = [torch.nn.Parameter(values(shape, i, dtype)) for i, shape in enumerate(_SHAPES)]
        self.masters = offload.MasterWeights(self.params) if variant == "masters" else None
        self.stepped = list(self.params if self.masters is None else self.masters.parameters())
        groups = [{"params": [param], "lr": 0.1 * (i + 1)} for i, param in enumerate(self.stepped)]
        self.optimizer = torch.optim.AdamW(groups)
        if not is_plain:
            self.offloader = offload.OptimizerStateOffloader(
                self.optimizer, master_weights=self.masters, engine=InlineEngine("cpu"), **VARIANTS[variant]
            )
        elif self.masters is not None:
            self.masters.attach(self.optimizer)
        self.seen: list[Any] = []
        self.halved: set[int] = set()

    def step(self, look: Callable[[int], None] | None = None) -> None:
        for i, param in enumerate(self.params):
            param.grad = values(_SHAPES[i], 10 + i).to(param.dtype)
        formula = _ADAM.adam

        def watched(params: list[Any], *arguments: Any, **options: Any) -> None:
            if look is not None:
                look(next(i for i, param in enumerate(self.stepped) if param is params[0]))
            formula(params, *arguments, **options)

        with mock.patch.object(_ADAM, "adam", watched):
            self.optimizer.step()

    def halve(self, number: int, only: Collection[int]) -> None:
        """The rate of the group whose parameter is about to be stepped: its own step has read it already."""
        self.seen.append([len(group["params"]) for group in self.optimizer.param_groups])
        if number in only:
            self.halved.add(number)
            self.optimizer.param_groups[number]["lr"] *= 0.5


def _noted(offload: Any, *, is_plain: bool) -> Any:
    """What torch's fused SGD notes on the optimizer in its first step."""
    params = [torch.nn.Parameter(values(shape, i)) for i, shape in enumerate(_SHAPES)]
    optimizer = torch.optim.SGD(params, momentum=0.9, fused=True)
    offloader = None if is_plain else offload.OptimizerStateOffloader(optimizer, engine=InlineEngine("cpu"))
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    found = vars(optimizer).get("_need_device_dtype_check_for_fused")
    if offloader is not None:
        offloader.close()
    return found


@requirement(
    "OPT-582",
    "Whoever comes in the middle of a step, a handler of a signal or another thread, MUST find all groups of the "
    "optimizer and the states of all parameters, and what is written there MUST hold from the next step on, as it does "
    "for a plain optimizer.",
)
@pytest.mark.parametrize("in_thread", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_groups_in_a_step(offload: Any, variant: str, in_thread: bool) -> None:
    arm, plain = _Arm(offload, variant, is_plain=False), _Arm(offload, variant, is_plain=True)
    arm.step()
    plain.step()
    before = [plain.optimizer.state[param]["exp_avg"].clone() for param in plain.stepped]

    def look(number: int) -> None:
        if in_thread:
            thread = threading.Thread(target=arm.halve, args=(number, range(3)))
            thread.start()
            thread.join()
            return
        arm.halve(number, range(3))
        with succeeds("a state dict", where=f"in the step of group {number}"):
            found = arm.optimizer.state_dict()
        assert_equal(sorted(found["state"]), [0, 1, 2], where=f"states in the step of group {number}")
        assert_same_tensor(found["state"][number]["exp_avg"], before[number], where=f"moment of group {number}")

    arm.step(look)
    assert_equal(bool(arm.halved), True, where="the formula was watched")
    assert_equal(arm.seen, [[1, 1, 1]] * len(arm.seen), where="parameters of the groups")
    plain.step(lambda number: plain.halve(number, arm.halved))
    rates = [[group["lr"] for group in each.optimizer.param_groups] for each in (arm, plain)]
    assert_equal(rates[0], rates[1], where="learning rates after the step")
    assert_equal(_noted(offload, is_plain=False), _noted(offload, is_plain=True), where="what torch notes in a step")
    arm.step()
    plain.step()
    # A step on the CPU has bits of its own.
    for number in sorted(arm.halved):
        assert_same_tensor(arm.params[number].detach(), plain.params[number].detach(), where=f"parameter {number}")
        for name, expected in plain.optimizer.state[plain.stepped[number]].items():
            got = arm.optimizer.state[arm.stepped[number]][name]
            assert_same_tensor(got, expected, where=f"state {name} of parameter {number}")
