"""Masters that nobody rounds into the model, and what masters, given or attached, tell of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from conformance.harness import assert_equal, assert_same_tensor, raises, requirement, succeeds
from conformance.offload.cases import values
from twinproof.engine import InlineEngine
from twinproof.errors import ConfigError, OffloadConflictError, StaleMasterError

_STEPS: dict[str, dict[str, Any]] = {
    "device": {"engine": InlineEngine("cpu"), "chunk_bytes": 64},
    "cpu": {"step_device": "cpu"},
}
_SHAPES = ((4, 3), (5,), (2, 6))


def _halves(count: int = len(_SHAPES)) -> list[torch.Tensor]:
    return [torch.nn.Parameter(values(_SHAPES[i], i, torch.bfloat16)) for i in range(count)]


def _give(params: list[torch.Tensor], seed: int) -> None:
    for i, param in enumerate(params):
        param.grad = values(tuple(param.shape), seed + i, param.dtype)


def _copies(tensors: Any) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


def _assert_all(got: Any, expected: list[torch.Tensor], *, where: str) -> None:
    for number, (mine, value) in enumerate(zip(got, expected, strict=True)):
        assert_same_tensor(mine.detach(), value, where=f"{where} {number}")


@requirement(
    "OPT-541",
    "An offloader MUST refuse by name an optimizer of masters that it was not given, and that are not attached to this "
    "very optimizer, before it attaches: no step would change the model. Those of a group that is added later MUST be "
    "refused by the next step, before anything is stepped; attached ones MUST be stepped and rounded.",
)
@pytest.mark.parametrize("step_device", _STEPS)
def test_masters_that_nobody_rounds(offload: Any, step_device: str) -> None:
    options = _STEPS[step_device]
    mentions = ("master_weights=masters", "masters.attach(optimizer)", "where: master_weights", "(4, 3)")
    params, others = _halves(), [torch.nn.Parameter(values((4, 3), 9, torch.bfloat16))]
    masters, more = offload.MasterWeights(params), offload.MasterWeights(others)
    optimizer = torch.optim.AdamW([*more.parameters(), *masters.parameters()], lr=0.1)
    # Of another optimizer, and of this one a part.
    masters.attach(torch.optim.AdamW(masters.parameters(), lr=0.1))
    more.attach(torch.optim.AdamW(more.parameters(), lr=0.1))
    for number in range(2):
        with raises(ConfigError, mentions=mentions, where=f"masters of which {number} of 2 are attached"):
            offload.OptimizerStateOffloader(optimizer, **options)
        assert_equal("step" in vars(optimizer), False, where="step taken over by an offloader that is refused")
        masters.attach(optimizer)
    more.attach(optimizer)
    with succeeds("an offloader", where="masters that are attached"):
        offload.OptimizerStateOffloader(optimizer, **options)
    before = _copies([*others, *params])
    _give([*others, *params], 20)
    optimizer.step()
    for param, master, value in zip([*others, *params], optimizer.param_groups[0]["params"], before, strict=True):
        assert_same_tensor(param.detach(), master.detach().to(torch.bfloat16), where="a parameter behind a step")
        assert_equal(torch.equal(param, value), False, where="whether a parameter is as before the step")


@requirement(
    "OPT-542",
    "Masters that nobody rounds MUST be refused by the next step of an offloaded optimizer, before anything is "
    "stepped, where a group of them is added later, until they are attached. Masters whose model is gone are "
    "parameters as any others.",
)
@pytest.mark.parametrize("step_device", _STEPS)
def test_groups_of_masters_added_later(offload: Any, step_device: str) -> None:
    params: list[Any] = [torch.nn.Parameter(values((5,), 1))]
    late = _halves(1)
    masters = offload.MasterWeights(late)
    optimizer = torch.optim.AdamW(params, lr=0.1)
    offload.OptimizerStateOffloader(optimizer, **_STEPS[step_device])
    optimizer.add_param_group({"params": list(masters.parameters())})
    tensors = [*params, *late, *masters.parameters()]
    before = _copies(tensors)
    for _ in range(2):
        _give([*params, *late], 5)
        with raises(ConfigError, mentions=("master_weights=masters", "(4, 3)"), where="a group of masters"):
            optimizer.step()
        _assert_all(tensors, before, where="behind a refused step, tensor")
    masters.attach(optimizer)
    with succeeds("a step", where="a group of masters that are attached"):
        optimizer.step()
    assert_same_tensor(
        late[0].detach(), next(masters.parameters()).detach().to(torch.bfloat16), where="the late parameter"
    )
    assert_equal(torch.equal(late[0], before[1]), False, where="whether the late parameter is as before the step")
    alone = list(offload.MasterWeights(_halves(1)).parameters())
    with succeeds("an offloader", where="masters whose model is gone"):
        offload.OptimizerStateOffloader(torch.optim.AdamW(alone), **_STEPS[step_device])


@requirement(
    "OPT-543",
    "Where an offloader is given masters that its optimizer does not step, the error MUST say so, whatever else it "
    "would say of the parameters that the optimizer steps instead.",
)
@pytest.mark.parametrize("step_device", _STEPS)
def test_given_masters_that_are_not_stepped(offload: Any, step_device: str) -> None:
    params = _halves()
    masters = offload.MasterWeights(params)
    optimizer = torch.optim.AdamW(params, lr=0.1)
    mentions = ("the optimizer has to step the masters", "master_weights.parameters()", "where: master_weights")
    with raises(ConfigError, mentions=mentions, where="an optimizer of the model's parameters"):
        offload.OptimizerStateOffloader(optimizer, master_weights=masters, **_STEPS[step_device])


@requirement(
    "OPT-544",
    "The error that refuses an offloader of parameters on the CPU MUST name step_device='cpu', and an offloader that "
    "is made so MUST serve them.",
)
def test_parameters_on_the_cpu(offload: Any) -> None:
    param = torch.nn.Parameter(values((4, 3), 1))
    optimizer = torch.optim.AdamW([param], lr=0.1)
    with raises(OffloadConflictError, mentions=("step_device='cpu'", "an engine that stands in"), where="no engine"):
        offload.OptimizerStateOffloader(optimizer)
    _give([param], 2)
    with succeeds("a step", where="step_device='cpu'"):
        offload.OptimizerStateOffloader(optimizer, step_device="cpu")
        optimizer.step()
    assert_equal(torch.equal(param, values((4, 3), 1)), False, where="whether the parameter is as before the step")


@requirement(
    "OPT-545",
    "The error of a parameter that changed behind its master's back MUST name the load of saved masters first, and "
    "following the parameters only for where none were saved: that one loses bits of float32. The load MUST bring the "
    "saved masters back bit for bit, behind a load of the model.",
)
@pytest.mark.parametrize("how", ["attached", *_STEPS])
def test_what_to_do_behind_a_load(offload: Any, how: str) -> None:
    params = _halves()
    masters = offload.MasterWeights(params)
    optimizer = torch.optim.AdamW(masters.parameters(), lr=0.1)
    target, load, refresh = masters, "load", "refresh"
    if how == "attached":
        masters.attach(optimizer)
    else:
        target = offload.OptimizerStateOffloader(optimizer, master_weights=masters, **_STEPS[how])
        load, refresh = "load_masters", "refresh_masters"
    _give(params, 10)
    optimizer.step()
    saved = [_copies(some) for some in (masters.parameters(), params)]
    _give(params, 20)
    optimizer.step()
    with torch.no_grad():
        for param, value in zip(params, saved[1], strict=True):
            param.copy_(value)
    said = (f": {load}(saved ones)", f"{refresh}() only where none were saved", "where: parameter of shape (4, 3)")
    with raises(StaleMasterError, mentions=said, where=how):
        optimizer.step()
    getattr(target, load)(saved[0])
    _assert_all(masters.parameters(), saved[0], where=f"{how}, master")
    _assert_all(params, saved[1], where=f"{how}, parameter")
    with succeeds("a step", where=f"{how}, behind a load"):
        optimizer.step()


# How masters are stepped that are attached to their optimizer.
_WAYS = ("plain", "a step that was kept", *_STEPS)


class _Joined:
    """Masters attached to an optimizer of the first of them; the others join it, or are there from the start."""

    def __init__(self, offload: Any, way: str, *, joins: bool, kind: Any = torch.optim.AdamW) -> None:
        self.params = _halves()
        self.masters = offload.MasterWeights(self.params)
        self._mine = list(self.masters.parameters())
        groups = [{"params": self._mine[:1]}, {"params": self._mine[1:], "lr": 0.2}]
        self.optimizer = kind(groups[:1] if joins else groups, lr=0.1)
        kept = self.optimizer.step
        self.masters.attach(self.optimizer)
        if way != "plain":
            offload.OptimizerStateOffloader(self.optimizer, **_STEPS.get(way, _STEPS["device"]))
        self.step = kept if way == "a step that was kept" else self.optimizer.step
        self._late = groups[1] if joins else None
        _give(self.params[:1], 10)
        self.step()

    def join(self) -> None:
        if self._late is not None:
            self.optimizer.add_param_group(self._late)

    def values(self) -> list[torch.Tensor]:
        """Of masters and parameters."""
        return _copies([*self._mine, *self.params])


@requirement(
    "OPT-564",
    "Masters that join an optimizer by add_param_group() behind attach() MUST be trained from then on as those of "
    "before are: stepped with their parameters' gradients, which are cleared, and rounded; with closures and without, "
    "offloaded or not, by a step that was kept as well.",
)
@pytest.mark.parametrize("has_closure", [False, True])
@pytest.mark.parametrize("way", _WAYS)
def test_masters_that_join(offload: Any, way: str, has_closure: bool) -> None:
    found = []
    for joins in (False, True):
        arm = _Joined(offload, way, joins=joins)
        arm.join()
        for number in range(2):

            def give(arm: _Joined = arm, seed: int = 20 + 10 * number) -> float:
                _give(arm.params, seed)
                return 0.0

            with succeeds("a step", where=f"{way}, {joins=}"):
                if has_closure:
                    arm.step(give)
                else:
                    give()
                    arm.step()
            assert_equal([param.grad for param in arm.params], [None] * 3, where=f"gradients behind a step, {joins=}")
        found.append(arm.values())
    _assert_all(found[1], found[0], where=f"{way}: of masters and parameters, number")


@requirement(
    "OPT-565",
    "Between add_param_group() and the next step the gradients of masters that join MUST be the model's: zero_grad() "
    "of the optimizer clears those, and who clips by its parameters clips those.",
)
@pytest.mark.parametrize("way", _WAYS)
def test_gradients_of_masters_that_join(offload: Any, way: str) -> None:
    found = []
    for joins in (False, True):
        arm = _Joined(offload, way, joins=joins)
        arm.join()
        _give(arm.params, 20)
        arm.optimizer.zero_grad()
        assert_equal([param.grad for param in arm.params], [None] * 3, where=f"gradients behind zero_grad(), {joins=}")
        _give(arm.params, 30)
        stepped = [param for group in arm.optimizer.param_groups for param in group["params"]]
        norm = torch.nn.utils.clip_grad_norm_(stepped, 0.01)
        arm.step()
        found.append([norm, *arm.values()])
    _assert_all(found[1], found[0], where=f"{way}: of the norm, masters and parameters, number")
