"""What a user may hold on to across steps, and what nobody may: aliases, released blocks, gradients, host memory."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

from conformance.harness import assert_equal, assert_le, assert_same_tensor, requirement
from conformance.offload.arena import Arena
from conformance.offload.cases import EVEN, EVEN_BYTES, SHAPES, Twins, even, proven, values
from conformance.provers.virtual_device import VirtualDevice


def _host_bytes(device: VirtualDevice) -> int:
    gc.collect()
    device.tracker.sweep()
    return sum(memory.size_bytes for memory in device.tracker.memories() if memory.on_host)


@requirement(
    "OPT-231",
    "A view of a parameter MUST see every update, and one of a state that was taken between steps MUST once settle() "
    "is over.",
)
def test_views(offload: Any) -> None:
    def views(params: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        states = [optimizer.state[param][name] for param in params for name in ("exp_avg", "exp_avg_sq")]
        return [tensor.detach().view(-1)[1:7] for tensor in (*params, *states)]

    with proven() as device:
        twins = Twins(offload, device)
        twins.step()
        twins.offloader.settle()
        arms = [views(twins.plain_params, twins.plain), views(twins.params, twins.optimizer)]
        for number in range(3):
            twins.step()
            if number == 1:
                twins.offloader.prefetch()
            twins.offloader.settle()
            with _disable_current_modes():
                for plain, mine in zip(*arms, strict=True):
                    assert_same_tensor(mine, plain, where=f"a view after {twins.step_count} steps")
        twins.offloader.close()


def _poison_of(device: VirtualDevice, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Fills every block that the engine gave out: NaN for whoever still reads what was released."""
    given: list[torch.Tensor] = []
    make = device.engine.device_empty

    def noted(size_bytes: int) -> torch.Tensor:
        given.append(make(size_bytes))
        return given[-1]

    def poison() -> None:
        device.engine.settle_all()
        with _disable_current_modes():
            for block in given:
                block.fill_(0xFF)

    monkeypatch.setattr(device.engine, "device_empty", noted)
    return poison


