"""``OptimizerStateOffloader``: states and masters of the user's optimizer live on the host between steps.

The class exists once. An implementation binds it to its transfers::

    class OptimizerStateOffloader(offloader.OptimizerStateOffloader, transfers=Blocking): ...
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ClassVar, TypeVar

import torch
from torch.optim import Optimizer

from twinproof.engine import Engine, Weak, check_engine
from twinproof.errors import ConfigError, OffloadConflictError, UnsupportedError, check_flags, check_kind
from twinproof.offload.driver import (
    Arithmetic,
    MovePlan,
    OffloadOptions,
    OffloadStats,
    StepDriver,
    Transfers,
    Wanted,
    check_attachment,
    check_cpu_step,
    check_devices,
    check_gradients,
    check_saved,
    has_step_of_others,
    load_states,
    place_scalars,
    unwrapped,
    updates_of,
)
from twinproof.offload.states import (
    MASTER,
    Bundle,
    MasterWeights,
    beside,
    copied,
    holder_of,
    local_of,
    make_bundle,
    place_in_order,
    rebind,
    strays,
    version_of,
)

__all__ = ["OptimizerStateOffloader", "Residency"]

_Self = TypeVar("_Self", bound="OptimizerStateOffloader")
_Verb = TypeVar("_Verb", bound=Callable[..., Any])


def _verb(work: _Verb) -> _Verb:
    """Outside of the caller's inference mode: what is made there can be written in no other."""

    @functools.wraps(work)
    def run(*arguments: Any, **options: Any) -> Any:
        if not torch.is_inference_mode_enabled():
            return work(*arguments, **options)
        with torch.inference_mode(False), torch.no_grad():
            return work(*arguments, **options)

    return run  # type: ignore[return-value]


@dataclass(frozen=True)
class Residency:
    """Bytes of what was selected to move: on the device, on the host, and on the way between them."""

    device_bytes: int
    host_bytes: int
    in_flight_bytes: int = 0


