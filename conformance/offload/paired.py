"""An offloaded optimizer beside a plain one, and what may happen to both between two steps: what pairs are made of."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from conformance.harness import assert_equal, assert_same_tensor
from conformance.offload.cases import Place, assert_same_state, in_host_memory, proven_on, reread, values
from conformance.offload.foreach import foreach_step
from conformance.offload.foreign import Clipped
from conformance.provers.pretend_device import on_host
from refimpl.optimizers import adam_step
from twinproof.engine import InlineEngine
from twinproof.optimizers import AdamHyper

Case = Mapping[str, Any]

# Multiples of 256 bytes in every dtype, one off, and what has one element, none, or no dimension.
SHAPES: dict[str, tuple[tuple[int, ...], ...]] = {
    "lines": ((128,), (2, 4, 4, 4), (16, 8), (128, 1)),
    "off": ((65,), (2, 3, 3, 5), (9, 7), (1, 127)),
    "corners": ((), (0, 4), (1,), (5, 3), (3, 1, 2, 1)),
}
# Name, options, and the options of one of two groups that bring or take states, or change the formula.
KINDS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "adamw": ("AdamW", {"lr": 0.01}, {"amsgrad": True}),
    "amsgrad": ("Adam", {"lr": 0.02, "amsgrad": True, "weight_decay": 0.1}, {"amsgrad": False}),
    "decoupled": (
        "Adam",
        {"lr": 0.02, "weight_decay": 0.3, "decoupled_weight_decay": True, "maximize": True},
        {"decoupled_weight_decay": False},
    ),
    "sgd": ("SGD", {"lr": 0.1}, {"momentum": 0.9}),
    "nesterov": (
        "SGD",
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
        {"momentum": 0.0, "nesterov": False},
    ),
    "dampened": ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.25, "maximize": True}, {"momentum": 0.0}),
    "adagrad": ("Adagrad", {"lr": 0.1, "lr_decay": 0.05, "initial_accumulator_value": 0.25}, {"weight_decay": 0.1}),
    "rmsprop": ("RMSprop", {"lr": 0.01, "centered": True, "momentum": 0.5}, {"centered": False}),
    "nadam": ("NAdam", {"lr": 0.01, "weight_decay": 0.1}, {"decoupled_weight_decay": True}),
    "rprop": ("Rprop", {}, {"etas": (0.4, 1.3)}),
    "asgd": ("ASGD", {}, {"weight_decay": 0.1}),
    "adafactor": ("Adafactor", {"lr": 0.05}, {"weight_decay": 0.1}),
    "muon": ("Muon", {"lr": 0.05}, {"nesterov": False}),
    "clipped": (Clipped, {"lr": 0.1, "momentum": 0.9}, {"momentum": 0.0}),
}
PATHS: dict[str, dict[str, Any]] = {
    "single": {"foreach": False},
    "default": {},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "not fused": {"fused": False},
}
ADAMS = ("adamw", "amsgrad", "decoupled")
# What one kernel can update.
COVERED = (*ADAMS, "sgd", "nesterov", "dampened", "adagrad")
HALVES = (torch.bfloat16, torch.float16)
# The dtypes that parameters have in turn; those with masters are stepped in float32.
NUMBERS: dict[str, tuple[torch.dtype, ...]] = {
    "float32": (torch.float32,),
    "masters": (torch.bfloat16,),
    "bfloat16": (torch.bfloat16,),
    "float16": (torch.float16,),
    "mixed": (torch.float32, *HALVES),
    "mixed masters": (torch.float32, *HALVES),
}
OFFLOADING: dict[str, list[Any]] = {
    "fraction": [1.0, 0.5, 0.0],
    "chunk_bytes": [600, 0, 1],
    "slots": [2, 1, 3],
    "pin_memory": [True, False],
    "release": ["at_offload", "on_request"],
    "fused_update": [None, False, True],
    "step_device": ["device"],
}


class _Stream:
    """What was put on it and has not run."""

    def __init__(self) -> None:
        self.tasks: deque[Callable[[], Any]] = deque()
        self.put_count = self.done_count = 0

    def put(self, task: Callable[[], Any]) -> None:
        self.tasks.append(task)
        self.put_count += 1

    def reach(self, count: int) -> None:
        """Run until so many are over."""
        while self.done_count < count:
            self.done_count += 1
            self.tasks.popleft()()


class LateEngine(InlineEngine):
    """Stands for a device whose copies run when somebody waits for them and not before; all else runs at once.

    The virtual device, which sees every order, takes ten times as long for a program: here it is values that tell.
    """

    stands_for_device = True

    def __init__(self) -> None:
        super().__init__("cpu")
        self._compute = self._now = _Stream()
        self._streams: list[_Stream] = []

    def stream(self, name: str, priority: int = 0) -> Any:
        self._streams.append(_Stream())
        return self._streams[-1]

    def event(self) -> Any:
        return []

    def current(self) -> Any:
        return self._now

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        before, self._now = self._now, stream
        try:
            yield
        finally:
            self._now = before

    def record(self, event: Any, stream: Any) -> None:
        event[:] = [stream, stream.put_count]

    def wait(self, stream: Any, event: Any) -> None:
        awaited = list(event)
        if stream is self._compute:
            self.synchronize(awaited)
        else:
            stream.put(lambda: self.synchronize(awaited))

    def synchronize(self, event: Any) -> None:
        if event:
            event[0].reach(event[1])

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if self._now is self._compute:
            target.copy_(source)
            return
        # A version counts what was asked for, when it was; a parameter may be bound to other memory meanwhile.
        torch.autograd.graph.increment_version(target)
        there, here = target.data, source.data
        self._now.put(lambda: there.copy_(here))

    def arrive(self) -> None:
        """Everything that was put on any stream is over."""
        for stream in self._streams:
            stream.reach(stream.put_count)


@contextmanager
def _on_cpu(*tensors: torch.Tensor) -> Iterator[list[torch.Tensor]]:
    """The tensors on the CPU, where formulas have their bits; what is written to them goes back."""
    places = [on_host(tensor) for tensor in tensors]
    copies = [place.cpu() for place in places]
    yield copies
    for place, copied in zip(places, copies, strict=True):
        if copied is not place:
            place.copy_(copied)


@contextmanager
def placed_on(device: str) -> Iterator[Place]:
    """The late engine on the CPU, else the suite's device."""
    if device == "cpu":
        yield Place(torch.device("cpu"), LateEngine())
        return
    with proven_on(device) as place:
        assert isinstance(place, Place)
        yield place


