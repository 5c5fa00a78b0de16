"""The text beside a failure: what was demanded, what came instead, how to see it again, and on what."""

from __future__ import annotations

from typing import Any

import pytest

from conformance.harness.compare import Mismatch
from conformance.harness.environment import environment_line
from conformance.harness.outcomes import CaseResult
from conformance.harness.suite import Suite

__all__ = ["describe"]


def describe(suite: Suite, item: pytest.Item, case: CaseResult, error: BaseException | None) -> str:
    """The block that the plugin prints below the traceback of a failed requirement test."""
    requirement = case.requirement
    lines = [f"requirement  {requirement.id}: {requirement.sentence}"]
    if case.bug is not None:
        lines.append(f"planted bug  {case.bug.id}: {case.bug.sentence}")
    mismatch = _mismatch(error)
    if mismatch is not None:
        lines += [
            f"difference   {mismatch.message}",
            f"got          {mismatch.got}",
            f"expected     {mismatch.expected}",
        ]
        lines += [f"where        {mismatch.where}"] if mismatch.where not in (None, "") else []
    elif error is not None:
        lines.append(f"error        {type(error).__name__}: {error}")
    lines += _program(error)
    lines.append(f"reproduce    {suite.command(item)}")
    facts = suite.facts
    lines.append(f"environment  {facts['name']} {facts['version']}; {environment_line(suite.environment)}")
    return "\n".join(lines)


def _mismatch(error: BaseException | None) -> Mismatch | None:
    if isinstance(error, Mismatch):
        return error
    inner: Any = getattr(error, "exceptions", ())
    return next((found for each in inner if (found := _mismatch(each)) is not None), None)


def _program(error: BaseException | None) -> list[str]:
    # Hypothesis leaves the minimal example, or the steps of a state machine, as notes on the exception.
    notes = [note for note in getattr(error, "__notes__", ()) if note.strip()]
    return ["program", *("  " + line for note in notes for line in note.splitlines())] if notes else []
