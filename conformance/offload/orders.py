"""Events that a user may bring between any two of the machine's, and what is promised besides values.

States are rebound, dropped and written one by one; options are toggled; hooks edit inside a step, or raise; parameters
leave their group and come back; everything is brought to the device. The plain optimizer goes through the same. Memory
is watched by weak references: what the offloader took of the host and of the device has to be what it says it holds.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

from conformance.harness import assert_equal, assert_le, raises
from conformance.offload.cases import values
from conformance.offload.machine import DRAWN, SHAPES, OffloadMachine, forms, subsets
from twinproof.errors import ConfigError
from twinproof.offload.states import is_movable

# Options in which groups may differ, and which may change between steps, for each kind.
OPTIONS: dict[str, dict[str, tuple[Any, Any]]] = {
    "sgd": {"momentum": (0.0, 0.9), "nesterov": (True, False), "dampening": (0.0, 0.5), "maximize": (True, False)},
    "adamw": {"betas": ((0.5, 0.9), (0.9, 0.999)), "maximize": (True, False), "eps": (1e-8, 1e-2)},
    "fused": {"betas": ((0.5, 0.9), (0.9, 0.999)), "maximize": (True, False), "weight_decay": (0.0, 0.1)},
    "nadam": {"momentum_decay": (4e-3, 0.1), "decoupled_weight_decay": (True, False), "maximize": (True, False)},
    "adagrad": {"lr_decay": (0.0, 0.1), "maximize": (True, False), "weight_decay": (0.0, 0.1)},
}
EDITS = ("lr", "option", "gradient", "no gradient", "weight", "state", "rebind", "other form", "drop")
VERBS = ("offload", "prefetch", "reload", "settle", "release_gpu_memory", "sync_before_step", "snapshot")
numbers = st.integers(0, len(SHAPES) - 1)


class HookError(Exception):
    """A hook's own."""


class MemoryWatch:
    """What an engine gave out and somebody still holds, by weak references to storages."""

    def __init__(self, engine: Any) -> None:
        self._given: dict[str, list[tuple[Any, int, int]]] = {"host": [], "device": []}
        engine.host_empty = partial(self._noted, "host", engine.host_empty)
        engine.device_empty = partial(self._noted, "device", engine.device_empty)

    def _noted(self, side: str, make: Callable[[int], torch.Tensor], size_bytes: int) -> torch.Tensor:
        made = make(size_bytes)
        weak = StorageWeakRef(made.untyped_storage())  # type: ignore[no-untyped-call]
        self._given[side].append((weak, made.data_ptr(), size_bytes))
        return made

    def held(self, side: str) -> dict[int, int]:
        """Address and size of each storage of one side that is alive."""
        self._given[side] = [entry for entry in self._given[side] if not entry[0].expired()]
        return {address: size_bytes for _, address, size_bytes in self._given[side] if size_bytes}


