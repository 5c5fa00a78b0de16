"""Planted bugs of checkpoint: small faults, many of which shipped in torch, torchtitan or safetensors."""

from conformance.checkpoint.planted import (
    crashes,
    data,
    failures,
    files,
    hostile,
    keeping,
    layout,
    loading,
    naming,
    publication,
    reading,
    reference,
    staging,
    surface,
    surroundings,
    writing,
)

_MODULES = (
    *(data, writing, layout, naming, files, loading, reading, hostile),
    *(publication, crashes, failures, keeping, surroundings, reference, staging, surface),
)
PLANTED = tuple(bug for module in _MODULES for bug in module.PLANTED)

__all__ = ["PLANTED"]
