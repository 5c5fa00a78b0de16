"""A planted bug that is one changed expression of a function: what a machine that makes mutants would write there."""

from __future__ import annotations

import functools
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import CodeType, FunctionType
from typing import Any

__all__ = ["Mutated", "mutated"]


class Mutated:
    """One change of a function's source; calling it gives the context manager that plants it."""

    def __init__(self, path: str, before: str, after: str) -> None:
        if path.count(":") != 1 or not all(path.split(":")):
            raise ValueError(f"expected 'module:function' or 'module:Class.method', got {path!r}")
        if before == after:
            raise ValueError(f"{path}: a mutant changes something, got {before!r} twice")
        self.paths = (path,)
        self._before, self._after = before, after

    def __call__(self) -> AbstractContextManager[None]:
        return self._planted()

    @contextmanager
    def _planted(self) -> Iterator[None]:
        function, owner = _function_at(self.paths[0])
        kept = function.__code__
        # The code is changed, not the name: whoever imported the function has the mutant too.
        function.__code__ = self._compiled(function, owner)
        try:
            yield
        finally:
            function.__code__ = kept

    def _compiled(self, function: FunctionType, owner: Any) -> CodeType:
        source = textwrap.dedent(inspect.getsource(function))
        count = source.count(self._before)
        if count != 1:
            raise ValueError(f"{self.paths[0]}: expected {self._before!r} once in its source, found {count}")
        source = source.replace(self._before, self._after)
        # Annotations are not evaluated, as in this project's modules; in a class, super() and private names are known.
        if inspect.isclass(owner):
            source = f"class {owner.__name__}:\n{textwrap.indent(source, '    ')}"
        module = compile(f"from __future__ import annotations\n{source}", function.__code__.co_filename, "exec")
        code = _code_named(module, function.__name__)
        if code is None or code.co_freevars != function.__code__.co_freevars:
            raise ValueError(f"{self.paths[0]}: cannot be compiled by itself: it is made inside another function")
        return code


def mutated(path: str, before: str, after: str) -> Mutated:
    """Plant a function with one piece of its source changed, wherever it was imported to, until exit.

    Args:
        path: ``"package.module:function"`` or ``"package.module:Class.method"``; properties and cached ones too.
        before: a piece of its source that stands there once.
        after: what stands there instead.

    Raises:
        ValueError: a malformed path or, when planted, a source that does not have ``before`` exactly once.
    """
    return Mutated(path, before, after)


def _function_at(path: str) -> tuple[FunctionType, Any]:
    module, _, attributes = path.partition(":")
    owner: Any = importlib.import_module(module)
    *parents, name = attributes.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    found = vars(owner)[name] if name in vars(owner) else getattr(owner, name)
    if isinstance(found, staticmethod | classmethod):
        found = found.__func__
    elif isinstance(found, property):
        found = found.fget
    elif isinstance(found, functools.cached_property):
        found = found.func
    found = inspect.unwrap(found) if callable(found) else found
    if not isinstance(found, FunctionType):
        raise ValueError(f"{path}: expected a function, got {type(found).__name__}")
    return found, owner


def _code_named(code: CodeType, name: str) -> CodeType | None:
    """The code object of a function at the top of a module, or of its only class."""
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    for each in inner:
        if each.co_name == name:
            return each
    return next((found for each in inner if (found := _code_named(each, name)) is not None), None)
