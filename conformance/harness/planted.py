"""Planted bugs: a suite that never saw a wrong implementation proves nothing.

A planted bug is one small fault in an otherwise right implementation, with the requirements that must catch it through
their own comparison. A crash, a ``TypeError`` or a timeout is no kill: it shows that the fault is loud, not that the
suite looks.

The bugs of a component stand in ``conformance/<stem>/planted/``, each in the file of the test that kills it: what
``test_values.py`` must notice is in ``planted/values.py``. :func:`fault` marks the function that is the fault, and
:func:`patched` makes a bug of a replacement that needs no function of its own::

    @fault(kills="KV-008", at="KVStore.set")
    def denormals_flushed(original, store, table, ids, weights, **options):
        "Small weights are flushed to zero."
        original(store, table, ids, flushed(weights), **options)

    wide_pages = patched("Pages have 512 bytes.", swap("twinproof.checkpoint.format:PAGE_BYTES", 512), kills="CKPT-013")
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from conformance.harness.compare import Mismatch
from conformance.harness.requirements import PREFIXES, STEMS, Requirement

__all__ = [
    "Fault",
    "PlantedBug",
    "activate",
    "active_bug",
    "all_planted",
    "bugs_beside",
    "bugs_in",
    "check_matrix",
    "fault",
    "find_bug",
    "is_kill",
    "patched",
    "swap",
    "untraced",
    "wrap",
]

_ID = re.compile(r"[a-z0-9]+(?:[-_][a-z0-9]+)*")
_REQUIREMENT = re.compile(rf"({'|'.join(PREFIXES)})-\d{{3}}")
_REQUIREMENTS_MAX = 3
_IMPLEMENTATIONS = ("refimpl", "fastimpl")
# The package that both are built on.
_SHARED = "twinproof"
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
        paths: the places that it changes, where they are known without planting it.
        module: the module that defines it, where it was collected from a package of planted bugs.
    """

    id: str
    sentence: str
    requirements: tuple[str, ...]
    target: str | tuple[str, ...]
    patch: Callable[[], AbstractContextManager[Any]]
    paths: tuple[str, ...] = ()
    module: str = ""

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

    @property
    def shared(self) -> bool:
        """Whether every place of it is code that several implementations share, so that each runs the same fault."""
        return len(self.targets) > 1 and {path.partition(".")[0] for path in self.paths} == {_SHARED}

    def unresolved(self) -> list[str]:
        """The places that do not exist, one sentence each."""
        found = [(path, _missing(path)) for path in self.paths]
        return [f"planted bug {self.id}: {path} names nothing ({why})" for path, why in found if why]


class _Patch(AbstractContextManager[None]):
    """Replaces attributes while entered. Calling it gives a fresh one, so that it serves as ``PlantedBug.patch``."""

    def __init__(self, paths: tuple[str, ...], make: Callable[[Any], Any]) -> None:
        for path in paths:
            if path.count(":") != 1 or not all(path.split(":")):
                raise ValueError(f"expected 'module:attribute' or 'module:Class.attribute', got {path!r}")
        self.paths, self._make = paths, make

    def __call__(self) -> _Patch:
        return _Patch(self.paths, self._make)

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for path in self.paths:
                stack.enter_context(_replaced(path, self._make))
            self._stack = stack.pop_all()

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def _owner_of(path: str) -> tuple[Any, str]:
    """The object that holds the attribute of a path, and the attribute's name."""
    module, _, attributes = path.partition(":")
    owner: Any = importlib.import_module(module)
    *parents, name = attributes.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    return owner, name


@contextmanager
def _replaced(path: str, make: Callable[[Any], Any]) -> Iterator[None]:
    owner, name = _owner_of(path)
    # The raw entry keeps staticmethod and classmethod; an inherited one is shadowed and the shadow removed again.
    raw = vars(owner).get(name, _ABSENT)
    setattr(owner, name, make(raw if raw is not _ABSENT else getattr(owner, name)))
    try:
        yield
    finally:
        if raw is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, raw)


