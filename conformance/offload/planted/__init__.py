"""Planted bugs of offload; many of them shipped upstream."""

from conformance.offload.planted import (
    behaviour,
    cpu_step,
    foreign,
    keeping,
    lasting,
    loading,
    numbers,
    ordering,
    programs,
    refusals,
    variants,
)

PLANTED = (
    *ordering.PLANTED,
    *behaviour.PLANTED,
    *keeping.PLANTED,
    *cpu_step.PLANTED,
    *foreign.PLANTED,
    *lasting.PLANTED,
    *loading.PLANTED,
    *numbers.PLANTED,
    *programs.PLANTED,
    *refusals.PLANTED,
    *variants.PLANTED,
)

__all__ = ["PLANTED"]
