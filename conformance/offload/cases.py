"""Cases of the offloader's requirements: a plain optimizer beside an offloaded one, with the same gradients.

Both run on a virtual device, or on that of ``--twinproof-device``. Where the offloaded one steps on the CPU, the
formula on plain tensors stands beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from conformance.harness import assert_equal, assert_same_tensor
from conformance.harness.places import on_pretend
from conformance.provers.pretend_device import PretendEngine, on_host
from conformance.provers.virtual_device import VirtualDevice
from refimpl.optimizers import adam_step
from twinproof.engine import CudaEngine
from twinproof.optimizers import AdamHyper

# What an implementation must declare to be asked for updates by one kernel.
FUSED = ("fused_updates",)
SHAPES: tuple[tuple[int, ...], ...] = ((8, 16), (64,), (4, 32), (16, 16))
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "Adam": {"amsgrad": True},
    "AdamW": {"lr": 0.01},
    "Adagrad": {},
    "RMSprop": {"centered": True, "momentum": 0.5},
    "Adadelta": {},
    "Adamax": {},
    "NAdam": {},
    "RAdam": {},
    "Rprop": {},
    "ASGD": {},
    "Adafactor": {},
    "Muon": {},
}
# Sizes without padding, so that bytes moved are the payload; an optimizer that keeps no counter for the host to read.
EVEN: list[tuple[int, ...]] = [(64, 16)] * 8
EVEN_BYTES = 4 * 64 * 16
# What one thread packs at a time, and what it updates.
TASK_BYTES = 256 << 10
BLOCK_ELEMENTS = 1 << 16
PLAIN_SGD: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "foreach": False}


CPU_OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw": ("AdamW", {"lr": 0.01}),
    "adam": ("Adam", {"lr": 0.02, "weight_decay": 0.1, "betas": (0.8, 0.95)}),
    "amsgrad": ("AdamW", {"lr": 0.01, "amsgrad": True, "eps": 1e-4}),
    "maximize": ("Adam", {"maximize": True}),
    "decoupled": ("Adam", {"weight_decay": 0.3, "decoupled_weight_decay": True}),
    "tensor": ("AdamW", {"lr": torch.tensor(0.01), "weight_decay": 0.0}),
}


# Where ``proven_on`` has its program put parameters and gradients.
_PLACE: ContextVar[torch.device | None] = ContextVar("place", default=None)


@cache
def adagrad_grows() -> bool:
    """Whether torch's Adagrad steps a parameter that it was not made with, or whose state is gone; 2.11 does not."""
    late, optimizer = torch.ones(1), torch.optim.Adagrad([torch.ones(1)])
    optimizer.add_param_group({"params": [late]})
    optimizer.state.pop(late, None)
    late.grad = torch.ones(1)
    try:
        optimizer.step()
    except KeyError:
        return False
    return True


