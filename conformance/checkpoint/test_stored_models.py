"""Models with tables of a row store: what a trainer saves of them, it loads into an empty store."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from conformance.checkpoint.trainer import alone
from conformance.harness import Rank, assert_equal, assert_same_tensors, raises, requirement, succeeds
from conformance.kvstore.cases import store_of
from twinproof.errors import UnsupportedError


class _Model(torch.nn.Module):
    """Ids looked up in a store, a layer above."""

    def __init__(self, kvstore: Any) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.store = store_of(kvstore)
        self.embedding = kvstore.KVEmbedding(self.store, lr=0.1)
        self.top = torch.nn.Linear(6, 1)
        self.optimizer = torch.optim.Adam(self.top.parameters(), lr=0.1)

    def step(self, *numbers: int) -> None:
        """Steps of these numbers, each of which looks up other ids."""
        for number in numbers:
            torch.autograd.backward(self.top(self.embedding(torch.tensor([number, number + 1, 77]))).square().sum())
            self.optimizer.step()
            self.optimizer.zero_grad()

    def values(self) -> dict[str, torch.Tensor]:
        """Whole rows, and what else a step changes."""
        ids = self.store.ids("t").sort().values
        found = {"ids": ids, "rows": self.store.get_rows("t", ids), "step": torch.tensor(self.store.step_count("t"))}
        return found | {name: param.detach().clone() for name, param in self.top.named_parameters()}


def _manager(checkpoint: Any, model: _Model, folder: Path, **options: Any) -> Any:
    given = {"interval": 1, "durable": False, "optimizers": model.optimizer, **options}
    return checkpoint.CheckpointManager(folder, model=model, **given)


def _save(checkpoint: Any, model: _Model, folder: Path, how: str) -> None:
    if how == "training":
        checkpoint.save_training(folder / "step-2", model, model.optimizer, 2, durable=False)
    elif how == "states":
        checkpoint.save_training(
            folder / "step-2", model.top, model.optimizer, 2, states={"store": model.store}, durable=False
        )
    else:
        options = {"last_save_model_only": True, "last_save_in_hf": True} if how == "hf" else {}
        with _manager(checkpoint, model, folder, **options) as manager:
            manager.save(2, last_step=how == "hf")


def _load(checkpoint: Any, model: _Model, folder: Path, how: str) -> None:
    if how == "training":
        checkpoint.load_training(folder / "step-2", model, model.optimizer)
    elif how == "states":
        checkpoint.load_training(folder / "step-2", model.top, model.optimizer, states={"store": model.store})
    elif how == "hf":
        options = {"initial_load_path": folder / "step-2", "initial_load_in_hf": True}
        with _manager(checkpoint, model, folder.with_name("another"), **options) as manager:
            manager.load()
    else:
        with _manager(checkpoint, model, folder) as manager:
            manager.load()


@requirement(
    "CKPT-698",
    "What save_training or a manager saved of a model with tables of a row store MUST load into a store that is empty "
    "or has other rows, which then has the saved ones alone: ids, whole rows, the table's step.",
)
@pytest.mark.parametrize("how", ["training", "states", "manager", "hf"])
def test_stored_tables(checkpoint: Any, kvstore: Any, tmp_path: Path, how: str) -> None:
    saved, empty, other = (_Model(kvstore) for _ in range(3))
    saved.step(1, 2)
    other.step(9)
    with alone(), succeeds("a save", where=how):
        _save(checkpoint, saved, tmp_path / "run", how)
    before = saved.values()
    saved.step(3)
    for model in (empty, other):
        with alone(), succeeds("a load", where=how):
            _load(checkpoint, model, tmp_path / "run", how)
        assert_same_tensors(model.values(), before, where=f"{how}: what was loaded")
    if how != "hf":
        empty.step(3)
        assert_same_tensors(empty.values(), saved.values(), where=f"{how}: the step behind")


@requirement(
    "CKPT-975",
    "A row store among the states MUST have the saved rows alone, of all its tables, behind a load that takes steps of "
    "the same program back: rows that came since MUST be gone, by load_training and a manager. Its own load_state_dict "
    "keeps them.",
)
def test_stores_taken_back(checkpoint: Any, kvstore: Any, tmp_path: Path) -> None:
    layouts = {name: kvstore.RowLayout(4, optimizer="adam") for name in ("t", "u")}

    def rows(store: Any) -> dict[str, torch.Tensor]:
        return {f"{name}.{at}": each for name in layouts for at, each in enumerate(_rows_of(store, name))}

    for how in ("training", "manager"):
        store = kvstore.KVStore(layouts, optimizer_in_row=True)
        model = torch.nn.Linear(1, 1)
        given = {"optimizers": torch.optim.SGD(model.parameters(), lr=0.1), "states": {"store": store}}
        folder = tmp_path / how
        store.apply_gradients("t", torch.arange(5), torch.ones(5, 4), 0.1)
        with alone(), checkpoint.CheckpointManager(folder, model=model, interval=1, **given) as manager:
            checkpoint.save_training(folder / "step-1", model, step=1, durable=False, **given)
            before = rows(store)
            for name in layouts:
                store.apply_gradients(name, torch.arange(3, 9), torch.ones(6, 4), 0.1)
            if how == "training":
                checkpoint.load_training(folder / "step-1", model, **given)
            else:
                manager.load(1)
        assert_same_tensors(rows(store), before, where=how)
        state = store.state_dict()
        store.apply_gradients("u", torch.tensor([7]), torch.ones(1, 4), 0.1)
        store.load_state_dict(state)
        assert_equal(store.ids("u").tolist(), [7], where=f"{how}: ids behind the store's own load")


def _rows_of(store: Any, table: str) -> tuple[torch.Tensor, ...]:
    ids = store.ids(table)
    return ids, store.get_rows(table, ids), torch.tensor(store.step_count(table))


def _load_on_ranks(rank: Rank, folder: str) -> None:
    checkpoint, kvstore = rank.component("checkpoint"), rank.component("kvstore")
    model = _Model(kvstore)
    before = model.values()
    with raises(UnsupportedError, mentions=("embedding.", "buckets=", "KVLoadPlanner", "2 ranks")):
        checkpoint.load_training(folder, model, model.optimizer)
    assert_same_tensors(model.values(), before, where="after a refused load")
    assert_equal(len(model.optimizer.state), 0, where="states")


@requirement(
    "CKPT-699",
    "Where several ranks load, rows of a store whose buckets nobody names MUST be refused by name, and the ways to "
    "load them named: each rank would get the rows of all.",
)
def test_stored_tables_on_ranks(checkpoint: Any, kvstore: Any, rank_pool: Any, tmp_path: Path) -> None:
    saved = _Model(kvstore)
    saved.step(1, 2)
    with alone():
        _save(checkpoint, saved, tmp_path, "training")
    rank_pool.run(_load_on_ranks, 2, str(tmp_path / "step-2"))


class _Versioned:
    """A state whose state dict says more of itself than its entries, as those of modules do."""

    def __init__(self) -> None:
        self.found: Any = None

    def state_dict(self) -> OrderedDict[str, Any]:
        """One tensor, and its version."""
        made = OrderedDict(x=torch.ones(2))
        made._metadata = {"": {"version": 3}}  # type: ignore[attr-defined]
        return made

    def load_state_dict(self, state_dict: Any) -> None:
        """Note what is said of it."""
        self.found = getattr(state_dict, "_metadata", None)


@requirement("CKPT-703", "What a state's own state dict says of itself beside its entries MUST come to its load.")
def test_metadata_of_states(checkpoint: Any, kvstore: Any, tmp_path: Path) -> None:
    model, state = _Model(kvstore), _Versioned()
    model.step(1)
    with alone():
        checkpoint.save_training(tmp_path / "ck", model, model.optimizer, 1, states={"own": state}, durable=False)
        checkpoint.load_training(tmp_path / "ck", model, model.optimizer, states={"own": state})
    assert_equal(state.found, {"": {"version": 3}}, where="what the state was told")


class _Nested:
    """A state whose entries stand ``depth`` dicts deep: rows of stores, tensors, numbers, text, and lists of them."""

    def __init__(self, kvstore: Any, depth: int, seed: int | None = None) -> None:
        self.path: list[Any] = ["rows", "rows", "7"][:depth]
        self.stores = [store_of(kvstore) for _ in range(3)]
        self.values: dict[str, Any] = {"x": torch.zeros(2), "n": 0, "text": "", "in list": torch.zeros(3), "deep": 0}
        if seed is not None:
            for number, store in enumerate(self.stores):
                store.apply_gradients("t", torch.tensor([number, 9]), torch.ones(2, 6), 0.1, seed)
            self.values = {"x": torch.ones(2) * seed, "n": seed, "text": f"{seed}"}
            self.values |= {"in list": torch.arange(3.0) + seed, "deep": -seed}

    def state_dict(self) -> dict[str, Any]:
        """All of it, under ``path``."""
        first, second, third = (store.state_dict() for store in self.stores)
        several = [second, {"inner": [third], "deep": self.values["deep"]}, self.values["in list"]]
        found: dict[Any, Any] = {"store": first, "several": several}
        found |= {key: self.values[key] for key in ("x", "n", "text")}
        for key in reversed(self.path):
            found = {key: found}
        return found

    def load_state_dict(self, state_dict: Any) -> None:
        """Take all of it from where it stands."""
        for key in self.path:
            state_dict = state_dict[key]
        second, other, in_list = state_dict["several"]
        for store, found in zip(self.stores, (state_dict["store"], second, *other["inner"]), strict=True):
            store.load_state_dict(found)
        self.values = {"in list": in_list, "deep": other["deep"], **{n: state_dict[n] for n in ("x", "n", "text")}}

    def names(self, state: str) -> set[str]:
        """Those that torch gives the entries, in a checkpoint that knows the state by this name."""
        rows = self.stores[0].state_dict().keys()
        entries = ["x", "n", "text", "several.1.deep", "several.2"]
        places = ("store", "several.0", "several.1.inner.0")
        return {".".join(map(str, [state, *self.path, each])) for each in entries} | {
            ".".join(map(str, [state, *self.path, place, row])) for place in places for row in rows
        }

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything as tensors."""
        found = {
            name: torch.as_tensor(len(each) if isinstance(each, str) else each) for name, each in self.values.items()
        }
        for number, store in enumerate(self.stores):
            ids = store.ids("t").sort().values
            found |= {f"{number}.ids": ids, f"{number}.rows": store.get_rows("t", ids)}
        return found


