"""Faults that ``test_interruptions`` must notice."""

from __future__ import annotations

import contextlib
from typing import Any

from conformance.harness import fault, mutated, patched, swap
from twinproof.errors import DistributedError


@fault(kills="PIPE-030", at="twinproof.pipeline.driver:Pipeline._next")
def none_ends_the_loader(original: Any, schedule: Any) -> Any:
    """None is taken for the end (torchrec)."""
    batch = next(schedule._dataloader_iter)
    if batch is None:
        raise StopIteration
    schedule.pulled_count += 1
    return batch


none_is_counted = patched(
    "None of a loader counts as a batch that was pulled.",
    mutated(
        "twinproof.pipeline.driver:Pipeline._next",
        "if batch is None:",
        "if batch is None:\n        self.pulled_count += 1",
    ),
    kills="PIPE-030",
)


@fault(kills=("PIPE-033", "PIPE-126", "PIPE-148"), at="twinproof.pipeline.driver:Pipeline._taken")
def batches_lost_on_loader_error(original: Any, schedule: Any, *given: Any) -> Any:
    """What was pulled is lost with a loader's error."""
    try:
        return original(schedule, *given)
    except StopIteration:
        raise
    except BaseException:
        schedule._queue.clear()
        schedule._held.clear()
        raise


@fault(kills="PIPE-127", at="twinproof.pipeline.driver:Pipeline.enqueue_batch")
def held_batches_dropped(original: Any, schedule: Any, loader: Any) -> bool:
    """What was pulled when another rank ended is lost."""
    found: bool = original(schedule, loader)
    if schedule._dataloader_exhausted:
        schedule._held.clear()
    return found


@fault(kills="PIPE-039", at="twinproof.pipeline.driver:Pipeline._drop")
def failed_ranks_go_on(original: Any, schedule: Any, batch: Any) -> None:
    """A failed step of ranks is forgotten."""
    original(schedule, batch)
    schedule._failed = False


@fault(kills=("PIPE-035", "PIPE-037"), at="twinproof.pipeline.driver:Pipeline._drop")
def failed_step_counted(original: Any, schedule: Any, batch: Any) -> None:
    """A failed step counts for the tables."""
    original(schedule, batch)
    for call in schedule.calls:
        call.module.fused_optimizer.step_count += 1


bad_batch_raises_early = patched(
    "A later batch's bad id stops the step before.",
    swap("twinproof.pipeline.driver:Pipeline.failure_noted", contextlib.nullcontext),
    kills="PIPE-035",
    of="fastimpl",
)

held_through_a_reset = patched(
    "reset() keeps what a rank holds because another had no batch.",
    mutated("twinproof.pipeline.driver:Pipeline.reset", "self._held.clear()", "pass"),
    kills="PIPE-417",
)


@fault(kills="PIPE-461", at="twinproof.pipeline.driver:Pipeline._taken")
def held_batch_goes_with_that_of_another_rank(original: Any, schedule: Any, *given: Any) -> Any:
    """The batch that this rank holds is dropped where another rank's could not be copied."""
    try:
        return original(schedule, *given)
    except DistributedError:
        schedule._held.popleft()
        raise


interrupted_copies_again = patched(
    "A batch whose copy was interrupted is copied again.",
    mutated(
        "twinproof.pipeline.driver:Pipeline._taken",
        "made = prepare(self._held[0], begun)\n        except BaseException",
        "made = prepare(self._held[0], begun)\n        except Exception",
    ),
    kills="PIPE-459",
)
interrupted_steps_again = patched(
    "A batch whose forward was interrupted is processed again.",
    mutated("twinproof.pipeline.driver:Pipeline.progress", "except BaseException:", "except Exception:"),
    kills="PIPE-459",
)
exchanges_begun_before = patched(
    "An exchange counts as begun before anything could be interrupted in it: behind an interrupt nobody begins it.",
    mutated(
        "twinproof.pipeline.driver:Pipeline.start_exchange",
        "    with self.failure_noted(batch):\n",
        "    batch.started = True\n        with self.failure_noted(batch):\n",
    ),
    kills="PIPE-677",
    # Plain loops send a batch in its own step, which an interrupt costs.
    of="fastimpl",
)
processed_batches_stay = patched(
    "A batch that was processed is forgotten outside of what knows of interrupts, which leave it for another step.",
    mutated(
        "twinproof.pipeline.driver:Pipeline.progress",
        "        self.dequeue_batch()\n    except BaseException:\n        if self._current is batch:",
        "        self._current = None\n        self.dequeue_batch()\n    except BaseException:\n"
        "        if self._current is batch:",
    ),
    kills="PIPE-677",
)
batches_go_with_their_contexts = patched(
    "A batch whose context cannot be made is gone with it.",
    mutated("twinproof.pipeline.driver:Pipeline._taken", "begun = begin()", "begun = begin"),
    mutated("twinproof.pipeline.driver:Pipeline._copied", "_next_index, context", "_next_index, context()"),
    kills=("PIPE-700", "PIPE-701"),
)
interrupts_wait_for_a_call = patched(
    "An interrupt behind the forward waits for the next call, which nobody may make.",
    mutated(
        "twinproof.pipeline.driver:Pipeline.progress",
        "if self._deferred and not isinstance(self._deferred[0], Exception):",
        "if False:",
    ),
    kills="PIPE-702",
)
interrupts_undo_the_step = patched(
    "An interrupt of a loader that is read behind the forward comes out before the backward.",
    mutated("twinproof.pipeline.driver:Pipeline.pull_behind_forward", "except BaseException", "except Exception"),
    kills="PIPE-702",
)
interrupts_of_other_ranks_forgotten = patched(
    "What another rank's loader raised behind the forward is not told.",
    mutated(
        "twinproof.pipeline.driver:Pipeline.progress",
        "    if self._deferred:\n        raise self._deferred.pop()\n    if self._attachment",
        "    if self._attachment",
    ),
    kills="PIPE-720",
)
