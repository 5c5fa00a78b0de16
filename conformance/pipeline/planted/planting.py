"""Where faults of the embeddings are planted in every engine, and what several of them use."""

from __future__ import annotations

from typing import Any


def exported(name: str) -> tuple[str, ...]:
    """The paths of a public name of ``pipeline`` in each implementation."""
    return f"refimpl.pipeline:{name}", f"fastimpl.pipeline:{name}"


def lookups(method: str) -> tuple[str, ...]:
    """The paths of one method in the ``Lookup`` of each implementation."""
    return f"refimpl.pipeline:PlainLookup.{method}", f"fastimpl.pipeline.lookups:NativeLookup.{method}"


def exchanges(method: str) -> tuple[str, ...]:
    """The paths of one method in the ``Exchange`` of each implementation."""
    return f"refimpl.pipeline:ToldEverything.{method}", f"fastimpl.pipeline.exchange:AllToAll.{method}"


def accepted(*args: Any, **options: Any) -> None:
    """In place of a check: everything passes."""


def not_forgotten(original: Any, p: Any, batch: Any) -> None:
    """Lookups that edits outdated stay."""


def never_late(original: Any, call: Any, *given: Any) -> bool:
    """No lookup waits for the optimizer."""
    return False
