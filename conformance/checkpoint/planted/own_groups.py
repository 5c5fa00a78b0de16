"""Planted bugs of the process groups that saves make for themselves."""

from __future__ import annotations

from typing import Any

from conformance.harness import fault, mutated, patched

_GROUPS = "twinproof.checkpoint.groups"

writers_that_go_keep_their_groups = patched(
    "The group of a writer that nobody closes stays with nobody.",
    mutated(f"{_GROUPS}:own_group", "holder is not None", "False"),
    kills="CKPT-866",
)
a_group_for_each_save = patched(
    "Each save has a group that is made for it.",
    mutated(f"{_GROUPS}:_Made.is_idle", "self.taken is None and", "False and"),
    kills="CKPT-866",
)
groups_are_ended_with_their_saves = patched(
    "What is given back is destroyed, and the next save makes another.",
    mutated(f"{_GROUPS}:_Made.give_back", "self._exchange_count or self.is_broken", "True"),
    kills="CKPT-866",
)
broken_groups_are_used_again = patched(
    "An exchange that ended early is forgotten behind one that succeeded.",
    mutated(f"{_GROUPS}:_Made.end", "self.is_broken |= is_broken", "self.is_broken = is_broken"),
    kills="CKPT-867",
)
the_first_holder_lets_go = patched(
    "A holder that goes gives back what somebody else has taken since.",
    mutated(f"{_GROUPS}:_Made.let_go", "self.taken is taken and", ""),
    kills="CKPT-867",
)
loads_are_no_exchange = patched(
    "A load that failed leaves its group to the next save.",
    mutated("twinproof.checkpoint.manager:CheckpointManager.load", "with exchanging(self._group):", "if True:"),
    kills="CKPT-868",
)
saves_of_writers_are_no_exchange = patched(
    "A save of a writer that failed leaves its group to the next save.",
    mutated("twinproof.checkpoint.dcp:HuggingFaceStorageWriter.write_data", "with exchanging(self.group):", "if True:"),
    kills="CKPT-868",
)
asynchronous_saves_are_no_exchange = patched(
    "The group of an asynchronous save is free when its manager is gone.",
    mutated("twinproof.checkpoint.manager:CheckpointManager._save", "begin_exchange(self._group)", "pass"),
    kills="CKPT-868",
)


@fault(kills="CKPT-867", at=f"{_GROUPS}:_Pool.take")
def ranks_choose_alone(original: Any, pool: Any) -> Any:
    """A rank takes the first group that it has given back itself."""
    agreed = original(pool)
    return next((made for made in pool.made if made.taken is None and not made.is_broken), agreed)


groups_are_asked_of_no_default_group = patched(
    "A group is looked for beside a default group that is gone.",
    mutated("twinproof.checkpoint.groups:_made", " and dist.is_initialized()", ""),
    kills="CKPT-898",
)
groups_are_made_without_a_meeting = patched(
    "Gloo waits for a rank that does not come, and names none.",
    mutated(f"{_GROUPS}:_connected", "_meet(_limit())", "pass"),
    kills="CKPT-961",
)
ranks_are_waited_for_as_writers_are = patched(
    "A rank that does not come is waited for as one that writes.",
    mutated(f"{_GROUPS}:_connected", "_limit()", "patience"),
    kills="CKPT-961",
)
who_gave_up_is_taken_for_one_that_connects = patched(
    "A rank that gave up is still said to come.",
    mutated(f"{_GROUPS}:_meet", "store.delete_key(names[own])", "pass"),
    kills="CKPT-961",
)
broken_connections_have_no_name = patched(
    "What gloo says of a connection that broke goes to the caller as it is.",
    mutated(f"{_GROUPS}:own_group", "except RuntimeError as error:", "except ZeroDivisionError as error:"),
    kills="CKPT-962",
)
