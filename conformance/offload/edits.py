"""Programs of users that edit groups, options and states between steps, in any order.

The other machines draw one edit, of one kind, with one set of options for all parameters. Here groups have options of
their own; parameters go from one to another, leave and come back; options that bring states are turned; states are
written and replaced; what moves is moved by kind. Two steps follow each edit: the first makes what an option brings.
"""

from __future__ import annotations

import copy
import random
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule
from torch.utils._python_dispatch import _disable_current_modes

from conformance.harness import assert_equal
from conformance.offload.cases import assert_same_state, reread, values
from conformance.offload.machine import OffloadMachine
from twinproof.offload.states import is_movable

# One of a unit of alignment, and less and more than one.
SHAPES: tuple[tuple[int, ...], ...] = ((64,), (7,), (16, 8), (64,), (3, 3))
# Options of the optimizer; the groups alternate between these and those of ``OTHERS``.
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": ("SGD", {"lr": 0.1, "foreach": False}),
    "adam": ("Adam", {"lr": 0.01, "foreach": False}),
    "rmsprop": ("RMSprop", {"lr": 0.01, "foreach": False}),
}
OTHERS: dict[str, dict[str, Any]] = {
    "sgd": {"momentum": 0.9},
    "adam": {"amsgrad": True, "weight_decay": 0.1},
    "rmsprop": {"momentum": 0.5, "centered": True},
}
PLAIN: dict[str, dict[str, Any]] = {
    "sgd": {"momentum": 0.0},
    "adam": {"amsgrad": False},
    "rmsprop": {"momentum": 0.0, "centered": False},
}
EDITS = ("move", "leave", "come_back", "turn", "reorder", "group_goes", "write", "replace_state", "by_kind", "copied")
# Each edit once and some more often, in any order: a free choice seldom has the one that matters in the right place.
programs = st.permutations([*EDITS, "move", "move", "turn"])
edit_forms = st.fixed_dictionaries(
    {
        "chunk_bytes": st.sampled_from([0, 1, 256, 600, 1 << 20]),
        "slots": st.integers(1, 3),
        "fraction": st.sampled_from([1.0, 1.0, 1.0, 0.5]),
    }
)


