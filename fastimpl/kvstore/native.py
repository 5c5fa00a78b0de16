"""What a store is told in C++, as versioned messages of 64-bit words; and statuses as errors."""

from __future__ import annotations

import struct
from typing import NamedTuple

import torch

from twinproof.errors import CapacityError, TwinproofError
from twinproof.kvstore.options import POLICIES, StoreOptions, signed64
from twinproof.kvstore.rows import RoundPlan
from twinproof.optimizers import OPTIMIZERS, Hyper

__all__ = [
    "AllocationError",
    "EvictionMessage",
    "TableMessage",
    "check_status",
    "hyper_values",
    "messages",
    "plan_message",
    "table_messages",
]

_FLOATS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_OUT_OF_MEMORY = -1


class AllocationError(TwinproofError, MemoryError):
    """Memory for rows, maps or snapshots could not be had; the store is as it was."""


def check_status(status: int, table: str, capacity: int | None = None) -> None:
    """Raise what a status means: AllocationError, or CapacityError."""
    if status == _OUT_OF_MEMORY:
        raise AllocationError("out of memory", got=None, expected="memory for rows", where=table)
    if status > 0:
        raise CapacityError("a batch larger than the table", got=status, expected=f"<= {capacity}", where=table)


def _word(text: str, value: float) -> int:
    """The bits of a float as an int64."""
    integer = {"<f": "<i", "<d": "<q"}[text]
    word: int = struct.unpack(integer, struct.pack(text, value))[0]
    return word


class TableMessage(NamedTuple):
    """One table, field by field as in ``csrc/kvstore/messages.h``. Floats travel as bits, dtypes as codes."""

    version: int
    row_bytes: int
    embedding_dim: int
    weight_type: int
    optimizer: int
    momentum1_offset_bytes: int
    momentum1_count: int
    momentum1_type: int
    momentum2_offset_bytes: int
    momentum2_count: int
    momentum2_type: int
    is_uniform: bool
    low_bits: int
    span_bits: int
    seed: int
    table_index: int
    counts_visits: bool
    logs_removals: bool
    capacity: int
    is_on_host: bool
    cache_rows: int
    ranks_by_count: bool


class EvictionMessage(NamedTuple):
    """One eviction round, field by field as in ``csrc/kvstore/messages.h``."""

    version: int
    policy: int
    ttl_seconds: int
    count_threshold: int
    timestamp_threshold: int
    decay_bits: int
    l2_threshold_bits: int
    now: int
    mark: int
    has_cutoff: bool
    cutoff_score: int
    cutoff_key: int


TABLE_VERSION, EVICTION_VERSION = 2, 1


def messages(*found: TableMessage | EvictionMessage) -> torch.Tensor:
    """Int64 [n, fields]."""
    return torch.tensor([[int(word) for word in message] for message in found], dtype=torch.int64, device="cpu")


def table_messages(options: StoreOptions) -> torch.Tensor:
    """Every table of a store, in order."""
    return messages(*(_table_message(options, index, table) for index, table in enumerate(options.layouts)))


def _table_message(options: StoreOptions, index: int, table: str) -> TableMessage:
    layout, initializer, policy = options.rows[table], options.initializers[table], options.evictions[table]
    first, second = layout.state_slots.get("momentum1"), layout.state_slots.get("momentum2")
    capacity, kind = options.capacities[table], policy.kind if policy else ""
    return TableMessage(
        version=TABLE_VERSION,
        row_bytes=layout.row_bytes,
        embedding_dim=layout.embedding_dim,
        weight_type=_FLOATS[layout.weight_dtype],
        optimizer=OPTIMIZERS[layout.optimizer].code,
        momentum1_offset_bytes=first.offset_bytes if first else 0,
        momentum1_count=first.count if first else 0,
        momentum1_type=_FLOATS[first.dtype] if first else 0,
        momentum2_offset_bytes=second.offset_bytes if second else 0,
        momentum2_count=second.count if second else 0,
        momentum2_type=_FLOATS[second.dtype] if second else 0,
        is_uniform=initializer.kind == "uniform",
        low_bits=_word("<f", initializer.low),
        span_bits=_word("<f", initializer.span),
        seed=signed64(options.seed),
        table_index=index,
        counts_visits=kind != "score",
        logs_removals=options.track_changes,
        capacity=-1 if capacity is None else capacity,
        is_on_host=options.row_memory == "host",
        cache_rows=options.cache_rows[table],
        ranks_by_count=kind in ("score", "count", "ttl_count"),
    )


def plan_message(plan: RoundPlan) -> torch.Tensor:
    """Int64 [1, fields]."""
    policy, cutoff = plan.policy, plan.cutoff or (0, 0)
    # No header holds more than 63 bits; a larger threshold compares the same.
    ttl_seconds, count_threshold, timestamp_threshold = (
        min(value, 2**63 - 1) for value in (policy.ttl_seconds, policy.count_threshold, policy.timestamp_threshold)
    )
    message = EvictionMessage(
        version=EVICTION_VERSION,
        policy=POLICIES.index(policy.kind),
        ttl_seconds=ttl_seconds,
        count_threshold=count_threshold,
        timestamp_threshold=timestamp_threshold,
        decay_bits=_word("<d", policy.decay),
        l2_threshold_bits=_word("<d", policy.l2_threshold),
        now=plan.now,
        mark=plan.mark,
        has_cutoff=plan.cutoff is not None,
        cutoff_score=cutoff[0],
        cutoff_key=cutoff[1],
    )
    return messages(message)


def hyper_values(hyper: Hyper) -> torch.Tensor:
    """Float64 [8], as ``Hyper`` of csrc/common/optimizers.h; rounded to float32 once, there."""
    values = [hyper.lr, hyper.eps, hyper.beta1, 1 - hyper.beta1, hyper.beta2, 1 - hyper.beta2]
    return torch.tensor([*values, hyper.step_size, hyper.root_correction], dtype=torch.float64, device="cpu")
