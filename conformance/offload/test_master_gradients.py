"""Gradients of masters between steps: those of the model, for whoever knows the optimizer's parameters alone."""

from __future__ import annotations

import copy
import gc
import importlib
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from conformance.harness import assert_equal, assert_same_tensor, raises, requirement, succeeds
from conformance.offload.cases import values
from conformance.provers.ranks import Rank
from twinproof.engine import InlineEngine
from twinproof.errors import StaleMasterError

# Of a model that keeps some parameters in float32, which are their own masters.
_DTYPES = (torch.bfloat16, torch.float32, torch.float16, torch.bfloat16)
_WAYS = ("attached", "offloaded", "chunks", "on the CPU")


class _Arm:
    """A model whose masters are stepped; ``params`` are the optimizer's, or the model's, which an action is given."""

    def __init__(self, offload: Any, way: str, *, by_optimizer: bool, dtypes: Any = _DTYPES) -> None:
        self.model = [torch.nn.Parameter(values((4, 3 + i), i, dtype)) for i, dtype in enumerate(dtypes)]
        self.masters = offload.MasterWeights(self.model)
        self.optimizer = torch.optim.AdamW(self.masters.parameters(), lr=0.1)
        options: Any = {"chunks": {"chunk_bytes": 64}, "on the CPU": {"step_device": "cpu"}}.get(way, {})
        if way == "attached":
            self.masters.attach(self.optimizer)
        else:
            offload.OptimizerStateOffloader(
                self.optimizer, engine=InlineEngine(), master_weights=self.masters, **options
            )
        self.params: list[Any] = self.optimizer.param_groups[0]["params"] if by_optimizer else self.model

    def loss(self, number: int) -> torch.Tensor:
        factors = [values(param.shape, 10 * number + i) for i, param in enumerate(self.model)]
        return sum(((param * factor).sum() for param, factor in zip(self.model, factors, strict=True)), torch.zeros(()))


def _zero(params: list[Any], **options: Any) -> None:
    """What ``zero_grad`` does, of parameters of whomever."""
    torch.optim.SGD([{"params": params}], lr=1.0).zero_grad(**options)


def _scaled(arm: _Arm, number: int) -> None:
    """A step under a scaler, the second of which has an infinite gradient of a half parameter."""
    scaler: Any = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    for repeat in range(2):
        loss = arm.loss(number + repeat)
        torch.autograd.backward(scaler.scale(loss) if arm.params is not arm.model else loss * 8.0)
        if repeat == 1:
            grad = arm.model[0].grad
            assert grad is not None
            grad[0, 0] = float("inf")
        if arm.params is not arm.model:
            scaler.step(arm.optimizer)
            scaler.update()
        elif repeat == 0:
            for param in arm.model:
                assert param.grad is not None
                param.grad /= 8.0
            arm.optimizer.step()
        _zero(arm.params)
    torch.autograd.backward(arm.loss(number))


def _stopped(arm: _Arm, number: int) -> None:
    """A step that fails before it has stepped anything; its gradients are cleared."""

    def stop(*_: Any) -> None:
        raise RuntimeError("stopped")

    handle = arm.optimizer.register_step_pre_hook(stop)
    torch.autograd.backward(arm.loss(number + 5))
    with raises(RuntimeError, mentions=("stopped",)):
        arm.optimizer.step()
    handle.remove()
    _zero(arm.params)
    torch.autograd.backward(arm.loss(number))


def _clipped(arm: _Arm, number: int) -> torch.Tensor:
    torch.autograd.backward(arm.loss(number))
    return torch.nn.utils.clip_grad_norm_(arm.params, 0.01)


def _clipped_by_value(arm: _Arm, number: int) -> None:
    torch.autograd.backward(arm.loss(number))
    torch.nn.utils.clip_grad_value_(arm.params, 0.02)


def _cleared(arm: _Arm, number: int) -> None:
    torch.autograd.backward(arm.loss(number + 5))
    _zero(arm.params)
    torch.autograd.backward(arm.loss(number))


