"""Steps after a failed one, masters that are loaded, parameters and counters of kinds of their own, large states."""

from __future__ import annotations

import inspect
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

import refimpl.offload as reference
from conformance.harness import assert_equal, assert_same_tensor, raises, requirement, succeeds
from conformance.offload.cases import FUSED, Twins, assert_same_state, proven, values
from twinproof.engine import InlineEngine
from twinproof.errors import ConfigError


@requirement(
    "OPT-486",
    "Masters MUST be refused by name for parameters that float32 does not hold, of 64 bits, complex or whole numbers, "
    "and be made for those that it holds.",
)
def test_dtypes_of_masters(offload: Any) -> None:
    for dtype in (torch.float64, torch.complex64, torch.int32, torch.bool):
        given = [values((3,), 0, torch.bfloat16), torch.ones(3, dtype=dtype)]
        for params in (given, given[::-1]):
            with raises(ConfigError, mentions=(f"got: {dtype}", "32 bits", "where: params"), where=f"{dtype}"):
                offload.MasterWeights(params)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        with succeeds("masters", where=f"{dtype}"):
            (master,) = offload.MasterWeights([torch.ones(3, dtype=dtype)]).parameters()
        assert_equal(master.dtype, torch.float32, where=f"master of {dtype}")


@requirement(
    "OPT-487",
    "A load of masters MUST write each float32 parameter, which is its own master, once, and the others as their "
    "masters say, rounded.",
)
def test_loads_of_masters(offload: Any) -> None:
    params: list[Any] = [torch.nn.Parameter(values((4, 6), i, (torch.float32, torch.bfloat16)[i])) for i in range(2)]
    masters = offload.MasterWeights(params)
    before, saved = [param._version for param in params], [values((4, 6), 7 + i) for i in range(2)]
    masters.load(saved)
    assert_equal([param._version - old for param, old in zip(params, before, strict=True)], [1, 1], where="writes")
    for number, (master, param) in enumerate(zip(masters.parameters(), params, strict=True)):
        assert_same_tensor(master.detach(), saved[number], where=f"master {number}")
        assert_same_tensor(param.detach(), saved[number].to(param.dtype), where=f"parameter {number}")
    optimizer = torch.optim.SGD(masters.parameters(), lr=0.5)
    masters.attach(optimizer)
    for param in params:
        param.grad = torch.ones_like(param)
    with succeeds("a step", where="after a load"):
        optimizer.step()
    assert_same_tensor(params[0].detach(), saved[0] - 0.5, where="a float32 parameter after a step")


class _Failing(torch.optim.SGD):
    """Steps as torch's, but for those that fail at their beginning."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise RuntimeError("a step that fails")
        return super().step(closure)


@requirement(
    "OPT-488",
    "A step with masters that is tried again after it failed, and after zero_grad() of the optimizer, MUST step with "
    "the gradients that the model's parameters have by then, the very tensors of before, too.",
)
@pytest.mark.parametrize("is_offloaded", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_tried_again(offload: Any, dtype: torch.dtype, is_offloaded: bool) -> None:
    params: list[Any] = [torch.nn.Parameter(values((4, 6), i, dtype)) for i in range(2)]
    masters = offload.MasterWeights(params)
    optimizer = _Failing(masters.parameters(), lr=0.5)
    if is_offloaded:
        offload.OptimizerStateOffloader(optimizer, engine=InlineEngine("cpu"), master_weights=masters)
    else:
        masters.attach(optimizer)
    for number in range(2):
        expected = [master.detach() - 0.5 * (number + 1) for master in masters.parameters()]
        grads = [torch.full_like(param, number + 1.0) for param in params]
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        optimizer.fails = True
        for _ in range(2):
            with raises(RuntimeError, mentions=("a step that fails",), where=f"step {number}"):
                optimizer.step()
            optimizer.zero_grad()
            assert_equal([param.grad for param in params], [None, None], where="gradients behind zero_grad()")
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad
        optimizer.fails = False
        with succeeds("a step", where=f"step {number}, tried again"):
            optimizer.step()
        for i, (master, wanted) in enumerate(zip(masters.parameters(), expected, strict=True)):
            assert_same_tensor(master.detach(), wanted, where=f"master {i} after step {number}")
            assert_same_tensor(params[i].detach(), wanted.to(dtype), where=f"parameter {i} after step {number}")
        assert_equal([param.grad for param in params], [None, None], where="gradients of the model")


class _Counted(InlineEngine):
    """Counts what is copied tensor by tensor."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.copied_bytes = 0

    def copy_many(self, targets: Any, sources: Any) -> None:
        """Counts, and copies."""
        self.copied_bytes += sum(source.nbytes for source in sources)
        super().copy_many(targets, sources)


