"""Groups that users edit: parameters come, go, and change their group, and with it the options of their steps."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from conformance.harness import assert_equal, requirement
from conformance.offload.cases import SHAPES, Twins, proven, values

RELEASES = ("at_offload", "on_request")


def _bytes_of(*numbers: int) -> int:
    return sum(4 * torch.Size(SHAPES[number]).numel() for number in numbers)


def _moved(optimizer: Any) -> None:
    """A parameter without momentum goes to the group that has it."""
    optimizer.param_groups[0]["params"].append(optimizer.param_groups[1]["params"].pop(0))


def _shifted(optimizer: Any) -> None:
    """The group with momentum goes, and the one behind it gets it."""
    for param in optimizer.param_groups.pop(0)["params"]:
        optimizer.state.pop(param, None)
    optimizer.param_groups[0]["momentum"] = 0.9


@requirement(
    "OPT-379",
    "A parameter that comes to a group with other options MUST have places for the states that they bring before the "
    "step that makes them, and so MUST one whose group changes its options and its number at once.",
)
@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize(("edit", "moving"), [(_moved, (0, 1)), (_shifted, (1, 2, 3))], ids=["moved", "shifted"])
def test_other_options(offload: Any, release: str, edit: Any, moving: tuple[int, ...]) -> None:
    with proven() as device:
        groups = [([0], {"momentum": 0.9}), ([1, 2, 3], {"momentum": 0.0})]
        twins = Twins(offload, device, "SGD", groups=groups, options={"lr": 0.1}, release=release)
        for _ in range(2):
            twins.step()
        for optimizer in (twins.plain, twins.optimizer):
            edit(optimizer)
        for _ in range(2):
            twins.step()
            twins.offloader.settle()
            twins.check()
            assert_equal(twins.offloader.stats().payload_bytes, _bytes_of(*moving), where="bytes that move")
        twins.offloader.offload()
        twins.offloader.release_gpu_memory()
        twins.offloader.settle()
        residency = twins.offloader.residency()
        assert_equal(
            (residency.device_bytes, residency.host_bytes), (0, _bytes_of(*moving)), where="device and host bytes"
        )
        twins.offloader.close()
        twins.step()


@requirement(
    "OPT-380",
    "A parameter that is in no group any more MUST NOT be held by the offloader after the next step, nor its states.",
)
@pytest.mark.parametrize(
    ("release", "step_device"), [*((release, "device") for release in RELEASES), ("at_offload", "cpu")]
)
def test_gone(offload: Any, release: str, step_device: str) -> None:
    with proven() as device:
        params = [torch.nn.Parameter(values((16, 16), number)) for number in range(3)]
        optimizer = torch.optim.AdamW(params, foreach=False)
        offloader = offload.OptimizerStateOffloader(
            optimizer, engine=device.engine, chunk_bytes=1, release=release, step_device=step_device
        )

        def step() -> None:
            for number, param in enumerate(params):
                param.grad = values(param.shape, 10 + number)
            optimizer.step()

        step()
        offloader.offload()
        gone = params.pop(1)
        optimizer.param_groups[0]["params"] = list(params)
        del optimizer.state[gone]
        held = [weakref.ref(gone), weakref.ref(gone.grad)]
        step()
        del gone
        gc.collect()
        assert_equal([ref() is None for ref in held], [True, True], where="the parameter and its gradient are free")
        step()
        offloader.close()
