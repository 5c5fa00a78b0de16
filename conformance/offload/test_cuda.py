"""The same properties on a GPU, where timing is real: delays on every stream, and the memory that torch counts."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from conformance.harness import assert_equal, assert_le, assert_same_tensor, requirement
from conformance.offload.cases import values

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: CUDA streams are unproven here")
SHAPE, COUNT = (256, 1024), 16


def _params() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(values(SHAPE, i).cuda()) for i in range(COUNT)]


def _delay(streams: list[Any]) -> None:
    for stream in streams:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(2_000_000)  # type: ignore[no-untyped-call]


@requirement("OPT-110", "On a GPU every bit MUST be the plain optimizer's, with delays on every stream.")
@on_gpu
def test_bits_under_delays(offload: Any) -> None:
    plain_params, params = _params(), _params()
    plain, optimizer = (torch.optim.AdamW(some, lr=0.01) for some in (plain_params, params))
    with offload.OptimizerStateOffloader(optimizer, chunk_bytes=2 << 20) as offloader:
        own = [value for value in vars(offloader).values() if isinstance(value, torch.cuda.Stream)]
        streams = [torch.cuda.current_stream(), *own]
        for step in range(6):
            for i, (a, b) in enumerate(zip(plain_params, params, strict=True)):
                a.grad = b.grad = values(SHAPE, 100 * step + i).cuda()
            plain.step()
            _delay(streams[step % len(streams) :][:1])
            offloader.prefetch()
            optimizer.step()
            _delay(streams)
        got = offloader.snapshot()
        for number, state in plain.state_dict()["state"].items():
            for name, value in state.items():
                assert_same_tensor(got["state"][number][name].cpu(), value.cpu(), where=f"{name} of {number}")
        for a, b in zip(plain_params, params, strict=True):
            assert_same_tensor(b.detach().cpu(), a.detach().cpu(), where="parameter")


@requirement("OPT-111", "On a GPU nothing of the state MUST stay between steps, and a step MUST NOT exceed its slots.")
@on_gpu
def test_memory(offload: Any) -> None:
    params = _params()
    optimizer = torch.optim.SGD(params, lr=0.01, momentum=0.9, foreach=False)
    tensor_bytes = params[0].nbytes
    with offload.OptimizerStateOffloader(optimizer, chunk_bytes=2 * tensor_bytes) as offloader:
        for param in params:
            param.grad = torch.ones_like(param)
        # What another test left in cycles is not this one's.
        gc.collect()
        before = torch.cuda.memory_allocated()
        optimizer.step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        moved = offloader.stats().d2h_bytes
        optimizer.step()
        torch.cuda.synchronize()
        stats = torch.cuda.memory_stats()
        assert_equal(torch.cuda.memory_allocated() - before, 0, where="bytes allocated after a step")
        assert_equal(offloader.stats().d2h_bytes - moved, COUNT * tensor_bytes, where="bytes moved out")
        # Two slots, and one temporary of the optimizer's own arithmetic.
        assert_le(stats["active_bytes.all.peak"] - before, 5 * tensor_bytes + (2 << 20), where="peak of a step")
        assert_equal(offloader.residency().device_bytes, 0, where="residency")


_UPDATES: dict[str, tuple[str, dict[str, Any]]] = {
    "momentum": ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.25, "weight_decay": 0.01}),
    "nesterov": ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "adam": ("Adam", {"lr": 0.02, "weight_decay": 0.1, "maximize": True}),
    "adamw": ("AdamW", {"lr": 0.01}),
    "large-lerp": ("AdamW", {"lr": 0.01, "betas": (0.3, 0.0)}),
    "amsgrad": ("AdamW", {"lr": 0.01, "amsgrad": True}),
    "adagrad": ("Adagrad", {"lr": 0.1, "lr_decay": 0.05, "weight_decay": 0.01}),
}


@requirement(
    "OPT-283",
    "On a GPU an update in a slot MUST have the bits of torch's own foreach step, for every kind and dtype.",
    needs=("fused_updates",),
)
@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", sorted(_UPDATES))
def test_updates_in_slots(offload: Any, name: str, dtype: torch.dtype) -> None:
    kind, options = _UPDATES[name]
    shapes = [SHAPE, (3, 5), (1,), (4099,), *[(64,)] * 60]
    arms = [[torch.nn.Parameter(values(shape, i, dtype).cuda()) for i, shape in enumerate(shapes)] for _ in range(2)]
    sizes = [param.numel() for param in arms[0]]
    plain, optimizer = (
        getattr(torch.optim, kind)([{"params": arm[:30]}, {"params": arm[30:], "lr": 0.03}], **options) for arm in arms
    )
    with offload.OptimizerStateOffloader(optimizer, chunk_bytes=1 << 20) as offloader:
        for step in range(6):
            # One copy to the device for all: torch's sanitizer takes long for each.
            numbers = torch.split(values((sum(sizes),), step, dtype).cuda(), sizes)
            for given, *params in zip(numbers, *arms, strict=True):
                for param in params:
                    param.grad = given.clone().view_as(param)
            plain.step()
            optimizer.step()
        assert_equal(offloader.stats().updates, ("fused", "fused"), where="updates")
        got = offloader.snapshot()
        for number, state in plain.state_dict()["state"].items():
            for key, value in state.items():
                assert_same_tensor(got["state"][number][key].cpu(), value.cpu(), where=f"{key} of {number}")
        for a, b in zip(*arms, strict=True):
            assert_same_tensor(b.detach().cpu(), a.detach().cpu(), where="parameter")


@requirement(
    "OPT-291",
    "On a GPU, copies of many tensors in one call MUST bring every byte there and back, from memory that is pinned.",
    needs=("copies_in_one_call", "host_slabs"),
)
@on_gpu
def test_copies_in_one_call(offload: Any) -> None:
    from fastimpl import ops
    from fastimpl.streams import CudaEngine

    engine = CudaEngine()
    sizes = [4096, 1, 333, 70_001, 0, 1 << 20]
    expected = [values((size,), i) for i, size in enumerate(sizes)]
    block = engine.host_empty(4 * sum(sizes))
    assert_equal((block.is_pinned(), block.data_ptr() % 4096), (True, 0), where="host memory")
    homes = list(block.view(torch.float32).split_with_sizes(sizes))
    for home, value in zip(homes, expected, strict=True):
        home.copy_(value)
    there = [torch.empty(size, device="cuda") for size in sizes]
    back_block = engine.host_empty(4 * sum(sizes))
    back = list(back_block.view(torch.float32).split_with_sizes(sizes))
    stream, begun, done = engine.stream("copies"), engine.event(), engine.event()
    engine.record(begun, engine.current())
    engine.wait(stream, begun)
    _delay([stream])
    with engine.on(stream):
        engine.copy_many(there, homes)
        engine.copy_many(back, there)
    engine.record(done, stream)
    waited = ops.slab_counts().wait_count
    # Its last owner goes while copies from it are still queued behind the delay.
    del block, home
    homes.clear()
    assert_equal(ops.slab_counts().wait_count - waited, 1, where="copies waited for")
    engine.synchronize(done)
    for number, (got, value) in enumerate(zip(back, expected, strict=True)):
        assert_same_tensor(got, value, where=f"tensor {number}")