def _zeroed(arm: _Arm, number: int) -> None:
    torch.autograd.backward(arm.loss(number + 5))
    _zero(arm.params, set_to_none=False)
    torch.autograd.backward(arm.loss(number))


def _replaced(arm: _Arm, number: int) -> None:
    torch.autograd.backward(arm.loss(number))
    for i, param in enumerate(arm.params):
        grad = param.grad * 2
        # Of another dtype only a master takes one.
        param.grad = grad.float() if arm.params is not arm.model and i % 2 == 0 else grad
    del arm.params[3].grad


def _given(arm: _Arm, number: int) -> None:
    for i, param in enumerate(arm.params):
        param.grad = values(param.shape, 30 * number + i, arm.model[i].dtype)


_ACTIONS: dict[str, Callable[[_Arm, int], Any]] = {
    "zero_grad()": _cleared,
    "zero_grad(set_to_none=False)": _zeroed,
    "clip_grad_norm_": _clipped,
    "clip_grad_value_": _clipped_by_value,
    "replaced": _replaced,
    "given": _given,
    "a step that fails": _stopped,
    "a scaler": _scaled,
}


@requirement(
    "OPT-524",
    "Between steps a master's gradient MUST be its parameter's: who clears, clips, unscales, replaces or gives "
    "gradients by the optimizer's parameters does what it does to the model's, behind a step that failed, too.",
)
@pytest.mark.parametrize("way", _WAYS)
@pytest.mark.parametrize("name", list(_ACTIONS))
def test_gradients_of_the_model(offload: Any, way: str, name: str) -> None:
    # Torch's scaler refuses gradients in float16.
    dtypes = _DTYPES if name != "a scaler" else (torch.bfloat16, torch.float32)
    mine, theirs = (_Arm(offload, way, by_optimizer=each, dtypes=dtypes) for each in (True, False))
    for number in range(3):
        where = f"{name}, step {number}, {way}"
        with succeeds("the action", where=where):
            answers = [_ACTIONS[name](arm, number) for arm in (mine, theirs)]
        if answers[0] is not None:
            assert_same_tensor(*answers, where=f"norm, {where}")
        for got, expected, shown in zip(mine.model, theirs.model, mine.params, strict=True):
            assert_equal(got.grad is None, expected.grad is None, where=f"gradient, {where}")
            assert_equal(shown.grad is got.grad, True, where=f"a master shows the gradient, {where}")
            if got.grad is not None and expected.grad is not None:
                assert_same_tensor(got.grad, expected.grad, where=f"gradient, {where}")
        for arm in (mine, theirs):
            arm.optimizer.step()
        for got, expected in zip(mine.model, theirs.model, strict=True):
            assert_same_tensor(got.detach(), expected.detach(), where=f"parameter, {where}")
            # One that is its own master keeps its gradient, as torch's do.
            assert_equal(got.grad is None, got.dtype is not torch.float32, where=f"gradient behind a step, {where}")
        for got, expected in zip(mine.masters.parameters(), theirs.masters.parameters(), strict=True):
            assert_same_tensor(got.detach(), expected.detach(), where=f"master, {where}")


