"""How a forward is followed to its sharded modules, by torch.fx, while other threads run modules of their own.

And what is known of tensors and modules at a look, to tell at another one whether somebody has changed them since.
Nothing is held by it, so that what a user drops is gone at once; and what has gone is never taken for what is there
now, though that may have its address.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import operator
import random
import sys
import threading
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

__all__ = [
    "IN_PLACE",
    "PROTOCOL",
    "Known",
    "Reads",
    "Tracer",
    "alone",
    "assigned",
    "caller_regions",
    "collections_in",
    "drawn_apart",
    "draws",
    "in_regions_of",
    "is_other_part",
    "is_sharded",
    "left_as_they_were",
    "memory_of",
    "read_by",
    "regions_of",
    "share_memory",
    "tensors_of",
    "version_of",
    "versions_now",
    "written_since",
]

# torch.fx takes what it replaced for torch's own: two traces at once would leave one of them in place for good.
_ONE_TRACE = threading.RLock()
PROTOCOL = ("create_context", "input_dist", "compute", "output_dist")


def is_sharded(module: Any) -> bool:
    """Whether a module has the three-step protocol."""
    return all(hasattr(module, name) for name in PROTOCOL)


@contextmanager
def alone() -> Iterator[None]:
    """One trace at a time in this process."""
    with _ONE_TRACE:
        yield


@contextmanager
def drawn_apart(devices: list[int]) -> Iterator[None]:
    """What is drawn inside, by torch's generators, Python's or numpy's, is drawn again behind it."""
    # One that nobody has imported has drawn nothing.
    numpy: Any = sys.modules.get("numpy.random")
    before, of_numpy = random.getstate(), None if numpy is None else numpy.get_state()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(before)
        if numpy is not None:
            numpy.set_state(of_numpy)


def draws(node: torch.fx.Node) -> bool:
    """Whether a node draws from torch's generators, as torch's operators say of themselves by a tag."""
    name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    packet: Any = getattr(torch.ops.aten, str(name), None)
    # Dropout outside of training draws nothing.
    if not hasattr(packet, "overloads") or node.kwargs.get("training") is False:
        return False
    return any(torch.Tag.nondeterministic_seeded in getattr(packet, each).tags for each in packet.overloads())


_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
IN_PLACE: dict[str, Any] = {f"__i{name}__": getattr(operator, f"i{name}") for name in _OPERATORS}


def assigned(value: Any, name: str) -> None:
    """Stands in a graph where an attribute of a value was assigned."""


class _Noting:
    """A proxy whose changes in place are nodes of the graph, too: torch's own forgets that they are made in place."""

    # What a proxy is made of.
    _OWN = ("tracer", "node", "root", "attr", "_node")

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if name not in self._OWN:
            made: Any = self
            made.tracer.create_node("call_function", assigned, (made.node, name), {})

    def __getattr__(self, name: str) -> Any:
        made: Any = self
        return _Attribute(made, name)


def _noted(change: Any) -> Callable[[Any, Any], Any]:
    return lambda proxy, other: proxy.tracer.create_proxy("call_function", change, (proxy, other), {})


for _name, _by in IN_PLACE.items():
    setattr(_Noting, _name, _noted(_by))


class _Value(_Noting, torch.fx.Proxy):
    """A value of the trace."""


class _Attribute(_Noting, torch.fx.proxy.Attribute):
    """An attribute of one."""


_REGIONS = "twinproof.regions"


@contextmanager
def in_regions_of(node: torch.fx.Node) -> Iterator[None]:
    """In the regions of ``torch.autocast`` in which the forward computes a node, within those of the caller."""
    with ExitStack() as stack:
        for region in node.meta.get(_REGIONS, ()):
            stack.enter_context(copy.copy(region))
        yield


def caller_regions() -> tuple[Any, ...]:
    """In what dtype autocast computes here, by kind of device; None where it is off."""
    return tuple(
        torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None for kind in ("cpu", "cuda")
    )


def regions_of(node: torch.fx.Node) -> tuple[Any, ...]:
    """What these regions are, equal for equal ones, outer ones first."""
    return tuple(
        (each.device, each.fast_dtype, each._enabled, each._cache_enabled) for each in node.meta.get(_REGIONS, ())
    )