@requirement(
    "OPT-489",
    "Where the memory of host and device is one, states of any size that have a place MUST go there and back together, "
    "without a copy for each of them, and with the bits of the plain optimizer.",
    needs=("packed_tensors",),
)
@pytest.mark.parametrize("shape", [(4, 6), (96, 1024)], ids=["small", "large"])
def test_sizes_of_states(offload: Any, shape: tuple[int, ...]) -> None:
    engine = _Counted()
    arms = [[torch.nn.Parameter(values(shape, i)) for i in range(3)] for _ in range(2)]
    plain, optimizer = (torch.optim.Adagrad(params, lr=0.1) for params in arms)
    offloader = offload.OptimizerStateOffloader(optimizer, engine=engine)
    for number in range(3):
        for params in arms:
            for i, param in enumerate(params):
                param.grad = values(shape, 10 * number + i)
        plain.step()
        optimizer.step()
        # Back to where a plain optimizer has them, and away again.
        offloader.to_device(offloader.bundles)
        offloader.offload()
        assert_same_state(offloader.snapshot(), plain.state_dict())
    for i, (expected, param) in enumerate(zip(*arms, strict=True)):
        assert_same_tensor(param.detach(), expected.detach(), where=f"parameter {i}")
    assert_equal(engine.copied_bytes, 0, where="bytes that were copied tensor by tensor")
    offloader.close()


class _Own(torch.nn.Parameter):
    """A parameter of a class of its own, which may change what torch does."""


@requirement(
    "OPT-490",
    "A parameter of a class of its own, whose gradient is a plain tensor, MUST leave its group to torch, bit for bit, "
    "and stats() name the class.",
    needs=FUSED,
)
@pytest.mark.parametrize(("kind", "options"), [("AdamW", {}), ("SGD", {"momentum": 0.9}), ("Adagrad", {})], ids=str)
def test_classes_of_parameters(offload: Any, kind: str, options: dict[str, Any]) -> None:
    with proven() as device:
        arms = [[cls(values((4, 6), i)) for i, cls in enumerate((_Own, torch.nn.Parameter))] for _ in range(2)]
        plain, optimizer = (getattr(torch.optim, kind)(params, lr=0.1, **options) for params in arms)
        offloader = offload.OptimizerStateOffloader(optimizer, engine=device.engine, fused_update=True)
        for number in range(2):
            for params in arms:
                for i, param in enumerate(params):
                    param.grad = values((4, 6), 10 * number + i)
            plain.step()
            optimizer.step()
        (update,) = offloader.stats().updates
        found = (update.startswith("torch: "), "a parameter of class _Own" in update)
        assert_equal(found, (True, True), where=f"way of {kind}: {update}")
        saved = offloader.snapshot()
        with _disable_current_modes():
            assert_same_state(saved, plain.state_dict())
            for i, (expected, param) in enumerate(zip(*arms, strict=True)):
                assert_same_tensor(param.detach(), expected.detach(), where=f"parameter {i}")


