"""Planted bugs of the row store: the hazards of FBGEMM's first."""

from conformance.kvstore.planted import (
    bounds,
    corners,
    hazards,
    lifecycle,
    loading,
    moving,
    operators,
    real,
    saving,
    training,
    waiting,
    writing,
)

_MODULES = (hazards, writing, saving, loading, lifecycle, corners, bounds, waiting, operators, real, moving, training)
PLANTED = tuple(bug for module in _MODULES for bug in module.PLANTED)

__all__ = ["PLANTED"]