class Tracer(torch.fx.Tracer):
    """Follows one forward, of the thread that made it.

    torch.fx replaces ``torch.nn.Module.__call__`` and ``__getattr__`` for the whole process meanwhile: modules of
    other threads are called as they are.
    """

    def __init__(self, reads: Reads | None = None) -> None:
        super().__init__()
        self._thread, self.reads = threading.get_ident(), reads
        self._regions: list[Any] = []

    @contextmanager
    def regions_noted(self) -> Iterator[None]:
        """Note which regions of ``torch.autocast`` the forward is in, of which torch.fx knows nothing."""
        kind: Any = torch.autocast
        enter, leave = kind.__enter__, kind.__exit__

        def entered(region: Any) -> Any:
            if threading.get_ident() == self._thread:
                # As it was made: one that is in use cannot be entered again.
                self._regions.append(copy.copy(region))
            return enter(region)

        def left(region: Any, *error: Any) -> Any:
            if threading.get_ident() == self._thread:
                self._regions.pop()
            return leave(region, *error)

        kind.__enter__, kind.__exit__ = entered, left
        try:
            yield
        finally:
            kind.__enter__, kind.__exit__ = enter, leave

    def create_node(self, *args: Any, **kwargs: Any) -> torch.fx.Node:
        """A node that knows its regions."""
        node: torch.fx.Node = super().create_node(*args, **kwargs)
        node.meta[_REGIONS] = tuple(self._regions)
        return node

    def call_module(self, m: torch.nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A node, or in another thread the call itself."""
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        if self.reads is not None and is_sharded(m):
            self.reads.decide()
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        """As torch.fx has it, or in another thread the attribute itself."""
        if threading.get_ident() != self._thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def proxy(self, node: torch.fx.Node) -> torch.fx.Proxy:
        """One whose changes in place are noted."""
        return _Value(node, self)

    def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
        """Whether no sharded module is inside."""
        # Only the way to sharded modules is looked into: what lies beside it may be untraceable.
        return is_sharded(m) or not any(is_sharded(child) for child in m.modules())

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        """The batch is traced; a pipeline gives nothing else, so that every other argument is its default."""
        found: tuple[Any, list[Any]] = super().create_args_for_root(root_fn, is_module, concrete_args)
        fn, args = found
        forward = inspect.unwrap(root_fn)
        defaults = {name: each.default for name, each in inspect.signature(forward).parameters.items()}
        # Positional arguments, then those by keyword, as torch.fx gives them; the module and the batch are the first.
        for index, name in list(enumerate(forward.__code__.co_varnames[: len(args)]))[2:]:
            if defaults.get(name, inspect.Parameter.empty) is not inspect.Parameter.empty:
                args[index] = defaults[name]
        return fn, args


# A class of one's own may do more than hold what it is given.
_COLLECTIONS = frozenset({list, dict, set, deque, OrderedDict, defaultdict, Counter})


def collections_in(things: list[dict[str, Any]]) -> list[tuple[Any, list[Any]]]:
    """Collections that can be changed, however deep inside, with what they hold; of a dictionary, pairs."""
    left: list[Any] = [value for each in things for value in each.values()]
    found = dict[int, tuple[Any, list[Any]]]()
    while left:
        each = left.pop()
        if type(each) is tuple:
            left += each
        elif type(each) in _COLLECTIONS and id(each) not in found:
            found[id(each)] = each, _parts_of(each)
            left += each.values() if isinstance(each, dict) else each
    return list(found.values())


def _parts_of(collection: Any) -> list[Any]:
    return list(collection.items() if isinstance(collection, dict) else collection)


def _restore(collection: Any, parts: list[Any]) -> None:
    """Have a collection hold what it held; one that still does is left alone, for other threads may go through it."""
    now, then, is_dict = _parts_of(collection), parts, isinstance(collection, dict)
    if is_dict:
        now, then = (list(itertools.chain.from_iterable(each)) for each in (now, then))
    if len(now) == len(then) and all(map(operator.is_, now, then)):
        return
    collection.clear()
    if is_dict or isinstance(collection, set):
        # A counter would count pairs.
        collection.update(dict(parts) if is_dict else parts)
    else:
        collection.extend(parts)


@contextmanager
def left_as_they_were(modules: list[torch.nn.Module]) -> Iterator[None]:
    """Take back what a forward assigns in a trace, or writes in buffers, where nothing has been computed.

    Attributes that torch adds for constants, too: each trace would leave some. So are lists, dictionaries, sets and
    deques that attributes name, and those inside of them: a trace would leave values of its own there.
    """
    before = [(module, [dict(each) for each in _named_things(module)]) for module in modules]
    collected = collections_in([vars(module) for module in modules])
    held = [buffer for module in modules for buffer in module.buffers(recurse=False)]
    with torch.no_grad():
        written = [(buffer, _version_of(buffer), buffer.clone()) for buffer in held]
    try:
        yield
    finally:
        for module, known in before:
            for now, then in zip(_named_things(module), known, strict=True):
                for name in now.keys() - then.keys():
                    del now[name]
                now.update(then)
        for collection, parts in collected:
            _restore(collection, parts)
        for buffer, version, value in written:
            if version is None or buffer._version != version:
                # What was made in inference mode is written there alone, and other tensors are counted outside.
                with torch.inference_mode() if version is None else torch.no_grad():
                    buffer.copy_(value)


def _version_of(tensor: torch.Tensor) -> int | None:
    """What torch counts of writes; None of a tensor that was made in inference mode, where it counts none."""
    return None if tensor.is_inference() else tensor._version


def _named_things(module: torch.nn.Module) -> list[dict[str, Any]]:
    """By name: attributes, and those of torch's that are kept apart."""
    return [vars(module), *(vars(module).get(name, {}) for name in ("_parameters", "_buffers", "_modules"))]


_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype})


