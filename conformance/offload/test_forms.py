"""What is loaded, attached, copied or left in another form than the offloader's own: taken as it is, or named."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from conformance.harness import Rank, assert_equal, assert_same_tensor, raises, requirement, succeeds
from conformance.offload.cases import assert_same_state, values
from refimpl.optimizers import adam_step
from twinproof.engine import InlineEngine
from twinproof.errors import ConfigError, PlanError, StaleMasterError, UnsupportedError
from twinproof.offload.states import local_of
from twinproof.optimizers import AdamHyper, trained_params

_HOWS = ["alone", "device", "cpu"]


def _halves(count: int = 2) -> list[torch.Tensor]:
    return [torch.nn.Parameter(values((4, 3), i, torch.bfloat16)) for i in range(count)]


def _give(params: list[torch.Tensor], seed: int) -> None:
    for i, param in enumerate(params):
        param.grad = values(tuple(param.shape), seed + i, param.dtype)


def _attached(offload: Any, masters: Any, how: str) -> torch.optim.Optimizer:
    """An optimizer of masters, alone or offloaded."""
    optimizer = torch.optim.AdamW(masters.parameters(), lr=0.1)
    if how == "alone":
        masters.attach(optimizer)
    else:
        offload.OptimizerStateOffloader(
            optimizer, engine=InlineEngine("cpu"), master_weights=masters, step_device=how, chunk_bytes=64
        )
    return optimizer


@requirement(
    "OPT-504",
    "A load of masters MUST take each value as it was before the load, also where the values are masters or parameters "
    "themselves in another order, or other tensors of their memory, alone and offloaded.",
)
@pytest.mark.parametrize("as_views", [False, True])
@pytest.mark.parametrize("of", ["masters", "parameters"])
@pytest.mark.parametrize("how", _HOWS)
def test_masters_in_another_order(offload: Any, how: str, of: str, as_views: bool) -> None:
    params = _halves(3)
    masters = offload.MasterWeights(params)
    _attached(offload, masters, how)
    mine = list(masters.parameters())
    expected = [value.detach().float().clone() for value in (params[1], params[2], params[0])]
    given: list[torch.Tensor] = list(mine if of == "masters" else params)
    if as_views:
        given = [value.detach() for value in given]
    masters.load([given[1], given[2], given[0]])
    for number, value in enumerate(expected):
        assert_same_tensor(mine[number].detach(), value, where=f"master {number}")
        assert_same_tensor(params[number].detach().float(), value, where=f"parameter {number}")


def _load_other_meshes(rank: Rank) -> None:
    offload = rank.component("offload")
    mesh = init_device_mesh("cpu", (rank.world_size,))

    def cut(value: torch.Tensor) -> torch.Tensor:
        return distribute_tensor(value, mesh, [Shard(0)], src_data_rank=None)

    plain, whole = values((3,), 1, torch.bfloat16), values((4, 2), 2, torch.bfloat16)
    masters = offload.MasterWeights([torch.nn.Parameter(plain.clone()), torch.nn.Parameter(cut(whole))])
    loads = {"plain for a DTensor": [plain.float() + 1, whole.float()]}
    loads["a DTensor for plain"] = [distribute_tensor(plain.float(), mesh, [Shard(0)]), cut(whole.float())]
    for where, load in loads.items():
        with raises(PlanError, mentions=("sharded", "where: values["), where=where):
            masters.load(load)
        assert_same_tensor(next(masters.parameters()).detach(), plain.float(), where=f"a master behind {where}")
    params = [torch.nn.Parameter(plain.float()), torch.nn.Parameter(cut(whole.float()))]
    optimizer = torch.optim.AdamW(params, foreach=False)
    offloader = offload.OptimizerStateOffloader(optimizer, engine=InlineEngine("cpu"))
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    before = offloader.snapshot()
    replica = distribute_tensor(values((3,), 3), mesh, [Replicate()], src_data_rank=None)
    shown = {0: (replica, "got: DeviceMesh", "expected: no mesh"), 1: (before["state"][1]["exp_avg"].to_local(),)}
    for number, (value, *words) in shown.items():
        state = offloader.snapshot()
        state["state"][number]["exp_avg"] = value
        mentions = ("sharded in another way", f"where: exp_avg of parameter {number}", *words)
        with raises(PlanError, mentions=mentions, where=f"a {type(value).__name__} of parameter {number}"):
            offloader.load_state_dict(state)
        after: Any = offloader.snapshot()["state"]
        for each, param in enumerate(params):
            expected, found = before["state"][each]["exp_avg"], after[each]["exp_avg"]
            assert_equal(
                type(found).__name__, type(expected).__name__, where=f"a state behind the load, of {tuple(param.shape)}"
            )
            assert_same_tensor(local_of(found), local_of(expected), where="a state behind the load")


@requirement(
    "OPT-505",
    "Plain tensors for masters or states that are DTensors, and DTensors for those that are none, MUST be a PlanError "
    "of their load, before anything has changed.",
)
def test_other_meshes(rank_pool: Any) -> None:
    rank_pool.run(_load_other_meshes, 2)


_LOADS: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor], type[Exception]]] = {
    "a moment on meta": ("exp_avg", lambda value: value.to("meta"), UnsupportedError),
    "a counter on meta": ("step", lambda value: value.to("meta"), UnsupportedError),
    "whole numbers": ("exp_avg", lambda value: value.to(torch.int32), PlanError),
    "truth values": ("exp_avg_sq", lambda value: value > 0, PlanError),
}


@requirement(
    "OPT-506",
    "States without values, on meta, and moments of whole numbers MUST be refused by a load, by name and before "
    "anything has changed; those on meta by the optimizer's own load, too.",
)
@pytest.mark.parametrize("step_device", ["device", "cpu"])
@pytest.mark.parametrize("what", list(_LOADS))
def test_states_without_values(offload: Any, what: str, step_device: str) -> None:
    name, made, error = _LOADS[what]
    params: list[torch.Tensor] = [torch.nn.Parameter(values((4, 3), i)) for i in range(2)]
    optimizer = torch.optim.AdamW(params)
    offloader = offload.OptimizerStateOffloader(optimizer, engine=InlineEngine("cpu"), step_device=step_device)
    _give(params, 10)
    optimizer.step()
    before, state = offloader.snapshot(), offloader.snapshot()
    state["state"][1][name] = made(state["state"][1][name])
    loads = [offloader.load_state_dict, *([optimizer.load_state_dict] if error is UnsupportedError else [])]
    for load in loads:
        with raises(error, mentions=(name, "parameter 1"), where=what):
            load(state)
        assert_same_state(offloader.snapshot(), before)


@requirement(
    "OPT-507",
    "Where the CPU steps, a counter that is a number, which could not count on, and states of another shape than their "
    "parameter has by now MUST be refused by the step, by name and before anything has changed.",
)
@pytest.mark.parametrize("what", ["a number", "states of before", "no states", "a moment"])
def test_what_cannot_be_stepped(offload: Any, what: str) -> None:
    params: list[torch.Tensor] = [torch.nn.Parameter(values((4, 3), i)) for i in range(2)]
    optimizer = torch.optim.AdamW(params)
    offload.OptimizerStateOffloader(optimizer, engine=InlineEngine("cpu"), step_device="cpu")
    _give(params, 10)
    optimizer.step()
    if what == "a number":
        optimizer.state[params[1]]["step"] = 1
    elif what == "a moment":
        optimizer.state[params[1]]["exp_avg"] = torch.zeros(6, 3)
    else:
        params[1].grad = None
        params[1].data = torch.ones(6, 3)
    if what == "no states":
        del optimizer.state[params[1]]
    _give(params, 20)
    before = [param.detach().clone() for param in params]
    with raises(UnsupportedError, mentions=("shape (4, 3)" if what in ("a number", "a moment") else "shape (6, 3)",)):
        optimizer.step()
    assert_equal(float(optimizer.state[params[0]]["step"]), 1.0, where="steps of the other parameter")
    for number, (param, expected) in enumerate(zip(params, before, strict=True)):
        assert_same_tensor(param.detach(), expected, where=f"parameter {number}")


@requirement(
    "OPT-508",
    "Parameters of 8 bits with masters MUST be stepped on the CPU by the formula, and get their masters rounded.",
)
def test_weights_of_8_bits(offload: Any) -> None:
    param: Any = torch.nn.Parameter(values((4, 3), 1).to(torch.float8_e4m3fn))
    masters = offload.MasterWeights([param])
    (master,) = masters.parameters()
    optimizer = torch.optim.AdamW(masters.parameters(), lr=0.1)
    offload.OptimizerStateOffloader(optimizer, engine=InlineEngine("cpu"), master_weights=masters, step_device="cpu")
    weight, first, second = param.detach().float(), torch.zeros(4, 3), torch.zeros(4, 3)
    param.grad_dtype = torch.float32
    for step in range(1, 3):
        grad = values((4, 3), 10 * step)
        param.grad = grad.clone()
        with succeeds("a step", where="weights of 8 bits"):
            optimizer.step()
        hyper = AdamHyper.of(
            lr=0.1, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, step=step, decoupled=True, maximize=False
        )
        adam_step(hyper, grad, weight, first, second, None)
        assert_same_tensor(master.detach(), weight, where=f"the master after step {step}")
        rounded = weight.to(torch.float8_e4m3fn).float()
        assert_same_tensor(param.detach().float(), rounded, where=f"the parameter after step {step}")


class _Averaging(torch.optim.Optimizer):
    """As torch's PostLocalSGDOptimizer is: an optimizer by its class alone, without hooks of its own."""

    def __init__(self, optim: torch.optim.Optimizer) -> None:
        self.optim, self.param_groups, self.state = optim, optim.param_groups, optim.state

    def step(self, closure: Any = None) -> Any:
        return self.optim.step(closure)


