"""Masters as a state of a trainer: what they give to a checkpoint, and what they take of one."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from conformance.harness import assert_equal, assert_same_tensor, raises, requirement, succeeds
from conformance.offload.cases import proven, values
from twinproof.engine import InlineEngine
from twinproof.errors import PlanError

_DTYPES = (torch.bfloat16, torch.float32, torch.float16)
_WAYS: dict[str, dict[str, Any]] = {
    "attached": {},
    "at once": {"chunk_bytes": 0},
    "in chunks": {"chunk_bytes": 64},
    "on request": {"release": "on_request"},
    "on the CPU": {"step_device": "cpu"},
}


class _Arm:
    """A model of half and whole parameters, its masters, and AdamW."""

    def __init__(self, offload: Any, way: str, engine: Any, *, seed: int = 0) -> None:
        self.params = [torch.nn.Parameter(values((4, 3 + i), seed + i, dtype)) for i, dtype in enumerate(_DTYPES)]
        self.masters = offload.MasterWeights(self.params)
        self.optimizer = torch.optim.AdamW(self.masters.parameters(), lr=0.1)
        self.offloader: Any = None
        if way == "attached":
            self.masters.attach(self.optimizer)
        else:
            options = {"engine": engine, "master_weights": self.masters, **_WAYS[way]}
            self.offloader = offload.OptimizerStateOffloader(self.optimizer, **options)

    def step(self, number: int) -> None:
        for i, param in enumerate(self.params):
            param.grad = values(tuple(param.shape), 10 * number + i, param.dtype)
        self.optimizer.step()

    def values(self) -> list[torch.Tensor]:
        """Of masters and parameters, once nothing is on its way."""
        if self.offloader is not None:
            self.offloader.settle()
        with _disable_current_modes():
            return [tensor.detach().clone() for tensor in (*self.masters.parameters(), *self.params)]

    def optimizer_states(self) -> Any:
        return copy.deepcopy(self.optimizer.state_dict()) if self.offloader is None else self.offloader.snapshot()

    def load_optimizer(self, state: Any) -> None:
        (self.optimizer if self.offloader is None else self.offloader).load_state_dict(state)


@contextmanager
def _engine(way: str) -> Iterator[Any]:
    """That of a device all of whose orders are proven, where there is one."""
    if way in ("attached", "on the CPU"):
        yield InlineEngine("cpu")
        return
    with proven(this_branch_only=True) as device:
        yield device.engine


def _assert_all(got: list[torch.Tensor], expected: list[torch.Tensor], *, where: str) -> None:
    with _disable_current_modes():
        for number, (mine, value) in enumerate(zip(got, expected, strict=True)):
            assert_same_tensor(mine, value, where=f"{where}: of masters and parameters, number {number}")


@requirement(
    "OPT-566",
    "Masters MUST give their values by state_dict() and take them by load_state_dict(), attached and offloaded, with "
    "transfers on their way as well: plain float32 tensors, those of the last step, in the order of the parameters. A "
    "load MUST bring masters and parameters back bit for bit, so that the run goes on as the one that was saved.",
)
@pytest.mark.parametrize("way", _WAYS)
def test_states_of_masters(offload: Any, way: str) -> None:
    with _engine(way) as engine, succeeds("a run", where=way):
        arm = _Arm(offload, way, engine)
        for number in (1, 2):
            arm.step(number)
        given = [each.clone() for each in arm.masters.state_dict()["masters"]]
        saved, of_optimizer = arm.values(), arm.optimizer_states()
        _assert_all(given, saved[: len(given)], where=f"{way}, what is given")
        file = io.BytesIO()
        with _disable_current_modes():
            torch.save({"masters": given}, file)
            file.seek(0)
            read = torch.load(file, weights_only=True)
        fresh = _Arm(offload, way, engine, seed=30)
        fresh.step(3)
        fresh.load_optimizer(of_optimizer)
        if fresh.offloader is not None:
            fresh.offloader.prefetch()
        fresh.masters.load_state_dict(read)
        _assert_all(fresh.values(), saved, where=f"{way}, what is loaded")
        for each in (arm, fresh):
            each.step(4)
        _assert_all(fresh.values(), arm.values(), where=f"{way}, a step behind a load")


@requirement(
    "OPT-567",
    "load_state_dict() of masters MUST refuse what is no state dict of theirs, or of other masters, by name, and leave "
    "masters and parameters as they are.",
)
@pytest.mark.parametrize("way", ["attached", "on the CPU"])
def test_other_states_of_masters(offload: Any, way: str) -> None:
    arm = _Arm(offload, way, InlineEngine("cpu"))
    arm.step(1)
    before, given = arm.values(), arm.masters.state_dict()["masters"]
    others = [torch.zeros_like(each) for each in given]
    wrong: dict[str, Any] = {
        "an empty dict": {},
        "a list": others,
        "another name": {"weights": others},
        "a name more": {"masters": others, "step": 1},
        "one less": {"masters": others[:-1]},
        "another order": {"masters": others[::-1]},
        "no tensor": {"masters": [*others[:-1], 1.0]},
    }
    for what, state in wrong.items():
        with raises(PlanError, where=what):
            arm.masters.load_state_dict(state)
        _assert_all(arm.values(), before, where=f"behind {what}")
    empty = offload.MasterWeights([])
    with succeeds("a load", where="no masters at all"):
        empty.load_state_dict(empty.state_dict())
    assert_equal(len(given), len(_DTYPES), where="masters")


@requirement(
    "OPT-568",
    "attach() of masters that an offloader of the same optimizer was given MUST change nothing while that is open: its "
    "steps are as before, and what masters give is waited for. Once it is closed the optimizer's steps run them.",
)
@pytest.mark.parametrize("way", ["at once", "in chunks", "on request"])
def test_attached_beside_an_offloader(offload: Any, way: str) -> None:
    found = []
    for is_attached in (False, True):
        with _engine(way) as engine, succeeds("a run", where=f"{way}, {is_attached=}"):
            arm = _Arm(offload, way, engine)
            arm.step(1)
            hooks = len(arm.optimizer._optimizer_step_pre_hooks)
            if is_attached:
                arm.masters.attach(arm.optimizer)
            assert_equal(len(arm.optimizer._optimizer_step_pre_hooks), hooks, where=f"hooks, {is_attached=}")
            arm.step(2)
            given = [each.clone() for each in arm.masters.state_dict()["masters"]]
            arm.offloader.close()
            arm.step(3)
            found.append([*given, *arm.values()])
    _assert_all(found[1], found[0], where=f"{way}, before the close and behind it")
