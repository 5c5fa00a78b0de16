"""Changes in a job without an end: what is forgotten on demand, what is refused then, what memory is given back."""

from __future__ import annotations

import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.harness import assert_equal, assert_le, examples, raises, requirement, succeeds
from conformance.kvstore.cases import FILE, assert_contents, contents, filled, fresh, ids_of, save, store_of, weights_of
from twinproof.errors import ConfigError, DeltaBaseError, StoreClosedError

# Of a removed id that is remembered: the id, and when it went.
REMOVAL_BYTES = 16
# What a log may hold beyond twice what counts: removals that were not looked through yet, and room to grow.
SLACK_BYTES = 4 * 4096 * REMOVAL_BYTES


def changed(kvstore: Any, store: Any, turn: int) -> None:
    """One of the ways in which rows come and go."""
    draw = random.Random(turn)
    keys = ids_of([draw.randrange(12) for _ in range(4)])
    way = draw.randrange(5)
    if way < 2:
        store.set("a", keys, weights_of(store, 4, turn, "a"))
    elif way == 2:
        store.clear("b")
    elif way == 3:
        store.evict("a", policy=kvstore.EvictionPolicy.count(2))
    else:
        store.set("b", keys, weights_of(store, 4, turn, "b"))
    store.delete("ab"[turn % 2], keys[:2])


def told(store: Any, since: int) -> list[list[int]]:
    """Ids that changed and ids that went, of both tables."""
    return [ids.tolist() for table in "ab" for ids in store.changes(table, since)]


@requirement(
    "KV-439",
    "After forget_changes(before=mark) changes since that mark and later ones MUST be told as by a store that forgot "
    "nothing, older ones be refused by name, also when an older mark is forgotten afterwards; rows, marks MUST stay.",
)
@examples(20)
@given(st.integers(0, 1000), st.lists(st.integers(0, 6), min_size=1, max_size=12))
def test_forgetting(kvstore: Any, seed: int, ages: list[int]) -> None:
    options = {"track_changes": True, "capacity": {"a": 9, "b": None}}
    store, twin = (filled(kvstore, range(8), **options) for _ in range(2))
    marks, first = [0], 0
    for number, age in enumerate(ages):
        for one in (store, twin):
            changed(kvstore, one, seed + number)
        marks.append(store.mark())
        before = marks[max(0, len(marks) - 1 - age)]
        store.forget_changes(before=before)
        first = max(first, before)
        assert_equal(store.mark(), twin.mark(), where=f"turn {number}: mark")
        for mark in marks:
            where = f"turn {number}, since {mark}, {first} on is remembered"
            if mark >= first:
                with succeeds("changes", where=where):
                    found = told(store, mark)
                assert_equal(found, told(twin, mark), where=where)
                continue
            for table in "ab":
                with raises(
                    ConfigError, mentions=("forget", f"got: {mark}", f"from {first} on", "where: "), where=where
                ):
                    store.changes(table, mark)
    assert_contents(store, contents(twin), where="rows")


@requirement(
    "KV-441",
    "A store that forgets MUST hold bytes for the removals since the mark alone, as stats().changes_bytes says, "
    "however many ids came and went; one that does not holds 16 bytes or more for each.",
)
def test_bounded_memory(kvstore: Any) -> None:
    batch, turns = 500, 60
    stores = [store_of(kvstore, track_changes=True, capacity=batch) for _ in range(2)]
    for turn in range(turns):
        for store in stores:
            mark = store.mark()
            store.set("t", ids_of(range(turn * batch, (turn + 1) * batch)), weights_of(store, batch, turn))
        # As long as a delta since then may be asked for.
        stores[0].forget_changes(before=mark)
        most = 2 * batch * REMOVAL_BYTES + SLACK_BYTES
        assert_le(stores[0].stats().changes_bytes, most, where=f"turn {turn}: bytes of what is remembered")
        assert_equal(stores[0].changes("t", mark)[1].numel(), batch if turn else 0, where=f"turn {turn}: removals")
    least = (turns - 1) * batch * REMOVAL_BYTES
    assert_le(least, stores[1].stats().changes_bytes, where="bytes of a store that remembers all")
    for store in stores:
        store.forget_changes(before=store.mark())
        assert_equal(store.stats().changes_bytes, 0, where="bytes when all is forgotten")
    plain = store_of(kvstore, capacity=batch)
    for turn in range(3):
        plain.set("t", ids_of(range(turn * batch, (turn + 1) * batch)), weights_of(plain, batch, turn))
    assert_equal(plain.stats().changes_bytes, 0, where="bytes where nothing is tracked")


