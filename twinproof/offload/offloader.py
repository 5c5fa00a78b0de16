"""The reference offloader: everything comes back, the plain step runs, everything leaves; the host waits each time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from twinproof.offload.adam import adam_step
from twinproof.offload.base import OffloaderBase
from twinproof.offload.bookkeeping import Wanted
from twinproof.offload.cpu_step import Update, narrowed, prepare_states, updates_of
from twinproof.offload.rebind import rebind
from twinproof.offload.states import Bundle, Place, bindings, local_of, view_of

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
        if self.step_device == "cpu":
            self._step_on_host(arithmetic)
            return
        self.step_whole(arithmetic)

    def _step_on_host(self, arithmetic: Callable[[], None]) -> None:
        """What was not selected is stepped where it is; the rest by the host, parameter by parameter."""
        updates = updates_of(self.optimizer, self.bundles, self.masters)
        moving = {bundle.param for bundle in self.bundles}
        rest = {param for group in self.optimizer.param_groups for param in group["params"]} - moving
        if rest:
            masters = [param for param in rest if self._is_master(param)]
            if self.masters is not None:
                self.masters.begin(masters)
            with narrowed(self.optimizer, rest):
                arithmetic()
            if self.masters is not None:
                self.masters.end(masters)
        for update in updates:
            self._update_on_host(update)

    def _update_on_host(self, update: Update) -> None:
        """The gradient comes down, and the weight where there is no master; the new weight goes up."""
        bundle, places = update.bundle, update.bundle.places
        memory = self._memory[bundle.param]
        prepare_states(self.optimizer, update, lambda n: view_of(memory, places[n], 0) if n in places else None)
        grad, weight = self._beside(update.grad), self._beside(update.weight)
        self.engine.copy(grad, update.grad)
        self.counts.d2h_bytes += grad.nbytes
        if not update.has_master:
            self.engine.copy(weight, update.weight)
            self.counts.d2h_bytes += weight.nbytes
        self.settle()
        states = update.states(self.optimizer)
        master, rounded = (local_of(bundle.param.detach()), weight) if update.has_master else (weight, None)
        adam_step(update.advance(self.optimizer), grad, master, *states, rounded)
        self.engine.copy(update.weight, weight)
        self.counts.h2d_bytes += weight.nbytes
        self.settle()
        if self.masters is not None and update.has_master:
            self.masters.took(bundle.param)

    def _beside(self, tensor: torch.Tensor) -> torch.Tensor:
        """Host memory for a tensor of the device."""
        form = Place(0, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()))
        return view_of(self.host_empty(form.size_bytes), form, 0)

    def to_host(
        self, bundles: Iterable[Bundle], *, only: Wanted | None = None, copies: bool = True, binds: bool = True
    ) -> None:
        """Copy and bind, tensor by tensor."""
        for bundle in bundles:
            for name, tensor in bindings(self.optimizer, bundle):
                if not self.is_on_host(tensor) and (only is None or only(bundle, name)):
                    home = view_of(self._memory[bundle.param], bundle.places[name], 0)
                    if copies:
                        self.engine.copy(home, tensor)
                        self.counts.d2h_bytes += bundle.places[name].size_bytes
                    if binds:
                        rebind(self.optimizer, bundle, name, home)
        self.settle()

    def to_device(self, bundles: Iterable[Bundle], *, for_good: bool = False) -> None:
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
