"""Optimizer state and master weights in host memory between steps, transfers overlapped with the update.

Drop-in for Megatron's state offloader and for hand-written ``.to("cpu")`` loops; meaning: ``refimpl.offload``.
"""

from fastimpl import ops
from fastimpl.offload.transfers import StreamedTransfers
from twinproof.offload import offloader
from twinproof.offload.driver import OffloadStats
from twinproof.offload.offloader import Residency
from twinproof.offload.states import MasterWeights

_BUILT = frozenset(
    {"copies_in_one_call", "fused_cpu_adam", "fused_updates", "host_slabs", "packed_tensors"} if ops.available() else ()
)
CAPABILITIES = _BUILT | {"bounded_window", "coalesced_copies", "overlapped_transfers", "prefetched_chunks"}

__all__ = ["MasterWeights", "OffloadStats", "OptimizerStateOffloader", "Residency"]


class OptimizerStateOffloader(offloader.OptimizerStateOffloader, transfers=StreamedTransfers):
    __doc__ = offloader.OptimizerStateOffloader.__doc__
