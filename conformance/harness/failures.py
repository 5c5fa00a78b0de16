"""The text beside a failure: what was demanded, what came instead, how to see it again, and on what."""

from __future__ import annotations

import re
from typing import Any

import pytest

from conformance.harness.collection import WAIVED
from conformance.harness.compare import Mismatch
from conformance.harness.environment import environment_line
from conformance.harness.outcomes import CaseResult
from conformance.harness.suite import Suite

__all__ = ["describe", "failure_of", "first_difference"]

_NUMBERS = re.compile(r"0x[0-9a-f]+|\d+")
_NAMED = re.compile(r"[\w.]*(Error|Exception|Mismatch|Interrupt)\b.*:")
_WORDS_MAX = 160


def describe(suite: Suite, item: pytest.Item, case: CaseResult, error: BaseException | None) -> str:
    """The block that the plugin prints below the traceback of a failed requirement test."""
    requirement, parts = case.requirement, failure_of(suite, item, error)
    lines = [f"requirement  {requirement.id}: {requirement.sentence}"]
    if case.bug is not None:
        lines.append(f"planted bug  {case.bug.id}: {case.bug.sentence}")
    lines += [f"{title:12} {parts[name]}" for name, title in _TITLES.items() if name in parts]
    if "program" in parts:
        lines += ["program", *("  " + line for line in parts["program"].splitlines())]
    lines.append(f"reproduce    {parts['command']}")
    facts = suite.facts
    lines.append(f"environment  {facts['name']} {facts['version']}; {environment_line(suite.environment)}")
    return "\n".join(lines)


def passed_by_now(item: pytest.Item, report: pytest.TestReport) -> Mismatch | None:
    """The difference of a test that passes although an entry of a ledger says that it fails; else None."""
    deviation = item.stash.get(WAIVED, None)
    if deviation is None or not report.longreprtext.startswith("[XPASS(strict)]"):
        return None
    expected = f"{deviation.kind}: {deviation.reason} ({deviation.tracker}, since {deviation.since})"
    message = "an entry of a ledger says that this fails; it passes by now: take the entry out"
    return Mismatch(message, got="passed", expected=expected, where=deviation.place)


# What the block calls the parts of a failure, in its order.
_TITLES = {"message": "difference", "got": "got", "expected": "expected", "where": "where", "error": "error"}


def failure_of(suite: Suite, item: pytest.Item, error: BaseException | None) -> dict[str, str]:
    """The parts of a failure as the report keeps them, each a text; what does not apply is absent.

    ``message``, ``got``, ``expected`` and ``where`` are a comparison's, ``error`` is any other exception, ``program``
    the minimal example of Hypothesis, ``command`` runs the test again. ``cause`` is its first difference.
    """
    parts: dict[str, str] = {}
    mismatch = _mismatch(error)
    if mismatch is not None:
        parts = {"message": mismatch.message, "got": str(mismatch.got), "expected": str(mismatch.expected)}
        parts |= {"where": str(mismatch.where)} if mismatch.where not in (None, "") else {}
    elif error is not None:
        parts["error"] = f"{type(error).__name__}: {error}"
    program = _program(error)
    parts |= {"program": program} if program else {}
    return {**parts, "cause": first_difference(error), "command": suite.command(item)}


def first_difference(error: BaseException | None) -> str:
    """What went wrong first, in a few words without numbers: failures of one cause have the same.

    The first line of a comparison's message, or class and first line of another error; of an error that came from
    another process, the line that names it.
    """
    if error is None:
        return ""
    mismatch = _mismatch(error)
    if mismatch is not None:
        # What stands in brackets is a dtype and a shape.
        text = re.sub(r" \(.*\)", "", mismatch.message.strip().split("\n")[0])
        return _NUMBERS.sub("#", text)[:_WORDS_MAX]
    inner: Any = getattr(error, "exceptions", None)
    if inner:
        return first_difference(inner[0])
    lines = [line.strip() for line in str(error).strip().split("\n") if line.strip()]
    named = [line for line in lines if _NAMED.match(line)] if len(lines) > 1 else []
    text = named[-1] if named else f"{type(error).__name__}: {lines[0] if lines else ''}"
    return _NUMBERS.sub("#", text)[:_WORDS_MAX]


def _mismatch(error: BaseException | None) -> Mismatch | None:
    if isinstance(error, Mismatch):
        return error
    inner: Any = getattr(error, "exceptions", ())
    return next((found for each in inner if (found := _mismatch(each)) is not None), None)


def _program(error: BaseException | None) -> str:
    # Hypothesis leaves the minimal example, or the steps of a state machine, as notes on the exception. Which lines of
    # the suite only failing examples run says nothing of an implementation, and is left out.
    kept, explains = [], False
    for note in getattr(error, "__notes__", ()):
        explains = note.startswith("Explanation:") or (explains and note.startswith("    "))
        if note.strip() and not explains:
            kept.append(note)
    return "\n".join(kept)
