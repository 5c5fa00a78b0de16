"""Programs in corners: steps on the CPU, memory of other forms, options that are tensors, lists that users edit.

The other machines hold these still. A step on the CPU has a formula of its own: an optimizer that steps by it is the
plain one then. Parameters may lie transposed, learning rates may be tensors that are written in place, and parameters
take each other's places in groups.
"""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from torch.utils._python_dispatch import _disable_current_modes

from conformance.harness import assert_equal
from conformance.offload.cases import in_host_memory, reread, values
from conformance.offload.machine import OffloadMachine, forms
from refimpl.optimizers import adam_step
from twinproof.optimizers import AdamHyper

KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "foreach": False}),
    "amsgrad": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1, "foreach": False}),
    "maximize": (torch.optim.Adam, {"lr": 0.01, "maximize": True, "foreach": False}),
}
# None without dimensions, which no offloader moves: it would be stepped on the device, by torch.
SHAPES: tuple[tuple[int, ...], ...] = ((4, 3), (7,), (6, 1), (2, 5))
numbers = st.integers(0, len(SHAPES) - 1)


def by_formula(kind: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Torch's Adam or AdamW with the arithmetic of a step on the CPU."""

    class Formula(kind):  # type: ignore[misc, valid-type]
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            with _disable_current_modes():
                for group in self.param_groups:
                    for param in group["params"]:
                        if param.grad is not None:
                            self._step_one(group, param, param.grad)

        def _step_one(self, group: dict[str, Any], param: torch.Tensor, grad: torch.Tensor) -> None:
            state, names = self.state[param], ["exp_avg", "exp_avg_sq"]
            names += ["max_exp_avg_sq"] if group["amsgrad"] else []
            if not state:
                state["step"] = torch.tensor(0.0)
                state.update({name: torch.zeros_like(param) for name in names})
            state["step"] += 1
            hyper = AdamHyper.of(
                lr=float(group["lr"]),
                betas=group["betas"],
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                step=float(state["step"]),
                decoupled=kind is torch.optim.AdamW,
                maximize=group["maximize"],
            )
            adam_step(hyper, grad, param.detach(), *(state[name] for name in names))

    return Formula


class CornersMachine(OffloadMachine):
    """See the module."""

    shapes = SHAPES

    @initialize(
        kind=st.sampled_from(list(KINDS)),
        form=forms,
        with_masters=st.booleans(),
        watched=st.booleans(),
        seed=st.none() | st.integers(0, 99),
        step_device=st.sampled_from(["cpu", "device"]),
        is_turned=st.booleans(),
        rates_are_tensors=st.booleans(),
        begins=st.sampled_from(["move", "replace", "change", "anything"]),
    )
    def start(
        self,
        kind: str,
        form: dict[str, Any],
        with_masters: bool,
        watched: bool,
        seed: int | None,
        step_device: str = "cpu",
        is_turned: bool = False,
        rates_are_tensors: bool = False,
        begins: str = "anything",
    ) -> None:
        """As the other machine, in a corner; most programs begin with what random ones seldom do after a step."""
        self.step_device, self.is_turned, self.rates_are_tensors = step_device, is_turned, rates_are_tensors
        edits = begins in ("move", "replace")
        self.begin(kind, self.formed(form), with_masters and not rates_are_tensors and not edits, watched, seed)
        self.whole_step(set())
        if edits:
            getattr(self, begins)(number=1, prefetched=True)
        elif begins == "change":
            self.change_options(lr=0.5, weight_decay=0.1)

    def formed(self, form: dict[str, Any]) -> dict[str, Any]:
        """On the CPU everything moves: what does not is stepped by torch."""
        form = {**form, "step_device": self.step_device}
        return {**form, "fraction": 1.0} if self.step_device == "cpu" else form

    def initial(self, shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Matrices lie by columns where that was drawn."""
        value = values(shape, seed, dtype)
        with _disable_current_modes():
            return value.t().contiguous().t() if self.is_turned and value.dim() == 2 else value

    def made(self, params: list[Any], like: Any = None) -> Any:
        """The plain one steps by the formula where the other steps on the CPU."""
        kind, options = KINDS[self.kind]
        is_plain = params is self.plain_params
        if self.rates_are_tensors and self.device is not None:
            options = {**options, **in_host_memory(self.device, {"lr": torch.tensor(options["lr"])})}
        return (by_formula(kind) if is_plain and self.step_device == "cpu" else kind)(params, **options)

    @rule(lr=st.sampled_from([0.5, 0.03]), weight_decay=st.sampled_from([0.0, 0.1]))
    def change_options(self, lr: float, weight_decay: float) -> None:
        """Between two steps, and in place where a rate is a tensor, as schedulers do."""
        self.whole_step(set())
        for optimizer in (self.plain, self.optimizer):
            for group in optimizer.param_groups:
                group["weight_decay"] = weight_decay
                if isinstance(group["lr"], torch.Tensor):
                    group["lr"].fill_(lr)
                else:
                    group["lr"] = lr
        self.whole_step(set())

    @precondition(lambda self: not self.rates_are_tensors)
    @rule(through_torch=st.booleans(), other_variant=st.booleans())
    def load(self, through_torch: bool, other_variant: bool) -> None:
        """Torch's own load copies rates that are tensors in a way in which no order can be seen."""
        super().load(through_torch, other_variant)

    # Lists that users edit.

    def arms(self) -> list[tuple[Any, list[Any]]]:
        """(optimizer, parameters), the plain ones first."""
        return [(self.plain, self.plain_params), (self.optimizer, self.params)]

    def place_of(self, optimizer: Any, param: Any) -> tuple[list[Any], int]:
        """The list that a parameter is in, and its position there."""
        for group in optimizer.param_groups:
            for at, other in enumerate(group["params"]):
                if other is param:
                    return group["params"], at
        raise AssertionError("a parameter of the program is in no group")

    @precondition(lambda self: self.masters is None)
    @rule(number=numbers, prefetched=st.booleans())
    def replace(self, number: int, prefetched: bool) -> None:
        """A new parameter takes the place of another one, which goes with its state."""
        if prefetched:
            self.prefetch()
        self.count += 1
        for optimizer, params in self.arms():
            listed, at = self.place_of(optimizer, params[number])
            optimizer.state.pop(listed[at], None)
            params[number] = listed[at] = torch.nn.Parameter(self.initial(params[number].shape, 300 + self.count))
        self.edited()

    @precondition(lambda self: self.masters is None)
    @rule(number=numbers, prefetched=st.booleans())
    def move(self, number: int, prefetched: bool) -> None:
        """A parameter goes to the end of the last group, with its state."""
        if prefetched:
            self.prefetch()
        for optimizer, params in self.arms():
            listed, at = self.place_of(optimizer, params[number])
            optimizer.param_groups[-1]["params"].append(listed.pop(at))
        self.edited()

    def edited(self) -> None:
        """The lists have changed: what moves is known with the next step, and older state dicts fit no more."""
        self.whole_step(set())
        assert_equal(len(self.offloader.bundles) <= len(self.params), True, where="no more moves than is listed")
        self.saved = reread(self.offloader.snapshot())

    @rule(form=forms)
    def close_and_attach(self, form: dict[str, Any]) -> None:
        """In between both optimizers are plain, which takes no step where torch's has not the formula's bits."""
        if self.step_device == "device":
            super().close_and_attach(self.formed(form))
            return
        self.offloader.close()
        self.is_closed = True
        self.form = self.formed(form)
        self.attach()