@requirement(
    "OPT-232",
    "Between steps nothing MUST be read from a block that a step released: poison there is seen by no one.",
)
@pytest.mark.parametrize("chunk_bytes", [1024, 1 << 20])
def test_released_blocks(offload: Any, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with proven() as device:
        poison = _poison_of(device, monkeypatch)
        twins = Twins(offload, device, "Adam", chunk_bytes=chunk_bytes)
        for number in range(4):
            for arm in (twins.plain_params, twins.params):
                for param in arm:
                    param.grad = None
                sum((torch.sin(param) * param).sum() for param in arm).backward()  # type: ignore[union-attr]
            twins.step_count += 1
            if number % 2:
                twins.offloader.prefetch()
            twins.plain.step()
            twins.optimizer.step()
            poison()
            twins.check()
        twins.offloader.close()


@requirement("OPT-234", "After close() no host memory MUST be left, whoever still holds the offloader.")
def test_host_memory_goes(offload: Any) -> None:
    with proven() as device:
        before = _host_bytes(device)
        twins = even(offload, device)
        for _ in range(2):
            twins.step()
        twins.offloader.load_state_dict(twins.offloader.snapshot())
        twins.offloader.prefetch()
        attached = _host_bytes(device)
        twins.offloader.close()
        assert_equal(_host_bytes(device), before, where="host bytes after close()")
        twins.step()
    assert_le(1, attached - before, where="host bytes while attached")


@pytest.mark.night
@requirement(
    "OPT-371",
    "After close() no host memory MUST be left of steps on the CPU either, and stats() MUST count none on "
    "either device.",
)
@pytest.mark.parametrize("step_device", ["device", "cpu"])
def test_host_memory_of_steps_goes(offload: Any, step_device: str) -> None:
    with proven() as device:
        params = [torch.nn.Parameter(values((64, 16), number)) for number in range(4)]
        grads = [values((64, 16), 10 + number) for number in range(4)]
        before, optimizer = _host_bytes(device), torch.optim.AdamW(params)
        offloader = offload.OptimizerStateOffloader(
            optimizer, engine=device.engine, step_device=step_device, chunk_bytes=EVEN_BYTES
        )
        for _ in range(2):
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad
            optimizer.step()
        assert_le(2 * 4 * EVEN_BYTES, offloader.stats().host_bytes, where="bytes that are counted while attached")
        offloader.close()
        counters = sum(state["step"].nbytes for state in optimizer.state.values())
        left = _host_bytes(device) - before - counters
        assert_equal(left, 0, where=f"host bytes after close(), stepped on {step_device}")
        assert_equal(offloader.stats().host_bytes, 0, where="bytes that are counted after close()")


@pytest.mark.night
@requirement(
    "OPT-373",
    "stats() MUST count the host memory that is there, on either device, as parameters get gradients, and as "
    "groups come and go.",
)
@pytest.mark.parametrize("step_device", ["device", "cpu"])
def test_host_memory_is_counted(offload: Any, step_device: str) -> None:
    with proven() as device:
        params = [torch.nn.Parameter(values((32 << number, 16), number)) for number in range(4)]
        before, optimizer = _host_bytes(device), torch.optim.AdamW(params[:3])
        offloader = offload.OptimizerStateOffloader(
            optimizer, engine=device.engine, step_device=step_device, chunk_bytes=EVEN_BYTES
        )
        for number in range(5):
            for at, param in enumerate(params):
                # One more in each step, the largest last.
                param.grad = values(param.shape, 10 + at) if at <= number else None
            if number == 3:
                optimizer.add_param_group({"params": params[3:]})
            if number == 4:
                del optimizer.state[optimizer.param_groups.pop(1)["params"][0]]
            offloader.offload()
            optimizer.step()
            offloader.settle()
            counters = sum(state["step"].nbytes for state in optimizer.state.values())
            alive = _host_bytes(device) - before - counters
            assert_equal(offloader.stats().host_bytes, alive, where=f"bytes of step {number} on {step_device}")
        offloader.close()


@pytest.mark.night
@requirement(
    "OPT-394",
    "A closed offloader MUST hold no memory of the device: states that the optimizer drops are gone, whatever was "
    "copied out, prefetched or brought before.",
)
@pytest.mark.parametrize("release", ["at_offload", "on_request"])
@pytest.mark.parametrize("verb", ["offload", "prefetch", "release_gpu_memory", "snapshot"])
def test_closed_holds_no_states(offload: Any, release: str, verb: str) -> None:
    with proven() as device:
        twins = Twins(offload, device, "Adam", release=release)
        for _ in range(2):
            twins.step()
        getattr(twins.offloader, verb)()
        twins.offloader.close()
        states = [value for state in twins.optimizer.state.values() for value in state.values()]
        watched = [StorageWeakRef(value.untyped_storage()) for value in states]  # type: ignore[no-untyped-call]
        del states
        twins.optimizer.state.clear()
        gc.collect()
        alive = sum(not one.expired() for one in watched)  # type: ignore[no-untyped-call]
        assert_equal(alive, 0, where=f"dropped states that are held after {verb}() and close(), {release}")


@requirement(
    "OPT-393",
    "Host memory MUST be the engine's, to which copies run at full speed, unless pin_memory is False: then all of it "
    "MUST be ordinary memory, of steps on either device.",
)
@pytest.mark.parametrize("step_device", ["device", "cpu"])
def test_ordinary_memory(offload: Any, step_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Not proven: memory that is not the engine's counts as the device's there.
    with VirtualDevice() as device:
        asked: list[int] = []
        make = device.engine.host_empty

        def noted(size_bytes: int) -> torch.Tensor:
            asked.append(size_bytes)
            return make(size_bytes)

        monkeypatch.setattr(device.engine, "host_empty", noted)
        for pin_memory in (False, True):
            twins = Twins(offload, device, step_device=step_device, pin_memory=pin_memory)
            for _ in range(2):
                twins.step()
            assert_equal(bool(asked), pin_memory, where=f"memory of the engine with pin_memory={pin_memory}")
            assert_equal(twins.offloader.residency().device_bytes, 0, where="states on the device")
            twins.offloader.close()


@requirement(
    "OPT-235", "A step MUST NOT retain gradients, those of masters, or temporaries: device bytes end as they began."
)
@pytest.mark.parametrize("with_masters", [False, True])
def test_nothing_is_retained(offload: Any, with_masters: bool) -> None:
    with proven() as device:
        dtype = torch.bfloat16 if with_masters else torch.float32
        params = [torch.nn.Parameter(values(shape, i, dtype)) for i, shape in enumerate(SHAPES)]
        masters = offload.MasterWeights(params) if with_masters else None
        optimizer: Any = torch.optim.SGD(masters.parameters() if masters else params, lr=0.1, momentum=0.9)
        offloader = offload.OptimizerStateOffloader(
            optimizer, engine=device.engine, chunk_bytes=1024, master_weights=masters
        )
        live = []
        for step in range(4):
            grads = [values(shape, 10 * step + i, dtype) for i, shape in enumerate(SHAPES)]
            watched = [StorageWeakRef(grad.untyped_storage()) for grad in grads]  # type: ignore[no-untyped-call]
            for param in params:
                param.grad = grads.pop(0)
            optimizer.step()
            if masters is None:
                optimizer.zero_grad()
            held = [master.grad for master in optimizer.param_groups[0]["params"] if master.grad is not None]
            assert_equal(len(held), 0, where="gradients of what was stepped")
            assert_equal(sum(not one.expired() for one in watched), 0, where="gradients alive after the step")  # type: ignore[no-untyped-call]
            device.tracker.sweep()
            live.append(device.tracker.live_bytes)
        offloader.close()
    assert_equal(live[1:], live[:1] * 3, where="device bytes after each step")


@requirement(
    "OPT-236",
    "Steps MUST NOT run out of a device that has free what their slots hold and 5 % of it.",
    needs=("bounded_window",),
)
@pytest.mark.parametrize("slots", [2, 3])
def test_scarce_memory(offload: Any, slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[int] = []
    with proven(late=True) as device:
        twins = even(offload, device, slots=slots)
        twins.set_gradients()
        for param in twins.params:
            for seen in (param.detach(), param.grad):
                assert seen is not None
                seen.add_(0)  # It counts from here on.
        device.tracker.sweep()
        limit = device.tracker.held_bytes + int(1.05 * slots * EVEN_BYTES)
        twins.optimizer.step()  # In which the optimizer makes states beside the slots (OPT-058).
        make = device.engine.device_empty

        def scarce(size_bytes: int) -> torch.Tensor:
            device.tracker.sweep()
            if device.tracker.held_bytes + size_bytes > limit:
                refused.append(size_bytes)
            return make(size_bytes)

        monkeypatch.setattr(device.engine, "device_empty", scarce)
        for number in range(6):
            if number % 2:
                twins.offloader.prefetch()
            if number == 4:
                twins.offloader.offload()
            twins.optimizer.step()
        monkeypatch.undo()  # close() brings everything back, for which there is no room.
        twins.offloader.close()
    assert_equal(refused, [], where="allocations that found no memory")


def _largest_hole(offload: Any, *, offloaded: bool) -> tuple[int, int]:
    choose = random.Random(7)
    with proven() as device:
        arena = Arena(device, 16 * len(EVEN) * EVEN_BYTES)
        params = [torch.nn.Parameter(values((64, 16), i)) for i in range(len(EVEN))]
        optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=False)
        offloader = offload.OptimizerStateOffloader(optimizer, engine=device.engine, chunk_bytes=EVEN_BYTES)
        if not offloaded:
            offloader.close()
        for _ in range(50):
            activations = [torch.zeros(choose.randint(1, 2000), device=device.engine.device) for _ in range(6)]
            for param in params:
                param.grad = values((64, 16), 1)
            del activations[choose.randint(0, 5)]
            if offloaded:
                offloader.prefetch()
            optimizer.step()
            del activations[choose.randint(0, 4)]
            optimizer.zero_grad()
        del activations
        device.tracker.sweep()
        hole = arena.largest_hole_bytes
        offloader.close()
    return hole, arena.failed_bytes


@requirement(
    "OPT-242",
    "After fifty cycles of changing activations the largest free block MUST be at least 0.95 of that without offload.",
)
def test_fragmentation(offload: Any) -> None:
    (plain, _), (offloaded, failed) = (_largest_hole(offload, offloaded=which) for which in (False, True))
    assert_equal(failed, 0, where="bytes that found no place")
    assert_le(0.95 * plain, offloaded, where="largest free block")
