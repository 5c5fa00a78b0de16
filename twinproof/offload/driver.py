"""Which optimizers can be attached to, who drives their step, what moves for it, and what a step on the CPU updates.

The driver takes the place of ``optimizer.step``, so that the user's loop, schedulers and scalers do not change. Step
hooks, the profiler's record and a closure belong to the logical step; the optimizer's own arithmetic runs under them as
often as there are chunks. Where a call site is lost, nothing is offloaded, and ``stats`` says so.

The plan of moves says which states a step will make and where each has its place. It prevents states that are missed
because they are keyed by something else, counters that turn into a host sync on every step, and loads that round
float32 moments or leave states on the host beside a model on a device.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from twinproof.engine import Engine, Weak, method_of, outside_of_graphs, weakly
from twinproof.errors import ConfigError, OffloadConflictError, PlanError, UnsupportedError
from twinproof.offload.states import (
    MASTER,
    Bundle,
    MasterWeights,
    beside,
    bindings,
    check_plain,
    check_rounded,
    check_separate,
    chunks_of,
    copied,
    is_dense,
    is_movable,
    local_of,
    make_bundle,
    mesh_of,
    put_in_order,
    select,
    standing_for,
)
from twinproof.optimizers import AdamHyper

__all__ = [
    "Arithmetic",
    "MovePlan",
    "OffloadOptions",
    "OffloadStats",
    "StepDriver",
    "Transfers",
    "Update",
    "Wanted",
    "arithmetic_of",
    "check_attachment",
    "check_cpu_step",
    "check_devices",
    "check_gradients",
    "check_saved",
    "expected_states",
    "has_step_of_others",
    "known_kind",
    "load_states",
    "place_scalars",
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
_HELD_AS = ("optimizer", "optim", "_optimizer")  # Where a wrapper has the optimizer that steps.
_SEVERAL_AS = ("chained_optimizers", "optimizers", "_optims")  # Of Megatron, torchtitan, torchrec.
# Where Megatron's wrappers keep the float32 masters that their inner optimizer steps.
_MASTER_GROUPS = ("shard_fp32_from_float16_groups", "fp32_from_float16_groups")


Arithmetic = Callable[..., None]  # The optimizer's own step; of some parameters, with what stands for it.


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


def _has_optimizers(parts: Any) -> bool:
    # torchrec's are pairs of a name and one; what Megatron chains are wrappers.
    each = parts.values() if isinstance(parts, dict) else parts if isinstance(parts, (list, tuple)) else ()
    return any(hasattr(part[-1] if isinstance(part, tuple) and part else part, "param_groups") for part in each)


def unwrapped(given: Any) -> tuple[Optimizer, list[torch.Tensor]]:
    """The optimizer that steps, and the float32 masters that its wrapper keeps among its parameters.

    Wrappers: whatever has the optimizer as its ``optimizer``, as accelerate's ``AcceleratedOptimizer`` and Megatron's
    ``DistributedOptimizer`` do, as its ``optim`` (torch's ``ZeroRedundancyOptimizer``, ``PostLocalSGDOptimizer``), or
    as its ``_optimizer`` (torch's ``_NamedOptimizer``, torchrec's ``KeyedOptimizerWrapper``).

    Raises:
        ConfigError: a wrapper that calls a step which it took from the optimizer earlier.
        UnsupportedError: what is no torch optimizer, several in one, and one that steps sparse gradients only.
    """
    held = [getattr(given, name, None) for name in _HELD_AS]
    inner = next((each for each in held if isinstance(each, Optimizer)), None)
    wraps = inner is not None
    if wraps and getattr(given, "_optimizer_original_step_method", None) is not None:
        what = "this wrapper calls the step that it took from the optimizer when it was made"
        got, expected = type(given).__name__, "an offloader that is attached before the optimizer is wrapped"
        raise ConfigError(what, got=got, expected=expected, where="optimizer")
    several = next((name for name in _SEVERAL_AS if _has_optimizers(getattr(given, name, None))), None)
    if several is not None:
        got, expected = type(given).__name__, f"an offloader for each of {several}"
        raise UnsupportedError("several optimizers in one", got=got, expected=expected, where="optimizer")
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
        OffloadConflictError: they are on the CPU, and so is their state. ConfigError: several devices, or none.
    """
    if not devices:
        raise ConfigError("no parameters, so no device", got=None, expected="parameters, or engine=", where="optimizer")
    if step_device == "device" and all(device.type == "cpu" for device in devices):
        raise OffloadConflictError(
            "the parameters are on the CPU, where their state is already: nothing to offload",
            got="parameters on cpu",
            expected="an accelerator, step_device='cpu', or an engine that stands in for one",
            where="step_device='device'",
        )
    if len(devices) > 1:
        got, expected = sorted(map(str, devices)), "parameters on one device"
        raise ConfigError("one offloader serves one device", got=got, expected=expected, where="optimizer")
    if torch.device("meta") in devices:
        raise ConfigError("parameters without memory", got="meta", expected="model.to_empty(...)", where="optimizer")


def check_gradients(params: Iterable[torch.Tensor], *, has_graph: bool = False) -> None:
    """Refuse sparse ones: a momentum of them is sparse itself, and has no place of a known size.

    With ``has_graph``, as differentiable steps do, refuse those of a graph too: it would end where a state moves.

    Raises:
        UnsupportedError: naming the gradient.
    """
    for param in params:
        grad = param.grad
        if has_graph and grad is not None and grad.requires_grad:
            raise UnsupportedError(
                "a graph cannot go through steps whose states move",
                got="a gradient that requires one, differentiable=True",
                expected="gradients without a graph, or differentiable=False",
                where=f"gradient of shape {tuple(param.shape)}",
            )
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
        owner: the offloader, for messages, and its masters, which a closure makes gradients for.
        run: called once for each logical step with the optimizer's arithmetic, a function without arguments, or of what
            stands for the optimizer, see ``MovePlan.part``.
        around: called before and after a step that is not ours, as pre and post hooks are.

    A closure of one of torch's optimizers is evaluated before the step begins, once. An optimizer of another kind gets
    all arguments of its step itself: it may evaluate the closure as often as it likes, with its state on the device.

    A step that somebody took from the optimizer before, to call it later or from one of their own that they put in its
    place, runs the optimizer's step hooks, and with them ``around``. One in its place is what ``optimizer.step`` runs.
    """

    optimizer = Weak[Optimizer]()

    def __init__(
        self,
        optimizer: Optimizer,
        owner: Any,
        run: Callable[[Arithmetic], None],
        around: tuple[Callable[..., Any], Callable[..., None]],
    ) -> None:
        self.optimizer, self.run, self._masters = optimizer, weakly(run), owner.masters
        self.attached, self._drives = True, False
        # What is to be done behind a step in which ``detach`` was called: hooks cannot change while they run.
        self._later: Callable[[], None] | None = None
        self._arithmetic = arithmetic_of(type(optimizer))
        self._is_known = known_kind(type(optimizer)) is not None
        self._before: Any = optimizer.__dict__.get("step")
        self._is_of_others = has_step_of_others(optimizer)
        before, after = map(weakly, around)
        self._handles = [
            optimizer.register_step_pre_hook(
                lambda *given: before(*given) if self.attached and not self._drives else None
            ),
            optimizer.register_step_post_hook(
                lambda *given: after(*given) if self.attached and not self._drives else None
            ),
        ]
        optimizer.step = step = self._make()  # type: ignore[method-assign]
        self._after = weakref.ref(step)
        setattr(optimizer, _ATTACHED, owner)

    def _make(self) -> Any:
        def step(optimizer: Optimizer, *arguments: Any, **options: Any) -> Any:
            optimizer._opt_called = True  # type: ignore[attr-defined]
            if not self.attached:
                return self._step_closed(*arguments, **options)
            if self._is_known:
                return self._step_known(*arguments, **options)
            results: list[Any] = []
            if self._masters is not None:
                arguments, options = self._masters.with_closure(optimizer, arguments, options) or (arguments, options)
            self.run(lambda some=optimizer: results.append(self._arithmetic(some, *arguments, **options)))
            return results[0]

        hooked: Any = Optimizer.profile_hook_step(step)

        def driven(optimizer: Optimizer, *arguments: Any, **options: Any) -> Any:
            if self._is_of_others:
                return self._before(*arguments, **options)
            self._drives, drove = True, self._drives
            try:
                return hooked(optimizer, *arguments, **options)
            finally:
                self._drives = drove
                if not drove and self._later is not None:
                    self._later()
                    self._later = None

        found: Any = outside_of_graphs(functools.wraps(hooked)(driven))
        # Schedulers look for this mark and warn when somebody else's step is on top of theirs.
        found._wrapped_by_lr_sched = True
        return method_of(found, self.optimizer)

    def _step_closed(self, *arguments: Any, **options: Any) -> Any:
        """A plain step; in one whose own hook has closed the offloader, masters are not attached yet."""
        if self._later is None or self._masters is None:
            return self._arithmetic(self.optimizer, *arguments, **options)
        given = self._masters.before_step(self.optimizer, (self.optimizer, *arguments), options)
        arguments, options = ((self.optimizer, *arguments), options) if given is None else given
        result = self._arithmetic(*arguments, **options)
        self._masters.end(self._masters.stepped_by(self.optimizer))
        return result

    def _step_known(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.run(lambda some=None: self._arithmetic(self.optimizer if some is None else some))
        return loss

    def detach(self, then: Callable[[], None]) -> None:
        """Give ``optimizer.step`` back, and do what is to be done ``then``, in a hook of the step behind that step.

        A scheduler that wrapped ours meanwhile keeps it, as the step it was before.
        """
        self.attached = False

        def end() -> None:
            for handle in self._handles:
                handle.remove()
            then()

        if self._drives:
            self._later = end
        else:
            end()
        delattr(self.optimizer, _ATTACHED)
        if self.optimizer.__dict__.get("step") is self._after():
            if self._before is None:
                del self.optimizer.step
            else:
                self.optimizer.step = self._before  # type: ignore[method-assign]


def has_step_of_others(optimizer: Optimizer) -> bool:
    """Whether somebody put a step of their own in the place of the class's; a scheduler's only counts, and is none."""
    found = optimizer.__dict__.get("step")
    if found is None:
        return False
    found = getattr(found, "__func__", found)
    while getattr(found, "_wrapped_by_lr_sched", False) or getattr(found, "hooked", False):
        found = found.__wrapped__
    return found is not arithmetic_of(type(optimizer))


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
        if len(set(group["params"])) < len(group["params"]):
            got = f"{len(group['params']) - len(set(group['params']))} more than once"
            raise ConfigError("a parameter is stepped once there", got=got, expected="each once", where=where)
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
        count, group = optimizer.state[self.bundle.param]["step"], self.group
        hyper = AdamHyper.of(
            lr=float(group["lr"]),
            betas=tuple(group["betas"]),
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            # Below 2**24 the sum is the same in float32, and needs no tensor.
            step=before + 1 if (before := float(count)) < 1 << 24 else float(count + 1),
            decoupled=group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW)),
            maximize=group["maximize"],
        )
        count += 1
        return hyper


def updates_of(optimizer: Optimizer, bundles: Iterable[Bundle], masters: MasterWeights | None) -> list[Update]:
    """What a step has to do for these bundles; parameters without a gradient are left out.

    Raises:
        UnsupportedError: a gradient of another dtype, a parameter with gaps in its memory, or loaded
            states that are not float32; nothing has changed then.
    """
    check_cpu_step(optimizer)
    group_of = {param: group for group in optimizer.param_groups for param in group["params"]}
    found: list[Update] = []
    for bundle in bundles:
        # What a later group added beside the masters is its own.
        model = bundle.param if masters is None else masters.pairs.get(bundle.param, bundle.param)
        if model.grad is None:
            continue
        where = f"parameter of shape {tuple(model.shape)}"
        grad, weight = local_of(model.grad), local_of(model.detach())
        if grad.dtype not in GRADIENTS:
            raise UnsupportedError(
                "not a gradient that the CPU steps with", got=grad.dtype, expected=GRADIENTS, where=where
            )
        if not is_dense(weight):
            raise UnsupportedError(
                "a parameter with gaps", got=weight.stride(), expected="strides without gaps", where=where
            )
        update = Update(bundle, group_of[bundle.param], weight, _in_order(grad, weight), MASTER in bundle.places)
        state = optimizer.state.get(bundle.param, {})
        _check_lasting(bundle, state, weight, where)
        wrong = [n for n in update.state_names if state and (n not in state or state[n].dtype is not torch.float32)]
        if wrong:
            got, expected = f"{wrong} missing or of another dtype", "each of them as float32"
            raise UnsupportedError("the CPU steps float32 moments", got=got, expected=expected, where=where)
        found.append(update)
    return found


def _check_lasting(bundle: Bundle, state: dict[str, Any], weight: torch.Tensor, where: str) -> None:
    """Demand a counter that counts, and states of the shape that their parameter has by now, as their places are.

    Raises:
        UnsupportedError: naming what is otherwise.
    """
    count = state.get("step", weight)
    if not isinstance(count, torch.Tensor):
        got = type(count).__name__
        raise UnsupportedError("a counter that stands still", got=got, expected="a tensor", where=f"step of {where}")
    shape = tuple(weight.shape)
    for name, place in bundle.places.items():
        value = state.get(name)
        shapes = [place.shape, tuple(local_of(value).shape) if isinstance(value, torch.Tensor) else shape]
        if shapes != [shape, shape]:
            raise UnsupportedError(
                "a state of another shape than its parameter", got=shapes, expected=shape, where=where
            )


def _in_order(grad: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if grad.stride() == weight.stride():
        return grad
    return torch.empty_like(weight, dtype=grad.dtype).copy_(grad)


def prepare_states(optimizer: Optimizer, update: Update, home: Callable[[str], torch.Tensor]) -> None:
    """Make the states of a first step in host memory. ``home``: the place of a state, as it was foreseen."""
    param = update.bundle.param
    if optimizer.state.get(param):
        return
    scalar = torch.float64 if torch.get_default_dtype() is torch.float64 else torch.float32
    state: dict[str, Any] = {"step": torch.tensor(0.0, dtype=scalar, device="cpu")}
    for name in update.state_names:
        memory = home(name)
        state[name] = memory.zero_()
        if hasattr(param, "_local_tensor"):
            state[name] = torch.empty_like(param.detach())
            state[name]._local_tensor = memory
    optimizer.state[param] = state


Wanted = Callable[[Bundle, str], bool]


@dataclass(frozen=True)
class OffloadOptions:
    """The options of one offloader; see ``OptimizerStateOffloader``. ``release`` is resolved: no None."""

    fraction: float
    chunk_bytes: int
    slots: int
    step_device: str
    pin_memory: bool
    release: str
    fused_update: bool | None


@dataclass
class OffloadStats:
    """Exact counts since attachment.

    ``payload_bytes`` of the selected tensors that exist, ``host_bytes`` of host memory held for them. A ``step_count``
    that stands still means a lost call site. With ``step_device="device"`` a step moves the payload both ways, so that
    ``h2d_bytes`` and ``d2h_bytes`` stand still then, too; on the CPU it counts what it copies of gradients and weights,
    which may be nothing. ``updates`` says, by group, how the chunks of the last step were updated: ``fused``, ``torch:
    REASON``, or both; empty where there is no other way than the optimizer's own. ``host_placement`` says how the last
    host memory lies, where that is known: pinned or not, its NUMA node, and whether the system refused that.
    """

    step_count: int = 0
    h2d_bytes: int = 0
    d2h_bytes: int = 0
    payload_bytes: int = 0
    host_bytes: int = 0
    chunk_count: int = 0
    updates: tuple[str, ...] = ()
    host_placement: str = ""


class Transfers(Protocol):
    """How selected tensors get to the host and back: the seam between the reference and the fast version.

    An offloader decides what moves and when (``MovePlan``, ``OptimizerStateOffloader``); transfers own the host memory,
    the streams and the order of copies. The reference blocks on every copy; the fast version overlaps them with the
    update. Both give the same bits.

    Args:
        plan: what moves, with the engine, the options and the counts that transfers keep.
    """

    def __init__(self, plan: MovePlan) -> None: ...

    @staticmethod
    def default_engine(device: torch.device) -> Engine:
        """The engine of a device, where the caller gives none."""

    def place(self, bundles: list[Bundle]) -> None:
        """Give bundles their host memory."""

    def unplace(self, bundles: list[Bundle]) -> None:
        """Bring bundles, at least one, to the device and forget their host memory; none where that fails."""

    def release(self) -> None:
        """Let all host memory go; nothing is bound to it any more."""

    def is_on_host(self, tensor: torch.Tensor) -> bool:
        """Whether a local tensor lies in this offloader's host memory."""

    def home(self, bundle: Bundle, name: str) -> torch.Tensor:
        """A tensor's own place in host memory."""

    def untidy(self) -> list[Bundle]:
        """Those of which something may lie in host memory at another place than its own."""

    def to_host(
        self, bundles: Iterable[Bundle], *, only: Wanted | None = None, copies: bool = True, binds: bool = True
    ) -> None:
        """Move what is on the device to the host and bind it there; nothing for what is there already.

        ``only``: whether a name of a bundle is meant; None: all. ``binds=False``: copy, and leave the binding.
        ``copies=False``: bind, where a copy was made before.
        """

    def to_device(self, bundles: Iterable[Bundle], *, for_good: bool = False) -> None:
        """Move what is on the host to the device and bind it there; ``for_good``: each in memory of its own."""

    def send_planned(self) -> bool:
        """Move everything home, if all of it lies where the plan has it; False, and nothing done, if not."""

    def fetch(self) -> None:
        """Begin the copies that the next step starts with. Changes no value and no binding."""

    def step(self, arithmetic: Arithmetic, step_whole: Callable[[Arithmetic], None]) -> bool:
        """One logical step: everything that was selected is on the device while ``arithmetic`` runs on it.

        ``step_whole`` does that with everything at once. Returns whether states remain on the device that the plan has
        no place for.
        """

    def settle(self) -> None:
        """Wait until host memory holds what it is to hold."""

    def settle_for_writing(self) -> None:
        """Wait until the host may write to its memory: nothing reads it any more either."""

    def leaving_bytes(self) -> int:
        """Bytes bound to host memory whose copies the host has not waited for."""


# Scalars of these names stay on the host, where reading them is free, unless kernels read them (torch 2.13).
_COUNTERS = ("step", "mu_product")


def lies_on_device(optimizer: Optimizer, group: dict[str, Any], name: str) -> bool:
    """Whether this optimizer makes a state of that name on the device of its parameter."""
    kernels_read_it = isinstance(optimizer, torch.optim.ASGD) or group.get("fused") or group.get("capturable")
    return name not in _COUNTERS or bool(kernels_read_it)


def options_on(group: dict[str, Any]) -> dict[str, bool]:
    """What of a group decides which states there are: options that are on or off, never how large one is."""
    return {key: bool(v) for key, v in group.items() if isinstance(v, bool) or key == "momentum"}


def expected_states(
    optimizer: Optimizer, param: torch.Tensor, group: dict[str, Any], known: dict[Any, Any] | None = None
) -> dict[str, torch.Tensor]:
    """The states that a step will make for a parameter, as meta tensors, found by stepping a meta copy of it.

    None are foreseen for optimizers that are not torch's: they are taken over as they appear. ``known``: of the forms
    of parameters in this group what was found, and will be.

    Raises:
        UnsupportedError: a parameter that this optimizer cannot step; one, or a state, that is not plain memory.
    """
    local = local_of(param)
    check_plain(param, "parameter")
    for name, value in optimizer.state.get(param, {}).items():
        check_plain(value, f"state {name}")
    if isinstance(optimizer, torch.optim.Adafactor) and local is not param:
        # Its factors are means over whole rows and columns, which no rank has.
        got, expected = type(param).__name__, "a whole parameter"
        raise UnsupportedError("Adafactor cannot be stepped by shards", got=got, expected=expected, where="Adafactor")
    kind: Any = known_kind(type(optimizer))
    # States of a scalar are scalars, which stay where they are.
    if kind is None or local.dim() == 0:
        return {}
    form = (local.dtype, local.shape, local.layout, local.layout is torch.strided and local.stride())
    if known is not None and form in known:
        return dict(known[form])
    probe = torch.empty_like(local, device="meta").requires_grad_()
    # These two look at values on the way to the step, which a meta tensor does not have.
    if isinstance(optimizer, torch.optim.ASGD):
        return {"ax": probe.detach()}
    if isinstance(optimizer, torch.optim.Adafactor):
        return _adafactor_states(probe.detach())
    probe.grad = torch.empty_like(probe)
    options = {key: value for key, value in group.items() if key != "params"}
    options.update({key: False for key in ("foreach", "fused", "capturable", "differentiable") if key in options})
    options = {key: float(value) if isinstance(value, torch.Tensor) else value for key, value in options.items()}
    try:
        copy = kind([{**options, "params": [probe]}])
        arithmetic_of(kind)(copy)
    except Exception as error:
        got, expected = f"{type(error).__name__}: {error}", "a step of a meta copy that succeeds"
        raise UnsupportedError(
            "the states of this parameter cannot be foreseen", got=got, expected=expected, where=kind.__name__
        ) from error
    found = {key: value for key, value in copy.state[probe].items() if is_movable(value)}
    if known is not None:
        known[form] = found
    return found


def _adafactor_states(probe: torch.Tensor) -> dict[str, torch.Tensor]:
    # torch 2.13: factors of the last two dimensions, or the whole of a vector.
    shape = tuple(probe.shape)
    if len(shape) < 2:
        return {"variance": probe}
    return {"row_var": probe.new_empty((*shape[:-1], 1)), "col_var": probe.new_empty((*shape[:-2], 1, shape[-1]))}


class MovePlan:
    """Which tensors of an optimizer move, as parameters, options and states come and go.

    Attributes:
        optimizer: whose states move; only its bindings change.
        masters: that the optimizer steps, or None.
        options: of the offloader.
        engine: of streams and copies.
        counts: kept by the transfers.
        is_separable: whether whole parameters can be stepped in any partition, and their states be foreseen.
        bundles: what moves, by parameter.
        known: parameters that were planned for.
    """

    optimizer = Weak[Optimizer]()

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        masters: MasterWeights | None,
        kept_masters: Iterable[torch.Tensor],
        options: OffloadOptions,
        engine: Engine,
    ) -> None:
        self.optimizer, self.masters, self.options, self.engine = optimizer, masters, options, engine
        self.counts = OffloadStats()
        self.is_separable = known_kind(type(optimizer)) is not None
        self.bundles: list[Bundle] = []
        self.known: set[torch.Tensor] = set()
        self._kept_masters = set(kept_masters)
        self._foreseen: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        self._stateless: set[torch.Tensor] = set()
        self._flags: dict[torch.Tensor, dict[str, bool]] = {}
        self._listed: list[tuple[list[int], dict[str, bool]]] | None = None

    def bound(self) -> Iterable[tuple[Bundle, str, torch.Tensor]]:
        """(bundle, name, local tensor) of everything selected that exists now."""
        for bundle in self.bundles:
            for name, tensor in bindings(self.optimizer, bundle):
                yield bundle, name, tensor

    def part(self, groups: Sequence[dict[str, Any]]) -> Any:
        """What arithmetic that is separable steps where it is to step these groups only: see ``standing_for``."""
        return standing_for(self.optimizer, known_kind(type(self.optimizer)), groups)

    def host_empty(self, size_bytes: int) -> torch.Tensor:
        """Host memory as the options want it, uint8."""
        if self.options.pin_memory:
            return self.engine.host_empty(size_bytes)
        return torch.empty(size_bytes, dtype=torch.uint8, device="cpu")

    def wait_for_copy(self) -> None:
        """Wait for what was last copied on the current stream."""
        event = self.engine.event()
        self.engine.record(event, self.engine.current())
        self.engine.synchronize(event)

    def adopt(self, transfers: Transfers) -> bool:
        """Plan for parameters and options that were not there before: after ``add_param_group`` or a load.

        Returns whether there may be any.
        """
        groups = self.optimizer.param_groups
        listed = [(list(map(id, group["params"])), options_on(group)) for group in groups]
        # Known parameters keep their ids, so equal lists of ids and equal options leave nothing to plan.
        if listed == self._listed:
            return False
        self._listed = None  # Where that fails, the lists of before are not what is planned for either.
        self._adopt_listed(transfers)
        self._listed = listed
        return True

    def _adopt_listed(self, transfers: Transfers) -> None:
        new: list[Bundle] = []
        found: set[torch.Tensor] = set()
        stateless = set(self._stateless)
        # By parameter: it may have come from a group with other options, and groups come and go.
        flags: dict[torch.Tensor, dict[str, bool]] = {}
        turned = False
        for group in self.optimizer.param_groups:
            options, known = options_on(group), dict[Any, Any]()
            for param in group["params"]:
                # A parameter may be listed twice.
                if param in flags:
                    continue
                flags[param] = options
                is_turned = self._flags.get(param, options) != options
                turned |= is_turned
                if param in self.known and not is_turned:
                    continue
                # A master that is known may be in host memory by now.
                if param not in self.known:
                    self._check_place(param)
                tensors = self.foresee(param, group, known)
                # What had no states until an option was turned, momentum for instance, is as good as new.
                if param in self.known and not (tensors and param in stateless):
                    continue
                found.add(param)
                stateless.discard(param)
                # A step on the CPU has no place for moments without dimensions: their masters stay with them.
                moves = bool(local_of(param).numel()) and bool(tensors or self.options.step_device == "device")
                if moves and self.is_master(param):
                    tensors = {MASTER: local_of(param.detach()), **tensors}
                # Of an unknown optimizer nothing is foreseen: a parameter without a place gets one with its states.
                if tensors or (not self.is_separable and local_of(param).numel()):
                    new.append(make_bundle(param, tensors))
                else:
                    stateless.add(param)
        self._forget_unlisted(transfers)
        chosen = select(new, self.options.fraction)
        transfers.place(chosen)
        # Noted once it is done: what fails for lack of memory is tried again with the next step.
        self.bundles += chosen
        self.known.update(found)
        self._stateless = stateless & flags.keys()
        if turned:
            self.refit(transfers)
        self._flags = flags

    def _check_place(self, param: torch.Tensor) -> None:
        """Refuse one of another device, and a master that nobody rounds. Raises ConfigError, UnsupportedError."""
        check_plain(param, "parameter")
        if not self.is_master(param):
            check_rounded(self.optimizer, param)
        if local_of(param).device != self.engine.device:
            raise ConfigError(
                "one offloader serves one device",
                got=str(local_of(param).device),
                expected=str(self.engine.device),
                where=f"parameter of shape {tuple(param.shape)}",
            )

    def _forget_unlisted(self, transfers: Transfers) -> None:
        """Give what left its group back to the device, where its state is the user's, and hold none of it."""
        listed = {param for group in self.optimizer.param_groups for param in group["params"]}
        gone = [bundle for bundle in self.bundles if bundle.param not in listed]
        if gone:
            transfers.unplace(gone)  # May fail: what was forgotten, and is still there, would be stepped twice.
        self.bundles = [bundle for bundle in self.bundles if bundle.param in listed]
        self.known &= listed
        self._stateless &= listed
        for param in self._foreseen.keys() - listed:
            del self._foreseen[param]

    def refit(self, transfers: Transfers) -> None:
        """Make new places for states that a load gave another dtype, shape or name than was foreseen, or took away."""
        wrong: list[Bundle] = []
        at: dict[int, int] = {}
        if not self.is_separable:
            check_separate((bundle.param, self.optimizer.state.get(bundle.param, {})) for bundle in self.bundles)
        for number, bundle in enumerate(self.bundles):
            state = self.optimizer.state.get(bundle.param, {})
            found = {name: local_of(value) for name, value in state.items() if is_movable(value)}
            strangers = [
                name
                for name, tensor in found.items()
                if not transfers.is_on_host(tensor)
                and (name not in bundle.places or not bundle.places[name].fits(tensor))
            ]
            foreseen = self._foreseen[bundle.param]
            kept = {name for name in bundle.places if name == MASTER or name in foreseen or name in found}
            if strangers or len(kept) < len(bundle.places) or not foreseen.keys() <= kept:
                placed = {name: bundle.places[name].as_meta() for name in bundle.places if name in kept}
                wrong.append(make_bundle(bundle.param, {**placed, **foreseen, **placed, **found}))
                at[id(wrong[-1])] = number
        # As many at a time as a chunk holds: what lies there and stays, a master for instance, passes the device.
        for some in chunks_of(wrong, self.options.chunk_bytes):
            moved = set[int]()
            try:
                transfers.unplace([self.bundles[at[id(bundle)]] for bundle in some])
                for bundle in some:
                    self.bundles[at[id(bundle)]] = bundle
                moved = set(map(id, some))
                transfers.place(some)
            except BaseException:
                # On the device and without a place, as if they had just been listed: planned for with the next call.
                self.bundles = [bundle for bundle in self.bundles if id(bundle) not in moved]
                self.known -= {bundle.param for bundle in some if id(bundle) in moved}
                self._listed = None
                raise
            if self.options.release == "at_offload":
                transfers.to_host(some)

    def is_master(self, param: torch.Tensor) -> bool:
        is_ours = self.masters is not None and self.masters.pairs.get(param, param) is not param
        return is_ours or param in self._kept_masters

    def foreseen(self, param: torch.Tensor) -> dict[str, tuple[int, ...]]:
        """The shapes of the states that a step makes for a parameter."""
        return {name: tuple(tensor.shape) for name, tensor in self._foreseen[param].items()}

    def foresee(self, param: torch.Tensor, group: dict[str, Any], known: dict[Any, Any]) -> dict[str, torch.Tensor]:
        """What ``expected_states`` says of a parameter, remembered. Raises UnsupportedError."""
        self._foreseen[param] = expected_states(self.optimizer, param, group, known) if local_of(param).numel() else {}
        return self._foreseen[param]


