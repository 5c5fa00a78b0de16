"""Where faults of the embeddings are planted: in one name of every implementation, or in code that both share."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from conformance.harness import PlantedBug, swap, wrap

BOTH = ("refimpl", "fastimpl")
_LOOKUPS = ("refimpl.pipeline:PlainLookup", "fastimpl.pipeline.lookups:NativeLookup")
_EXCHANGES = ("refimpl.pipeline:ToldEverything", "fastimpl.pipeline.exchange:AllToAll")

__all__ = ["BOTH", "exchanges", "exported", "fast", "lookups", "shared", "shared_swap"]


def exported(
    id: str, sentence: str, requirements: tuple[str, ...], *around: tuple[str, Callable[..., Any]]
) -> PlantedBug:
    """Faults around attributes of every implementation's ``pipeline``."""

    @contextmanager
    def patch() -> Iterator[None]:
        with ExitStack() as stack:
            for package in BOTH:
                if importlib.util.find_spec(f"{package}.pipeline") is not None:
                    for attribute, fault in around:
                        stack.enter_context(wrap(f"{package}.pipeline:{attribute}", fault))
            yield

    return PlantedBug(id, sentence, requirements, BOTH, patch)


def _engines(
    id: str,
    sentence: str,
    requirements: tuple[str, ...],
    paths: tuple[str, ...],
    method: str,
    around: Callable[..., Any],
) -> PlantedBug:
    @contextmanager
    def patch() -> Iterator[None]:
        with ExitStack() as stack:
            for path in paths:
                stack.enter_context(wrap(f"{path}.{method}", around))
            yield

    return PlantedBug(id, sentence, requirements, BOTH, patch)


def lookups(
    id: str, sentence: str, requirements: tuple[str, ...], method: str, around: Callable[..., Any]
) -> PlantedBug:
    """A fault around one method of every implementation's ``Lookup``."""
    return _engines(id, sentence, requirements, _LOOKUPS, method, around)


def exchanges(
    id: str, sentence: str, requirements: tuple[str, ...], method: str, around: Callable[..., Any]
) -> PlantedBug:
    """A fault around one method of every implementation's ``Exchange``."""
    return _engines(id, sentence, requirements, _EXCHANGES, method, around)


def shared(id: str, sentence: str, requirements: tuple[str, ...], path: str, around: Callable[..., Any]) -> PlantedBug:
    """A fault around one name of a module that both use."""
    return PlantedBug(id, sentence, requirements, BOTH, wrap(path, around))


def shared_swap(id: str, sentence: str, requirements: tuple[str, ...], path: str, replacement: Any) -> PlantedBug:
    """Another value for one name of a module that both use."""
    return PlantedBug(id, sentence, requirements, BOTH, swap(path, replacement))


def fast(
    id: str, sentence: str, requirements: tuple[str, ...], patch: Callable[[], AbstractContextManager[Any]]
) -> PlantedBug:
    """A fault that only the fast version's code has room for."""
    return PlantedBug(id, sentence, requirements, "fastimpl", patch)
