"""Where faults of the store are planted: in a primitive of every implementation's store, or in code that both share."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

from conformance.harness import PlantedBug, wrap

BOTH = ("refimpl", "fastimpl")


def _packages() -> list[str]:
    return [name for name in BOTH if importlib.util.find_spec(f"{name}.kvstore") is not None]


def everywhere(attribute: str, around: Callable[..., Any]) -> Callable[[], AbstractContextManager[Any]]:
    """``wrap`` at one attribute of every implementation's ``kvstore``."""

    @contextmanager
    def patch() -> Iterator[None]:
        with ExitStack() as stack:
            for package in _packages():
                stack.enter_context(wrap(f"{package}.kvstore:{attribute}", around))
            yield

    return patch


def loaded(of_chunks: Callable[..., Any], of_parts: Callable[..., Any]) -> Callable[[], AbstractContextManager[Any]]:
    """``wrap`` around the chunks of a load over rows, and around the parts in which fastimpl fills an empty table."""

    @contextmanager
    def patch() -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(wrap("twinproof.kvstore.saved:SavedRows.chunks", of_chunks))
            if "fastimpl" in _packages():
                stack.enter_context(wrap("fastimpl.kvstore.filling:WaitingRows.read", of_parts))
            yield

    return patch


def in_store(
    id: str, sentence: str, requirements: tuple[str, ...], method: str, around: Callable[..., Any]
) -> PlantedBug:
    """A fault around one method of ``KVStore``, in every implementation."""
    return PlantedBug(id, sentence, requirements, BOTH, everywhere(f"KVStore.{method}", around))


def exported(
    id: str, sentence: str, requirements: tuple[str, ...], name: str, around: Callable[..., Any]
) -> PlantedBug:
    """A fault around one public name, in every implementation."""
    return PlantedBug(id, sentence, requirements, BOTH, everywhere(name, around))


def shared(id: str, sentence: str, requirements: tuple[str, ...], patch: Any) -> PlantedBug:
    """A fault in a module that both implementations use."""
    return PlantedBug(id, sentence, requirements, BOTH, patch)


def reference(id: str, sentence: str, requirements: tuple[str, ...], patch: Any) -> PlantedBug:
    """A fault that only the reference's code has room for."""
    return PlantedBug(id, sentence, requirements, "refimpl", patch)


def missing(store: Any, table: str, ids: torch.Tensor) -> torch.Tensor:
    """Bool [n]: which ids have no row."""
    found: torch.Tensor = store._find(table, ids)
    return ~found