def _whole(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found


def _clip_shards(rank: Rank) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    offload, mesh = rank.component("offload"), init_device_mesh("cpu", (2,))
    found = []
    for by_optimizer in (True, False):
        placed = distribute_tensor(values((7, 6), 3, torch.bfloat16), mesh, [Shard(0)], src_data_rank=None)
        param = torch.nn.Parameter(placed)
        masters = offload.MasterWeights([param])
        optimizer = torch.optim.AdamW(masters.parameters(), lr=0.1)
        masters.attach(optimizer)
        params: Any = list(masters.parameters()) if by_optimizer else [param]
        for number in range(2):
            for size in (5, 1):
                _zero(params)
                grad = distribute_tensor(values((7, 6), number, torch.bfloat16), mesh, [Shard(0)], src_data_rank=None)
                param.grad = grad * size
            norm: Any = torch.nn.utils.clip_grad_norm_(params, 0.01)
            optimizer.step()
        found.append((_whole(norm), _whole(param.detach())))
        copied = pickle.loads(pickle.dumps((param, masters)))
        copied[0].grad = grad
        copied[1].attach(torch.optim.SGD(copied[1].parameters(), lr=0.1))
        assert_equal(next(copied[1].parameters()).grad is grad, True, where="gradient of a copy")
    for got, expected, what in zip(*found, ("norm", "parameter"), strict=True):
        assert_same_tensor(got, expected, where=what)


@requirement(
    "OPT-525",
    "Between steps the gradient of a master that is a DTensor MUST be its parameter's shard's, to clear and to clip, "
    "and that of a copy its own parameter's.",
)
def test_gradients_of_shards(rank_pool: Any) -> None:
    rank_pool.run(_clip_shards, 2)


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Names of all operators that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@requirement(
    "OPT-526",
    "Torch's optimizers MUST step masters with the operators that they step float32 parameters with, on a device by "
    "foreach; copies of masters have the gradients of their own model, a copy of the optimizer alone those of none, "
    "and a shallow copy leaves the masters that it shares as they are.",
)
def test_steps_alike(offload: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # As torch chooses on a device that has foreach.
    monkeypatch.setattr(
        importlib.import_module("torch.optim.optimizer"), "_get_foreach_kernels_supported_devices", lambda: ["cpu"]
    )
    names = []
    for has_masters in (True, False):
        params = [torch.nn.Parameter(values((4,), i, torch.bfloat16 if has_masters else torch.float32)) for i in (0, 1)]
        masters = offload.MasterWeights(params)
        optimizer = torch.optim.AdamW(masters.parameters(), lr=0.1)
        masters.attach(optimizer)
        for param in params:
            param.grad = torch.ones_like(param)
        with _Operators() as operators:
            optimizer.step()
        names.append([name for name in operators.names if "foreach" in name])
    assert_equal(names[0], names[1], where="operators of a step")
    assert_equal(bool(names[1]), True, where="whether the step is by foreach")
    param = torch.nn.Parameter(values((4,), 0, torch.bfloat16))
    masters = offload.MasterWeights([param])
    optimizer = torch.optim.AdamW(masters.parameters())
    masters.attach(optimizer)
    param.grad = values((4,), 1, torch.bfloat16)
    ways: list[Callable[[Any], Any]] = [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))]
    for copies in ways:
        (own,), twins, alone = copies([[param], masters, copy.deepcopy(optimizer)])
        (master,), (other,) = twins.parameters(), alone.param_groups[0]["params"]
        own.grad = values((4,), 2, torch.bfloat16)
        assert_equal(master.grad, None, where="gradient of masters that nobody steps")
        twins.attach(torch.optim.SGD([master], lr=0.1))
        assert_equal(master.grad is own.grad, True, where="gradient of copied masters")
        assert_equal(type(other) is torch.nn.Parameter, True, where="class of a parameter of a copied optimizer")
        assert_equal(other.grad, None, where="gradient of a copied optimizer")
    kind = type(master := next(masters.parameters()))
    with succeeds("a shallow copy", where="masters"):
        shared = copy.copy(masters)
    assert_equal(next(shared.parameters()) is master, True, where="a shallow copy shares its masters")
    assert_equal(type(master) is kind, True, where="class of a master that is shared")
    param.grad = values((4,), 1, torch.bfloat16)
    optimizer.zero_grad()
    assert_equal(param.grad, None, where="gradient behind zero_grad(), masters shared")


