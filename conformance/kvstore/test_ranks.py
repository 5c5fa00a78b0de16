"""Ranks that make one save of stores that do not fit together, and processes that are of no group."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from conformance.harness import assert_equal, raises, requirement, succeeds
from conformance.kvstore.cases import assert_contents, contents, ids_of, save, store_of, weights_of
from twinproof.errors import ConfigError, TwinproofError, UnsupportedError

BUCKETS = 2


def _store_of_rank(kvstore: Any, rank: Any, layouts: list[Any], **options: Any) -> Any:
    store = store_of(kvstore, layouts[rank.rank], **options)
    store.set("t", ids_of([rank.rank, rank.rank + BUCKETS]), weights_of(store, 2, rank.rank))
    return store


def save_of_others(rank: Any, path: str) -> list[str]:
    """Two ranks whose stores differ save and make views; what each of them says."""
    kvstore = rank.component("kvstore")
    layout, buckets = kvstore.RowLayout, kvstore.Buckets(BUCKETS)
    half = {"momentum1": torch.float16, "momentum2": torch.float16}
    pairs = {
        "dtypes": [layout(4), layout(4, torch.float16)],
        "optimizers of one width": [layout(4, optimizer="adam"), layout(4, optimizer="lamb")],
        "states": [layout(4, optimizer="adam"), layout(4, optimizer="adam", state_dtypes=half)],
        "widths": [layout(4), layout(8)],
    }
    ways = {
        "rows": lambda store, where: save(kvstore, store, where, buckets=buckets),
        "separate": lambda store, where: save(kvstore, store, where, buckets=buckets, form="separate"),
        "views": lambda store, where: store.state_dict(buckets=buckets),
    }
    found = []
    for name, layouts in pairs.items():
        store = _store_of_rank(kvstore, rank, layouts)
        for way, call in ways.items():
            found.append(f"{name}, {way}: {_said(call, store, Path(path))}")
    store = _store_of_rank(kvstore, rank, [layout(4)] * 2, track_changes=rank.rank == 0)
    found.append(f"changes, rows: {_said(ways['rows'], store, Path(path))}")
    return found


def _said(call: Any, store: Any, path: Path) -> str:
    try:
        call(store, path)
    except TwinproofError as error:
        return type(error).__name__
    except Exception as error:
        return f"unnamed {type(error).__name__}"
    return "no error"


@requirement(
    "KV-350",
    "Ranks whose stores have rows of different layouts, or of which some track their changes, MUST all be refused by "
    "a save and by views of all ranks, also where the rows are of one width, with nothing written.",
)
def test_other_layouts(kvstore: Any, rank_pool: Any, tmp_path: Path) -> None:
    with succeeds("two ranks", where="an answer of both"):
        found = rank_pool.run(save_of_others, 2, str(tmp_path / "ck"), timeout_s=20)
    names = ("dtypes", "optimizers of one width", "states", "widths")
    expected = [f"{name}, {way}: ConfigError" for name in names for way in ("rows", "separate", "views")]
    assert_equal(found, [[*expected, "changes, rows: ConfigError"]] * 2, where="by rank")
    assert_equal(os.path.exists(tmp_path / "ck"), False, where="nothing is written")


def call_from_outside(rank: Any, path: str) -> list[str]:
    """Of two ranks the second alone is a group; what the first says where it is given that."""
    kvstore = rank.component("kvstore")
    store = _store_of_rank(kvstore, rank, [kvstore.RowLayout(4)] * 2)
    group = dist.new_group([1])
    if rank.rank == 1:
        save(kvstore, store, Path(path), process_group=group)
        return []
    calls = {
        "save": lambda: save(kvstore, store, Path(path) / "other", process_group=group),
        "load": lambda: kvstore.load(store, Path(path), process_group=group),
        "state_dict": lambda: store.state_dict(process_group=group),
    }
    found = []
    for name, call in calls.items():
        try:
            call()  # type: ignore[no-untyped-call]
        except Exception as error:
            lines = str(error).splitlines()
            found.append(f"{name}: {type(error).__name__}, {'where: process_group' in str(lines)}")
    return found


@requirement(
    "KV-360",
    "A process that is not of the group that a save, a load or a state dict is given MUST be told so by the name of "
    "that argument, and so MUST whoever gives what is no group.",
)
def test_no_member(kvstore: Any, rank_pool: Any, tmp_path: Path) -> None:
    with succeeds("two ranks", where="an answer of both"):
        found = rank_pool.run(call_from_outside, 2, str(tmp_path / "ck"), timeout_s=20)
    assert_equal(found[0], [f"{name}: ConfigError, True" for name in ("save", "load", "state_dict")], where="outside")
    store = store_of(kvstore)
    for wrong in ("world", 1):
        with raises(ConfigError, mentions=["where: process_group", str(wrong)], where=f"a save in {wrong}"):
            save(kvstore, store, tmp_path / "no", process_group=wrong)
        with raises(ConfigError, mentions=["where: process_group", str(wrong)], where=f"views in {wrong}"):
            store.state_dict(process_group=wrong)


@contextmanager
def _default_group(group: Any) -> Iterator[None]:
    """A program whose default group is this one; None: torch.distributed is not in use yet, or not any more."""
    before = dist.group.WORLD
    dist.group.WORLD = group
    try:
        yield
    finally:
        dist.group.WORLD = before


def _places(kvstore: Any, store: Any, modules: list[Any], path: Path) -> list[Any]:
    """Rows of all ranks and where this rank's begin, by every way that asks for ranks."""
    buckets, empty = kvstore.Buckets(BUCKETS), store_of(kvstore, kvstore.RowLayout(4, optimizer="sgd"))
    weights = [store.state_dict(buckets=buckets)["t.weight"], *(each.state_dict()["weight"] for each in modules)]
    found: list[Any] = [(weight.global_row_count, weight.row_offset) for weight in weights]
    save(kvstore, store, path, buckets=buckets)
    kvstore.load(empty, path)
    return [*found, kvstore.SavedRows(path).size("t"), empty.size("t")]


