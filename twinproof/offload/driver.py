"""Which optimizers can be attached to, who drives their step, and what a step on the CPU has to update.

The driver takes the place of ``optimizer.step``, so that the user's loop, schedulers and scalers do not change. Step
hooks, the profiler's record and a closure belong to the logical step; the optimizer's own arithmetic runs under them as
often as there are chunks. Where a call site is lost, nothing is offloaded, and ``stats`` says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch.optim import Optimizer

from twinproof.errors import ConfigError, OffloadConflictError, UnsupportedError
from twinproof.offload.masters import MasterWeights
from twinproof.offload.states import MASTER, Bundle, is_dense, local_of
from twinproof.optimizers import AdamHyper

__all__ = [
    "StepDriver",
    "Update",
    "arithmetic_of",
    "check_attachment",
    "check_cpu_step",
    "check_devices",
    "check_gradients",
    "known_kind",
    "narrowed",
    "prepare_states",
    "unwrapped",
    "updates_of",
]

# Whole parameters can be stepped in any partition, bit for bit, and their states be foreseen.
KNOWN = (
    "SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam", "Rprop", "ASGD", "Adafactor",
    "Muon",
)  # fmt: skip
# Optimizers that step on the CPU and keep their state there already: torchao, DeepSpeed, Megatron.
CPU_STEP = (
    "CPUOffloadOptimizer",
    "DeepSpeedCPUAdam",
    "DeepSpeedCPUAdagrad",
    "DeepSpeedCPULion",
    "HybridDeviceOptimizer",
)
# Where Megatron's wrappers keep the float32 masters that their inner optimizer steps.
_MASTER_GROUPS = ("shard_fp32_from_float16_groups", "fp32_from_float16_groups")


def arithmetic_of(kind: type[Optimizer]) -> Callable[..., Any]:
    """The optimizer's own step, without torch's wrapper that runs hooks and the profiler."""
    step: Any = kind.step
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    found: Callable[..., Any] = step
    return found


def known_kind(kind: type[Optimizer]) -> type[Optimizer] | None:
    """The optimizer of torch whose arithmetic this is, itself or what it inherits it from; None for any other.

    One of another kind is stepped as a whole, with everything on the device: its parameters may depend on each other.
    """
    for base in kind.__mro__:
        if base.__name__ in KNOWN and base is getattr(torch.optim, base.__name__, None):
            steps = arithmetic_of(kind) is arithmetic_of(base)
            starts = getattr(kind, "_init_group", None) is getattr(base, "_init_group", None)
            return base if steps and starts else None
    return None


def unwrapped(given: Any) -> tuple[Optimizer, list[torch.Tensor]]:
    """The optimizer that steps, and the float32 masters that its wrapper keeps among its parameters.

    Wrappers: whatever has the optimizer as its ``optimizer``, as accelerate's ``AcceleratedOptimizer`` and Megatron's
    ``DistributedOptimizer`` do.

    Raises:
        ConfigError: a wrapper that calls a step which it took from the optimizer earlier.
        UnsupportedError: what is no torch optimizer, several in one, and one that steps sparse gradients only.
    """
    inner = getattr(given, "optimizer", None)
    wraps = isinstance(inner, Optimizer)
    if wraps and getattr(given, "_optimizer_original_step_method", None) is not None:
        raise ConfigError(
            "this wrapper calls the step that it took from the optimizer when it was made",
            got=type(given).__name__,
            expected="an offloader that is attached before the optimizer is wrapped",
            where="optimizer",
        )
    if hasattr(given, "chained_optimizers"):
        raise UnsupportedError(
            "several optimizers in one",
            got=type(given).__name__,
            expected="an offloader for each of chained_optimizers",
            where="optimizer",
        )
    found = inner if wraps else given
    if not isinstance(found, Optimizer) or isinstance(found, torch.optim.SparseAdam):
        raise UnsupportedError(
            "not an optimizer whose state can be moved",
            got=type(given).__name__,
            expected="a torch.optim.Optimizer of dense gradients, or a wrapper with one as its .optimizer",
            where="optimizer",
        )
    groups = [group for name in _MASTER_GROUPS for group in getattr(given, name, None) or ()] if wraps else []
    return found, [master for group in groups for master in group if master is not None]


_ATTACHED = "_twinproof_offloader"


def check_attachment(optimizer: Optimizer) -> None:
    """Refuse an optimizer that is offloaded already, by us or by itself.

    Raises:
        OffloadConflictError: names both.
    """
    other = getattr(optimizer, _ATTACHED, None)
    kind = type(optimizer)
    if other is None and not any(base.__name__ in CPU_STEP for base in kind.__mro__):
        return
    found = f"{kind.__name__}, attached to {type(other).__module__}.{type(other).__name__}" if other else kind.__name__
    raise OffloadConflictError(
        "this optimizer is offloaded already", got=found, expected="a plain torch.optim optimizer", where="optimizer"
    )


def check_devices(devices: set[torch.device], step_device: str) -> None:
    """Refuse parameters that no engine of ours serves.

    Raises:
        OffloadConflictError: they are on the CPU, and so is their state. ConfigError: several devices.
    """
    if step_device == "device" and all(device.type == "cpu" for device in devices):
        raise OffloadConflictError(
            "the parameters are on the CPU, where their state is already: nothing to offload",
            got="parameters on cpu",
            expected="an accelerator, or an engine that stands in for one",
            where="step_device='device'",
        )
    if len(devices) > 1:
        raise ConfigError("one offloader serves one device", got=sorted(map(str, devices)), where="optimizer")


def check_gradients(params: Iterable[torch.Tensor]) -> None:
    """Refuse sparse ones: a momentum of them is sparse itself, and has no place of a known size.

    Raises:
        UnsupportedError: naming the gradient.
    """
    for param in params:
        grad = param.grad
        if grad is not None and grad.layout is not torch.strided:
            raise UnsupportedError(
                "sparse gradients are not supported",
                got=grad.layout,
                expected=torch.strided,
                where=f"gradient of shape {tuple(param.shape)}",
            )


class StepDriver:
    """Replaces ``optimizer.step`` until ``detach``.

    Args:
        optimizer: one of torch's, or one that derives from torch's ``Optimizer``.
        owner: the offloader, for messages.
        run: called once for each logical step with the optimizer's arithmetic, a function without arguments.

    A closure of one of torch's optimizers is evaluated before the step begins, once. An optimizer of another kind gets
    all arguments of its step itself: it may evaluate the closure as often as it likes, with its state on the device.
    """

    def __init__(self, optimizer: Optimizer, owner: Any, run: Callable[[Callable[[], None]], None]) -> None:
        self.optimizer, self.run = optimizer, run
        self.attached = True
        self._arithmetic = arithmetic_of(type(optimizer))
        self._is_known = known_kind(type(optimizer)) is not None
        self._before: Any = optimizer.__dict__.get("step")
        self._after = self._make()
        optimizer.step = self._after  # type: ignore[method-assign]
        setattr(optimizer, _ATTACHED, owner)

    def _make(self) -> Any:
        def step(optimizer: Optimizer, *arguments: Any, **options: Any) -> Any:
            optimizer._opt_called = True  # type: ignore[attr-defined]
            if not self.attached:
                return self._arithmetic(optimizer, *arguments, **options)
            if self._is_known:
                return self._step_known(*arguments, **options)
            results: list[Any] = []
            self.run(lambda: results.append(self._arithmetic(optimizer, *arguments, **options)))
            return results[0]

        hooked: Any = Optimizer.profile_hook_step(step)
        # Schedulers look for this mark and warn when somebody else's step is on top of theirs.
        hooked._wrapped_by_lr_sched = True
        return MethodType(hooked, self.optimizer)

    def _step_known(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.run(lambda: self._arithmetic(self.optimizer))
        return loss

    def detach(self) -> None:
        """Give ``optimizer.step`` back. A scheduler that wrapped ours meanwhile keeps it, as a plain step."""
        self.attached = False
        setattr(self.optimizer, _ATTACHED, None)
        if self.optimizer.__dict__.get("step") is self._after:
            if self._before is None:
                del self.optimizer.step
            else:
                self.optimizer.step = self._before  # type: ignore[method-assign]


GRADIENTS = (torch.float32, torch.bfloat16, torch.float16)
# Options of torch that only mean something where the optimizer itself steps, each with what to do instead.
FOREIGN = {
    "fused": "fused=False: the update on the CPU is fused already, and a GradScaler has to unscale before it",
    "capturable": "capturable=False: a graph cannot hold work of the CPU",
    "differentiable": "differentiable=False",
}


def check_cpu_step(optimizer: Optimizer) -> None:
    """Refuse what ``step_device="cpu"`` cannot step.

    Raises:
        UnsupportedError: an optimizer other than ``Adam`` and ``AdamW``.
        ConfigError: an option that has no meaning there, hyperparameters on a device, parameters that are not float32.
    """
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        raise UnsupportedError(
            "not an optimizer that steps on the CPU",
            got=type(optimizer).__name__,
            expected=("Adam", "AdamW"),
            where="step_device='cpu'",
        )
    for number, group in enumerate(optimizer.param_groups):
        where = f"step_device='cpu', group {number}"
        for option, instead in FOREIGN.items():
            if group.get(option):
                raise ConfigError(f"{option} has no meaning there", got=f"{option}=True", expected=instead, where=where)
        for option in ("lr", "betas"):
            values = group[option] if option == "betas" else (group[option],)
            if any(isinstance(value, torch.Tensor) and (option == "betas" or value.is_cuda) for value in values):
                raise ConfigError(f"{option} has to be on the host", got=values, expected="numbers", where=where)
        for param in group["params"]:
            if param.dtype is not torch.float32:
                raise ConfigError(
                    "the CPU steps float32 weights: give others masters, by master_weights=MasterWeights(...)",
                    got=f"{param.dtype} of shape {tuple(param.shape)}",
                    expected=torch.float32,
                    where=where,
                )


@dataclass(frozen=True)
class Update:
    """One parameter that has a gradient, by local shards.

    ``weight`` is the model's, on the device; ``grad`` has its shape and strides. ``has_master``: the float32 weights
    are on the host; otherwise ``weight`` itself is float32 and has to be brought.
    """

    bundle: Bundle
    group: dict[str, Any]
    weight: torch.Tensor
    grad: torch.Tensor
    has_master: bool

    @property
    def state_names(self) -> tuple[str, ...]:
        """Of the moments."""
        return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if self.group["amsgrad"] else ("exp_avg", "exp_avg_sq")

    def states(self, optimizer: Optimizer) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """exp_avg, exp_avg_sq, and max_exp_avg_sq or None."""
        state = optimizer.state[self.bundle.param]
        largest = local_of(state["max_exp_avg_sq"]) if self.group["amsgrad"] else None
        return local_of(state["exp_avg"]), local_of(state["exp_avg_sq"]), largest

    def advance(self, optimizer: Optimizer) -> AdamHyper:
        """Count a step, as torch does, and say with which numbers it is to be made."""
        count = optimizer.state[self.bundle.param]["step"]
        count += 1
        group = self.group
        return AdamHyper.of(
            lr=float(group["lr"]),
            betas=tuple(group["betas"]),
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            step=float(count),
            decoupled=group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW)),
            maximize=group["maximize"],
        )


def updates_of(optimizer: Optimizer, bundles: Iterable[Bundle], masters: MasterWeights | None) -> list[Update]:
    """What a step has to do for these bundles; parameters without a gradient are left out.

    Raises:
        UnsupportedError: a sparse gradient, one of another dtype, a parameter with gaps in its memory, or loaded
            states that are not float32; nothing has changed then.
    """
    check_cpu_step(optimizer)
    group_of = {param: group for group in optimizer.param_groups for param in group["params"]}
    found: list[Update] = []
    for bundle in bundles:
        model = bundle.param if masters is None else masters.pairs[bundle.param]
        if bundle.param not in group_of or model.grad is None:
            continue
        where = f"parameter of shape {tuple(model.shape)}"
        grad, weight = local_of(model.grad), local_of(model.detach())
        if grad.layout is not torch.strided or grad.dtype not in GRADIENTS:
            raise UnsupportedError(
                "not a gradient that the CPU steps with", got=(grad.layout, grad.dtype), expected=GRADIENTS, where=where
            )
        if not is_dense(weight):
            raise UnsupportedError("a parameter with gaps in its memory", got=weight.stride(), where=where)
        update = Update(bundle, group_of[bundle.param], weight, _in_order(grad, weight), MASTER in bundle.places)
        state = optimizer.state.get(bundle.param, {})
        wrong = [n for n in update.state_names if state and (n not in state or state[n].dtype is not torch.float32)]
        if wrong:
            raise UnsupportedError(
                "the CPU steps float32 moments", got=f"{wrong} missing or of another dtype", where=where
            )
        found.append(update)
    return found


def _in_order(grad: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if grad.stride() == weight.stride():
        return grad
    return torch.empty_like(weight, dtype=grad.dtype).copy_(grad)


def prepare_states(optimizer: Optimizer, update: Update, home: Callable[[str], torch.Tensor | None]) -> None:
    """Make the states of a first step in host memory. ``home``: the place of a state, None where none was foreseen."""
    param = update.bundle.param
    if optimizer.state.get(param):
        return
    scalar = torch.float64 if torch.get_default_dtype() is torch.float64 else torch.float32
    state: dict[str, Any] = {"step": torch.tensor(0.0, dtype=scalar)}
    for name in update.state_names:
        place = home(name)
        memory = torch.empty_like(update.weight, dtype=torch.float32, device="cpu") if place is None else place
        state[name] = memory.zero_()
        if hasattr(param, "_local_tensor"):
            state[name] = torch.empty_like(param.detach())
            state[name]._local_tensor = memory
    optimizer.state[param] = state


@contextmanager
def narrowed(optimizer: Optimizer, params: set[torch.Tensor]) -> Iterator[None]:
    """The optimizer has these parameters only; the others and their groups come back."""
    groups = optimizer.param_groups
    some = [{**group, "params": [param for param in group["params"] if param in params]} for group in groups]
    try:
        optimizer.param_groups = [group for group in some if group["params"]]
        yield
    finally:
        optimizer.param_groups = groups