def check_saved(_: Any, state_dict: dict[str, Any]) -> None:
    """Refuse what cannot be moved or has no values, before torch's load changes anything. Raises UnsupportedError."""
    # A hook of the user's that comes behind may make a state dict of what has another form.
    states = state_dict.get("state")
    for number, state in states.items() if isinstance(states, Mapping) else ():
        for name, value in state.items() if isinstance(state, dict) else ():
            where = f"state {name} of parameter {number}"
            check_plain(value, where)
            if isinstance(value, torch.Tensor) and value.is_meta:
                raise UnsupportedError("a state without values", got="meta", expected="torch.load(...)", where=where)


def check_states(plan: MovePlan, state_dict: dict[str, Any]) -> dict[Any, dict[str, Any]]:
    """The states by our parameters; those of no parameter, which are the optimizer's own, by their keys.

    Raises:
        PlanError: other groups, parameters, states or shapes than the optimizer has. UnsupportedError: see
            ``check_saved``.
    """
    _check_form(state_dict)
    check_saved(plan.optimizer, state_dict)
    optimizer, saved = plan.optimizer, state_dict["param_groups"]
    ours, theirs = [len(group["params"]) for group in optimizer.param_groups], [len(group["params"]) for group in saved]
    if ours != theirs:
        raise PlanError("other parameter groups", got=theirs, expected=ours, where="param_groups")
    found: dict[Any, dict[str, Any]] = {}
    states = dict(state_dict["state"])
    for group, other in zip(optimizer.param_groups, saved, strict=True):
        options = {key: value for key, value in {**group, **other}.items() if key != "params"}
        for param, number in zip(group["params"], other["params"], strict=True):
            if param in found and number not in states:
                continue  # Listed twice, under one number: its states were taken already.
            found[param] = states.pop(number, {})
            _check_state(plan, param, found[param], options, f"parameter {number}")
    strangers = [key for key in states if not _is_own(plan, key)]
    if strangers:
        got = sorted(strangers, key=str)
        raise PlanError("states of no parameter", got=got, expected="numbers of param_groups", where="state")
    return found | states


