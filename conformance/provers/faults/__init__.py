"""Faults below the implementation: any program, crash-tested unmodified.

Prevents the two lies of crash tests: that a mocked ``open`` is a full disk, and that a file which survives a killed
process survives a power cut. A preloaded shim (``shim.c``) stands in front of libc's file-system calls, and a tracer
(``tracer.c``) in front of the kernel for code that bypasses libc; both are compiled here, count every call on a path
under a root, record it, and fail, shorten, delay or hold it, or kill the process at the n-th. What killing cannot show,
because the page cache survives it, :meth:`Trace.order_violations` reads off the recorded order of writes, syncs and
renames, and :func:`power_cut_states` generates: every state of the disk that a power cut may leave. What somebody
else does in the middle of a program, :func:`interrupted` does at each moment.
"""

from conformance.provers.faults.build import build_shim, build_tracer, why_no_shim, why_no_tracer
from conformance.provers.faults.client import FaultServer, RankOutcomes, run_program
from conformance.provers.faults.holding import letting_go
from conformance.provers.faults.model import (
    CALLS,
    CRASH_CALLS,
    READ_CALLS,
    WRITE_CALLS,
    Event,
    Fault,
    FaultError,
    Outcome,
    Trace,
)
from conformance.provers.faults.moments import Interruption, each_moment, interrupted
from conformance.provers.faults.order import Violation, order_violations
from conformance.provers.faults.power_cut import DiskState, Snapshot, power_cut_states
from conformance.provers.faults.session import Session

__all__ = [
    "CALLS",
    "CRASH_CALLS",
    "READ_CALLS",
    "WRITE_CALLS",
    "DiskState",
    "Event",
    "Fault",
    "FaultError",
    "FaultServer",
    "Interruption",
    "Outcome",
    "RankOutcomes",
    "Session",
    "Snapshot",
    "Trace",
    "Violation",
    "build_shim",
    "build_tracer",
    "each_moment",
    "interrupted",
    "letting_go",
    "order_violations",
    "power_cut_states",
    "run_program",
    "why_no_shim",
    "why_no_tracer",
]