def _with_nested(checkpoint: Any, folder: Path, how: str, nested: _Nested, *, load: bool) -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    states = {"side.car": nested}
    if how == "manager":
        options = {"interval": 1, "durable": False, "optimizers": optimizer, "states": states}
        with checkpoint.CheckpointManager(folder, model=model, **options) as manager:
            manager.load() if load else manager.save(1)
    elif load:
        checkpoint.load_training(folder / "step-1", model, optimizer, states=states)
    else:
        checkpoint.save_training(folder / "step-1", model, optimizer, 1, states=states, durable=False)


@requirement(
    "CKPT-739",
    "What stands in a state's dicts and lists, however deep, MUST be saved under the parts of its path joined by dots, "
    "and loaded from there: rows of a store, tensors, numbers, text.",
)
@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_nested_states(checkpoint: Any, kvstore: Any, tmp_path: Path, depth: int) -> None:
    for how in ("training", "manager"):
        saved, empty, other = (_Nested(kvstore, depth, seed) for seed in (4, None, 9))
        with alone(), succeeds("a save", where=how):
            _with_nested(checkpoint, tmp_path / how, how, saved, load=False)
        found = dcp.FileSystemReader(tmp_path / how / "step-1").read_metadata().state_dict_metadata
        names = {name for name in found if name.startswith("side.car.")}
        assert_equal(names, saved.names("side.car"), where=f"{how}, {depth} dicts deep: names")
        for target in (empty, other):
            with alone(), succeeds("a load", where=f"{how}, {depth} dicts deep"):
                _with_nested(checkpoint, tmp_path / how, how, target, load=True)
            assert_same_tensors(target.tensors(), saved.tensors(), where=f"{how}, {depth} dicts deep")
