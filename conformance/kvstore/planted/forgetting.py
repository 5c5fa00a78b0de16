"""Faults that ``test_forgetting`` must notice."""

from __future__ import annotations

import dataclasses
from typing import Any

from conformance.harness import fault, mutated, patched
from conformance.kvstore.planted.planting import engines

old_marks_are_answered = patched(
    "What is asked about a mark that was forgotten is told without the ids that went before it.",
    mutated("twinproof.kvstore.rows:TrackedSource.changes", "check_remembered(since, first_mark)", "pass"),
    kills="KV-439",
)


@fault(kills="KV-439", at=engines("forget"))
def one_mark_too_many(original: Any, engine: Any, mark: int) -> None:
    """The mark that is still to be asked about is forgotten, too."""
    original(engine, min(mark + 1, engine.mark()))


@fault(kills="KV-439", at=engines("forget"))
def marks_come_back(original: Any, engine: Any, mark: int) -> None:
    """To forget an older mark afterwards makes the store say that it remembers it."""
    original(engine, mark)
    changes = type(engine).changes

    def from_the_last_on(table: str, since: int) -> Any:
        return (*changes(engine, table, since)[:2], mark)

    engine.changes = from_the_last_on


nothing_is_given_back = patched(
    "What is forgotten is refused alone; its memory stays.",
    mutated(
        "twinproof.kvstore.store:KVStore.forget_changes",
        "self._engine.forget(before)",
        "self._engine.forget(max(0, before - 100))",
    ),
    kills="KV-441",
)


@fault(kills="KV-441", at=engines("stats"))
def removals_are_not_counted(original: Any, engine: Any) -> Any:
    """The memory of removed ids is in no counter."""
    return dataclasses.replace(original(engine), changes_bytes=0)


@fault(kills="KV-442", at=engines("snapshot"))
def moments_forget_with_their_store(original: Any, engine: Any) -> Any:
    """A snapshot refuses what its store was told to forget after it was taken."""
    taken = original(engine)
    changes = taken.changes
    taken.changes = lambda table, since: (*changes(table, since)[:2], engine.changes(table, engine.mark())[2])
    return taken


saved_without_a_base = patched(
    "A delta of a moment whose base is forgotten while it is saved loads anywhere.",
    mutated("twinproof.kvstore.deltas:summary_of", "check_remembered(since, store.fingerprints.first_mark)", "pass"),
    kills="KV-442",
)
names_of_forgotten_moments = patched(
    "A moment that was forgotten while it was saved gets a name that is never given back.",
    mutated("twinproof.kvstore.deltas:Fingerprints.note", "mark < self.first_mark", "False"),
    kills="KV-442",
)
names_go_before_the_check = patched(
    "A call that is refused leaves a store that knows no names of older marks.",
    mutated(
        "twinproof.kvstore.store:KVStore.forget_changes",
        'self._check_mark(before, "before")',
        'self.fingerprints.forget_before(self.mark()); self._check_mark(before, "before")',
    ),
    kills="KV-443",
)
any_number_is_a_mark = patched(
    "A number that is no int is taken for a mark.",
    mutated("twinproof.kvstore.rows:TrackedSource._check_mark", "type(mark) is not int or ", ""),
    kills="KV-443",
)
idle_stores_list_all_names = patched(
    "A delta in which nothing changed has a name of its own, which all that follow list.",
    mutated("twinproof.kvstore.deltas:_name_of", "if since is not None and known and", "if False and"),
    kills="KV-444",
)
removals_are_no_change = patched(
    "A delta of removals alone goes by its base's name, and may be left out.",
    mutated("twinproof.kvstore.deltas:_name_of", "part.row_count or part.deleted_count", "part.row_count"),
    kills="KV-444",
)
nothing_is_a_name = patched(
    "A table that was loaded with nothing goes for one that was never loaded, whatever is written to it.",
    mutated("twinproof.kvstore.deltas:_name_of", "name for name in bases if name != EMPTY", "*bases"),
    kills="KV-444",
)
names_are_kept_for_ever = patched(
    "Names of marks that were forgotten stay.",
    mutated("twinproof.kvstore.store:KVStore.forget_changes", "self.fingerprints.forget_before(before)", "pass"),
    kills="KV-445",
)
the_base_goes_too = patched(
    "The names of the mark that is still to be asked about go, so that a delta since then loads anywhere.",
    mutated(
        "twinproof.kvstore.deltas:Fingerprints.forget_before",
        "if known < self.first_mark",
        "if known <= self.first_mark",
    ),
    kills="KV-445",
)

names_of_copies = patched(
    "A store that tracks nothing keeps the name of each delta that it loads.",
    mutated("twinproof.kvstore.deltas:note_load", " and store.options.track_changes", ""),
    kills="KV-480",
)
marks_without_names = patched(
    "Each save of a store that tracks nothing leaves a mark without a name.",
    mutated("twinproof.kvstore.deltas:Fingerprints.note", " or not names", ""),
    kills="KV-480",
)
