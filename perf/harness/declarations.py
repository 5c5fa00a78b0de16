"""Declarations: the gates and workloads that ``perf/<stem>/gates.py`` and ``perf/<stem>/workloads.py`` list.

They are Python, so that mypy checks their types and the arguments that a kind needs. Reading them is as strict: what
is wrong with one is an error that names the file and the line.
"""

from __future__ import annotations

import importlib
import importlib.util
import traceback
from typing import Any, TypeVar

from twinproof.errors import FormatError, TwinproofError

__all__ = ["COMPONENTS", "modules", "read_declarations"]

COMPONENTS = ("checkpoint", "kvstore", "offload", "pipeline")
_Declared = TypeVar("_Declared")


def modules(what: str) -> tuple[str, ...]:
    """The modules of all components that declare ``gates`` or ``workloads``."""
    return tuple(f"perf.{component}.{what}" for component in COMPONENTS)


def read_declarations(module: str, name: str, kind: type[_Declared]) -> tuple[_Declared, ...]:
    """The tuple ``name`` of a module: one or more of ``kind``, nothing else.

    Raises:
        FormatError: no such module or tuple, or a declaration that Python refuses.
        TwinproofError: what the declaration itself refuses, with its place.
    """
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise FormatError("no such module", got=module, expected=f"a module with {name}", where="declarations")
    try:
        content: Any = importlib.import_module(module)
    except Exception as error:
        place = _place(error, spec.origin)
        if place is None:
            raise
        if isinstance(error, TwinproofError):
            where = f"{place} ({error.where})"
            raise type(error)(error.message, got=error.got, expected=error.expected, where=where) from error
        raise FormatError("not a declaration", got=error, expected=f"{name} of {kind}", where=place) from error
    found = getattr(content, name, None)
    if not isinstance(found, tuple) or not found or not all(isinstance(item, kind) for item in found):
        raise FormatError("not a tuple of declarations", got=found, expected=f"{name} of {kind}", where=spec.origin)
    return found


def _place(error: Exception, file: str) -> str | None:
    """The line of ``file`` at which it failed, or None where the fault lies elsewhere."""
    if isinstance(error, SyntaxError) and error.filename == file:
        return f"{file}:{error.lineno}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f"{file}:{lines[-1]}" if lines else None
