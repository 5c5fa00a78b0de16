"""The optimizer's step and the modules' state: what training needs to go on as if it had never stopped."""

from __future__ import annotations

import json
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from conformance.harness import assert_equal, assert_same_bytes, raises, requirement, succeeds
from conformance.kvstore.cases import FILE, assert_contents, contents, ids_of, random_rows, save, store_of
from conformance.kvstore.model import stepped_body
from twinproof.errors import ConfigError, CorruptionError, FormatError


def _adam(kvstore: Any, **options: Any) -> Any:
    return store_of(kvstore, {name: kvstore.RowLayout(4, optimizer="adam") for name in "ab"}, **options)


def _train(bag: Any, first: int, last: int) -> None:
    for step in range(first, last):
        bag(ids_of([step, 3, -7]).reshape(1, 3)).square().sum().backward()


@requirement(
    "KV-140",
    "The step of each table's optimizer MUST travel in every form of save: files of both forms, deltas, state dicts of "
    "both forms; and training resumed from each MUST give the same rows as training that never stopped.",
)
def test_every_form(kvstore: Any, tmp_path: Path) -> None:
    straight = _adam(kvstore)
    _train(kvstore.KVEmbeddingBag(straight, table="a", lr=0.1), 0, 9)
    for whole in (True, False):
        store = _adam(kvstore, return_whole_row=whole, track_changes=True)
        _train(kvstore.KVEmbeddingBag(store, table="a", lr=0.1), 0, 3)
        base = save(kvstore, store, tmp_path / f"{whole}-base")
        _train(kvstore.KVEmbeddingBag(store, table="a", lr=0.1), 3, 6)
        saved = {form: str(tmp_path / f"{whole}-{form}") for form in ("rows", "separate")}
        for form, path in saved.items():
            save(kvstore, store, Path(path), form=form)
        save(kvstore, store, tmp_path / f"{whole}-delta", since=base.mark)
        state = store.state_dict()
        _train(kvstore.KVEmbeddingBag(store, table="a", lr=0.1), 6, 7)

        def from_delta(other: Any, whole: bool = whole) -> None:
            kvstore.load(other, tmp_path / f"{whole}-base")
            assert_equal(other.step_count("a"), 3, where="step of the base")
            kvstore.load(other, tmp_path / f"{whole}-delta")

        ways: dict[str, Any] = {
            form: lambda other, path=path: kvstore.load(other, path) for form, path in saved.items()
        }
        ways |= {"delta": from_delta, "state dict": lambda other, state=state: other.load_state_dict(state)}
        for way, load in ways.items():
            other = _adam(kvstore)
            load(other)
            assert_equal((other.step_count("a"), other.step_count("b")), (6, 0), where=f"{way}, whole={whole}")
            bag = kvstore.KVEmbeddingBag(other, table="a", lr=0.1)
            assert_equal(bag.step_count, 6, where=f"the module's, {way}")
            _train(bag, 6, 9)
            assert_contents(other, contents(straight), where=f"resumed from {way}, whole={whole}")
        bare = _adam(kvstore)
        kvstore.load(bare, saved["rows"], weights_only=True)
        assert_equal(bare.step_count("a"), 0, where="weights_only")
        state["a.step"] = torch.tensor([[-1]])
        with raises(CorruptionError, where="a step below zero"):
            bare.load_state_dict(state)


