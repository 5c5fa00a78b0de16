"""``python -m conformance.peers NAME...``: which adapters can run here, so that ci/peers skips by name and reason.

An adapter says in ``NEEDS`` what has to be importable, and its ``probe()``, if it has one, raises when what
upstream compiles does not compile. Exit status 3 when a named one cannot run; an adapter that is
broken itself raises.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from functools import partial

__all__ = ["absent", "main"]

_SKIPPED = 3


def absent(needs: Sequence[str], probe: Callable[[], object] | None = None) -> str | None:
    """What is in the way of the first of ``needs`` that cannot be imported, or of ``probe``; None when nothing is."""
    steps: list[tuple[str, Callable[[], object]]] = [(name, partial(importlib.import_module, name)) for name in needs]
    for name, step in [*steps, *([("probe", probe)] if probe is not None else [])]:
        try:
            step()
        except Exception as error:  # A package for another machine fails in its own way.
            return f"{name}: {type(error).__name__}: {error}"
    return None


def main(names: Sequence[str]) -> int:
    """One line for each adapter that cannot run here."""
    status = 0
    for name in names:
        adapter = importlib.import_module(f"conformance.peers.{name}")
        reason = absent(getattr(adapter, "NEEDS", ()), getattr(adapter, "probe", None))
        if reason is not None:
            sys.stdout.write(f"{name} is skipped: {reason}\n")
            status = _SKIPPED
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
