"""Masters while they are in host memory: gradients made like them, copies, and casts of the model."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from conformance.harness import assert_equal, assert_same_tensor, raises, requirement, succeeds
from conformance.harness.places import on_pretend
from conformance.offload.cases import values
from conformance.provers.pretend_device import PretendDevice, PretendEngine, on_host
from twinproof.engine import InlineEngine
from twinproof.errors import UnsupportedError

_SHAPES = ((4, 6), (5,))
_OPTIONS: dict[str, dict[str, Any]] = {
    "at once": {},
    "in chunks": {"chunk_bytes": 1},
    "on request": {"release": "on_request"},
    "on the cpu": {"step_device": "cpu"},
}


class _Arm:
    """A half model on the device, its masters, and an optimizer of them: plain without ``way``, or offloaded."""

    def __init__(self, offload: Any, device: PretendDevice, way: str | None) -> None:
        made = [
            torch.nn.Parameter(values(shape, i).to(torch.bfloat16).to(device.device)) for i, shape in enumerate(_SHAPES)
        ]
        self.model = torch.nn.ParameterList(made)
        self.masters = offload.MasterWeights(made)
        self.optimizer: Any = torch.optim.AdamW(self.masters.parameters(), lr=0.1)
        self.offloader: Any = None
        if way is None:
            self.masters.attach(self.optimizer)
        else:
            self.offloader = offload.OptimizerStateOffloader(
                self.optimizer, engine=PretendEngine(), master_weights=self.masters, **_OPTIONS[way]
            )
            self.offloader.offload()

    def named(self) -> torch.nn.Module:
        """As who saves an optimizer's state sees its parameters: by name."""
        return torch.nn.ParameterDict({f"p{i}": param for i, param in enumerate(self.masters.parameters())})

    def step(self, number: int) -> None:
        _step(self.model, self.optimizer, number)


def _step(model: Any, optimizer: Any, number: int) -> None:
    for i, param in enumerate(model):
        param.grad = values(param.shape, 10 * number + i).to(param.dtype).to(param.device)
    optimizer.step()
    optimizer.zero_grad()


def _assert_same(got: Any, expected: Any, where: str) -> None:
    for number, (one, other) in enumerate(zip(got, expected, strict=True)):
        assert_same_tensor(on_host(one.detach()), on_host(other.detach()), where=f"parameter {number}, {where}")


@requirement(
    "OPT-583",
    "A gradient that is made like a master MUST become the model's, wherever the master lies by then: optimizer state "
    "dicts of torch's checkpoints before the first step, as in every resume, are those of plain masters. A gradient of "
    "any other place stays torch's to refuse.",
)
@pytest.mark.parametrize("way", ["at once", "in chunks", "on request"])
def test_gradients_like_masters(offload: Any, way: str) -> None:
    with on_pretend() as device:
        plain, saved = _Arm(offload, device, None), _Arm(offload, device, None)
        saved.step(1)
        for resumes in (False, True):
            arm = _Arm(offload, device, way)
            plain = _Arm(offload, device, None)
            for param in arm.masters.parameters():
                with succeeds("a gradient like a master", where=way):
                    param.grad = torch.zeros_like(param)
            assert_equal([param.grad.device for param in arm.model], [device.device] * 2, where="places of gradients")
            arm.optimizer.zero_grad()
            with succeeds("a state dict before the first step", where=way):
                got = get_optimizer_state_dict(arm.named(), arm.optimizer)
            expected = get_optimizer_state_dict(plain.named(), plain.optimizer)
            assert_equal(sorted(got["state"]), sorted(expected["state"]), where="parameters with states")
            if resumes:
                states = get_optimizer_state_dict(saved.named(), saved.optimizer)
                set_optimizer_state_dict(arm.named(), arm.optimizer, copy.deepcopy(states))
                set_optimizer_state_dict(plain.named(), plain.optimizer, states)
            for number in (2, 3):
                arm.step(number)
                plain.step(number)
                _assert_same(arm.model, plain.model, f"step {number}")
    model = [torch.nn.Parameter(values((3,), 0, torch.bfloat16))]
    masters = offload.MasterWeights(model)
    optimizer = torch.optim.AdamW(masters.parameters())
    kept = offload.OptimizerStateOffloader(optimizer, engine=InlineEngine("cpu"), master_weights=masters)
    (master,) = masters.parameters()
    with raises(RuntimeError, mentions=("assign a gradient", "meta"), where="a gradient of another place"):
        master.grad = torch.zeros(3, device="meta")
    kept.close()


