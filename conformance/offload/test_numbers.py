"""Time and memory on the virtual device, where both are exact: the pipeline's fill is all that a step may cost."""

from __future__ import annotations

from typing import Any

import torch

from conformance.harness import assert_equal, assert_le, requirement
from conformance.offload.cases import EVEN, EVEN_BYTES, PLAIN_SGD, Twins, even, proven, values
from conformance.provers.virtual_device import Costs, VirtualDevice

UPDATE = "aten::mul_"  # SGD with momentum does one for each parameter.
FORWARD, BACKWARD = "aten::sin", "aten::cos"
CHUNK_COUNT = 16


def _costs(link_s: float, op_s: dict[str, float]) -> Costs:
    """``link_s`` for a chunk, each way; ops as named, others nothing."""
    rate = link_s / EVEN_BYTES
    return Costs(h2d_s_per_byte=rate, d2h_s_per_byte=rate, op_s=lambda name, size_bytes: op_s.get(name, 0.0))


@requirement(
    "OPT-079",
    "A step of 16 chunks MUST take at most 1.15 of the longer of one direction of the link and the update, and two "
    "chunks: never their sum.",
    needs=("overlapped_transfers",),
)
def test_makespan(offload: Any) -> None:
    # A third slot pays where the update is as long as a copy; on PCIe it is a thirtieth.
    for link_s, update_s, slots in ((1.0, 0.5, 3), (0.3, 1.0, 3), (1.0, 0.2, 2), (0.3, 1.0, 2), (1.0, 1 / 30, 2)):
        with proven(costs=_costs(link_s, {UPDATE: update_s})) as device:
            params = [values((64, 16), i) for i in range(CHUNK_COUNT)]
            twins = Twins(offload, device, "SGD", params, options=PLAIN_SGD, chunk_bytes=EVEN_BYTES, slots=slots)
            twins.set_gradients()
            twins.optimizer.step()
            twins.offloader.settle()
            twins.set_gradients()
            begun = device.engine.makespan_s
            twins.optimizer.step()
            taken_s = device.engine.makespan_s - begun
            twins.offloader.close()
        longer_s = max(link_s, update_s)
        where = f"makespan at link {link_s}, update {update_s}, {slots} slots"
        assert_le(taken_s, 1.15 * CHUNK_COUNT * longer_s + 2 * longer_s, where=where)


@requirement(
    "OPT-085",
    "No time of a step MUST be exposed when forward hides the copies out, backward those in, and prefetch() is called "
    "between them with a slot for each chunk.",
    needs=("overlapped_transfers", "prefetched_chunks"),
)
def test_exposed_time(offload: Any) -> None:
    taken: dict[bool, float] = {}
    transfers_s = len(EVEN) * 1.0
    for offloaded in (False, True):
        op_s = {UPDATE: 0.1, FORWARD: transfers_s, BACKWARD: transfers_s}
        with proven(costs=_costs(1.0, op_s)) as device:
            twins = even(offload, device, slots=len(EVEN))
            if not offloaded:
                twins.offloader.close()
            times = []
            for _ in range(4):
                torch.sin(torch.ones(1, device=device.engine.device))
                if offloaded:
                    twins.offloader.prefetch()
                torch.cos(torch.ones(1, device=device.engine.device))
                twins.set_gradients()
                twins.optimizer.step()
                times.append(device.engine.time_s["default"])
            taken[offloaded] = times[-1] - times[1]
            twins.offloader.close()
    assert_le(abs(taken[True] - taken[False]), 1e-9 * taken[False], where="seconds exposed in two steps")


def _peak_of_steps(device: VirtualDevice, twins: Twins, step_count: int) -> int:
    """Device bytes that steps add at most, with those that streams still need and a host ahead of them holds."""
    twins.set_gradients()
    for param in twins.params:
        for seen in (param.detach(), param.grad):
            assert seen is not None
            seen.add_(0)  # It counts from here on.
    device.tracker.sweep()
    before = device.tracker.held_bytes
    device.tracker.peak_held_bytes = before
    for _ in range(step_count):
        twins.optimizer.step()
    return device.tracker.peak_held_bytes - before


@requirement(
    "OPT-083",
    "However many steps the host is ahead, a step MUST NOT hold more on the device than its slots, memory counted that "
    "streams still need.",
    needs=("bounded_window",),
)
def test_host_ahead(offload: Any) -> None:
    with proven(late=True) as device:
        twins = even(offload, device, slots=2)
        twins.step()
        twins.offloader.settle()
        grown = _peak_of_steps(device, twins, 6)
        twins.offloader.settle()
        device.tracker.sweep()
        twins.offloader.close()
    assert_le(grown, 2 * EVEN_BYTES, where="six steps without a wait")


@requirement(
    "OPT-084",
    "A step MUST NOT hold more than two chunks and the largest parameter; with masters, their gradients of one chunk "
    "beside.",
    needs=("bounded_window",),
)
def test_window_of_uneven_sizes(offload: Any) -> None:
    shapes = [(64, 16)] * 5 + [(512, 16)] + [(64, 16)] * 4
    largest_bytes = 4 * 512 * 16
    for with_masters in (False, True):
        with proven() as device:
            dtype = torch.bfloat16 if with_masters else torch.float32
            params = [torch.nn.Parameter(values(shape, i, dtype)) for i, shape in enumerate(shapes)]
            masters = offload.MasterWeights(params) if with_masters else None
            optimizer: Any = torch.optim.SGD(masters.parameters() if masters else params, **PLAIN_SGD)
            # With masters, each parameter moves two float32 tensors.
            chunk_bytes = EVEN_BYTES * (2 if with_masters else 1)
            offloader = offload.OptimizerStateOffloader(
                optimizer, engine=device.engine, chunk_bytes=chunk_bytes, master_weights=masters
            )
            peak = 0
            for step in range(3):
                for i, param in enumerate(params):
                    param.grad = values(param.shape, 100 * step + i, dtype)
                    param.grad.add_(0)
                    param.detach().add_(0) if masters is None else None
                device.tracker.sweep()
                offloader.settle()
                before = device.tracker.held_bytes
                device.tracker.peak_held_bytes = before
                optimizer.step()
                # What the first step makes, and what masters take from gradients, is of one parameter.
                peak = max(peak, device.tracker.peak_held_bytes - before) if step else peak
            offloader.close()
        gradients_bytes = largest_bytes if with_masters else 0
        bundle_bytes = largest_bytes * (2 if with_masters else 1)
        assert_le(peak, 2 * chunk_bytes + bundle_bytes + gradients_bytes, where=f"masters: {with_masters}")


@requirement("OPT-058", "A first step MUST hold no more than its slots and what the optimizer makes for one chunk.")
def test_first_step(offload: Any) -> None:
    with proven() as device:
        twins = even(offload, device, slots=2)
        grown = _peak_of_steps(device, twins, 1)
        residency = twins.offloader.residency()
        twins.offloader.close()
    allowed = 3 * EVEN_BYTES if "bounded_window" in offload.CAPABILITIES else len(EVEN) * EVEN_BYTES
    assert_le(grown, allowed, where="first step")
    assert_equal(residency.device_bytes, 0, where="state left on the device")
