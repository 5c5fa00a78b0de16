"""How a forward is followed to its sharded modules, by torch.fx, while other threads run modules of their own."""

from __future__ import annotations

import inspect
import operator
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["IN_PLACE", "PROTOCOL", "Tracer", "alone", "assigned", "is_sharded"]

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
