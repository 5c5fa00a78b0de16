"""Planted bugs of checkpoint: small faults, those that shipped upstream first (facts/checkpoint.md 1.10, D1-D24)."""

from conformance.checkpoint.planted import crashes, data, failures, files, hostile, loading, publication

PLANTED = (
    *data.PLANTED,
    *files.PLANTED,
    *loading.PLANTED,
    *hostile.PLANTED,
    *publication.PLANTED,
    *crashes.PLANTED,
    *failures.PLANTED,
)

__all__ = ["PLANTED"]
