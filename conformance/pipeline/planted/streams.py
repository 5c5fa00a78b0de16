"""Faults that ``test_streams`` must notice."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from conformance.harness import fault, mutated, patched, wrap
from conformance.pipeline.planted.planting import never_late


@fault(kills=("PIPE-158", "PIPE-199"), at="fastimpl.pipeline.stages:StreamedStages.__init__")
def lookup_stream_not_made(original: Any, stages: Any, device: Any, options: Any) -> None:
    """A lookup stream that was asked for is not made."""
    placed = dataclasses.replace(options.placed, stream="data_dist")
    original(stages, device, dataclasses.replace(options, placed=placed) if options.placed.stream == "new" else options)


@fault(kills="PIPE-159", at="fastimpl.pipeline.exchange:ShardedEmbeddingBagCollection.compute")
def lookup_counts_ids(original: Any, collection: Any, ctx: Any, dist_input: Any) -> Any:
    """The lookup reads on the host how many ids there are (torchrec)."""
    for bags in dist_input:
        int(bags.offsets[-1])
    return original(collection, ctx, dist_input)


dense_tables_not_behind_optimizer = patched(
    "Data-parallel lookups do not wait for the optimizer.",
    wrap("twinproof.pipeline.stages:Call.is_late", never_late),
    kills="PIPE-093",
    of="fastimpl",
)


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


forward_before_lookup = patched(
    "Forward does not wait for the lookup (torchrec, with a stream of its own).",
    wrap("fastimpl.pipeline.stages:StreamedStages.copy", _missing("looked_up")),
    kills=("PIPE-093", "PIPE-198"),
)


lookup_before_ids = patched(
    "The lookup does not wait for ids (torchrec 4497).",
    wrap("fastimpl.pipeline.stages:StreamedStages.copy", _missing("sent")),
    kills="PIPE-198",
)


exchange_before_copy = patched(
    "The exchange does not wait for the copy.",
    wrap("fastimpl.pipeline.stages:StreamedStages.copy", _missing("moved")),
    kills="PIPE-094",
)


@fault(kills="PIPE-095", at="fastimpl.pipeline.stages:StreamedStages._hand_over")
def memory_not_recorded(original: Any, stages: Any, value: Any, stream: Any) -> None:
    """Memory that crosses streams is not recorded (torchrec 4497)."""


@fault(kills="PIPE-128", at="fastimpl.pipeline.stages:StreamedStages._wait_for_edits")
def edits_not_ordered(original: Any, stages: Any, stream: Any, calls: Any) -> None:
    """Edits on the caller's stream are not waited for."""


edits_of_the_first_module_only = patched(
    "Only the first of the modules is asked whether its tables were edited.",
    mutated("fastimpl.pipeline.stages:StreamedStages._wait_for_edits", "for call in calls)", "for call in calls[:1])"),
    kills="PIPE-409",
)

edits_of_the_last_module_only = patched(
    "Only the last of the modules is asked whether its tables were edited.",
    mutated("fastimpl.pipeline.stages:StreamedStages._wait_for_edits", "for call in calls)", "for call in calls[-1:])"),
    kills="PIPE-409",
)


@fault(kills="PIPE-109", at="fastimpl.pipeline.stages:StreamedStages._lookup_stream")
def lookup_on_current_stream(original: Any, stages: Any) -> Any:
    """The lookup does not leave the current stream."""
    return stages._engine.current()


@fault(kills="PIPE-337", at="fastimpl.pipeline.stages:StreamedStages._own_stream")
def priorities_are_dropped(original: Any, stages: Any) -> Any:
    """The lookups' own stream is like any other."""
    return stages._engine.stream("emb_lookup")


@fault(kills="PIPE-337", at="twinproof.pipeline.stages:Placed.__post_init__")
def priorities_of_any_stream(original: Any, placed: Any) -> None:
    """A priority is accepted where lookups have no stream of their own, and of any type."""


@fault(kills="PIPE-338", at="fastimpl.pipeline.stages:StreamedStages._limited")
def grids_of_any_size(original: Any, stages: Any, module: Any) -> Any:
    """What was asked for is not passed on to the lookups."""
    return contextlib.nullcontext()


@fault(kills="PIPE-338", at="fastimpl.pipeline.exchange:ShardedEmbeddingBagCollection.limited_lookups")
@contextlib.contextmanager
def grids_stay_small(original: Any, collection: Any, max_blocks: int) -> Iterator[None]:
    """Lookups outside of the schedule keep its grids."""
    for engine in (collection._engine, *(lookup._engine for lookup in collection.lookups)):
        engine.max_blocks = max_blocks
    yield


first_module_is_asked = patched(
    "Only the first of the modules decides whether a lookup waits for the optimizer.",
    mutated(
        "fastimpl.pipeline.stages:StreamedStages.look_up", "any(call in late for call in wanted)", "wanted[0] in late"
    ),
    kills="PIPE-401",
)

forward_before_the_copy = patched(
    "The forward waits for lookups alone, and for its batch only where there are any.",
    mutated(
        "fastimpl.pipeline.stages:StreamedStages.forward",
        "(batch.moved, batch.looked_up)",
        "(batch.looked_up,)",
    ),
    kills="PIPE-094",
)