@requirement(
    "KV-141",
    "Files of version 3, which tell no step, MUST load and leave the step alone; files of version 4 MUST be the "
    "documented ones, byte for byte.",
)
def test_versions(kvstore: Any, tmp_path: Path) -> None:
    store = store_of(kvstore, kvstore.RowLayout(4, optimizer="sgd"))
    store.set_rows("t", random_rows(store, [7], 1))
    store.set_step_count("t", 12)
    save(kvstore, store, tmp_path / "new")
    raw = (tmp_path / "new" / FILE).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    layout = '{"embedding_dim":4,"optimizer":"sgd","state_dtypes":{},"weight_dtype":"float32"}'
    old = f'{{"bases":{{}},"buckets":[1,"interleave",null],"form":"rows","kind":"full","layouts":{{"t":{layout}}},'
    assert_equal(
        header["__metadata__"],
        {"format": "pt", "kvstore.content": old + '"moments":{},"steps":{"t":12}}', "kvstore.version": "4"},
        where="metadata",
    )
    header["__metadata__"] |= {"kvstore.content": old + '"moments":{}}', "kvstore.version": "3"}
    text = json.dumps(header).encode()
    path = tmp_path / "old.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])
    other = store_of(kvstore, kvstore.RowLayout(4, optimizer="sgd"))
    other.set_step_count("t", 5)
    kvstore.load(other, path)
    assert_contents(other, contents(store), where="version 3")
    assert_equal(other.step_count("t"), 5, where="step that no file told")
    header["__metadata__"] |= {"kvstore.content": old + '"moments":{},"steps":{"t":1.5}}', "kvstore.version": "4"}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])
    with raises(FormatError, where="half a step"):
        kvstore.load(other, path)


