"""Which part of its base a delta finds: buckets, and states. What a load left out, no delta of it may go on with."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from conformance.harness import Rank, assert_equal, examples, raises, requirement, succeeds
from conformance.kvstore.cases import assert_contents, contents, ids_of, random_rows, save, store_of, weights_of
from twinproof.errors import ConfigError, DeltaBaseError

TOTAL = 4
RANGES = [(begin, end) for begin in range(TOTAL + 1) for end in range(begin, TOTAL + 1)]


def empty(kvstore: Any, optimizer: str = "adagrad", **options: Any) -> Any:
    """A store of one table."""
    return store_of(kvstore, kvstore.RowLayout(4, optimizer=optimizer), **options)


def saved(
    kvstore: Any, folder: Path, *, optimizer: str = "adagrad", delta_buckets: tuple[Any, ...] = (TOTAL,)
) -> list[dict[str, dict[int, bytes]]]:
    """A full save and two deltas that change and remove ids of each of the four buckets, and what each leaves."""
    store, buckets = empty(kvstore, optimizer, track_changes=True), kvstore.Buckets(TOTAL)
    held: list[dict[str, dict[int, bytes]]] = []
    # None is outside of 4 chunks of 8.
    store.set_rows("t", random_rows(store, range(32), 1))
    mark = save(kvstore, store, folder / "0", buckets=buckets).mark
    held.append(contents(store))
    for number in (1, 2):
        store.set("t", ids_of(range(6 * number, 6 * number + 6)), weights_of(store, 6, number))
        store.delete("t", ids_of(range(30 - 5 * number, 35 - 5 * number)))
        mark = save(kvstore, store, folder / f"{number}", since=mark, buckets=kvstore.Buckets(*delta_buckets)).mark
        held.append(contents(store))
    return held


def part_of(held: dict[str, dict[int, bytes]], buckets: set[int]) -> dict[str, dict[int, bytes]]:
    """The rows of these buckets."""
    return {"t": {key: row for key, row in held["t"].items() if key % TOTAL in buckets}}


@requirement(
    "KV-431",
    "A delta MUST load only for buckets that its base was loaded for, full loads of one save counted together: else it "
    "is refused, both told by name, and the store stays. What it leaves MUST be all of those buckets' rows. One for no "
    "bucket MUST leave rows what they were loaded from.",
)
@examples(40)
@example(full=[(2, 3), (0, 1)], later=[(0, 3), (0, 3)])
@example(full=[(2, 3), (0, 2)], later=[(0, 3), (0, 4)])
@example(full=[(0, 4)], later=[(2, 2), (0, 4)])
@given(
    st.lists(st.sampled_from(RANGES), min_size=1, max_size=3), st.lists(st.sampled_from(RANGES), min_size=2, max_size=2)
)
def test_buckets_of_bases(
    kvstore: Any, tmp_path_factory: Any, full: list[tuple[int, int]], later: list[tuple[int, int]]
) -> None:
    folder = tmp_path_factory.mktemp("kv")
    held, store = saved(kvstore, folder), empty(kvstore)
    for owned in full:
        kvstore.load(store, folder / "0", owned=owned)
    mine, loaded = {bucket for begin, end in full for bucket in range(begin, end)}, 0
    for number, owned in enumerate(later, 1):
        asked, where = set(range(*owned)), f"{full}, then {later[:number]}"
        before = contents(store)
        if mine and not asked:
            with succeeds("load", where=where):
                kvstore.load(store, folder / f"{number}", owned=owned)
            assert_contents(store, before, where=f"{where}: no bucket")
        elif loaded < number - 1:
            with raises(DeltaBaseError, mentions=("another base",), where=where):
                kvstore.load(store, folder / f"{number}", owned=owned)
            with succeeds("load of what was loaded for no bucket", where=where):
                kvstore.load(store, folder / f"{number - 1}", owned=(0, 0))
                kvstore.load(store, folder / f"{number - 1}", owned=(min(mine), min(mine) + 1))
        elif asked <= mine:
            with succeeds("load", where=where):
                kvstore.load(store, folder / f"{number}", owned=owned)
            found = part_of(contents(store), asked)
            assert_equal(found, part_of(held[number], asked), where=f"{where}: rows of these buckets")
            mine, loaded = asked, number
        else:
            told = [f"[{owned[0]}, {owned[1]}) of ", "weights_only=False", "where: "]
            with raises(DeltaBaseError, mentions=told, where=where):
                kvstore.load(store, folder / f"{number}", owned=owned)
            assert_contents(store, before, where=f"{where}: after the refusal")
            break


@requirement(
    "KV-434",
    "Where the last load left states at zero, a delta MUST load with weights_only alone, and be refused by name "
    "without it, the store staying; rows without states and full loads MUST take it either way.",
)
def test_states_of_bases(kvstore: Any, tmp_path: Path) -> None:
    held = saved(kvstore, tmp_path)
    for flags in (
        [True, False],
        [False, True, False],
        [True, True, False],
        [False, False, True],
        [False, False, False],
    ):
        store, is_without = empty(kvstore), False
        for number, flag in enumerate(flags):
            where, before = f"weights_only={flags[: number + 1]}", contents(store)
            if is_without and not flag:
                told = ["got: [0, 4) of ", "weights_only=True", "weights_only=False", "where: "]
                with raises(DeltaBaseError, mentions=told, where=where):
                    kvstore.load(store, tmp_path / f"{number}")
                assert_contents(store, before, where=where)
                # Loaded anew with all states, the chain goes on.
                for each in range(number + 1):
                    with succeeds("load", where=f"{where}, loaded anew"):
                        kvstore.load(store, tmp_path / f"{each}")
                assert_contents(store, held[number], where=f"{where}, loaded anew")
                break
            with succeeds("load", where=where):
                kvstore.load(store, tmp_path / f"{number}", weights_only=flag)
            assert_equal(store.ids("t").tolist(), sorted(held[number]["t"]), where=where)
            is_without |= flag
    (tmp_path / "plain").mkdir()
    held = saved(kvstore, tmp_path / "plain", optimizer="sgd")
    store = empty(kvstore, "sgd")
    for number, flag in enumerate((True, False, True)):
        with succeeds("load", where=f"rows without states, {number}"):
            kvstore.load(store, tmp_path / "plain" / f"{number}", weights_only=flag)
        assert_contents(store, held[number], where=f"rows without states, {number}")


@requirement(
    "KV-437",
    "A delta in which nothing changed MUST be taken whatever it is loaded for, and leave what the table was loaded "
    "for as it was: the next delta loads for those buckets and states, and for no others.",
)
@pytest.mark.parametrize("owned", RANGES)
@pytest.mark.parametrize("flag", [False, True])
def test_deltas_of_nothing(kvstore: Any, tmp_path: Path, owned: tuple[int, int], flag: bool) -> None:
    source, buckets = empty(kvstore, track_changes=True), kvstore.Buckets(TOTAL)
    source.set_rows("t", random_rows(source, range(-8, 8), 1))
    mark = save(kvstore, source, tmp_path / "full", buckets=buckets).mark
    save(kvstore, source, tmp_path / "idle", since=mark, buckets=buckets)
    source.set("t", ids_of(range(8)), weights_of(source, 8, 2))
    save(kvstore, source, tmp_path / "last", since=mark, buckets=buckets)
    expected = part_of(contents(source), {1, 2})
    for base_flag in (False, True):
        store, where = empty(kvstore), f"base weights_only={base_flag}, idle {owned}, {flag}"
        kvstore.load(store, tmp_path / "full", owned=(1, 3), weights_only=base_flag)
        before = contents(store)
        with succeeds("load", where=f"{where}: a delta of nothing"):
            kvstore.load(store, tmp_path / "idle", owned=owned, weights_only=flag)
        assert_contents(store, before, where=where)
        asked: dict[str, Any] = {"owned": (1, 3), "weights_only": base_flag}
        wrongs: list[dict[str, Any]] = [{"owned": (0, 2)}, {"owned": (2, 4)}, *([{"weights_only": False}] * base_flag)]
        for wrong in wrongs:
            with raises(DeltaBaseError, where=f"{where}: {wrong}"):
                kvstore.load(store, tmp_path / "last", **(asked | wrong))
        with succeeds("load", where=f"{where}: the next one"):
            kvstore.load(store, tmp_path / "last", **asked)
        assert_equal(store.ids("t").tolist(), sorted(expected["t"]), where=where)
        if not base_flag:
            assert_contents(store, expected, where=where)


@requirement(
    "KV-438",
    "A delta that was saved with other buckets than its base MUST load where the base was loaded for all of its "
    "buckets, for any of the delta's, and be refused by name where the base was loaded for some.",
)
@pytest.mark.parametrize("buckets", [(1,), (3,), (8,), (TOTAL, "chunk", 8)])
def test_other_buckets_than_the_base(kvstore: Any, tmp_path: Path, buckets: tuple[Any, ...]) -> None:
    held = saved(kvstore, tmp_path, delta_buckets=buckets)
    for full in ([(0, TOTAL)], [(0, 2), (2, TOTAL)], [(3, TOTAL), (1, 2), (0, 3)]):
        store = empty(kvstore)
        for owned in full:
            kvstore.load(store, tmp_path / "0", owned=owned)
        for number in (1, 2):
            with succeeds("load", where=f"{full}, delta {number}"):
                kvstore.load(store, tmp_path / f"{number}")
            assert_contents(store, held[number], where=f"{full}, delta {number}")
    for full in ([(0, 1)], [(0, 2), (3, TOTAL)], [(1, TOTAL)]):
        store = empty(kvstore)
        for owned in full:
            kvstore.load(store, tmp_path / "0", owned=owned)
        before = contents(store)
        for part in ((0, buckets[0]), (0, 1)):
            with raises(DeltaBaseError, mentions=[f"total_count={buckets[0]}"], where=f"{full}, then {part}"):
                kvstore.load(store, tmp_path / "1", owned=part)
            assert_contents(store, before, where=f"{full}, then {part}")


def _said(call: Callable[[], object]) -> str:
    """The name of the error that it ends in, with what it tells of parts."""
    try:
        call()
    except ConfigError as error:
        return f"{type(error).__name__} {error.got}, {error.where}"
    except DeltaBaseError as error:
        return type(error).__name__
    return "none"


def _delta_of_ranks(rank: Rank, folder: str, parts: list[tuple[int, int]]) -> tuple[str, ...]:
    """Load this rank's part, train, and save a delta; what it says, and what its loads say."""
    kvstore, path = rank.component("kvstore"), Path(folder)
    buckets = kvstore.Buckets(TOTAL)
    store, (begin, end) = empty(kvstore, track_changes=True), parts[rank.rank]
    kvstore.load(store, path / "0", owned=(begin, end))
    mark, first = store.mark(), 2 * rank.rank
    store.set("t", ids_of([first, first + 4, first + 101]), weights_of(store, 3, 9))
    said = _said(lambda: save(kvstore, store, path / "delta", since=mark, buckets=buckets))
    if said != "none":
        later = save(kvstore, store, path / "full", buckets=buckets).mark
        store.delete("t", ids_of([first]))
        save(kvstore, store, path / "later", since=later, buckets=buckets)
    chain = ["0", "delta"] if said == "none" else ["full", "later"]
    target, other = empty(kvstore), empty(kvstore)
    for name in chain:
        kvstore.load(target, path / name, owned=(0, TOTAL))
    held = {2 * rank.rank, 2 * rank.rank + 1}
    assert_equal(part_of(contents(target), held), part_of(contents(store), held), where=f"{parts}: this rank's rows")
    return said, _said(lambda: kvstore.load(other, path / chain[1], owned=(0, TOTAL)))