@requirement(
    "OPT-584",
    "A copy and a pickle of masters, with their model and with or without their optimizer, in any order, MUST have "
    "masters where the copied parameters are, and step as plain ones do; the original goes on and leaves the device.",
)
@pytest.mark.parametrize("way", _OPTIONS)
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@pytest.mark.parametrize("order", ["masters", "masters, optimizer", "optimizer, masters"])
def test_copies_of_masters(offload: Any, way: str, how: str, order: str) -> None:
    with on_pretend() as device:
        arm, plain = _Arm(offload, device, way), _Arm(offload, device, None)
        copies = []
        for each in (arm, plain):
            each.step(1)
            # A step on the CPU has bits of its own.
            with torch.no_grad():
                for i, param in enumerate(each.model):
                    param.copy_(values(param.shape, 50 + i).to(param.dtype))
            each.masters.refresh()
            given = [
                each.model,
                *({"masters": each.masters, "optimizer": each.optimizer}[of] for of in order.split(", ")),
            ]
            made = copy.deepcopy(given) if how == "deepcopy" else pickle.loads(pickle.dumps(given))
            masters = next(one for one in made if isinstance(one, offload.MasterWeights))
            places = [param.device for param in masters.parameters()]
            assert_equal(places, [device.device] * 2, where="places of copied masters")
            stepped = torch.optim.SGD(masters.parameters(), lr=0.1)
            masters.attach(stepped)
            with succeeds("a step of the copy", where=order):
                _step(made[0], stepped, 2)
            copies.append(made[0])
            with succeeds("a step of the original", where=order):
                each.step(3)
        _assert_same(copies[0], copies[1], f"copy, {order}")
        if way in ("at once", "in chunks"):
            assert_equal(arm.offloader.residency().device_bytes, 0, where="bytes left on the device")
        arm.offloader.close()
        with succeeds("a copy behind close()", where=order):
            copy.deepcopy(arm.masters)


@requirement(
    "OPT-585",
    "A parameter that has a master apart and is cast behind it MUST be stepped on: from the next step on it is its "
    "master, rounded to the new dtype. A step on the CPU refuses one of 64 bits by name.",
)
@pytest.mark.parametrize("way", [None, *_OPTIONS])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_models_cast_behind_masters(offload: Any, way: str | None, dtype: torch.dtype) -> None:
    with on_pretend() as device:
        arm, plain = _Arm(offload, device, way), _Arm(offload, device, way)
        for each in (arm, plain):
            each.step(1)
        arm.model.to(dtype)
        if way == "on the cpu" and dtype is torch.float64:
            with raises(UnsupportedError, mentions=("torch.float64", "torch.bfloat16"), where=f"a cast to {dtype}"):
                arm.step(2)
            return
        for each in (arm, plain):
            with succeeds("a step", where=f"behind a cast to {dtype}"):
                for param in each.model:
                    param.grad = torch.full_like(param, 0.5)
                each.optimizer.step()
        assert_equal([param.dtype for param in arm.model], [dtype] * 2, where="dtypes")
        for each in (arm, plain):
            if each.offloader is not None:
                each.offloader.close()
        _assert_same(arm.masters.parameters(), plain.masters.parameters(), "masters")
        _assert_same(arm.model, [master.to(dtype) for master in arm.masters.parameters()], f"rounded to {dtype}")


def _attached(offload: Any, arm: _Arm, by: str) -> Any:
    """Another optimizer over the masters of an arm whose first has gone; the model that it steps, and it."""
    model, masters = arm.model, arm.masters
    if by == "copied":
        model, masters = copy.deepcopy((model, masters))
    optimizer = torch.optim.SGD(masters.parameters(), lr=0.1)
    if by != "offloaded":
        masters.attach(optimizer)
        return model, optimizer, None
    engine = PretendEngine()
    return model, optimizer, offload.OptimizerStateOffloader(optimizer, master_weights=masters, engine=engine)


@requirement(
    "OPT-563",
    "Masters whose offloader was dropped with its optimizer, and not closed, MUST come to their parameters' device for "
    "the next optimizer that steps them, plain or offloaded, and for a copy: with the values that they had, as masters "
    "that never left.",
)
@pytest.mark.parametrize("way", ["at once", "in chunks", "on request"])
@pytest.mark.parametrize("by", ["attached", "offloaded", "copied"])
def test_masters_of_dropped_offloaders(offload: Any, way: str, by: str) -> None:
    with on_pretend() as device:
        arm, plain = _Arm(offload, device, way), _Arm(offload, device, None)
        arm.step(1)
        plain.step(1)
        if way == "on request":
            arm.offloader.offload()
            arm.offloader.release_gpu_memory()
        places = [param.device.type for param in arm.masters.parameters()]
        assert_equal(places, ["cpu"] * 2, where="places of masters")
        for each in (arm, plain):
            each.optimizer = each.offloader = None
        found = []
        for each in (arm, plain):
            with succeeds("another optimizer", where=f"{way}, {by}"):
                model, optimizer, offloader = _attached(offload, each, by)
                for number in (2, 3):
                    _step(model, optimizer, number)
            # It has the optimizer, too.
            found.append((model, offloader))
        _assert_same(found[0][0], found[1][0], f"{way}, {by}")
