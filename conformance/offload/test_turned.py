"""Options that bring states later, and states without elements: what moves is what a step has, whenever it came."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from conformance.harness import assert_equal, requirement, succeeds
from conformance.harness.places import on_pretend
from conformance.offload.cases import SHAPES, Twins, proven, values
from conformance.provers.pretend_device import PretendEngine

BYTES = 4 * sum(torch.Size(shape).numel() for shape in SHAPES)


@requirement(
    "OPT-350",
    "States that an option brings after the first step, such as SGD's momentum, MUST move from then on and be counted, "
    "with the plain optimizer's bits.",
)
@pytest.mark.parametrize("release", ["at_offload", "on_request"])
@pytest.mark.parametrize("is_loaded", [False, True], ids=["turned", "loaded"])
def test_momentum_later(offload: Any, release: str, is_loaded: bool) -> None:
    with proven() as device:
        twins = Twins(offload, device, "SGD", options={"lr": 0.1}, release=release)
        if is_loaded:
            other = Twins(offload, device, "SGD", options={"lr": 0.1, "momentum": 0.9})
            other.step()
            saved = [other.plain.state_dict(), other.offloader.snapshot()]
            other.offloader.close()
        for _ in range(2):
            twins.step()
        twins.check()
        assert_equal(twins.offloader.stats().payload_bytes, 0, where="bytes that move without momentum")
        if is_loaded:
            twins.plain.load_state_dict(saved[0])
            twins.offloader.load_state_dict(saved[1])
        else:
            for optimizer in (twins.plain, twins.optimizer):
                optimizer.param_groups[0]["momentum"] = 0.9
        for _ in range(3):
            twins.step()
            twins.check()
            twins.offloader.settle()
            assert_equal(twins.offloader.stats().payload_bytes, BYTES, where="bytes that move with momentum")
            here, there = (0, BYTES) if release == "at_offload" else (BYTES, 0)
            residency = twins.offloader.residency()
            assert_equal((residency.device_bytes, residency.host_bytes), (here, there), where="device and host bytes")
        twins.offloader.close()
        twins.step()


@requirement(
    "OPT-351",
    "States that an option brings beside masters MUST have their places before the step that makes them.",
)
@pytest.mark.parametrize("release", ["at_offload", "on_request"])
def test_momentum_beside_masters(offload: Any, release: str) -> None:
    with proven() as device:
        params = [torch.nn.Parameter(values(shape, i, torch.bfloat16)) for i, shape in enumerate(SHAPES)]
        masters = offload.MasterWeights(params)
        optimizer = torch.optim.SGD(masters.parameters(), lr=0.1)
        offloader = offload.OptimizerStateOffloader(
            optimizer, engine=device.engine, master_weights=masters, chunk_bytes=512, release=release
        )
        for number in range(4):
            if number == 2:
                optimizer.param_groups[0]["momentum"] = 0.9
            for i, param in enumerate(params):
                param.grad = values(param.shape, 100 * number + i, torch.bfloat16)
            optimizer.step()
            offloader.settle()
            expected = BYTES if number < 2 else 2 * BYTES
            assert_equal(offloader.stats().payload_bytes, expected, where=f"bytes that move in step {number}")
            residency = offloader.residency()
            total = residency.device_bytes + residency.host_bytes
            assert_equal(total, expected, where=f"bytes of states and masters after step {number}")
        offloader.close()


@requirement("OPT-354", "States that are taken away MUST have no places any more: fewer bytes move, and masters alone.")
def test_momentum_taken_away(offload: Any) -> None:
    with proven() as device:
        params = [torch.nn.Parameter(values(shape, i, torch.bfloat16)) for i, shape in enumerate(SHAPES)]
        masters = offload.MasterWeights(params)
        optimizer = torch.optim.SGD(masters.parameters(), lr=0.1)
        offloader = offload.OptimizerStateOffloader(
            optimizer, engine=device.engine, master_weights=masters, chunk_bytes=512
        )

        def step(number: int) -> None:
            for i, param in enumerate(params):
                param.grad = values(param.shape, 100 * number + i, torch.bfloat16)
            optimizer.step()
            offloader.settle()

        step(0)
        optimizer.param_groups[0]["momentum"] = 0.9
        step(1)
        assert_equal(offloader.stats().payload_bytes, 2 * BYTES, where="bytes that move with momentum")
        optimizer.param_groups[0]["momentum"] = 0.0
        for state in optimizer.state.values():
            del state["momentum_buffer"]
        step(2)
        assert_equal(offloader.stats().payload_bytes, BYTES, where="bytes that move without momentum")
        residency = offloader.residency()
        assert_equal(residency.device_bytes + residency.host_bytes, BYTES, where="bytes of states and masters")
        assert_equal(offloader.stats().host_bytes, BYTES, where="bytes of host memory")
        offloader.close()


class _Windowed(torch.optim.Optimizer):
    """SGD that keeps its last gradients: of a window without length, a tensor without elements."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            if not state:
                state["total"], state["window"] = torch.zeros_like(param), param.new_empty((0, *param.shape))
            state["total"].add_(param.grad)
            param.add_(state["total"], alpha=-0.1)


@requirement(
    "OPT-352", "A state without elements MUST lie where the optimizer puts it, after each step and after a load."
)
def test_no_elements(offload: Any) -> None:
    with on_pretend() as device:
        made = [torch.nn.Parameter(values(shape, 1).to(device.device)) for shape in ((3, 4), (8, 16))]
        optimizer = _Windowed(made)
        offloader = offload.OptimizerStateOffloader(optimizer, engine=PretendEngine(), chunk_bytes=1024)

        def step() -> None:
            for param in made:
                param.grad = torch.ones_like(param)
            optimizer.step()

        def check(where: str) -> None:
            for number, param in enumerate(made):
                places = [value.device.type == "cpu" for value in optimizer.state[param].values()]
                assert_equal(places, [True, False], where=f"states of parameter {number} in host memory {where}")

        for number in range(2):
            step()
            check(f"after step {number}")
        offloader.load_state_dict(offloader.snapshot())
        check("after a load")
        step()
        check("after a step with loaded states")
        offloader.close()


def _turned(shape: tuple[int, ...], seed: int, order: tuple[int, ...]) -> torch.Tensor:
    """Values whose memory has the dimensions in another order."""
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return values([shape[dim] for dim in order], seed).permute(inverse)


@requirement(
    "OPT-519",
    "Parameters beside each other whose memory has their dimensions in any one order MUST be stepped with the plain "
    "optimizer's bits, whether or not padding stands between their states.",
)
@pytest.mark.parametrize("release", ["at_offload", "on_request"])
def test_any_order_of_dimensions(offload: Any, release: str) -> None:
    # Of the first two shapes no state needs padding, of the others each does.
    for shape in ((16, 32), (8, 4, 16), (5, 7), (3, 2, 5)):
        for order in itertools.permutations(range(len(shape))):
            with proven() as device:
                given = [_turned(shape, number, order) for number in range(3)]
                twins = Twins(offload, device, "Adam", given, options={}, release=release)
                for number in range(3):
                    with succeeds("a step", where=f"{shape} in the order {order}, step {number}"):
                        twins.step()
                twins.check()
                twins.offloader.close()
