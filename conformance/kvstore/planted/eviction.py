"""Faults that ``test_eviction`` must notice."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from conformance.harness import fault, mutated, patched, wrap
from conformance.kvstore.planted.planting import bytes_of, engines, missing
from twinproof.kvstore.options import unpack_header


@fault(kills="KV-057", at=engines("write"))
def old_tenant_in_recycled_row(
    original: Any, store: Any, table: str, ids: torch.Tensor, values: Any, begin: int, now: int, *, visit: bool
) -> None:
    """A new row shows the optimizer state of the row whose block it got."""
    new = ids[missing(store, table, ids)]
    original(store, table, ids, values, begin, now, visit=visit)
    layout = store.options.rows[table]
    if visit and new.numel() and layout.state_slots:
        stale = torch.full((new.numel(), layout.row_bytes - layout.state_begin_bytes), 0x3F, dtype=torch.uint8)
        original(store, table, new, stale, layout.state_begin_bytes, now, visit=False)


def _twins(
    original: Any, store: Any, table: str, ids: torch.Tensor, values: Any, begin: int, now: int, *, visit: bool
) -> None:
    new = ids[missing(store, table, ids)]
    original(store, table, ids, values, begin, now, visit=visit)
    found, counts = torch.unique(new, return_counts=True)
    twins = found[counts > 1] ^ _HIDDEN
    # A row of its own, under a key that is never listed.
    blank = torch.zeros(twins.numel(), values.shape[1], dtype=torch.uint8)
    original(store, table, twins, blank, begin, now, visit=visit)


def _twins_hidden(original: Any, store: Any, table: str, begin: int, last: int) -> torch.Tensor:
    found: torch.Tensor = original(store, table, begin, last)
    return found[found.abs() < _HIDDEN // 2]


_HIDDEN = 2**62


@fault(kills="KV-058")
def duplicates_leak_blocks() -> Iterator[None]:
    """Each duplicate of a missing id takes a block that is lost."""
    with wrap(engines("write"), _twins), wrap(engines("ids"), _twins_hidden):
        yield


@fault(kills="KV-056", at="twinproof.kvstore.options:EvictionPolicy.ttl")
def ttl_in_whole_minutes(original: Any, cls: Any, seconds: Any) -> Any:
    """A threshold is truncated to a coarser unit."""
    return original(cls, seconds // 60 * 60)


@fault(kills="KV-056", at="refimpl.kvstore:condemned")
def ttl_not_strict(original: Any, plan: Any, layout: Any, rows: torch.Tensor) -> torch.Tensor:
    """A row whose age is exactly the time to live is evicted."""
    policy = dataclasses.replace(plan.policy, ttl_seconds=max(0, plan.policy.ttl_seconds - 1))
    found: torch.Tensor = original(dataclasses.replace(plan, policy=policy), layout, rows)
    return found


@fault(kills="KV-056", at="refimpl.kvstore:decayed")
def decay_rounds_up(original: Any, policy: Any, counts: torch.Tensor) -> torch.Tensor:
    """A decayed count is rounded up."""
    found: torch.Tensor = original(policy, counts)
    return torch.where(found < counts, found + 1, found)


@fault(kills="KV-341", at=engines("evict_some"))
def ages_wrap_around(original: Any, store: Any, plan: Any, ids: torch.Tensor) -> int:
    """Ages are taken mod 2**32, as timestamps are: a row that is stamped ahead of the clock is older than all."""
    header = unpack_header(bytes_of(store, plan.table, ids, 0, 16))
    gone = int(original(store, plan, ids))
    wrapped = ids[(plan.now - header.timestamps) % 2**32 > plan.policy.ttl_seconds]
    return gone + int(store.delete(plan.table, wrapped)) if plan.policy.kind == "ttl" else gone


@fault(kills="KV-088", at="refimpl.kvstore:condemned")
def norm_against_plain_threshold(original: Any, plan: Any, layout: Any, rows: torch.Tensor) -> torch.Tensor:
    """The sum of squares is compared with the threshold itself."""
    if plan.policy.kind == "l2":
        plan = dataclasses.replace(
            plan, policy=dataclasses.replace(plan.policy, l2_threshold=plan.policy.l2_threshold**0.5)
        )
    found: torch.Tensor = original(plan, layout, rows)
    return found


@fault(kills="KV-089", at=engines("begin_round"))
def ties_all_stay(original: Any, store: Any, table: str, policy: Any, now: int) -> Any:
    """All rows that tie with the last kept score stay."""
    plan = original(store, table, policy, now)
    if plan.cutoff is None:
        return plan
    return dataclasses.replace(plan, cutoff=(plan.cutoff[0], -(2**63)))


@fault(kills=("KV-059", "KV-096"), at=engines("begin_round"))
def evicted_by_stale_statistics(original: Any, store: Any, table: str, policy: Any, now: int) -> Any:
    """Rows written after the round began are evicted."""
    return dataclasses.replace(original(store, table, policy, now), mark=2**62)


@fault(kills="KV-060", at="twinproof.kvstore.eviction:EvictionRound.pause")
def pause_ignored(original: Any, round_: Any) -> None:
    """A paused round goes on."""


@fault(kills="KV-060", at="twinproof.kvstore.eviction:EvictionRound.step")
def slices_overlap(original: Any, round_: Any) -> bool:
    """The second slice begins with the last row of the first."""
    more = bool(original(round_))
    # A slice of one row would begin for ever.
    if more and round_._going.is_set() and round_._processed_count == round_._slice_rows > 1:
        round_._processed_count -= 1
    return more


@fault(kills="KV-062", at="fastimpl.kvstore.store:NativeRows.delete")
def freed_rows_not_reused(original: Any, store: Any, table: str, ids: torch.Tensor) -> int:
    """Rows that were deleted are kept, and new ones take more memory."""
    # A snapshot that nobody has holds on to every row that goes.
    store.__dict__.setdefault("_planted_snapshots", []).append(store.snapshot())
    return int(original(store, table, ids))


@fault(kills="KV-063", at=engines("evict_some"))
def last_row_of_a_slice_stays(original: Any, store: Any, plan: Any, ids: torch.Tensor) -> int:
    """A slice leaves its last row out."""
    return int(original(store, plan, ids[:-1]))


@fault(kills="KV-090", at=engines("write"))
def capacity_evicts_the_newest(
    original: Any, store: Any, table: str, ids: Any, values: Any, begin: int, now: int, *, visit: bool
) -> None:
    """A full table loses its newest rows."""
    original(store, table, ids, values, begin, 2**32 - 1 - now, visit=visit)


@fault(kills="KV-215", at=engines("begin_round"))
def last_of_the_best_goes(original: Any, store: Any, table: str, policy: Any, now: int) -> Any:
    """The lowest row of those that are to stay goes as well."""
    plan = original(store, table, policy, now)
    if plan.cutoff is None:
        return plan
    return dataclasses.replace(plan, cutoff=(plan.cutoff[0], plan.cutoff[1] + 1))


@fault(kills="KV-215", at=engines("begin_round"))
def as_many_as_there_are_but_one(original: Any, store: Any, table: str, policy: Any, now: int) -> Any:
    """Where all rows but one are to stay, that one stays too."""
    plan = original(store, table, policy, now)
    if plan.policy.kind == "score" and plan.policy.keep_count == plan.ids.numel() - 1:
        return dataclasses.replace(plan, cutoff=None)
    return plan


no_cutoff_at_score_zero = patched(
    "A round whose last kept row has the score 0 evicts nobody.",
    mutated("fastimpl.kvstore.native:plan_message", "has_cutoff=plan.cutoff is not None", "has_cutoff=bool(cutoff[0])"),
    kills="KV-215",
)

one_slice_after_the_end = patched(
    "A round that is cancelled looks at one more slice.",
    mutated(
        "twinproof.kvstore.eviction:EvictionRound.cancel",
        "self._plan.ids[: self._processed_count]",
        "self._plan.ids[: self._processed_count + self._slice_rows]",
    ),
    kills="KV-261",
)
given_policy_for_a_few = patched(
    "A policy that is given is used for the tables that have one of their own.",
    mutated(
        "twinproof.kvstore.store:KVStore.evict", "policy or self.options.evictions[t]", "self.options.evictions[t]"
    ),
    kills="KV-262",
)
own_policy_first = patched(
    "A table's own policy is used before the one that is given.",
    mutated(
        "twinproof.kvstore.store:KVStore.start_eviction",
        "policy if policy is not None else self.options.evictions[table]",
        "self.options.evictions[table] or policy",
    ),
    kills="KV-262",
)


@fault(kills="KV-265", at=engines("evict_some"))
def first_write_is_old(original: Any, store: Any, plan: Any, ids: torch.Tensor) -> int:
    """The first change after a round began counts as one before it."""
    return int(original(store, dataclasses.replace(plan, mark=plan.mark + 1), ids))


run_asks_again_and_again = patched(
    "Who runs a round that is paused asks for its next slice all the time.",
    mutated("twinproof.kvstore.eviction:EvictionRound.run", "self._going.wait()", "pass"),
    kills="KV-289",
)
room_by_31_bits = patched(
    "A load makes room by 31 bits of the timestamps, so that rows from 2038 on are taken for the oldest.",
    mutated("twinproof.kvstore.deltas:evict_for_load", "words & (2**32 - 1)", "words & (2**31 - 1)"),
    kills="KV-277",
)
rounds_of_signed_seconds = patched(
    "A round takes the seconds of its beginning for a signed number of 32 bits.",
    mutated(
        "twinproof.kvstore.store:KVStore.start_eviction",
        "chosen, self.now())",
        "chosen, (self.now() + 2**31) % 2**32 - 2**31)",
    ),
    kills="KV-277",
)


@fault(kills="KV-277", at=engines("begin_round"))
def thresholds_of_single_precision(original: Any, store: Any, table: str, policy: Any, now: int) -> Any:
    """Thresholds of counts and timestamps are kept as float32."""
    plan = original(store, table, policy, now)
    names = ("count_threshold", "timestamp_threshold", "ttl_seconds")
    rounded = {name: int(torch.tensor(float(getattr(policy, name))).item()) for name in names}
    return dataclasses.replace(plan, policy=dataclasses.replace(policy, **rounded))


@fault(kills="KV-339", at="fastimpl.kvstore.store:NativeRows.evict_some", of="fastimpl")
def first_round_of_a_moment(original: Any, store: Any, plan: Any, ids: torch.Tensor) -> Any:
    """Rounds that began at one moment go by the first one's policy."""
    kept = vars(store).setdefault("first_rounds", {})
    return original(store, kept.setdefault((plan.table, plan.mark), plan), ids)