def _check_mapping(given: Any) -> None:
    if not isinstance(given, Mapping):
        raise PlanError("not a state dict", got=type(given).__name__, expected="a dict", where="state_dict")


def _check_form(state_dict: Any) -> None:
    """Raises PlanError where something is no state dict of an optimizer at all."""
    _check_mapping(state_dict)
    states, groups = state_dict.get("state"), state_dict.get("param_groups")
    is_groups = isinstance(groups, (list, tuple)) and all(
        isinstance(group, Mapping) and isinstance(group.get("params"), (list, tuple)) for group in groups
    )
    if not isinstance(states, Mapping) or not is_groups:
        raise PlanError(
            "not an optimizer's state dict",
            got=sorted(map(str, state_dict)),
            expected="state by numbers of parameters, and param_groups that list them as params",
            where="state_dict",
        )


def _is_own(plan: MovePlan, key: Any) -> bool:
    """Whether a state of no parameter is the optimizer's own: of one of torch's, if it has it already."""
    is_number = isinstance(key, int) or (isinstance(key, str) and key.isdecimal())
    return not is_number and (not plan.is_separable or key in plan.optimizer.state)


def _check_state(
    plan: MovePlan, param: torch.Tensor, state: dict[str, Any], options: dict[str, Any], where: str
) -> None:
    if not isinstance(state, Mapping):
        raise PlanError("not the states of a parameter", got=type(state).__name__, expected="a dict", where=where)
    # A parameter that never had a gradient has no state at all.
    if not state:
        return
    is_empty = not local_of(param).numel()
    foreseen: dict[str, tuple[int, ...]] = plan.foreseen(param)
    if any(name not in state for name in foreseen):
        # The saved options may be another variant's, without amsgrad for instance.
        foreseen = {name: tuple(t.shape) for name, t in expected_states(plan.optimizer, param, options).items()}
    missing = [name for name in foreseen if name not in state]
    if missing:
        raise PlanError("states are missing", got=sorted(state), expected=sorted(foreseen), where=where)
    for name, value in state.items():
        # A state that was not foreseen, another variant's moment, has the form of its parameter, unless it is known.
        known = plan.optimizer.state.get(param, {}).get(name) if not plan.is_separable else None
        if not plan.is_separable and not isinstance(known, torch.Tensor):
            continue
        form = param if known is None else known
        expected = foreseen.get(name, tuple(local_of(form).shape))
        if name in foreseen and not isinstance(value, torch.Tensor):
            # SGD takes None for one that is yet to be made.
            if value is not None or name != "momentum_buffer":
                given, place = type(value).__name__, f"{name} of {where}"
                raise PlanError("a state that is no tensor", got=given, expected=expected, where=place)
        elif (name in foreseen or _has_form(value, is_empty)) and tuple(local_of(value).shape) != expected:
            got = tuple(local_of(value).shape)
            raise PlanError("a state of another shape", got=got, expected=expected, where=f"{name} of {where}")
        elif name in foreseen:
            _check_kind(param, value, f"{name} of {where}")


