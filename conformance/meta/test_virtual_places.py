"""The virtual device finds misplaced operands, branches on device values, and memory held by a host that runs ahead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from conformance.harness import Mismatch
from conformance.provers.virtual_device import VirtualDevice

N = 16


def _host_values(device: VirtualDevice) -> torch.Tensor:
    return device.engine.host_empty(4 * N).view(torch.float32).zero_()


def test_host_memory_as_an_operand_of_a_kernel_is_found() -> None:
    with VirtualDevice() as device:
        torch.ones(N).add_(_host_values(device))
    assert [hazard.kind for hazard in device.hazards] == ["misplaced"]
    assert "aten::add_" in device.hazards[0].first
    with VirtualDevice() as device:
        _host_values(device).add_(1)
        torch.ones(N).copy_(_host_values(device))
        torch.ones(N).add_(torch.tensor(2.0))
    assert device.hazards == []


def test_fused_kernels_take_no_counters_of_the_host() -> None:
    for place, kinds in (("cpu", ["misplaced"]), (torch.device("cpu"), [])):
        with VirtualDevice() as device:
            param, grad, first, second = ([torch.ones(N)] for _ in range(4))
            options: dict[str, Any] = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8}
            step = [torch.zeros((), device=place)]
            torch._fused_adamw_(param, grad, first, second, [], step, amsgrad=False, maximize=False, **options)
        assert [hazard.kind for hazard in device.hazards] == kinds


@pytest.mark.parametrize(
    "look",
    [
        lambda value: value.sum().item(),
        lambda value: bool(value.sum()),
        lambda value: value.tolist(),
        lambda value: torch.equal(value, value + 1),
        lambda value: value.nonzero(),
    ],
)
def test_a_look_at_device_values_is_not_covered(look: Callable[[torch.Tensor], Any]) -> None:
    with VirtualDevice() as device:
        look(torch.ones(N))
    assert device.hazards == []
    with pytest.raises(Mismatch, match=r"not covered(.|\n)*test_virtual_places.py"):
        device.check()
    device.check(this_branch_only=True)


def test_a_look_at_host_values_is_covered() -> None:
    with VirtualDevice() as device:
        assert _host_values(device).tolist() == [0.0] * N
        assert torch.tensor(2.0).item() == 2.0
        assert torch.zeros(()).add_(1).item() == 1.0
    device.check()


def test_copies_within_the_host_happen_at_once() -> None:
    with VirtualDevice(late=True) as device:
        source, target = _host_values(device), _host_values(device)
        stream = device.engine.stream("in")
        with device.engine.on(stream):
            device.engine.copy(target, source.add_(3))
        assert target.tolist() == [3.0] * N
        # A copy in still reads what the host overwrites.
        memory, event = device.engine.device_empty(4 * N).view(torch.float32), device.engine.event()
        device.engine.record(event, device.engine.current())
        device.engine.wait(stream, event)
        with device.engine.on(stream):
            device.engine.copy(memory, target)
        device.engine.copy(target, source)
        device.engine.synchronize_stream(stream)
    assert [hazard.kind for hazard in device.hazards] == ["host-read"]


@pytest.mark.parametrize("waits", [False, True])
def test_memory_that_a_stream_still_needs_is_held(waits: bool) -> None:
    with VirtualDevice() as device:
        engine, host = device.engine, device.engine.host_empty(4 * N)
        out, edge, home = engine.stream("out"), engine.event(), engine.event()
        for _ in range(5):
            if waits:
                engine.synchronize(home)
            memory = engine.device_empty(4 * N)
            engine.record(edge, engine.current())
            engine.wait(out, edge)
            with engine.on(out):
                engine.copy(host, memory)
                engine.record(home, out)
            engine.keep(memory, out)
            del memory
        device.tracker.sweep()
        assert device.tracker.peak_bytes == 4 * N
        assert device.tracker.peak_held_bytes == 4 * N * (1 if waits else 5)
        engine.synchronize(home)
        assert device.tracker.held_bytes == 0
