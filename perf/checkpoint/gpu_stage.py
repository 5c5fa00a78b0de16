"""How fast a save brings a GPU's tensors to the host, beside one pinned copy of the same run. No GPU has run this."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from conformance.harness import Mismatch, Rank
from fastimpl.checkpoint.blockio import LocalPart
from fastimpl.checkpoint.device_copies import CopyStart, CopyStarts, Stager, copies_for_device
from fastimpl.checkpoint.geometry import Geometry
from fastimpl.checkpoint.source import Source
from perf.harness.nvml import open_gpu
from perf.harness.paired import Round, interleave, seconds_of
from perf.harness.workloads import Workload
from twinproof.engine import CudaEngine

__all__ = ["BLOCK_BYTES", "measure_staging", "staging"]

BLOCK_BYTES = 8 << 20  # The writer's default.

Choose = Callable[[torch.device], "CopyStart | None"]


def measure_staging(rank: Rank, workload: Workload, folder: str, round_count: int, seed: int) -> list[Round]:
    """Nothing is measured without a GPU, which leaves the gate undecided."""
    if not torch.cuda.is_available():
        return []
    return staging(CudaEngine(), copies_for_device, workload, round_count, seed)


def _blocks(tensors: list[torch.Tensor]) -> Iterator[list[LocalPart]]:
    """What a save writes with one call each."""
    for tensor in tensors:
        source = Source(tensor, tensor.dtype)
        geometry = Geometry((tensor.nbytes,), (0,), (tensor.nbytes,))
        for begin in range(0, tensor.nbytes, BLOCK_BYTES):
            yield [LocalPart(source, geometry, 0, begin, min(BLOCK_BYTES, tensor.nbytes - begin))]


def _stage(stager: Stager, tensors: list[torch.Tensor], look: Callable[[LocalPart], None]) -> None:
    """As a writing thread does: the next block is on its way while one is written."""
    blocks = list(_blocks(tensors))
    waits = stager.start(blocks[0])
    for number, block in enumerate(blocks):
        ahead = stager.start(blocks[number + 1]) if number + 1 < len(blocks) else []
        stager.finish(waits)
        for part in block:
            look(part)
        waits = ahead


def staging(engine: Any, choose: Choose, workload: Workload, round_count: int, seed: int) -> list[Round]:
    """All tensors to the host: ``ours``, a save's own staging; one pinned ``copy``; a pageable ``loop`` of ``.cpu``.

    Raises:
        Mismatch: bytes of a block are not the tensor's.
    """
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(workload.shape, generator=generator) for _ in range(workload.tensor_count)]
    tensors = [value.to(engine.device) for value in values]
    size_bytes = sum(tensor.nbytes for tensor in tensors)
    there, here = engine.device_empty(size_bytes), engine.host_empty(size_bytes)
    there.zero_()
    here.zero_()
    # As a thread keeps it from block to block.
    stager = Stager(CopyStarts(choose, [engine.device]))

    def copy() -> None:
        engine.copy(here, there)
        event = engine.event()
        engine.record(event, engine.current())
        engine.synchronize(event)

    jobs: dict[str, Callable[[], object]] = {
        "ours": partial(_stage, stager, tensors, lambda part: None),
        "copy": copy,
        "loop": lambda: [tensor.to("cpu", copy=True) for tensor in tensors],
    }
    runs = {who: seconds_of(jobs[who]) for who in workload.contenders}
    with open_gpu() as gpu:
        rounds = interleave(runs, round_count=round_count, seed=seed, gpu=gpu)
    expected = iter(_blocks(values))

    def compare(part: LocalPart) -> None:
        (wanted,) = next(expected)
        if not torch.equal(part.data(), wanted.data()):
            raise Mismatch("staging changed bytes", where=f"byte {part.skip} of a tensor")

    _stage(stager, tensors, compare)
    return rounds
