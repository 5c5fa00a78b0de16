"""Optimizers that are not torch's, and wrappers around one: moved as they are, stepped as a whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from conformance.harness import assert_equal, assert_le, assert_same_tensor, raises, requirement, succeeds
from conformance.offload.cases import SHAPES, assert_same_state, proven_on, values
from conformance.offload.foreign import (
    Chained,
    Clipped,
    Container,
    Distributed,
    Factored,
    Flat,
    FusedAdam,
    Joint,
    Prepared,
    Renamed,
    Shared,
    Tied,
)
from twinproof.errors import ConfigError, PlanError, UnsupportedError

MAKERS: dict[str, Any] = {
    "FusedAdam": FusedAdam,
    "Clipped": lambda params: Clipped(params, lr=0.1, momentum=0.9),
    "Factored": Factored,
    "LBFGS": lambda params: torch.optim.LBFGS(params, max_iter=3),
    "Renamed": lambda params: Renamed(params, lr=0.01),
    # Only its name is that of one of torch's.
    "SGD": lambda params: type("SGD", (Clipped,), {})(params, lr=0.1, momentum=0.9),
}


class _Arms:
    """The same optimizer twice, one of them offloaded."""

    def __init__(self, offload: Any, device: Any, make: Any, **options: Any) -> None:
        self.arms = [[torch.nn.Parameter(values(shape, i)) for i, shape in enumerate(SHAPES)] for _ in range(2)]
        self.plain, self.optimizer = (make(arm) for arm in self.arms)
        self.offloader = offload.OptimizerStateOffloader(
            self.optimizer, engine=device.engine, **{"chunk_bytes": 512, **options}
        )
        self.step_count = 0

    def step(self, **options: Any) -> None:
        self.step_count += 1
        for arm, optimizer in zip(self.arms, (self.plain, self.optimizer), strict=True):
            for i, param in enumerate(arm):
                param.grad = values(param.shape, 100 * self.step_count + i)
            if isinstance(optimizer, torch.optim.LBFGS):
                optimizer.step(
                    lambda arm=arm: (  # type: ignore[no-untyped-call]
                        sum(float(param.detach().square().sum()) for param in arm)
                    )
                )
            else:
                optimizer.step(**options)

    def check(self) -> None:
        got = self.offloader.snapshot()
        with _disable_current_modes():
            for number, (plain, param) in enumerate(zip(*self.arms, strict=True)):
                assert_same_tensor(param.detach(), plain.detach(), where=f"parameter {number} of {self.step_count}")
            if not isinstance(self.plain, torch.optim.LBFGS):
                assert_same_state(got, self.plain.state_dict())


@requirement(
    "OPT-252",
    "An optimizer that is none of torch's, and one that changes torch's arithmetic, MUST be stepped bit for bit as "
    "without an offloader, its counters in groups and its closure included, and its states MUST leave the device.",
)
@pytest.mark.parametrize("name", ["FusedAdam", "Clipped", "Factored", "LBFGS", "SGD"])
def test_foreign(offload: Any, device: str, name: str) -> None:
    with proven_on(device, this_branch_only=name == "LBFGS") as place:
        arms = _Arms(offload, place, MAKERS[name])
        assert_equal(arms.offloader.is_separable, False, where="is_separable")
        for number in range(3):
            if number == 2:
                arms.offloader.prefetch()
            arms.step()
            arms.check()
            assert_equal(arms.offloader.residency().device_bytes, 0, where="states left on the device")
        if name != "LBFGS":
            moved = sum(v.nbytes for s in arms.optimizer.state.values() for v in s.values() if torch.is_tensor(v))
            assert_equal(arms.offloader.stats().payload_bytes, moved, where="bytes that move")
        arms.offloader.close()
        arms.step()


@requirement("OPT-257", "Further arguments of a step MUST reach an optimizer that takes them.")
def test_arguments(offload: Any, device: str) -> None:
    with proven_on(device) as place:
        arms = _Arms(offload, place, FusedAdam)
        for scale in (2.0, 8.0):
            arms.step(grad_scaler=scale)
            arms.check()
        arms.offloader.close()


@requirement(
    "OPT-253",
    "A subclass that inherits the arithmetic of one of torch's optimizers MUST be stepped in chunks as it is.",
)
def test_subclass(offload: Any, device: str) -> None:
    with proven_on(device) as place:
        arms = _Arms(offload, place, MAKERS["Renamed"])
        assert_equal(arms.offloader.is_separable, True, where="is_separable")
        for _ in range(2):
            arms.step()
            arms.check()
        # Its states were foreseen, so that none had to be found on the device after a step.
        assert_equal(
            arms.offloader.stats().host_bytes >= sum(8 * p.numel() for p in arms.arms[1]), True, where="places"
        )
        arms.offloader.close()


@requirement(
    "OPT-258",
    "States of an optimizer that is none of torch's MUST load whatever their shape, before the first step and after, "
    "and a shape that contradicts a known one MUST be refused.",
)
def test_foreign_load(offload: Any, device: str) -> None:
    with proven_on(device) as place:
        arms = _Arms(offload, place, Factored)
        for _ in range(2):
            arms.step()
        saved = arms.offloader.snapshot()
        other = _Arms(offload, place, Factored)
        for arm, origin in ((other.arms[0], arms.arms[0]), (other.arms[1], arms.arms[1])):
            for param, value in zip(arm, origin, strict=True):
                with torch.no_grad():
                    param.copy_(value)
        other.plain.load_state_dict(arms.plain.state_dict())
        other.offloader.load_state_dict(saved)
        other.step_count = arms.step_count
        assert_equal(other.offloader.residency().device_bytes, 0, where="loaded states on the device")
        other.step()
        other.check()
        saved["state"][1]["row"] = values((7,), 1)
        with raises(PlanError, mentions=("row", "parameter 1")):
            other.offloader.load_state_dict(saved)
        other.step()
        other.check()
        other.offloader.close()
        arms.offloader.close()


@requirement("OPT-256", "States that share memory MUST be refused by name, since moved one by one they would part.")
def test_shared_memory(offload: Any, device: str) -> None:
    with proven_on(device) as place:
        arms = _Arms(offload, place, Shared)
        with raises(UnsupportedError, mentions=("share memory", "head", "parameter 0", "memory of its own")):
            arms.step()


@requirement(
    "OPT-395",
    "States that share memory with a parameter, or with states of another parameter, MUST be refused as well, with "
    "the parameters named; parameters that share memory MUST be stepped as before.",
)
@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        (Tied, {"kin": "own", "at_end": False}, ("the parameter", "tied", "parameter 0")),
        (Tied, {"kin": "own", "at_end": True}, ("the parameter", "tied", "parameter 0")),
        (Tied, {"kin": "next", "at_end": True}, ("the parameter", "tied", "parameter 0 and 1")),
        (Joint, {"is_view": False}, ("joint", "parameter 0 and 1")),
        (Joint, {"is_view": True}, ("joint", "parameter 0 and 1")),
        (Factored, {}, None),
    ],
)
def test_memory_of_others(offload: Any, device: str, kind: Any, options: dict[str, Any], said: Any) -> None:
    with proven_on(device) as place:
        arms = _Arms(offload, place, type("Kind", (kind,), options))
        if said is not None:
            with raises(UnsupportedError, mentions=("share memory", *said)):
                arms.step()
            return
        for params in arms.arms:
            # One flat piece of memory for all of them, of which two have the same part.
            flat = torch.cat([param.detach().view(-1) for param in params])
            parts = list(torch.split(flat, [param.numel() for param in params]))
            parts[2] = parts[0]
            for param, part in zip(params, parts, strict=True):
                param.data = part.view(param.shape)
        for _ in range(2):
            with succeeds("a step", where="parameters of one piece of memory"):
                arms.step()
            arms.check()
        arms.offloader.close()


@requirement(
    "OPT-522",
    "A state that shares memory with a parameter MUST be refused also where another parameter begins behind that one "
    "and ends before the state.",
)
def test_around_others(offload: Any, device: str) -> None:
    with proven_on(device) as place:
        arms = _Arms(offload, place, type("Kind", (Tied,), {"kin": "nested", "at_end": True}))
        with raises(UnsupportedError, mentions=("share memory", "the parameter", "tied", "parameter 0")):
            arms.step()


@requirement(
    "OPT-365", "States that lie side by side in one piece of memory, and share none of it, MUST move as others do."
)
def test_side_by_side(offload: Any, device: str) -> None:
    with proven_on(device) as place:
        arms, refused = _Arms(offload, place, Flat), list[str]()
        for _ in range(2):
            try:
                arms.step()
            except UnsupportedError as error:
                refused.append(str(error))
            assert_equal(refused, [], where="what was refused")
            arms.check()
            assert_equal(arms.offloader.residency().device_bytes, 0, where="states left on the device")
        arms.offloader.close()


@requirement(
    "OPT-254",
    "The masters of Megatron's DistributedOptimizer MUST move with its states, stay on the device until the model has "
    "them, and give the model bit for bit what they give it without an offloader.",
)
def test_distributed_optimizer(offload: Any, device: str) -> None:
    with proven_on(device) as place:
        arms = [
            [torch.nn.Parameter(values(shape, i, torch.bfloat16)) for i, shape in enumerate(SHAPES)] for _ in (0, 1)
        ]
        plain, wrapped = (Distributed(arm) for arm in arms)
        offloader = offload.OptimizerStateOffloader(wrapped, engine=place.engine)
        assert_equal(offloader.optimizer is wrapped.optimizer, True, where="the inner optimizer")
        payload = sum(12 * param.numel() for param in arms[1])
        for count in range(3):
            for arm in arms:
                for i, param in enumerate(arm):
                    param.grad = values(param.shape, 100 * count + i, torch.bfloat16)
            offloader.reload()
            plain.step()
            wrapped.step()
            found = offloader.residency()
            assert_equal((found.device_bytes, found.host_bytes), (payload, 0), where="after the step")
            offloader.offload_states()
            offloader.release_offloaded_gpu_states()
            offloader.settle()
            found = offloader.residency()
            assert_equal((found.device_bytes, found.host_bytes), (0, payload), where="after the release")
            with _disable_current_modes():
                for expected, got in zip(*arms, strict=True):
                    assert_same_tensor(got.detach(), expected.detach(), where=f"model after step {count}")
        got = offloader.snapshot()
        with _disable_current_modes():
            assert_same_state(got, plain.optimizer.state_dict())
        offloader.close()
        with raises(ConfigError, mentions=("masters", "optimizer")):
            offload.OptimizerStateOffloader(wrapped, engine=place.engine, step_device="cpu")


@requirement(
    "OPT-255",
    "A wrapper MUST be attached to by the optimizer it holds; one that keeps the step it found, several optimizers in "
    "one, and what is no optimizer MUST be refused by name, untouched.",
)
def test_wrappers(offload: Any, device: str) -> None:
    with proven_on(device) as place:
        arms = _Arms(offload, place, lambda params: Prepared(torch.optim.SGD(params, lr=0.1, momentum=0.9)))
        assert_equal(arms.offloader.optimizer is arms.optimizer.optimizer, True, where="the inner optimizer")
        for _ in range(2):
            arms.step()
        assert_equal(arms.offloader.stats().step_count, 2, where="steps")
        assert_le(1, arms.offloader.stats().h2d_bytes, where="moved bytes")
        arms.offloader.close()
        inner = torch.optim.SGD(arms.arms[1], lr=0.1)
        with succeeds("an offloader", where="of what has an optimizer and empty places for others"):
            found = offload.OptimizerStateOffloader(Container(inner, optimizers=[()], _optims={}), engine=place.engine)
        found.close()
        sparse = torch.optim.SparseAdam(arms.arms[1])
        for kind, wrapper, words in (
            (ConfigError, Prepared(inner, scales=True), ("Prepared", "before")),
            (UnsupportedError, Chained(inner), ("Chained", "each")),
            (UnsupportedError, Container(inner, optimizers=[inner]), ("Container", "each of optimizers")),
            (UnsupportedError, Container(inner, optimizers={"a": inner}), ("Container", "each of optimizers")),
            (UnsupportedError, Container(inner, _optims=[("a", inner)]), ("Container", "each of _optims")),
            (UnsupportedError, sparse, ("SparseAdam",)),
            (UnsupportedError, object(), ("object",)),
        ):
            with raises(kind, mentions=words):
                offload.OptimizerStateOffloader(wrapper, engine=place.engine)
        assert_equal("step" in vars(inner), False, where="step taken over")
