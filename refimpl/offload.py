"""Optimizer state and master weights in host memory between steps: the meaning of ``fastimpl.offload``.

Everything comes back, the plain step runs, everything leaves; the host waits for each copy. Which tensors move, who
drives the step, masters and refusals are policy: ``twinproof.offload``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from refimpl.optimizers import adam_step
from twinproof.engine import Engine, engine_for
from twinproof.offload import offloader
from twinproof.offload.driver import Arithmetic, MovePlan, OffloadStats, Update, Wanted, prepare_states, updates_of
from twinproof.offload.offloader import Residency
from twinproof.offload.states import Bundle, MasterWeights, Place, beside, bindings, local_of, narrowed, rebind, view_of

# What the suite may ask beyond the contract.
CAPABILITIES: frozenset[str] = frozenset()

__all__ = ["MasterWeights", "OffloadStats", "OptimizerStateOffloader", "Residency"]


class Blocking:
    """Transfers tensor by tensor, each over when its call returns."""

    def __init__(self, plan: MovePlan) -> None:
        self.plan, self.engine = plan, plan.engine
        self._memory: dict[torch.Tensor, torch.Tensor] = {}  # On the host, by parameter.

    @staticmethod
    def default_engine(device: torch.device) -> Engine:
        """The device's own."""
        return engine_for(device)

    def place(self, bundles: list[Bundle]) -> None:
        """One piece of host memory for each parameter."""
        self._memory |= {bundle.param: self.plan.host_empty(bundle.span_bytes) for bundle in bundles}
        self.plan.counts.host_bytes += sum(bundle.span_bytes for bundle in bundles)
        self.plan.counts.chunk_count = 1

    def unplace(self, bundles: list[Bundle]) -> None:
        """Forget their pieces."""
        self.to_device(bundles)
        self.plan.counts.host_bytes -= sum(self._memory.pop(bundle.param).numel() for bundle in bundles)

    def release(self) -> None:
        """Let every piece go."""
        self._memory.clear()

    def is_on_host(self, tensor: torch.Tensor) -> bool:
        """By the memory it lies in."""
        owners = {memory.untyped_storage().data_ptr() for memory in self._memory.values()}
        return tensor.untyped_storage().data_ptr() in owners

    def home(self, bundle: Bundle, name: str) -> torch.Tensor:
        """In the parameter's own piece."""
        return view_of(self._memory[bundle.param], bundle.places[name], 0)

    def untidy(self) -> list[Bundle]:
        """All are looked at."""
        return self.plan.bundles

    def to_host(
        self, bundles: Iterable[Bundle], *, only: Wanted | None = None, copies: bool = True, binds: bool = True
    ) -> None:
        """Copy and bind, tensor by tensor."""
        for bundle in bundles:
            for name, tensor in bindings(self.plan.optimizer, bundle):
                if not self.is_on_host(tensor) and (only is None or only(bundle, name)):
                    home = self.home(bundle, name)
                    if copies:
                        self.engine.copy(home, tensor)
                        self.plan.counts.d2h_bytes += bundle.places[name].size_bytes
                    if binds:
                        rebind(self.plan.optimizer, bundle, name, home)
        self.settle()

    def to_device(self, bundles: Iterable[Bundle], *, for_good: bool = False) -> None:
        """Copy and bind, tensor by tensor; each gets memory of its own anyway."""
        for bundle in bundles:
            for name, tensor in bindings(self.plan.optimizer, bundle):
                if self.is_on_host(tensor):
                    rebind(self.plan.optimizer, bundle, name, beside(self.engine, tensor))
                    self.plan.counts.h2d_bytes += bundle.places[name].size_bytes
        self.settle()

    def send_planned(self) -> bool:
        """Nothing is planned beyond each tensor's own copy."""
        return False

    def fetch(self) -> None:
        """Nothing begins before the step."""

    def settle(self) -> None:
        """Wait for the copies."""
        self.plan.wait_for_copy()

    def settle_for_writing(self) -> None:
        """The same: nothing else is on its way."""
        self.settle()

    def leaving_bytes(self) -> int:
        """None: every copy was waited for."""
        return 0

    def step(self, arithmetic: Arithmetic, step_whole: Callable[[Arithmetic], None]) -> bool:
        """All of it at once; on the host, parameter by parameter."""
        if self.plan.options.step_device == "device":
            step_whole(arithmetic)
            return False
        updates = updates_of(self.plan.optimizer, self.plan.bundles, self.plan.masters)
        self._step_the_rest(arithmetic)
        for update in updates:
            self._update_on_host(update)
        return False

    def _step_the_rest(self, arithmetic: Arithmetic) -> None:
        """What was not selected is stepped where it is."""
        optimizer, masters = self.plan.optimizer, self.plan.masters
        rest = {p for group in optimizer.param_groups for p in group["params"]} - {b.param for b in self.plan.bundles}
        if not rest:
            return
        own = [param for param in rest if self.plan.is_master(param)]
        if masters is not None:
            masters.begin(own)
        arithmetic(self.plan.part(narrowed(optimizer.param_groups, rest)))
        if masters is not None:
            masters.end(own)

    def _update_on_host(self, update: Update) -> None:
        """The gradient comes down, and the weight where there is no master; the new weight goes up."""
        plan, bundle = self.plan, update.bundle
        prepare_states(plan.optimizer, update, lambda name: self.home(bundle, name))
        grad, weight = self._beside(update.grad), self._beside(update.weight)
        self.engine.copy(grad, update.grad)
        plan.counts.d2h_bytes += grad.nbytes
        if not update.has_master:
            self.engine.copy(weight, update.weight)
            plan.counts.d2h_bytes += weight.nbytes
        self.settle()
        master, rounded = (local_of(bundle.param.detach()), weight) if update.has_master else (weight, None)
        adam_step(update.advance(plan.optimizer), grad, master, *update.states(plan.optimizer), rounded)
        self.engine.copy(update.weight, weight)
        plan.counts.h2d_bytes += weight.nbytes
        self.settle()
        if plan.masters is not None and update.has_master:
            plan.masters.took(bundle.param)

    def _beside(self, tensor: torch.Tensor) -> torch.Tensor:
        """Host memory for a tensor of the device."""
        form = Place(0, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()))
        return view_of(self.plan.host_empty(form.size_bytes), form, 0)


class OptimizerStateOffloader(offloader.OptimizerStateOffloader, transfers=Blocking):
    __doc__ = offloader.OptimizerStateOffloader.__doc__
