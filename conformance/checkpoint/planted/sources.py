"""Faults that ``test_sources`` must notice."""

from __future__ import annotations

from typing import Any

from conformance.harness import fault, mutated, patched
from twinproof.errors import DistributedError

casts_begin_at_the_first_element = patched(
    "A range of cast values is counted from the byte before it.",
    mutated("fastimpl.checkpoint.source:Source.dense", "begin // width", "begin % width"),
    kills="CKPT-508",
)

first_rows_in_place = patched(
    "Rows that are filled in place are always the first ones.",
    mutated("fastimpl.checkpoint.source:LazySource.fill", "(self._first + first, last", "(self._first, last"),
    kills="CKPT-509",
)

cut_rows_left_out = patched(
    "A row that the end of a range cuts is left as it was.",
    mutated(
        "fastimpl.checkpoint.source:LazySource.fill",
        "if head_bytes + whole_bytes < end - begin:",
        "if head_bytes + whole_bytes > end - begin:",
    ),
    kills="CKPT-509",
)

error_of_a_sender_lost = patched(
    "A rank whose bytes cannot be read sends that it failed, and forgets why.",
    mutated(
        "fastimpl.checkpoint.exchange:Exchange.start",
        "current.failure = current.failure or error",
        "current.failure = current.failure or None",
    ),
    kills="CKPT-557",
)


@fault(kills="CKPT-557", at="refimpl.checkpoint:GatherAndSave.prepare")
def reference_forgets_why(original: Any, engine: Any, job: Any, *rest: Any) -> Any:
    """The same in the reference."""
    try:
        return original(engine, job, *rest)
    except LookupError:
        raise DistributedError(
            "a sending rank failed", got=None, expected="the bytes of every sender", where=f"rank {job.rank}"
        ) from None


@fault(kills="CKPT-651", at="twinproof.checkpoint.dcp:sendable")
def odd_errors_are_nameless(original: Any, error: Any) -> Any:
    """An error that cannot be sent is told without its name."""
    found = original(error)
    if found is error:
        return found
    return DistributedError("an error that cannot be sent", got=None, expected=None, where=None)


rows_taken_whole = patched(
    "A save takes all rows of a part at once.",
    mutated("fastimpl.checkpoint.writer:_source", "if reader is not None:", "if False:"),
    kills="CKPT-633",
)