def laid_out(value: torch.Tensor, form: str) -> torch.Tensor:
    """The same values in another form of memory."""
    if form == "channels_last" and value.dim() == 4:
        return value.to(memory_format=torch.channels_last)
    if form == "channels_last" and value.dim() == 2:
        return value.t().contiguous().t()
    if form == "ones":
        # What stride a dimension of one element has means nothing.
        strides = [7 if size == 1 else stride for size, stride in zip(value.shape, value.stride(), strict=True)]
        return value.as_strided(value.shape, strides)
    if form == "gaps" and value.dim():
        return torch.stack([value, value], dim=-1)[..., 0]
    return value


def _turned(value: torch.Tensor) -> torch.Tensor:
    """A copy in the other order of dimensions."""
    order = tuple(reversed(range(value.dim())))
    return value.permute(order).contiguous().permute(order)


def _told_apart(value: Any) -> Any:
    """The same memory, where a stride means something: that of a dimension of one element is 1."""
    if isinstance(value, dict):
        return {key: _told_apart(each) for key, each in value.items()}
    if not isinstance(value, torch.Tensor) or 1 not in value.shape:
        return value
    strides = [1 if size == 1 else stride for size, stride in zip(value.shape, value.stride(), strict=True)]
    local = on_host(value.detach())
    return local.as_strided(local.shape, strides, local.storage_offset())


