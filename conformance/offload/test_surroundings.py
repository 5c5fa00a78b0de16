"""What the process is beside the offloader: defaults and modes that a caller has set for its model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from conformance.harness import assert_equal, requirement, succeeds
from conformance.harness.surroundings import SURROUNDINGS
from conformance.offload.cases import CpuArm, Twins, proven


@requirement(
    "OPT-378",
    "The process's default device MUST NOT decide where states and host memory of a step on the CPU lie: steps under "
    "another one, the first among them, MUST be those without.",
)
@pytest.mark.parametrize("halves", [False, True])
def test_default_device(offload: Any, halves: bool) -> None:
    with proven() as device:
        arm = CpuArm(offload, device, halves=halves)
        step = arm.optimizer.step

        def under_meta() -> None:
            with torch.device("meta"), succeeds("a step", where="on meta"):
                step()

        arm.optimizer.step = under_meta
        for _ in range(3):
            arm.step()
            arm.check()
        arm.offloader.close()


def _step_by_closure(params: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> Any:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = sum((param * param).sum() for param in params)
        loss.backward()  # type: ignore[union-attr]
        return loss  # type: ignore[return-value]

    return optimizer.step(closure)  # type: ignore[arg-type]


# What was made in inference mode stays so, and nobody may step it outside.
@requirement(
    "OPT-348",
    "Under any default dtype and mode of the caller a step, the first among them, and a load MUST be the plain "
    "optimizer's under the same: the dtype of a counter, and a closure that runs a backward pass.",
)
@pytest.mark.parametrize("surroundings", [name for name in SURROUNDINGS if name != "inference"])
@pytest.mark.parametrize("step_device", ["device", "cpu"])
def test_defaults_and_modes(offload: Any, step_device: str, surroundings: str) -> None:
    with proven() as device:
        twins = Twins(offload, device, "Adam", options={"lr": 0.1, "foreach": False}, step_device=step_device)
        for number in range(3):
            for params, optimizer in ((twins.plain_params, twins.plain), (twins.params, twins.optimizer)):
                with SURROUNDINGS[surroundings](), succeeds("a step by a closure", where=surroundings):
                    _step_by_closure(params, optimizer)
            if number == 1:
                saved = twins.plain.state_dict()
                with SURROUNDINGS[surroundings](), succeeds("a load", where=surroundings):
                    twins.plain.load_state_dict(saved)
                    twins.offloader.load_state_dict(twins.offloader.snapshot())
            if step_device == "device":
                twins.check()
            states = twins.offloader.snapshot()["state"], twins.plain.state_dict()["state"]
            forms = [[{name: value.dtype for name, value in each.items()} for each in s.values()] for s in states]
            assert_equal(forms[0], forms[1], where=f"dtypes of states after step {number}")
            counts = [[float(each["step"]) for each in s.values()] for s in states]
            assert_equal(counts[0], counts[1], where=f"counters after step {number}")
        twins.offloader.close()
