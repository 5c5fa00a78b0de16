"""Planted bugs of embeddings and pipelines: those that shipped in torchrec and FBGEMM first."""

from conformance.pipeline.planted import (
    arguments,
    batches,
    callers,
    collections,
    key_value,
    lookups,
    operators,
    overlap,
    ranks,
    reducers,
    schedules,
    stages,
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
    reducers,
    arguments,
    stages,
    types,
    collections,
)
PLANTED = tuple(bug for module in _MODULES for bug in module.PLANTED)

__all__ = ["PLANTED"]
