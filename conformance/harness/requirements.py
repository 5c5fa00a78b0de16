"""Requirements, written once: an untested duty and a test without a duty are the same bug.

``@requirement("CKPT-012", "MUST ...")`` on a test function is the only place where id and sentence stand; the matrix,
the report and the documentation are generated from it.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any, TypeVar

__all__ = [
    "PREFIXES",
    "STEMS",
    "Requirement",
    "RequirementError",
    "check_unique",
    "collect_requirements",
    "requirement",
    "requirement_of",
    "requirements_in",
]

PREFIXES = {"KV": "kvstore", "PIPE": "pipeline", "OPT": "offload", "CKPT": "checkpoint"}
STEMS = tuple(PREFIXES.values())

_ID = re.compile(r"(?P<prefix>[A-Z]+)-\d{3}")
_MUST = re.compile(r"\bMUST\b")
_ATTRIBUTE = "__requirement__"
_NOT_REQUIREMENTS = ("harness", "meta", "peers")

TestFunction = TypeVar("TestFunction", bound=Callable[..., Any])


class RequirementError(ValueError):
    """A requirement that is written wrongly; found when its module is imported or collected, never later."""


@dataclass(frozen=True)
class Requirement:
    """One duty: ``id`` such as ``CKPT-012``, its sentence, and the test that proves it."""

    id: str
    sentence: str
    needs: tuple[str, ...]
    module: str
    function: str

    @property
    def stem(self) -> str:
        """The component that the id's prefix names."""
        return PREFIXES[self.id.rpartition("-")[0]]


def _check(identifier: str, sentence: str) -> None:
    match = _ID.fullmatch(identifier)
    if match is None or match["prefix"] not in PREFIXES:
        expected = ", ".join(f"{prefix}-nnn" for prefix in PREFIXES)
        raise RequirementError(f"requirement id {identifier!r}: expected one of {expected}, with three digits")
    if not _MUST.search(sentence):
        raise RequirementError(f"{identifier}: the sentence must say MUST; got {sentence!r}")


def requirement(identifier: str, sentence: str, *, needs: Iterable[str] = ()) -> Callable[[TestFunction], TestFunction]:
    """Mark a test function as the proof of one requirement.

    Args:
        identifier: ``KV-``, ``PIPE-``, ``OPT-`` or ``CKPT-`` and three digits; never reused.
        sentence: normative, with MUST in it.
        needs: capabilities without which the test is skipped by name (see ``CAPABILITIES`` of an implementation).

    Raises:
        RequirementError: malformed id or sentence, a target that is no function, or a function with two requirements.
    """
    _check(identifier, sentence)
    if isinstance(needs, str):
        raise RequirementError(f"{identifier}: needs must be a collection of names, got the string {needs!r}")
    needed = tuple(needs)

    def decorate(function: TestFunction) -> TestFunction:
        if not isinstance(function, FunctionType):
            raise RequirementError(f"{identifier}: only test functions carry requirements, got {function!r}")
        if requirement_of(function) is not None:
            raise RequirementError(f"{identifier}: {function.__qualname__} already proves {requirement_of(function)}")
        # Of a property Hypothesis' wrapper is called after itself; what runs by name is the test within.
        named = getattr(getattr(function, "hypothesis", None), "inner_test", function)
        value = Requirement(identifier, sentence, needed, function.__module__, named.__qualname__)
        setattr(function, _ATTRIBUTE, value)
        return function

    return decorate


def requirement_of(function: Any) -> Requirement | None:
    """The requirement that a test function proves, also when ``@given`` was applied over it; None without one."""
    found = getattr(function, _ATTRIBUTE, None)
    if found is None:
        # Hypothesis replaces the function and keeps ours one level down.
        found = getattr(getattr(getattr(function, "hypothesis", None), "inner_test", None), _ATTRIBUTE, None)
    return found if isinstance(found, Requirement) else None


def requirements_in(module: ModuleType) -> list[Requirement]:
    """The requirements of the functions that ``module`` itself defines."""
    found = [requirement_of(value) for value in vars(module).values() if callable(value)]
    return [value for value in found if value is not None and value.module == module.__name__]


def check_unique(requirements: Iterable[Requirement]) -> None:
    """Demand one test function per id, and that a component's folder holds only ids of that component.

    Raises:
        RequirementError: naming both functions, or the folder.
    """
    owners: dict[str, Requirement] = {}
    for found in requirements:
        owner = owners.setdefault(found.id, found)
        if (owner.module, owner.function) != (found.module, found.function):
            places = " and ".join(f"{value.module}::{value.function}" for value in (owner, found))
            raise RequirementError(f"{found.id} is proven twice: {places}")
        parts = found.module.split(".")
        if parts[0] == "conformance" and len(parts) > 2 and parts[1] in STEMS and parts[1] != found.stem:
            raise RequirementError(f"{found.id} stands in {found.module}, but its prefix belongs to {found.stem}")


def collect_requirements(package: str = "conformance") -> tuple[Requirement, ...]:
    """Import every test module below ``package`` (not its harness, meta tests or peers); requirements sorted by id."""
    root = importlib.import_module(package)
    found: list[Requirement] = []
    for name in _test_modules(root):
        found += requirements_in(importlib.import_module(name))
    check_unique(found)
    return tuple(sorted(found, key=lambda value: value.id))


def _test_modules(package: ModuleType) -> list[str]:
    names = []
    for info in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        last = info.name.rpartition(".")[2]
        if info.ispkg and last not in _NOT_REQUIREMENTS:
            names += _test_modules(importlib.import_module(info.name))
        elif last.startswith("test_"):
            names.append(info.name)
    return names
