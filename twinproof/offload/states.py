"""Where tensors lie in host memory: places of one parameter's states, one behind the other, and what is bound to them.

Prevents pinned memory rounded up to a power of two: everything of a batch of parameters lies in one block of exactly
its size, whole parameters next to each other. Half-precision parameters may have float32 masters among their states:
the optimizer steps the masters, and the model gets them rounded.
"""

from __future__ import annotations

import copy
import functools
import importlib
import itertools
import math
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from twinproof.errors import ConfigError, PlanError, StaleMasterError, UnsupportedError
from twinproof.optimizers import MasterOf

__all__ = [
    "ALIGN_BYTES",
    "MASTER",
    "Bundle",
    "MasterWeights",
    "Place",
    "beside",
    "bindings",
    "check_plain",
    "check_rounded",
    "check_separate",
    "chunks_of",
    "copied",
    "dense_strides",
    "is_dense",
    "is_movable",
    "local_of",
    "made_as",
    "make_bundle",
    "mesh_of",
    "narrowed",
    "rebind",
    "select",
    "standing_for",
    "strays",
    "view_of",
]

ALIGN_BYTES = 256
_OWN = "the parameter"
_NEVER = (-1, -1)  # No version that a tensor has.
_OWN_GRAD: Any = torch.Tensor.grad
_MASTERS = "masters"  # The name of all of them in a state dict.
MASTER = "master"  # The name of a parameter's own place, beside those of its states.


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor: of a DTensor, this rank's shard."""
    return getattr(tensor, "_local_tensor", tensor)


def version_of(tensor: torch.Tensor) -> tuple[int, int]:
    """What any write in place changes. Of a DTensor its own counts too: an operation on it leaves its shard's alone."""
    return tensor._version, local_of(tensor)._version


def mesh_of(tensor: torch.Tensor) -> Any:
    """The mesh over which a DTensor is sharded; None of any other tensor."""
    return getattr(tensor, "device_mesh", None)


def check_plain(value: Any, where: str) -> None:
    """Refuse a tensor whose values are not its memory: a quantized state, for instance, is several tensors and a rule.
    What is no tensor is fine.

    Raises:
        UnsupportedError: naming its class. A DTensor is fine, whose shard is looked at, and so is a class that says
            ``is_plain_memory``: the tensors of a device whose backend is written in Python.
    """
    kind = type(local_of(value)) if isinstance(value, torch.Tensor) else torch.Tensor
    is_plain = getattr(kind, "is_plain_memory", False)
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ and not is_plain:
        expected = "one whose values are its memory"
        raise UnsupportedError(
            "not a tensor that can be moved as bytes", got=kind.__name__, expected=expected, where=where
        )


class _Span(NamedTuple):
    """Bytes of one storage that a parameter or one of its states takes, and whose they are."""

    home: int
    begin: int
    end: int
    number: int
    name: str


def _spans(param: torch.Tensor, state: dict[str, Any], number: int) -> Iterator[_Span]:
    for name, value in [(_OWN, param.detach()), *state.items()]:
        check_plain(value, f"state {name} of parameter {number}")
        if is_movable(value):
            local = local_of(value)
            extent = 1 + sum((size - 1) * stride for size, stride in zip(local.shape, local.stride(), strict=True))
            begin = int(local.storage_offset()) * local.element_size()
            end = begin + int(extent) * local.element_size()
            yield _Span(local.untyped_storage().data_ptr(), begin, end, number, name)


def check_separate(owners: Iterable[tuple[torch.Tensor, dict[str, Any]]]) -> None:
    """Refuse states that share memory with a state or a parameter, their own or another's: moved one by one they would
    part. Parameters may share theirs.

    Args:
        owners: parameters with their states, in the order in which messages count them.

    Raises:
        UnsupportedError: naming both, or a state that is not plain memory.
    """
    found: list[tuple[list[int], str, str]] = []
    # What reaches furthest so far: of states, and of everything.
    state = every = _Span(-1, 0, 0, 0, "")
    for span in sorted(itertools.chain.from_iterable(_spans(*owner, n) for n, owner in enumerate(owners))):
        other = state if span.name == _OWN else every
        if span.home == other.home and span.begin < other.end:
            found.append((sorted({other.number, span.number}), other.name, span.name))
        every = max(every, span, key=lambda each: (each.home == span.home, each.end))
        if span.name != _OWN:
            state = max(state, span, key=lambda each: (each.home == span.home, each.end))
    if found:
        # Addresses are nobody's choice: the first parameter is named.
        numbers, *names = min(found)
        raise UnsupportedError(
            "states that share memory cannot be moved one by one",
            got=tuple(names),
            expected="memory of its own for each",
            where=f"parameter {' and '.join(map(str, numbers))}",
        )


