"""References that keep nothing: of what is held by whoever it holds.

Prevents memory of gigabytes that lives until Python's garbage collector runs, which counts objects and not their bytes:
what a user drops is gone at once.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any, Generic, TypeVar, cast

from twinproof.errors import ConfigError

__all__ = ["Weak", "method_of", "weakly"]

T = TypeVar("T")


def _there(found: Any, where: str) -> Any:
    if found is None:
        raise ConfigError("what this belonged to has gone: nobody has it any more", got=None, where=where)
    return found


class Weak(Generic[T]):
    """An attribute that does not keep what it is set to. Reading it raises ConfigError where that has gone."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name, self._where = f"_weak_{name}", name

    def __set__(self, instance: Any, value: T) -> None:
        vars(instance)[self._name] = weakref.ref(value)

    def __get__(self, instance: Any, owner: type | None = None) -> T:
        if instance is None:
            return cast("T", self)
        return cast("T", _there(vars(instance)[self._name](), self._where))


def weakly(method: Callable[..., T]) -> Callable[..., T]:
    """The bound method, which does not keep its object. Raises ConfigError where that has gone."""
    bound = cast("MethodType", method)
    function, of = bound.__func__, weakref.ref(bound.__self__)

    def call(*given: Any, **options: Any) -> T:
        return cast("T", function(_there(of(), function.__name__), *given, **options))

    return call


def method_of(function: Callable[..., T], instance: Any) -> Callable[..., T]:
    """The function as a method of the instance, which it does not keep: what may be set on that instance itself.

    It has the name, the documentation, the signature and the ``__func__`` of a bound method.
    """
    method = MethodType(function, instance)
    call: Any = functools.wraps(function)(weakly(method))
    call.__func__, call.__signature__ = function, inspect.signature(method)
    return cast("Callable[..., T]", call)
