"""Faults that ``test_compiled`` must notice."""

from __future__ import annotations

from typing import Any

from conformance.harness import fault


@fault(kills="PIPE-116", at="torch.compiler:is_compiling", of="fastimpl")
def lookups_are_traced(original: Any) -> bool:
    """A compiler looks into lookups, and makes a graph of each step and length."""
    return False