def is_movable(value: Any) -> bool:
    """Dense tensors with at least one dimension move; scalars (``step`` and its like) stay where torch put them."""
    is_strided = isinstance(value, torch.Tensor) and value.layout is torch.strided
    return is_strided and value.dim() > 0 and local_of(value).numel() > 0


@dataclass(frozen=True)
class Place:
    """Where one tensor lies: bytes from the start of its bundle, and its form."""

    offset_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @functools.cached_property
    def size_bytes(self) -> int:
        """Of the values."""
        return math.prod(self.shape) * self.dtype.itemsize

    def as_meta(self) -> torch.Tensor:
        """A tensor of this form, without memory."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")

    def fits(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has this form, and is not the conjugate of what its memory holds."""
        is_same = (tensor.dtype, tuple(tensor.shape), tensor.stride()) == (self.dtype, self.shape, self.strides)
        return is_same and not tensor.is_conj()


@dataclass
class Bundle:
    """Everything of one parameter that moves, at ``offset_bytes`` of its block; the unit of chunks and of fractions."""

    param: torch.Tensor
    places: dict[str, Place]
    payload_bytes: int
    span_bytes: int
    offset_bytes: int = 0


def _round_up(value: int) -> int:
    return -(-value // ALIGN_BYTES) * ALIGN_BYTES


def dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides of a tensor without gaps that is like this one: its own where it has none."""
    # empty_like keeps the strides of dense tensors, channels_last among them, and makes others contiguous.
    return tuple(torch.empty_like(tensor, device="meta").stride())


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements of a tensor lie in memory without gaps, in any order of dimensions."""
    return tensor.is_contiguous() or dense_strides(tensor) == tensor.stride()


def make_bundle(param: torch.Tensor, tensors: dict[str, torch.Tensor]) -> Bundle:
    """Lay the tensors of one parameter out, one behind the other, each aligned."""
    places: dict[str, Place] = {}
    position = payload = 0
    for name, tensor in tensors.items():
        places[name] = Place(position, tensor.dtype, tuple(tensor.shape), dense_strides(tensor))
        payload += places[name].size_bytes
        position += _round_up(places[name].size_bytes)
    return Bundle(param, places, payload, position)


def chunks_of(bundles: Iterable[Bundle], chunk_bytes: int) -> list[list[Bundle]]:
    """Consecutive bundles of at most ``chunk_bytes``, at least one each; 0: all in one."""
    chunks: list[list[Bundle]] = []
    size = 0
    for bundle in bundles:
        if not chunks or (chunk_bytes and size + bundle.span_bytes > chunk_bytes):
            chunks.append([])
            size = 0
        chunks[-1].append(bundle)
        size += bundle.span_bytes
    return chunks


def select(bundles: Sequence[Bundle], fraction: float) -> list[Bundle]:
    """The first bundles, in the order of the parameters, that hold at least this share of all bytes.

    Where states were not foreseen, the bytes of the parameters stand for them.
    """
    is_foreseen = all(bundle.payload_bytes for bundle in bundles)
    sizes = [bundle.payload_bytes if is_foreseen else local_of(bundle.param).nbytes for bundle in bundles]
    wanted = fraction * sum(sizes)
    chosen: list[Bundle] = []
    total = 0
    for bundle, size_bytes in zip(bundles, sizes, strict=True):
        if total >= wanted:
            break
        chosen.append(bundle)
        total += size_bytes
    return chosen


def view_of(memory: torch.Tensor, place: Place, offset_bytes: int) -> torch.Tensor:
    """The tensor at a place of a bundle that begins at ``offset_bytes`` of uint8 memory."""
    begin = offset_bytes + place.offset_bytes
    values = memory[begin : begin + place.size_bytes].view(place.dtype)
    return values.as_strided(place.shape, place.strides, values.storage_offset())


def bindings(optimizer: Optimizer, bundle: Bundle) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, local tensor) of everything of a bundle that exists now."""
    for name in bundle.places:
        if name == MASTER:
            yield name, local_of(bundle.param)
        elif isinstance(value := optimizer.state.get(bundle.param, {}).get(name), torch.Tensor):
            yield name, local_of(value)


def holder_of(optimizer: Optimizer, bundle: Bundle, name: str) -> Any:
    """What the user writes to: the master itself, or a state as the optimizer has it."""
    return bundle.param if name == MASTER else optimizer.state[bundle.param][name]


def rebind(optimizer: Optimizer, bundle: Bundle, name: str, memory: torch.Tensor) -> None:
    """Let a state, or a master, lie in ``memory``, which holds its values or soon will.

    A plain state is replaced in the optimizer; a parameter, and what a DTensor wraps, keep their identity.
    """
    holder = holder_of(optimizer, bundle, name)
    if name == MASTER or hasattr(holder, "_local_tensor"):
        bind_memory(holder, memory)
    else:
        optimizer.state[bundle.param][name] = memory


def bind_memory(holder: Any, memory: torch.Tensor) -> None:
    """Let a parameter, or what a DTensor wraps, lie in ``memory``."""
    if hasattr(holder, "_local_tensor"):
        holder._local_tensor = memory
    else:
        holder.data = memory


_GROUPS_AND_STATES = ("param_groups", "state", "defaults")


@functools.cache
def _class_that_stands_for(kind: Any) -> Any:
    # Slots come before what the two objects share.
    return type(kind)(kind.__name__, (kind,), {"__slots__": _GROUPS_AND_STATES, "__module__": __name__})


def standing_for(optimizer: Optimizer, kind: Any, groups: Sequence[dict[str, Any]]) -> Any:
    """What the arithmetic of an optimizer steps in its place: it has these groups, and the optimizer keeps its own.

    Prevents that a handler of a signal writes a learning rate to groups that are thrown away, and that a thread finds
    fewer. States and all other attributes are the optimizer's, to be read and to be written.

    Args:
        optimizer: whose states are stepped.
        kind: torch's class, whose arithmetic it is: what a derived one does with what is made of it is not done.
        groups: with every option, like the optimizer's.
    """
    found = object.__new__(_class_that_stands_for(kind))
    found.__dict__ = vars(optimizer)
    found.param_groups, found.state, found.defaults = list(groups), optimizer.state, optimizer.defaults
    return found


def narrowed(groups: Sequence[dict[str, Any]], params: set[torch.Tensor]) -> list[dict[str, Any]]:
    """Copies of the groups that have some of these parameters, with no others."""
    some = [{**group, "params": [param for param in group["params"] if param in params]} for group in groups]
    return [group for group in some if group["params"]]


def place_in_order(optimizer: Optimizer, known_count: int) -> None:
    """Have states that came behind the first ``known_count`` stand in the order of their parameters, as behind torch.

    Prevents ranks that step shards of other sizes first from having states in other orders: torch gathers a full state
    dict in that order, and would mix the tensors of two parameters.
    """
    held: dict[Any, Any] = optimizer.state
    if len(held) == known_count:
        return
    # Of one that is listed twice the first place counts.
    numbers: dict[Any, int] = {}
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        numbers.setdefault(param, len(numbers))
    put_in_order(held, sorted(list(held)[known_count:], key=lambda key: numbers.get(key, -1)), known_count)


def put_in_order(held: dict[Any, Any], keys: Sequence[Any], first: int = 0) -> None:
    """Have these keys stand in this order behind the ``first`` ones, which are none of them."""
    if all(one is other for one, other in zip(keys, itertools.islice(held, first, None), strict=False)):
        return
    kept = {key: held[key] for key in keys}
    try:
        for key in keys:
            held[key] = held.pop(key)
    finally:
        # An interrupt between the two takes no state.
        for key, state in kept.items():
            held.setdefault(key, state)


def beside(engine: Any, source: torch.Tensor) -> torch.Tensor:
    """The values of a local tensor in device memory of its own; the caller waits for the copy."""
    # Of what was cut from something larger the copy takes no gaps along: its strides are those of dense memory.
    place = Place(0, source.dtype, tuple(source.shape), dense_strides(source))
    here = view_of(engine.device_empty(max(place.size_bytes, source.element_size())), place, 0)
    if source.numel():
        engine.copy(here, source)
    return here


def strays(optimizer: Optimizer, bundles: Sequence[Bundle], others: Sequence[Bundle], transfers: Any) -> list[Any]:
    """(bundle, name, local tensor) of what lies in host memory at another place than its own.

    Somebody handed a state to another parameter, swapped two, or cut one. ``others`` have no places there.
    """
    found: list[Any] = []
    for bundle in (*bundles, *others):
        state = optimizer.state.get(bundle.param, {})
        held = {name: local_of(value) for name, value in state.items() if is_movable(value)}
        if MASTER in bundle.places:
            held[MASTER] = local_of(bundle.param.detach())
        for name, tensor in held.items():
            if not transfers.is_on_host(tensor):
                continue
            place = bundle.places.get(name)
            is_home = place is not None and place.fits(tensor)
            if not is_home or tensor.data_ptr() != transfers.home(bundle, name).data_ptr():
                found.append((bundle, name, tensor))
    return found


def copied(value: Any) -> Any:
    """A copy of its own memory; deepcopy would copy the whole block behind every view."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    return [copied(item) for item in value] if isinstance(value, list) else copy.deepcopy(value)


