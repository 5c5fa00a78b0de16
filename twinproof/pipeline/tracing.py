"""How a forward is followed to its sharded modules, by torch.fx, while other threads run modules of their own.

And what is known of tensors and modules at a look, to tell at another one whether somebody has changed them since.
Nothing is held by it, so that what a user drops is gone at once; and what has gone is never taken for what is there
now, though that may have its address.
"""

from __future__ import annotations

import inspect
import itertools
import operator
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
    "Tracer",
    "alone",
    "assigned",
    "collections_in",
    "is_sharded",
    "read_by",
    "restore",
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

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()

    def call_module(self, m: torch.nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A node, or in another thread the call itself."""
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
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


def restore(collection: Any, parts: list[Any]) -> None:
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
                yield name, value
