"""Optimizer state and master weights in host memory between steps; the update stays on the device.

The meaning of ``fastimpl.offload``, which overlaps the transfers: everything comes back, the plain step runs,
everything leaves. What needs no second version (the step driver, which state moves, masters, checks) lives here once.
"""

from twinproof.offload.masters import MasterWeights
from twinproof.offload.offloader import OptimizerStateOffloader
from twinproof.offload.reports import OffloadStats, Residency

# What the suite may ask beyond the contract.
CAPABILITIES: frozenset[str] = frozenset()

__all__ = ["MasterWeights", "OffloadStats", "OptimizerStateOffloader", "Residency"]