class _Model(torch.nn.Module):
    """Two modules over two tables of one store, beside a dense layer."""

    def __init__(self, kvstore: Any, store: Any) -> None:
        super().__init__()
        self.first = kvstore.KVEmbeddingBag(store, table="a", lr=0.1)
        self.second = kvstore.KVEmbedding(store, table="b", lr=0.2)
        self.dense = torch.nn.Linear(4, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        pooled: torch.Tensor = self.dense(self.first(ids) + self.second(ids).sum(dim=1))
        return pooled


def _trained(kvstore: Any, whole: bool, steps: int) -> tuple[Any, _Model]:
    torch.manual_seed(4)
    store = _adam(kvstore, return_whole_row=whole)
    model = _Model(kvstore, store)
    for step in range(steps):
        model(ids_of([step, 5, -8, step]).reshape(2, 2)).sum().backward()
    return store, model


@requirement(
    "KV-142",
    "state_dict of an embedding module MUST hold its table, and load_state_dict MUST leave the table with exactly its "
    "rows and its step, strictly: by hand, by torch's get and set_model_state_dict, and through a checkpoint.",
)
def test_modules(kvstore: Any, checkpoint: Any, tmp_path: Path) -> None:
    for whole in (True, False):
        store, model = _trained(kvstore, whole, 4)
        names = {"weight", "weight_id", "bucket", "metadata", "step", "momentum1", "momentum2"}
        state = model.state_dict()
        expected = {f"{module}.{name}" for module in ("first", "second") for name in names}
        assert_equal(set(state), expected | {"dense.weight", "dense.bias"}, where="names")
        assert_equal(set(get_model_state_dict(model)), set(state), where="names by torch's function")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            writer = checkpoint.HuggingFaceStorageWriter(tmp_path / str(whole), durable=False)
            dcp.save(get_model_state_dict(model), storage_writer=writer, no_dist=True)
            plain = {n: torch.zeros(tuple(v.shape), dtype=v.dtype) for n, v in state.items()}
            reader = checkpoint.HuggingFaceStorageReader(tmp_path / str(whole))
            dcp.load(plain, storage_reader=reader, no_dist=True)
        before = contents(store)
        ways: dict[str, Any] = {
            "by hand": lambda other, state=state: other.load_state_dict(state),
            "by torch": lambda other, state=state: set_model_state_dict(other, dict(state)),
            "from a checkpoint": lambda other, plain=plain: other.load_state_dict(plain),
        }
        for way, load in ways.items():
            other_store, other = _trained(kvstore, whole, 1)
            other_store.set_rows("a", random_rows(other_store, [999], 1, "a"))
            load(other)
            assert_contents(other_store, before, where=f"{way}, whole={whole}")
            assert_equal((other.first.step_count, other.second.step_count), (4, 4), where=way)
        for change, loud in (
            ({"first.weight": None}, "Missing"),
            ({"first.weigth": state["first.weight"]}, "Unexpected"),
        ):
            broken = {n: v for n, v in (dict(state) | change).items() if v is not None}
            other_store, other = _trained(kvstore, whole, 1)
            with raises(RuntimeError, mentions=[loud, next(iter(change))], where="strict"):
                other.load_state_dict(broken)
            other.load_state_dict(broken, strict=False)


@requirement(
    "KV-246",
    "A module's step MUST be the one after its table's last, whoever took that: the module, another one, the store "
    "itself, a load or a number that was set.",
)
def test_steps_of_the_table(kvstore: Any, tmp_path: Path) -> None:
    store, plain = _adam(kvstore), _adam(kvstore)
    modules = [
        kvstore.KVEmbedding(store, table="a", lr=0.1),
        kvstore.KVEmbeddingBag(store, table="a", mode="sum", lr=0.1),
    ]
    ids, grads = ids_of([1, 2, 3]), torch.ones(3, 4)

    def direct(each: Any, step: int) -> None:
        each.apply_gradients("a", ids, grads, 0.1, step)

    def module(number: int) -> None:
        modules[number](ids.reshape(1, 3)).sum().backward()

    def loaded(each: Any) -> None:
        kvstore.load(each, tmp_path / "ck")

    acts: list[tuple[str, Any, Any]] = [
        ("the first", lambda: module(0), lambda: direct(plain, 1)),
        ("the other", lambda: module(1), lambda: direct(plain, 2)),
        ("the first again", lambda: module(0), lambda: direct(plain, 3)),
        ("saved", lambda: save(kvstore, store, tmp_path / "ck"), lambda: None),
        ("the store", lambda: direct(store, 4), lambda: direct(plain, 4)),
        ("after the store", lambda: module(0), lambda: direct(plain, 5)),
        ("loaded", lambda: loaded(store), lambda: loaded(plain)),
        ("after a load", lambda: module(1), lambda: direct(plain, 4)),
        ("set by a module", lambda: setattr(modules[1], "step_count", 40), lambda: plain.set_step_count("a", 40)),
        ("after it was set", lambda: module(0), lambda: direct(plain, 41)),
        ("set in the store", lambda: store.set_step_count("a", 9), lambda: plain.set_step_count("a", 9)),
        ("at last", lambda: module(0), lambda: direct(plain, 10)),
    ]
    for name, act, expected in acts:
        act()
        expected()
        assert_contents(store, contents(plain), where=name)
        assert_equal([m.step_count for m in modules], [plain.step_count("a")] * 2, where=name)


@requirement("KV-248", "The steps of a snapshot MUST stay those of its moment, and be what is saved of it.")
def test_steps_of_a_moment(kvstore: Any) -> None:
    store = _adam(kvstore)
    bag = kvstore.KVEmbeddingBag(store, table="a", lr=0.1)
    _train(bag, 0, 2)
    with store.snapshot() as taken:
        _train(bag, 2, 5)
        store.set_step_count("b", 8)
        assert_equal([taken.step_count(table) for table in "ab"], [2, 0], where="the moment's")
    assert_equal([store.step_count(table) for table in "ab"], [5, 8], where="the store's")


@requirement(
    "KV-257",
    "A module's step MUST have the learning rate, eps and betas that the module has when its backward runs.",
)
def test_hyperparameters_change(kvstore: Any) -> None:
    store, plain = _adam(kvstore), _adam(kvstore)
    ids, values = ids_of([1, 2, 3]), {"lr": 0.1, "eps": 1e-3, "beta1": 0.8, "beta2": 0.9}
    module = kvstore.KVEmbedding(store, table="a", **values)
    changes: list[dict[str, float]] = [{}, {"lr": 0.4}, {"eps": 0.5}, {"beta1": 0.1}, {"beta2": 0.3}, {"lr": 0.0}]
    for step, change in enumerate(changes, start=1):
        out = module(ids).sum()
        for name, value in change.items():
            setattr(module, name, value)
        out.backward()
        values |= change
        options = {name: value for name, value in values.items() if name != "lr"}
        plain.apply_gradients("a", ids, torch.ones(3, 4), values["lr"], step, **options)
        assert_contents(store, contents(plain), where=f"step {step}, {change} is new")


@requirement(
    "KV-274",
    "The state dict of a module MUST deal its rows to buckets as the module's ``buckets`` say at that time.",
)
def test_buckets_of_a_module(kvstore: Any) -> None:
    store = _adam(kvstore)
    store.set("a", ids_of([5, 6, 7, 8, -1]), torch.ones(5, 4))
    for make in (kvstore.KVEmbedding, kvstore.KVEmbeddingBag):
        bag = make(store, table="a", buckets=kvstore.Buckets(2))
        for total in (2, 3):
            bag.buckets = kvstore.Buckets(total)
            expected = store.state_dict(buckets=kvstore.Buckets(total), tables=("a",))
            for name in ("weight_id", "bucket"):
                found = bag.state_dict()[name].full_tensor()
                assert_equal(found.tolist(), expected[f"a.{name}"].full_tensor().tolist(), where=f"{name} of {total}")


@requirement(
    "KV-279",
    "Steps up to 2**63 - 1 MUST be taken and travel in every form; others MUST be refused by name, by files too, and "
    "change nothing.",
)
def test_highest_steps(kvstore: Any, tmp_path: Path) -> None:
    ids, last = ids_of([1, 2]), 2**63 - 1
    for step in (2**31, 2**53 + 1, last - 1, last):
        for way in ("set", "stepped"):
            store, others, where = _adam(kvstore), [_adam(kvstore) for _ in range(2)], f"step {step}, {way}"
            if way == "set":
                store.set_step_count("a", step)
            else:
                store.apply_gradients("a", ids, torch.ones(2, 4), 0.1, step)
            assert_equal(store.step_count("a"), step, where=where)
            save(kvstore, store, tmp_path / "ck")
            kvstore.load(others[0], tmp_path / "ck")
            others[1].load_state_dict(store.state_dict())
            assert_equal([other.step_count("a") for other in others], [step] * 2, where=f"{where}: file, state dict")
    before, module = contents(store), kvstore.KVEmbedding(store, table="a")
    for wrong in (-1, last + 1, 2**70, 1.0, True):
        with raises(ConfigError, mentions=(f"got: {wrong}", str(last)), where=f"{wrong} is set"):
            store.set_step_count("a", wrong)
        with raises(ConfigError, mentions=(f"got: {wrong}", str(last)), where=f"{wrong} is taken"):
            store.apply_gradients("a", ids, torch.ones(2, 4), 0.1, wrong)
    with raises(ConfigError, mentions=(f"got: {last + 1}",), where="the step behind the last"):
        module(ids).sum().backward()
    assert_equal(store.step_count("a"), last, where="after refusals")
    assert_contents(store, before, where="after refusals")
    raw = (tmp_path / "ck" / FILE).read_bytes()
    (tmp_path / "ck" / FILE).write_bytes(raw.replace(str(last).encode(), str(last + 1).encode()))
    with raises(FormatError, mentions=("steps",), where="a file of more steps"):
        kvstore.load(_adam(kvstore), tmp_path / "ck")


def tell_steps(rank: Any, path: str) -> dict[str, Any]:
    """Save rows and steps that other ranks have not, in every way; what each way says of all ranks' rows and steps."""
    kvstore = rank.component("kvstore")
    store, buckets = _adam(kvstore, track_changes=True), kvstore.Buckets(5)
    begin, end = kvstore.rank_buckets(5, rank.world_size, rank.rank)
    keys = [key for key in range(23) if begin <= key % 5 < end]
    for table in "ab":
        store.set(table, ids_of(keys), torch.ones(len(keys), 4))
    store.set_step_count("a", [3, 9, 4][rank.rank])
    store.set_step_count("b", [6, 0, 5][rank.rank])
    reports = [save(kvstore, store, Path(path) / "full", buckets=buckets)]
    store.set("b", ids_of(keys[: rank.rank]), torch.zeros(rank.rank, 4))
    store.delete("b", ids_of(keys[rank.rank : 3]))
    deltas = {"buckets": buckets, "since": reports[0].mark, "form": "separate"}
    reports.append(save(kvstore, store, Path(path) / "delta", **deltas))
    other = _adam(kvstore)
    reports += [kvstore.load(other, Path(path) / name) for name in ("full", "delta")]
    store.set("b", ids_of(keys[rank.rank : 3]), torch.ones(3 - rank.rank, 4))
    found: dict[str, Any] = {"reports": [(report.row_counts, report.deleted_counts) for report in reports]}
    module = kvstore.KVEmbeddingBag(store, table="a", buckets=buckets)
    for way, state in (
        ("views of a moment", store.state_dict(buckets=buckets)),
        ("views", store.state_dict(buckets=buckets, snapshot=False)),
        ("one table", store.state_dict(buckets=buckets, tables=("b",))),
        ("a module", {f"a.{name}": value for name, value in module.state_dict().items()}),
    ):
        places = {name: (lazy.global_row_count, lazy.row_offset, lazy.shape[0]) for name, lazy in state.items()}
        steps = {name: state[name].full_tensor().tolist() for name in state if name.endswith(".step")}
        found[way] = (places, steps)
    return found


@requirement(
    "KV-294",
    "What a save or a state dict says of all ranks together MUST be the same on each: the furthest step that any rank "
    "took, how many rows there are, and places that follow each other; a report MUST be of its own rank alone.",
)
def test_steps_of_ranks(kvstore: Any, rank_pool: Any, tmp_path: Path) -> None:
    by_rank = rank_pool.run(tell_steps, 3, str(tmp_path))
    for rank, told in enumerate(found.pop("reports") for found in by_rank):
        rows = sum(key % 5 in ((0, 1), (2, 3), (4,))[rank] for key in range(23))
        full, delta = ({"a": rows, "b": rows}, {"a": 0, "b": 0}), ({"a": 0, "b": rank}, {"a": 0, "b": 3 - rank})
        assert_equal(told, [full, delta, full, delta], where=f"reports of rank {rank}: saves and loads")
    for way in by_rank[0]:
        told = [found[way] for found in by_rank]
        furthest = {"a.step": [[9]], "b.step": [[6]]}
        expected = {name: furthest[name] for name in told[0][1]}
        assert_equal([steps for _, steps in told], [expected] * 3, where=f"{way}: steps")
        for name in told[0][0]:
            place = 0
            total = {"bucket": 5, "step": 1}.get(name.partition(".")[2], 23)
            for rank, (places, _) in enumerate(told):
                begin = 0 if total == 1 else place
                assert_equal(places[name][:2], (total, begin), where=f"{way}: {name} of rank {rank}")
                place += places[name][2]
            assert_equal(place, 3 if total == 1 else total, where=f"{way}: {name} of all ranks")
    for name in ("full", "delta"):
        steps = kvstore.SavedRows(tmp_path / name).steps
        assert_equal(steps, {"a": 9, "b": 6}, where=f"steps of the {name} save")


@requirement(
    "KV-337",
    "Rows whose weights, or whose gradients, are all zero MUST be stepped by every optimizer as the formula says: LAMB "
    "steps them by what it would scale, and takes no row for one that never moves.",
)
def test_rows_of_zeros(kvstore: Any) -> None:
    for optimizer in ("sgd", "adagrad", "rowwise_adagrad", "adam", "partial_rowwise_adam", "lamb"):
        for dim in (1, 4, 8, 19):
            store = store_of(kvstore, kvstore.RowLayout(dim, optimizer=optimizer))
            ids, layout = ids_of([5, 2]), store.layout("t")
            store.set("t", ids, torch.zeros(2, dim))
            for step in (1, 2, 3):
                # The gradients of the second id are zero, too; in the third step all are.
                grads = torch.linspace(0.5, 1.5, 2 * dim).reshape(2, dim) * torch.tensor([[float(step < 3)], [0.0]])
                before = [bytes(row.tolist()) for row in store.get_rows("t", ids)]
                store.apply_gradients("t", ids, grads, 0.25, step)
                for number, row in enumerate(store.get_rows("t", ids)):
                    expected = stepped_body(layout, before[number][16:], [grads[number]], step, 0.25)
                    where = f"{optimizer}, {dim} columns, step {step}, row {number}"
                    assert_same_bytes(bytes(row.tolist())[16:], expected, where=where)


def _scaled(kvstore: Any, store: Any, buffer: str = "offset") -> Any:
    """A module of a subclass with a parameter, a buffer, a module and further state of its own."""

    class Scaled(kvstore.KVEmbedding):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(store, table="a")
            self.scale, self.head, self.told = torch.nn.Parameter(torch.ones(3)), torch.nn.Linear(2, 2), 0
            self.register_buffer(buffer, torch.zeros(2))

        def get_extra_state(self) -> int:
            return self.told

        def set_extra_state(self, state: int) -> None:
            self.told = state

    return Scaled()


@requirement(
    "KV-353",
    "A subclass of an embedding module MUST save and load its own parameters, buffers, modules and further state "
    "beside the table, hooks before a load MUST be called, and a name of the table's MUST NOT be one of its own.",
)
def test_subclasses(kvstore: Any) -> None:
    module, other = (_scaled(kvstore, _adam(kvstore)) for _ in range(2))
    module(ids_of([1, 5])).sum().backward()
    with torch.no_grad():
        module.scale.fill_(7)
        module.offset.fill_(9)
    module.told = 4
    state = module.state_dict()
    with succeeds("load_state_dict", where="a subclass"):
        other.load_state_dict(state)
    assert_contents(other.store, contents(module.store), where="rows")
    assert_equal(other.step_count, 1, where="step")
    for name, value in (("scale", other.scale), ("offset", other.offset), ("head.weight", other.head.weight)):
        assert_equal(value.tolist(), state[name].tolist(), where=name)
    assert_equal(other.told, 4, where="further state")
    for change, loud in (({"scale": None}, "Missing"), ({"scael": state["scale"]}, "Unexpected")):
        broken = {name: value for name, value in (dict(state) | change).items() if value is not None}
        with raises(RuntimeError, mentions=[loud, next(iter(change))], where="strict"):
            other.load_state_dict(broken)
    # As of a model whose entries had other names.
    renamed = {("rows" if name == "weight" else name): value for name, value in state.items()}
    other.store.clear("a")
    other.register_load_state_dict_pre_hook(lambda _, found, prefix, *rest: found.update(weight=found.pop("rows")))
    with succeeds("load_state_dict", where="of other names"):
        other.load_state_dict(renamed)
    assert_contents(other.store, contents(module.store), where="rows of other names")
    own = {"scale", "offset", "head.weight", "head.bias", "_extra_state"}
    for name in sorted(set(state) - own):
        # A module that has a property of this name refuses the buffer itself.
        if hasattr(type(module), name):
            continue
        taken = _scaled(kvstore, _adam(kvstore), buffer=name)
        for way, call in (("save", taken.state_dict), ("load", partial(taken.load_state_dict, state))):
            with raises(
                ConfigError,
                mentions=[f"'{name}'", "expected: other names", "where: Scaled"],
                where=f"{way}, the table's {name}",
            ):
                call()
        assert_equal(taken.store.size("a"), 0, where=f"rows of a refused load, {name}")


@requirement(
    "KV-417",
    "A load of no rows MUST be a load as any other: a module's, and one that clears, leaves its tables empty; each has "
    "the step that was saved, also where rows stay or other tables bring some; of plain tensors and of views, from "
    "files of both forms, and in both forms of a state dict.",
)
@pytest.mark.parametrize("whole", [True, False])
def test_loads_of_no_rows(kvstore: Any, tmp_path: Path, whole: bool) -> None:
    bag = partial(kvstore.KVEmbeddingBag, table="a", lr=0.1)
    for saved_step in (0, 7):
        empty, where = _adam(kvstore, return_whole_row=whole), f"saved at step {saved_step}"
        empty.set_step_count("a", saved_step)
        empty.set_rows("b", random_rows(empty, [3, 5][: saved_step and 2], 2, "b"))
        plain = {name: value.full_tensor() for name, value in empty.state_dict().items()}
        views, live = empty.state_dict(), empty.state_dict(snapshot=False)
        paths = {form: tmp_path / f"{saved_step} {form}" for form in ("rows", "separate")}
        for form, path in paths.items():
            save(kvstore, empty, path, form=form)
        of_module = bag(empty).state_dict()
        full = {name: value.full_tensor() for name, value in of_module.items()}
        # By name: the tables that are empty then, and the load.
        ways: dict[str, tuple[str, Any]] = {
            "a module": ("a", lambda other, state=of_module: bag(other).load_state_dict(state)),
            "a module, plain": ("a", lambda other, state=full: bag(other).load_state_dict(state)),
            "no strictness": ("a", lambda other, state=full: bag(other).load_state_dict(state, strict=False)),
            "rows": ("", lambda other, path=paths["rows"]: kvstore.load(other, path)),
            "separate": ("", lambda other, path=paths["separate"]: kvstore.load(other, path)),
        }
        for name, state in {"plain": plain, "views": views, "live": live}.items():
            ways[name] = "", lambda other, state=state: other.load_state_dict(state)
            ways[f"{name}, clear"] = "ab", lambda other, state=state: other.load_state_dict(state, clear=True)
        for way, (emptied, load) in ways.items():
            other = _adam(kvstore, return_whole_row=whole)
            for table in "ab":
                other.set_rows(table, random_rows(other, [3, 4], 1, table))
            _train(bag(other), 0, 3)
            before = contents(other)
            with succeeds("a load", where=f"{way}, {where}"):
                load(other)
            expected = before | {table: {} for table in emptied}
            if emptied != "a":
                expected["b"] = expected["b"] | contents(empty)["b"]
            assert_contents(other, expected, where=f"{way}, {where}")
            assert_equal(other.step_count("a"), saved_step, where=f"step after {way}, {where}")


@requirement(
    "KV-430",
    "A step that is taken without its number MUST be the one after the table's last, as torch's optimizers count: "
    "of a fresh table, behind a step with a number, and behind a module's.",
)
def test_steps_without_numbers(kvstore: Any) -> None:
    ids, layout = ids_of([1, 2]), kvstore.RowLayout(4, optimizer="adam")
    store, counted = (store_of(kvstore, layout) for _ in range(2))
    for each in (store, counted):
        each.set("t", ids, torch.zeros(2, 4))
    for number in range(1, 6):
        grads = torch.full((2, 4), float(number))
        store.apply_gradients("t", ids, grads, 0.1)
        counted.apply_gradients("t", ids, grads, 0.1, number)
    assert_equal(store.step_count("t"), 5, where="steps")
    assert_contents(store, contents(counted), where="steps with numbers")
    store.apply_gradients("t", ids, torch.ones(2, 4), 0.1, 9)
    store.apply_gradients("t", ids, torch.ones(2, 4), 0.1)
    assert_equal(store.step_count("t"), 10, where="behind a step with a number")
    module = kvstore.KVEmbedding(store, lr=0.1)
    module(ids).sum().backward()
    store.apply_gradients("t", ids, torch.ones(2, 4), 0.1)
    assert_equal(store.step_count("t"), 12, where="behind a module's step")
