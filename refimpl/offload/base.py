"""What both offloaders share: options, refusals, bookkeeping, checkpoints. No transfer happens here."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from refimpl.errors import ConfigError, OffloadConflictError
from refimpl.offload.cpu_step import check_cpu_step
from refimpl.offload.driver import StepDriver, check_devices, check_gradients, check_optimizer
from refimpl.offload.loading import check_saved, copied, load_states
from refimpl.offload.masters import MasterWeights
from refimpl.offload.reports import OffloadStats, Residency
from refimpl.offload.states import (
    MASTER,
    Bundle,
    bindings,
    chunks_of,
    expected_states,
    is_movable,
    local_of,
    make_bundle,
    options_on,
    select,
)
from refimpl.offload.verbs import MegatronVerbs

__all__ = ["OffloaderBase"]


class OffloaderBase(MegatronVerbs):
    """Constructor and verbs of ``OptimizerStateOffloader``; see the subclasses.

    Args:
        optimizer: one of torch's; its ``step`` is taken over, its class, groups and hooks stay as they are.
        fraction: the share of the bytes that moves, by whole parameters in their order; 0: nothing does.
        chunk_bytes: how much is on the device at a time during a step, by whole parameters; 0: all of it.
        slots: chunks that may be on the device at once.
        master_weights: the masters that the optimizer steps; they move as its states do.
        step_device: ``device``, or ``cpu``: Adam and AdamW are stepped in host memory (``refimpl.offload.adam``),
            gradients come down and weights go up.
        pin_memory: host memory that copies can run to at full speed.
        engine: streams, copies and memory, see ``fastimpl.streams``; None: that of the parameters' device.

    Raises:
        OffloadConflictError: attached twice, a CPU-step optimizer, or CPU parameters without an engine that stands in
            for a device. UnsupportedError: another kind of optimizer. ConfigError: an option.
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
    ) -> None:
        check_optimizer(optimizer)
        if not (isinstance(fraction, (int, float)) and math.isfinite(fraction) and 0 <= fraction <= 1):
            raise ConfigError("not a fraction", got=fraction, expected="0 to 1", where="fraction")
        for name, value, least in (("chunk_bytes", chunk_bytes, 0), ("slots", slots, 1)):
            if type(value) is not int or value < least:
                raise ConfigError("not a count", got=value, expected=f"an int >= {least}", where=name)
        if step_device not in ("device", "cpu"):
            raise ConfigError("no place to step", got=step_device, expected="device or cpu", where="step_device")
        if step_device == "cpu":
            check_cpu_step(optimizer)
        self.optimizer, self.fraction, self.chunk_bytes, self.slots = optimizer, fraction, chunk_bytes, slots
        self.masters, self.pin_memory, self.step_device = master_weights, pin_memory, step_device
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

    # What an implementation says.

    def default_engine(self, device: torch.device) -> Any:
        """The engine of a device."""
        raise NotImplementedError

    def step(self, arithmetic: Callable[[], None]) -> None:
        """One logical step: everything that was selected is on the device while ``arithmetic`` runs on it."""
        raise NotImplementedError

    def to_host(self, bundles: Iterable[Bundle]) -> None:
        """Move what is on the device to the host and bind it there; nothing for what is there already."""
        raise NotImplementedError

    def to_device(self, bundles: Iterable[Bundle], *, for_good: bool = False) -> None:
        """Move what is on the host to the device and bind it there; ``for_good``: each in memory of its own."""
        raise NotImplementedError

    def send_as_planned(self) -> bool:
        """Do all that ``offload`` does, if everything is where the plan knows it; False, and nothing done, if not."""
        return False

    def settle(self) -> None:
        """Wait until host memory holds what it is to hold."""
        raise NotImplementedError

    def settle_for_writing(self) -> None:
        """Wait until the host may write to its memory: nothing reads it any more either."""
        self.settle()

    def is_on_host(self, tensor: torch.Tensor) -> bool:
        """Whether a local tensor lies in this offloader's host memory."""
        raise NotImplementedError

    # Verbs.

    def offload(self, states: bool = True, masters: bool = True) -> None:
        """Send to the host what is on the device: after a load, or before the first step. A step ends with it."""
        del states, masters  # Both live in one bundle; what is there already does not move.
        self._check_open()
        self._adopt_params()
        if not self.send_as_planned():
            self._refit()
            self.to_host(self.bundles)

    def prefetch(self) -> None:
        """Allow transfers for the next step to begin. Changes no value and no binding."""
        self._check_open()

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

    def _adopt_params(self) -> None:
        """Plan for parameters and options that were not there before: after ``add_param_group`` or a load."""
        new: list[Bundle] = []
        found: set[torch.Tensor] = set()  # A parameter may be listed twice.
        turned = False
        for number, group in enumerate(self.optimizer.param_groups):
            flags = options_on(group)
            is_turned, self._flags[number] = self._flags.get(number, flags) != flags, flags
            turned |= is_turned
            for param in group["params"]:
                is_known = param in self._known or param in found
                if is_known and not is_turned:
                    continue
                tensors = self.foresee(param, group)
                if is_known:
                    continue
                found.add(param)
                if self.masters is not None and self._is_master(param):
                    tensors = {MASTER: local_of(param.detach()), **tensors}
                if tensors:
                    new.append(make_bundle(param, tensors))
        listed_count = sum(len(group["params"]) for group in self.optimizer.param_groups)
        if found or listed_count != self._listed_count:
            self._forget_unlisted()
            self._listed_count = listed_count
        self.bundles += self.place(select(new, self.fraction))
        self._known.update(found)
        if turned:
            self._refit()

    def _forget_unlisted(self) -> None:
        """Give what was taken out of its group back to the device, where its state is the user's."""
        listed = {param for group in self.optimizer.param_groups for param in group["params"]}
        gone = [bundle for bundle in self.bundles if bundle.param not in listed]
        self.bundles = [bundle for bundle in self.bundles if bundle.param in listed]
        for bundle in gone:
            self.unplace(bundle)
        self._known &= listed

    def place(self, bundles: list[Bundle]) -> list[Bundle]:
        """Give bundles their host memory."""
        raise NotImplementedError

    def unplace(self, bundle: Bundle) -> None:
        """Bring a bundle to the device and forget its host memory."""
        raise NotImplementedError

    def release(self) -> None:
        """Let all host memory go; nothing is bound to it any more."""
        raise NotImplementedError

    def host_empty(self, size_bytes: int) -> torch.Tensor:
        """Host memory as the options want it."""
        memory: torch.Tensor = (
            self.engine.host_empty(size_bytes) if self.pin_memory else torch.empty(size_bytes, dtype=torch.uint8)
        )
        return memory

    def _refit(self) -> None:
        """Make new places for states that a load gave another dtype, shape or name than was foreseen, or took away."""
        wrong: dict[int, Bundle] = {}
        for number, bundle in enumerate(self.bundles):
            state = self.optimizer.state.get(bundle.param, {})
            found = {name: local_of(value) for name, value in state.items() if is_movable(value)}
            strangers = [
                name
                for name, tensor in found.items()
                if not self.is_on_host(tensor) and (name not in bundle.places or not bundle.places[name].fits(tensor))
            ]
            foreseen = self._foreseen[bundle.param]
            kept = {name for name in bundle.places if name == MASTER or name in foreseen or name in found}
            if strangers or len(kept) < len(bundle.places) or not foreseen.keys() <= kept:
                placed = {name: bundle.places[name].as_meta() for name in bundle.places if name in kept}
                wrong[number] = make_bundle(bundle.param, {**placed, **foreseen, **placed, **found})
        # As many at a time as a chunk holds: what lies there and stays, a master for instance, passes the device.
        for some in chunks_of(wrong.values(), self.chunk_bytes):
            ids = set(map(id, some))
            for number in [number for number, bundle in wrong.items() if id(bundle) in ids]:
                self.unplace(self.bundles[number])
                self.bundles[number] = wrong[number]
            self.place(some)
            self.to_host(some)

    def _is_master(self, param: torch.Tensor) -> bool:
        return self.masters is not None and self.masters.pairs.get(param, param) is not param

    def foreseen(self, param: torch.Tensor) -> dict[str, tuple[int, ...]]:
        """The shapes of the states that a step makes for a parameter."""
        return {name: tuple(tensor.shape) for name, tensor in self._foreseen[param].items()}

    def foresee(self, param: torch.Tensor, group: dict[str, Any]) -> dict[str, torch.Tensor]:
        """The states that a step will make for a parameter, as meta tensors, remembered."""
        self._foreseen[param] = expected_states(self.optimizer, param, group) if local_of(param).numel() else {}
        return self._foreseen[param]

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
        self.step(arithmetic)
