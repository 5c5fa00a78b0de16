"""The bytes of one row: a 16-byte metaheader, the weight, the optimizer state.

Prevents rows that only their own writer can read: sizes and offsets are closed forms of four numbers, bit-compatible
with FBGEMM's DRAM store (facts/kvstore.md 1.2 and 1.5). This module exists once, for both implementations.

::

    byte 0   8    key, int64
         8   4    timestamp, uint32, seconds
        12   4    bits 0-30 count (or the low 31 bits of a non-negative float32 score), bit 31 used
        16   ..   weight: D elements, padded with zeros to a multiple of 4 elements
         ..  ..   optimizer state, in the order of ``state_slots``; padded with zeros to 4 elements of the weight dtype
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from twinproof.errors import ConfigError, FormatError
from twinproof.optimizers import OPTIMIZERS

__all__ = [
    "COUNT_MAX",
    "HEADER_BYTES",
    "METADATA_OFFSET",
    "Header",
    "RowLayout",
    "StateSlot",
    "as_bytes",
    "from_bytes",
    "pack_header",
    "unpack_header",
]

HEADER_BYTES = 16
METADATA_OFFSET = 8  # Where timestamp, count and the used bit begin.
COUNT_MAX = 2**31 - 1
TIMESTAMP_MAX = 2**32 - 1
_USED_BIT = -(2**63)
_PAD_ELEMENTS = 4
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def _name(dtype: torch.dtype, where: str) -> str:
    for name, known in _DTYPES.items():
        if known is dtype:
            return name
    raise ConfigError("not a dtype of weights or states", got=dtype, expected=sorted(_DTYPES), where=where)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class StateSlot:
    """Where one optimizer state lies: ``offset_bytes`` from the start of the row, ``count`` elements of ``dtype``."""

    offset_bytes: int
    count: int
    dtype: torch.dtype

    @property
    def end_bytes(self) -> int:
        """The first byte behind it."""
        return self.offset_bytes + self.count * self.dtype.itemsize


@dataclass(frozen=True)
class RowLayout:
    """Sizes and offsets of one table's rows.

    Args:
        embedding_dim: D, elements of a weight, at least 1. FBGEMM has multiples of 4 only.
        weight_dtype: float32, float16 or bfloat16.
        optimizer: one of ``OPTIMIZERS``.
        state_dtypes: state name -> dtype, float32 where not named; row-wise Adagrad's is always float32.

    Raises:
        ConfigError: a value outside these.
    """

    embedding_dim: int
    weight_dtype: torch.dtype = torch.float32
    optimizer: str = "none"
    state_dtypes: Mapping[str, torch.dtype] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        if type(self.embedding_dim) is not int or self.embedding_dim < 1:
            raise ConfigError("not a width", got=self.embedding_dim, expected="an int >= 1", where="embedding_dim")
        _name(self.weight_dtype, "weight_dtype")
        if self.optimizer not in OPTIMIZERS:
            raise ConfigError("not an optimizer", got=self.optimizer, expected=sorted(OPTIMIZERS), where="optimizer")
        states = {state.name: state for state in OPTIMIZERS[self.optimizer].states}
        given = dict(self.state_dtypes or {})
        for name, dtype in given.items():
            if name not in states:
                raise ConfigError(
                    "this optimizer has no such state", got=name, expected=[*states], where="state_dtypes"
                )
            _name(dtype, f"state_dtypes[{name!r}]")
            if states[name].is_float32 and dtype is not torch.float32:
                raise ConfigError("the state of row-wise Adagrad is float32", got=dtype, where="state_dtypes")
        object.__setattr__(self, "state_dtypes", {name: given.get(name, torch.float32) for name in states})

    @property
    def header_bytes(self) -> int:
        """16."""
        return HEADER_BYTES

    @property
    def weight_bytes(self) -> int:
        """Bytes of the D weight elements, which begin at ``header_bytes``; padding is not counted."""
        return self.embedding_dim * self.weight_dtype.itemsize

    @property
    def state_begin_bytes(self) -> int:
        """Where the optimizer state begins: behind the weight and its padding to 4 elements."""
        return HEADER_BYTES + _round_up(self.embedding_dim, _PAD_ELEMENTS) * self.weight_dtype.itemsize

    @property
    def state_slots(self) -> dict[str, StateSlot]:
        """State name -> slot, in row order."""
        slots: dict[str, StateSlot] = {}
        end = self.state_begin_bytes
        for state in OPTIMIZERS[self.optimizer].states:
            name, row_wise = state.name, state.is_row_wise
            dtype = (self.state_dtypes or {})[name]
            # Nothing to round up when D is a multiple of 4, as FBGEMM demands; other widths must not misalign a state.
            begin = _round_up(end, dtype.itemsize)
            slots[name] = StateSlot(begin, 1 if row_wise else self.embedding_dim, dtype)
            end = slots[name].end_bytes
            if self.optimizer == "partial_rowwise_adam" and row_wise:
                end = _round_up(end, 4)
        return slots

    @property
    def row_bytes(self) -> int:
        """Bytes of a whole row."""
        slots = self.state_slots.values()
        state_bytes = max((slot.end_bytes for slot in slots), default=self.state_begin_bytes) - self.state_begin_bytes
        itemsize = self.weight_dtype.itemsize
        return self.state_begin_bytes + _round_up(-(-state_bytes // itemsize), _PAD_ELEMENTS) * itemsize

    @property
    def value_ranges(self) -> tuple[tuple[int, int], ...]:
        """The byte ranges of a row that carry values: header, weight, states. All other bytes are padding: zero."""
        ranges = [(0, HEADER_BYTES), (HEADER_BYTES, HEADER_BYTES + self.weight_bytes)]
        return (*ranges, *((slot.offset_bytes, slot.end_bytes) for slot in self.state_slots.values()))

    def without_optimizer(self) -> RowLayout:
        """The same weight, no state."""
        return RowLayout(self.embedding_dim, self.weight_dtype)

    def to_json(self) -> str:
        """Canonical text; ``from_json`` is its inverse."""
        states = {name: _name(dtype, name) for name, dtype in (self.state_dtypes or {}).items()}
        content = {
            "embedding_dim": self.embedding_dim,
            "optimizer": self.optimizer,
            "state_dtypes": states,
            "weight_dtype": _name(self.weight_dtype, "weight_dtype"),
        }
        return json.dumps(content, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> RowLayout:
        """Parse what ``to_json`` wrote. Raises FormatError."""
        try:
            content: dict[str, Any] = json.loads(text)
            states = {name: _DTYPES[dtype] for name, dtype in content.pop("state_dtypes").items()}
            weight = _DTYPES[content.pop("weight_dtype")]
            layout = cls(content.pop("embedding_dim"), weight, content.pop("optimizer"), states)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise FormatError("not a row layout", got=text[:200], where=f"{type(error).__name__}: {error}") from None
        if content:
            raise FormatError("a row layout with unknown fields", got=sorted(content))
        return layout


@dataclass(frozen=True)
class Header:
    """The fields of n metaheaders: int64 [n] ``ids``, ``timestamps`` and ``counts``, bool [n] ``used``."""

    ids: torch.Tensor
    timestamps: torch.Tensor
    counts: torch.Tensor
    used: torch.Tensor


def as_bytes(values: torch.Tensor) -> torch.Tensor:
    """[n, w] of any dtype as uint8 [n, w * itemsize]; the same memory where it is dense."""
    # Empty and one-element tensors may carry strides that a two-dimensional view refuses.
    flat = values.contiguous().reshape(-1).view(torch.uint8)
    return flat.reshape(values.shape[0], values.shape[1] * values.element_size())


def from_bytes(raw: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The inverse of ``as_bytes``."""
    return raw.contiguous().reshape(-1).view(dtype).reshape(raw.shape[0], raw.shape[1] // dtype.itemsize)


def pack_header(header: Header) -> torch.Tensor:
    """The metaheaders as uint8 [n, 16], little-endian; timestamps are taken mod 2**32, counts saturate at 2**31 - 1."""
    counts = header.counts.clamp(0, COUNT_MAX)
    words = (header.timestamps & TIMESTAMP_MAX) | (counts << 32)
    words = torch.where(header.used, words | _USED_BIT, words)
    return as_bytes(torch.stack([header.ids, words], dim=1))


def unpack_header(rows: torch.Tensor) -> Header:
    """The fields of rows, uint8 [n, >= 16]."""
    words = from_bytes(rows[:, :HEADER_BYTES], torch.int64)
    return Header(words[:, 0].clone(), words[:, 1] & TIMESTAMP_MAX, (words[:, 1] >> 32) & COUNT_MAX, words[:, 1] < 0)