def _check_kind(param: torch.Tensor, value: torch.Tensor, where: str) -> None:
    """Demand a DTensor on the mesh of a parameter that is one, and numbers that its step can count in."""
    if mesh_of(value) != mesh_of(param):
        got, expected = mesh_of(value) or "no mesh", mesh_of(param) or "no mesh"
        raise PlanError("a state that is sharded in another way", got=got, expected=expected, where=where)
    if not (value.is_floating_point() or value.is_complex()):
        raise PlanError("a state of whole numbers", got=value.dtype, expected=param.dtype, where=where)


def _has_form(value: Any, is_empty: bool) -> bool:
    """Whether a state moves, or would if its parameter had elements."""
    return is_movable(value) or (
        is_empty and isinstance(value, torch.Tensor) and value.layout is torch.strided and value.dim() > 0
    )


def load_states(plan: MovePlan, state_dict: dict[str, Any]) -> None:
    """Replace options and states by copies of the saved ones, between the optimizer's load hooks.

    Raises:
        PlanError: see ``check_states``; nothing has changed then.
    """
    optimizer: Any = plan.optimizer
    _check_mapping(state_dict)
    # As torch's load begins: hooks may change the copy, or give another.
    state_dict = dict(state_dict)
    for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        found = hook(optimizer, state_dict)
        state_dict = state_dict if found is None else found
    _take_over(plan, state_dict, check_states(plan, state_dict))
    for hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        hook(optimizer)


