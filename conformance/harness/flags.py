"""Flags of public calls: text is none of them, since "false" would be true."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from conformance.harness.compare import assert_equal
from conformance.harness.raising import raises
from twinproof.errors import TwinproofError

__all__ = ["assert_flags_are_no_text", "flags_of"]

_FLAGS = (bool, "bool", "bool | None", "Optional[bool]")


def flags_of(call: Callable[..., Any]) -> list[str]:
    """Names of the parameters that are annotated as ``bool``."""
    parameters = inspect.signature(call).parameters.values()
    return [parameter.name for parameter in parameters if parameter.annotation in _FLAGS]


def assert_flags_are_no_text(call: Callable[..., Any], using: Callable[..., Any] | None = None, *, where: str) -> None:
    """Demand that every flag of ``call`` is refused by its name where it is text.

    Args:
        call: whose flags they are; it has to have one.
        using: ``call`` with what else it needs, given the flag as an option; ``call`` itself where that is nothing.
        where: what is called.

    Raises:
        Mismatch: a flag that is taken, or refused without its name or what it was.
    """
    flags = flags_of(call)
    assert_equal(bool(flags), True, where=f"{where} has flags")
    for flag in flags:
        for text in ("false", "", b"0"):
            shown = repr(text) if isinstance(text, bytes) else text
            with raises(TwinproofError, mentions=(flag, f"got: {shown}"), where=f"{where}, {flag}={text!r}"):
                (using or call)(**{flag: text})
