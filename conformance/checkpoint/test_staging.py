"""Device tensors: the buffer program is run with copies that happen as late as the recorded waits allow, on poison.

A missing wait, or a buffer that is reused too early, shows as wrong bytes in the file or in the target. A GPU runs the
same properties with real copies where there is one.
"""

from __future__ import annotations

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
from conformance.harness import Rank, assert_equal, assert_same_bytes, assert_same_tensors, requirement


class LateCopies:
    """Copies that run when they are waited for and not before; buffers come filled with poison."""

    def __init__(self) -> None:
        self.queue: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.done = 0

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
