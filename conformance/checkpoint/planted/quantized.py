"""Faults of block-quantized loads."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from conformance.harness import fault, mutated, patched, swap, wrap

_READER = "twinproof.checkpoint.dcp:QuantizedHuggingFaceStorageReader"
_DEQUANTIZE = "QuantizedHuggingFaceStorageReader._dequantize"


@fault(kills="CKPT-450", at=_DEQUANTIZE)
def blocks_counted_from_the_slice(original: Any, piece: Any, out: Any) -> Any:
    """The blocks of a slice are counted from its first value."""
    original(dataclasses.replace(piece, first=(0, 0)) if piece.kind == "fp8" else piece, out)


@fault(kills="CKPT-450", at=_DEQUANTIZE)
def multiplied_after_rounding(original: Any, piece: Any, out: Any) -> Any:
    """The stored numbers are rounded to the target's dtype, and the scales too, before they are multiplied."""
    scales = piece.scales.to(out.dtype).to(piece.scales.dtype) if piece.kind == "fp8" else piece.scales
    original(dataclasses.replace(piece, scales=scales), out)


@fault(kills="CKPT-451", at=_DEQUANTIZE)
def high_half_first(original: Any, piece: Any, out: Any) -> Any:
    """The two numbers of a byte are taken in the other order."""
    swapped = (piece.values >> 4) | (piece.values << 4) if piece.kind == "mxfp4" else piece.values
    original(dataclasses.replace(piece, values=swapped), out)


@fault(kills="CKPT-451", at=_DEQUANTIZE)
def largest_scale_is_a_power(original: Any, piece: Any, out: Any) -> Any:
    """A scale of 255 is two to the 128th, as torch's reader takes it."""
    original(piece, out)
    if piece.kind == "mxfp4":
        out.masked_fill_(out.isnan(), torch.inf)


@fault(kills="CKPT-452", at="twinproof.checkpoint.dcp:stored_ranges")
def scales_of_the_first_shard(original: Any, name: Any, record: Any, offsets: Any, sizes: Any) -> Any:
    """Of scales that are cut into shards only the first shard's are read; the others are ones."""
    memory, ranges = original(name, record, offsets, sizes)
    if "scale" in name:
        memory.fill_(1)
        ranges = ranges[:1]
    return memory, ranges


@fault(kills="CKPT-453", at="twinproof.checkpoint.dcp:find_quantized")
def every_small_float_is_quantized(original: Any, catalog: Any, block_size: Any) -> Any:
    """The shape that metadata says is the stored one."""
    found = original(catalog, block_size)
    return {n: dataclasses.replace(f, shape=tuple(catalog.tensors[n].shape)) for n, f in found.items()}


@fault(kills="CKPT-454", at="twinproof.checkpoint.dcp:_check_scales")
def scales_unchecked(original: Any, *arguments: Any) -> None:
    """Scales of any shape are taken; blocks without one have whatever memory held."""


quantized_numbers_taken_as_they_are = patched(
    "A manager reads the stored numbers without their scales.",
    wrap(
        "twinproof.checkpoint.manager:CheckpointManager._hf_reader",
        lambda original, manager, path: type(manager)._reader(path, 1, cast=True),
    ),
    swap("twinproof.checkpoint.dcp:check_plain", lambda *arguments, **options: None),
    kills="CKPT-455",
)


@fault(kills="CKPT-476", at="QuantizedHuggingFaceStorageReader._load")
def written_on_the_threads_stream(original: Any, reader: Any, streams: Any, part: Any) -> None:
    """A thread that converts writes the target on its own current stream, which the caller's work does not wait for."""
    original(reader, {device: (engine, engine.current()) for device, (engine, _) in streams.items()}, part)


last_row_of_pieces_left_out = patched(
    "A last row that would be a piece of its own is left out.",
    mutated(
        "twinproof.checkpoint.catalog:cut_rectangle", "range(0, sizes[0], step)", "range(0, sizes[0] - 1 or 1, step)"
    ),
    kills="CKPT-513",
)

last_row_beyond_pieces_left_out = patched(
    "Of rows that are larger than a piece the last is left out.",
    mutated("twinproof.checkpoint.catalog:cut_rectangle", "in range(sizes[0])", "in range(sizes[0] - 1)"),
    kills="CKPT-513",
)


@fault(kills="CKPT-549", at="fastimpl.ops:dequantize_mxfp4")
def scale_of_the_group_before(original: Any, values: Any, scales: Any, skip: int, out: Any) -> None:
    """Whole groups behind a part of one are given the scale of the group before them."""
    group = 2 * values.size(2)
    changed = scales.clone()
    if skip:
        last = (skip + out.size(1)) // group
        changed[:, 1:last] = scales[:, : last - 1]
    original(values, changed, skip, out)


@fault(kills="CKPT-549", at="refimpl.checkpoint:QuantizedHuggingFaceStorageReader._dequantize")
def reference_scale_of_the_group_before(original: Any, piece: Any, out: Any) -> None:
    """The same in the reference."""
    if piece.kind == "mxfp4" and piece.first[1]:
        piece = dataclasses.replace(piece, scales=piece.scales.roll(1, -1))
    original(piece, out)


quantized_numbers_not_compared = patched(
    "A manager that is to verify reads a quantized checkpoint without comparing.",
    mutated(
        "twinproof.checkpoint.manager:CheckpointManager._hf_reader",
        "return type(self)._quantized_reader(path, self._thread_count, verify_checksums=self._verifies)",
        "return type(self)._quantized_reader(path, self._thread_count)",
    ),
    kills="CKPT-559",
)

