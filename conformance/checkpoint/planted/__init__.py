"""Planted bugs of checkpoint: small faults, those that shipped upstream first (facts/checkpoint.md 1.10, D1-D24)."""

from conformance.checkpoint.planted import (
    crashes,
    data,
    failures,
    files,
    hostile,
    layout,
    loading,
    publication,
    surroundings,
)

_MODULES = (data, layout, files, loading, hostile, publication, crashes, failures, surroundings)
PLANTED = tuple(bug for module in _MODULES for bug in module.PLANTED)

__all__ = ["PLANTED"]