class OptimizerStateOffloader:
    """Optimizer state and master weights in host memory between steps; the update stays on the device.

    Attached to the user's own optimizer, never a wrapper: ``optimizer.step()`` drives the transfers, whatever scheduler
    or scaler was attached, before or after. Steps that others put in its place, or kept, before run with everything on
    the device, and not on the CPU. Results are those of the plain optimizer, bit for bit. A copy or a pickle
    of the optimizer is a plain one: everything comes to the device for it, until the next step or ``offload()``.

    Whoever has one of the two has both; dropped together they go at once. ``optimizer.step`` alone holds neither.

    Args:
        optimizer: one of torch's, one that derives from ``torch.optim.Optimizer``, or a wrapper with one as its
            ``optimizer`` (Megatron's ``DistributedOptimizer``, accelerate's); its ``step`` is taken over, its class,
            groups and hooks stay as they are. One that is none of torch's is stepped as a whole: see ``chunk_bytes``.
        fraction: the share of the bytes that moves, by whole parameters in their order; 0: nothing does.
        chunk_bytes: how much is on the device at a time during a step, by whole parameters; 0: all of it. All of it
            is there too where parameters may depend on each other (``is_separable`` is False), or with ``on_request``.
        slots: chunks that may be on the device at once.
        master_weights: the masters that the optimizer steps; they move as its states do. Masters that are attached to
            the optimizer, and not given, stay on the device; neither attached nor given, they are refused.
        step_device: ``device``, or ``cpu``: Adam and AdamW are stepped in host memory, gradients come down and weights
            go up.
        pin_memory: host memory that copies can run to at full speed.
        release: when memory of the device goes. ``at_offload``: as soon as its copy out is queued; a step ends with
            that. ``on_request``: a step leaves everything on the device, ``offload()`` copies it out, and it goes with
            ``release_gpu_memory()``, so that masters can be read in between, as Megatron's loops do. None:
            ``on_request`` for masters that a wrapper rounds after the step, else ``at_offload``.
        fused_update: whether one kernel may update a chunk of torch's SGD, Adam, AdamW or Adagrad. None: where its bits
            are those of the optimizer's own step, which is CUDA. True: elsewhere too, where they may differ in the last
            place. False: never. Options that the kernel lacks leave a group to the optimizer: ``stats().updates``.
            An implementation without such a kernel, as the reference, has the optimizer's own step and no ``updates``.
        engine: streams, copies and memory, see ``twinproof.engine``; None: that of the parameters' device.

    Raises:
        OffloadConflictError: attached twice, a CPU-step optimizer, or CPU parameters without an engine that stands in
            for a device. UnsupportedError: what is no optimizer, or one of sparse gradients. ConfigError: an option, or
            masters that nobody rounds into the model; of a group that is added later, in the next step.
    """

    # The optimizer holds all of this but what holds the optimizer: who drops both gets back the memory at once.
    __slots__ = ("__dict__", "__weakref__", "_keeps")
    optimizer = Weak[Optimizer]()
    _transfers_of: ClassVar[type[Transfers] | None] = None

    def __init_subclass__(cls, *, transfers: type[Transfers] | None = None, **options: Any) -> None:
        super().__init_subclass__(**options)
        if transfers is not None:
            cls._transfers_of = transfers

    @_verb
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
        fused_update: bool | None = None,
    ) -> None:
        transfers = type(self)._transfers_of
        if transfers is None:
            got, expected = type(self).__name__, "the class of fastimpl.offload or refimpl.offload"
            raise ConfigError("no transfers are bound", got=got, expected=expected, where="class")
        optimizer, kept_masters = unwrapped(optimizer)
        check_attachment(optimizer)
        if master_weights is not None:
            check_kind(master_weights, MasterWeights, "master_weights", "MasterWeights")
        if kept_masters and (master_weights is not None or step_device == "cpu"):
            got = f"step_device={step_device!r}, master_weights={'given' if master_weights is not None else None}"
            raise ConfigError(
                "the wrapper keeps and rounds its masters itself",
                got=got,
                expected="step_device='device' without master_weights",
                where="optimizer",
            )
        if master_weights is not None:
            # First: who gave masters is not to be told to give some, of parameters that are none of theirs.
            master_weights.check_stepped_by(optimizer)
        _check_options(optimizer, fraction, chunk_bytes, slots, step_device, release)
        _check_fused_update(fused_update, step_device)
        check_flags(pin_memory=pin_memory)
        chosen_release = release or ("on_request" if kept_masters else "at_offload")
        self.optimizer, self.masters = optimizer, master_weights
        self.options = OffloadOptions(
            fraction, chunk_bytes, slots, step_device, pin_memory, chosen_release, fused_update
        )
        self._copied_out, self._is_brought = _CopiedOut(), False
        if master_weights is not None:
            master_weights.come_home()
        self.engine = _engine_of(optimizer, step_device, engine, transfers)
        self.plan = MovePlan(
            optimizer, masters=master_weights, kept_masters=kept_masters, options=self.options, engine=self.engine
        )
        self.transfers = transfers(self.plan)
        self.plan.adopt(self.transfers)
        self._keeps, held = optimizer, self._without_keeps()
        around = (held._before_step_of_others, held._after_step_of_others)
        self._driver = StepDriver(optimizer, held, held._run, around)
        self._others_depth = 0
        # Hooks that the user has already may look at states, so that ours come first.
        self._handles: list[Any] = [
            optimizer.register_state_dict_pre_hook(lambda _: held.settle(), prepend=True),
            optimizer.register_load_state_dict_pre_hook(check_saved),
            optimizer.register_load_state_dict_pre_hook(lambda *_: held.settle_for_writing(), prepend=True),
            optimizer.register_load_state_dict_post_hook(lambda _: held._take_home()),
        ]
        optimizer.__getstate__ = held._state_of_a_copy  # type: ignore[method-assign]
        try:
            self.offload()
        except BaseException as error:
            self._detach()
            try:
                self._come_back()
            except Exception:
                # What failed first is why; the way back fails of the same more often than not.
                raise error  # noqa: B904
            raise
        if master_weights is not None:
            # Of an offloader that was closed before, or of the user: all gradients at once in float32.
            master_weights.detach()
            master_weights.drive(held)

    def _without_keeps(self: _Self) -> _Self:
        """This offloader, of one state with it, as the optimizer holds it: without what keeps the optimizer."""
        held = object.__new__(type(self))
        held.__dict__ = self.__dict__
        return held

    @property
    def bundles(self) -> list[Bundle]:
        """What moves, by parameter."""
        return self.plan.bundles

    @property
    def is_separable(self) -> bool:
        """Whether whole parameters can be stepped in any partition, and their states be foreseen."""
        return self.plan.is_separable

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError(
            "an offloader cannot be copied: it is attached to one optimizer",
            got="copy or pickle",
            expected="a copy of the optimizer, which is a plain one, and an offloader of its own",
            where=type(self).__name__,
        )

    # Verbs.

    @_verb
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
        self._others_depth = 0
        states = _either("states", states, "offload_optimizer_states", offload_optimizer_states)
        masters = _either("masters", masters, "offload_master_weights", offload_master_weights)
        self._adopt()
        if states and masters and self.options.release == "at_offload":
            if not self.transfers.send_planned():
                self.plan.refit(self.transfers)
                self.transfers.to_host(self.bundles)
            return
        if states:
            self.plan.refit(self.transfers)

        def only(_: Bundle, name: str) -> bool:
            return masters if name == MASTER else states

        if self.options.release == "on_request":
            self._copied_out.note(self.plan, self.transfers, only)
        self.transfers.to_host(self.bundles, only=only, binds=self.options.release == "at_offload")

    @_verb
    def release_gpu_memory(self) -> None:
        """Let go, on the device, what ``offload()`` copied; with ``at_offload`` it went then already.

        What was written in place since it was copied is copied again. Writes through ``.data``, numpy or a pointer are
        not seen: they belong before ``offload()``.
        """
        self._check_open()
        self._copied_out.release(self.plan, self.transfers)

    @_verb
    def prefetch(self) -> None:
        """Allow transfers for the next step to begin. Changes no value, and no binding with ``at_offload``.

        What is written in place behind it is in the step. Before a write through ``.data``, numpy or a pointer, which
        is not seen, call ``settle_for_writing()``.

        With ``on_request`` everything is on the device afterwards, where a wrapper gives masters their gradients.
        """
        self._check_open()
        self._others_depth = 0
        if self.options.release == "on_request":
            self._bring_all()
        elif self.is_separable:
            self.transfers.fetch()

    @_verb
    def snapshot(self) -> dict[str, Any]:
        """A state dict that no later step changes, taken from host memory."""
        self._check_open()
        snapshot: dict[str, Any] = copied(self.optimizer.state_dict())
        return snapshot

    @_verb
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take values over without a cast of dtype or device; the optimizer's own load hooks run around it.

        Raises:
            PlanError: other groups, parameters, states or shapes than the optimizer has; nothing has changed then.
        """
        self._check_open()
        # Groups may have been added or edited since the last step.
        self._adopt()
        self.settle_for_writing()
        load_states(self.plan, state_dict)

    @_verb
    def refresh_masters(self) -> None:
        """Make the masters follow parameters that were loaded. Raises ConfigError without masters."""
        self._own_masters().refresh()

    @_verb
    def load_masters(self, values: Iterable[torch.Tensor]) -> None:
        """``MasterWeights.load``. Raises ConfigError without masters, PlanError."""
        self._own_masters().load(values)

    def residency(self) -> Residency:
        """Where the selected bytes are now; in flight is what the host has not yet waited for."""
        host = device = 0
        for bundle, name, tensor in self.plan.bound():
            if self.transfers.is_on_host(tensor):
                host += bundle.places[name].size_bytes
            else:
                device += bundle.places[name].size_bytes
        leaving = self.transfers.leaving_bytes()
        return Residency(device, host - leaving, leaving)

    def stats(self) -> OffloadStats:
        """A copy of the counts."""
        counts = self.plan.counts
        counts.payload_bytes = sum(bundle.places[name].size_bytes for bundle, name, _ in self.plan.bound())
        return copy.copy(counts)

    @_verb
    def close(self) -> None:
        """Bring everything back and leave a plain optimizer. Safe to call twice."""
        if not self._driver.attached:
            return
        self.settle_for_writing()
        self._come_back()
        self._detach(self.masters)

    # Moves and waits, for tools that look at memory between steps.

    @_verb
    def to_host(self, bundles: Iterable[Bundle], *, copies: bool = True, binds: bool = True) -> None:
        """See ``Transfers.to_host``."""
        self._free_strays()
        self.transfers.to_host(bundles, copies=copies, binds=binds)

    @_verb
    def to_device(self, bundles: Iterable[Bundle], *, for_good: bool = False) -> None:
        """See ``Transfers.to_device``."""
        self._free_strays()
        self._is_brought = True
        self.transfers.to_device(bundles, for_good=for_good)

    def settle(self) -> None:
        """Wait until host memory holds what it is to hold."""
        self.transfers.settle()

    def settle_for_writing(self) -> None:
        """Wait until the host may write to its memory: nothing reads it any more either."""
        self.transfers.settle_for_writing()

    # Megatron's verbs, for loops that call them; a step needs none of them.

    def reload(self) -> None:
        """``prefetch``."""
        self.prefetch()

    def offload_states(self) -> None:
        """``offload``."""
        self.offload()

    def reload_offloaded_states(self) -> None:
        """``prefetch``."""
        self.prefetch()

    def release_offloaded_gpu_states(self) -> None:
        """``release_gpu_memory``."""
        self.release_gpu_memory()

    def sync_before_step(self) -> None:
        """Nothing to wait for: a step orders itself."""
        self._check_open()

    def mark_optimizer_states_initialized(self) -> None:
        """Nothing to mark: states are taken over as they appear."""
        self._check_open()

    # The step.

    def _adopt(self) -> None:
        """Plan for what the user did to groups and states since."""
        self._free_strays()
        self._is_brought |= self.plan.adopt(self.transfers)

    def _free_strays(self) -> None:
        """Give what lies in host memory at another's place memory of the device, from where all of it moves as usual.

        Before anything moves: whose place that is may be written next.
        """
        suspects = self.transfers.untidy()
        if not suspects:
            return
        known = {bundle.param for bundle in self.bundles}
        states = self.optimizer.state.items()
        others = [
            make_bundle(param, {})
            for param, state in states
            if isinstance(param, torch.Tensor) and isinstance(state, dict) and param not in known
        ]
        found = strays(self.optimizer, suspects, others, self.transfers)
        if not found:
            return
        self.settle_for_writing()
        moved = [(bundle, name, beside(self.engine, tensor)) for bundle, name, tensor in found]
        self.plan.wait_for_copy()
        for bundle, name, here in moved:
            rebind(self.optimizer, bundle, name, here)
            self.plan.counts.h2d_bytes += here.nbytes
        self._is_brought = True

    def _come_back(self) -> None:
        # What was noted to be let go stays, and must not be held twice.
        self._copied_out.clear()
        self.to_device(self.bundles, for_good=True)
        self.plan.bundles = []
        self.transfers.release()
        self.plan.counts.host_bytes = 0

    def _detach(self, masters: MasterWeights | None = None) -> None:
        """Let go of the optimizer; masters go on with it."""
        self._driver.detach(lambda: None if masters is None else masters.attach(self.optimizer))
        for handle in self._handles:
            handle.remove()
        vars(self.optimizer).pop("__getstate__", None)

    def _check_open(self) -> None:
        if not self._driver.attached:
            raise ConfigError(
                "this offloader is closed", got="a closed offloader", expected="an open one", where=type(self).__name__
            )

    def _own_masters(self) -> MasterWeights:
        """The masters, which wait themselves for what is on its way to or from them."""
        self._check_open()
        if self.masters is None:
            raise ConfigError("there are no masters", got=None, expected="MasterWeights", where="master_weights")
        return self.masters

    def _bring_all(self) -> None:
        self._copied_out.clear()
        self.to_device(self.bundles)

    def _state_of_a_copy(self) -> dict[str, Any]:
        """What ``copy.deepcopy`` and ``pickle`` take of the optimizer: as a plain one has it, on the device."""
        self._bring_all()
        return type(self.optimizer).__getstate__(self.optimizer)

    def _check_gradients(self) -> None:
        known: Iterable[torch.Tensor] = self.plan.known
        if self.masters is not None:
            models = [self.masters.pairs[master] for master in self._stepped_masters()]
            known = [*models, *(self.plan.known - self.masters.pairs.keys())]
        check_gradients(known, has_graph=any(group.get("differentiable") for group in self.optimizer.param_groups))

    def _check_step(self) -> None:
        """Before anything moves. Raises UnsupportedError, StaleMasterError."""
        self._check_gradients()
        if self.masters is not None:
            self.masters.check(self._stepped_masters())

    def _stepped_masters(self) -> list[torch.Tensor]:
        """Masters that are listed. One that left its groups may be another optimizer's, which wants its gradient."""
        pairs = {} if self.masters is None else self.masters.pairs
        return [master for master in pairs if master in self.plan.known]

    def _take_home(self) -> None:
        """After a load, waited for: hooks of the user's that come behind may look at states."""
        if self.masters is not None:
            place_scalars(self.plan)
        self.offload()
        self.settle()

    def _begin(self) -> None:
        self._others_depth = 0
        if self.engine.is_capturing():
            raise OffloadConflictError(
                "a graph is being captured: addresses change from step to step",
                got="capture in progress",
                expected="a step outside of captures",
                where="step",
            )
        self._adopt()

    @torch._disable_dynamo
    def _before_step_of_others(self, *given: Any) -> Any:
        """Everything comes to the device for a step that was taken from the optimizer before this was attached."""
        if self.options.step_device == "cpu":
            raise _step_taken_before("step")
        # An optimizer whose step calls that of its base runs the hooks of both.
        depth = self._others_depth
        if depth and steps_that_run(self.optimizer) == 1:
            # An error stopped the step before, so that nothing was told of its end.
            depth = 0
        if not depth:
            self._begin()
            self._check_step()
            self._bring_all()
        found = None if self.masters is None else self.masters.before_step(*given)
        self._others_depth = depth + 1
        return found

    @torch._disable_dynamo
    def _after_step_of_others(self, *_: Any) -> None:
        self._others_depth = max(0, self._others_depth - 1)
        if self._others_depth:
            return
        if self.masters is not None:
            self.masters.end(self._stepped_masters())
        if self.options.release == "at_offload":
            self.offload()
        self.plan.counts.step_count += 1

    def _run(self, arithmetic: Arithmetic) -> None:
        self._begin()
        self._check_step()
        # A step on the CPU has its states there when it begins, those of a parameter that comes back among them.
        if self._is_brought and self.options.step_device == "cpu":
            # What is refused stays where it is.
            updates_of(self.optimizer, self.bundles, self.masters)
            self.offload()
        self._is_brought = False
        known_count = len(self.optimizer.state)
        try:
            self._step(arithmetic)
        except BaseException:
            # What clips or clears gradients before the next try acts on those that it is made with.
            if self.masters is not None:
                self.masters.give_back()
            raise
        finally:
            place_in_order(self.optimizer, known_count)
        # What was refused, or raised, is no step.
        self.plan.counts.step_count += 1

    def _step(self, arithmetic: Arithmetic) -> None:
        # A step on the CPU is always one: of Adam, with states that leave at once.
        if self.is_separable and self.options.release == "at_offload":
            with nullcontext() if self.masters is None else self.masters.noted_together(is_step=True):
                has_others = self.transfers.step(arithmetic, self._step_whole)
            if has_others:
                self.offload()
        else:
            self._step_whole(arithmetic)

    def _step_whole(self, arithmetic: Arithmetic) -> None:
        """One logical step with everything that was selected on the device, and home again unless on request."""
        self._bring_all()
        try:
            masters = self._stepped_masters()
            if self.masters is not None:
                self.masters.begin(masters)
            arithmetic()
            if self.masters is not None:
                self.masters.end(masters)
        finally:
            if self.options.release == "at_offload":
                self.offload()


