"""Faults of the reference itself, in what the fast version does in another way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from conformance.checkpoint.planted.making import Patch, broken_taken_as_empty, nothing, ref
from conformance.harness import swap, wrap

WRITER = "twinproof.checkpoint.writer"
CONSOLIDATE = "twinproof.checkpoint.consolidate"


def _parts_changed(change: Callable[[torch.Tensor], torch.Tensor]) -> Patch:
    """Change the bits of a chunk before it is sent to the coordinator."""

    def around(original: Any, writer: Any, plan: Any, planner: Any) -> Any:
        return [(name, offsets, change(bits)) for name, offsets, bits in original(writer, plan, planner)]

    return wrap(f"{WRITER}:HuggingFaceStorageWriter._local_parts", around)


def _placed_at_zero(original: Any, file: str, arrangement: Any, parts: Any) -> Any:
    return original(file, arrangement, [(name, (0,) * len(offsets), bits) for name, offsets, bits in parts])


def _from_row_zero(original: Any, chunk: Any, dtype: Any, first: int = 0, count: int | None = None) -> Any:
    return original(chunk, dtype, 0, count)


def _tensor_of_zeros(original: Any, catalog: Any, name: str) -> torch.Tensor:
    found: torch.Tensor = original(catalog, name)
    return found.zero_() if found.dim() == 0 else found


PLANTED = (
    ref(
        "reference_loses_scalars",
        "A 0-dim tensor loses its value (D1).",
        ("CKPT-004",),
        _parts_changed(lambda bits: torch.zeros_like(bits) if bits.dim() == 0 else bits),
    ),
    ref(
        "reference_loses_words",
        "Elements of two bytes are stored as zeros (compare D2).",
        ("CKPT-001",),
        _parts_changed(lambda bits: torch.zeros_like(bits) if bits.dtype is torch.int16 else bits),
    ),
    ref(
        "reference_ignores_meta",
        "A meta tensor is not refused by name.",
        ("CKPT-010",),
        swap(f"{WRITER}:check_storable", nothing),
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
        wrap(f"{WRITER}:_assemble", _placed_at_zero),
    ),
    ref(
        "reference_reads_from_row_zero",
        "A load always reads a chunk from its first row.",
        ("CKPT-009", "CKPT-026"),
        wrap("twinproof.checkpoint.reader:read_chunk", _from_row_zero),
    ),
    ref(
        "reference_merge_loses_scalars",
        "Consolidation loses the values of 0-dim tensors (D1).",
        ("CKPT-091",),
        wrap(f"{CONSOLIDATE}:_assemble", _tensor_of_zeros),
    ),
    ref(
        "reference_trusts_final_folders",
        "A final folder that is broken is called consolidated.",
        ("CKPT-092",),
        wrap(f"{CONSOLIDATE}:read_catalog", broken_taken_as_empty),
    ),
)