class Known(weakref.ref[Any]):
    """A thing that is known, and not held: equal where both are of the same one, and it is still there."""

    def __eq__(self, other: object) -> bool:
        found = self()
        return found is not None and isinstance(other, Known) and found is other()

    def __hash__(self) -> int:
        # Of the reference, which is equal to those of the same thing: told apart by ``==`` alone.
        return 0


def version_of(tensor: torch.Tensor) -> tuple[Known, Any]:
    """Which tensor it is, and how often it was written; one of inference mode, uncounted, as written at each look."""
    return Known(tensor), object() if tensor.is_inference() else tensor._version


def tensors_of(batch: Any) -> list[torch.Tensor]:
    """The tensors of a batch, of whatever classes it is made."""
    found, seen, left = list[torch.Tensor](), set[int](), [batch]
    while left:
        each = left.pop()
        if isinstance(each, torch.Tensor):
            found.append(each)
        elif id(each) not in seen and not isinstance(each, (type, torch.nn.Module)):
            seen.add(id(each))
            parts = [*getattr(each, "__dict__", {}).values()]
            parts += [getattr(each, name, None) for name in _slots_of(type(each))]
            parts += each.values() if isinstance(each, dict) else each if isinstance(each, (list, tuple)) else ()
            # Of names and lengths a batch has thousands.
            left += [part for part in parts if type(part) not in _PLAIN]
    return found


# By class, which is not held.
_SLOTS = weakref.WeakKeyDictionary[type, tuple[str, ...]]()


def _slots_of(kind: type) -> tuple[str, ...]:
    found = _SLOTS.get(kind)
    if found is None:
        found = _SLOTS[kind] = tuple(name for each in kind.__mro__ for name in vars(each).get("__slots__", ()))
    return found


def memory_of(batch: Any) -> frozenset[int]:
    """Where the tensors of a batch begin."""
    return frozenset(map(_begin_of, tensors_of(batch))) - {0}


def written_since(tensors: list[torch.Tensor], versions: list[int | None]) -> list[torch.Tensor]:
    """Those that were written since they had these versions, see ``_version_of``."""
    return [tensor for tensor, version in zip(tensors, versions, strict=True) if _version_of(tensor) != version]


