"""What the process is beside the offloader: defaults and modes that a caller has set for its model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from conformance.harness import assert_equal, assert_same_tensor, requirement, succeeds
from conformance.harness.surroundings import SURROUNDINGS
from conformance.offload.cases import CpuArm, Twins, assert_same_state, proven, values
from twinproof.engine import InlineEngine


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


@requirement(
    "OPT-450",
    "An offloader that is made, and verbs that are called, in inference mode, as around rollouts and evaluations, MUST "
    "leave states and masters that every later step can write, with the plain optimizer's bits.",
)
@pytest.mark.parametrize("verb", ["attach", "prefetch", "offload", "release", "bring", "snapshot", "load", "masters"])
@pytest.mark.parametrize("release", ["at_offload", "on_request"])
def test_inference_mode(offload: Any, verb: str, release: str) -> None:
    params = [torch.nn.Parameter(values((4, 3), i, torch.bfloat16)) for i in range(2)]
    others = [torch.nn.Parameter(value.detach().clone()) for value in params]
    masters, plain_masters = offload.MasterWeights(params), offload.MasterWeights(others)
    optimizer, plain = (torch.optim.Adam(each.parameters(), lr=0.1) for each in (masters, plain_masters))
    plain_masters.attach(plain)
    with torch.inference_mode(verb == "attach"):
        offloader = offload.OptimizerStateOffloader(
            optimizer, engine=InlineEngine("cpu"), master_weights=masters, release=release, chunk_bytes=256
        )
    for number in range(4):
        for i, (param, other) in enumerate(zip(params, others, strict=True)):
            param.grad, other.grad = (values((4, 3), 10 * number + i, torch.bfloat16) for _ in range(2))
        with succeeds("a step", where=f"behind {verb} in inference mode"):
            optimizer.step()
            plain.step()
            with torch.inference_mode():
                _call(offloader, verb)
            offloader.prefetch()
        for i, (param, other) in enumerate(zip(params, others, strict=True)):
            assert_same_tensor(param.detach(), other.detach(), where=f"parameter {i} after {number}")
    assert_same_state(offloader.snapshot(), plain.state_dict())
    offloader.close()


def _call(offloader: Any, verb: str) -> None:
    if verb == "release":
        offloader.offload()
        offloader.release_gpu_memory()
    elif verb == "bring":
        offloader.to_device(offloader.bundles)
    elif verb == "load":
        offloader.load_state_dict(offloader.snapshot())
    elif verb == "masters":
        offloader.load_masters([master.detach().clone() for master in offloader.masters.parameters()])
    elif verb != "attach":
        getattr(offloader, verb)()
