"""The offloader's state machine: any program of a training loop and of the verbs, beside the plain optimizer.

Both arms get the same gradients, options, loads and groups. After every rule the parameters are the same bits, nothing
that was selected is on the device, and what is reported adds up; the states are compared in a rule of their own, or
after every rule as well, because a comparison makes the host wait and may hide what a program without it would show.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch.utils._python_dispatch import _disable_current_modes

from conformance.harness import assert_equal, assert_le, assert_same_tensor, raises
from conformance.offload.cases import (
    Place,
    adagrad_grows,
    assert_same_state,
    in_host_memory,
    proven_on,
    reread,
    values,
)
from conformance.offload.foreign import Clipped, Factored, FusedAdam, Renamed
from conformance.provers.virtual_device import VirtualDevice
from twinproof.errors import PlanError, StaleMasterError
from twinproof.offload.states import is_movable

SHAPES: tuple[tuple[int, ...], ...] = ((4, 3), (7,), (), (2, 5))
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": ("SGD", {"lr": 0.1, "momentum": 0.9, "foreach": False}),
    "adamw": ("AdamW", {"lr": 0.01}),
    "fused": ("Adam", {"lr": 0.01, "amsgrad": True, "fused": True}),
    "nadam": ("NAdam", {"lr": 0.01, "foreach": False}),
    "adagrad": ("Adagrad", {"lr": 0.1}),
}
DRAWN = [kind for kind in KINDS if kind != "adagrad" or adagrad_grows()]
# Optimizers that torch does not have: parameters that depend on each other, states of other shapes and dtypes.
FOREIGN_KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "clipped": (Clipped, {"lr": 0.1, "momentum": 0.9, "foreach": False}),
    "factored": (Factored, {"lr": 0.01}),
    "fused adam": (FusedAdam, {"lr": 0.01}),
    "renamed": (Renamed, {"lr": 0.01}),
}
forms = st.fixed_dictionaries(
    {
        "chunk_bytes": st.sampled_from([0, 1, 256, 600, 1 << 20]),
        "slots": st.integers(1, 3),
        "fraction": st.sampled_from([1.0, 1.0, 0.5, 0.0]),
    }
)
subsets = st.sets(st.integers(0, len(SHAPES) - 1))


class OffloadMachine(RuleBasedStateMachine):
    """See the module. The test that runs it sets ``offload``, and the suite's device: "pretend", or the virtual one."""

    offload: Any
    suite_device = "cpu"
    device: VirtualDevice | Place | None = None
    shapes = SHAPES
    release_when = "at_offload"
    # Copies run as late as their edges allow.
    late = True
    # Whether a user has left nothing on the device since the last step.
    is_home = True
    # Whether a rule failed between two offloaders.
    is_closed = False

    @initialize(
        kind=st.sampled_from(DRAWN),
        form=forms,
        with_masters=st.booleans(),
        watched=st.booleans(),
        seed=st.none() | st.integers(0, 99),
    )
    def start(self, kind: str, form: dict[str, Any], with_masters: bool, watched: bool, seed: int | None) -> None:
        """See ``begin``."""
        self.begin(kind, form, with_masters, watched, seed)

    def begin(self, kind: str, form: dict[str, Any], with_masters: bool, watched: bool, seed: int | None) -> None:
        """Equal parameters in both arms."""
        is_virtual = self.suite_device != "pretend"
        self.running: Any = VirtualDevice(late=self.late, seed=seed) if is_virtual else proven_on(self.suite_device)
        self.device = self.running.__enter__()
        self.kind, self.watched, self.form = kind, watched, form
        self.count, self.looks = 0, False
        self.snapshots: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self.schedules: list[Any] = []
        dtype = torch.bfloat16 if with_masters else torch.float32
        self.params = [torch.nn.Parameter(self.initial(shape, i, dtype)) for i, shape in enumerate(self.shapes)]
        self.plain_params = [torch.nn.Parameter(param.detach().float().clone()) for param in self.params]
        self.masters = self.offload.MasterWeights(self.params) if with_masters else None
        stepped = self.params if self.masters is None else list(self.masters.parameters())
        self.plain, self.optimizer = self.made(self.plain_params), self.made(stepped)
        self.attach()
        self.saved: dict[str, Any] = self.offloader.snapshot()
        self.scalers = [torch.amp.GradScaler("cpu", init_scale=4.0) for _ in range(2)]

    def initial(self, shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Values of a parameter."""
        return values(shape, seed, dtype)

    def made(self, params: list[Any], like: Any = None) -> Any:
        """An optimizer of this kind; ``like``: with the groups of another one of the same parameters."""
        maker, options = (KINDS | FOREIGN_KINDS)[self.kind]
        return (getattr(torch.optim, maker) if isinstance(maker, str) else maker)(params, **options)

    def attach(self) -> None:
        """A new offloader in the current form."""
        assert self.device is not None
        self.is_closed = False
        self.attributes = _attributes(self.optimizer)
        self.offloader = self.offload.OptimizerStateOffloader(
            self.optimizer,
            engine=self.device.engine,
            master_weights=self.masters,
            release=self.release_when,
            **self.form,
        )

    # The loop.

    @rule(skip=subsets, adds=st.booleans())
    def backward(self, skip: set[int], adds: bool) -> None:
        """New gradients, or more of them; some parameters get none."""
        self.count += 1
        for i, (plain, param) in enumerate(zip(self.plain_params, self.params, strict=True)):
            grad = None if i in skip else values(param.shape, 1000 * self.count + i, param.dtype)
            if adds and grad is not None and param.grad is not None:
                grad = param.grad + grad
            if grad is not None or not adds:
                param.grad = grad
                plain.grad = None if grad is None else grad.to(torch.float32, copy=True)

    @rule()
    def step(self) -> None:
        """One step of both, with whatever gradients there are."""
        self.plain.step()
        self.optimizer.step()
        self.gradients_taken()

    def gradients_taken(self) -> None:
        """A step is over. Masters clear gradients that they have used; the plain arm does as much."""
        if self.masters is not None:
            self.plain.zero_grad()

    @rule(skip=subsets)
    def whole_step(self, skip: set[int]) -> None:
        """Gradients and a step, which a random program rarely does in this order."""
        self.backward(skip, adds=False)
        self.step()

    @precondition(lambda self: self.masters is None)
    @rule(overflow=st.booleans())
    def scaled_step(self, overflow: bool) -> None:
        """A step through a GradScaler, which skips it when a gradient is infinite."""
        self.backward(set(), adds=False)
        # A scaler asks the device whether to step, unless the optimizer's own kernel does.
        self.looks |= self.kind != "fused"
        arms = ((self.plain, self.plain_params), (self.optimizer, self.params))
        for scaler, (optimizer, params) in zip(self.scalers, arms, strict=True):
            if overflow:
                assert params[1].grad is not None
                params[1].grad[0] = float("inf")
            scaler.scale(torch.ones(1))
            scaler.step(optimizer)
            scaler.update()

    @rule(set_to_none=st.booleans())
    def zero_grad(self, set_to_none: bool) -> None:
        """Gradients go, or become zero."""
        self.plain.zero_grad(set_to_none=set_to_none)
        for param in self.params:
            if set_to_none or param.grad is None:
                param.grad = None
            else:
                param.grad.zero_()

    @rule(lr=st.sampled_from([0.5, 0.03]), weight_decay=st.sampled_from([0.0, 0.1]))
    def change_options(self, lr: float, weight_decay: float) -> None:
        """As user code does, in place."""
        for optimizer in (self.plain, self.optimizer):
            optimizer.param_groups[-1].update(lr=lr, weight_decay=weight_decay)

    @rule()
    def step_scheduler(self) -> None:
        """Both; a scheduler that is attached in the middle of the run wraps the step that it finds."""
        if not self.schedules:
            kind = torch.optim.lr_scheduler.ExponentialLR
            self.schedules = [kind(optimizer, 0.5) for optimizer in (self.plain, self.optimizer)]
            return
        with warnings.catch_warnings():
            # Torch warns where no step came before, in both arms.
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            for schedule in self.schedules:
                schedule.step()

    @precondition(lambda self: self.masters is None and not self.schedules and len(self.params) < 6)
    @rule()
    def add_group(self) -> None:
        """A parameter that was not there at attachment; what is on its way stays right."""
        self.prefetch()
        for params, optimizer in ((self.plain_params, self.plain), (self.params, self.optimizer)):
            params.append(torch.nn.Parameter(values((3, 3), 50 + len(params))))
            optimizer.add_param_group({"params": [params[-1]], "lr": 0.2})

    # The verbs.

    @rule()
    def prefetch(self) -> None:
        """Copies are on their way from here on."""
        self.offloader.prefetch()
        self.called("prefetch")

    @rule(verb=st.sampled_from(["offload", "reload", "settle", "sync_before_step", "release_gpu_memory"]))
    def call(self, verb: str) -> None:
        """A verb that changes no value."""
        getattr(self.offloader, verb)()
        self.called(verb)

    def called(self, verb: str) -> None:
        """A verb is over; for a machine that knows what that means for memory."""

    @rule()
    def compare(self) -> None:
        """Everything, states included."""
        got = self.offloader.snapshot()
        with _disable_current_modes():
            assert_same_state(got, self.plain.state_dict())

    @precondition(lambda self: len(self.snapshots) < 2)
    @rule()
    def take_snapshot(self) -> None:
        """Remembered with what the plain optimizer has now."""
        taken = self.offloader.snapshot()
        with _disable_current_modes():
            expected = self.plain.state_dict()
            expected = {**expected, "state": {n: _cloned(state) for n, state in expected["state"].items()}}
            expected["param_groups"] = [_cloned(group) for group in expected["param_groups"]]
        self.snapshots.append((taken, expected))

    @precondition(lambda self: self.snapshots)
    @rule()
    def look_at_snapshot(self) -> None:
        """No step since then has changed it."""
        taken, expected = self.snapshots.pop(0)
        with _disable_current_modes():
            assert_same_state(taken, expected)

    @rule(live=st.booleans(), prefetched=st.booleans())
    def save(self, live: bool, prefetched: bool) -> None:
        """A state dict, as a file would keep it; also while copies in are on their way."""
        if prefetched:
            self.prefetch()
        state = self.optimizer.state_dict() if live else self.offloader.snapshot()
        self.saved = reread(state, fused=self.kind == "fused")

    @rule(through_torch=st.booleans(), other_variant=st.booleans())
    def load(self, through_torch: bool, other_variant: bool) -> None:
        """Into both; of another variant too, with one moment more or less."""
        fused, state = self.kind == "fused", reread(self.saved, fused=self.kind == "fused")
        self.prefetch()
        if len(state["param_groups"]) != len(self.optimizer.param_groups):
            with raises(PlanError):
                self.offloader.load_state_dict(state)
            return
        if other_variant and "amsgrad" in state["param_groups"][0]:
            _change_variant(state)
        self.plain.load_state_dict(reread(state, fused=fused))
        if through_torch:
            self.optimizer.load_state_dict(reread(state, fused=fused))
        else:
            assert self.device is not None
            self.offloader.load_state_dict(in_host_memory(self.device, state))
        self.called("offload")

    @precondition(lambda self: self.masters is not None)
    @rule(number=st.integers(0, len(SHAPES) - 1), stepped=st.booleans())
    def load_model(self, number: int, stepped: bool) -> None:
        """A parameter is written; a step before the masters follow is refused, and changes nothing."""
        assert self.masters is not None
        loaded = values(self.params[number].shape, 7000 + self.count, torch.bfloat16)
        with torch.no_grad():
            self.params[number].copy_(loaded)
        if stepped:
            with raises(StaleMasterError, mentions=("refresh_masters",)):
                self.optimizer.step()
        self.offloader.refresh_masters()
        with torch.no_grad():
            for plain, param in zip(self.plain_params, self.params, strict=True):
                plain.copy_(param)

    @rule(form=forms)
    def close_and_attach(self, form: dict[str, Any]) -> None:
        """In between both optimizers are plain."""
        self.offloader.close()
        self.is_closed = True
        self.after_close()
        if self.masters is None:
            self.whole_step(set())
            self.form = form
            self.attach()
        else:
            # Masters that were attached to the optimizer stay there; another pair of arms begins with what is there.
            self.renew(form)

    def after_close(self) -> None:
        """What is promised of a closed offloader: the optimizer has the attributes that it had, its step among them."""
        # A scheduler that came meanwhile found its mark on our step, and put nothing on top. Masters run by hooks now.
        left = _attributes(self.optimizer)
        for name in {*left, *self.attributes}:
            if self.masters is None or "hooks" not in name:
                where = f"attribute {name} of the optimizer after close()"
                assert_equal(left.get(name), self.attributes.get(name), where=where)

    def renew(self, form: dict[str, Any]) -> None:
        """A new optimizer on the same masters, with the state of the old one."""
        assert self.masters is not None
        state = self.optimizer.state_dict()
        self.optimizer = self.made(list(self.masters.parameters()), like=self.optimizer)
        self.optimizer.load_state_dict(reread(state, fused=self.kind == "fused"))
        self.form, self.schedules = form, []
        self.plain.load_state_dict(reread(self.plain.state_dict(), fused=self.kind == "fused"))
        self.attach()

    # What always holds.

    @invariant()
    def parameters_are_the_same(self) -> None:
        """Bit for bit, without a wait; with masters, rounded to nearest even."""
        if self.device is None:
            return
        with _disable_current_modes():
            for i, (plain, param) in enumerate(zip(self.plain_params, self.params, strict=True)):
                assert_same_tensor(param.detach(), plain.detach().to(param.dtype), where=f"parameter {i}")
        if self.watched:
            self.compare()

    @invariant()
    def bytes_add_up(self) -> None:
        """Nothing that was selected is on the device; with everything selected, that is all states there are."""
        if self.device is None:
            return
        residency, stats = self.offloader.residency(), self.offloader.stats()
        if self.release_when == "at_offload" and self.is_home:
            assert_equal(residency.device_bytes, 0, where="selected bytes on the device")
        held = residency.device_bytes + residency.host_bytes + residency.in_flight_bytes
        assert_equal(held, stats.payload_bytes, where="payload")
        assert_le(stats.payload_bytes, stats.host_bytes, where="payload in host memory")
        # Of an unknown optimizer, states that a step made are taken over by the next verb.
        if (
            self.form["fraction"] == 1.0
            and self.is_home
            and (self.release_when == "at_offload" or self.offloader.is_separable)
        ):
            assert_equal(stats.payload_bytes, self.movable_bytes(), where="all that can move")

    def movable_bytes(self) -> int:
        """Of all states that the plain arm has, and of masters."""
        masters = [param for param in self.plain_params if self.masters is not None and param.numel()]
        moving = [s for state in self.plain.state.values() for s in state.values() if is_movable(s)]
        return sum(tensor.nbytes for tensor in masters + moving)

    def teardown(self) -> None:
        """A last comparison, and the proof."""
        if self.device is None:
            return
        self.device = None
        try:
            if not self.is_closed:
                self.compare()
                self.offloader.close()
        finally:
            self.running.__exit__(None, None, None)
        if isinstance(self.running, VirtualDevice):
            self.running.check(this_branch_only=self.looks)


def _attributes(optimizer: Any) -> dict[str, Any]:
    """What an optimizer has beside its class, hooks among it, but for what steps, loads and schedulers change."""
    changing = ("state", "param_groups", "defaults", "_opt_called", "_zero_grad_profile_name")
    return {
        name: list(value.values()) if "hooks" in name else value
        for name, value in vars(optimizer).items()
        if name not in changing
    }


class ReleasingMachine(OffloadMachine):
    """Memory of the device goes on request, mostly, and the optimizers are of other makers."""

    # A factored state has rows and columns.
    shapes = ((4, 3), (7,), (6, 1), (2, 5))

    @initialize(
        kind=st.sampled_from(list(FOREIGN_KINDS)),
        form=forms,
        with_masters=st.booleans(),
        watched=st.booleans(),
        seed=st.none() | st.integers(0, 99),
        release=st.sampled_from(["on_request", "on_request", "at_offload"]),
        begins=st.sampled_from(["with both", "with anything"]),
    )
    def start(
        self,
        kind: str,
        form: dict[str, Any],
        with_masters: bool,
        watched: bool,
        seed: int | None,
        release: str = "on_request",
        begins: str = "with anything",
    ) -> None:
        """As the other machine, often with a release and a load first. A fused Adam has masters of its own."""
        self.release_when = release
        self.begin(kind, form, with_masters and kind != "fused adam", watched, seed)
        if begins == "with both":
            self.release(between="write", again=True)
            self.release(between="bind", again=False)
            self.compare()
            if kind != "fused adam":
                self.load_and_step()

    @rule(between=st.sampled_from(["step", "write", "bind", "prefetch", "nothing"]), again=st.booleans())
    def release(self, between: str, again: bool) -> None:
        """What ``offload()`` copied goes on request; what is written or stepped in between is not lost."""
        self.whole_step(set())
        self.offloader.offload()
        if between == "step":
            self.whole_step(set())
        elif between in ("write", "bind"):
            self.offloader.settle()
            for optimizer in (self.plain, self.optimizer):
                for state in optimizer.state.values():
                    for name in [name for name in state if name in ("exp_avg", "momentum_buffer", "row")]:
                        state[name] = _written(state[name]) if between == "bind" else state[name].mul_(0.5)
        elif between == "prefetch":
            self.offloader.prefetch()
        # Without a release on request, nothing but offload() looks for what the user has bound.
        if again or (between == "bind" and self.release_when == "at_offload"):
            self.offloader.offload()
        self.offloader.release_gpu_memory()
        if again or between in ("nothing", "write", "bind"):
            self.offloader.settle()
            assert_equal(self.offloader.residency().device_bytes, 0, where=f"device bytes after {between}")

    @precondition(lambda self: self.kind != "fused adam")
    @rule()
    def load_and_step(self) -> None:
        """States that are loaded come from host memory; the step after it finds them on the device."""
        self.whole_step(set())
        self.save(live=False, prefetched=False)
        self.load(through_torch=False, other_variant=False)
        self.whole_step(set())

    @precondition(lambda self: self.kind != "fused adam" and self.masters is None)
    @rule(overflow=st.booleans())
    def scaled_step(self, overflow: bool) -> None:
        """Not for a fused Adam, which takes the scaler's number itself."""
        super().scaled_step(overflow)

    @precondition(lambda self: self.kind != "fused adam")
    @rule(through_torch=st.booleans(), other_variant=st.booleans())
    def load(self, through_torch: bool, other_variant: bool) -> None:
        """Not for a fused Adam, whose bfloat16 moments torch's own load would cast."""
        super().load(through_torch, other_variant)


def _written(old: torch.Tensor) -> torch.Tensor:
    """Another tensor of other values, which has been written as often: no count tells the two apart."""
    new = old.detach().clone().mul_(0.5)
    while new._version < old._version:
        new.add_(0.0)
    return new


def _cloned(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in state.items()}


def _change_variant(state: dict[str, Any]) -> None:
    for group in state["param_groups"]:
        group["amsgrad"] = not group["amsgrad"]
    for one in state["state"].values():
        if "max_exp_avg_sq" in one:
            del one["max_exp_avg_sq"]
        elif "exp_avg_sq" in one:
            one["max_exp_avg_sq"] = reread(one["exp_avg_sq"], fused=True)
