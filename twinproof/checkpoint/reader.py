"""The reference reader: the rows that are asked for are read, and the asked-for part of them copied into the target."""

from __future__ import annotations

import math

import torch
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from twinproof.checkpoint.catalog import Chunk
from twinproof.checkpoint.layout import torch_dtype
from twinproof.checkpoint.memory import as_bits, buffer_of
from twinproof.checkpoint.reader_base import ReaderBase
from twinproof.errors import CorruptionError

__all__ = ["HuggingFaceStorageReader", "read_chunk"]


def read_chunk(chunk: Chunk, dtype: torch.dtype, first: int = 0, count: int | None = None) -> torch.Tensor:
    """The stored values of one chunk, or of ``count`` of its rows, on the CPU.

    Raises:
        CorruptionError: the file ends early.
    """
    rows = chunk.sizes[:1] if count is None else (count,) * len(chunk.sizes[:1])
    tensor = torch.empty((*rows, *chunk.sizes[1:]), dtype=dtype)
    with open(chunk.file, "rb") as file:
        file.seek(chunk.begin + first * math.prod(chunk.sizes[1:]) * dtype.itemsize)
        got = file.readinto(buffer_of(tensor))
    if got != tensor.numel() * dtype.itemsize:
        raise CorruptionError("the file became shorter while it was read", got=got, where=chunk.file)
    return tensor


class HuggingFaceStorageReader(ReaderBase):
    __doc__ = ReaderBase.__doc__

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill every target in place; nothing is written before all targets were checked."""
        for item, target in self.targets(plan, planner):
            chunk = self.chunk_of(item.storage_index)
            dtype = torch_dtype(self.catalog.tensors[item.storage_index.fqn].dtype)
            assert dtype is not None
            stored = read_chunk(chunk, dtype, *item.storage_offsets[:1], *item.lengths[:1])
            inner = zip(item.storage_offsets[1:], item.lengths[1:], strict=True)
            rows = [slice(None)] * len(item.lengths[:1])
            part = stored[tuple(rows + [slice(o, o + n) for o, n in inner])]
            if target.dtype == dtype and not target.is_conj() and not target.is_neg():
                as_bits(target).copy_(as_bits(part))
            else:
                target.copy_(part)
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future