def check_params(params: Any) -> list[torch.Tensor]:
    """Demand tensors. Raises ConfigError."""
    expected = "the parameters themselves: model.parameters()"
    if isinstance(params, (str, torch.Tensor, torch.nn.Module)) or not isinstance(params, Iterable):
        raise ConfigError("not parameters", got=type(params).__name__, expected=expected, where="params")
    found = list(params)
    wrong = sorted({type(each).__name__ for each in found if not isinstance(each, torch.Tensor)})
    if wrong:
        raise ConfigError("not parameters", got=wrong, expected=expected, where="params")
    return found


def _check_values(values: Any) -> list[torch.Tensor]:
    """Demand tensors whose numbers are at hand. Raises PlanError."""
    found = list(values) if isinstance(values, Iterable) and not isinstance(values, (str, dict)) else [values]
    for number, value in enumerate(found):
        plain = isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_meta
        if not plain or value.is_complex():
            got = type(value).__name__ if not isinstance(value, torch.Tensor) else (value.dtype, value.layout)
            raise PlanError("not the values of a master", got=got, expected="a dense tensor", where=f"values[{number}]")
    return found


class _Master:
    """What a master is beside its class of tensor: between steps its gradient is that of its parameter.

    Whoever knows the optimizer's parameters alone, its ``zero_grad``, a ``GradScaler``, a framework that clips, then
    acts on the model's gradients. In a step a master has one of its own, in float32.
    """

    master_of: MasterOf
    # Whether steps of somebody give it gradients. Of the step that runs: the gradient it was made from, its version.
    is_driven = False
    given: tuple[torch.Tensor | None, int] | None = None

    grad = property(
        lambda self: _shown_grad(self), lambda self, value: _take_grad(self, value), lambda self: _take_grad(self, None)
    )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with _as_made(self) as master:
            return copy.deepcopy(master, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        with _as_made(self) as master:
            return master.__reduce_ex__(protocol)


@functools.cache
def _master_class(kind: Any) -> Any:
    """Of a class of tensors, the one of masters: torch's optimizers treat both alike."""
    found = type(kind)(f"Master{kind.__name__}", (_Master, kind), {"__module__": __name__})
    # As torch does for DTensor: what is not listed there is stepped tensor by tensor.
    alike: list[type] = getattr(importlib.import_module("torch.optim.optimizer"), "_foreach_supported_types", [])
    if kind in alike:
        alike.append(found)
    return found


@contextmanager
def _as_made(master: Any) -> Iterator[Any]:
    """A master of the class that it was made with: a copy is of no model until masters are made of it."""
    kind: Any = type(master)
    master.__class__ = made_as(master)
    try:
        yield master
    finally:
        master.__class__ = kind


def _bind(master: Any, param: torch.Tensor) -> None:
    """Let a tensor be the master of a parameter; one that is already stays as it is, where two masters share it."""
    if isinstance(master, _Master):
        return
    master.master_of, master.is_driven, master.given = MasterOf(param), False, None
    kind: Any = type(master)
    master.__class__ = _master_class(kind)


def made_as(tensor: torch.Tensor) -> type:
    """The class of a tensor; of a master the one that it was made with."""
    kind = type(tensor)
    return kind.__bases__[1] if issubclass(kind, _Master) else kind


def _has_own(master: Any, param: Any) -> bool:
    """In a step; one that failed is over once the parameter has another gradient than the step began with."""
    if param is None or not master.is_driven:
        return True
    if master.given is None:
        return False
    grad, version = master.given
    return param.grad is None or (param.grad is grad and grad._version == version)


def _shown_grad(master: Any) -> Any:
    param = master.master_of.param
    return own_grad(master) if _has_own(master, param) else param.grad


def _take_grad(master: Any, value: Any) -> None:
    param = master.master_of.param
    if value is None:
        # In a step, too: the gradient that it was given is done with.
        set_own_grad(master, None)
        master.given = None
        if param is not None and master.is_driven:
            param.grad = None
    elif _has_own(master, param):
        set_own_grad(master, value)
    else:
        param.grad = _for_the_model(value, master, param) if isinstance(value, torch.Tensor) else value


def _for_the_model(grad: torch.Tensor, master: Any, param: torch.Tensor) -> torch.Tensor:
    # What is made like a master lies where it does, in host memory between steps; of any other place torch judges.
    is_like_master = local_of(grad).device == local_of(master).device
    return grad.to(param.device if is_like_master else grad.device, param.dtype)


def check_rounded(optimizer: Optimizer, param: torch.Tensor) -> None:
    """Refuse a master that the optimizer steps and nobody rounds into its parameter: the model would never change.

    Looked for are the hooks of ``MasterWeights.attach``; where the parameter is gone there is nothing to round into.

    Raises:
        ConfigError: the steps of this optimizer give the master no gradients.
    """
    if not isinstance(param, _Master) or param.master_of.param is None:
        return
    hooks = [getattr(hook, "__self__", None) for hook in optimizer._optimizer_step_pre_hooks.values()]
    if not any(isinstance(each, MasterWeights) and param in each.pairs for each in hooks):
        raise ConfigError(
            "the optimizer steps a master that nobody rounds into the model",
            got=f"a master of shape {tuple(param.shape)}, without master_weights=",
            expected="master_weights=masters, or masters.attach(optimizer) before",
            where="master_weights",
        )


def own_grad(master: Any) -> torch.Tensor | None:
    """The gradient that a tensor has itself, whatever class it is of: a master has one in a step alone."""
    return _OWN_GRAD.__get__(master)  # type: ignore[no-any-return]


def set_own_grad(master: Any, value: torch.Tensor | None) -> None:
    """Give it one, or none."""
    _OWN_GRAD.__set__(master, value)


class MasterWeights:
    """Float32 copies of half-precision parameters, to be given to an optimizer in their place.

    ::

        masters = MasterWeights(model.parameters())
        optimizer = torch.optim.AdamW(masters.parameters())
        masters.attach(optimizer)            # or OptimizerStateOffloader(optimizer, master_weights=masters)

    At each step the gradients of the model's parameters are taken (and cleared), the masters are stepped in float32,
    and the model gets them rounded to nearest even. Float32 parameters are their own masters. Between steps
    ``master.grad`` is the model's gradient, in its dtype, to read, to change, to replace and to clear.

    Neither attached to an optimizer nor given to an offloader of it, masters have no gradients, and the model never
    changes. An offloader refuses such ones. A plain optimizer's steps cannot be seen from here: no error tells of them.

    Args:
        params: floating-point parameters; DTensors keep their placement.

    A copy or a pickle has the copied parameters, and is attached to nothing. Like one of an offloaded optimizer it is
    made on the device: everything comes there for it, until the next step or ``offload()``.

    Raises:
        ConfigError: a parameter that is not floating-point, one that is there twice, or one made in inference mode.
    """

    def __init__(self, params: Iterable[torch.Tensor]) -> None:
        self.pairs: dict[torch.Tensor, torch.Tensor] = {}
        self._versions: dict[torch.Tensor, tuple[int, int]] = {}
        # How often each was written by then: hooks between may free its gradient.
        self._begun: dict[torch.Tensor, tuple[int, int]] = {}
        self._handles: list[Any] = []
        # The offloader that has them in host memory.
        self._mover: Any = None
        # Those whose parameters lie in one piece of memory.
        self._kin: dict[torch.Tensor, list[torch.Tensor]] = {}
        # Written, and not noted yet: see ``noted_together``.
        self._waiting: list[torch.Tensor] | None = None
        seen: set[torch.Tensor] = set()
        params = check_params(params)
        for param in params:
            if not param.is_floating_point() or param.dtype.itemsize > 4 or param in seen:
                got = "a parameter twice" if param in seen else param.dtype
                expected = "distinct floating-point parameters of at most 32 bits"
                raise ConfigError("not parameters that have masters", got=got, expected=expected, where="params")
            if param.is_inference():
                got = f"one made in inference mode, of shape {tuple(param.shape)}"
                raise ConfigError("no step can write to such a parameter", got=got, expected="a clone", where="params")
            seen.add(param)
            # Whatever is made in the caller's inference mode can be stepped in no other.
            with torch.inference_mode(False):
                master = param if param.dtype is torch.float32 else torch.nn.Parameter(param.detach().float())
            if master is not param:
                _bind(master, param)
            self.pairs[master] = param
            self._note(master)
        homes: dict[int, list[torch.Tensor]] = {}
        for master, param in self.pairs.items():
            homes.setdefault(local_of(param).untyped_storage().data_ptr(), []).append(master)
        self._kin = {master: some for some in homes.values() if len(some) > 1 for master in some}

    def __getstate__(self) -> dict[str, Any]:
        # Copies lie where their parameters do. Whoever moves these is told; it may be gone.
        self.come_home()
        mover = self._mover_now()
        if mover is not None:
            mover._bring_all()
        # Hooks, versions and gradients on their way are those of these tensors alone.
        stale = [master for master, param in self.pairs.items() if version_of(param) != self._versions[master]]
        return {"pairs": self.pairs, "kin": self._kin, "stale": stale}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.pairs, self._kin, self._handles = state["pairs"], state["kin"], []
        self._mover = None
        self._begun, self._waiting = {}, None
        self._versions = {master: version_of(param) for master, param in self.pairs.items()}
        self._versions.update(dict.fromkeys(state["stale"], _NEVER))
        for master, param in self.pairs.items():
            if master is not param:
                _bind(master, param)

    def _mover_now(self) -> Any:
        # Closed, it has none of them any more.
        mover = None if self._mover is None else self._mover()
        return mover if mover is not None and mover._driver.attached else None

    def _settle_for_writing(self) -> None:
        mover = self._mover_now()
        if mover is not None:
            mover.settle_for_writing()

    @torch.no_grad()
    def come_home(self) -> None:
        """Have masters on the device again whose offloader was dropped, with its optimizer, and had them elsewhere."""
        if self._mover is None or self._mover() is not None:
            return
        for master, param in self.pairs.items():
            local, home = local_of(master), local_of(param).device
            if local.device != home:
                if home.type == "cuda":
                    # A copy to the host may be on its way: nobody has its events any more.
                    torch.cuda.synchronize(home)
                bind_memory(master, local.detach().to(home))
        self._mover = None

    def parameters(self) -> Iterator[torch.Tensor]:
        """The masters, in the order of the parameters."""
        return iter(self.pairs)

    def attach(self, optimizer: Optimizer) -> None:
        """Run before and after every step of a plain optimizer. An offloader does it chunk by chunk, and ends this.

        Where it was given them, and is of this optimizer, nothing changes.
        Masters that a dropped offloader had in host memory come to their parameters' device.
        Several optimizers may share the masters: the step of each takes the gradients of those that it steps.

        Raises:
            ConfigError: an optimizer that steps none of the masters, or parameters that have one.
        """
        stepped = {param for group in optimizer.param_groups for param in group["params"]}
        have_masters = sum(param in stepped for master, param in self.pairs.items() if param is not master)
        if have_masters or (self.pairs and not self.stepped_by(optimizer)):
            raise ConfigError(
                "the optimizer has to step the masters",
                got=f"{have_masters} parameters that have a master, of {len(stepped)}",
                expected="optimizer(masters.parameters())",
                where="optimizer",
            )
        mover = self._mover_now()
        if mover is not None and mover.optimizer is optimizer:
            return
        self.come_home()
        self.drive(mover)
        self._handles += [
            optimizer.register_step_pre_hook(self.before_step),
            optimizer.register_step_post_hook(lambda stepped, *_: self.end(self.stepped_by(stepped))),
        ]

    def drive(self, mover: Any = None) -> None:
        """From now on the steps of somebody give masters their gradients, those of later groups of an optimizer too.

        ``mover``: the offloader that has all of them in host memory between steps; it is not kept.
        """
        self._mover = None if mover is None else weakref.ref(mover)
        for master in self.pairs:
            if isinstance(master, _Master):
                master.is_driven = True

    def stepped_by(self, optimizer: Optimizer) -> list[torch.Tensor]:
        """Masters that the optimizer lists; one that left its groups may be another's by now."""
        stepped = {param for group in optimizer.param_groups for param in group["params"]}
        return [master for master in self.pairs if master in stepped]

    def before_step(self, optimizer: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """What a step begins with, as a pre hook of the optimizer."""
        masters = self.stepped_by(optimizer)
        # The first argument is the optimizer itself.
        given = self.with_closure(optimizer, arguments[1:], options)
        if given is None:
            self.start(masters)
            return None
        # The closure makes the gradients.
        self.check(masters)
        return (arguments[0], *given[0]), given[1]

    def with_closure(self, optimizer: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Arguments of a step whose closure sees the model as the masters are by then, and gives them its gradients.

        None where there is no closure. Masters that the optimizer does not step are another's, and left alone.
        """
        closure = arguments[0] if arguments else options.get("closure")
        if closure is None:
            return None
        some, count = self.stepped_by(optimizer), 0

        def evaluate() -> Any:
            nonlocal count
            if count:
                self._round_all(some)
            count += 1
            loss = closure()
            self.start(some)
            return loss

        return ((evaluate, *arguments[1:]), options) if arguments else (arguments, {**options, "closure": evaluate})

    @torch.no_grad()
    def _round_all(self, masters: Iterable[torch.Tensor]) -> None:
        written = [master for master in masters if self.pairs[master] is not master]
        for master in written:
            param = self.pairs[master]
            param.copy_(master)
        # The closure that follows is a user's, who may write to parameters.
        self._note_now(written)

    def detach(self) -> None:
        """Run with no step any more."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for master in self.pairs:
            if isinstance(master, _Master):
                master.is_driven = False

    def check_stepped_by(self, optimizer: Optimizer) -> None:
        """Raise ConfigError when the optimizer does not step these masters, and nothing else."""
        stepped = {param for group in optimizer.param_groups for param in group["params"]}
        if stepped != set(self.pairs):
            raise ConfigError(
                "the optimizer has to step the masters, and nothing else",
                got=f"{len(stepped - set(self.pairs))} others, {len(set(self.pairs) - stepped)} masters missing",
                expected="optimizer(master_weights.parameters())",
                where="master_weights",
            )

    def start(self, masters: Iterable[torch.Tensor]) -> None:
        """``check``, then ``begin``, once for each gradient.

        A step that calls its base class's runs the hooks of both: what it did to gradients meanwhile stays.
        """
        masters = list(masters)
        self.check(masters)
        for master in masters:
            grad: Any = self.pairs[master].grad
            given, version = getattr(master, "given", None) or (None, 0)
            if given is None or grad is not given or version != given._version:
                self.begin([master])
                self._begun[master] = version_of(master)

    def check(self, masters: Iterable[torch.Tensor]) -> None:
        """Before anything of a step happens.

        Raises:
            StaleMasterError: a parameter was written in place since its last rounding, by a loaded model for instance.
                Writes through ``.data`` are not seen, but where they give a parameter another shape, or cast one that
                is its own master, as ``model.to(dtype)`` does.
        """
        for master in masters:
            param = self.pairs[master]
            if param.shape != master.shape:
                raise StaleMasterError(
                    "a parameter has another shape than its master: make masters and optimizer anew",
                    got=tuple(param.shape),
                    expected=tuple(master.shape),
                    where="params",
                )
            if master.dtype is not torch.float32:
                raise StaleMasterError(
                    "a parameter was its own master until it was cast: make masters and optimizer anew",
                    got=master.dtype,
                    expected=torch.float32,
                    where=f"parameter of shape {tuple(param.shape)}",
                )
            if param is not master and version_of(param) != self._versions[master]:
                load, refresh = ("load", "refresh") if self._mover is None else ("load_masters", "refresh_masters")
                raise StaleMasterError(
                    f"a parameter changed behind its master's back: {load}(saved ones); "
                    f"{refresh}() only where none were saved, or the write was meant",
                    got=f"version {max(version_of(param))}",
                    expected=f"version {max(self._versions[master])}",
                    where=f"parameter of shape {tuple(param.shape)}",
                )

    def begin(self, masters: Iterable[torch.Tensor]) -> None:
        """Give these masters the gradients of their parameters, in float32."""
        for master in masters:
            param = self.pairs[master]
            if param is not master:
                set_own_grad(master, None if param.grad is None else param.grad.to(torch.float32))
                master.given = (param.grad, -1 if param.grad is None else param.grad._version)  # type: ignore[attr-defined]

    @torch.no_grad()
    def end(self, masters: Iterable[torch.Tensor]) -> None:
        """Round these masters into their parameters and clear both gradients.

        A master without a gradient was not stepped, unless a hook that came before this one freed the gradient.
        """
        with self.noted_together():
            for master in masters:
                param, begun = self.pairs[master], self._begun.get(master, version_of(master))
                was_stepped = own_grad(master) is not None or begun != version_of(master)
                if param is not master and was_stepped:
                    # Before the write: an interrupt may come right behind it.
                    self._note(master)
                    param.copy_(master)
                    self.took(master)
                elif param is not master:
                    master.given = None  # type: ignore[attr-defined]

    def took(self, master: torch.Tensor) -> None:
        """A stepped master was rounded into its parameter: both gradients are done with."""
        set_own_grad(master, None)
        master.given = self.pairs[master].grad = None  # type: ignore[attr-defined]
        self._begun.pop(master, None)
        self._note(master)

    def give_back(self) -> None:
        """After a step that raised: masters that were not stepped show the gradients of their parameters again."""
        for master, param in self.pairs.items():
            if param is not master:
                set_own_grad(master, None)
                master.given = None  # type: ignore[attr-defined]

    @torch.no_grad()
    def refresh(self) -> None:
        """Make the masters follow the parameters, which lose nothing: bf16 and fp16 are float32 values."""
        self._settle_for_writing()
        with self.noted_together():
            for master, param in self.pairs.items():
                if param is not master:
                    master.copy_(param)
                    self._note(master)

    def state_dict(self) -> dict[str, list[torch.Tensor]]:
        """``{"masters": [...]}``, in the order of ``parameters()``: float32, live, in host memory where they lie there.

        So masters may stand among the states that a checkpoint is made of.
        """
        mover = self._mover_now()
        if mover is not None:
            mover.settle()
        return {_MASTERS: [master.detach() for master in self.pairs]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take what ``state_dict`` gave, as ``load`` does. Raises PlanError, where it is of other masters, too."""
        if not isinstance(state_dict, Mapping) or list(state_dict) != [_MASTERS]:
            got = list(state_dict) if isinstance(state_dict, Mapping) else type(state_dict).__name__
            raise PlanError("no state dict of masters", got=got, expected=[_MASTERS], where="state_dict")
        self.load(state_dict[_MASTERS])

    @torch.no_grad()
    def load(self, values: Iterable[torch.Tensor]) -> None:
        """Take saved masters, in the order of ``parameters()``, and round them into the parameters.

        They may be masters themselves, in another order: each is taken as it was before the load. An offloader that has
        them in host memory reads and writes none of it any more by then.

        Raises:
            PlanError: other shapes, another number, DTensors where masters are none, or the other way round, or what is
                no plain tensor of numbers; nothing has changed then.
        """
        given = _check_values(values)
        got, expected = [tuple(v.shape) for v in given], [tuple(m.shape) for m in self.pairs]
        if got != expected:
            raise PlanError("these are other masters", got=got, expected=expected, where="values")
        homes = {local_of(each).untyped_storage().data_ptr() for pair in self.pairs.items() for each in pair}
        for number, (master, value) in enumerate(zip(self.pairs, given, strict=True)):
            if mesh_of(value) != mesh_of(master):
                raise PlanError(
                    "a master that is sharded in another way",
                    got=mesh_of(value) or "no mesh",
                    expected=mesh_of(master) or "no mesh",
                    where=f"values[{number}]",
                )
            if local_of(value).untyped_storage().data_ptr() in homes:
                given[number] = value.clone()
        self._settle_for_writing()
        with self.noted_together():
            for (master, param), value in zip(self.pairs.items(), given, strict=True):
                master.copy_(value)
                self._note(master)
                if param is not master:
                    param.copy_(value)

    @contextmanager
    def noted_together(self, *, is_step: bool = False) -> Iterator[None]:
        """Around writes to parameters by their masters, between which nobody else writes: they are noted at its end.

        Parameters that lie in one tensor are looked at once then, and not all of them for each. A step that is
        interrupted cannot say what it has written: all are noted, which were looked at when it began.
        """
        if self._waiting is not None:
            yield
            return
        written = self._waiting = list[torch.Tensor]()
        try:
            yield
        except BaseException:
            if is_step:
                written[:] = self.pairs
            raise
        finally:
            self._waiting = None
            try:
                self._note_now(written)
            except BaseException:  # An interrupt here, too.
                self._note_now(written)
                raise

    def _note(self, master: torch.Tensor) -> None:
        if self._waiting is None:
            self._note_now([master])
        else:
            self._waiting.append(master)

    def _note_now(self, masters: Sequence[torch.Tensor]) -> None:
        # By the group of those in one tensor: who is noted, and what was known of them.
        groups: dict[int, tuple[list[torch.Tensor], set[torch.Tensor], set[Any]]] = {}
        for master in masters:
            kin = self._kin.get(master, [master])
            _, noted, before = groups.setdefault(id(kin) if len(kin) > 1 else id(master), (kin, set(), set()))
            noted.add(master)
            before.add(self._versions.get(master))
        found: dict[torch.Tensor, Any] = {}
        for kin, noted, before in groups.values():
            # Parameters that are views of one tensor count their writes together.
            for each in kin:
                if each in noted or self._versions[each] in before:
                    found[each] = version_of(self.pairs[each])
        # All at once: what was known of some says which others are to be noted.
        self._versions.update(found)
