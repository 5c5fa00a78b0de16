"""A device with streams that exists only as a proof: ordinary torch ops on the CPU, seen as work on an accelerator.

Prevents orders that hold by luck. Two layers, because each sees what the other cannot. The *proof* watches one run of
a program, keeps a vector clock for each stream, each event and the host, and reports every pair of accesses that no
edge orders, whatever order they happened in here. The *demonstration* runs the copies that the engine queues as late
as the edges allow, on memory that is poisoned when it is handed out, so that a missing edge becomes wrong bytes.

The proof is of the program as it was traced: another branch of host control flow is another program. Memory is of the
device unless it came from ``host_empty`` or was computed from such memory alone.
"""

from conformance.provers.virtual_device.device import VirtualDevice
from conformance.provers.virtual_device.engine import Costs, VirtualClock, VirtualEngine
from conformance.provers.virtual_device.tracker import Hazard

__all__ = ["Costs", "Hazard", "VirtualClock", "VirtualDevice", "VirtualEngine"]
