"""The devices that the suite can run on, by name. Nothing of torch is imported before one is asked for."""

from __future__ import annotations

from pathlib import Path

__all__ = ["DEVICES", "FIXTURES", "absent_capabilities", "kernel_sources", "prepare_device"]

DEVICES = ("cpu", "pretend", "simt")
# The fixture of the tests that run on a device, where that is not ``device``: a store that is itself on it.
FIXTURES = {"simt": "kvstore"}


def kernel_sources() -> Path | None:
    """The folder of fastimpl's CUDA sources, where the package has them."""
    import fastimpl

    found = [Path(folder) / "csrc" for folder in fastimpl.__path__]
    return next((path for path in found if path.is_dir()), None)


def prepare_device(name: str) -> None:
    """Make ``torch.device(name)`` known to torch; or, of kernels that are run on the host, bind the store to them."""
    if name == "pretend":
        from conformance.provers.pretend_device import PretendDevice

        PretendDevice(sources=kernel_sources())
    if name == "simt":
        from conformance.kvstore.simt import bind

        bind()


def absent_capabilities(name: str) -> frozenset[str]:
    """What an implementation does not have on that device, whatever it declares."""
    if name != "simt":
        return frozenset()
    from conformance.kvstore.simt import LACKS

    return LACKS