@requirement(
    "KV-442",
    "A snapshot MUST tell what it told before the store forgot, and one that is taken afterwards refuse what the store "
    "refuses; what is forgotten while a save of it is under way MUST be refused, not saved as a delta without a base, "
    "and a whole save of it leaves no name.",
)
def test_forgotten_beside_snapshots(kvstore: Any, tmp_path: Path) -> None:
    store = filled(kvstore, range(8), track_changes=True)
    base = save(kvstore, store, tmp_path / "full").mark
    changed(kvstore, store, 1)
    store.delete("a", ids_of([1, 2, 3]))
    sooner = store.snapshot()
    expected = told(store, base)
    changed(kvstore, store, 2)
    store.forget_changes(before=store.mark())
    later = store.snapshot()
    with succeeds("changes", where="a snapshot of before"):
        found = told(sooner, base)
    assert_equal(found, expected, where="a snapshot of before")
    with raises(ConfigError, mentions=("forget", f"got: {base}"), where="a snapshot of afterwards"):
        later.changes("a", base)
    assert_equal(told(later, store.mark()), [[], [], [], []], where="a snapshot of afterwards, since then")
    for taken in (sooner, later):
        taken.close()
    assert_equal(store.stats().changes_bytes, 0, where="bytes when the snapshots are closed")

    class Forgetful(kvstore.KVStore):  # type: ignore[misc]
        """A store that somebody else has forget as soon as a save has its moment."""

        behind: Any = None

        def snapshot(self) -> Any:
            made = super().snapshot()
            if self.behind is not None:
                self.set("t", ids_of([99]), weights_of(self, 1, 3))
                self.behind()
            return made

    other = Forgetful({"t": kvstore.RowLayout(4)}, track_changes=True, clock=lambda: 7)
    other.set("t", ids_of([1, 2]), weights_of(other, 2, 1))
    mark = save(kvstore, other, tmp_path / "base").mark
    other.delete("t", ids_of([1]))
    other.behind = lambda: other.forget_changes(before=other.mark())
    with raises(ConfigError, mentions=("forget", f"got: {mark}"), where="forgotten while it is saved"):
        save(kvstore, other, tmp_path / "delta", since=mark)
    assert_equal((tmp_path / "delta").exists(), False, where="nothing was saved")
    assert_equal(other.stats().snapshot_count, 0, where="moments that are left")
    known = other.fingerprints.mark_count
    late = save(kvstore, other, tmp_path / "whole").mark
    assert_equal(other.fingerprints.mark_count, known, where="names of a moment that was forgotten while it was saved")
    other.behind = None
    with raises(ConfigError, mentions=("forget", f"got: {late}"), where="changes since a moment that was forgotten"):
        save(kvstore, other, tmp_path / "delta", since=late)


@requirement(
    "KV-443",
    "forget_changes MUST refuse by name what is no mark of the store, and a store that tracks nothing or was closed; "
    "nothing changes then, neither what can be asked nor what deltas name.",
)
def test_refused(kvstore: Any, tmp_path: Path) -> None:
    store = filled(kvstore, range(8), track_changes=True)
    mark = save(kvstore, store, tmp_path / "full").mark
    store.delete("a", ids_of([1, 2]))
    for wrong in (-1, store.mark() + 1, 1.0, True, None, "1", torch.tensor(1)):
        held = store.stats()
        with raises(ConfigError, mentions=("not a mark", "got: ", "expected: ", "where: before"), where=f"{wrong!r}"):
            store.forget_changes(before=wrong)
        assert_equal(store.stats(), held, where=f"counters after {wrong!r}")
        with succeeds("changes", where=f"after {wrong!r}"):
            assert_equal(store.changes("a", mark)[1].tolist(), [1, 2], where=f"removed ids after {wrong!r}")
    with succeeds("save", where="after what was refused"):
        save(kvstore, store, tmp_path / "delta", since=mark)
    follower = fresh(kvstore)
    with raises(DeltaBaseError, where="a delta with its base's name"):
        kvstore.load(follower, tmp_path / "delta")
    for path in ("full", "delta"):
        with succeeds("load", where=path):
            kvstore.load(follower, tmp_path / path)
    assert_contents(follower, contents(store), where="what was saved")
    with raises(ConfigError, mentions=("not tracked", "where: track_changes"), where="nothing is tracked"):
        filled(kvstore).forget_changes(before=0)
    store.close()
    with raises(StoreClosedError, where="a store that was closed"):
        store.forget_changes(before=0)


def bases_of(path: Path) -> list[str]:
    """The names of the contents that a delta of table "t" may follow."""
    raw = (path / FILE).read_bytes()
    metadata = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])["__metadata__"]
    found: list[str] = json.loads(metadata["kvstore.content"])["bases"]["t"]
    return found


def removals_alone(kvstore: Any, folder: Path) -> None:
    """A delta of removed ids and no rows cannot be left out."""
    store = store_of(kvstore, track_changes=True)
    store.set("t", ids_of([1, 2, 3]), weights_of(store, 3, 1))
    marks = [save(kvstore, store, folder / "whole").mark]
    for name in ("gone", "behind"):
        store.delete("t", ids_of([len(marks)]))
        marks.append(save(kvstore, store, folder / name, since=marks[-1]).mark)
    follower = store_of(kvstore)
    kvstore.load(follower, folder / "whole")
    with raises(DeltaBaseError, where="a delta of removals was left out"):
        kvstore.load(follower, folder / "behind")