class _Keyed(torch.optim.Optimizer):
    """As torchrec's wrapper is: an optimizer whose states, and step, are those of another."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer.param_groups, {})
        self._optimizer, self.param_groups = optimizer, optimizer.param_groups

    def step(self, closure: Any = None) -> Any:
        return self._optimizer.step(closure)


@requirement(
    "OPT-509",
    "An optimizer that holds the one that steps as its optim, as torch's PostLocalSGDOptimizer does, or as its "
    "_optimizer MUST be attached to by that one: its states move, and steps are the plain optimizer's.",
)
@pytest.mark.parametrize("kind", ["optim", "_optimizer"])
def test_optimizers_inside(offload: Any, kind: str) -> None:
    arms = []
    for _ in range(2):
        params: list[torch.Tensor] = [torch.nn.Parameter(values((4, 3), i)) for i in range(2)]
        inner = torch.optim.AdamW(params)
        outer: Any = _Keyed(inner) if kind == "_optimizer" else _Averaging(inner)
        arms.append((params, inner, outer))
    with succeeds("attaching", where=kind):
        offloader = offload.OptimizerStateOffloader(arms[0][2], engine=InlineEngine("cpu"))
    for step in range(3):
        for params, _, outer in arms:
            _give(params, 10 * step)
            outer.step()
    assert_equal(offloader.residency().device_bytes, 0, where="bytes on the device")
    assert_equal(offloader.stats().payload_bytes, 2 * 2 * 48, where="bytes that move")
    assert_same_state(offloader.snapshot(), arms[1][1].state_dict())
    for number, (got, expected) in enumerate(zip(arms[0][0], arms[1][0], strict=True)):
        assert_same_tensor(got.detach(), expected.detach(), where=f"parameter {number}")


@requirement(
    "OPT-510",
    "Masters MUST refuse to be attached to an optimizer that steps none of them, or parameters that have one.",
)
@pytest.mark.parametrize("what", ["parameters", "both", "others"])
def test_optimizers_of_others(offload: Any, what: str) -> None:
    params = [*_halves(), torch.nn.Parameter(values((3,), 7))]
    masters = offload.MasterWeights(params)
    stepped: list[torch.Tensor] = {
        "parameters": params,
        "both": [*masters.parameters(), params[0]],
        "others": [torch.nn.Parameter(values((3,), 8))],
    }[what]
    with raises(ConfigError, mentions=("masters.parameters()", "where: optimizer"), where=what):
        masters.attach(torch.optim.SGD(stepped, lr=0.1))


@requirement(
    "OPT-511",
    "Several optimizers that share masters MUST each take the gradients of those that they step, and no others, with "
    "closures and without.",
)
@pytest.mark.parametrize("has_closure", [False, True])
def test_several_optimizers(offload: Any, has_closure: bool) -> None:
    arms = []
    for count in (1, 2):
        params = _halves()
        masters = offload.MasterWeights(params)
        mine = list(masters.parameters())
        optimizers = [torch.optim.SGD(some, lr=0.1) for some in ([mine] if count == 1 else [mine[:1], mine[1:]])]
        for optimizer in optimizers:
            masters.attach(optimizer)
        for step in range(2):
            _give(params, 10 * step)
            for optimizer in optimizers:
                optimizer.step((lambda: 0.0) if has_closure else None)
        arms.append((params, mine))
    for got, expected in zip([*arms[1][0], *arms[1][1]], [*arms[0][0], *arms[0][1]], strict=True):
        assert_same_tensor(got.detach(), expected.detach(), where="a parameter or master")
        assert_equal(got.grad, None, where="a gradient that was taken")


@requirement(
    "OPT-512",
    "A copy and a pickle of masters, with their parameters, MUST step as the original does once they are attached, "
    "and still refuse a parameter that was written behind its master's back.",
)
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copied_masters(offload: Any, how: str) -> None:
    def copied(*given: Any) -> Any:
        return copy.deepcopy(given) if how == "deepcopy" else pickle.loads(pickle.dumps(given))

    params = _halves()
    masters = offload.MasterWeights(params)
    arms = [(params, _attached(offload, masters, "alone"))]
    _give(params, 10)
    arms[0][1].step()
    others, twin = copied(params, masters)
    arms.append((others, _attached(offload, twin, "alone")))
    assert_equal([any(of is each for each in others) for of in trained_params(arms[1][1])], [True] * 2, where="trained")
    for some, optimizer in arms:
        optimizer.state.clear()
        _give(some, 20)
        with succeeds("a step", where=how):
            optimizer.step()
    for got, expected in zip([*others, *twin.parameters()], [*params, *masters.parameters()], strict=True):
        assert_same_tensor(got.detach(), expected.detach(), where="a parameter or master")
    with torch.no_grad():
        params[1].mul_(2.0)
    _, twin = copied(params, masters)
    with raises(StaleMasterError):
        _attached(offload, twin, "alone").step()


@requirement(
    "OPT-580",
    "Parameters of 32 bits, which are their own masters, MUST stay no masters of others in a copy and a pickle; a load "
    "of masters' own values MUST change nothing; and masters of no parameter MUST be attached to any optimizer.",
)
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_masters_of_themselves_and_of_none(offload: Any, how: str) -> None:
    masters = offload.MasterWeights([*_halves(1), torch.nn.Parameter(values((3,), 7))])
    twin = copy.deepcopy(masters) if how == "deepcopy" else pickle.loads(pickle.dumps(masters))
    for of, each in (("masters", masters), ("a copy", twin)):
        own = list(each.parameters())
        assert_equal([hasattr(param, "master_of") for param in own], [True, False], where=f"marks of {of}")
        before = [param.detach().clone() for param in own]
        each.load(own)
        for param, value in zip(own, before, strict=True):
            assert_same_tensor(param.detach(), value, where=f"{of} behind a load of their own values")
    (param,) = _halves(1)
    optimizer = torch.optim.SGD([param], lr=0.5)
    with succeeds("a step", where="masters of no parameter"):
        offload.MasterWeights([]).attach(optimizer)
        param.grad = torch.ones_like(param)
        optimizer.step()
    assert_same_tensor(param.detach(), values((4, 3), 0, torch.bfloat16) - 0.5, where="the parameter")


@requirement(
    "OPT-513",
    "Masters that are made in inference mode MUST step outside of it as any others; parameters made in inference mode "
    "MUST be refused by name.",
)
@pytest.mark.parametrize("how", _HOWS)
def test_masters_in_inference_mode(offload: Any, how: str) -> None:
    arms = []
    for is_inference in (False, True):
        params = _halves()
        with torch.inference_mode(is_inference):
            masters = offload.MasterWeights(params)
        with succeeds("steps", where=how):
            optimizer = _attached(offload, masters, how)
            for step in range(2):
                _give(params, 10 * step)
                optimizer.step()
        arms.append([*params, *masters.parameters()])
    for got, expected in zip(*arms, strict=True):
        assert_same_tensor(got.detach(), expected.detach(), where="a parameter or master")
    with torch.inference_mode():
        params = _halves()
    with raises(ConfigError, mentions=("inference mode", "where: params")):
        offload.MasterWeights(params)


@requirement(
    "OPT-514",
    "A parameter that was given another shape than its master's MUST be refused by the step, before anything changes.",
)
@pytest.mark.parametrize("how", _HOWS)
def test_parameters_that_grow(offload: Any, how: str) -> None:
    params = _halves()
    masters = offload.MasterWeights(params)
    optimizer = _attached(offload, masters, how)
    before = params[0].detach().clone()
    params[1].data = torch.ones(6, 3, dtype=torch.bfloat16)
    _give(params, 10)
    with raises(StaleMasterError, mentions=("(6, 3)", "(4, 3)", "where: params"), where=how):
        optimizer.step()
    assert_same_tensor(params[0].detach(), before, where="the other parameter")