@requirement(
    "OPT-527",
    "A parameter that is its own master and was cast since, as a model is by to(dtype), MUST be refused by name in the "
    "next step, before anything is stepped.",
)
@pytest.mark.parametrize("way", _WAYS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_cast_since(offload: Any, way: str, dtype: torch.dtype) -> None:
    arm = _Arm(offload, way, by_optimizer=True)
    model = torch.nn.ParameterList(arm.model)
    torch.autograd.backward(arm.loss(0))
    arm.optimizer.step()
    model[1].data = model[1].data.to(dtype)
    before = [param.detach().clone() for param in model]
    torch.autograd.backward(arm.loss(1))
    with raises(StaleMasterError, mentions=(str(dtype), "torch.float32"), where=way):
        arm.optimizer.step()
    for got, expected in zip(model, before, strict=True):
        assert_same_tensor(got.detach(), expected, where=f"parameter behind a refused step, {way}")


@requirement(
    "OPT-593",
    "Behind a step that raised in the arithmetic of an offloaded optimizer the gradients of masters MUST be the "
    "model's again: who clips, replaces or clears them then does it for the step that follows.",
)
@pytest.mark.parametrize("way", ["offloaded", "chunks", "on request"])
def test_gradients_behind_a_failure(offload: Any, way: str) -> None:
    def clip(params: list[Any]) -> Any:
        return torch.nn.utils.clip_grad_norm_(params, 0.01)

    def replace(params: list[Any]) -> None:
        params[0].grad = torch.ones_like(params[0])

    def clear(params: list[Any]) -> None:
        params[0].grad = None

    options: Any = {"chunks": {"chunk_bytes": 64}, "on request": {"release": "on_request"}}.get(way, {})
    for change in (clip, replace, clear):
        arms = []
        for fails in (False, True):
            model = [torch.nn.Parameter(values((4, 3 + i), i, dtype)) for i, dtype in enumerate(_DTYPES)]
            masters = offload.MasterWeights(model)
            optimizer = torch.optim.SGD(masters.parameters(), lr=0.1)
            offload.OptimizerStateOffloader(optimizer, engine=InlineEngine(), master_weights=masters, **options)
            for i, param in enumerate(model):
                param.grad = values(param.shape, 10 + i, param.dtype)
            params: list[Any] = optimizer.param_groups[0]["params"]
            if fails:
                optimizer.param_groups[0]["lr"] = "0.1"
                with raises(TypeError, where=f"a step with a rate that is no number, {way}"):
                    optimizer.step()
                optimizer.param_groups[0]["lr"] = 0.1
                for master, param in masters.pairs.items():
                    if master is not param:
                        assert_equal(master.grad is param.grad, True, where="the gradient of a master is its model's")
            norm = change(params)
            optimizer.step()
            arms.append([*([] if norm is None else [norm]), *(each.detach() for each in (*params, *model))])
        for number, (got, expected) in enumerate(zip(*reversed(arms), strict=True)):
            assert_same_tensor(got, expected, where=f"tensor {number} behind {change.__name__}, {way}")


@requirement(
    "OPT-528",
    "A master whose model is gone MUST have a gradient of its own, to read, to give and to clear.",
)
@pytest.mark.parametrize("way", _WAYS)
def test_masters_without_a_model(offload: Any, way: str) -> None:
    arm = _Arm(offload, way, by_optimizer=True)
    (master, *_), model = arm.params, weakref.ref(arm.model[0])
    torch.autograd.backward(arm.loss(0))
    del arm
    gc.collect()
    assert_equal(model(), None, where="the parameter")
    with succeeds("what torch does with gradients", where=f"a master without a model, {way}"):
        found = [master.grad]
        for given in (torch.ones_like(master), None):
            master.grad = given
            found.append(master.grad)
    assert_equal([each is None for each in found], [True, False, True], where="gradients")
    assert_same_tensor(found[1], torch.ones_like(master), where="a gradient that was given")


@requirement(
    "OPT-529",
    "A gradient that is no tensor MUST be refused for a master as torch refuses it for a parameter. Clearing that of a "
    "master which no step gives gradients MUST leave its parameter's.",
)
def test_gradients_of_masters_alone(offload: Any) -> None:
    param = torch.nn.Parameter(values((4,), 0, torch.bfloat16))
    masters = offload.MasterWeights([param])
    (master,) = masters.parameters()
    for is_stepped in (False, True):
        if is_stepped:
            masters.attach(torch.optim.SGD([master], lr=0.1))
        for each in (param, master):
            with raises(TypeError, mentions=("float",), where=f"a number, {is_stepped=}"):
                each.grad = 1.0
        param.grad = torch.ones_like(param)
        master.grad = None
        assert_equal(param.grad is None, is_stepped, where=f"the parameter's gradient, {is_stepped=}")


@requirement(
    "OPT-540",
    "Behind a step that failed once gradients were taken, the gradients that the model has got since MUST be those of "
    "its masters: a scaler or a clip that goes by the optimizer's parameters acts on them.",
)
def test_gradients_since_a_failure(offload: Any) -> None:
    arm = _Arm(offload, "attached", by_optimizer=True)

    def stop(*_: Any) -> None:
        raise RuntimeError("stopped")

    handle = arm.optimizer.register_step_pre_hook(stop)
    torch.autograd.backward(arm.loss(0))
    with raises(RuntimeError, mentions=("stopped",), where="a step"):
        arm.optimizer.step()
    handle.remove()
    _zero(arm.model)
    torch.autograd.backward(arm.loss(1))
    grads = [param.grad for param in arm.model]
    shown = [master.grad is grad for master, grad in zip(arm.params, grads, strict=True)]
    assert_equal(shown, [True] * len(grads), where="gradients of masters are the model's")


class _OwnStep(torch.optim.SGD):
    """One that is none of torch's: its step is called with everything on the device."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


_LEFT_WAYS: dict[str, dict[str, Any]] = {
    "attached": {},
    "chunks": {"chunk_bytes": 32},
    "on request": {"release": "on_request"},
    "of its own": {},
    "kept": {},
}


@requirement(
    "OPT-570",
    "A master that left the groups of an offloaded optimizer MUST be left alone by its steps, with closures and "
    "without: its parameter keeps its gradient, which another optimizer steps with, and may be written in place.",
)
@pytest.mark.parametrize("has_closure", [False, True])
@pytest.mark.parametrize("way", list(_LEFT_WAYS)[1:])
def test_masters_that_left(offload: Any, way: str, has_closure: bool) -> None:
    arms = []
    for arm in ("attached", way):
        params = [torch.nn.Parameter(values((5,), i, torch.bfloat16)) for i in range(3)]
        masters = offload.MasterWeights(params)
        mine = list(masters.parameters())
        kind = _OwnStep if way == "of its own" else torch.optim.SGD
        optimizer = kind([{"params": [master]} for master in mine], lr=0.5, momentum=0.9)
        step = optimizer.step
        if arm == "attached":
            masters.attach(optimizer)
        else:
            offload.OptimizerStateOffloader(
                optimizer, engine=InlineEngine(), master_weights=masters, **_LEFT_WAYS[arm]
            ).offload()
        step = step if arm == "kept" else optimizer.step
        other = torch.optim.SGD(optimizer.param_groups.pop()["params"], lr=0.25)
        masters.attach(other)
        for number in range(3):
            if number == 2:
                with torch.no_grad():
                    params[2].mul_(0.5)
            for i, param in enumerate(params):
                param.grad = values((5,), 10 * number + i, torch.bfloat16)
            grad = params[2].grad
            with succeeds("a step", where=f"{arm}, step {number}"):
                step(*((lambda: 0.0,) if has_closure else ()))
            assert_equal(params[2].grad is grad, True, where=f"the gradient of the one that left, {arm}, step {number}")
            if number == 2:
                masters.refresh()
            other.step()
        arms.append([tensor.detach() for tensor in (*params, *mine)])
    for number, (expected, got) in enumerate(zip(*arms, strict=True)):
        assert_same_tensor(got, expected, where=f"parameter or master {number}, {way}")
