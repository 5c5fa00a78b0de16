"""A device that exists only to find what a first run on a GPU would find: tensors say "pretend" and hold host memory.

Prevents host memory where memory of the device belongs, and waits that nobody meant. A program that runs on the CPU
mixes host and device tensors without a sign; here that is an error, as on a GPU, and every host read, every copy and
every launch is counted, with file and line. Autograd, modules and optimizers of torch work as they are:

    ::

        with PretendDevice() as device:
            weight = torch.ones(4, requires_grad=True, device=device.device)
            (weight * 2).sum().backward()
            weight.grad.tolist()           # counted: one wait, one copy to the host
            weight + torch.ones(4)         # MixedPlacesError
        print(device.counts(), device.record.waits())

What it cannot show: the order of streams (``virtual_device`` does), races within kernels, time, and what only a
driver refuses. Waits inside C++ launchers are read from their sources.
"""

from conformance.provers.pretend_device.device import PretendDevice, on_host
from conformance.provers.pretend_device.engine import PretendEngine
from conformance.provers.pretend_device.errors import HostReadError, MixedPlacesError, NoKernelError
from conformance.provers.pretend_device.record import Counts, Event, Traffic
from conformance.provers.pretend_device.sources import Launcher, launchers_of
from conformance.provers.pretend_device.tensors import PretendStorage, PretendTensor

__all__ = [
    "Counts",
    "Event",
    "HostReadError",
    "Launcher",
    "MixedPlacesError",
    "NoKernelError",
    "PretendDevice",
    "PretendEngine",
    "PretendStorage",
    "PretendTensor",
    "Traffic",
    "launchers_of",
    "on_host",
]