@requirement(
    "KV-450",
    "A delta since a mark at which the ranks together had a part of what they had loaded, and nothing else that has a "
    "name, MUST be refused on every rank, table and part told by name. Parts that are the whole together MUST be its "
    "base, and a full save the base of a delta behind it.",
)
def test_deltas_of_parts(kvstore: Any, rank_pool: Any, tmp_path: Path) -> None:
    saved(kvstore, tmp_path)
    for begin, end in RANGES:
        store, where = empty(kvstore, track_changes=True), f"[{begin}, {end})"
        kvstore.load(store, tmp_path / "0", owned=(begin, end))
        mark = store.mark()
        store.set("t", ids_of([begin]), weights_of(store, 1, 9))
        path = tmp_path / f"delta {begin} {end}"
        if begin == end or (begin, end) == (0, TOTAL):
            with succeeds("a save", where=where):
                save(kvstore, store, path, since=mark)
            # Nothing of it is a base of its own: what nothing was loaded into.
            for number, base in enumerate((None, tmp_path / "0")):
                target = empty(kvstore)
                if base is not None:
                    kvstore.load(target, base)
                called = _said(partial(kvstore.load, target, path))
                expected = "none" if bool(number) == (begin < end) else "DeltaBaseError"
                assert_equal(called, expected, where=f"{where}: on {base}")
        else:
            with raises(ConfigError, mentions=(f"got: {where} of ", "where: since, t"), where=where):
                save(kvstore, store, path, since=mark)
            assert_equal(path.exists(), False, where=f"{where}: something is written")
    store = empty(kvstore, track_changes=True)
    kvstore.load(store, tmp_path / "0", owned=(1, 3))
    mark = save(kvstore, store, tmp_path / "part").mark
    store.set("t", ids_of([1]), weights_of(store, 1, 9))
    with succeeds("a save", where="since a full save of the part"):
        save(kvstore, store, tmp_path / "of the part", since=mark)
    target = empty(kvstore)
    kvstore.load(target, tmp_path / "0")
    with raises(DeltaBaseError, where="a delta of the part, on the whole"):
        kvstore.load(target, tmp_path / "of the part")
    for number, (parts, lacks) in enumerate(
        [([(0, 2), (2, 4)], ""), ([(0, 2), (2, 3)], "[0, 3)"), ([(0, 1), (2, 4)], "[0, 1), [2, 4)")]
    ):
        saved(kvstore, tmp_path / f"{number}")
        found = rank_pool.run(_delta_of_ranks, 2, str(tmp_path / f"{number}"), parts, timeout_s=60)
        told = f"ConfigError {lacks} of {kvstore.Buckets(TOTAL)}, weights_only=False, since, t" if lacks else "none"
        assert_equal(found, [(told, "DeltaBaseError")] * 2, where=f"{parts}: by rank")


