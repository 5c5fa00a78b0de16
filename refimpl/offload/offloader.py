"""The reference offloader: everything comes back, the plain step runs, everything leaves; the host waits each time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from refimpl.offload.base import OffloaderBase
from refimpl.offload.rebind import rebind
from refimpl.offload.states import Bundle, bindings, view_of

__all__ = ["OptimizerStateOffloader"]


class _Blocking:
    """Copies that are over when they return."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def device_empty(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, device=self.device)

    def host_empty(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8)

    def is_capturing(self) -> bool:
        return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class OptimizerStateOffloader(OffloaderBase):
    __doc__ = OffloaderBase.__doc__

    def default_engine(self, device: torch.device) -> Any:
        """Blocking copies."""
        return _Blocking(device)

    def place(self, bundles: list[Bundle]) -> list[Bundle]:
        """One piece of host memory for each bundle."""
        for bundle in bundles:
            self._memory[bundle.param] = self.host_empty(bundle.span_bytes)
            self.counts.host_bytes += bundle.span_bytes
        self.counts.chunk_count = 1
        return bundles

    def unplace(self, bundle: Bundle) -> None:
        """Forget one piece."""
        self.to_device([bundle])
        self.counts.host_bytes -= self._memory.pop(bundle.param).numel()

    def release(self) -> None:
        """Let every piece go."""
        self._memory.clear()

    @property
    def _memory(self) -> dict[torch.Tensor, torch.Tensor]:
        found: dict[torch.Tensor, torch.Tensor] = self.__dict__.setdefault("_host", {})
        return found

    def step(self, arithmetic: Callable[[], None]) -> None:
        """All of it at once."""
        self.to_device(self.bundles)
        try:
            masters = self.masters.pairs if self.masters is not None else {}
            if self.masters is not None:
                self.masters.begin(masters)
            arithmetic()
            if self.masters is not None:
                self.masters.end(masters)
        finally:
            self.to_host(self.bundles)

    def to_host(self, bundles: Iterable[Bundle]) -> None:
        """Copy and bind, tensor by tensor."""
        for bundle in bundles:
            for name, tensor in bindings(self.optimizer, bundle):
                if not self.is_on_host(tensor):
                    home = view_of(self._memory[bundle.param], bundle.places[name], 0)
                    self.engine.copy(home, tensor)
                    rebind(self.optimizer, bundle, name, home)
                    self.counts.d2h_bytes += bundle.places[name].size_bytes
        self.settle()

    def to_device(self, bundles: Iterable[Bundle]) -> None:
        """Copy and bind, tensor by tensor."""
        for bundle in bundles:
            for name, tensor in bindings(self.optimizer, bundle):
                if self.is_on_host(tensor):
                    memory = self.engine.device_empty(bundle.places[name].offset_bytes + tensor.nbytes)
                    here = view_of(memory, bundle.places[name], 0)
                    self.engine.copy(here, tensor)
                    rebind(self.optimizer, bundle, name, here)
                    self.counts.h2d_bytes += bundle.places[name].size_bytes
        self.settle()

    def settle(self) -> None:
        """Wait for the copies, where the engine does not."""
        self.wait_for_copy()

    def is_on_host(self, tensor: torch.Tensor) -> bool:
        """By the memory it lies in."""
        owners = {memory.untyped_storage().data_ptr() for memory in self._memory.values()}
        return tensor.untyped_storage().data_ptr() in owners