def _take_over(plan: MovePlan, state_dict: dict[str, Any], states: dict[Any, dict[str, Any]]) -> None:
    optimizer, selected = plan.optimizer, {bundle.param for bundle in plan.bundles}
    for group, other in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        options = {key: copied(value) for key, value in other.items() if key != "params"}
        # As with torch's load, what the saved group lacks goes, a scheduler's initial_lr too; parameters' names stay.
        for key in group.keys() - options.keys() - optimizer.defaults.keys() - {"params", "param_names"}:
            del group[key]
        group.update(options)
        for param in group["params"]:
            # Made before the old ones go: where memory is short they stay.
            made = {n: _settled(plan, group, n, value, moves=param in selected) for n, value in states[param].items()}
            if states[param]:
                optimizer.state[param] = made
            else:
                optimizer.state.pop(param, None)
    held: dict[Any, Any] = optimizer.state
    for key in [key for key in held if not isinstance(key, torch.Tensor)]:
        del held[key]
    held.update({key: copied(own) for key, own in states.items() if not isinstance(key, torch.Tensor)})
    params = {number: param for number, param in _numbered(optimizer, state_dict) if param in held}
    put_in_order(held, [params.get(key, key) for key in state_dict["state"] if key in params or key in held])
    make_counters(optimizer)