@requirement(
    "OPT-491",
    "A counter of steps that is a number and no tensor, as a user may bind it, MUST be refused by the next step in the "
    "words of the plain optimizer's, with everything as it was, and steps go on when it is a tensor again.",
    needs=FUSED,
)
@pytest.mark.parametrize("kind", ["AdamW", "Adam", "Adagrad"])
def test_counters_that_are_numbers(offload: Any, kind: str) -> None:
    with proven() as device:
        arms: list[list[Any]] = [[torch.nn.Parameter(values((4, 6), i)) for i in range(2)] for _ in range(2)]
        plain, optimizer = (getattr(torch.optim, kind)(params, lr=0.1) for params in arms)
        offloader = offload.OptimizerStateOffloader(optimizer, engine=device.engine, fused_update=True)
        for params in arms:
            for i, param in enumerate(params):
                param.grad = values((4, 6), i)
        plain.step()
        optimizer.step()
        before, said = offloader.snapshot(), list[str]()
        weights = [param.detach().clone() for param in arms[1]]
        for params, each in zip(arms, (plain, optimizer), strict=True):
            state = each.state[params[1]]
            counter, state["step"] = state["step"], 1.0
            with raises(RuntimeError, mentions=said, where=f"{kind}, a counter that is a number") as refused:
                each.step()
            said, state["step"] = [str(refused.error)], counter
        after = offloader.snapshot()
        with _disable_current_modes():
            assert_same_state(after, before)
            for i, (param, weight) in enumerate(zip(arms[1], weights, strict=True)):
                assert_same_tensor(param.detach(), weight, where=f"parameter {i} after the refusal")
        with succeeds("a step", where=f"{kind}, a counter that is a tensor again"):
            optimizer.step()
        assert_equal(offloader.stats().updates, ("fused",), where=f"way of {kind} in the end")


@requirement(
    "OPT-492",
    "Where no library was built, the component MUST promise what it does without one, and nothing that only a library "
    "does.",
    needs=FUSED,
)
def test_promises_without_a_library(offload: Any) -> None:
    from fastimpl import offload as built
    from fastimpl import ops

    made: dict[str, Any] = {"__name__": "offload_without_a_library"}
    with mock.patch.object(ops, "available", return_value=False), succeeds("an import", where="no library"):
        exec(compile(inspect.getsource(built), str(built.__file__), "exec"), made)
    expected = {"bounded_window", "coalesced_copies", "overlapped_transfers", "prefetched_chunks"}
    assert_equal(sorted(made["CAPABILITIES"]), sorted(expected), where="CAPABILITIES")
    assert_equal(expected < built.CAPABILITIES, True, where="what a library adds")
    param = torch.nn.Parameter(values((4, 6), 0))
    optimizer = torch.optim.SGD([param], lr=0.1, momentum=0.9)
    with made["OptimizerStateOffloader"](optimizer, engine=InlineEngine("cpu")) as offloader:
        param.grad = torch.ones_like(param)
        optimizer.step()
        assert_equal(offloader.residency().device_bytes, 0, where="bytes on the device behind a step")


@requirement(
    "OPT-494",
    "A step on the CPU of a part of the parameters MUST give what is left the plain optimizer's step, once, and leave "
    "all of the rest alone, whatever groups they are of; all implementations alike.",
)
@pytest.mark.parametrize("groups", [[(0, 1), (2, 3)], [(0,), (1, 2, 3)], [(0, 3), (1, 2)], [(0, 1, 2, 3)]], ids=str)
def test_what_is_left_of_a_step(offload: Any, groups: list[tuple[int, ...]]) -> None:
    found: list[list[torch.Tensor]] = []
    for component in (offload, reference):
        with proven(this_branch_only=True) as device:
            some = [(numbers, {"lr": 0.01 * (1 + n)}) for n, numbers in enumerate(groups)]
            options: dict[str, Any] = {"step_device": "cpu", "fraction": 0.4, "chunk_bytes": 256}
            twins = Twins(component, device, "AdamW", [values((8, 4), i) for i in range(4)], groups=some, **options)
            for _ in range(3):
                twins.step(skip=(1,) if twins.step_count == 1 else ())
            moved = {id(bundle.param) for bundle in twins.offloader.bundles}
            with _disable_current_modes():
                for i, (mine, plain) in enumerate(zip(twins.params, twins.plain_params, strict=True)):
                    if id(mine) not in moved:
                        assert_same_tensor(mine.detach(), plain.detach(), where=f"{component.__name__}: parameter {i}")
                found.append([param.detach().clone() for param in twins.params])
            assert_equal(len(moved), 2, where=f"{component.__name__}: parameters that are stepped on the CPU")
            twins.offloader.close()
    for i, (mine, theirs) in enumerate(zip(*found, strict=True)):
        assert_same_tensor(mine, theirs, where=f"parameter {i} of both implementations")