def ask_as_groups_come_and_go(rank: Any, path: str) -> list[str]:
    """What this rank is told before there is a group, in it, behind it and in one of its own; by every way."""
    kvstore, world = rank.component("kvstore"), dist.group.WORLD
    alone = [dist.new_group([number]) for number in range(2)][rank.rank]
    found, buckets = [], kvstore.Buckets(BUCKETS)
    stores = _store_of_rank(kvstore, rank, [kvstore.RowLayout(4, optimizer="sgd")] * 2), Path(path)
    modules: list[Any] = []
    for number, group in enumerate((None, world, None, world, alone, world)):
        # A save of all ranks goes to one folder, and one of a rank alone to its own.
        folder = stores[1] / (f"{number}" if group is world else f"{number} of {rank.rank}")
        try:
            with _default_group(group):
                modules.append(kvstore.KVEmbedding(stores[0], buckets=buckets))
                found.append(f"{_places(kvstore, stores[0], modules, folder)}")
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


@requirement(
    "KV-414",
    "A state dict, of a store as of a module, a save and a load MUST be of the ranks that there are when they are "
    "asked for, whatever was asked before torch.distributed was in use, in another group, or behind one.",
)
def test_groups_come_and_go(kvstore: Any, rank_pool: Any, tmp_path: Path) -> None:
    with succeeds("two ranks", where="an answer of both"):
        found = rank_pool.run(ask_as_groups_come_and_go, 2, str(tmp_path), timeout_s=40)
    for rank, answers in enumerate(found):
        for number, answer in enumerate(answers):
            is_alone = number in (0, 2, 4)
            place = (2, 0) if is_alone else (4, 2 * rank)
            expected = [*[place] * (number + 2), 2 if is_alone else 4, 2]
            assert_equal(answer, f"{expected}", where=f"rank {rank}, asked for the time {number}")


class _Model(torch.nn.Module):
    """A table whose rows are dealt to ranks, beside what is not."""

    def __init__(self, kvstore: Any, store: Any, buckets: Any) -> None:
        super().__init__()
        self.rows = kvstore.KVEmbeddingBag(store, buckets=buckets)
        self.dense = torch.nn.Linear(2, 1)


def full_states(rank: Any, path: str) -> list[str]:
    """What torch's functions for state dicts give of rows that are dealt to two ranks, and of rows of the first."""
    kvstore = rank.component("kvstore")
    layout = kvstore.RowLayout(4, optimizer="adagrad")
    dealt = _Model(kvstore, _store_of_rank(kvstore, rank, [layout] * 2), kvstore.Buckets(BUCKETS))
    of_first = store_of(kvstore, layout)
    if rank.rank == 0:
        of_first.set("t", ids_of([4, 5, 6]), weights_of(of_first, 3, 1))
    found = []
    for name, model in (("dealt", dealt), ("of the first", _Model(kvstore, of_first, None))):
        for is_full in (True, False):
            options = StateDictOptions(full_state_dict=is_full)
            try:
                weight: Any = get_model_state_dict(model, options=options)["rows.weight"]
            except UnsupportedError as error:
                found.append(f"{name}, {is_full}: {'full_state_dict=False' in str(error)}")
                continue
            found.append(f"{name}, {is_full}: {weight.shape[0]} of {weight.global_row_count}")
    state = get_model_state_dict(dealt)
    with succeeds("loading on as many ranks", where=f"rank {rank.rank}"):
        dealt.load_state_dict(state)
    torch.save(state, f"{path}-{rank.rank}")
    return found


@requirement(
    "KV-458",
    "Rows that are dealt to ranks MUST be refused by name where torch would take those of one rank for all: with "
    "full_state_dict, and where one process loads what a rank of several had.",
)
def test_rows_of_one_rank(kvstore: Any, rank_pool: Any, tmp_path: Path) -> None:
    with succeeds("two ranks", where="an answer of both"):
        found = rank_pool.run(full_states, 2, str(tmp_path / "state"), timeout_s=20)
    for rank, counts in enumerate((("2 of 4", "3 of 3"), ("2 of 4", "0 of 3"))):
        dealt, first = counts
        expected = ["dealt, True: True", f"dealt, False: {dealt}"]
        expected += [f"of the first, {is_full}: {first}" for is_full in (True, False)]
        assert_equal(found[rank], expected, where=f"rank {rank}")
    store = store_of(kvstore, kvstore.RowLayout(4, optimizer="adagrad"))
    store.set("t", ids_of([9]), weights_of(store, 1, 1))
    model, before = _Model(kvstore, store, kvstore.Buckets(BUCKETS)), contents(store)
    for rank in range(2):
        state = torch.load(f"{tmp_path / 'state'}-{rank}", weights_only=False)
        with raises(UnsupportedError, mentions=("2 of 4 rows", "rows.weight"), where=f"rank {rank}'s, alone"):
            model.load_state_dict(state)
        assert_contents(store, before, where="behind a refusal")