# Of torch's wrapper that runs the hooks of a step; every wrapper shares it.
_RUNS_HOOKS = Optimizer.profile_hook_step(lambda *_: None).__code__


def steps_that_run(optimizer: Optimizer) -> int:
    """How many steps of the optimizer are being made, one inside of another; 0 where a compiler hides them."""
    count, frame = 0, inspect.currentframe()
    while frame is not None:
        count += frame.f_code is _RUNS_HOOKS and frame.f_locals["args"][0] is optimizer
        frame = frame.f_back
    return count


class _CopiedOut:
    """What was copied to the host and still lies on the device, with the versions of its tensors then.

    Prevents a tensor that is written after its copy from being lost: what changed is copied again.
    """

    def __init__(self) -> None:
        self._noted: dict[tuple[torch.Tensor, str], tuple[torch.Tensor, Any]] = {}

    def clear(self) -> None:
        """Nothing is to go: it is about to be used on the device."""
        self._noted.clear()

    def note(self, plan: MovePlan, transfers: Transfers, only: Wanted) -> None:
        """What is on the device now and is about to be copied."""
        for bundle, name, tensor in plan.bound():
            if only(bundle, name) and not transfers.is_on_host(tensor):
                self._noted[bundle.param, name] = (tensor, self._seen(plan, bundle, name, tensor))

    @staticmethod
    def _seen(plan: MovePlan, bundle: Bundle, name: str, tensor: torch.Tensor) -> Any:
        """Where a tensor lies, how it is read there, and how often it was written: by itself, and by what holds it."""
        form = (tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj())
        return tensor.data_ptr(), form, version_of(holder_of(plan.optimizer, bundle, name))

    def release(self, plan: MovePlan, transfers: Transfers) -> None:
        """Bind what was copied to the host."""
        # What was bound since may have another form than its place, which would cast it or lay it out anew.
        placed = list(plan.bundles)
        if self._noted:
            plan.refit(transfers)
        copied = set(map(id, placed))
        noted, self._noted = self._noted, {}
        changed: set[tuple[torch.Tensor, str]] = set()
        copied_out: set[tuple[torch.Tensor, str]] = set()
        for bundle, name, tensor in plan.bound():
            found = noted.get((bundle.param, name))
            if found is not None:
                is_same = id(bundle) in copied and found[1] == self._seen(plan, bundle, name, tensor)
                (copied_out if is_same else changed).add((bundle.param, name))
        transfers.to_host(plan.bundles, only=lambda bundle, name: (bundle.param, name) in copied_out, copies=False)
        if changed:
            transfers.to_host(plan.bundles, only=lambda bundle, name: (bundle.param, name) in changed)


