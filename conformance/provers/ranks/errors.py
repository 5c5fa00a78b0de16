"""What a multi-rank failure says: whose it was, who was first, and whether it was a comparison that spoke up."""

from __future__ import annotations

import pytest

from conformance.harness.compare import Mismatch
from conformance.provers.ranks.worker import Report

__all__ = ["RankDied", "RankError", "RankTimeout", "error_of", "prefixed"]


class RankError(RuntimeError):
    """Ranks raised: ``errors`` maps each failed rank to its exception, and ``__cause__`` is the first one's."""

    def __init__(self, message: str, errors: dict[int, BaseException] | None = None) -> None:
        super().__init__(message)
        self.errors = errors or {}


class RankDied(RankError):
    """A worker process ended without an answer: ``rank`` and its ``exit_code`` (minus the signal number, if killed)."""

    def __init__(
        self, message: str, *, rank: int, exit_code: int | None, errors: dict[int, BaseException] | None = None
    ) -> None:
        super().__init__(message, errors)
        self.rank, self.exit_code = rank, exit_code


class RankTimeout(RankError):
    """Ranks did not answer in time; the message holds the stacks of each."""


def prefixed(rank: int, text: str) -> str:
    """Every line of ``text`` with the rank in front."""
    return "".join(f"[rank {rank}] {line}\n" for line in text.splitlines())


def error_of(reports: dict[int, Report]) -> BaseException | None:
    """One exception for all failures: a mismatch or a skip when that came first, so that it keeps its meaning."""
    failures = {rank: report.failure for rank, report in sorted(reports.items()) if report.failure is not None}
    if not failures:
        return None
    errors = {rank: failure.error() for rank, failure in failures.items()}
    first = min(failures, key=lambda rank: reports[rank].finished_at)
    cause = errors[first]
    lines = {rank: f"[rank {rank}] {type(error).__name__}: {error}" for rank, error in errors.items()}
    if isinstance(cause, pytest.skip.Exception):
        return pytest.skip.Exception(str(cause))
    if isinstance(cause, Mismatch):
        message = "\n".join([f"[rank {first}] {cause.message}", *(lines[rank] for rank in lines if rank != first)])
        result: BaseException = Mismatch(message, got=cause.got, expected=cause.expected, where=cause.where)
    else:
        text = "\n".join([*lines.values(), f"first was rank {first}:", failures[first].traceback_text])
        result = RankError(text, errors)
    result.__cause__ = cause
    return result
