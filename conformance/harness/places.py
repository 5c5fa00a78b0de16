"""Programs on the pretend device beside the same on the host: no mix of places, and the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from conformance.harness.devices import kernel_sources
from conformance.provers.pretend_device import PretendDevice


@contextmanager
def on_pretend() -> Iterator[PretendDevice]:
    """The device, watched; what a GPU refuses is named in the end, whatever the program made of the error."""
    device = PretendDevice(sources=kernel_sources())
    try:
        with device:
            yield device
    finally:
        device.check()


def copies_of_program(device: PretendDevice, begin: int) -> list[str]:
    """Copies to the device since a mark, but those that launchers make of their arguments."""
    found = [event for event in device.events[begin:] if event.kind == "to device"]
    return [str(event) for event in found if not event.what.startswith("twinproof::")]
