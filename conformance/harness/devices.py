"""The devices that the suite can run on, by name. Nothing of torch is imported before one is asked for."""

from __future__ import annotations

from pathlib import Path

__all__ = ["DEVICES", "FIXTURES", "absent_capabilities", "kernel_sources", "prepare_device"]

DEVICES = ("cpu", "pretend", "simt", "simt-host", "cuda", "cuda-host")
# The fixtures by which tests run on a device. A store is itself on it, and so are those of ranks.
FIXTURES = {
    "pretend": ("device",),
    "simt": ("kvstore", "rank_pool"),
    "simt-host": ("kvstore", "rank_pool"),
    "cuda": ("device", "kvstore", "rank_pool"),
    "cuda-host": ("kvstore", "rank_pool"),
}
_OF_STORES = ("simt", "simt-host", "cuda", "cuda-host")


def kernel_sources() -> Path | None:
    """The folder of fastimpl's CUDA sources, where the package has them."""
    import fastimpl

    found = [Path(folder) / "csrc" for folder in fastimpl.__path__]
    return next((path for path in found if path.is_dir()), None)


def prepare_device(name: str) -> None:
    """Make ``torch.device(name)`` known to torch, and bind stores to it where they can lie there."""
    if name == "pretend":
        from conformance.provers.pretend_device import PretendDevice

        PretendDevice(sources=kernel_sources())
    if name in _OF_STORES:
        from conformance.kvstore.simt import bind

        bind(name)


def absent_capabilities(name: str) -> frozenset[str]:
    """What an implementation does not have on that device, whatever it declares."""
    if name not in _OF_STORES:
        return frozenset()
    from conformance.kvstore.simt import LACKS

    return LACKS