@requirement(
    "KV-453",
    "A table that full loads of one save have filled, each with other buckets, MUST be the base of its deltas as one "
    "that a single load has filled, unless rows of anything else are there or were written between.",
)
def test_filled_piece_by_piece(kvstore: Any, tmp_path: Path) -> None:
    saved(kvstore, tmp_path)
    for number, pieces in enumerate(([(0, 2), (2, 4)], [(3, 4), (1, 3), (0, 1)], [(0, 4), (2, 2)])):
        for between in (None, "loads", "writes"):
            store, where = empty(kvstore, track_changes=True), f"{pieces}, {between} between"
            for begin, end in pieces:
                kvstore.load(store, tmp_path / "0", owned=(begin, end))
                if between == "writes" and (begin, end) == pieces[0]:
                    store.set("t", ids_of([1000]), weights_of(store, 1, 5))
            if between == "loads":
                kvstore.load(store, tmp_path / "0", owned=pieces[0])
            mark, path = store.mark(), tmp_path / f"{number} {between}"
            store.set("t", ids_of([5]), weights_of(store, 1, 9))
            store.delete("t", ids_of([6]))
            with succeeds("a delta", where=where):
                save(kvstore, store, path, since=mark)
            for base in (None, tmp_path / "0"):
                target = empty(kvstore)
                if base is not None:
                    kvstore.load(target, base)
                called = _said(partial(kvstore.load, target, path))
                # What was written between has no name, and such a delta loads anywhere.
                named = base is None and between is None
                assert_equal(called, "DeltaBaseError" if named else "none", where=f"{where}: on {base}")
                if base is not None and between is None:
                    assert_contents(target, contents(store), where=where)


