"""Optimizer state and master weights in host memory between steps, transfers overlapped with the update.

Drop-in for Megatron's state offloader and for hand-written ``.to("cpu")`` loops; meaning: ``refimpl.offload``.
"""

from fastimpl import ops
from fastimpl.offload.offloader import OptimizerStateOffloader
from refimpl.offload import MasterWeights, OffloadStats, Residency

_BUILT = frozenset({"fused_cpu_adam", "packed_tensors"} if ops.available() else ())
CAPABILITIES = _BUILT | {"bounded_window", "coalesced_copies", "overlapped_transfers", "prefetched_chunks"}

__all__ = ["MasterWeights", "OffloadStats", "OptimizerStateOffloader", "Residency"]