def _assert_same_states(got: dict[str, Any], expected: dict[str, Any]) -> None:
    assert_same_state(*({**each, "state": _told_apart(each["state"])} for each in (got, expected)))


def is_moment(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.numel() > 0


class Arms:
    """A plain optimizer and an offloaded one, as a case has them.

    Args:
        by: ``torch``; ``cpu`` or ``slot`` where what moves is stepped by a formula.
    """

    def __init__(self, offload: Any, place: Place, case: Case, by: str = "torch") -> None:
        self.offload, self.place, self.case, self.by = offload, place, case, by
        self.kind, options, others = KINDS[case["kind"]]
        with_masters = "masters" in case["numbers"]
        self.params = [self._made(i) for i in range(len(self.shapes()))]
        self.masters = offload.MasterWeights(self.params) if with_masters else None
        self.plain_params = [self._made(i) for i in range(len(self.shapes()))]
        if with_masters:
            self.plain_params = [torch.nn.Parameter(param.detach().float()) for param in self.plain_params]
        self.stepped = self.params if self.masters is None else list(self.masters.parameters())
        options = {**options, **PATHS[case["path"]]}
        others_of: dict[str, dict[str, Any]] = {
            "rate": {"lr": 0.03},
            "maximize": {"maximize": not options.get("maximize", False)},
            "path": {"foreach": not options.get("foreach")},
            "states": others,
        }
        other = others_of.get(case["differs"])
        self.plain, self.optimizer = (self._optimizer(arm, options, other) for arm in (self.plain_params, self.stepped))
        self.others, self.options = others, {name: case[name] for name in OFFLOADING}
        self.count, self.attached = 0, False
        self.away: list[int] = []
        # What to compare in the end: snapshots, with what they have to be.
        self.kept: list[tuple[dict[str, Any], dict[str, Any]]] = []
        if case["start"] == "ran":
            if self.masters is not None:
                self.masters.attach(self.optimizer)
            self.step()
        self.attach()

    def shapes(self) -> list[tuple[int, ...]]:
        """Those that the optimizer can step."""
        return [
            shape
            for shape in SHAPES[self.case["sizes"]]
            if (self.kind != "Muon" or (len(shape) == 2 and 0 not in shape))
            and (self.kind != "Adafactor" or 0 not in shape)
        ]

    def _made(self, i: int) -> torch.nn.Parameter:
        dtypes = NUMBERS[self.case["numbers"]]
        return torch.nn.Parameter(laid_out(values(self.shapes()[i], i, dtypes[i % len(dtypes)]), self.case["form"]))

    def _optimizer(self, params: Sequence[Any], options: dict[str, Any], other: dict[str, Any] | None) -> Any:
        made = getattr(torch.optim, self.kind) if isinstance(self.kind, str) else self.kind
        if other is None:
            return made(params, **options)
        return made([{"params": list(params[::2])}, {"params": list(params[1::2]), **other}], **options)

    def attach(self) -> None:
        """A new offloader; what moves is chosen."""
        self.offloader = self.offload.OptimizerStateOffloader(
            self.optimizer, engine=self.place.engine, master_weights=self.masters, **self.options
        )
        self.attached = True
        self.moving = self.chosen()

    def both(self) -> list[tuple[Any, list[Any]]]:
        """(optimizer, what it steps), the plain ones first."""
        return [(self.plain, self.plain_params), (self.optimizer, self.stepped)]

    # What a step has to give.

    def step(self, skip: Sequence[int] = (), *, turned: bool = False) -> None:
        """One step of both, without a gradient where ``skip`` says so; the parameters are the same then."""
        self.count += 1
        for i, (plain, param) in enumerate(zip(self.plain_params, self.params, strict=True)):
            param.grad = plain.grad = None
            if i not in skip and i not in self.away:
                # As a backward pass lays it, in the strides of the parameter.
                grad = torch.empty_like(param).detach().copy_(values(param.shape, 1000 * self.count + i, param.dtype))
                grad = _turned(grad) if turned else grad
                param.grad, plain.grad = grad, grad.to(plain.dtype, copy=True)
        self._step_plain()
        self.optimizer.step()
        with _disable_current_modes():
            for i, (plain, param) in enumerate(zip(self.plain_params, self.params, strict=True)):
                got, expected = on_host(param.detach()), on_host(plain.detach()).to(param.dtype)
                where = f"parameter {i} after {self.count} steps"
                assert_same_tensor(_told_apart(got), _told_apart(expected), where=where)

    def _step_plain(self) -> None:
        grads = {}
        for group in self.plain.param_groups if self.by != "torch" and self.attached else ():
            for param in group["params"]:
                if param.grad is not None and param in self.moving and self._has_formula(group, param):
                    grads[param] = (group, param.grad)
                    param.grad = None
        self.plain.step()
        for param, (group, grad) in grads.items():
            param.grad = grad
            with _disable_current_modes():
                (self._step_on_cpu if self.by == "cpu" else self._step_in_slot)(group, param, on_host(grad).cpu())

    def _has_formula(self, group: dict[str, Any], param: Any) -> bool:
        """A kernel updates what has states; torch makes them."""
        return self.by == "cpu" or bool(self.plain.state.get(param)) or group.get("momentum") == 0

    def _step_on_cpu(self, group: dict[str, Any], param: Any, grad: Any) -> None:
        state, names = self.plain.state[param], ["exp_avg", "exp_avg_sq", *["max_exp_avg_sq"] * group["amsgrad"]]
        if not state:
            state.update({"step": torch.tensor(0.0), **{name: torch.zeros_like(param) for name in names}})
        state["step"] += 1
        numbers = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay", "maximize")}
        decoupled = group["decoupled_weight_decay"]
        hyper = AdamHyper.of(step=float(state["step"]), decoupled=decoupled, **numbers)
        with _on_cpu(param.detach(), *(state[name] for name in names)) as written:
            adam_step(hyper, grad, *written)

    def _step_in_slot(self, group: dict[str, Any], param: Any, grad: Any) -> None:
        state = self.plain.state.get(param, {})
        count = state.get("step")
        numbers = {} if count is None else {"step": float(count)}
        with _on_cpu(param.detach(), *state.values()) as written:
            foreach_step(self.kind, group, written[0], grad, {**dict(zip(state, written[1:], strict=True)), **numbers})
        if count is not None:
            count += 1

    # What moves.

    def _sizes(self) -> list[tuple[Any, int]]:
        """The plain arm's parameters that have something to move, in order, with its bytes."""
        found = []
        is_foreign = not isinstance(self.kind, str)
        for group in self.plain.param_groups:
            for plain in group["params"]:
                param = self.params[next(i for i, each in enumerate(self.plain_params) if each is plain)]
                # A step on the CPU leaves what has no dimensions, master and moments, to torch on the device.
                is_master = self.masters is not None and param.dtype is not torch.float32
                is_master &= bool(plain.dim()) or self.options["step_device"] == "device"
                master_bytes = plain.nbytes if is_master else 0
                moved = master_bytes + (plain.nbytes * self._moment_count(group) if plain.dim() else 0)
                if moved or (is_foreign and plain.numel()):
                    found.append((plain, moved))
        return found

    def _moment_count(self, group: dict[str, Any]) -> int:
        if "amsgrad" in group:
            return 3 if group["amsgrad"] else 2
        if self.kind in ("SGD", "RMSprop"):
            return int(self.kind == "RMSprop") + bool(group["momentum"]) + bool(group.get("centered"))
        return {"NAdam": 2, "Rprop": 2}.get(str(self.kind), 1)

    def chosen(self, new: Sequence[Any] | None = None) -> set[Any]:
        """The first ones, of all or of those that are new, that hold the share which moves."""
        sizes, chosen, total = self._sizes(), set(), 0
        sizes = [each for each in sizes if new is None or any(each[0] is param for param in new)]
        for param, size_bytes in sizes:
            if total >= self.options["fraction"] * sum(each for _, each in sizes):
                break
            chosen.add(param)
            total += size_bytes
        return chosen

    def check(self) -> None:
        """States, bit for bit, and what was kept."""
        got = self.offloader.snapshot() if self.attached else self.optimizer.state_dict()
        with _disable_current_modes():
            _assert_same_states(got, self.plain.state_dict())
            for snapshot, expected in self.kept:
                _assert_same_states(snapshot, expected)

    def check_places(self) -> None:
        """What was to move is on the host, all of it, and nothing else."""
        if self.options.get("release") == "on_request":
            self.offloader.offload()
            self.offloader.release_gpu_memory()
        self.offloader.settle()
        residency = self.offloader.residency()
        assert_equal(residency.device_bytes, 0, where="bytes on the device")
        if self.kind in ("Adafactor", Clipped) or self.case["event"] in ("came back", "grown", "option"):
            return
        sizes = dict(self._sizes())
        assert_equal(residency.host_bytes, sum(sizes[param] for param in self.moving), where="bytes on the host")

    def saved(self) -> dict[str, Any]:
        """The plain arm's state dict, of its own memory."""
        with _disable_current_modes():
            return copy.deepcopy(self.plain.state_dict())


# Events between two steps.


def _writes(arms: Arms, factor: float, *, counted: bool) -> None:
    for optimizer, _ in arms.both():
        for state in optimizer.state.values():
            for value in filter(is_moment, state.values()):
                (value if counted else value.data).mul_(factor)


def _prefetched(arms: Arms) -> None:
    arms.offloader.prefetch()


def _written(arms: Arms) -> None:
    """In place, after a prefetch has arrived, without a word."""
    arms.offloader.prefetch()
    if isinstance(arms.place.engine, LateEngine):
        arms.place.engine.arrive()
    _writes(arms, 0.5, counted=True)


def _filled(arms: Arms) -> None:
    """Past every counter, once nothing is on its way."""
    arms.offloader.prefetch()
    arms.offloader.settle_for_writing()
    _writes(arms, 0.25, counted=False)


def _model_loaded(arms: Arms) -> None:
    """Past every counter; masters follow when they are told."""
    arms.offloader.prefetch()
    for i, (plain, param) in enumerate(zip(arms.plain_params, arms.params, strict=True)):
        param.data.copy_(values(param.shape, 700 + i, param.dtype))
        plain.data.copy_(param.detach())
    if arms.masters is not None:
        arms.offloader.refresh_masters()


def _restored(arms: Arms, saved: dict[str, Any]) -> None:
    """The plain arm has saved states again, without a cast."""
    for group, other in zip(arms.plain.param_groups, saved["param_groups"], strict=True):
        group.update({key: value for key, value in other.items() if key != "params"})
        for param, number in zip(group["params"], other["params"], strict=True):
            arms.plain.state.pop(param, None)
            if saved["state"].get(number):
                arms.plain.state[param] = copy.deepcopy(saved["state"][number])


def _loaded(arms: Arms) -> None:
    """An older state dict, after a prefetch."""
    saved = arms.saved()
    arms.step()
    arms.offloader.prefetch()
    arms.offloader.load_state_dict(in_host_memory(arms.place, saved))
    with _disable_current_modes():
        _restored(arms, saved)


def _loaded_turned(arms: Arms) -> None:
    """Moments in another memory format."""
    saved = arms.saved()
    for state in saved["state"].values():
        state.update({name: _turned(value) for name, value in state.items() if is_moment(value)})
    arms.offloader.load_state_dict(in_host_memory(arms.place, saved))
    with _disable_current_modes():
        _restored(arms, saved)


def _loaded_by_torch(arms: Arms) -> None:
    """As the optimizer itself loads."""
    saved = reread(arms.plain.state_dict(), fused=arms.case["path"] == "fused")
    arms.step()
    arms.offloader.prefetch()
    for optimizer, _ in arms.both():
        optimizer.load_state_dict(copy.deepcopy(saved))


def _came_back(arms: Arms) -> None:
    """Two parameters leave their group for a step; one comes back with its state, the other without."""
    homes = []
    for optimizer, _ in arms.both():
        group = optimizer.param_groups[-1]
        homes.append((optimizer, group, group["params"][:2]))
        group["params"] = group["params"][2:]
    arms.away = [i for i, param in enumerate(arms.plain_params) if any(param is each for each in homes[0][2])]
    arms.step()
    arms.offloader.offload()
    arms.step()
    for optimizer, group, params in homes:
        group["params"] += params
        if len(params) > 1 and arms.by != "slot" and arms.kind != "Adagrad":
            optimizer.state.pop(params[1], None)
    arms.moving = arms.moving - set(homes[0][2]) | arms.chosen(homes[0][2])
    arms.away = []


def _released(arms: Arms) -> None:
    arms.offloader.offload()
    arms.offloader.release_gpu_memory()


def _kept(arms: Arms) -> None:
    """A snapshot that no later step changes."""
    arms.kept.append((arms.offloader.snapshot(), arms.saved()))


def _attached_anew(arms: Arms) -> None:
    """Plain for a step, then with other options."""
    arms.offloader.close()
    arms.attached = False
    arms.step()
    arms.options["chunk_bytes"] = {600: 0, 0: 1, 1: 600}[arms.options["chunk_bytes"]]
    arms.options["fraction"] = {1.0: 0.5, 0.5: 1.0, 0.0: 0.5}[arms.options["fraction"]]
    arms.attach()


def _copied(arms: Arms) -> None:
    """A copy of the optimizer is the plain one's."""
    arms.offloader.settle()
    with _disable_current_modes():
        _assert_same_states(copy.deepcopy(arms.optimizer).state_dict(), arms.plain.state_dict())


def _brought(arms: Arms) -> None:
    """To the device, for a tool that looks at it there."""
    arms.offloader.to_device(arms.offloader.bundles)


def _by_kind(arms: Arms) -> None:
    arms.offloader.offload(masters=False)
    arms.offloader.offload(states=False)
    arms.offloader.release_gpu_memory()


def _bound(arms: Arms) -> None:
    """A state of each parameter is another tensor, in another memory format."""
    for optimizer, params in arms.both():
        for i, param in enumerate(params):
            state = optimizer.state.get(param, {})
            for name in [name for name, value in state.items() if is_moment(value)][:1]:
                state[name] = _turned(values(state[name].shape, 50 + i, state[name].dtype).abs())
    arms.offloader.offload()
    arms.offloader.release_gpu_memory()


def _option(arms: Arms) -> None:
    """A group gets other options, and its states begin anew."""
    for optimizer, _ in arms.both():
        group = optimizer.param_groups[-1]
        group.update(arms.others)
        for param in group["params"] if arms.kind != "Adagrad" else ():
            optimizer.state.pop(param, None)


def _grown(arms: Arms) -> None:
    """A float32 parameter comes in a group of its own, also beside masters."""
    arms.offloader.prefetch()
    plain, param = (torch.nn.Parameter(values((12, 11), 90)) for _ in range(2))
    arms.plain_params.append(plain)
    arms.params.append(param)
    if arms.stepped is not arms.params:
        arms.stepped.append(param)
    for optimizer, params in arms.both():
        optimizer.add_param_group({"params": params[-1:]})
    arms.moving |= arms.chosen([plain])


EVENTS: dict[str, Callable[[Arms], None]] = {
    "nothing": lambda arms: None,
    "prefetched": _prefetched,
    "written": _written,
    "filled": _filled,
    "model loaded": _model_loaded,
    "loaded": _loaded,
    "loaded turned": _loaded_turned,
    "loaded by torch": _loaded_by_torch,
    "came back": _came_back,
    "released": _released,
    "kept": _kept,
    "attached anew": _attached_anew,
    "copied": _copied,
    "brought": _brought,
    "by kind": _by_kind,
    "bound": _bound,
    "option": _option,
    "grown": _grown,
}
