"""What both offloaders share: options, refusals, bookkeeping, checkpoints. No transfer happens here."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from twinproof.errors import ConfigError, OffloadConflictError
from twinproof.offload.bookkeeping import Bookkeeping
from twinproof.offload.driver import StepDriver, check_attachment, check_devices, check_gradients
from twinproof.offload.kinds import known_kind, unwrapped
from twinproof.offload.loading import check_saved, copied, load_states
from twinproof.offload.masters import MasterWeights
from twinproof.offload.options import check_options, either
from twinproof.offload.release import Leaving
from twinproof.offload.reports import OffloadStats, Residency
from twinproof.offload.states import MASTER, Bundle, bindings, local_of

__all__ = ["OffloaderBase"]


class OffloaderBase(Bookkeeping):
    """Constructor and verbs of ``OptimizerStateOffloader``; see the subclasses.

    Args:
        optimizer: one of torch's, one that derives from ``torch.optim.Optimizer``, or a wrapper with one as its
            ``optimizer`` (Megatron's ``DistributedOptimizer``, accelerate's); its ``step`` is taken over, its class,
            groups and hooks stay as they are. One that is none of torch's is stepped as a whole: see ``chunk_bytes``.
        fraction: the share of the bytes that moves, by whole parameters in their order; 0: nothing does.
        chunk_bytes: how much is on the device at a time during a step, by whole parameters; 0: all of it. All of it
            is there too where parameters may depend on each other (``is_separable`` is False), or with ``on_request``.
        slots: chunks that may be on the device at once.
        master_weights: the masters that the optimizer steps; they move as its states do.
        step_device: ``device``, or ``cpu``: Adam and AdamW are stepped in host memory (``twinproof.offload.adam``),
            gradients come down and weights go up.
        pin_memory: host memory that copies can run to at full speed.
        release: when memory of the device goes. ``at_offload``: as soon as its copy out is queued; a step ends with
            that. ``on_request``: a step leaves everything on the device, ``offload()`` copies it out, and it goes with
            ``release_gpu_memory()``, so that masters can be read in between, as Megatron's loops do. None:
            ``on_request`` for masters that a wrapper rounds after the step, else ``at_offload``.
        engine: streams, copies and memory, see ``fastimpl.streams``; None: that of the parameters' device.

    Raises:
        OffloadConflictError: attached twice, a CPU-step optimizer, or CPU parameters without an engine that stands in
            for a device. UnsupportedError: what is no optimizer, or one of sparse gradients. ConfigError: an option.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        fraction: float = 1.0,
        chunk_bytes: int = 64 << 20,
        slots: int = 2,
        master_weights: MasterWeights | None = None,
        step_device: str = "device",
        pin_memory: bool = True,
        engine: Any = None,
        release: str | None = None,
    ) -> None:
        optimizer, kept_masters = unwrapped(optimizer)
        check_attachment(optimizer)
        check_options(optimizer, fraction, chunk_bytes, slots, step_device, release)
        if kept_masters and (master_weights is not None or step_device == "cpu"):
            got = f"step_device={step_device!r}, master_weights={'given' if master_weights is not None else None}"
            raise ConfigError("the wrapper keeps and rounds its masters itself", got=got, where="optimizer")
        self.optimizer, self.fraction, self.chunk_bytes, self.slots = optimizer, fraction, chunk_bytes, slots
        self.masters, self.pin_memory, self.step_device = master_weights, pin_memory, step_device
        self.is_separable = known_kind(type(optimizer)) is not None
        self.release_stage = release or ("on_request" if kept_masters else "at_offload")
        self._kept_masters = set(kept_masters)
        self._leaving = Leaving()
        self._foreseen: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        self._flags: dict[int, dict[str, bool]] = {}
        if master_weights is not None:
            master_weights.check_stepped_by(optimizer)
        self.engine = self._engine_of(engine)
        self.counts = OffloadStats()
        self.bundles: list[Bundle] = []
        self._known: set[torch.Tensor] = set()
        self._listed_count = 0
        self._adopt_params()
        self._driver = StepDriver(optimizer, self, self._run)
        self._handles: list[Any] = [
            optimizer.register_state_dict_pre_hook(lambda _: self.settle()),
            optimizer.register_load_state_dict_pre_hook(check_saved),
            optimizer.register_load_state_dict_pre_hook(lambda *_: self.settle_for_writing()),
            optimizer.register_load_state_dict_post_hook(lambda _: self.offload()),
        ]
        self.offload()

    # Verbs.

    def offload(
        self,
        states: bool = True,
        masters: bool = True,
        *,
        offload_optimizer_states: bool | None = None,
        offload_master_weights: bool | None = None,
    ) -> None:
        """Send to the host what is on the device: after a load, or before the first step.

        A step ends with it, unless memory is released ``on_request``. States and masters move where they are asked
        to; the long names are Megatron's. Raises ConfigError when a name and its long form contradict each other.
        """
        self._check_open()
        states = either("states", states, "offload_optimizer_states", offload_optimizer_states)
        masters = either("masters", masters, "offload_master_weights", offload_master_weights)
        self._adopt_params()
        if states and masters and self.release_stage == "at_offload":
            if not self.send_as_planned():
                self._refit()
                self.to_host(self.bundles)
            return
        if states:
            self._refit()

        def only(_: Bundle, name: str) -> bool:
            return masters if name == MASTER else states

        if self.release_stage == "on_request":
            self._leaving.note(self, only)
        self.to_host(self.bundles, only=only, binds=self.release_stage == "at_offload")

    def release_gpu_memory(self) -> None:
        """Let go, on the device, what ``offload()`` copied; with ``at_offload`` it went then already.

        What was written since it was copied is copied again: nothing is lost.
        """
        self._check_open()
        self._leaving.release(self)

    def prefetch(self) -> None:
        """Allow transfers for the next step to begin. Changes no value, and no binding with ``at_offload``.

        With ``on_request`` everything is on the device afterwards, where a wrapper gives masters their gradients.
        """
        self._check_open()
        if self.release_stage == "on_request":
            self._bring_all()

    def _bring_all(self) -> None:
        self._leaving.clear()
        self.to_device(self.bundles)

    def snapshot(self) -> dict[str, Any]:
        """A state dict that no later step changes, taken from host memory."""
        self._check_open()
        snapshot: dict[str, Any] = copied(self.optimizer.state_dict())
        return snapshot

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take values over without a cast of dtype or device (facts/offload.md 3.11).

        Raises:
            PlanError: other groups, parameters, states or shapes than the optimizer has; nothing has changed then.
        """
        self._check_open()
        self.settle_for_writing()
        load_states(self, state_dict)
        self.offload()

    def refresh_masters(self) -> None:
        """Make the masters follow parameters that were loaded. Raises ConfigError without masters."""
        self._check_open()
        if self.masters is None:
            raise ConfigError("there are no masters", got=None, where="master_weights")
        self.settle_for_writing()
        self.masters.refresh()

    def load_masters(self, values: Iterable[torch.Tensor]) -> None:
        """``MasterWeights.load``, once nothing is on its way. Raises ConfigError without masters, PlanError."""
        self._check_open()
        if self.masters is None:
            raise ConfigError("there are no masters", got=None, where="master_weights")
        self.settle_for_writing()
        self.masters.load(values)

    def residency(self) -> Residency:
        """Where the selected bytes are now."""
        host = device = 0
        for bundle in self.bundles:
            for name, tensor in bindings(self.optimizer, bundle):
                if self.is_on_host(tensor):
                    host += bundle.places[name].size_bytes
                else:
                    device += bundle.places[name].size_bytes
        return Residency(device, host)

    def stats(self) -> OffloadStats:
        """A copy of the counts."""
        payload = sum(b.places[name].size_bytes for b in self.bundles for name, _ in bindings(self.optimizer, b))
        self.counts.payload_bytes = payload
        return copy.copy(self.counts)

    def close(self) -> None:
        """Bring everything back and leave a plain optimizer. Safe to call twice."""
        if not self._driver.attached:
            return
        self.settle_for_writing()
        # What was noted to be let go stays, and must not be held twice.
        self._leaving.clear()
        self.to_device(self.bundles, for_good=True)
        self._driver.detach()
        for handle in self._handles:
            handle.remove()
        self.bundles = []
        self.release()
        if self.masters is not None:
            self.masters.attach(self.optimizer)

    # Bookkeeping.

    def _check_open(self) -> None:
        if not self._driver.attached:
            raise ConfigError("this offloader is closed", where=type(self).__name__)

    def _engine_of(self, engine: Any) -> Any:
        devices = {local_of(p).device for group in self.optimizer.param_groups for p in group["params"]}
        if engine is None:
            check_devices(devices, self.step_device)
        return engine if engine is not None else self.default_engine(devices.pop())

    def host_empty(self, size_bytes: int) -> torch.Tensor:
        """Host memory as the options want it."""
        memory: torch.Tensor = (
            self.engine.host_empty(size_bytes) if self.pin_memory else torch.empty(size_bytes, dtype=torch.uint8)
        )
        return memory

    def wait_for_copy(self) -> None:
        """Wait for what was last copied on the current stream, where the engine does not."""
        if hasattr(self.engine, "synchronize"):
            event = self.engine.event()
            self.engine.record(event, self.engine.current())
            self.engine.synchronize(event)

    def _check_gradients(self) -> None:
        check_gradients(self._known if self.masters is None else self.masters.pairs.values())

    def _run(self, arithmetic: Callable[[], None]) -> None:
        if self.engine.is_capturing():
            raise OffloadConflictError(
                "a graph is being captured: addresses change from step to step", got="capture in progress", where="step"
            )
        self._adopt_params()
        self._check_gradients()
        if self.masters is not None:
            self.masters.check(self.masters.pairs)
        self.counts.step_count += 1
        if self.step_device == "cpu" or (self.is_separable and self.release_stage == "at_offload"):
            self.step(arithmetic)
        else:
            self.step_whole(arithmetic)

    def step_whole(self, arithmetic: Callable[[], None]) -> None:
        """One logical step with everything that was selected on the device, and home again unless on request."""
        self._bring_all()
        try:
            masters = self.masters.pairs if self.masters is not None else {}
            if self.masters is not None:
                self.masters.begin(masters)
            arithmetic()
            if self.masters is not None:
                self.masters.end(masters)
        finally:
            if self.release_stage == "at_offload":
                self.offload()
