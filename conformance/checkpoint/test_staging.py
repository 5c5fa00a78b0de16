"""Device tensors: the buffer program is run with copies that happen as late as the recorded waits allow, on poison.

A missing wait, or a buffer that is reused too early, shows as wrong bytes in the file or in the target. A GPU runs the
same properties with real copies where there is one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor, Shard

from conformance.checkpoint.cases import (
    DTYPES,
    FILE,
    PT,
    load,
    load_with,
    mesh_of,
    oracle,
    random_bits,
    save,
    zeros_like,
)
from conformance.harness import (
    Rank,
    assert_equal,
    assert_same_bytes,
    assert_same_tensor,
    assert_same_tensors,
    requirement,
)
from conformance.provers.virtual_device import VirtualDevice


class LateCopies:
    """Copies that run when they are waited for and not before; buffers come filled with poison."""

    def __init__(self) -> None:
        self.queue: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.done = 0

    def of_thread(self) -> LateCopies:
        """Each thread has a queue of its own."""
        return LateCopies()

    def on(self) -> AbstractContextManager[None]:
        """Ops are over when they return; only copies are late."""
        return nullcontext()

    def upload(self, dense: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Memory of its own, which the buffer's next use does not change."""
        return dense.clone()

    def mark(self) -> object:
        """Behind what was queued so far."""
        return len(self.queue)

    def buffer(self, size_bytes: int) -> torch.Tensor:
        """Poison."""
        return torch.full((size_bytes,), 0xAB, dtype=torch.uint8)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> object:
        """Queue; the source may change until the wait, as memory under a real copy may."""
        self.queue.append((target, source))
        return len(self.queue)

    def wait(self, event: object) -> None:
        """Run everything up to the event."""
        assert isinstance(event, int)
        while self.done < event:
            target, source = self.queue[self.done]
            target.copy_(source)
            self.done += 1


def _state() -> dict[str, torch.Tensor]:
    state = {str(dtype): random_bits(dtype, (23, 17), seed) for seed, dtype in enumerate(DTYPES[:-1])}
    return state | {"strided": torch.arange(600.0).reshape(20, 30).t(), "big": random_bits(torch.float32, (300, 70), 7)}


def _late(device: torch.device) -> LateCopies:
    return LateCopies()


def _save_late(rank: Rank, path: str, threads: int) -> None:
    checkpoint, state = rank.component("checkpoint"), {}
    for name, value in _state().items():
        local = torch.chunk(value, rank.world_size)[rank.rank]
        mesh = mesh_of(rank)
        state[name] = DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=value.shape, stride=value.stride()
        )
    with checkpoint.HuggingFaceStorageWriter(path, block_bytes=4096, thread_count=threads) as writer:
        writer.choose_copies = _late
        dcp.save(state, storage_writer=writer)


@requirement(
    "CKPT-101",
    "Bytes that come from a device MUST be waited for before they are written or sent, and their buffers not reused.",
    needs=("staged_copies",),
)
def test_late_copies_out(checkpoint: Any, rank_pool: Any, tmp_path: Path) -> None:
    expected = oracle(_state(), PT)
    for world, threads in ((1, 1), (1, 3), (2, 1), (3, 2)):
        path = tmp_path / f"{world}-{threads}"
        rank_pool.run(_save_late, world, str(path), threads)
        assert_same_bytes(path / FILE, expected, where=f"{world} ranks, {threads} threads")


