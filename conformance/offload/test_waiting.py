"""What the host waits for, how much it does for a verb, and that nothing of either reaches a bit."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from conformance.harness import assert_equal, assert_le, assert_same_tensor, requirement
from conformance.offload.cases import EVEN_BYTES, PLAIN_SGD, Twins, even, proven, proven_on, values
from conformance.offload.sanitizer import TorchSanitizer
from conformance.provers.virtual_device import Costs, VirtualDevice
from conformance.provers.virtual_device.clocks import HOST

LONG = "aten::sin"


@requirement("OPT-240", "Two runs of a program MUST give the same bits, whatever the delays of each.")
def test_runs_are_equal(offload: Any) -> None:
    runs: list[list[torch.Tensor]] = []
    for late, seed in ((False, None), (True, None), (True, 5), (True, 6)):
        with VirtualDevice(late=late, seed=seed) as device:
            twins = Twins(offload, device, "Adam", slots=2, chunk_bytes=512)
            for number in range(4):
                if number % 2:
                    twins.offloader.prefetch()
                twins.step()
            state = twins.offloader.snapshot()["state"]
            twins.offloader.close()
        with _disable_current_modes():
            bits = [value for one in state.values() for value in one.values()]
            runs.append([tensor.detach().clone() for tensor in (*twins.params, *bits)])
    for number, run in enumerate(runs[1:], 2):
        for i, (tensor, first) in enumerate(zip(run, runs[0], strict=True)):
            assert_same_tensor(tensor, first, where=f"tensor {i} of run {number}")


@requirement(
    "OPT-239",
    "A verb that reads host memory MUST wait for the copies that fill it, not for the device.",
    needs=("overlapped_transfers",),
)
def test_own_event_only(offload: Any) -> None:
    verbs: dict[str, Callable[[Twins], Any]] = {
        "settle": lambda twins: twins.offloader.settle(),
        "snapshot": lambda twins: twins.offloader.snapshot(),
        "state_dict": lambda twins: twins.optimizer.state_dict(),
    }
    link = 1.0 / EVEN_BYTES
    for name, verb in verbs.items():
        costs = Costs(h2d_s_per_byte=link, d2h_s_per_byte=link, op_s=lambda op, size_bytes: 1e6 * (op == LONG))
        with proven(costs=costs) as device:
            twins = even(offload, device)
            twins.step()
            copied_s = device.engine.makespan_s
            torch.sin(torch.ones(1, device=device.engine.device))
            verb(twins)
            waited_s = device.engine.time_s[HOST]
            assert_equal(device.engine.makespan_s > 1e6, True, where="the device is still busy")
            twins.offloader.close()
        assert_le(waited_s, copied_s, where=f"the host's time after {name}")


def _calls_of(verb: Callable[[], Any]) -> int:
    """Calls, of Python and of C, that the implementation's own code makes."""
    count = 0

    def seen(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        caller = frame if event == "c_call" else frame.f_back
        name = caller.f_code.co_filename if caller is not None and event in ("call", "c_call") else ""
        count += "offload" in name and "conformance" not in name

    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        verb()
    finally:
        sys.setprofile(before)
    return count


@requirement(
    "OPT-238",
    "What the host does for offload(), prefetch() and a step MUST grow no faster than the number of tensors.",
    needs=("overlapped_transfers",),
)
def test_host_work(offload: Any, device: str) -> None:
    work: dict[str, list[int]] = {"prefetch": [], "offload": [], "step": []}
    for count in (8, 16, 32):
        with proven_on(device) as place:
            params = [values((64, 16), i) for i in range(count)]
            twins = Twins(offload, place, "SGD", params, options=PLAIN_SGD, chunk_bytes=2 * EVEN_BYTES)
            for _ in range(2):
                twins.step()
            work["prefetch"].append(_calls_of(twins.offloader.prefetch))
            work["step"].append(_calls_of(twins.optimizer.step))
            work["offload"].append(_calls_of(twins.offloader.offload))
            twins.offloader.close()
    for name, (least, middle, most) in work.items():
        assert_le(most - middle, 2 * (middle - least), where=f"calls that {name} makes more for twice as many tensors")


@requirement("OPT-237", "torch's own stream sanitizer MUST find nothing in any order of the verbs.")
def test_torch_sanitizer(offload: Any) -> None:
    with VirtualDevice() as device:
        sanitizer = TorchSanitizer(device)
        twins = Twins(offload, device, slots=2, chunk_bytes=512)
        for number in range(4):
            if number % 2:
                twins.offloader.prefetch()
            twins.step()
            twins.offloader.snapshot()
        twins.offloader.load_state_dict(twins.offloader.snapshot())
        twins.step()
        twins.offloader.close()
        twins.step()
    assert_le(1, sanitizer.access_count, where="accesses that it was told of")
    assert_equal(sanitizer.errors, [], where="what the sanitizer found")
