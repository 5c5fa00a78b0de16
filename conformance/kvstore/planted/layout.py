"""Faults that ``test_layout`` must notice."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from conformance.harness import fault, mutated, patched, swap
from conformance.kvstore.planted.planting import engines
from twinproof.errors import ConfigError
from twinproof.optimizers import OPTIMIZERS

weight_padded_to_eight = patched(
    "The weight is padded to eight elements instead of four.",
    swap("twinproof.kvstore.options:_PAD_ELEMENTS", 8),
    kills=("KV-004", "KV-005"),
)


@fault(kills="KV-055", at="twinproof.kvstore.store:KVStore.now")
def timestamps_in_minutes(original: Any, store: Any) -> Any:
    """Timestamps are stored in another unit than seconds."""
    return original(store) // 60


@fault(kills="KV-080", at="twinproof.kvstore.options:RowLayout.__post_init__")
def impossible_layouts_accepted(original: Any, row_layout: Any) -> None:
    """A layout that cannot be honoured is taken."""
    try:
        original(row_layout)
    except ConfigError:
        object.__setattr__(row_layout, "state_dtypes", {})


@fault(kills="KV-001", at="pack_header")
def used_bit_lost_at_full_count(original: Any, header: Any) -> torch.Tensor:
    """A saturated count overflows into the used bit."""
    packed: torch.Tensor = original(header)
    packed[header.counts >= 2**31 - 1, 15] &= 0x7F
    return packed


@fault(kills="KV-002", at="pack_header")
def timestamp_spills_into_count(original: Any, header: Any) -> torch.Tensor:
    """The timestamp's high byte reaches the count."""
    packed: torch.Tensor = original(header)
    packed[:, 12] ^= packed[:, 11]
    return packed


@fault(kills="KV-003", at=engines("write_metadata"))
def score_loses_its_last_bit(
    original: Any, store: Any, table: str, ids: torch.Tensor, words: torch.Tensor, mask: int
) -> None:
    """Scores are rounded."""
    original(store, table, ids, words & ~(1 << 32), mask)


def _swapped_states() -> dict[str, Any]:
    states = dict(OPTIMIZERS)
    kind = states["partial_rowwise_adam"]
    return states | {kind.name: dataclasses.replace(kind, states=tuple(reversed(kind.states)))}


momentum1_before_momentum2 = patched(
    "Partial row-wise Adam stores its states in the order of their names.",
    swap("twinproof.kvstore.options:OPTIMIZERS", _swapped_states()),
    kills="KV-005",
)


@fault(kills="KV-006", at="twinproof.kvstore.options:_round_up")
def states_packed_without_alignment(original: Any, value: Any, multiple: Any) -> Any:
    """A float32 state begins at an odd multiple of two bytes."""
    return (
        value
        if multiple == 2
        else original(value, 2)
        if multiple == 4 and value % 4 and value > 60
        else original(value, multiple)
    )


@fault(kills="KV-007", at="refimpl.kvstore:canonical")
def padding_of_the_caller_kept(original: Any, row_layout: Any, rows: torch.Tensor) -> torch.Tensor:
    """Padding bytes of whole rows are stored as they come."""
    result = rows.clone()
    result[:, 15] |= 0x80
    return result


@fault(kills="KV-078", at="twinproof.kvstore.rows:RowSource.slot")
def offsets_of_the_widest_table(original: Any, source: Any, table: str, state: str) -> Any:
    """State offsets are computed for the widest table of the store."""
    slot = original(source, table, state)
    widest = max(source.layout(name).state_begin_bytes for name in source.tables)
    room = source.layout(table).row_bytes - slot.end_bytes
    return dataclasses.replace(slot, offset_bytes=slot.offset_bytes + min(room, widest - 16) // 4 * 4)


@fault(kills="KV-079", at="twinproof.kvstore.options:RowLayout.from_json")
def json_forgets_state_dtypes(original: Any, cls: Any, text: str) -> Any:
    """A layout's JSON loses the dtypes of the states."""
    found = original(cls, text)
    return cls(found.embedding_dim, found.weight_dtype, found.optimizer)


padding_of_columns_kept = patched(
    "Columns are written with what stands between the values.",
    mutated("twinproof.kvstore.store:KVStore.place", "without_padding(layout, raw, begin)", "raw"),
    kills="KV-306",
)
padding_behind_the_last_value_kept = patched(
    "Columns that begin in the padding, or behind it, are written without a look at it.",
    mutated(
        "twinproof.kvstore.rows:without_padding",
        "if sum(behind - first for first, behind in values) == raw.shape[1]",
        "if not values or values[0][0] == 0 and sum(behind - first for first, behind in values) == raw.shape[1]",
    ),
    kills="KV-306",
)
narrow_fields_shifted_out = patched(
    "Counts of 32 bits are shifted out of their word.",
    mutated(
        "twinproof.kvstore.options:pack_header",
        "_field(header, name, ID_DTYPES).to(torch.int64)",
        "_field(header, name, ID_DTYPES)",
    ),
    kills="KV-348",
)
short_rows_unpacked = patched(
    "The header of a row is looked for where there is none.",
    mutated("twinproof.kvstore.options:unpack_header", "plain.shape[1] < HEADER_BYTES", "False"),
    kills="KV-348",
)