@requirement(
    "KV-464",
    "A load for no bucket MUST leave rows the base that they have, which lets deltas on, and no store without it take "
    "what is saved since; a table without rows it MUST give a name, and be empty for a base where no other name is.",
)
def test_no_bucket(kvstore: Any, tmp_path: Path) -> None:
    tables = {name: kvstore.RowLayout(4) for name in "tu"}
    buckets, nothing = kvstore.Buckets(TOTAL), (TOTAL, TOTAL)

    def made() -> Any:
        store = store_of(kvstore, tables, track_changes=True)
        # Its mark is not that of a new store.
        store.set("u", ids_of([1]), weights_of(store, 1, 3, "u"))
        return store

    def bases(store: Any, name: str) -> tuple[str, ...]:
        mark = store.mark()
        store.set("t", ids_of([99]), weights_of(store, 1, 4))
        save(kvstore, store, tmp_path / name, since=mark, buckets=buckets)
        return tuple(kvstore.SavedRows(tmp_path / name).bases.get("t", ()))

    source = made()
    names: dict[str, str] = {}
    mark = None
    for name in ("nothing", "full", "delta", "later"):
        since = mark if name in ("delta", "later") else None
        if name != "nothing":
            keys = range(20) if name == "full" else [len(names)]
            source.set("t", ids_of(keys), weights_of(source, len(keys), len(names)))
        mark = save(kvstore, source, tmp_path / name, since=since, buckets=buckets).mark
        names[name] = kvstore.SavedRows(tmp_path / name).fingerprints["t"]

    def loaded(*loads: tuple[str, tuple[int, int]]) -> Any:
        store = made()
        for name, owned in loads:
            with succeeds("load", where=f"{name}, {owned} of {loads}"):
                kvstore.load(store, tmp_path / name, tables=("t",), owned=owned)
        return store

    whole = (0, TOTAL)
    on = loaded(("full", whole), ("delta", nothing), ("later", nothing), ("delta", whole), ("later", whole))
    assert_equal(contents(on)["t"], contents(source)["t"], where="behind the deltas")
    for other in ("delta", "nothing"):
        since = bases(loaded(("full", whole), (other, nothing)), f"since {other}")
        assert_equal(since, (names["full"],), where=f"bases behind {other}")
        with raises(DeltaBaseError, where="a store without the base"):
            kvstore.load(made(), tmp_path / f"since {other}", tables=("t",))
    assert_equal(bases(loaded(("full", nothing)), "none"), ("empty",), where="a table without rows")
    since = bases(loaded(("nothing", whole), ("full", nothing)), "both")
    # Of the first load, or of the last alone, where that has moved the mark.
    assert_equal(len(since), 1, where="names of a table without rows")


