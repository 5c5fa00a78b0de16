"""Faults that ``test_memory`` must notice."""

from __future__ import annotations

from typing import Any

from conformance.harness import fault, mutated, patched
from conformance.pipeline.planted.planting import lookups


@fault(kills="PIPE-156", at="fastimpl.pipeline.schedules:look_up_early")
def lookup_outputs_held(original: Any, p: Any, batch: Any, calls: Any) -> None:
    """Lookup outputs outlive their step."""
    original(p, batch, calls)
    p.__dict__.setdefault("_outputs", []).append(dict(batch.results))


@fault(kills="PIPE-157", at="twinproof.pipeline.driver:Pipeline._drop")
def failures_held(original: Any, schedule: Any, batch: Any) -> None:
    """What failed batches had sent is kept."""
    schedule.__dict__.setdefault("_failures", []).append([*batch.contexts.values(), *batch.inputs.values()])
    original(schedule, batch)


@fault(kills="PIPE-103", at="twinproof.pipeline.driver:Pipeline.progress")
def outputs_kept(original: Any, schedule: Any, loader: Any) -> Any:
    """Every output is kept."""
    output = original(schedule, loader)
    schedule.__dict__.setdefault("_kept", []).append(output)
    return output


@fault(kills="PIPE-131", at="twinproof.pipeline.driver:Pipeline.progress")
def last_batch_kept(original: Any, schedule: Any, loader: Any) -> Any:
    """A batch is kept for a step more."""
    schedule._last = schedule._queue[0].batch if schedule._queue else None
    return original(schedule, loader)


rows_held_by_their_reader = patched(
    "Rows that were read ahead are held by whoever read them, not by their batch alone.",
    mutated("fastimpl.pipeline.prefetch:PrefetchedRows.prefetch", "weakref.ref(found)", "lambda: found"),
    kills="PIPE-435",
)

sent_with_itself = patched(
    "What was exchanged together is remembered by each of it, so that all of it waits for a garbage collection.",
    mutated("fastimpl.pipeline.input_dist:fuse_input_dists", "weakref.ref(each)", "lambda each=each: each"),
    mutated(
        "fastimpl.pipeline.input_dist:InputDist._hear",
        "self._said, self.together = said[:end], ()",
        "self._said = said[:end]",
    ),
    kills="PIPE-437",
)


@fault(kills="PIPE-438", at=lookups("pool"))
def batch_points_to_itself(original: Any, engine: Any, tables: Any, features: Any, bags: Any) -> Any:
    """A batch that was looked up points to itself."""
    bags.whole = bags
    return original(engine, tables, features, bags)
