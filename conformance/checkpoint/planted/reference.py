"""Faults of the reference itself, in what the fast version does in another way."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from conformance.checkpoint.planted.making import Patch, broken_taken_as_empty, nothing, ref
from conformance.harness import swap, wrap

REFERENCE = "refimpl.checkpoint"


def _parts_changed(change: Callable[[torch.Tensor], torch.Tensor]) -> Patch:
    """Change the bits of a chunk before it is sent to the coordinator."""

    def around(original: Any, *arguments: Any) -> Any:
        name, offsets, bits = original(*arguments)
        return name, offsets, change(bits)

    return wrap(f"{REFERENCE}:_part", around)


def _placed_at_zero(original: Any, shape: Any, dtype: Any, parts: Any) -> Any:
    return original(shape, dtype, [(name, (0,) * len(offsets), bits) for name, offsets, bits in parts])


def _from_row_zero(original: Any, engine: Any, job: Any) -> None:
    ranges = []
    for wanted in job.ranges:
        offsets = (0, *wanted.offsets[1:]) if wanted.offsets else ()
        ranges.append(dataclasses.replace(wanted, offsets=offsets))
    original(engine, dataclasses.replace(job, ranges=ranges))


def _scalar_of_zeros(original: Any, shape: Any, dtype: Any, parts: Any) -> torch.Tensor:
    found: torch.Tensor = original(shape, dtype, parts)
    return found.zero_() if found.dim() == 0 else found


PLANTED = (
    ref(
        "reference_loses_scalars",
        "A 0-dim tensor loses its value, as in torch's consolidation.",
        ("CKPT-004",),
        _parts_changed(lambda bits: torch.zeros_like(bits) if bits.dim() == 0 else bits),
    ),
    ref(
        "reference_loses_words",
        "Elements of two bytes are stored as zeros (compare torch #192485).",
        ("CKPT-001",),
        _parts_changed(lambda bits: torch.zeros_like(bits) if bits.dtype is torch.int16 else bits),
    ),
    ref(
        "reference_ignores_meta",
        "A meta tensor is not refused by name.",
        ("CKPT-010",),
        swap(f"{REFERENCE}:check_storable", nothing),
    ),
    ref(
        "reference_reverses_inner_shards",
        "Shards of tensors with three and more dimensions are stored in reverse.",
        ("CKPT-023",),
        _parts_changed(lambda bits: bits.flip(0) if bits.dim() > 2 else bits),
    ),
    ref(
        "reference_stacks_shards",
        "Every chunk is placed at the start of its tensor.",
        ("CKPT-021", "CKPT-024"),
        wrap(f"{REFERENCE}:assemble", _placed_at_zero),
    ),
    ref(
        "reference_reads_from_row_zero",
        "A load always reads a chunk from its first row.",
        ("CKPT-009", "CKPT-026"),
        wrap(f"{REFERENCE}:ReadWholeFiles.read", _from_row_zero),
    ),
    ref(
        "reference_merge_loses_scalars",
        "Consolidation loses the values of 0-dim tensors; torch's does.",
        ("CKPT-091",),
        wrap(f"{REFERENCE}:assemble", _scalar_of_zeros),
    ),
    ref(
        "reference_trusts_final_folders",
        "A final folder that is broken is called consolidated.",
        ("CKPT-092",),
        wrap("twinproof.checkpoint.shards:read_catalog", broken_taken_as_empty),
    ),
)
