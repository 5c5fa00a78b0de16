"""Faults of stages on streams: missing edges, lookups that are stale, memory that is not kept."""

from __future__ import annotations

import contextlib
from typing import Any

from conformance.harness import swap, wrap
from conformance.pipeline.planted.planting import fast

_STAGES = "fastimpl.pipeline.stages:StreamedStages"
_SCHEDULES = "fastimpl.pipeline.schedules"


def _first_and_last(original: Any, call: Any, optimizer: Any) -> bool:
    return False


class _Deaf:
    """An engine that skips the waits for one kind of event."""

    def __init__(self, engine: Any, missed: Any) -> None:
        self._engine, self._missed = engine, missed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def wait(self, stream: Any, event: Any) -> None:
        """All others."""
        if not any(event is missed for missed in self._missed()):
            self._engine.wait(stream, event)


def _missing(kind: str) -> Any:
    """A fault: nobody waits for this kind of a batch's events."""

    def around(original: Any, stages: Any, batch: Any) -> Any:
        made = original(stages, batch)
        if not isinstance(stages._engine, _Deaf):
            stages._missed = []
            stages._engine = _Deaf(stages._engine, lambda: stages._missed)
        stages._missed.append(getattr(made, kind))
        return made

    return around


def _not_kept(original: Any, stages: Any, value: Any, stream: Any) -> None:
    """Memory is not recorded."""


def _not_awaited(original: Any, stages: Any, stream: Any, calls: Any) -> None:
    """Edits are not looked for."""


def _not_forgotten(original: Any, p: Any, batch: Any) -> None:
    """Lookups stay."""


def _on_current(original: Any, stages: Any) -> Any:
    return stages._engine.current()


@contextlib.contextmanager
def _at_once(schedule: Any, batch: Any) -> Any:
    yield


@contextlib.contextmanager
def _stale() -> Any:
    """Hoisted before the optimizer, and kept though the optimizer wrote what was read."""
    with (
        wrap("twinproof.pipeline.rewrite:Call.is_late", _first_and_last),
        wrap(f"{_SCHEDULES}:forget_outdated", _not_forgotten),
    ):
        yield


def _recalled_loudly(original: Any, schedule: Any, batch: Any) -> None:
    for given in batch.dists.values():
        given.wait().wait()
    batch.forget()


@contextlib.contextmanager
def _not_undone(batch: Any) -> Any:
    yield


PLANTED = (
    fast(
        "recall_raises",
        "A batch in flight whose exchange failed makes detach() fail.",
        ("PIPE-133",),
        wrap("twinproof.pipeline.driver:Pipeline._recall", _recalled_loudly),
    ),
    fast(
        "lookup_outlives_loader_error",
        "Rows looked up in a call that a loader ended are kept for the next.",
        ("PIPE-132",),
        swap(f"{_SCHEDULES}:undone_on_error", _not_undone),
    ),
    fast(
        "stale_feature_processors",
        "Lookups of what the optimizer updates are hoisted.",
        ("PIPE-129",),
        _stale,
    ),
    fast(
        "dense_tables_not_behind_optimizer",
        "Data-parallel lookups do not wait for the optimizer.",
        ("PIPE-093",),
        wrap("twinproof.pipeline.rewrite:Call.is_late", _first_and_last),
    ),
    fast(
        "forward_before_lookup",
        "Forward does not wait for the lookup (torchrec, with a stream of its own).",
        ("PIPE-093", "PIPE-198"),
        wrap(f"{_STAGES}.copy", _missing("looked_up")),
    ),
    fast(
        "lookup_before_ids",
        "The lookup does not wait for ids (torchrec 4497).",
        ("PIPE-198",),
        wrap(f"{_STAGES}.copy", _missing("sent")),
    ),
    fast(
        "exchange_before_copy",
        "The exchange does not wait for the copy.",
        ("PIPE-094",),
        wrap(f"{_STAGES}.copy", _missing("moved")),
    ),
    fast(
        "memory_not_recorded",
        "Memory that crosses streams is not recorded (torchrec 4497).",
        ("PIPE-095",),
        wrap(f"{_STAGES}._hand_over", _not_kept),
    ),
    fast(
        "edits_not_ordered",
        "Edits on the caller's stream are not waited for.",
        ("PIPE-128",),
        wrap(f"{_STAGES}._wait_for_edits", _not_awaited),
    ),
    fast(
        "hoisted_lookup_kept",
        "A hoisted lookup outlives edits and modes.",
        ("PIPE-099",),
        wrap(f"{_SCHEDULES}:forget_outdated", _not_forgotten),
    ),
    fast(
        "lookup_on_current_stream",
        "The lookup does not leave the current stream.",
        ("PIPE-109",),
        wrap(f"{_STAGES}._lookup_stream", _on_current),
    ),
    fast(
        "bad_batch_raises_early",
        "A later batch's bad id stops the step before.",
        ("PIPE-035",),
        swap("twinproof.pipeline.driver:Pipeline.failure_noted", _at_once),
    ),
)