class OrdersMachine(OffloadMachine):
    """See the module. ``watches_memory``: copies run at once, so that what is alive is what is held."""

    watches_memory = False

    @initialize(
        kind=st.sampled_from(DRAWN),
        form=forms,
        with_masters=st.booleans(),
        watched=st.booleans(),
        seed=st.none() | st.integers(0, 99),
        release=st.sampled_from(["at_offload", "at_offload", "on_request"]),
        groups=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1)), max_size=3),
    )
    def start(
        self,
        kind: str,
        form: dict[str, Any],
        with_masters: bool,
        watched: bool,
        seed: int | None,
        release: str = "at_offload",
        groups: Any = (),
    ) -> None:
        """As the other machine, with groups that differ in one option each, and with hooks."""
        self.release_when, self.groups = release, groups
        # What a hook is to do once, by arm and moment; hooks that ran, by arm.
        self.edits: dict[tuple[str, str], Callable[[], None]] = {}
        self.ended = {"plain": 0, "offloaded": 0}
        self.begin(kind, form, with_masters, watched, seed)

    def made(self, params: list[Any], like: Any = None) -> Any:
        """An optimizer whose groups are split as drawn, or as another's, with hooks."""
        optimizer = super().made(params)
        if like is not None:
            optimizer.param_groups.clear()
            for other in like.param_groups:
                optimizer.add_param_group({**other, "params": list(other["params"])})
        else:
            for number, which in self.groups:
                first = optimizer.param_groups[0]
                if len(first["params"]) > 1:
                    name = self.option(number)
                    options = {key: value for key, value in first.items() if key != "params"}
                    moved = {"params": [first["params"].pop()], name: OPTIONS[self.kind][name][which]}
                    optimizer.add_param_group({**options, **moved})
        optimizer.register_step_pre_hook(partial(self.hooked, "pre"))
        optimizer.register_step_post_hook(partial(self.hooked, "post"))
        return optimizer

    def option(self, number: int) -> str:
        """The name of one of the kind's options."""
        names = sorted(OPTIONS[self.kind])
        return names[number % len(names)]

    def attach(self) -> None:
        """Memory is watched from the first attachment on."""
        assert self.device is not None
        if not hasattr(self, "memory"):
            self.memory = MemoryWatch(self.device.engine)
        super().attach()
        self.is_home, self.may_hold_slots, self.may_hold_blocks = True, False, False
        self.ended = {"plain": 0, "offloaded": 0}

    # Edits, which go to both arms.

    def arms(self) -> list[tuple[str, Any, list[Any], list[Any]]]:
        """(name, optimizer, the model's parameters, what is stepped)."""
        stepped = self.params if self.masters is None else list(self.masters.parameters())
        return [
            ("plain", self.plain, self.plain_params, self.plain_params),
            ("offloaded", self.optimizer, self.params, stepped),
        ]

    def hooked(self, when: str, optimizer: Any, *_: Any) -> None:
        """Do what a rule left here."""
        arm = "plain" if optimizer is self.plain else "offloaded"
        self.ended[arm] += when == "post"
        edit = self.edits.pop((arm, when), None)
        if edit is not None:
            edit()

    def edit(self, arm: int, edit: str, number: int, which: int) -> None:
        """One edit of one arm."""
        name, optimizer, params, stepped = self.arms()[arm]
        group = optimizer.param_groups[number % len(optimizer.param_groups)]
        param, state = params[number], optimizer.state.get(stepped[number], {})
        if edit == "lr":
            group["lr"] = (0.02, 0.3)[which]
        elif edit == "option":
            option = self.option(number)
            group[option] = OPTIONS[self.kind][option][which]
        elif edit == "gradient" and param.grad is not None:
            param.grad.mul_(0.5)
        elif edit == "no gradient":
            param.grad = None
        elif edit == "weight" and self.masters is None:
            with torch.no_grad():
                param.mul_(0.5)
        elif edit == "drop":
            self.may_hold_blocks = True
            optimizer.state.pop(stepped[number], None)
        elif edit in ("state", "rebind", "other form"):
            if name == "offloaded":
                # User code waits before it looks at states, or writes them.
                self.offloader.settle_for_writing()
                self.is_home &= edit == "state"
                self.may_hold_blocks |= edit != "state"
            self.edit_state(edit, state, which)

    def edit_state(self, edit: str, state: dict[str, Any], which: int) -> None:
        """States are written where they lie, or replaced by memory of the device, one or all."""
        found = sorted(name for name, value in state.items() if is_movable(value))
        for seed, name in enumerate(found[: 1 + which]):
            old = state[name]
            if edit == "state":
                old.mul_(0.5)
                continue
            new = values(old.shape, 31 + seed).abs().to(old.dtype)
            if edit == "other form" and new.dim() == 2:
                with _disable_current_modes():
                    new = new.t().contiguous().t()
            state[name] = new

    @rule(edit=st.sampled_from(EDITS), number=numbers, which=st.integers(0, 1), prefetched=st.booleans())
    def edit_between(self, edit: str, number: int, which: int, prefetched: bool) -> None:
        """Between two steps, perhaps under a prefetch."""
        if prefetched:
            self.prefetch()
        for arm in range(2):
            self.edit(arm, edit, number, which)

    @rule(edit=st.sampled_from(EDITS[-4:]), number=numbers, which=st.integers(0, 1), prefetched=st.booleans())
    def edit_and_step(self, edit: str, number: int, which: int, prefetched: bool) -> None:
        """States that a step made are written, replaced or dropped; the next step takes what is there then."""
        self.whole_step(set())
        self.edit_between(edit, number, which, prefetched)
        self.whole_step(set())

    @rule(
        when=st.sampled_from(["pre", "post"]),
        edit=st.sampled_from(EDITS),
        number=numbers,
        which=st.integers(0, 1),
        prefetched=st.booleans(),
    )
    def edit_inside(self, when: str, edit: str, number: int, which: int, prefetched: bool) -> None:
        """By a hook of a step."""
        self.backward(set(), adds=False)
        if prefetched:
            self.prefetch()
        for arm, (name, *_) in enumerate(self.arms()):
            self.edits[name, when] = partial(self.edit, arm, edit, number, which)
        self.step()
        self.is_home = when == "pre" or edit not in ("rebind", "other form")

    @rule(when=st.sampled_from(["pre", "post"]), skip=subsets)
    def hook_raises(self, when: str, skip: set[int]) -> None:
        """Before a step, which then does not happen, or behind it."""
        self.backward(skip, adds=False)
        for name, optimizer, *_ in self.arms():
            self.edits[name, when] = self.fail
            try:
                optimizer.step()
            except HookError:
                continue
            assert_equal("no error", "HookError", where=f"a hook that raises, {name}")
        if when == "post":
            self.gradients_taken()

    def fail(self) -> None:
        """As a hook of the user's does."""
        raise HookError

    @rule(number=numbers, relists=st.booleans(), verb=st.sampled_from(VERBS[:-1]))
    @precondition(lambda self: self.masters is None)
    def take_out(self, number: int, relists: bool, verb: str) -> None:
        """A parameter leaves its group for two steps, and comes back at its place, with its state or without."""
        self.whole_step(set())
        homes = []
        for _, optimizer, _, stepped in self.arms():
            group = next(g for g in optimizer.param_groups if any(p is stepped[number] for p in g["params"]))
            at = next(i for i, param in enumerate(group["params"]) if param is stepped[number])
            homes.append((optimizer, group, at, group["params"].pop(at)))
        self.whole_step(set())
        getattr(self.offloader, verb)()
        self.whole_step(set())
        for optimizer, group, at, param in homes:
            if not relists:
                optimizer.state.pop(param, None)
            group["params"].insert(at, param)
        self.whole_step(set())

    # Verbs of which the other machine knows nothing.

    @rule(states=st.booleans(), masters=st.booleans())
    def offload_some(self, states: bool, masters: bool) -> None:
        """States, masters, both or neither go."""
        self.offloader.offload(states=states, masters=masters)
        self.is_home |= states and masters

    @rule()
    def bring(self) -> None:
        """Everything comes to the device, for a tool that looks at it there."""
        self.offloader.to_device(self.offloader.bundles)
        assert_equal(self.offloader.residency().host_bytes, 0, where="brought to the device: bytes on the host")
        self.is_home = self.may_hold_slots = False

    @precondition(lambda self: self.masters is not None)
    @rule(seed=st.integers(0, 9))
    def load_masters(self, seed: int) -> None:
        """Saved masters come back; the states stay."""
        loaded = [values(param.shape, 800 + 10 * seed + i) for i, param in enumerate(self.plain_params)]
        self.offloader.load_masters(loaded)
        with torch.no_grad():
            for plain, value in zip(self.plain_params, loaded, strict=True):
                plain.copy_(value)

    @rule(verb=st.sampled_from(VERBS))
    def call_twice(self, verb: str) -> None:
        """What the first call did, the second finds done."""
        assert self.device is not None
        getattr(self.offloader, verb)()
        self.called(verb)
        moved = dict(self.device.engine.moved_bytes)
        getattr(self.offloader, verb)()
        if self.release_when == "at_offload":
            assert_equal(dict(self.device.engine.moved_bytes), moved, where=f"bytes moved by a second {verb}()")

    # What the other machine's rules mean for what is held.

    def called(self, verb: str) -> None:
        """A verb is over."""
        if verb in ("prefetch", "reload"):
            self.may_hold_slots = True
        elif verb == "offload":
            self.is_home, self.may_hold_slots, self.may_hold_blocks = True, False, False

    def gradients_taken(self) -> None:
        """As the other machine."""
        super().gradients_taken()
        self.is_home, self.may_hold_slots, self.may_hold_blocks = True, False, False

    def after_close(self) -> None:
        """A closed offloader holds nothing, and says that it is closed."""
        for verb in VERBS:
            # There is nothing left to wait for, so that a wait is no mistake.
            if verb == "settle":
                continue
            with raises(ConfigError, mentions=("closed",)):
                getattr(self.offloader, verb)()
        self.offloader.close()
        if self.watches_memory:
            assert_equal(sum(self.memory.held("host").values()), 0, where="host memory after close()")

    # What always holds.

    @invariant()
    def groups_are_the_users(self) -> None:
        """The same parameters in the same groups, whatever a step did with them; as many steps as hooks saw."""
        if self.device is None:
            return
        for one, other in zip(self.plain.param_groups, self.optimizer.param_groups, strict=True):
            ours = {key: value for key, value in other.items() if key != "params"}
            assert_equal(ours, {key: value for key, value in one.items() if key != "params"}, where="options")
        arms = self.arms()
        listed = [
            [[self.number(param, stepped) for param in group["params"]] for group in optimizer.param_groups]
            for _, optimizer, _, stepped in arms
        ]
        assert_equal(listed[1], listed[0], where="parameters by group")
        assert_equal(self.ended["offloaded"], self.ended["plain"], where="hooks behind a step")
        assert_equal(self.offloader.stats().step_count, self.ended["offloaded"], where="steps counted")

    @staticmethod
    def number(param: Any, params: list[Any]) -> int:
        """The position of a parameter, by identity; -1: it is none of them."""
        return next((i for i, other in enumerate(params) if other is param), -1)

    @invariant()
    def memory_is_what_is_held(self) -> None:
        """Host memory that is alive is what stats() says; the device holds what is bound, and slots."""
        if self.device is None or not self.watches_memory:
            return
        held = sum(self.memory.held("host").values())
        assert_equal(held, self.offloader.stats().host_bytes, where="host memory that is alive")
        # A block of the device in which states of several lay goes as a whole, with the next step or move.
        blocks = len(self.params) if self.may_hold_blocks else 0
        allowed = blocks + (self.form["slots"] if self.may_hold_slots else 0)
        if len(self.unbound()) > allowed:
            # An optimizer that this machine has dropped, with its hooks, is a cycle.
            gc.collect()
        assert_le(len(self.unbound()), allowed, where="pieces of device memory that nothing is bound to")

    def unbound(self) -> list[int]:
        """Memory of the device that the engine gave, and that no parameter or state lies in."""
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        tensors = [value for value in [*states, *self.arms()[1][3]] if isinstance(value, torch.Tensor)]
        bound = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        return [address for address in self.memory.held("device") if address not in bound]
