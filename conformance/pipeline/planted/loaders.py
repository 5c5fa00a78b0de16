"""Faults that ``test_loaders`` must notice."""

from __future__ import annotations

from typing import Any

from conformance.harness import fault, mutated, patched

_ENDS = "twinproof.pipeline.config:LoaderEnds"
_ENDED = "twinproof.pipeline.config:Ended"


@fault(kills=("PIPE-713", "PIPE-714"), at="twinproof.pipeline.driver:Pipeline._forget_loader")
def ended_for_good(original: Any, schedule: Any) -> StopIteration:
    """An iterator that has ended is not asked again until another one comes (torchrec)."""
    is_ended: bool = getattr(schedule, "_dataloader_exhausted", False)
    told: StopIteration = StopIteration() if is_ended else original(schedule)
    return told


ends_not_told = patched(
    "Behind the last batch an iterator that has ended is asked again before its end is told.",
    mutated(
        f"{_ENDS}._take_loader", "if self._dataloader_exhausted:", "if self._dataloader_exhausted and self._queue:"
    ),
    kills="PIPE-713",
)
ended_where_batches_are_held = patched(
    "An iterator whose last batches are held is not asked again.",
    mutated("twinproof.pipeline.driver:Pipeline.take", "raise self._forget_loader()", "raise StopIteration"),
    kills="PIPE-714",
)
counts_not_compared = patched(
    "An iterator that was begun anew is taken for the one that has ended.",
    mutated(f"{_ENDED}.is_still", "is_it and self._count_of(iterator) == self._given_count", "is_it"),
    kills="PIPE-715",
)
all_ranks_anew = patched(
    "Ranks ask again only where each of them sees another iterator.",
    mutated(
        f"{_ENDS}._take_loader",
        "self.agree(int(ended.is_still(dataloader_iter)))",
        "not self.agree(int(not ended.is_still(dataloader_iter)))",
    ),
    kills="PIPE-716",
)
ended_iterators_held = patched(
    "An iterator that has ended is held until its end is told.",
    mutated(f"{_ENDED}.__init__", "weakref.ref(iterator)", "lambda: iterator"),
    kills="PIPE-717",
)
told_iterators_held = patched(
    "An iterator whose end was told is held until another one comes.",
    mutated(f"{_ENDS}._forget_loader", "= None, False, None", '= None, False, self.__dict__.get("_ended")'),
    kills="PIPE-717",
)
none_has_ended = patched(
    "None is taken for an iterator that has ended and is gone.",
    mutated(f"{_ENDED}.is_still", "iterator is not None and ", ""),
    kills="PIPE-717",
)
held_lookups_of_fused = patched(
    "Fused keeps what it looked up in the call that ended, whatever is edited behind it.",
    mutated(
        "fastimpl.pipeline.schedules:begin_with_lookup", "        return p.take(batch)", "    return p.take(batch)"
    ),
    kills="PIPE-718",
    of="fastimpl",
)
held_lookups_of_semi_sync = patched(
    "SemiSync keeps what it looked up in the call that ended, whatever is edited behind it.",
    mutated("fastimpl.pipeline.schedules:semi_sync", "        trains = p.take(batch)", "    trains = p.take(batch)"),
    kills="PIPE-718",
    of="fastimpl",
)


refilled_batches_taken = patched(
    "A batch that the loader writes over one in flight is taken.",
    mutated(f"{_ENDS}._pulled", "if refilled or share_memory(written, given):", "if refilled:"),
    kills="PIPE-773",
)
refilled_objects_taken = patched(
    "An object that the loader fills while it is in flight is taken.",
    mutated(f"{_ENDS}._pulled", "if refilled or share", "if share"),
    kills="PIPE-773",
)
slots_in_turn_refused = patched(
    "A batch is refused for memory of the same tensor that lies apart.",
    mutated("twinproof.pipeline.tracing:share_memory", "span and span[0] < end and begin < span[1]", "span"),
    kills="PIPE-773",
)
