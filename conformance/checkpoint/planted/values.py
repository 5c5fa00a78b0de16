"""Faults that ``test_values`` must notice."""

from __future__ import annotations

import dataclasses
import errno
import math
from typing import Any

import torch

from conformance.checkpoint.planted.planting import (
    bytes_where,
    library_entries,
    nothing,
    parts_changed,
    values_changed,
    zero,
)
from conformance.harness import fault, mutated, patched, swap, wrap

scalar_becomes_zero = patched(
    "A 0-dim tensor loses its value, as in torch's consolidation.",
    bytes_where(lambda s: s.value.dim() == 0, zero),
    kills="CKPT-004",
)
integers_become_zero = patched(
    "Integer tensors are stored without their values (compare torch #192485).",
    bytes_where(lambda s: s.dtype is torch.int16, zero),
    kills="CKPT-001",
)


def _canonical_nan(data: torch.Tensor) -> torch.Tensor:
    values = data.view(torch.int32)
    is_nan = (values & 0x7FFFFFFF) > 0x7F800000
    return torch.where(is_nan, torch.full_like(values, 0x7FC00000), values).view(torch.uint8)


nan_payloads_lost = patched(
    "Every NaN becomes the canonical one.",
    bytes_where(lambda s: s.dtype is torch.float32, _canonical_nan),
    kills="CKPT-002",
)
conjugate_ignored = patched(
    "A lazy conjugate is stored without its sign.",
    values_changed(lambda v: v.conj() if v.is_conj() else v),
    kills="CKPT-003",
)


def _memory_as_it_lies(value: torch.Tensor) -> torch.Tensor:
    room = value.untyped_storage().nbytes() // value.element_size() - value.storage_offset()
    if value.is_contiguous() or value.numel() > room:
        return value
    bits = value.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[value.element_size()])
    flat = bits.as_strided((value.numel(),), (1,))
    return flat.view(value.dtype).reshape(value.shape)


strides_ignored = patched(
    "A strided view is stored as its memory lies.", values_changed(_memory_as_it_lies), kills="CKPT-007"
)
storage_offset_ignored = patched(
    "A view is stored from the start of its storage.",
    values_changed(lambda v: v.as_strided(v.size(), v.stride(), 0) if v.numel() else v),
    kills="CKPT-008",
)
meta_tensors_pass = patched(
    "A meta tensor is not refused by name.",
    swap("fastimpl.checkpoint.writer:check_storable", nothing),
    kills="CKPT-010",
)


def _shape_lost(original: Any, name: str, dtype: torch.dtype, shape: Any) -> list[int]:
    return [0] if 0 in shape else original(name, dtype, shape)


empty_shape_lost = patched(
    "A zero-size tensor keeps its dtype only.",
    wrap("twinproof.checkpoint.format:format_shape", _shape_lost),
    library_entries(lambda entry: {**entry, "shape": [0] if 0 in entry["shape"] else entry["shape"]}),
    kills="CKPT-005",
)


