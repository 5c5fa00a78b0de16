"""Planted bugs of offload; those that shipped upstream carry their number (facts/offload.md 7, M1-M24)."""

from conformance.offload.planted import behaviour, cpu_step, keeping, ordering

PLANTED = (*ordering.PLANTED, *behaviour.PLANTED, *keeping.PLANTED, *cpu_step.PLANTED)

__all__ = ["PLANTED"]
