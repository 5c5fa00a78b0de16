"""Planted bugs: a suite that never saw a wrong implementation proves nothing.

A planted bug is one small fault in an otherwise right implementation, with the requirements that must catch it through
their own comparison. A crash, a ``TypeError`` or a timeout is no kill: it shows that the fault is loud, not that the
suite looks.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from conformance.harness.compare import Mismatch
from conformance.harness.requirements import STEMS, Requirement

__all__ = [
    "PlantedBug",
    "activate",
    "active_bug",
    "all_planted",
    "bugs_beside",
    "check_matrix",
    "find_bug",
    "is_kill",
    "swap",
    "untraced",
    "wrap",
]

_ID = re.compile(r"[a-z0-9]+(?:[-_][a-z0-9]+)*")
_REQUIREMENTS_MAX = 3
_ABSENT = object()


@dataclass(frozen=True)
class PlantedBug:
    """One planted fault.

    Args:
        id: sentence-like, in lower case, unique, such as ``index_published_before_data``.
        sentence: what is wrong, and where it shipped if it did.
        requirements: one to three requirement ids, each of which must kill it.
        target: the implementation module it is planted in, or several that share the code.
        patch: makes the context manager that plants it; :func:`swap` and :func:`wrap` build one.
    """

    id: str
    sentence: str
    requirements: tuple[str, ...]
    target: str | tuple[str, ...]
    patch: Callable[[], AbstractContextManager[Any]]

    def __post_init__(self) -> None:
        if not _ID.fullmatch(self.id):
            raise ValueError(f"planted bug {self.id!r}: expected lower-case words joined by - or _")
        if type(self.requirements) is not tuple or not 1 <= len(self.requirements) <= _REQUIREMENTS_MAX:
            raise ValueError(f"planted bug {self.id}: expected 1 to 3 requirements, got {self.requirements!r}")
        if not self.sentence.strip():
            raise ValueError(f"planted bug {self.id}: expected a sentence that says what is wrong")

    @property
    def targets(self) -> tuple[str, ...]:
        """The implementations that it is planted in."""
        return (self.target,) if isinstance(self.target, str) else self.target


class _Patch(AbstractContextManager[None]):
    """Replaces one attribute while entered. Calling it gives a fresh one, so that it serves as ``PlantedBug.patch``."""

    def __init__(self, path: str, make: Callable[[Any], Any]) -> None:
        if path.count(":") != 1 or not all(path.split(":")):
            raise ValueError(f"expected 'module:attribute' or 'module:Class.attribute', got {path!r}")
        self._path, self._make = path, make

    def __call__(self) -> _Patch:
        return _Patch(self._path, self._make)

    def __enter__(self) -> None:
        module, _, attributes = self._path.partition(":")
        owner: Any = importlib.import_module(module)
        *parents, name = attributes.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        # The raw entry keeps staticmethod and classmethod; an inherited one is shadowed and the shadow removed again.
        raw = vars(owner).get(name, _ABSENT)
        replacement = self._make(raw if raw is not _ABSENT else getattr(owner, name))
        self._owner, self._name, self._raw = owner, name, raw
        setattr(owner, name, replacement)

    def __exit__(self, *_: object) -> None:
        if self._raw is _ABSENT:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._raw)


def swap(path: str, replacement: Any) -> _Patch:
    """Plant ``replacement`` at ``"package.module:attribute"`` or ``"package.module:Class.attribute"``, until exit.

    Name the place where the value is looked up: a module that did ``from .plan import build`` has its own ``build``.
    """
    return _Patch(path, lambda original: replacement)


def wrap(path: str, around: Callable[..., Any]) -> _Patch:
    """Like :func:`swap`, for a callable: calls become ``around(original, *args, **kwargs)``.

    The arguments of a method begin with ``self``.
    """

    def make(original: Any) -> Any:
        kind = type(original) if isinstance(original, staticmethod | classmethod) else None
        function = original.__func__ if kind is not None else original

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return around(function, *args, **kwargs)

        return kind(wrapper) if kind is not None else wrapper

    return _Patch(path, make)


_ACTIVE: ContextVar[tuple[str, PlantedBug] | None] = ContextVar("active planted bug", default=None)


def active_bug() -> tuple[str, PlantedBug] | None:
    """The planted bug of the running test and the module that lists it, so that rank workers can plant it too."""
    return _ACTIVE.get()


@contextmanager
def activate(module: str, bug: PlantedBug) -> Iterator[None]:
    """Plant ``bug``, which ``module`` lists, for the duration of the block."""
    token = _ACTIVE.set((module, bug))
    try:
        with bug.patch():
            yield
    finally:
        _ACTIVE.reset(token)


def bugs_beside(module: str) -> tuple[str, tuple[PlantedBug, ...]]:
    """The ``planted`` module beside a test module, by name, and its ``PLANTED``; an absent one lists nothing."""
    package = module.rpartition(".")[0]
    name = f"{package}.planted"
    if not package or not _exists(name):
        return name, ()
    return name, tuple(importlib.import_module(name).PLANTED)


def find_bug(module: str, identifier: str) -> PlantedBug:
    """The bug of that id in the planted module ``module``."""
    bugs: tuple[PlantedBug, ...] = importlib.import_module(module).PLANTED
    return next(bug for bug in bugs if bug.id == identifier)


def all_planted(package: str = "conformance") -> tuple[PlantedBug, ...]:
    """The planted bugs of every component."""
    return tuple(bug for stem in STEMS for bug in bugs_beside(f"{package}.{stem}.test")[1])


def is_kill(error: BaseException) -> bool:
    """Whether ``error`` is a comparison that spoke up; a group of them is one, a flaky verdict is none."""
    from hypothesis.errors import Flaky

    if isinstance(error, Flaky):
        return False
    group = getattr(error, "exceptions", None)
    if isinstance(group, tuple) and group:
        return all(is_kill(inner) for inner in group)
    return isinstance(error, Mismatch)


def check_matrix(bugs: Iterable[PlantedBug], requirements: Iterable[Requirement]) -> list[str]:
    """Everything that breaks the rules of the kill matrix, one sentence each; empty when it is sound."""
    known = {found.id for found in requirements}
    faults: list[str] = []
    named: dict[str, list[str]] = {}
    seen: set[str] = set()
    for bug in bugs:
        if bug.id in seen:
            faults.append(f"planted bug {bug.id} is listed twice")
        seen.add(bug.id)
        for identifier in bug.requirements:
            named.setdefault(identifier, []).append(bug.id)
            if identifier not in known:
                faults.append(f"planted bug {bug.id} names {identifier}, which no test proves")
        faults += [
            f"planted bug {bug.id} targets {target}, which cannot be imported"
            for target in bug.targets
            if not _exists(target)
        ]
    for identifier, names in sorted(named.items()):
        if len(names) > _REQUIREMENTS_MAX:
            faults.append(f"{identifier} is named by {len(names)} planted bugs, at most 3 allowed: {', '.join(names)}")
    return faults


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        # find_spec imports the parents, and says so when there are none.
        return False


def untraced(requirements: Iterable[Requirement], bugs: Iterable[PlantedBug]) -> tuple[str, ...]:
    """The ids of requirements that no planted bug names."""
    named = {identifier for bug in bugs for identifier in bug.requirements}
    return tuple(sorted(found.id for found in requirements if found.id not in named))
