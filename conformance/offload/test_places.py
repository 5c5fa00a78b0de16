"""P. Places: on a device the offloader mixes no host and device memory, and every copy runs to pinned memory.

The device is the pretend one: its tensors say so themselves, and an operator with operands in two places raises.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from conformance.harness import assert_equal, assert_same_tensor, requirement
from conformance.harness.places import on_pretend
from conformance.offload.cases import EVEN, EVEN_BYTES, SHAPES, values
from conformance.provers.pretend_device import PretendDevice, PretendEngine, on_host

KINDS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "Adam": {"amsgrad": True},
    "AdamW": {"lr": 0.01, "fused": True},
    "Adagrad": {},
    "RMSprop": {"centered": True, "momentum": 0.5},
    "NAdam": {},
    "Rprop": {},
    "ASGD": {},
}


class Arms:
    """An optimizer on the device with an offloader, and a plain one there: a device has its own roundings."""

    def __init__(
        self,
        offload: Any,
        device: PretendDevice,
        kind: str,
        shapes: Any = SHAPES,
        *,
        dtype: Any = torch.float32,
        step_device: str = "device",
        fraction: float = 1.0,
    ) -> None:
        self.device, given = device, [values(shape, i, dtype) for i, shape in enumerate(shapes)]
        self.mine = [torch.nn.Parameter(value.to(device.device)) for value in given]
        self.theirs = [torch.nn.Parameter(value.to(device.device)) for value in given]
        self.masters = [offload.MasterWeights(params) for params in (self.mine, self.theirs)]
        stepped = [list(masters.parameters()) for masters in self.masters]
        self.optimizer, self.plain = (getattr(torch.optim, kind)(params, **KINDS[kind]) for params in stepped)
        options: dict[str, Any] = {"engine": PretendEngine(), "chunk_bytes": 1024, "step_device": step_device}
        options["fraction"] = fraction
        if dtype is not torch.float32:
            options["master_weights"] = self.masters[0]
            self.masters[1].attach(self.plain)
        self.offloader = offload.OptimizerStateOffloader(self.optimizer, **options)
        self.number = 0

    def step(self) -> None:
        """The same gradients in both."""
        self.number += 1
        for index, (mine, theirs) in enumerate(zip(self.mine, self.theirs, strict=True)):
            grad = values(theirs.shape, 100 * self.number + index, theirs.dtype)
            theirs.grad, mine.grad = (grad.to(self.device.device) for _ in range(2))
        self.plain.step()
        self.optimizer.step()

    def places(self) -> list[dict[str, str]]:
        """Where each state lies, by parameter."""
        states = [self.optimizer.state[param] for param in self.mine]
        return [{name: value.device.type for name, value in state.items()} for state in states]

    def check(self) -> None:
        """Parameters and states, bit for bit."""
        for index, (mine, theirs) in enumerate(zip(self.mine, self.theirs, strict=True)):
            assert_equal(mine.device, self.device.device, where=f"place of parameter {index}")
            assert_same_tensor(on_host(mine.detach()), on_host(theirs.detach()), where=f"parameter {index}")
        got, expected = self.offloader.snapshot()["state"], self.plain.state_dict()["state"]
        for number, state in expected.items():
            for name, value in state.items():
                found = got[number][name]
                if isinstance(value, torch.Tensor):
                    assert_same_tensor(on_host(found), on_host(value), where=f"state {name} of parameter {number}")


@requirement(
    "OPT-270",
    "Steps of an offloaded optimizer on a device MUST give the plain one's bits and mix no host and device memory, "
    "masters, prefetched states and a loaded state dict among them.",
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps(offload: Any, kind: str, dtype: torch.dtype) -> None:
    with on_pretend() as device:
        arms = Arms(offload, device, kind, dtype=dtype)
        for _ in range(2):
            arms.step()
        arms.check()
        arms.offloader.offload()
        arms.offloader.prefetch()
        arms.step()
        arms.check()
        arms.offloader.load_state_dict(arms.offloader.snapshot())
        arms.step()
        arms.check()
        arms.offloader.close()


@requirement(
    "OPT-271",
    "A step MUST copy each state once to the device and once back, to the byte, and through pinned memory alone.",
    needs=("overlapped_transfers",),
)
def test_copies(offload: Any) -> None:
    with on_pretend() as device:
        arms = Arms(offload, device, "SGD", EVEN)
        for _ in range(2):
            arms.step()
        for param in arms.mine:
            param.grad = torch.ones_like(param)
        begin = device.mark
        arms.optimizer.step()
        counts = device.counts(begin)
        for name, found in (("to the device", counts.to_device), ("to the host", counts.to_host)):
            assert_equal(found.size_bytes, len(EVEN) * EVEN_BYTES, where=f"bytes {name}")
            assert_equal(found.pageable_count, 0, where=f"pageable copies {name}")


@requirement(
    "OPT-346",
    "A copy and a pickle of the optimizer MUST lie on the device and step there; the original MUST go on and have "
    "nothing there after its next step.",
)
@pytest.mark.parametrize("kind", ["SGD", "Adam"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))])
def test_copies_of_the_optimizer(offload: Any, kind: str, dtype: torch.dtype, way: Any) -> None:
    with on_pretend() as device:
        arms = Arms(offload, device, kind, dtype=dtype)
        for _ in range(2):
            arms.step()
        mine, theirs = way(arms.optimizer), way(arms.plain)
        arms.step()
        arms.check()
        assert_equal(arms.offloader.residency().device_bytes, 0, where="bytes left on the device")
        arms.offloader.close()
        for optimizer in (mine, theirs):
            for group in optimizer.param_groups:
                for index, param in enumerate(group["params"]):
                    param.grad = values(param.shape, index).to(param.device)
            optimizer.step()
        for number, (one, other) in enumerate(zip(_params(mine), _params(theirs), strict=True)):
            assert_equal(one.device, device.device, where=f"place of parameter {number}")
            assert_same_tensor(on_host(one.detach()), on_host(other.detach()), where=f"parameter {number}")


@requirement(
    "OPT-349",
    "Wherever a saved state lies, on the host or on the device, a load MUST leave it where the optimizer's own steps "
    "have it: counters that no kernel reads on the host.",
)
@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW", "NAdam"])
@pytest.mark.parametrize("saved_on", ["host", "device"])
@pytest.mark.parametrize("fraction", [1.0, 0.5, 0.0])
def test_places_of_what_is_loaded(offload: Any, kind: str, saved_on: str, fraction: float) -> None:
    with on_pretend() as device:
        arms = Arms(offload, device, kind, fraction=fraction)
        arms.step()
        expected = arms.places()
        saved = arms.offloader.snapshot()
        for state in saved["state"].values():
            for name, value in state.items():
                state[name] = value.to(device.device) if saved_on == "device" else on_host(value)
        arms.offloader.load_state_dict(saved)
        assert_equal(arms.places(), expected, where="places of states after a load")
        arms.step()
        arms.check()
        arms.offloader.close()


@requirement(
    "OPT-454",
    "Torch's own load, while master weights lie on the host, MUST leave the scalars that kernels read, counters among "
    "them, on the device, and the next step be the plain one's.",
)
@pytest.mark.parametrize(
    ("kind", "options"), [("AdamW", {}), ("AdamW", {"fused": False, "capturable": True}), ("ASGD", {})]
)
@pytest.mark.parametrize("fraction", [1.0, 0.5, 0.0])
def test_scalars_of_masters(offload: Any, kind: str, options: dict[str, Any], fraction: float) -> None:
    with on_pretend() as device:
        arms = Arms(offload, device, kind, dtype=torch.bfloat16, fraction=fraction)
        for optimizer in (arms.optimizer, arms.plain):
            for group in optimizer.param_groups:
                group.update(options)
        arms.step()
        saved = arms.optimizer.state_dict()
        arms.step()
        for optimizer in (arms.optimizer, arms.plain):
            optimizer.load_state_dict(copy.deepcopy(saved))
        found = {name: state[name].device.type for state in arms.optimizer.state.values() for name in state}
        scalars = {name: found[name] for name in ("step", "eta", "mu") if name in found}
        assert_equal(scalars, dict.fromkeys(scalars, device.device.type), where="where scalars are")
        arms.step()
        arms.check()
        arms.offloader.close()


@requirement(
    "OPT-523",
    "A load MUST place counters by the options that it brings, as torch's does: on the device where its kernels read "
    "them, else on the host, whatever the options were before; the next step MUST be the plain one's.",
)
@pytest.mark.parametrize("saved", ["fused", "capturable", "neither"])
@pytest.mark.parametrize("before", ["fused", "neither"])
def test_counters_by_loaded_options(offload: Any, before: str, saved: str) -> None:
    with on_pretend() as device:
        arms, source = (Arms(offload, device, "AdamW") for _ in range(2))
        for each, name in ((arms, before), (source, saved)):
            for group in [*each.optimizer.param_groups, *each.plain.param_groups]:
                group.update(fused=name == "fused", capturable=name == "capturable")
            each.step()
        source.offloader.close()
        state = source.plain.state_dict()
        arms.offloader.load_state_dict(state)
        arms.plain.load_state_dict(state)
        expected = arms.plain.state[arms.theirs[0]]["step"].device
        for number, param in enumerate(arms.mine):
            assert_equal(arms.optimizer.state[param]["step"].device, expected, where=f"counter {number}")
        arms.step()
        arms.check()
        arms.offloader.close()


@requirement("OPT-347", "With step_device='cpu' a copy MUST step on the device, and the original go on on the CPU.")
def test_copies_beside_steps_on_the_cpu(offload: Any) -> None:
    with on_pretend() as device:
        arms = Arms(offload, device, "Adam", step_device="cpu")
        arms.step()
        mine = copy.deepcopy(arms.optimizer)
        begun = [on_host(param.detach()).clone() for param in _params(mine)]
        for param in _params(mine):
            param.grad = torch.ones_like(param)
        mine.step()
        for number, (param, before) in enumerate(zip(_params(mine), begun, strict=True)):
            assert_equal(param.device, device.device, where=f"place of parameter {number}")
            assert_equal(bool((on_host(param.detach()) != before).any()), True, where=f"parameter {number} stepped")
        beside = Arms(offload, device, "Adam", step_device="cpu")
        beside.step()
        for both in (arms, beside):
            both.step()
            assert_equal(both.offloader.residency().device_bytes, 0, where="bytes left on the device")
        for number, (param, other) in enumerate(zip(arms.mine, beside.mine, strict=True)):
            assert_same_tensor(on_host(param.detach()), on_host(other.detach()), where=f"parameter {number}")


def _params(optimizer: Any) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]
