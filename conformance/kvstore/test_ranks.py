"""Ranks that make one save of stores that do not fit together, and processes that are of no group."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from conformance.harness import assert_equal, raises, requirement, succeeds
from conformance.kvstore.cases import (
    assert_contents,
    contents,
    ids_of,
    random_rows,
    save,
    store_of,
    weights_of,
)
from twinproof.errors import (
    ConfigError,
    CorruptionError,
    DistributedError,
    MissingCheckpointError,
    TwinproofError,
    UnsupportedError,
)

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


DEALT_IDS = (-(2**63), -7, -1, 0, 1, 2, 3, 5, 8, 13, 14, 2**31, 2**62, 2**63 - 1)
CHUNKED_IDS = tuple(range(0, 14, 2))


class _Dealt:
    """A store as a state of training: rows dealt to ranks by buckets, in a list of its state dict."""

    def __init__(self, kvstore: Any, buckets: Any, **options: Any) -> None:
        layouts = {"t": kvstore.RowLayout(6, optimizer="adam"), "none": kvstore.RowLayout(4)}
        self.kvstore, self.buckets, self.store = kvstore, buckets, store_of(kvstore, layouts, **options)
        self.given: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"stores": [self.store.state_dict(buckets=self.buckets)]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        (found,) = state_dict["stores"]
        self.given = {name: (type(value), value.shape[0]) for name, value in found.items()}
        self.store.load_state_dict(found, clear=True)

    def ids(self, rank: Any) -> list[int]:
        """Those of this rank's buckets, told by arithmetic alone."""
        count, size = self.buckets.total_count, self.buckets.bucket_size
        begin, end = self.kvstore.rank_buckets(count, rank.world_size, rank.rank)
        if size is not None:
            return [each for each in CHUNKED_IDS if begin <= each // size < end]
        return [each for each in DEALT_IDS if begin <= each % count < end]

    def fill(self, rank: Any, seed: int) -> None:
        """This rank's rows, each the same whatever the number of ranks, and a step."""
        for each in self.ids(rank):
            self.store.set_rows("t", random_rows(self.store, [each], seed + each % 1000))
        self.store.set_step_count("t", seed + rank.rank)

    def assert_filled(self, rank: Any, seed: int, step: int, where: str) -> None:
        """The rows of this rank alone, a step, and no other table's rows."""
        expected = {each: random_rows(self.store, [each], seed + each % 1000) for each in self.ids(rank)}
        rows = {each: bytes(row[0].numpy()) for each, row in expected.items()}
        assert_contents(self.store, {"t": rows, "none": {}}, where=where)
        assert_equal(self.store.step_count("t"), step, where=f"{where}: step")


class _Trainer:
    """A model with dealt rows, and a store of dealt rows among the states of its training."""

    def __init__(self, rank: Any, buckets: Any, way: str) -> None:
        kvstore = rank.component("kvstore")
        whole = {"return_whole_row": way in ("training", "hf")}
        self.rank, self.way, self.checkpoint = rank, way, rank.component("checkpoint")
        self.table, self.state = _Dealt(kvstore, buckets, **whole), _Dealt(kvstore, buckets, **whole)
        self.model = torch.nn.ModuleDict(
            {"rows": kvstore.KVEmbedding(self.table.store, table="t", buckets=buckets), "dense": torch.nn.Linear(2, 1)}
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def _manager(self, folder: str, **options: Any) -> Any:
        options |= {"async_mode": "async"} if self.way == "async" else {}
        given = {"model": self.model, "optimizers": self.optimizer, "states": {"dealt": self.state}}
        return self.checkpoint.CheckpointManager(folder, interval=1, durable=False, **given, **options)

    def save(self, folder: str) -> None:
        """By the way of this trainer."""
        if self.way == "training":
            options = {"states": {"dealt": self.state}, "durable": False}
            self.checkpoint.save_training(f"{folder}/step-4", self.model, self.optimizer, 4, **options)
            return
        with self._manager(folder, **({"last_save_in_hf": True} if self.way == "hf" else {})) as manager:
            manager.save(4, last_step=self.way == "hf")
            # Of an asynchronous save the rows of then are kept.
            manager.maybe_wait_for_staging()
            for each in (self.table, self.state) if self.way == "async" else ():
                each.store.clear("t")

    def load(self, folder: str) -> None:
        """By the way of this trainer."""
        if self.way == "training":
            options = {"states": {"dealt": self.state}}
            step = self.checkpoint.load_training(f"{folder}/step-4", self.model, self.optimizer, **options)
            assert_equal(step, 4, where="step")
            return
        initial = {"initial_load_path": f"{folder}/step-4", "initial_load_in_hf": True} if self.way == "hf" else {}
        with self._manager(f"{folder}-again" if initial else folder, **initial) as manager:
            manager.load()

    def filled(self) -> list[tuple[_Dealt, int]]:
        """What was saved, and the seed of its rows."""
        return [(self.table, 3)] + ([] if self.way == "hf" else [(self.state, 40)])


def _some_buckets(kvstore: Any, way: str) -> list[Any]:
    every = [kvstore.Buckets(5), kvstore.Buckets(2), kvstore.Buckets(5, "chunk", 3)]
    return every if way == "training" else every[1:2] if way == "manager" else every[:1]


def save_dealt(rank: Any, path: str, way: str) -> None:
    """Save rows that are dealt by each kind of buckets."""
    for number, buckets in enumerate(_some_buckets(rank.component("kvstore"), way)):
        trainer = _Trainer(rank, buckets, way)
        for dealt, seed in trainer.filled():
            dealt.fill(rank, seed)
        with succeeds("a save", where=f"{buckets}, rank {rank.rank} of {rank.world_size}"):
            trainer.save(f"{path}/{number}")


def load_dealt(rank: Any, path: str, way: str, saved_count: int) -> None:
    """Load what so many ranks have saved, over rows of others."""
    for number, buckets in enumerate(_some_buckets(rank.component("kvstore"), way)):
        where = f"{buckets}, of {saved_count} ranks, rank {rank.rank} of {rank.world_size}"
        trainer = _Trainer(rank, buckets, way)
        for dealt, seed in trainer.filled():
            dealt.fill(rank, seed + 100)
        with succeeds("a load", where=where):
            trainer.load(f"{path}/{number}")
        for dealt, seed in trainer.filled():
            dealt.assert_filled(rank, seed, seed + saved_count - 1, where)
        given = {each for name, each in trainer.state.given.items() if name.startswith("t.w")}
        expected = {(torch.Tensor, len(trainer.state.ids(rank)))}
        assert_equal(given, set() if way == "hf" else expected, where=f"{where}: what the state was given")


@requirement(
    "KV-494",
    "What several ranks saved of rows that are dealt by buckets, in a model, a state of training or an HF export, MUST "
    "load on any number of ranks: each gets plain memory of its buckets' rows alone, whole, and the step.",
)
@pytest.mark.parametrize("way", ["training", "manager", "async", "hf"])
def test_dealt_rows(kvstore: Any, checkpoint: Any, rank_pool: Any, tmp_path: Path, way: str) -> None:
    # One to three ranks in both directions, and of the other ways some of them.
    loads = {1: (3,), 2: (1, 2, 3), 3: (2,)} if way == "training" else {2: (2, 3), 3: (1,)}
    for saved_count, loaded_counts in loads.items():
        path = str(tmp_path / f"{saved_count}")
        rank_pool.run(save_dealt, saved_count, path, way)
        for loaded_count in loaded_counts:
            rank_pool.run(load_dealt, loaded_count, path, way, saved_count)


def load_dealt_elsewhere(rank: Any, path: str) -> None:
    """The same where torch makes tensors on another device, if it is not told."""
    for number, buckets in enumerate(_some_buckets(rank.component("kvstore"), "training")):
        trainer, where = _Trainer(rank, buckets, "training"), f"{buckets}, rank {rank.rank}"
        with succeeds("a load", where=where), torch.device("meta"):
            trainer.load(f"{path}/{number}")
        for dealt, seed in trainer.filled():
            dealt.assert_filled(rank, seed, seed + 1, where)


@requirement(
    "KV-511",
    "Rows that are dealt to ranks MUST be loaded as anywhere where torch's default device is another one.",
)
def test_dealt_rows_elsewhere(kvstore: Any, checkpoint: Any, rank_pool: Any, tmp_path: Path) -> None:
    rank_pool.run(save_dealt, 2, str(tmp_path), "training")
    rank_pool.run(load_dealt_elsewhere, 2, str(tmp_path))


class _Plain:
    """A state whose entries are plain tensors, saved by one rank of several as if all were its own."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return {"stores": [self.state]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise AssertionError


def save_for_refusals(rank: Any, path: str) -> None:
    """Rows by five buckets; the same with one row too few, too, and without counts."""
    checkpoint, kvstore = rank.component("checkpoint"), rank.component("kvstore")
    dealt, model = _Dealt(kvstore, kvstore.Buckets(5)), torch.nn.Linear(1, 1)
    dealt.fill(rank, 3)
    state = {name: value.full_tensor() for name, value in dealt.state_dict()["stores"][0].items()}
    rows = {name: value[:-1] if name in ("t.weight", "t.weight_id") else value for name, value in state.items()}
    bare = {name: value for name, value in state.items() if not name.endswith("bucket")}
    given = {"right": dealt, "short": _Plain(rows), "bare": _Plain(bare)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for name, each in given.items():
        checkpoint.save_training(f"{path}/{name}", model, optimizer, 4, states={"dealt": each}, durable=False)


class _Bare(_Dealt):
    """A store that says nothing of its buckets' counts."""

    def state_dict(self) -> dict[str, Any]:
        (found,) = super().state_dict()["stores"]
        return {"stores": [{name: value for name, value in found.items() if not name.endswith("bucket")}]}


def load_refused(rank: Any, path: str) -> None:
    """Loads by other buckets, of rows that do not fit their counts, and of what has none."""
    checkpoint, kvstore = rank.component("checkpoint"), rank.component("kvstore")
    five, model = kvstore.Buckets(5), torch.nn.Linear(1, 1)
    cases: dict[str, tuple[str, Any, Any, tuple[str, ...]]] = {
        "count": ("right", _Dealt(kvstore, kvstore.Buckets(4)), ConfigError, ("got: 4", "expected: 5", "t.bucket")),
        "hash": ("right", _Dealt(kvstore, kvstore.Buckets(5, "chunk", 3)), ConfigError, ("ids [", "t.weight_id")),
        "nobody's": ("right", _Dealt(kvstore, None), UnsupportedError, ("2 ranks", "kvstore.load", ".t.")),
        "short": ("short", _Dealt(kvstore, five), CorruptionError, ("got: 13", "expected: 14", ".t.weight")),
        "bare": ("bare", _Bare(kvstore, five), UnsupportedError, ("2 ranks", "counts", ".t.")),
    }
    for name, (folder, dealt, error, mentions) in cases.items():
        own = dealt.ids(rank)[:1] if dealt.buckets is not None else [5][rank.rank :]
        dealt.store.set("t", ids_of(own), torch.ones(len(own), 6))
        before, optimizer = contents(dealt.store), torch.optim.SGD(model.parameters(), lr=0.1)
        with raises(error, mentions=mentions, where=f"{name}, rank {rank.rank}"):
            checkpoint.load_training(f"{path}/{folder}", model, optimizer, states={"dealt": dealt})
        assert_contents(dealt.store, before, where=f"{name}, rank {rank.rank}: behind a refusal")
    # The others exchange counts of rows, and would wait for a rank that is told no.
    dealt, expected = _Dealt(kvstore, five), MissingCheckpointError if rank.rank else DistributedError
    with raises(expected, mentions=("no checkpoint is there",), where=f"a path of its own, rank {rank.rank}"):
        own_path, optimizer = f"{path}/{'none' if rank.rank else 'right'}", torch.optim.SGD(model.parameters(), lr=0.1)
        checkpoint.load_training(own_path, model, optimizer, states={"dealt": dealt})


def load_alone(rank: Any, path: str) -> None:
    """One rank has the rows of all buckets, whatever these are."""
    checkpoint, kvstore = rank.component("checkpoint"), rank.component("kvstore")
    model, saved = torch.nn.Linear(1, 1), _Dealt(kvstore, kvstore.Buckets(5))
    for buckets in (kvstore.Buckets(4), kvstore.Buckets(5, "chunk", 3), None):
        dealt = _Dealt(kvstore, buckets)
        with succeeds("a load", where=f"{buckets}"):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            checkpoint.load_training(f"{path}/right", model, optimizer, states={"dealt": dealt})
        saved.store = dealt.store
        saved.assert_filled(rank, 3, 3, f"{buckets}")


@requirement(
    "KV-495",
    "Rows that were saved by other buckets, do not fit their counts, or of which nobody says whose they are MUST be "
    "refused by name on every rank of several, with nothing changed; one rank that has all MUST take them.",
)
def test_dealt_otherwise(kvstore: Any, checkpoint: Any, rank_pool: Any, tmp_path: Path) -> None:
    rank_pool.run(save_for_refusals, 1, str(tmp_path))
    rank_pool.run(load_refused, 2, str(tmp_path))
    rank_pool.run(load_alone, 1, str(tmp_path))
