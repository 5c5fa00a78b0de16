"""Which public names and arguments of upstream's classes ours have: ``ci/upstream --names``.

A name that ours have may still refuse what it is given, by a named error that says why; what is missing is said here.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from typing import Any

from conformance.peers.upstream.suites import SUITES

__all__ = ["name_lines"]


def _parameters(value: Any) -> set[str] | None:
    """Names that it takes; None where it takes any."""
    try:
        found = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in found):
        return None
    return {parameter.name for parameter in found if parameter.name != "self"}


def _missing(theirs: Any, ours: Any) -> Iterator[str]:
    """Names, and arguments as ``name(argument=)``, that ours lacks."""
    if not inspect.isclass(theirs):
        wanted, got = _parameters(theirs), _parameters(ours)
        yield from (f"({name}=)" for name in sorted((wanted or set()) - (got or wanted or set())))
        return
    for name in ["__init__", *(name for name in dir(theirs) if not name.startswith("_"))]:
        if not hasattr(ours, name):
            yield name
            continue
        wanted, got = _parameters(getattr(theirs, name)), _parameters(getattr(ours, name))
        if wanted is not None and got is not None:
            yield from (f"{name}({argument}=)" for argument in sorted(wanted - got))


def name_lines(project: str, implementation: str) -> Iterator[str]:
    """A table: the class or function, how many public names upstream has, and what ours lacks of them."""
    yield "| upstream | public names | missing here |"
    yield "| --- | --- | --- |"
    seen: set[str] = set()
    for suite in SUITES:
        if suite.project != project:
            continue
        ours = importlib.import_module(f"{implementation}.{suite.stem}")
        modules = [importlib.import_module(name) for name in suite.modules]
        for name in sorted(filter(suite.takes, ours.__all__)):
            theirs = next((vars(m)[name] for m in modules if name in vars(m)), None)
            if theirs is None or name in seen:
                continue
            seen.add(name)
            count = sum(not n.startswith("_") for n in dir(theirs)) if inspect.isclass(theirs) else 1
            lacks = ", ".join(f"`{found}`" for found in _missing(theirs, getattr(ours, name)))
            yield f"| `{theirs.__module__}.{name}` | {count} | {lacks or 'nothing'} |"