def _float4_as_in_torch(entry: dict[str, Any]) -> dict[str, Any]:
    shape = entry["shape"]
    return {**entry, "shape": [*shape[:-1], shape[-1] // 2]} if entry["dtype"] == "F4" else entry


float4_not_doubled = patched(
    "The header shows torch's shape for float4.",
    swap("twinproof.checkpoint.format:format_shape", lambda name, dtype, shape: list(shape)),
    library_entries(_float4_as_in_torch),
    kills="CKPT-006",
)


@fault(kills="CKPT-009", at="fastimpl.checkpoint.readio:read_exactly")
def offsets_of_32_bits(original: Any, descriptor: int, buffers: Any, offset: int, path: str) -> Any:
    """File offsets are cut to 32 bits."""
    return original(descriptor, buffers, offset & 0xFFFFFFFF, path)


reference_loses_scalars = patched(
    "A 0-dim tensor loses its value, as in torch's consolidation.",
    parts_changed(lambda bits: torch.zeros_like(bits) if bits.dim() == 0 else bits),
    kills="CKPT-004",
)
reference_loses_words = patched(
    "Elements of two bytes are stored as zeros (compare torch #192485).",
    parts_changed(lambda bits: torch.zeros_like(bits) if bits.dtype is torch.int16 else bits),
    kills="CKPT-001",
)
reference_ignores_meta = patched(
    "A meta tensor is not refused by name.", swap("refimpl.checkpoint:check_storable", nothing), kills="CKPT-010"
)


@fault(kills=("CKPT-009", "CKPT-026"), at="refimpl.checkpoint:ReadWholeFiles.read")
def reference_reads_from_row_zero(original: Any, engine: Any, job: Any) -> None:
    """A load always reads a chunk from its first row."""
    ranges = []
    for wanted in job.ranges:
        offsets = (0, *wanted.offsets[1:]) if wanted.offsets else ()
        ranges.append(dataclasses.replace(wanted, offsets=offsets))
    original(engine, dataclasses.replace(job, ranges=ranges))


def _second_half_zero(data: torch.Tensor) -> torch.Tensor:
    data.view(-1, 8)[:, 4:] = 0
    return data


complex_stored_half = patched(
    "Of a complex number 32 bits are stored, as in torch's consolidation.",
    bytes_where(lambda s: s.dtype is torch.complex64, _second_half_zero),
    kills="CKPT-001",
)


@fault(kills="CKPT-482", at="fastimpl.ops:strided_gather")
def dimensions_beyond_16_ignored(original: Any, source: torch.Tensor, start: int, dense: torch.Tensor) -> None:
    """Of a tensor of many dimensions, those after the sixteenth are taken to be dense."""
    if source.dim() > 16 and source.stride(-1) > 1:
        rest = source.shape[15:].numel()
        source = source.as_strided((*source.shape[:15], rest), (*source.stride()[:15], 1))
    original(source, start, dense)


@fault(kills="CKPT-550", at="fastimpl.ops:read_rectangle")
def windows_in_32_bits(original: Any, file: int, dense: Any, window: Any, words: Any) -> Any:
    """Where a window begins in its tensor is counted in 32 bits: beyond 2 GiB the file has no such place."""
    ndim, _, skip, _, *rectangle = words.tolist()
    shape, offsets, sizes = (rectangle[i * ndim : (i + 1) * ndim] for i in range(3))
    row = offsets[0] + skip // math.prod(sizes[1:])
    if row * math.prod(shape[1:]) >= 1 << 31:
        return errno.EINVAL, 1, 0
    return original(file, dense, window, words)


@fault(kills="CKPT-550", at="fastimpl.checkpoint.geometry:Geometry.locate")
def places_in_32_bits(original: Any, geometry: Any, position: int) -> int:
    """A place in a tensor is counted in 32 bits."""
    return int(original(geometry, position)) % (1 << 32)


def _in_32_bits(strided: torch.Tensor, start: int, count: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Memory as one row, and places there of so many elements, in 32 bits; None where these are enough."""
    last = sum((size - 1) * step for size, step in zip(strided.shape, strided.stride(), strict=True))
    if last < 1 << 32:
        return None
    places = torch.zeros((), dtype=torch.int64)
    for size, step in zip(strided.shape, strided.stride(), strict=True):
        places = places.unsqueeze(-1) + torch.arange(size) * step
    return strided.as_strided((last + 1,), (1,)), places.flatten()[start : start + count] % (1 << 32)


@fault(kills="CKPT-618", at="fastimpl.ops:strided_gather")
def gathered_in_32_bits(original: Any, source: torch.Tensor, start: int, dense: torch.Tensor) -> None:
    """Where an element of a strided tensor lies in memory is counted in 32 bits, on the way out."""
    found = _in_32_bits(source, start, dense.numel() // source.element_size())
    if found is None:
        original(source, start, dense)
        return
    memory, places = found
    dense.copy_(memory[places].view(torch.uint8))


@fault(kills="CKPT-618", at="fastimpl.ops:strided_scatter")
def scattered_in_32_bits(original: Any, target: torch.Tensor, start: int, dense: torch.Tensor) -> None:
    """Where an element of a strided tensor lies in memory is counted in 32 bits, on the way in."""
    found = _in_32_bits(target, start, dense.numel() // target.element_size())
    if found is None:
        original(target, start, dense)
        return
    memory, places = found
    memory[places] = dense.view(target.dtype)


strides_of_one_refused = patched(
    "Bytes of one element cannot be seen where its dimension has another stride.",
    mutated("twinproof.checkpoint.format:dense_bytes", "bits.as_strided((bits.numel(),), (1,))", "bits.view(-1)"),
    kills="CKPT-658",
)
