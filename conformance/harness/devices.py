"""The devices that the suite can run on, by name. Nothing of torch is imported before one is asked for."""

from __future__ import annotations

from pathlib import Path

__all__ = ["DEVICES", "kernel_sources", "prepare_device"]

DEVICES = ("cpu", "pretend")


def kernel_sources() -> Path | None:
    """The folder of fastimpl's CUDA sources, where the package has them."""
    import fastimpl

    found = [Path(folder) / "csrc" for folder in fastimpl.__path__]
    return next((path for path in found if path.is_dir()), None)


def prepare_device(name: str) -> None:
    """Make ``torch.device(name)`` known to torch."""
    if name == "pretend":
        from conformance.provers.pretend_device import PretendDevice

        PretendDevice(sources=kernel_sources())
