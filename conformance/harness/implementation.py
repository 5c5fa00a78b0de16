"""The implementation under test, so that an absent component is a named skip and a typo in a test is still an error.

An implementation is an importable module that has some of ``kvstore``, ``pipeline``, ``offload`` and ``checkpoint`` as
submodules or attributes, each with the public names of the reference.
"""

from __future__ import annotations

import importlib
import importlib.util
import shlex
from collections.abc import Collection, Iterable
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any

import pytest

from conformance.harness.endings import where_raised

__all__ = ["ENTRY_POINT_GROUP", "Component", "capabilities", "component", "provided", "resolve_name", "unimportable"]

ENTRY_POINT_GROUP = "twinproof.implementations"


def resolve_name(name: str) -> str:
    """The module behind ``--twinproof-impl``: one of that name, else what an entry point of that name points to.

    Raises:
        pytest.UsageError: when there is neither, listing the registered names; when a package around it fails.
    """
    if _spec_exists(name):
        return name
    registered = {point.name: point.value for point in entry_points(group=ENTRY_POINT_GROUP)}
    if name in registered:
        return registered[name]
    known = ", ".join(sorted(registered)) or "none"
    raise pytest.UsageError(
        f"--twinproof-impl {shlex.quote(name)}: no module of that name; registered implementations: {known}"
    )


def _spec_exists(name: str) -> bool:
    # One that begins with a dot is a name relative to nothing.
    if name.startswith("."):
        return False
    try:
        return importlib.util.find_spec(name) is not None
    except (ModuleNotFoundError, ValueError):
        return False
    except Exception as error:
        raise unimportable(name, error) from error


def unimportable(name: str, error: Exception) -> pytest.UsageError:
    """What is said where a module of the implementation under test raises while it is imported."""
    got = f"{type(error).__name__}: {error}"
    return pytest.UsageError(
        f"{name} cannot be imported: got {got}, expected an implementation; where: {where_raised(error)}"
    )


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise unimportable(name, error) from error


def _import_component(implementation: str, stem: str) -> Any | None:
    """The component, or None where it is absent; ``pytest.UsageError`` where one of the modules raises."""
    module = _import(implementation)
    name = f"{implementation}.{stem}"
    if hasattr(module, "__path__"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            # Only the component itself may be absent; a broken import inside it is a failure, not a skip.
            if error.name != name:
                raise unimportable(name, error) from error
        except Exception as error:
            raise unimportable(name, error) from error
    return getattr(module, stem, None)


class Component:
    """A component of the implementation; touching a name that only the reference has skips the test by name.

    A name that neither of them has is an ``AttributeError``: it is the test that is wrong. ``device`` is where tests
    put what they make of it, where they do not say so themselves.
    """

    def __init__(self, implementation: str, stem: str, module: Any, device: str = "cpu") -> None:
        self._implementation, self._stem, self._module, self.device = implementation, stem, module, device

    def __getattr__(self, name: str) -> Any:
        try:
            return getattr(self._module, name)
        except AttributeError:
            if name.startswith("__") or name not in _contract(self._stem):
                raise
        reason = f"implementation {self._implementation} has no {self._stem}.{name}"
        raise pytest.skip.Exception(reason)

    def __repr__(self) -> str:
        return f"Component({self._implementation!r}, {self._stem!r})"


def _contract(stem: str) -> Iterable[str]:
    try:
        reference: ModuleType = importlib.import_module(f"refimpl.{stem}")
    except ModuleNotFoundError:
        return ()
    names: Iterable[str] = getattr(reference, "__all__", ())
    return names


def component(implementation: str, stem: str, device: str = "cpu") -> Component:
    """The component ``stem`` of the module ``implementation``; skips by name when it has none."""
    module = _import_component(implementation, stem)
    if module is None:
        raise pytest.skip.Exception(f"implementation {implementation} has no {stem}")
    return Component(implementation, stem, module, device)


def capabilities(implementation: str, stem: str) -> frozenset[str]:
    """The declared ``CAPABILITIES`` of a component, else of the implementation; what is not declared is lacked.

    Raises:
        pytest.UsageError: what is declared is no collection of words; a single one would be taken for its letters.
    """
    for holder in (_import_component(implementation, stem), _import(implementation)):
        declared = getattr(holder, "CAPABILITIES", None)
        if declared is None:
            continue
        is_set = isinstance(declared, Collection) and not isinstance(declared, str | bytes)
        if not is_set or not all(isinstance(word, str) for word in declared):
            raise pytest.UsageError(
                f"CAPABILITIES of {implementation}, {stem}: got {declared!r}, expected a set of words"
            )
        return frozenset(declared)
    return frozenset()


def provided(implementation: str, stems: Iterable[str]) -> list[str]:
    """A line for each of these components that lacks names of the contract: how many it has, and which are missing.

    A component that is absent is skipped by name, test by test.
    """
    lines = []
    for stem in stems:
        module = _import_component(implementation, stem)
        names = sorted(_contract(stem)) if module is not None else []
        missing = [name for name in names if not hasattr(module, name)]
        if missing:
            count = len(names) - len(missing)
            lines.append(f"twinproof: {stem} provides {count} of {len(names)} names; missing: {', '.join(missing)}")
    return lines
