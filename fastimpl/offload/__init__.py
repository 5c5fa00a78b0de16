"""Optimizer state and master weights in host memory between steps, transfers overlapped with the update.

Drop-in for Megatron's state offloader and for hand-written ``.to("cpu")`` loops; meaning: ``refimpl.offload``.
"""

from fastimpl.offload.offloader import OptimizerStateOffloader
from refimpl.offload import MasterWeights, OffloadStats, Residency

CAPABILITIES = frozenset(
    {
        "bounded_window",
        "coalesced_copies",
        "fused_cpu_adam",
        "overlapped_transfers",
        "packed_tensors",
        "prefetched_chunks",
    }
)

__all__ = ["MasterWeights", "OffloadStats", "OptimizerStateOffloader", "Residency"]
