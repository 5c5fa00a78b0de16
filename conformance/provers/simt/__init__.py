"""Kernels proven without a GPU: one source, nvcc and a host on which every thread is a fiber.

Prevents the bugs that a run on a device shows by chance: a missing barrier, a stale read, a wrong mask, a vector at an
odd address, a result that depends on who comes first. Kernels reach memory through ``simt.h`` alone, so that here each
access is a point at which any other thread may run, is compared with all accesses that it is not ordered after, and is
checked for bounds, alignment and bytes that nobody wrote. A report names the kernel, both lines and a schedule that
replays. ``docs/simt.md`` has a kernel of one's own in ten lines, and what this cannot see.
"""

from conformance.provers.simt.build import Planted, SimtError, build, compile_flags, include_folders, why_no_prover
from conformance.provers.simt.device import Usage, device_usage, why_no_nvcc
from conformance.provers.simt.lint import violations
from conformance.provers.simt.run import KINDS, POLICIES, Fault, Place, Verdict, prove, replay

__all__ = [
    "KINDS",
    "POLICIES",
    "Fault",
    "Place",
    "Planted",
    "SimtError",
    "Usage",
    "Verdict",
    "build",
    "compile_flags",
    "device_usage",
    "include_folders",
    "prove",
    "replay",
    "violations",
    "why_no_nvcc",
    "why_no_prover",
]
