"""What a store is told in C++: each table as 19 words, each policy as 11; and statuses as errors."""

from __future__ import annotations

import struct

import torch

from twinproof.errors import CapacityError, TwinproofError
from twinproof.kvstore.options import POLICIES, StoreOptions, signed64
from twinproof.kvstore.rows import RoundPlan
from twinproof.optimizers import OPTIMIZERS, Hyper

__all__ = ["AllocationError", "check_status", "format_words", "hyper_values", "plan_words"]

_FLOATS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_OUT_OF_MEMORY = -1


class AllocationError(TwinproofError, MemoryError):
    """Memory for rows, maps or snapshots could not be had; the store is as it was."""


def check_status(status: int, table: str, capacity: int | None = None) -> None:
    """Raise what a status means: AllocationError, or CapacityError."""
    if status == _OUT_OF_MEMORY:
        raise AllocationError("out of memory", where=table)
    if status > 0:
        raise CapacityError("a batch larger than the table", got=status, expected=f"<= {capacity}", where=table)


def _word(text: str, value: float) -> int:
    """The bits of a float as an int64."""
    integer = {"<f": "<i", "<d": "<q"}[text]
    word: int = struct.unpack(integer, struct.pack(text, value))[0]
    return word


def format_words(options: StoreOptions) -> torch.Tensor:
    """Int64 [tables, 19], as ``read_format`` in kvstore.cpp reads them."""
    rows = []
    for index, table in enumerate(options.layouts):
        layout, initializer, policy = options.rows[table], options.initializers[table], options.evictions[table]
        slots = []
        for name in ("momentum1", "momentum2"):
            slot = layout.state_slots.get(name)
            slots += [0, 0, 0] if slot is None else [slot.offset_bytes, slot.count, _FLOATS[slot.dtype]]
        capacity, kind = options.capacities[table], policy.kind if policy else ""
        row = [
            layout.row_bytes,
            layout.embedding_dim,
            _FLOATS[layout.weight_dtype],
            OPTIMIZERS[layout.optimizer].code,
            *slots,
        ]
        row += [initializer.kind == "uniform", _word("<f", initializer.low), _word("<f", initializer.span)]
        row += [signed64(options.seed), index, kind != "score", options.track_changes]
        row += [-1 if capacity is None else capacity, kind in ("score", "count", "ttl_count")]
        rows.append([int(word) for word in row])
    return torch.tensor(rows, dtype=torch.int64)


def plan_words(plan: RoundPlan) -> torch.Tensor:
    """Int64 [11], as ``kv_evict`` reads them."""
    policy = plan.policy
    words = [POLICIES.index(policy.kind), policy.ttl_seconds, policy.count_threshold, policy.timestamp_threshold]
    words += [_word("<d", policy.decay), _word("<d", policy.l2_threshold), plan.now, plan.mark]
    words += [0, 0, 0] if plan.cutoff is None else [1, *plan.cutoff]
    # No header holds more than 63 bits; a larger threshold compares the same.
    return torch.tensor([min(word, 2**63 - 1) for word in words], dtype=torch.int64)


def hyper_values(hyper: Hyper) -> torch.Tensor:
    """Float64 [8], as ``Hyper`` in kv_update.h; rounded to float32 once, there."""
    values = [hyper.lr, hyper.eps, hyper.beta1, 1 - hyper.beta1, hyper.beta2, 1 - hyper.beta2]
    return torch.tensor([*values, hyper.step_size, hyper.root_correction], dtype=torch.float64)