@requirement("KV-471", "A delta for no bucket MUST need no base where a table has rows, which it leaves as they are.")
def test_no_bucket_needs_no_base(kvstore: Any, tmp_path: Path) -> None:
    saved(kvstore, tmp_path)
    for first in ("0", "by hand"):
        store = empty(kvstore)
        if first == "by hand":
            store.set("t", ids_of([5]), weights_of(store, 1, 2))
        else:
            kvstore.load(store, tmp_path / first)
        before = contents(store)
        with succeeds("load of a later delta", where=first):
            kvstore.load(store, tmp_path / "2", owned=(TOTAL, TOTAL))
        assert_contents(store, before, where=first)
        with raises(DeltaBaseError, mentions=("another base",), where=f"{first}: for buckets"):
            kvstore.load(store, tmp_path / "2")


@requirement(
    "KV-475",
    "Of loads of parts of two saves with the same contents and other buckets the later part alone MUST count: a delta "
    "for other buckets is refused by name.",
)
def test_parts_of_other_buckets(kvstore: Any, tmp_path: Path) -> None:
    source = empty(kvstore, track_changes=True)
    source.set_rows("t", random_rows(source, range(32), 1))
    save(kvstore, source, tmp_path / "of 4", buckets=kvstore.Buckets(4))
    mark = save(kvstore, source, tmp_path / "of 8", buckets=kvstore.Buckets(8)).mark
    source.set("t", ids_of(range(12)), weights_of(source, 12, 2))
    save(kvstore, source, tmp_path / "delta", since=mark, buckets=kvstore.Buckets(8))
    store = empty(kvstore)
    # Together they are neither all ids nor a range of buckets.
    for folder, owned in (("of 4", (0, 2)), ("of 8", (0, 4))):
        with succeeds("a load", where=folder):
            kvstore.load(store, tmp_path / folder, owned=owned)
    before = contents(store)
    for owned in ((0, 8), (4, 6)):
        with raises(
            DeltaBaseError, mentions=("[0, 4) of ", f"[{owned[0]}, {owned[1]}) of "), where=f"a delta, {owned}"
        ):
            kvstore.load(store, tmp_path / "delta", owned=owned)
        assert_contents(store, before, where=f"{owned}: after the refusal")
    with succeeds("a delta", where="for the buckets of the later load"):
        kvstore.load(store, tmp_path / "delta", owned=(0, 4))
