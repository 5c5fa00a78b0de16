"""Faults that ``test_own_turn`` must notice."""

from __future__ import annotations

from typing import Any

from conformance.harness import fault, mutated, patched

_AHEAD = "twinproof.pipeline.driver:LookupPipeline.look_up_ahead"

half_exchanges_kept = patched(
    "Half of an exchange that was interrupted is taken for the whole.",
    mutated("twinproof.pipeline.driver:Pipeline.failure_noted", "self._recall(batch)", "pass"),
    kills="PIPE-650",
    of="fastimpl",
)
early_lookups_raise = patched(
    "What an early lookup raises comes out at once, and the batch stays in flight.",
    mutated(_AHEAD, "batch.failure = failures[0] if batch is self._queue[0] else None", "raise failures[0]"),
    kills="PIPE-651",
)
failing_batches_skip_their_turn = patched(
    "A batch whose early lookup failed is forgotten in the step before.",
    mutated(
        _AHEAD,
        "batch.failure = failures[0] if batch is self._queue[0] else None",
        "batch.failure = failures[0]; self._queue.remove(batch) if batch is not self._queue[0] else None",
    ),
    kills="PIPE-651",
)


@fault(kills="PIPE-652", at="twinproof.pipeline.driver:Pipeline.is_late")
def asked_each_time(original: Any, schedule: Any, call: Any) -> bool:
    """What the optimizer updates is found out each time that somebody asks."""
    schedule._late = None
    found: bool = original(schedule, call)
    return found


@fault(kills="PIPE-652", at="twinproof.pipeline.driver:Pipeline.is_late")
def asked_for_good(original: Any, schedule: Any, call: Any) -> bool:
    """What the optimizer updates is found out once for all steps."""
    known: dict[str, bool] = schedule.__dict__.setdefault("_known", {})
    return known.setdefault(call.name, original(schedule, call))


groups_of_a_forward_unseen = patched(
    "A group that is added in a forward is seen by the next step alone.",
    mutated(
        "twinproof.pipeline.driver:Pipeline.is_late", 'len(group["params"]) for group in', "0 for _ in () for group in"
    ),
    kills="PIPE-652",
)
losses_not_checked = patched(
    "Losses without a gradient are left to torch's own error.",
    mutated("twinproof.pipeline.config:check_losses", "not losses.requires_grad", "False"),
    kills="PIPE-653",
)
bags_of_as_many_refused = patched(
    "A bag that is as long as its weights is refused.",
    mutated(
        "twinproof.pipeline.sharded:ShardedEmbeddingBagCollection._check_positions",
        "most > weights[name].numel()",
        "most >= weights[name].numel()",
    ),
    kills="PIPE-665",
)
half_exchanges_of_ranks_kept = patched(
    "Ranks go on behind an exchange of which they may have come to different points.",
    mutated(
        "twinproof.pipeline.driver:Pipeline.failure_noted",
        "self._failed = self._world_size > 1",
        "self._failed = False",
    ),
    kills="PIPE-643",
    of="fastimpl",
)
early_lookups_of_ranks_wait = patched(
    "What an early lookup of one rank raises waits for its turn, while the others go on.",
    mutated(_AHEAD, "if self._failed:", "if False:"),
    kills="PIPE-643",
)
interrupted_exchanges_are_empty = patched(
    "An exchange that was interrupted has an answer: none.",
    mutated(
        "twinproof.pipeline.sharding:Awaitable.wait",
        "self._failure = DistributedError(",
        "self._value, _ = None, DistributedError(",
    ),
    kills="PIPE-644",
)
failures_on_the_way_are_others = patched(
    "What a rank raises on the way to a sharded module is told as if it were the exchange's.",
    mutated(
        "twinproof.pipeline.sharded:ShardedEmbeddingBagCollection._failed_dist",
        "raise failures.pop()",
        "raise UnsupportedError('no features', got=None, expected='some', where='input') from failures.pop()",
    ),
    kills="PIPE-698",
)
failures_on_the_way_stop_at_once = patched(
    "What one rank raises on the way to a sharded module stops all of them a step early.",
    mutated(
        "twinproof.pipeline.driver:Pipeline.failure_noted",
        "if self._failed:",
        "if self._failed or self._world_size > 1:",
    ),
    kills="PIPE-698",
    of="fastimpl",
)
failures_of_foreign_ways_kept = patched(
    "What cannot be told is raised at its batch's turn, behind a step that others take part in.",
    mutated("twinproof.pipeline.driver:Pipeline._asked_for", "self._failed = True", "pass"),
    kills="PIPE-699",
    of="fastimpl",
)