def values(shape: Sequence[int], seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal values by seed, on the device of ``proven_on``.

    They are made outside of any mode, so that nothing of the harness is part of the program.
    """
    with _disable_current_modes():
        generator = torch.Generator().manual_seed(seed)
        made = torch.randn(tuple(shape), generator=generator, dtype=torch.float32).to(dtype)
        return made.to(_PLACE.get() or "cpu")


def assert_same_numbers(got: torch.Tensor, expected: torch.Tensor, where: str) -> None:
    """Equal bit for bit, but for the payloads of NaNs."""
    # Which payload a NaN keeps depends on the order of operands that a compiler chose; that it is one does not.
    assert_same_tensor(got.isnan(), expected.isnan(), where=f"NaNs of {where}")
    assert_same_tensor(got.masked_fill(got.isnan(), 0), expected.masked_fill(expected.isnan(), 0), where=where)


@dataclass(frozen=True)
class Place:
    """A device with memory of its own, and the engine that moves states there."""

    device: torch.device
    engine: Any


class Twins:
    """A plain optimizer and an offloaded one on equal parameters.

    Args:
        offload: the component.
        device: the virtual device, whose context is entered by the caller, or the place of all parameters.
        kind: a name of ``torch.optim``.
        params: initial values; each arm gets clones.
        groups: which parameters go into which group, with options; None: all in one.
        options: of both optimizers.
        offloading: arguments of the offloader.
    """

    def __init__(
        self,
        offload: Any,
        device: VirtualDevice | Place,
        kind: str = "AdamW",
        params: Sequence[torch.Tensor] | None = None,
        *,
        groups: Sequence[tuple[Sequence[int], dict[str, Any]]] | None = None,
        options: dict[str, Any] | None = None,
        **offloading: Any,
    ) -> None:
        given = [values(shape, i) for i, shape in enumerate(SHAPES)] if params is None else list(params)
        if kind == "Muon":
            given = [value for value in given if value.dim() == 2]
        self.offload, self.device, self.kind = offload, device, kind
        self.place = device.device if isinstance(device, Place) else torch.device("cpu")
        self.plain_params = [torch.nn.Parameter(self.placed(value)) for value in given]
        self.params = [torch.nn.Parameter(self.placed(value)) for value in given]
        chosen = OPTIMIZERS[kind] if options is None else options
        made = []
        for mine in (self.plain_params, self.params):
            some: Any = mine if groups is None else [{"params": [mine[i] for i in ids], **o} for ids, o in groups]
            made.append(getattr(torch.optim, kind)(some, **chosen))
        self.plain, self.optimizer = made
        self.offloader = offload.OptimizerStateOffloader(
            self.optimizer, engine=device.engine, **{"chunk_bytes": 1024, **offloading}
        )
        self.step_count = 0

    def placed(self, value: torch.Tensor) -> torch.Tensor:
        """A copy on the device, with the strides of the value."""
        return value.to(self.place, copy=True)

    def set_gradients(self, skip: Sequence[int] = (), *, add: bool = False) -> None:
        """The same new gradients in both arms; none where ``skip`` says so."""
        self.step_count += 1
        for arm in (self.plain_params, self.params):
            for i, param in enumerate(arm):
                grad = self.placed(values(param.shape, 1000 * self.step_count + i, param.dtype))
                if i in skip:
                    param.grad = None
                elif add and param.grad is not None:
                    param.grad = param.grad + grad
                else:
                    param.grad = grad

    def step(self, skip: Sequence[int] = ()) -> None:
        """One step of both."""
        self.set_gradients(skip)
        self.plain.step()
        self.optimizer.step()

    def check(self) -> None:
        """Parameters and states are the same, bit for bit, keys and dtypes included."""
        got = self.offloader.snapshot()
        with _disable_current_modes():
            for i, (plain, param) in enumerate(zip(self.plain_params, self.params, strict=True)):
                assert_same_tensor(
                    on_host(param.detach()).cpu(),
                    on_host(plain.detach()).cpu(),
                    where=f"parameter {i} after {self.step_count} steps",
                )
            assert_same_state(got, self.plain.state_dict())


def assert_same_state(got: dict[str, Any], expected: dict[str, Any]) -> None:
    """Two state dicts of optimizers are equal, bit for bit."""
    assert_equal(got["param_groups"], expected["param_groups"], where="param_groups")
    assert_equal(sorted(got["state"]), sorted(expected["state"]), where="parameters with state")
    for number, state in expected["state"].items():
        assert_equal(sorted(got["state"][number]), sorted(state), where=f"states of parameter {number}")
        for name, value in state.items():
            where = f"state {name} of parameter {number}"
            if isinstance(value, torch.Tensor):
                found = got["state"][number][name]
                assert_equal(isinstance(found, torch.Tensor), True, where=f"{where} is a tensor")
                assert_same_tensor(on_host(found).cpu(), on_host(value).cpu(), where=where)
                assert_equal(found.stride(), value.stride(), where=f"strides of {where}")
            else:
                assert_equal(got["state"][number][name], value, where=where)


class CpuArm:
    """Parameters whose optimizer steps on the CPU, and beside them the formula on plain tensors.

    Args:
        halves: the parameters are bfloat16, with masters; else float32, without.
        shapes: of the parameters.
        laid: how the values of a parameter lie in memory.
    """

    def __init__(
        self,
        offload: Any,
        device: VirtualDevice | Place,
        options: str = "adamw",
        *,
        halves: bool = False,
        shapes: Sequence[tuple[int, ...]] = SHAPES,
        laid: Callable[[torch.Tensor], torch.Tensor] = lambda value: value,
        **offloading: Any,
    ) -> None:
        kind, chosen = CPU_OPTIONS[options]
        self.options = in_host_memory(device, chosen)
        self.decoupled = chosen.get("decoupled_weight_decay", kind == "AdamW")
        dtype = torch.bfloat16 if halves else torch.float32
        self.params = [torch.nn.Parameter(laid(values(shape, i, dtype))) for i, shape in enumerate(shapes)]
        self.masters = offload.MasterWeights(self.params) if halves else None
        stepped = self.params if self.masters is None else self.masters.parameters()
        self.optimizer = getattr(torch.optim, kind)(stepped, **self.options)
        self.offloader = offload.OptimizerStateOffloader(
            self.optimizer,
            engine=device.engine,
            master_weights=self.masters,
            **{"chunk_bytes": 4096, "step_device": "cpu", **offloading},
        )
        with _disable_current_modes():
            self.weights = [on_host(param.detach()).cpu().float().clone() for param in self.params]
            self.moments = [[torch.zeros_like(w) for _ in range(3)] for w in self.weights]
        self.counts = [0] * len(self.params)
        self.step_count = 0

    def step(self, skip: Sequence[int] = ()) -> None:
        """One step of both, without a gradient where ``skip`` says so."""
        self.step_count += 1
        for i, param in enumerate(self.params):
            param.grad = None if i in skip else values(param.shape, 1000 * self.step_count + i, param.dtype)
        grads = [None if param.grad is None else param.grad.detach() for param in self.params]
        self.optimizer.step()
        with _disable_current_modes():
            for i, grad in enumerate(grads):
                if grad is not None:
                    self.expect(i, on_host(grad).cpu())

    def expect(self, i: int, grad: torch.Tensor) -> None:
        """The formula steps one parameter."""
        group = self.optimizer.param_groups[0]
        self.counts[i] += 1
        hyper = AdamHyper.of(
            lr=float(group["lr"]),
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            step=self.counts[i],
            decoupled=self.decoupled,
            maximize=group["maximize"],
        )
        first, second, largest = self.moments[i]
        adam_step(hyper, grad, self.weights[i], first, second, largest if group["amsgrad"] else None)

    def check(self) -> None:
        """Parameters, masters and states are the formula's, bit for bit."""
        state = self.offloader.snapshot()["state"]
        stepped = self.params if self.masters is None else list(self.masters.parameters())
        with _disable_current_modes():
            for i, (weight, param) in enumerate(zip(self.weights, self.params, strict=True)):
                where = f"parameter {i} after {self.step_count} steps"
                assert_same_tensor(stepped[i].detach(), weight, where=f"weights of {where}")
                assert_same_tensor(param.detach(), weight.to(param.dtype), where=where)
                if self.counts[i]:
                    assert_equal(float(state[i]["step"]), float(self.counts[i]), where=f"step of {where}")
                    assert_same_tensor(state[i]["exp_avg"], self.moments[i][0], where=f"exp_avg of {where}")
                    assert_same_tensor(state[i]["exp_avg_sq"], self.moments[i][1], where=f"exp_avg_sq of {where}")


def even(offload: Any, device: VirtualDevice, **options: Any) -> Twins:
    """Twins of even sizes, a parameter for each chunk."""
    params = [values(shape, i) for i, shape in enumerate(EVEN)]
    return Twins(offload, device, "SGD", params, options=PLAIN_SGD, **{"chunk_bytes": EVEN_BYTES, **options})


def reread(state: Any, *, fused: bool = False) -> Any:
    """A state dict as torch's load gives it to a plain optimizer: on the device, but counters that no kernel reads."""
    if isinstance(state, dict):
        return {key: reread(value, fused=fused) for key, value in state.items()}
    if isinstance(state, list):
        return [reread(value, fused=fused) for value in state]
    if not isinstance(state, torch.Tensor):
        return state
    with _disable_current_modes():
        copied = state.detach().clone()
        number = copied.item() if copied.dim() == 0 and not fused else None
    return copied if number is None else torch.tensor(number, dtype=copied.dtype)


def in_host_memory(device: VirtualDevice | Place, state: Any) -> Any:
    """A state dict all of whose tensors lie in host memory, as they do when a file was read."""
    if isinstance(state, dict):
        return {key: in_host_memory(device, value) for key, value in state.items()}
    if not isinstance(state, torch.Tensor):
        return state
    strides = torch.empty_like(state, device="meta").stride()
    pinned = partial(torch.empty, dtype=torch.uint8, pin_memory=True)
    empty = pinned if device.engine is None else device.engine.host_empty
    memory = empty(state.nbytes).view(state.dtype).as_strided(state.shape, strides)
    with _disable_current_modes():
        memory.copy_(state)
    return memory


@contextmanager
def proven(*, this_branch_only: bool = False, **options: Any) -> Iterator[VirtualDevice]:
    """A virtual device around a program that must have no hazard, and no other branch unless it is said."""
    with VirtualDevice(**options) as device:
        yield device
    device.check(this_branch_only=this_branch_only)


@contextmanager
def proven_on(name: str, **options: Any) -> Iterator[VirtualDevice | Place]:
    """``proven`` on the CPU; a watched pretend device, or a real one, where ``--twinproof-device`` says so."""
    if name == "cpu":
        with proven(**options) as virtual:
            yield virtual
        return
    with ExitStack() as stack:
        device = stack.enter_context(on_pretend()).device if name == "pretend" else torch.device(name)
        stack.callback(_PLACE.reset, _PLACE.set(device))
        yield Place(device, PretendEngine() if name == "pretend" else CudaEngine())
