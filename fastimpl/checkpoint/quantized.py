"""The fast reader of block-quantized checkpoints: ranges are read and converted piece by piece, in the core's cache."""

from __future__ import annotations

import threading
from functools import cache

import torch

from fastimpl import ops
from fastimpl.checkpoint.reader import ReadRanges
from fastimpl.checkpoint.readio import LoadStats
from twinproof.checkpoint import dcp
from twinproof.checkpoint.catalog import LoadJob

__all__ = ["QuantizedHuggingFaceStorageReader", "dequantize"]

_NARROW = (torch.float32, torch.float16, torch.bfloat16)


@cache
def _table(dtype: torch.dtype) -> torch.Tensor:
    """What each byte of an 8-bit float stands for, float32 [256]."""
    return torch.arange(256, dtype=torch.uint8, device="cpu").view(dtype).to(torch.float32)


def dequantize(piece: dcp.Piece, out: torch.Tensor) -> None:
    """Write the values of a piece. ``out``: any floating point dtype and strides, on the CPU."""
    rows = out.unsqueeze(0) if out.dim() == 1 else out.flatten(0, -2)
    is_plain = out.dtype in _NARROW and not out.is_neg() and rows.data_ptr() == out.data_ptr()
    is_seen = is_plain and (rows.stride(1) == 1 or rows.size(1) <= 1)
    numbers = rows if is_seen else torch.empty(rows.shape, dtype=torch.float32, device="cpu")
    if piece.kind == dcp.FP8:
        values, table = piece.values.view(torch.uint8), _table(piece.values.dtype)
        ops.dequantize_fp8(values, table, piece.scales.to(torch.float32), piece.first, piece.block_size, numbers)
    else:
        values, scales = piece.values.reshape(rows.size(0), -1, piece.values.size(-1)), piece.scales
        ops.dequantize_mxfp4(values, scales.reshape(values.shape[:2]), piece.first[1], numbers)
    if not is_seen:
        out.copy_(numbers.view(out.shape))


# Of all readers: a lock of its own would keep a reader from being pickled, and it is held for four additions.
_ADDING = threading.Lock()


class _AddedRanges(ReadRanges):
    """As ``ReadRanges``, for the many small reads of one load: its figures are their sum."""

    def read(self, job: LoadJob) -> None:
        """Fill every target in place."""
        one = ReadRanges()
        one.choose_copies = self.choose_copies
        one.read(job)
        with _ADDING:
            self.stats.plan_s += one.stats.plan_s
            self.stats.read_s += one.stats.read_s
            self.stats.read_bytes += one.stats.read_bytes
            self.stats.read_count += one.stats.read_count


class QuantizedHuggingFaceStorageReader(
    dcp.QuantizedHuggingFaceStorageReader, engine=_AddedRanges, dequantize=dequantize
):
    """Reads and converts on ``thread_count`` threads.

    Takes the arguments of ``twinproof.checkpoint.dcp.QuantizedHuggingFaceStorageReader``.
    """

    _engine: _AddedRanges
    _crc32 = staticmethod(ops.crc32)

    @property
    def stats(self) -> LoadStats:
        """Bytes and calls of this rank's loads; seconds are sums over threads."""
        return self._engine.stats