@requirement(
    "KV-444",
    "A delta in which nothing changed MUST go by the name of a base of its own, so that those of an idle store name no "
    "more bases than the first; each MUST load after any of the others, and so must what follows them. Removals alone "
    "are a change, and that nothing was ever loaded is no such name.",
)
def test_idle(kvstore: Any, tmp_path: Path) -> None:
    for begun in ("full", "delta", "nothing"):
        folder = tmp_path / begun
        store = store_of(kvstore, track_changes=True)
        before, mark = [], store.mark()
        if begun != "nothing":
            store.set("t", ids_of([1, 9]), weights_of(store, 2, 0))
            before, mark = ["first"], save(kvstore, store, folder / "first").mark
        if begun == "delta":
            store.set("t", ids_of([1, 2]), weights_of(store, 2, 1))
            mark, before = save(kvstore, store, folder / "second", since=mark).mark, ["first", "second"]
        idle = [f"idle-{number}" for number in range(6)]
        for name in idle:
            mark = save(kvstore, store, folder / name, since=mark).mark
        counts = [len(bases_of(folder / name)) for name in idle]
        assert_le(max(counts), 2 if begun == "nothing" else 1, where=f"{begun}: names of bases, by delta")
        store.set("t", ids_of([2, 3]), weights_of(store, 2, 2))
        save(kvstore, store, folder / "last", since=mark)
        # The first since the beginning has no named base: it loads into tables that were never loaded.
        idle = idle[1:] if begun == "nothing" else idle
        for chosen in ([], idle[:1], idle[3:4], idle[1::2], idle[::-1], [idle[2], idle[2]]):
            follower = store_of(kvstore, clock=lambda: 7)
            for name in (*before, *chosen, "last"):
                with succeeds("load", where=f"{begun}: {name} of {chosen}"):
                    kvstore.load(follower, folder / name)
            assert_contents(follower, contents(store), where=f"{begun}: {chosen}")
        written = store_of(kvstore)
        written.set("t", ids_of([7]), weights_of(written, 1, 3))
        for name in (*idle, "last"):
            with raises(DeltaBaseError, where=f"{begun}: {name} of a table that was never loaded"):
                kvstore.load(written, folder / name)
    removals_alone(kvstore, tmp_path)
    used, other = (store_of(kvstore, track_changes=True) for _ in range(2))
    kvstore.load(used, tmp_path / "nothing" / "idle-0")
    used.set("t", ids_of([7]), weights_of(used, 1, 3))
    other.set("t", ids_of([8]), weights_of(other, 1, 3))
    save(kvstore, other, tmp_path / "other", since=0)
    with raises(DeltaBaseError, where="since the beginning, into a table that was loaded and written"):
        kvstore.load(used, tmp_path / "other")


@requirement(
    "KV-445",
    "A chain of deltas of a store that forgets after each save MUST load as one that forgets nothing, a delta since a "
    "mark that was forgotten be refused, and the store keep names of as many marks as it remembers.",
)
def test_chain(kvstore: Any, tmp_path: Path) -> None:
    store = filled(kvstore, range(8), track_changes=True)
    marks = [save(kvstore, store, tmp_path / "0").mark]
    follower = fresh(kvstore)
    load = partial(kvstore.load, follower)
    load(tmp_path / "0")
    for number in range(1, 9):
        changed(kvstore, store, number)
        path = tmp_path / f"{number}"
        with succeeds("save", where=f"delta {number}"):
            marks.append(save(kvstore, store, path, since=marks[-1]).mark)
        store.forget_changes(before=marks[-1])
        with succeeds("load", where=f"delta {number}"):
            load(path)
        assert_contents(follower, contents(store), where=f"after delta {number}")
        with raises(DeltaBaseError, where=f"delta {number} without those before it"):
            kvstore.load(fresh(kvstore), path)
        assert_le(store.fingerprints.mark_count, 1, where=f"marks with names after delta {number}")
    for since in (0, *marks[:-1]):
        with raises(ConfigError, mentions=("forget", f"got: {since}", "where: since"), where=f"since {since}"):
            save(kvstore, store, tmp_path / "late", since=since)
    assert_equal((tmp_path / "late").exists(), False, where="what was refused")


@requirement(
    "KV-480",
    "A store that does not track its changes MUST keep no marks of the deltas that it loads, nor of its own saves: "
    "nobody can ask it for its changes since one of them.",
)
def test_copies_that_follow(kvstore: Any, tmp_path: Path) -> None:
    source, copy = filled(kvstore, range(4), track_changes=True), fresh(kvstore)
    mark = save(kvstore, source, tmp_path / "full").mark
    kvstore.load(copy, tmp_path / "full")
    for number in range(5):
        source.set("a", ids_of([number]), weights_of(source, 1, number, "a"))
        mark = save(kvstore, source, tmp_path / f"{number}", since=mark).mark
        kvstore.load(copy, tmp_path / f"{number}")
        save(kvstore, copy, tmp_path / "copy")
        assert_equal(copy.fingerprints.mark_count, 0, where=f"marks with names after delta {number}")
    assert_contents(copy, contents(source), where="the copy")