def _check_options(
    optimizer: Optimizer, fraction: float, chunk_bytes: int, slots: int, step_device: str, release: str | None
) -> None:
    """Refuse values that mean nothing, and pairs of them that contradict each other. Raises ConfigError."""
    if not (isinstance(fraction, (int, float)) and 0 <= fraction <= 1):
        raise ConfigError("not a fraction", got=fraction, expected="0 to 1", where="fraction")
    for name, value, least in (("chunk_bytes", chunk_bytes, 0), ("slots", slots, 1)):
        if type(value) is not int or value < least:
            raise ConfigError("not a count", got=value, expected=f"an int >= {least}", where=name)
    if step_device not in ("device", "cpu"):
        raise ConfigError("no place to step", got=step_device, expected="device or cpu", where="step_device")
    if release not in (None, "at_offload", "on_request"):
        raise ConfigError("no moment", got=release, expected="at_offload or on_request", where="release")
    if step_device == "cpu":
        check_cpu_step(optimizer)
        if has_step_of_others(optimizer):
            raise _step_taken_before("optimizer")
        if release == "on_request":
            raise ConfigError(
                "states never come to the device", got="on_request", expected="at_offload", where="step_device='cpu'"
            )


def _step_taken_before(where: str) -> ConfigError:
    return ConfigError(
        "this step was taken from the optimizer before, and does not step on the CPU",
        got="another step than optimizer.step",
        expected="an offloader that is attached before optimizer.step is wrapped or kept",
        where=where,
    )


def _check_fused_update(fused_update: bool | None, step_device: str) -> None:
    if isinstance(fused_update, torch.Tensor) or fused_update not in (None, True, False):
        raise ConfigError("not a choice", got=fused_update, expected=(None, True, False), where="fused_update")
    if fused_update and step_device == "cpu":
        raise ConfigError(
            "a step on the CPU has its own formula", got=True, expected=(None, False), where="step_device='cpu'"
        )


def _either(name: str, value: bool, other_name: str, other: bool | None) -> bool:
    """A flag that has two names. Raises ConfigError when both are given and contradict each other."""
    check_flags(**{name: value, other_name: other})
    if other is None:
        return value
    if not value and other:
        expected = "one of them, or the same twice"
        raise ConfigError(
            f"{name} and {other_name} are one flag", got=(value, other), expected=expected, where="offload"
        )
    return other


def _engine_of(optimizer: Optimizer, step_device: str, engine: Engine | None, transfers: type[Transfers]) -> Engine:
    devices = {local_of(p).device for group in optimizer.param_groups for p in group["params"]}
    if engine is not None:
        return check_engine(engine)
    check_devices(devices, step_device)
    return transfers.default_engine(devices.pop())
