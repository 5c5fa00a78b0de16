"""Where faults of the store are planted: in every engine of rows, in every store, or in code that both share."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

from conformance.harness import PlantedBug, wrap

BOTH = ("refimpl", "fastimpl")
# Where the rows of a load come from: a streamed one, and the reference's.
CHUNKS = {"refimpl": "refimpl.kvstore:WholeTensors", "fastimpl": "fastimpl.kvstore.files:StreamedFiles"}


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


# The engines of rows, as the stores are bound to them.
ENGINES = {"refimpl": "twinproof.kvstore.store:LockedRows", "fastimpl": "fastimpl.kvstore.store:NativeRows"}


def in_engines(method: str, around: Callable[..., Any]) -> Callable[[], AbstractContextManager[Any]]:
    """``wrap`` at one method of every engine. Reads are wrapped as functions that return the rows."""

    def filling(original: Any, engine: Any, table: str, ids: Any, begin: int, end: int, out: Any) -> None:
        def returning(engine: Any, table: str, ids: Any, begin: int, end: int) -> torch.Tensor:
            rows = torch.empty(ids.numel(), end - begin, dtype=torch.uint8)
            original(engine, table, ids, begin, end, rows)
            return rows

        out.copy_(around(returning, engine, table, ids, begin, end))

    @contextmanager
    def patch() -> Iterator[None]:
        with ExitStack() as stack:
            for package in _packages():
                stack.enter_context(wrap(f"{ENGINES[package]}.{method}", filling if method == "read" else around))
            yield

    return patch


def both(*patches: Callable[[], AbstractContextManager[Any]]) -> Callable[[], AbstractContextManager[Any]]:
    """Several places of one fault: in code that both implementations share, and in the reference's own."""

    @contextmanager
    def patch() -> Iterator[None]:
        with ExitStack() as stack:
            for one in patches:
                stack.enter_context(one())
            yield

    return patch


def loaded(
    of_chunks: Callable[..., Any], of_parts: Callable[..., Any] | None = None
) -> Callable[[], AbstractContextManager[Any]]:
    """``wrap`` around the chunks of a load over rows, and around the parts in which fastimpl fills an empty table."""
    patches = [wrap(f"{CHUNKS[package]}.chunks", of_chunks) for package in _packages()]
    if of_parts is not None and "fastimpl" in _packages():
        patches.append(wrap("fastimpl.kvstore.filling:WaitingRows.read", of_parts))
    return both(*patches)


def in_engine(
    id: str, sentence: str, requirements: tuple[str, ...], method: str, around: Callable[..., Any]
) -> PlantedBug:
    """A fault around one method of every engine of rows."""
    return PlantedBug(id, sentence, requirements, BOTH, in_engines(method, around))


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


def missing(engine: Any, table: str, ids: torch.Tensor) -> torch.Tensor:
    """Bool [n]: which ids have no row."""
    found: torch.Tensor = engine.find(table, ids)
    return ~found


def bytes_of(engine: Any, table: str, ids: torch.Tensor, begin: int = 0, end: int | None = None) -> torch.Tensor:
    """Bytes [begin, end) of rows, as the engine reads them."""
    last = engine.options.rows[table].row_bytes if end is None else end
    rows = torch.empty(ids.numel(), last - begin, dtype=torch.uint8)
    engine.read(table, ids, begin, last, rows)
    return rows


def keys_of(rows: torch.Tensor) -> torch.Tensor:
    """The keys in the headers of whole rows, int64 [n]."""
    return rows[:, :8].contiguous().view(torch.int64)[:, 0]
