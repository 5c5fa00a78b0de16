"""Asynchrony and memory, on the virtual device: events order everything, and the window is bounded."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from conformance.harness import assert_equal, assert_le, requirement
from conformance.offload.cases import EVEN, EVEN_BYTES, Twins, even, proven
from conformance.provers.virtual_device import Costs, VirtualDevice
from conformance.provers.virtual_device.clocks import HOST


@requirement("OPT-066", "No two conflicting accesses MUST be unordered, in any order of the verbs.")
def test_no_hazard(offload: Any) -> None:
    with proven() as device:
        twins = Twins(offload, device, slots=2)
        for number in range(4):
            twins.offloader.prefetch()
            twins.step()
            if number % 2:
                twins.offloader.offload()
                twins.offloader.snapshot()
            twins.offloader.residency()
        twins.check()
        twins.offloader.close()
        twins.step()


@requirement("OPT-065", "Copies that run as late as their edges allow MUST NOT change a bit, on poisoned memory.")
def test_late_copies(offload: Any) -> None:
    for seed in (None, 1, 2, 3):
        with VirtualDevice(late=True, seed=seed) as device:
            twins = Twins(offload, device, slots=2, chunk_bytes=512)
            for number in range(4):
                if number == 2:
                    twins.offloader.prefetch()
                twins.step()
                twins.check()
            twins.offloader.close()
            twins.step()
            with torch.utils._python_dispatch._disable_current_modes():
                for plain, param in zip(twins.plain_params, twins.params, strict=True):
                    assert_equal(torch.equal(plain, param), True, where="parameter after close")


@requirement(
    "OPT-069",
    "A step in steady state MUST NOT make the host wait for anything but the copies out of the step before.",
    needs=("overlapped_transfers",),
)
def test_no_host_wait(offload: Any) -> None:
    costs = Costs(h2d_s_per_byte=1.0, d2h_s_per_byte=1.0, op_s=lambda name, size_bytes: 1.0)
    with proven(costs=costs) as device:
        twins = even(offload, device)
        twins.step()
        for _ in range(3):
            twins.set_gradients()
            over_s = device.engine.makespan_s
            twins.optimizer.step()
            assert_le(device.engine.time_s[HOST], over_s, where="the host's time after a step")
        twins.offloader.close()


@requirement("OPT-076", "Each step MUST move the payload out and back in: a lost call site moves nothing.")
def test_alive(offload: Any) -> None:
    with proven() as device:
        twins = even(offload, device)
        twins.step()
        before = dict(device.engine.moved_bytes)
        for _ in range(3):
            twins.step()
        moved = {way: device.engine.moved_bytes[way] - before[way] for way in ("h2d", "d2h")}
        stats = twins.offloader.stats()
        twins.offloader.close()
    payload = len(EVEN) * EVEN_BYTES
    assert_equal(moved, {"h2d": 3 * payload, "d2h": 3 * payload}, where="bytes of three steps")
    assert_equal((stats.payload_bytes, stats.step_count), (payload, 4), where="stats")
    assert_equal((stats.h2d_bytes, stats.d2h_bytes), (3 * payload, 4 * payload), where="counts")


@requirement("OPT-056", "Between steps nothing of the selected state MUST be on the device.")
def test_released(offload: Any) -> None:
    with proven() as device:
        twins = even(offload, device)
        twins.plain.zero_grad()
        live = [device.tracker.live_bytes]
        for _ in range(3):
            twins.set_gradients()
            twins.optimizer.step()
            for params in (twins.plain_params, twins.params):
                for param in params:
                    param.grad = None
            device.tracker.sweep()
            live.append(device.tracker.live_bytes)
        resident = twins.offloader.residency().device_bytes
        twins.offloader.close()
    assert_le(max(live) - live[0], 0, where="device bytes after a step")
    assert_equal(resident, 0, where="residency")


@requirement("OPT-057", "A step MUST NOT hold more on the device than its slots.", needs=("bounded_window",))
def test_window(offload: Any) -> None:
    for first in (True, False):
        with proven() as device:
            twins = even(offload, device, slots=2)
            if not first:
                twins.step()
            twins.set_gradients()
            for param in twins.params:
                for seen in (param.detach(), param.grad):
                    assert seen is not None
                    seen.add_(0)  # It counts from here on.
            device.tracker.sweep()
            before = device.tracker.peak_bytes = device.tracker.live_bytes
            twins.optimizer.step()
            grown = device.tracker.peak_bytes - before
            twins.offloader.close()
        # In the first step the optimizer makes the states of one chunk beside the slots.
        allowed = 2 * EVEN_BYTES + (EVEN_BYTES if first else 0)
        assert_le(grown, allowed, where="first step" if first else "later step")


@requirement("OPT-059", "Streams, host memory and copies of a step MUST be the same after fifty steps as after two.")
def test_nothing_grows(offload: Any) -> None:
    with proven() as device:
        twins = even(offload, device)
        seen = []
        for _ in range(50):
            copies = device.engine.copy_count
            twins.set_gradients()
            twins.optimizer.step()
            hosts = sum(memory.size_bytes for memory in device.tracker.memories() if memory.on_host)
            seen.append((device.engine.stream_count, hosts, device.engine.copy_count - copies))
        twins.offloader.close()
    assert_equal(seen[-1], seen[2], where="streams, host bytes, copies of a step")
    assert_le(seen[-1][1], 1.02 * len(EVEN) * EVEN_BYTES, where="host bytes")


@requirement(
    "OPT-392",
    "Chunks MUST be filled with whole parameters in their order, each as far as chunk_bytes goes, one parameter at "
    "least; with 0 all are one chunk.",
    needs=("bounded_window",),
)
@pytest.mark.parametrize(
    ("chunk_bytes", "expected"), [(0, 1), (1, 4), (1024, 4), (1535, 4), (1536, 3), (2048, 3), (2560, 2), (4608, 1)]
)
def test_chunks(offload: Any, chunk_bytes: int, expected: int) -> None:
    with proven() as device:
        # Two states each: 1024, 512, 1024 and 2048 bytes.
        twins = Twins(offload, device, chunk_bytes=chunk_bytes)
        twins.step()
        assert_equal(twins.offloader.stats().chunk_count, expected, where=f"chunks of {chunk_bytes} bytes")
        twins.offloader.close()


@requirement("OPT-078", "A chunk's copies MUST be as many as its directions.", needs=("coalesced_copies",))
def test_coalesced(offload: Any) -> None:
    with proven() as device:
        twins = even(offload, device, chunk_bytes=2 * EVEN_BYTES)
        twins.step()
        before = device.engine.copy_count
        twins.set_gradients()
        twins.optimizer.step()
        copies = device.engine.copy_count - before
        twins.offloader.close()
    assert_equal(copies, 2 * 4, where="copies of a step of four chunks")