def _missing(path: str) -> str:
    """Why a path cannot be planted at; empty when it can."""
    try:
        owner, name = _owner_of(path)
        getattr(owner, name)
    except (ImportError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def swap(path: str | tuple[str, ...], replacement: Any) -> _Patch:
    """Plant ``replacement`` at ``"package.module:attribute"`` or ``"package.module:Class.attribute"``, until exit.

    Name the place where the value is looked up: a module that did ``from .plan import build`` has its own ``build``.
    """
    return _Patch(_several(path), lambda original: replacement)


def wrap(path: str | tuple[str, ...], around: Callable[..., Any]) -> _Patch:
    """Like :func:`swap`, for a callable: calls become ``around(original, *args, **kwargs)``.

    The arguments of a method begin with ``self``.
    """

    def make(original: Any) -> Any:
        kind = type(original) if isinstance(original, staticmethod | classmethod) else None
        function = original.__func__ if kind is not None else original

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return around(function, *args, **kwargs)

        return kind(wrapper) if kind is not None else wrapper

    return _Patch(_several(path), make)


def _several(value: str | tuple[str, ...]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else value


@dataclass(frozen=True)
class Fault:
    """A planted bug as a module of planted bugs defines it; its id is the module's name for it, unless it has one."""

    sentence: str
    requirements: tuple[str, ...]
    of: tuple[str, ...]
    patch: Callable[[], AbstractContextManager[Any]]
    paths: tuple[str, ...]
    id: str | None = None

    def __post_init__(self) -> None:
        if not self.sentence.endswith(".") or "\n\n" in self.sentence:
            raise ValueError(f"a fault is described by one sentence that says what is wrong, got {self.sentence!r}")
        if not self.requirements or not all(map(_REQUIREMENT.fullmatch, self.requirements)):
            raise ValueError(f"a fault kills requirements such as KV-008, got {self.requirements!r}: {self.sentence}")

    def named(self, name: str, module: str) -> PlantedBug:
        """The bug, called ``name`` unless it has an id, and defined in ``module``."""
        return PlantedBug(self.id or name, self.sentence, self.requirements, self.of, self.patch, self.paths, module)


def fault(
    *,
    kills: str | tuple[str, ...],
    at: str | tuple[str, ...] = (),
    of: str | tuple[str, ...] = (),
    id: str | None = None,
) -> Callable[[Callable[..., Any]], Fault]:
    """Make a planted bug of a function: its name is the bug's id, and its docstring is the sentence.

    The function stands in front of what is at ``at``, and is called as ``around(original, *args, **kwargs)``. Without
    ``at`` it is a generator that plants the fault by itself, yields once, and takes the fault away.

    Args:
        kills: the requirements that must notice it, one to three.
        at: where it is planted: ``"package.module:Class.attribute"``, or ``"KVStore.set"``, a public name of the
            component in each implementation; several places are a tuple.
        of: the implementations that have the fault; unless given, the one that all places lie in, or both.
        id: the bug's id, where it is not the function's name.

    Raises:
        ValueError: no docstring, a malformed requirement or place, or no place in a function that is no generator.
    """
    requirements = _several(kills)

    def decorate(function: Callable[..., Any]) -> Fault:
        sentence = inspect.cleandoc(function.__doc__ or "")
        if not sentence:
            raise ValueError(f"{function.__name__}: the docstring must say what is wrong")
        if not at:
            if not inspect.isgeneratorfunction(function):
                raise ValueError(f"{function.__name__}: a fault without a place must be a generator that plants it")
            return Fault(sentence, requirements, _several(of) or _IMPLEMENTATIONS, contextmanager(function), (), id)
        places = tuple(full for path in _several(at) for full in _expanded(path, requirements, _several(of)))
        return Fault(sentence, requirements, _several(of) or _common(places), wrap(places, function), places, id)

    return decorate


def patched(
    sentence: str,
    *patches: Callable[[], AbstractContextManager[Any]],
    kills: str | tuple[str, ...],
    of: str | tuple[str, ...] = (),
    id: str | None = None,
) -> Fault:
    """A planted bug made of patches such as ``swap(path, value)``; its id is the name that it is bound to.

    Args:
        sentence: what is wrong.
        patches: planted together, in this order: :func:`swap`, :func:`wrap`, ``mutated`` or a function that makes one.
        kills: the requirements that must notice it, one to three.
        of: the implementations that have the fault; unless given, the one that all places lie in, or both.
        id: the bug's id, where it is not the name.

    Raises:
        ValueError: no patch, no sentence, or a malformed requirement.
    """
    if not patches:
        raise ValueError(f"a fault needs a patch that plants it: {sentence}")

    @contextmanager
    def plant() -> Iterator[None]:
        with ExitStack() as stack:
            for patch in patches:
                stack.enter_context(patch())
            yield

    known: list[tuple[str, ...]] = [getattr(patch, "paths", ()) for patch in patches]
    paths = tuple(path for some in known for path in some)
    common = _common(paths) if all(known) else _IMPLEMENTATIONS
    return Fault(sentence, _several(kills), _several(of) or common, plant, paths, id)


def _expanded(path: str, requirements: tuple[str, ...], of: tuple[str, ...]) -> tuple[str, ...]:
    """A path as it is, or a component's public name in each implementation."""
    if ":" in path:
        return (path,)
    stem = PREFIXES.get(requirements[0].partition("-")[0], "")
    return tuple(f"{name}.{stem}:{path}" for name in of or _IMPLEMENTATIONS)


def _common(paths: tuple[str, ...]) -> tuple[str, ...]:
    """The implementation that all paths lie in; both when they lie in shared code or in several."""
    (root, *others) = {path.partition(".")[0] for path in paths}
    return (root,) if not others and root in _IMPLEMENTATIONS else _IMPLEMENTATIONS


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
    """The ``planted`` module beside a test module, by name, and its bugs; an absent one lists nothing."""
    package = module.rpartition(".")[0]
    name = f"{package}.planted"
    if not package or not _exists(name):
        return name, ()
    return name, bugs_in(importlib.import_module(name))


def bugs_in(module: ModuleType) -> tuple[PlantedBug, ...]:
    """The bugs of a module and of the modules in its folder, in the order of files and lines; kept as ``PLANTED``.

    A module that defines ``PLANTED`` by itself has exactly those.
    """
    if "PLANTED" not in vars(module):
        found = [value.named(name, module.__name__) for name, value in vars(module).items() if isinstance(value, Fault)]
        for info in pkgutil.iter_modules(getattr(module, "__path__", ()), f"{module.__name__}."):
            found += bugs_in(importlib.import_module(info.name))
        vars(module)["PLANTED"] = tuple(found)
    bugs: tuple[PlantedBug, ...] = vars(module)["PLANTED"]
    return bugs


def find_bug(module: str, identifier: str) -> PlantedBug:
    """The bug of that id in the planted module ``module``."""
    return next(bug for bug in bugs_in(importlib.import_module(module)) if bug.id == identifier)


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
    tests = {found.id: found.module.rpartition(".")[2] for found in requirements}
    faults: list[str] = []
    named: dict[str, list[str]] = {}
    seen: set[str] = set()
    for bug in bugs:
        if bug.id in seen:
            faults.append(f"planted bug {bug.id} is listed twice")
        seen.add(bug.id)
        for identifier in bug.requirements:
            named.setdefault(identifier, []).append(bug.id)
            if identifier not in tests:
                faults.append(f"planted bug {bug.id} names {identifier}, which no test proves")
        faults += [
            f"planted bug {bug.id} targets {target}, which cannot be imported"
            for target in bug.targets
            if not _exists(target)
        ]
        faults += bug.unresolved()
        folder, _, file = bug.module.rpartition(".")
        if folder.endswith(".planted") and f"test_{file}" not in {tests.get(name) for name in bug.requirements}:
            faults.append(f"planted bug {bug.id} lies in {bug.module}, and no requirement in test_{file} kills it")
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
