"""Fixtures of the checkpoint requirements."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from conformance.checkpoint import crash_programs
from conformance.provers.faults import FaultServer, why_no_shim


@pytest.fixture(scope="session")
def server(impl: ModuleType, checkpoint: Any) -> Iterator[FaultServer]:
    """A fork server that has imported the implementation; skips by name where it has none, or there is no compiler."""
    del checkpoint  # Asked for so that an implementation without one skips.
    reason = why_no_shim()
    if reason is not None:
        pytest.skip(reason)
    # An adapter of a peer holds its component as a name, not as a module of its own.
    module = f"{impl.__name__}.checkpoint" if hasattr(impl, "__path__") else impl.__name__
    modules = ("pytest", "torch.distributed.checkpoint", module, crash_programs.__name__)
    with FaultServer(impl.__name__, modules) as running:
        yield running