def share_memory(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    """Whether any of the one lies where any of the other does: parts of one tensor that lie apart do not."""
    spans = [span for span in map(_span_of, others) if span] if some else []
    return any(span and span[0] < end and begin < span[1] for span in map(_span_of, some) for begin, end in spans)


def _span_of(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Where the elements of a plain tensor begin and end; None of others, of which some have no strides."""
    begin = _begin_of(tensor)
    if not begin or not tensor.numel():
        return None
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + extent * tensor.element_size()


def versions_now(tensors: list[torch.Tensor]) -> list[int | None]:
    """How often each was written."""
    return list(map(_version_of, tensors))


def _begin_of(tensor: torch.Tensor) -> int:
    is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_nested
    return tensor.data_ptr() if is_plain else 0


def is_other_part(ahead: Any, given: Any, memory: Callable[[], frozenset[int]]) -> bool:
    """Whether arguments are other parts of a batch than those that a trace took, or of another form.

    What neither of both took from the batch as it is was computed, perhaps drawn, and is not compared; nor is what lies
    in the same memory. ``memory``: ``memory_of`` the batch, which is asked for where memory differs.
    """
    if ahead is given:
        return False
    if _form_of(ahead) != _form_of(given):
        return True
    if isinstance(ahead, torch.Tensor):
        return _is_other_tensor(ahead, given, memory)
    if isinstance(ahead, dict):
        return ahead.keys() != given.keys() or any(is_other_part(ahead[key], given[key], memory) for key in ahead)
    if isinstance(ahead, (list, tuple)):
        pairs = zip(ahead, given, strict=False)
        return len(ahead) != len(given) or any(is_other_part(one, other, memory) for one, other in pairs)
    if _form_of(ahead):
        if hasattr(ahead, "keys") and list(ahead.keys()) != list(given.keys()):
            return True
        return any(is_other_part(getattr(ahead, name)(), getattr(given, name)(), memory) for name in _PARTS)
    return False


def _form_of(value: Any) -> Any:
    """What is compared alike; lists and dictionaries of a graph may be of other classes than the forward's."""
    kinds = (torch.Tensor, dict, (list, tuple))
    known = next((kind for kind in kinds if isinstance(value, kind)), None)
    return type(value) if known is None and hasattr(value, "weights_or_none") else known


def _is_other_tensor(ahead: torch.Tensor, given: torch.Tensor, memory: Callable[[], frozenset[int]]) -> bool:
    begins = {_begin_of(ahead), _begin_of(given)}
    if begins == {0}:
        # Neither lies in memory that is compared, and some such have no strides.
        return False
    if ahead.shape == given.shape and ahead.stride() == given.stride() and (len(begins) == 1 or not ahead.numel()):
        return False
    return not begins.isdisjoint(memory()) and not _hold_same(ahead, given)


# Of bags, this project's or another library's.
_PARTS = ("values", "weights_or_none", "lengths")


def _hold_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal, where a NaN is equal to any."""
    if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
        return False
    return bool(((one == other) | ((one != one) & (other != other))).all())


def read_by(module: torch.nn.Module) -> list[Any]:
    """What a module computes with: its parts, their tensors by version, and attributes that are plain values.

    Modes are left out, which whoever calls modules ahead follows by itself.
    """
    return [each for part in module.modules() for each in _read_by(part)]


def _read_by(part: torch.nn.Module) -> Iterator[Any]:
    yield Known(part)
    for things in (part._parameters, part._buffers, vars(part)):
        for name, value in things.items():
            if isinstance(value, torch.Tensor):
                yield name, version_of(value)
            elif type(value) in _PLAIN and name != "training":
                # 1, 1.0 and True are equal, as 0.0 and -0.0 are, and not one value; of NaN no two are equal.
                yield name, type(value), repr(value)


# What torch has in every module, but for a forward, which a module may have of its own. Modes are whoever traces's.
_TORCHS = frozenset(dir(torch.nn.Module())) - {"forward"}
_ABSENT = object()


class Reads:
    """What a trace goes by: parts of modules, and attributes of them that the forward reads before it needs them last.

    Args:
        modules: those that the trace goes through.

    Attributes:
        has_values: whether numbers, strings or flags are among them, which may change on one rank alone.

    Attributes are compared by what they are, plain values by what they say; those that the forward itself assigns are
    left out, for each trace would find another one.
    """

    def __init__(self, modules: list[torch.nn.Module]) -> None:
        self._thread, self._modules = threading.get_ident(), {id(module): module for module in modules}
        self._names, self._count = dict[tuple[int, str], None](), 0
        self._values: list[tuple[torch.nn.Module, str, Any]] = []
        self._parts = [(module, _children(module)) for module in modules]
        self.has_values = False

    def decide(self) -> None:
        """What was read so far decides what a sharded module is called with."""
        self._count = len(self._names)

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note what is read inside, by the thread that made this."""
        before = {key: dict(vars(module)) for key, module in self._modules.items()}
        # As torch's tracer, which takes the place of two other methods of this class meanwhile.
        kind: Any = torch.nn.Module
        own, beneath = vars(kind).get("__getattribute__", _ABSENT), kind.__getattribute__

        def read(module: Any, name: str) -> Any:
            if id(module) in before and name not in _TORCHS and threading.get_ident() == self._thread:
                self._names[id(module), name] = None
            return beneath(module, name)

        kind.__getattribute__ = read
        try:
            yield
        finally:
            if own is _ABSENT:
                del kind.__getattribute__
            else:
                kind.__getattribute__ = own
            for key, name in list(self._names)[: self._count]:
                module, then = self._modules[key], before[key].get(name, _ABSENT)
                if vars(module).get(name, _ABSENT) is then and not isinstance(then, torch.Tensor):
                    self._values.append((module, name, then))
            self.has_values = any(type(then) in _PLAIN for _, _, then in self._values)

    def are_same(self) -> bool:
        """Whether a trace of now would go by the same."""
        for module, name, then in self._values:
            now = vars(module).get(name, _ABSENT)
            if now is not then and (type(now) is not type(then) or type(now) not in _PLAIN or repr(now) != repr(then)):
                return False
        for module, parts in self._parts:
            now = module._modules
            if len(now) != len(parts) or any(now.get(name) is not known() for name, known in parts):
                return False
        return True


def _children(module: torch.nn.Module) -> list[tuple[str, Callable[[], Any]]]:
    """By name; each is asked for, and not held."""
    # A name without a module gives None, as its class does.
    return [(name, type(None) if each is None else Known(each)) for name, each in module._modules.items()]