class EditsMachine(OffloadMachine):
    """See the module."""

    shapes = SHAPES

    @initialize(
        kind=st.sampled_from([*KINDS, "sgd"]),
        form=edit_forms,
        with_masters=st.booleans(),
        watched=st.booleans(),
        seed=st.none() | st.integers(0, 99),
        release=st.sampled_from(["at_offload", "at_offload", "on_request"]),
        program=programs,
        choice=st.integers(0, 1 << 32),
    )
    def start(
        self,
        kind: str,
        form: dict[str, Any],
        with_masters: bool,
        watched: bool,
        seed: int | None,
        release: str = "at_offload",
        program: tuple[str, ...] = (),
        choice: int = 0,
    ) -> None:
        """All edits, each followed by steps and a look."""
        self.release_when = release
        self.away: list[int] = []
        self.begin(kind, form, with_masters, watched, seed)
        self.whole_step(set())
        # What is drawn number by number is mostly small.
        draw = random.Random(choice)
        for edit in program:
            self.edit_once(edit, draw.randrange(60), prefetched=draw.random() < 0.5)
            self.parameters_are_the_same()
            self.bytes_add_up()
        self.saved = reread(self.offloader.snapshot())

    def made(self, params: list[Any], like: Any = None) -> Any:
        """Three groups, of which the second has other options."""
        name, options = KINDS[self.kind]
        if like is None:
            groups = [{"params": params[:2]}, {"params": params[2:4], **OTHERS[self.kind]}, {"params": params[4:]}]
        else:
            groups = [{k: list(v) if k == "params" else v for k, v in group.items()} for group in like.param_groups]
        return getattr(torch.optim, name)(groups, **options)

    # What both arms have.

    def arms(self) -> list[tuple[Any, list[Any]]]:
        """(optimizer, what it steps), the plain ones first."""
        stepped = self.params if self.masters is None else list(self.masters.parameters())
        return [(self.plain, self.plain_params), (self.optimizer, stepped)]

    @staticmethod
    def group_of(optimizer: Any, param: Any) -> dict[str, Any]:
        """The group that lists a parameter."""
        found: dict[str, Any] = next(g for g in optimizer.param_groups if any(p is param for p in g["params"]))
        return found

    @staticmethod
    def unlist(optimizer: Any, param: Any) -> None:
        """Take a parameter out of its group."""
        for group in optimizer.param_groups:
            group["params"] = [other for other in group["params"] if other is not param]

    @rule(edit=st.sampled_from(EDITS), number=st.integers(0, 59), prefetched=st.booleans())
    def edit(self, edit: str, number: int, prefetched: bool) -> None:
        """One more; older state dicts fit no more."""
        self.edit_once(edit, number, prefetched=prefetched)
        self.saved = reread(self.offloader.snapshot())

    def edit_once(self, edit: str, number: int, *, prefetched: bool) -> None:
        """One edit of both, then steps: the first makes what an option brings."""
        listed = [at for at in range(len(self.shapes)) if at not in self.away]
        if (edit == "leave" and (len(listed) < 2 or self.masters is not None)) or (
            edit == "come_back" and not self.away
        ):
            edit = "move"
        if edit == "group_goes" and (self.masters is not None or len(self.plain.param_groups) < 2):
            edit = "turn"
        if prefetched:
            self.prefetch()
        getattr(self, edit)(listed[number % len(listed)], number)
        self.whole_step(set())
        self.whole_step(set())

    def move(self, at: int, number: int) -> None:
        """A parameter goes to another group; with its states, where torch can step it there with them."""
        for optimizer, params in self.arms():
            to = optimizer.param_groups[number // 5 % len(optimizer.param_groups)]
            self.unlist(optimizer, params[at])
            if self.kind != "sgd":
                optimizer.state.pop(params[at], None)
            to["params"].append(params[at])

    def leave(self, at: int, number: int) -> None:
        """A parameter is stepped no more, and its state is dropped at once or after a step."""
        for optimizer, params in self.arms():
            self.unlist(optimizer, params[at])
            if number // 5 % 2:
                optimizer.state.pop(params[at], None)
        self.away.append(at)
        self.whole_step(set())
        for optimizer, params in self.arms():
            optimizer.state.pop(params[at], None)

    def come_back(self, at: int, number: int) -> None:
        """One that left is stepped again, in any group."""
        at = self.away.pop(0)
        for optimizer, params in self.arms():
            optimizer.param_groups[number % len(optimizer.param_groups)]["params"].append(params[at])

    def turn(self, at: int, number: int) -> None:
        """A group gets the other options; states that torch would miss begin anew."""
        for _ in range(2 if number // 5 % 2 else 0):
            # There and back again.
            self.turned(at)
            self.whole_step(set())
        self.turned(at)

    def turned(self, at: int) -> None:
        """Both arms' group of this parameter."""
        for optimizer, params in self.arms():
            group = self.group_of(optimizer, params[at])
            has_other = all(group[key] == value for key, value in OTHERS[self.kind].items())
            group.update(PLAIN[self.kind] if has_other else OTHERS[self.kind])
            for param in group["params"] if self.kind != "sgd" else ():
                optimizer.state.pop(param, None)

    def reorder(self, at: int, number: int) -> None:
        """Groups, or the parameters of one, in another order."""
        for optimizer, params in self.arms():
            if number % 2:
                optimizer.param_groups.reverse()
            else:
                self.group_of(optimizer, params[at])["params"].reverse()

    def group_goes(self, at: int, number: int) -> None:
        """A group is dropped; what it had comes to a new one at the end, or to the first."""
        for optimizer, params in self.arms():
            group = self.group_of(optimizer, params[at])
            optimizer.param_groups = [other for other in optimizer.param_groups if other is not group]
            for param in group["params"]:
                optimizer.state.pop(param, None)
            if number // 5 % 2:
                optimizer.add_param_group({"params": group["params"], **OTHERS[self.kind]})
            else:
                optimizer.param_groups[0]["params"] += group["params"]

    def write(self, at: int, number: int) -> None:
        """A state is written in place."""
        self.offloader.settle_for_writing()
        for optimizer, params in self.arms():
            for value in optimizer.state.get(params[at], {}).values():
                if is_movable(value):
                    value.mul_(0.5)

    def replace_state(self, at: int, number: int) -> None:
        """One of its states is another tensor, which offload() sends home."""
        for optimizer, params in self.arms():
            state = optimizer.state.get(params[at], {})
            for name in sorted(name for name, value in state.items() if is_movable(value))[:1]:
                state[name] = values(params[at].shape, number).abs()
        self.offloader.offload()
        self.offloader.release_gpu_memory()

    def by_kind(self, at: int, number: int) -> None:
        """States and masters are moved one after the other, and perhaps let go."""
        for kind in ("states", "masters") if number % 2 else ("masters", "states"):
            self.offloader.offload(states=kind == "states", masters=kind == "masters")
        if number // 5 % 2:
            self.offloader.release_gpu_memory()
            self.offloader.settle()
            assert_equal(self.offloader.residency().device_bytes, 0, where="bytes that stay on the device")

    def copied(self, at: int, number: int) -> None:
        """A copy of the optimizer is as the plain one's."""
        self.offloader.settle()
        with _disable_current_modes():
            mine = copy.deepcopy(self.optimizer).state_dict()
            assert_same_state(mine, self.plain.state_dict())
        # Everything is on the device for it, until the next step.

    # What always holds.

    def backward(self, skip: set[int], adds: bool) -> None:
        """As the other machine; none for those that left."""
        super().backward(skip, adds)
        for at in self.away:
            self.params[at].grad = self.plain_params[at].grad = None

    def movable_bytes(self) -> int:
        """Of the states of listed parameters, and masters."""
        listed = {param for group in self.plain.param_groups for param in group["params"]}
        states = [s for param in listed for s in self.plain.state.get(param, {}).values() if is_movable(s)]
        masters = [param for param in self.plain_params if self.masters is not None]
        return sum(tensor.nbytes for tensor in states + masters)