@requirement(
    "CKPT-102",
    "A load into a device MUST keep each buffer until its copy ended, and return only after the last one.",
    needs=("staged_copies",),
)
def test_late_copies_in(checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fastimpl.checkpoint.readio as readio

    state = {name: value.contiguous() for name, value in _state().items()}
    checkpoint.save_file(state, tmp_path / "model.safetensors")
    monkeypatch.setattr(readio, "TASK_BYTES", 4096)
    for threads in (1, 3):
        targets = {name: zeros_like(value) for name, value in state.items()}
        reader = checkpoint.HuggingFaceStorageReader(tmp_path, thread_count=threads)
        reader.choose_copies = _late
        load_with(reader, targets)
        assert_same_tensors(targets, state, where=f"{threads} threads")


CPU = torch.device("cpu")


@contextmanager
def _proven(*, late: bool) -> Iterator[VirtualDevice]:
    """A virtual device whose caller works on a stream of its own, as under ``with torch.cuda.stream(...)``."""
    with VirtualDevice(late=late) as device:
        with device.engine.on(device.engine.stream("the caller's")):
            yield device
        device.check()


def _in_worker(device: VirtualDevice, work: Callable[[], None]) -> None:
    """Run in another thread, which has another current stream; the errors are raised here."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            with device.in_thread():
                work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    for error in raised:
        raise error


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


SOURCES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], torch.dtype]] = {
    "dense": (lambda value: value, torch.float32),
    "strided": (lambda value: value.t(), torch.float32),
    "cast": (lambda value: value, torch.bfloat16),
}


@requirement(
    "CKPT-474",
    "A save MUST read device memory after what its caller's stream was given, in whatever thread it reads, and bring a "
    "gathered or cast tensor to the host after the gather or cast.",
    needs=("staged_copies",),
)
def test_reads_behind_the_caller(checkpoint: Any) -> None:
    from fastimpl.checkpoint.blockio import LocalPart
    from fastimpl.checkpoint.device_copies import CopyStarts, EngineStart, Stager
    from fastimpl.checkpoint.geometry import geometry
    from fastimpl.checkpoint.source import Source

    plain = torch.arange(63.0).reshape(7, 9)
    for late in (False, True):
        for name, (form, dtype) in SOURCES.items():
            with _proven(late=late) as device:
                memory = device.engine.device_empty(plain.nbytes).view(torch.float32).view(7, 9)
                memory.copy_(plain)
                source = Source(form(memory), dtype)
                count = source.value.numel() * dtype.itemsize
                geo = geometry(source.value.shape, (0, 0), source.value.shape, dtype.itemsize)
                parts = [LocalPart(source, geo, 0, 0, half, None) for half in (count, count // 2)]
                starts = CopyStarts(lambda _: EngineStart(device.engine), [CPU])

                def work(starts: CopyStarts = starts, parts: list[LocalPart] = parts) -> None:
                    stager = Stager(starts)
                    for part in (*parts, *parts):
                        stager.finish(stager.start([part]))

                _in_worker(device, work)
                staged = [part.staged for part in parts]
            expected = _bytes(form(plain).to(dtype))
            for part, got in zip(parts, staged, strict=True):
                assert got is not None
                assert_same_tensor(got, expected[: part.count], where=f"{name}, {part.count} bytes")


@requirement(
    "CKPT-475",
    "A load MUST write device memory after what its caller's stream was given, and return after all that it queued: "
    "copies, casts and scatters.",
    needs=("staged_copies",),
)
def test_writes_behind_the_caller(checkpoint: Any, tmp_path: Path) -> None:
    from fastimpl.checkpoint.device_copies import CopyStarts, EngineStart
    from fastimpl.checkpoint.geometry import geometry
    from fastimpl.checkpoint.readio import ReadJob, _Reading, _Slice

    plain = torch.arange(63.0).reshape(7, 9)
    (tmp_path / "values").write_bytes(plain.numpy().tobytes())
    for late in (False, True):
        for name, (form, dtype) in SOURCES.items():
            with _proven(late=late) as device, open(tmp_path / "values", "rb") as file:
                memory = device.engine.device_empty(63 * dtype.itemsize).view(dtype)
                memory.fill_(1)
                target = form(memory.view(9, 7) if name == "strided" else memory.view(7, 9))
                geo = geometry((7, 9), (0, 0), (7, 9), 4)
                job = ReadJob(str(tmp_path / "values"), 0, geo, target, torch.float32)
                reading = _Reading(CopyStarts(lambda _: EngineStart(device.engine), [CPU]))

                def work(reading: _Reading = reading, job: ReadJob = job, number: int = file.fileno()) -> None:
                    for skip in range(0, plain.nbytes, 84):
                        reading.read(number, [_Slice(job, skip, min(84, plain.nbytes - skip))])

                _in_worker(device, work)
                reading.drain()
                # What the caller does next, on another stream still, is not ordered but by the load's return.
                with device.engine.on(device.engine.stream("after")):
                    got = target * 1
            assert_same_tensor(got.contiguous(), plain.to(dtype), where=name)


@requirement(
    "CKPT-639",
    "A buffer that becomes too small MUST live until the copy that still uses it is over, however pieces grow or "
    "shrink from one to the next.",
    needs=("staged_copies",),
)
@pytest.mark.parametrize("sizes", [(4, 4, 8, 60, 140, 36), (4, 84, 8, 156), (84, 84, 28, 28, 28)])
def test_pieces_of_any_sizes(checkpoint: Any, tmp_path: Path, sizes: tuple[int, ...]) -> None:
    from fastimpl.checkpoint.device_copies import CopyStarts, EngineStart
    from fastimpl.checkpoint.geometry import geometry
    from fastimpl.checkpoint.readio import ReadJob, _Reading, _Slice

    plain = torch.arange(63.0).reshape(7, 9)
    (tmp_path / "values").write_bytes(plain.numpy().tobytes())
    for late in (False, True):
        for name in ("dense", "strided"):
            with _proven(late=late) as device, open(tmp_path / "values", "rb") as file:
                memory = device.engine.device_empty(63 * 4).view(torch.float32)
                memory.fill_(1)
                target = memory.view(9, 7).t() if name == "strided" else memory.view(7, 9)
                job = ReadJob(str(tmp_path / "values"), 0, geometry((7, 9), (0, 0), (7, 9), 4), target, torch.float32)
                reading, skip = _Reading(CopyStarts(lambda _: EngineStart(device.engine), [CPU])), 0
                for size in sizes:
                    reading.read(file.fileno(), [_Slice(job, skip, size)])
                    skip += size
                reading.drain()
                with device.engine.on(device.engine.stream("after")):
                    got = target.contiguous().view(-1) * 1
            read = skip // 4
            assert_same_tensor(got[:read], plain.view(-1)[:read], where=f"{name}, pieces of {sizes}")


@requirement(
    "CKPT-110", "On a GPU, saves and loads of CUDA tensors MUST give the bytes of the same tensors on the CPU."
)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: CUDA copies are unproven here")
def test_cuda(checkpoint: Any, tmp_path: Path) -> None:
    state = _state()
    device = {name: value.cuda() for name, value in state.items()}
    for threads in (1, 4):
        path = tmp_path / str(threads)
        save(checkpoint, device, path, thread_count=threads, block_bytes=65536)
        assert_same_bytes(path / FILE, oracle(state, PT), where=f"{threads} threads")
        targets = {name: torch.zeros_like(value) for name, value in device.items()}
        load(checkpoint, targets, path, thread_count=threads)
        got = {name: value.cpu().contiguous() for name, value in targets.items()}
        assert_same_tensors(got, {name: value.contiguous() for name, value in state.items()})
    assert_equal(len(checkpoint.load_file(path / FILE, device="cuda")), len(state), where="load_file")
