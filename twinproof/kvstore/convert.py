"""Rows of one layout as rows of another: other dtypes, with or without optimizer state.

Prevents silent loss: state is dropped or left at zero only where the caller said ``weights_only``.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from twinproof.errors import ConfigError
from twinproof.kvstore.layout import HEADER_BYTES, METADATA_OFFSET, Header, RowLayout, as_bytes, from_bytes, pack_header

__all__ = ["assemble_rows", "check_convertible", "convert_rows", "separate"]


def check_convertible(source: RowLayout, target: RowLayout, *, weights_only: bool, where: str) -> None:
    """Demand that rows of ``source`` can be stored as ``target``; dtypes may differ. Raises ConfigError."""
    if source.embedding_dim != target.embedding_dim:
        raise ConfigError("another width", got=source.embedding_dim, expected=target.embedding_dim, where=where)
    same = set(source.state_slots) == set(target.state_slots)
    same = same and (not source.state_slots or source.optimizer == target.optimizer)
    if not same and not weights_only:
        raise ConfigError(
            "other optimizer state than the store's rows; weights_only=True loads weights alone",
            got=source.optimizer,
            expected=target.optimizer,
            where=where,
        )


def separate(layout: RowLayout, rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """Weight and states of whole rows, each [n, count] in its dtype."""
    ranges = {"weight": (HEADER_BYTES, HEADER_BYTES + layout.weight_bytes, layout.weight_dtype)}
    ranges |= {name: (slot.offset_bytes, slot.end_bytes, slot.dtype) for name, slot in layout.state_slots.items()}
    return {name: from_bytes(rows[:, begin:end], dtype) for name, (begin, end, dtype) in ranges.items()}


def assemble_rows(
    layout: RowLayout, ids: torch.Tensor, words: torch.Tensor, values: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """Whole rows from ids [n], header words [n] (bytes 8-15), weight and states.

    Values of another dtype are rounded to nearest even; a state that is not given is zero.
    """
    rows = torch.zeros(ids.numel(), layout.row_bytes, dtype=torch.uint8)
    nothing = torch.zeros_like(ids)
    rows[:, :HEADER_BYTES] = pack_header(Header(ids, nothing, nothing, nothing == 0))
    used = from_bytes(rows[:, METADATA_OFFSET:HEADER_BYTES], torch.int64)
    rows[:, METADATA_OFFSET:HEADER_BYTES] = as_bytes(used | words.reshape(-1, 1))
    rows[:, HEADER_BYTES : HEADER_BYTES + layout.weight_bytes] = _raw(values["weight"], layout.weight_dtype)
    for name, slot in layout.state_slots.items():
        if name in values:
            rows[:, slot.offset_bytes : slot.end_bytes] = _raw(values[name], slot.dtype)
    return rows


def _raw(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return as_bytes(values.to(dtype))


def convert_rows(rows: torch.Tensor, source: RowLayout, target: RowLayout, *, weights_only: bool) -> torch.Tensor:
    """Whole rows of ``source`` as ``target``; with ``weights_only`` every state of the result is zero."""
    if source == target and not (weights_only and target.state_slots):
        return rows
    values = separate(source, rows)
    if weights_only:
        values = {"weight": values["weight"]}
    words = from_bytes(rows[:, :HEADER_BYTES], torch.int64)
    return assemble_rows(target, words[:, 0], words[:, 1], values)