negated_targets_written_as_they_lie = patched(
    "A negated target is written as if it were what its memory holds.",
    mutated("fastimpl.checkpoint.quantized:dequantize", "not out.is_neg()", "True"),
    kills="CKPT-600",
)


files_of_scales_not_looked_at = patched(
    "A file that holds scales alone may be replaced while it is read.",
    mutated(f"{_READER}.read_data", "read | {self.quantized[name].scales for name in read}", "read"),
    kills="CKPT-617",
)
files_of_values_not_looked_at = patched(
    "A file that holds quantized values alone may be replaced while it is read.",
    mutated(
        f"{_READER}.read_data",
        "read | {self.quantized[name].scales for name in read}",
        "{self.quantized[name].scales for name in read}",
    ),
    kills="CKPT-617",
)


@fault(kills="CKPT-619", at=_DEQUANTIZE)
def rows_in_32_bits(original: Any, piece: Any, out: torch.Tensor) -> None:
    """Where a row of the target begins is counted in 32 bits."""
    if out.dim() != 2 or out.stride(0) * (out.size(0) - 1) < 1 << 32:
        original(piece, out)
        return
    whole = torch.empty(out.shape, dtype=out.dtype)
    original(piece, whole)
    for row, values in enumerate(whole):
        out[0].as_strided((out.size(1),), (1,), out.storage_offset() + row * out.stride(0) % (1 << 32)).copy_(values)


@fault(kills="CKPT-626", at="fastimpl.ops:dequantize_mxfp4")
def runs_of_one_place(original: Any, values: Any, scales: Any, skip: int, out: Any) -> None:
    """Of numbers of 16 bits each run of 512 is written to the place of the first one."""
    kept = out.clone()
    original(values, scales, skip, out)
    if out.element_size() == 2 and out.size(1) > 512:
        tail = (out.size(1) - 1) % 512 + 1
        last = out[:, -tail:].clone()
        out[:, 512:] = kept[:, 512:]
        out[:, :tail] = last


def _rounded_by_bits(numbers: torch.Tensor) -> torch.Tensor:
    bits = numbers.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    return (((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFFFFFF) >> 16).to(torch.int16).view(torch.bfloat16)


@fault(kills="CKPT-627", at="fastimpl.ops:dequantize_fp8")
def bits_of_a_nan_overflow(original: Any, *arguments: Any) -> None:
    """Numbers are rounded to bfloat16 by adding to their bits, NaNs too: the largest become zero."""
    *given, out = arguments
    numbers = torch.empty(out.shape, dtype=torch.float32)
    original(*given, numbers)
    out.copy_(_rounded_by_bits(numbers) if out.dtype is torch.bfloat16 else numbers)


scaled_ones_not_committed = patched(
    "A planner does not hear of the tensors with scales.",
    mutated(
        "twinproof.checkpoint.dcp:QuantizedHuggingFaceStorageReader.read_data",
        "planner.commit_tensor(item, target)",
        "pass",
    ),
    kills="CKPT-632",
)

committed_too_early = patched(
    "A planner hears of a tensor before it holds its values.",
    mutated(
        "twinproof.checkpoint.dcp:HuggingFaceStorageReader.read_data",
        "meter = Meter(",
        "[planner.commit_tensor(item, target) for item, target in targets]; targets = []; meter = Meter(",
    ),
    kills="CKPT-632",
)

dequantized_into_a_copy = patched(
    "A target that is flattened into a copy is taken for one that is written in place.",
    mutated(
        "fastimpl.checkpoint.quantized:dequantize",
        " and not out.is_neg() and rows.data_ptr() == out.data_ptr()",
        " and not out.is_neg()",
    ),
    kills="CKPT-656",
    of="fastimpl",
)


widths_tell_dtypes = patched(
    "What is no wider than the target dtype is written as it is, also where it is another dtype of its width.",
    mutated(
        f"{_READER}._load",
        "part.target.dtype == self.target_dtype or self.target_dtype == torch.float32",
        "part.target.dtype.itemsize <= self.target_dtype.itemsize",
    ),
    kills="CKPT-681",
)

plain_ones_forgotten = patched(
    "Beside quantized tensors those without scales pass for compared.",
    mutated(f"{_READER}.read_data", "tuple(sorted({*self.unverified, *compared}))", "compared"),
    kills="CKPT-724",
)
quantized_ones_forgotten = patched(
    "Beside tensors without scales that were not compared quantized ones pass for compared.",
    mutated(f"{_READER}.read_data", "tuple(sorted({*self.unverified, *compared}))", "self.unverified or compared"),
    kills="CKPT-724",
)
scales_of_parts_forgotten = patched(
    "Of quantized tensors values alone are compared and named.",
    mutated(
        f"{_READER}._stored_whole",
        "(name, self.quantized[name].scales)",
        "(name,)",
    ),
    kills="CKPT-724",
)


_KEPT: dict[Any, Any] = {}


@fault(kills="CKPT-850", at=_DEQUANTIZE)
def scales_of_the_load_before(original: Any, piece: Any, out: Any) -> Any:
    """Scales that were read once for a place of a tensor are not read again."""
    key = piece.kind, piece.first, tuple(out.shape)
    original(dataclasses.replace(piece, scales=_KEPT.setdefault(key, piece.scales)), out)
