"""How a forward is followed to its sharded modules, by torch.fx, while other threads run modules of their own.

And what is known of tensors and modules at a look, to tell at another one whether somebody has changed them since.
Nothing is held by it, so that what a user drops is gone at once; and what has gone is never taken for what is there
now, though that may have its address.
"""

from __future__ import annotations

import inspect
import itertools
import operator
import random
import sys
import threading
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    "collections_in",
    "drawn_apart",
    "draws",
    "is_sharded",
    "left_as_they_were",
    "read_by",
    "version_of",
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


class Tracer(torch.fx.Tracer):
    """Follows one forward, of the thread that made it.

    torch.fx replaces ``torch.nn.Module.__call__`` and ``__getattr__`` for the whole process meanwhile: modules of
    other threads are called as they are.
    """

    def __init__(self, reads: Reads | None = None) -> None:
        super().__init__()
        self._thread, self.reads = threading.get_ident(), reads

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
