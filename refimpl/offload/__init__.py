"""Optimizer state and master weights in host memory between steps; the update stays on the device.

The meaning of ``fastimpl.offload``, which overlaps the transfers: everything comes back, the plain step runs,
everything leaves. What needs no second version (the step driver, which state moves, masters, checks) lives here once.
"""

from refimpl.offload.masters import MasterWeights
from refimpl.offload.offloader import OptimizerStateOffloader
from refimpl.offload.reports import OffloadStats, Residency

# What the suite may ask beyond the contract.
CAPABILITIES: frozenset[str] = frozenset()

__all__ = ["MasterWeights", "OffloadStats", "OptimizerStateOffloader", "Residency"]
