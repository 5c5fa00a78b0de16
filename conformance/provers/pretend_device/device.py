"""Watching a program on the pretend device."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

import torch

from conformance.harness.compare import Mismatch
from conformance.provers.pretend_device.record import Counts, Event, Record
from conformance.provers.pretend_device.sources import launchers_of
from conformance.provers.pretend_device.tensors import backend, memory_of

__all__ = ["PretendDevice", "on_host"]


class PretendDevice:
    """Watches a program; use as a context manager around it. Tensors live on after it, and are still judged.

    Args:
        sources: a folder of ``.cu`` files: the waits and uploads of their launchers are counted, and their operators
            are known to have kernels even where the loaded library was built without CUDA.

    Attributes:
        device: ``torch.device("pretend", 0)``: tensors and modules are sent there, or made there.
        record: what happened, in every thread.
    """

    def __init__(self, *, sources: Path | str | None = None) -> None:
        self.device, self.record = backend().device, Record()
        if sources is not None:
            backend().launchers.update(launchers_of(Path(sources)))

    def __enter__(self) -> PretendDevice:
        backend().be_importable()
        backend().watchers.append(self.record)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        backend().watchers.remove(self.record)

    @property
    def events(self) -> list[Event]:
        """In order of time."""
        return self.record.events

    @property
    def mark(self) -> int:
        """The number of events so far, for ``counts`` of a part."""
        return len(self.record.events)

    def counts(self, begin: int = 0, end: int | None = None) -> Counts:
        """Host waits, launches and copies from the mark ``begin`` to the mark ``end``."""
        return self.record.counts(begin, end)

    def pinned_empty(self, size_bytes: int) -> torch.Tensor:
        """Host memory that copies can run to without a wait, uint8, not initialised."""
        return backend().pinned_empty(size_bytes)

    def check(self) -> None:
        """Raise Mismatch where places were mixed, whether or not the program caught that; or a kernel was lacking."""
        found = [str(event) for event in self.events if event.kind in ("mix", "refused")]
        if found:
            raise Mismatch("what a GPU refuses", got="\n".join(found), expected="nothing")

    def check_no_waits(self, begin: int = 0, end: int | None = None) -> None:
        """Raise Mismatch where the host waited for the device, with every place."""
        found = self.record.waits(begin, end)
        if found:
            raise Mismatch("the host waits for the device", got="\n".join(found), expected="nowhere")


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The memory behind a tensor of the device, or the tensor itself: for comparisons, which nothing counts."""
    return memory_of(tensor)