def _numbered(optimizer: Optimizer, state_dict: dict[str, Any]) -> Iterator[tuple[Any, torch.Tensor]]:
    for group, other in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        yield from zip(other["params"], group["params"], strict=True)


def make_counters(optimizer: Any) -> None:
    """As torch's load ends: counters that are numbers, in old checkpoints for instance, become what it counts with."""
    optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})


def place_scalars(plan: MovePlan) -> None:
    """Scalars that kernels read, counters among them, on the device: torch's load puts them beside their parameters.

    Those may be master weights, which are in host memory then.
    """
    optimizer = plan.optimizer
    for group in optimizer.param_groups:
        for state in (optimizer.state.get(param, {}) for param in group["params"]):
            for name, value in state.items():
                is_scalar = isinstance(value, torch.Tensor) and not is_movable(value)
                if is_scalar and value.device != plan.engine.device and lies_on_device(optimizer, group, name):
                    state[name] = _settled(plan, group, name, value, moves=False)


def _settled(plan: MovePlan, group: dict[str, Any], name: str, value: Any, *, moves: bool) -> Any:
    """A copy of a loaded state, where it belongs: on the device, but for counters and what leaves it at once."""
    found, leaves = copied(value), moves and is_movable(value)
    if not isinstance(value, torch.Tensor) or (leaves and plan.options.release == "at_offload"):
        return found
    if not leaves and not lies_on_device(plan.optimizer, group, name):
        return found.cpu()
    if found.layout is not torch.strided:
        # Of several tensors: no copy between pieces of memory.
        return found.to(plan.engine.device)
    source = local_of(found)
    here = beside(plan.engine, source)
    plan.wait_for_copy()
    if source is found:
        return here
    found._local_tensor = here
    return found
