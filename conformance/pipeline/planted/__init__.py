"""Planted bugs of embeddings and pipelines: those that shipped in torchrec and FBGEMM first (facts/pipeline.md 0)."""

from conformance.pipeline.planted import (
    batches,
    callers,
    collections,
    key_value,
    lookups,
    operators,
    overlap,
    ranks,
    schedules,
    state,
    streams,
    types,
)

_MODULES = (
    batches,
    lookups,
    operators,
    ranks,
    state,
    schedules,
    streams,
    key_value,
    overlap,
    callers,
    types,
    collections,
)
PLANTED = tuple(bug for module in _MODULES for bug in module.PLANTED)

__all__ = ["PLANTED"]
