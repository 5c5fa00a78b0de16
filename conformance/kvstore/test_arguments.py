"""What a call is given: any number of ids, in any form that ids have; zeros; options by table; the caller's memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.harness import assert_equal, raises, requirement, succeeds
from conformance.kvstore.cases import (
    Clock,
    assert_bits,
    assert_contents,
    contents,
    ids_of,
    random_rows,
    save,
    store_of,
)
from twinproof.errors import ConfigError

KEYS = [5, -2, 2**31 - 1, 0, -(2**31), 17]
Ask = Callable[[torch.Tensor], torch.Tensor]


def _filled(kvstore: Any, **options: Any) -> Any:
    store = store_of(kvstore, kvstore.RowLayout(5, torch.float16, "adam"), **options)
    store.set_rows("t", random_rows(store, KEYS, 3))
    return store


def _of_rows(name: str, source: Any) -> dict[str, Ask]:
    """What any rows are asked by id."""
    slot = source.layout("t").state_slots["momentum2"]
    return {
        f"weights of {name}": lambda ids: source.get("t", ids),
        f"rows of {name}": lambda ids: source.get_rows("t", ids),
        f"some bytes of {name}": lambda ids: source.get_rows("t", ids, offset_bytes=3, width_bytes=20),
        f"a state of {name}": lambda ids: source.get_state("t", "momentum2", ids).reshape(-1, slot.count),
        f"words of {name}": lambda ids: source.metadata("t", ids),
        f"scores of {name}": lambda ids: source.get_scores("t", ids),
        f"which there are in {name}": lambda ids: source.contains("t", ids),
    }


def _asks(kvstore: Any, folder: Path) -> dict[str, Ask]:
    """Everything that can be asked of a batch of ids, and whose answer has an entry for each."""
    store = _filled(kvstore)
    save(kvstore, store, folder / "ck", buckets=kvstore.Buckets(3))
    view = kvstore.KVTensor(store, ids_of(KEYS), "weight")
    wrapper = kvstore.KVTensorWrapper([6, 5], torch.float16, 0, sorted_indices=ids_of(KEYS))
    wrapper.set_dram_db_wrapper(store)
    embedding, bag = kvstore.KVEmbedding(store), kvstore.KVEmbeddingBag(store)
    interleaved, chunked = kvstore.Buckets(3), kvstore.Buckets(2, "chunk", 2**40)
    asks = {
        "a view of them": lambda ids: kvstore.KVTensor(store, ids, "momentum1").full_tensor(),
        "a view of others": view.get_weights_by_ids,
        "a copied view": kvstore.KVTensor(store, ids_of(KEYS)).clone().get_weights_by_ids,
        "a wrapper": wrapper.get_weights_by_ids,
        "an embedding": lambda ids: embedding(ids).detach(),
        "an embedding of columns": lambda ids: embedding(ids.reshape(-1, 1)).detach()[:, 0],
        "bags of one": lambda ids: bag(ids.reshape(-1, 1)).detach(),
        "bags by offsets": lambda ids: bag(ids, torch.arange(ids.numel())).detach(),
        "buckets": lambda ids: kvstore.bucket_of(ids, interleaved),
        "buckets of chunks": lambda ids: kvstore.bucket_of(ids.abs().clamp_min(0), chunked),
    }
    for name, source in (
        ("a store", store),
        ("a moment", store.snapshot()),
        ("saved rows", kvstore.SavedRows(folder / "ck")),
        ("rows in memory", kvstore.KVTensor(store, ids_of(KEYS)).clone().source),
    ):
        asks |= _of_rows(name, source)
    return asks


@requirement(
    "KV-301",
    "What is asked of a batch of ids MUST be what is asked of each of them alone, of none an empty answer of the same "
    "width and dtype, whichever dtype and shape of ids the call takes.",
)
def test_each_alone(kvstore: Any, tmp_path: Path) -> None:
    for name, ask in _asks(kvstore, tmp_path).items():
        every = ask(ids_of(KEYS))
        for dtype in (torch.int64, torch.int32):
            for keys in ([], [5], [17, 17], [0, -2, 5], KEYS[::-1]):
                where = f"{name}: {keys} as {dtype}"
                expected = every[[KEYS.index(key) for key in keys]]
                with succeeds("asking", where=where):
                    found = ask(torch.tensor(keys, dtype=dtype))
                assert_bits(found, expected, where=where)
    for keys in ([], [5], [17, 17], [0, -2, 5]):
        for shape in ((-1,), (-1, 1)):
            for dtype in (torch.int64, torch.int32):
                where = f"by bucket: {keys} as {shape} of {dtype}"
                with succeeds("sorting", where=where):
                    order, counts = kvstore.sort_ids_by_bucket(torch.tensor(keys, dtype=dtype).reshape(shape), 0, 2, 2)
                expected = ids_of(sorted(keys, key=lambda key: (key % 2, key)))[:, None]
                assert_bits(order, expected, where=where)
                totals = [sum(key % 2 == bucket for key in keys) for bucket in (0, 1)]
                assert_equal(counts.tolist(), [[total] for total in totals], where=where)


@requirement(
    "KV-302",
    "A number that is given as zero, and a list that is given as empty, MUST be that, and not one that was left out.",
)
def test_zeros(kvstore: Any, tmp_path: Path) -> None:
    store, ids = _filled(kvstore, track_changes=True), ids_of(KEYS)
    store.set_step_count("t", 0)
    before, saved = contents(store), tmp_path / "ck"
    assert_equal(tuple(store.get_rows("t", ids, offset_bytes=4, width_bytes=0).shape), (6, 0), where="no bytes")
    nothing = torch.zeros(6, 0, dtype=torch.uint8)
    with succeeds("get_rows", where="no bytes into memory of none"):
        store.get_rows("t", ids, width_bytes=0, out=nothing)
    assert_bits(store.get("t", ids, count=0), torch.zeros(6, 5, dtype=torch.float16), where="no weights read")
    store.set("t", ids, torch.ones(6, 5, dtype=torch.float16), count=0)
    assert_contents(store, before, where="no weights written")
    assert_equal(store.ids("t", 0, 0).tolist(), [0], where="ids from 0 to 0")
    assert_equal(kvstore.sort_ids_by_bucket(ids[:0], 0, 0, 4)[1].shape[0], 0, where="buckets behind none")
    save(kvstore, store, saved, since=0)
    assert_equal(kvstore.SavedRows(saved).kind, "delta", where="since the beginning")
    save(kvstore, store, tmp_path / "full", buckets=kvstore.Buckets(3))

    def trained() -> Any:
        other = store_of(kvstore, kvstore.RowLayout(5, torch.float16, "adam"))
        other.set_step_count("t", 12)
        return other

    state = store.state_dict()
    plain = {name: value.full_tensor() for name, value in state.items()}
    ways: dict[str, Callable[[Any], Any]] = {
        "a file": lambda other: kvstore.load(other, tmp_path / "full"),
        "a state dict": lambda other: other.load_state_dict(state),
        "plain tensors": lambda other: other.load_state_dict(plain),
        "a module's": lambda other: kvstore.KVEmbedding(other).load_state_dict(kvstore.KVEmbedding(store).state_dict()),
    }
    for name, load in ways.items():
        other = trained()
        load(other)
        assert_equal(other.step_count("t"), 0, where=f"no steps, from {name}")
    none = trained()
    nothings: dict[str, Callable[[], Any]] = {
        "no buckets of a file": lambda: kvstore.load(none, tmp_path / "full", owned=(0, 0)).row_counts["t"],
        "no tables of a file": lambda: sum(kvstore.load(none, tmp_path / "full", tables=()).row_counts.values()),
        "no tables of a state dict": lambda: sum(none.load_state_dict(state, tables=()).values()),
        "no tables in a state dict": lambda: len(store.state_dict(tables=())),
    }
    for name, act in nothings.items():
        assert_equal((act(), none.size("t")), (0, 0), where=name)
    hyper = {"eps": 1.0, "beta1": 0.0, "beta2": 0.0}
    for lr in (0.0, 0.5):
        module, direct = _filled(kvstore), _filled(kvstore)
        kvstore.KVEmbedding(module, lr=lr, **hyper)(ids).sum().backward()
        direct.apply_gradients("t", ids, torch.ones(6, 5), lr, 1, **hyper)
        assert_contents(module, contents(direct), where=f"a module of lr {lr}")


def _by_table(kvstore: Any) -> dict[str, tuple[Any, Any, Callable[[Any, str], Any]]]:
    """Options by table: two values, and what shows of a store and a table which of them it has."""
    policy, ids = kvstore.EvictionPolicy, ids_of([1, 2, 3])

    def rows_left(store: Any, table: str) -> Any:
        store.set(table, ids, torch.ones(3, 4))
        return store.size(table)

    def evicted(store: Any, table: str) -> Any:
        store.set(table, ids, torch.ones(3, 4))
        return store.evict(table)[table].evicted_count

    return {
        "capacity": (3, 5, lambda store, table: (rows_left(store, table), store.options.capacities[table])),
        "eviction": (policy.score(1), policy.count(9), evicted),
        "initializer": (
            kvstore.Initializer.zeros(),
            kvstore.Initializer.uniform(1, 2),
            lambda store, table: bool(store.get(table, ids).any()),
        ),
    }


@requirement(
    "KV-303",
    "An option by table MUST name every table and no other, or be refused, and give each table its own value in "
    "whatever order it names them; one value MUST be every table's.",
)
def test_options_by_table(kvstore: Any) -> None:
    layouts = {"a": kvstore.RowLayout(4), "b": kvstore.RowLayout(4)}
    for name, (first, second, look) in _by_table(kvstore).items():

        def told(value: Any, name: str = name, look: Callable[[Any, str], Any] = look) -> list[Any]:
            store = store_of(kvstore, layouts, **{name: value})
            return [look(store, table) for table in "ab"]

        alone = [told(value)[0] for value in (first, second)]
        assert_equal(told(first), [alone[0]] * 2, where=f"{name}: one value for all")
        for given in ({"a": first, "b": second}, {"b": second, "a": first}):
            assert_equal(told(given), alone, where=f"{name} for {[*given]}")
        for wrong in ({}, {"a": first}, {"b": first}, {"a": first, "c": first}, {"a": first, "b": first, "c": first}):
            with raises(ConfigError, mentions=(f"where: {name}", f"got: {sorted(wrong)}"), where=f"{name}: {[*wrong]}"):
                store_of(kvstore, layouts, **{name: wrong})
    with raises(ConfigError, mentions=("where: cache_rows",), where="cache_rows of no table"):
        store_of(kvstore, layouts, cache_rows={})


@requirement(
    "KV-304",
    "Mappings and lists that a store, a layout or a wrapper was made of MUST be copied: what the caller does with them "
    "afterwards MUST change nothing.",
)
def test_mappings_are_copied(kvstore: Any, tmp_path: Path) -> None:
    clock, keys = Clock(), ids_of([1, 2, 3])

    def made(is_changed: bool) -> tuple[Any, Any]:
        dtypes = {"momentum1": torch.float16}
        layouts = {"t": kvstore.RowLayout(4, optimizer="adam", state_dtypes=dtypes)}
        options = {
            "capacity": {"t": 3},
            "eviction": {"t": kvstore.EvictionPolicy.count(2)},
            "initializer": {"t": kvstore.Initializer.zeros()},
        }
        shape = [3, 4]
        store = kvstore.KVStore(layouts, optimizer_in_row=True, clock=clock, track_changes=True, **options)
        wrapper = kvstore.KVTensorWrapper(shape, torch.float32, 1)
        wrapper.set_dram_db_wrapper(store)
        if is_changed:
            for given in (layouts, *options.values(), dtypes):
                given.clear()
            shape[:] = [1, 2]
        return store, wrapper

    def told(store: Any, wrapper: Any, folder: Path) -> dict[str, Any]:
        found: dict[str, Any] = {"initial": store.get_rows("t", ids_of([9])).tolist(), "tables": store.tables}
        store.set("t", ids_of([7]), torch.ones(1, 4))
        store.apply_gradients("t", keys, torch.ones(3, 4), 0.5)
        found |= {"rows in a full table": contents(store), "by the wrapper": wrapper.narrow(0, 0, 3).tolist()}
        store.set("t", keys[:1], torch.ones(1, 4))
        for whole in (True, False):
            store.set_return_whole_row(whole)
            state = {name: value.full_tensor() for name, value in store.state_dict().items()}
            found[f"loaded back, whole {whole}"] = (store.load_state_dict(state), contents(store))
            states = {name: value.tolist() for name, value in state.items()}
            found[f"state dict, whole {whole}"] = states
        save(kvstore, store, folder)
        found["loaded"] = (kvstore.load(store, folder).row_counts, contents(store))
        found["evicted"] = (store.evict()["t"].evicted_count, contents(store))
        return found

    expected = told(*made(False), tmp_path / "left")
    store, wrapper = made(True)
    with succeeds("using it", where="a store whose options were emptied by the caller"):
        found = told(store, wrapper, tmp_path / "changed")
    for name, value in expected.items():
        assert_equal(found[name], value, where=name)


@requirement(
    "KV-305",
    "Memory of the caller's that a read fills MUST count as changed, so that autograd refuses to go on with what it "
    "was; what is only looked at MUST NOT.",
)
def test_filled_memory_counts_as_changed(kvstore: Any, tmp_path: Path) -> None:
    store = _filled(kvstore)
    save(kvstore, store, tmp_path / "ck")
    ids, row_bytes = ids_of(KEYS), store.layout("t").row_bytes
    view = kvstore.KVTensor(store, ids)
    for name, source in (
        ("a store", store),
        ("a moment", store.snapshot()),
        ("saved rows", kvstore.SavedRows(tmp_path / "ck")),
        ("rows in memory", view.clone().source),
    ):
        weights, rows = torch.zeros(6, 5, dtype=torch.float16), torch.zeros(6, row_bytes, dtype=torch.uint8)
        factor = torch.ones(6, 5, dtype=torch.float16, requires_grad=True)
        product: Any = (factor * weights).sum()
        source.get("t", ids, out=weights)
        source.get_rows("t", ids, out=rows)
        with raises(RuntimeError, mentions=("inplace",), where=f"backward through what {name} wrote over"):
            product.backward()
        assert_equal(rows._version > 0, True, where=f"rows of {name}")
    given = {
        "ids": ids.clone(),
        "weights": torch.ones(6, 5, dtype=torch.float16),
        "rows": random_rows(store, KEYS, 4),
        "values": torch.ones(6, 5),
    }
    versions = {name: value._version for name, value in given.items()}
    store.set("t", given["ids"], given["weights"])
    store.set_rows("t", given["rows"])
    store.set_state("t", "momentum1", given["ids"], given["values"])
    store.apply_gradients("t", given["ids"], given["values"], 0.1)
    view.set_range(0, 0, 6, given["rows"])
    store.get("t", given["ids"])
    store.delete("t", given["ids"])
    assert_equal({name: value._version for name, value in given.items()}, versions, where="what is only looked at")


@requirement(
    "KV-309",
    "A call MUST ask the clock at most once for a table, before it changes anything: all its rows have one moment, "
    "however many are written at once, and where the clock raises nothing is done.",
)
def test_one_moment(kvstore: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twinproof.kvstore.statedict.LOAD_CHUNK_ROWS", 2)
    clock, ids, halves = _Hurrying(), ids_of(KEYS), torch.ones(6, 5, dtype=torch.float16)
    source = _filled(kvstore)
    state = {name: value for name, value in source.state_dict().items() if name != "t.metadata"}
    store = store_of(kvstore, kvstore.RowLayout(5, torch.float16, "adam"), clock=clock, track_changes=True)
    store.set_rows("t", random_rows(store, [1, 2, 50], 1))
    view, embedding = kvstore.KVTensor(store, ids, "weight"), kvstore.KVEmbedding(store)
    asked: dict[str, Callable[[], Any]] = {
        "set": lambda: store.set("t", ids, halves),
        "set_state": lambda: store.set_state("t", "momentum1", ids, halves.float()),
        "a view": lambda: view.set_range(0, 0, 6, halves),
        "apply_gradients": lambda: store.apply_gradients("t", ids, halves.float(), 0.1, 7),
        "a module": lambda: embedding(ids).sum().backward(),
        "load_state_dict": lambda: store.load_state_dict(state),
        "load_state_dict, clear": lambda: store.load_state_dict(state, clear=True),
        "evict": lambda: store.evict("t", policy=kvstore.EvictionPolicy.ttl(1)),
    }
    for name, act in asked.items():
        for is_new in (True, False):
            if is_new:
                store.delete("t", ids)
            before = (contents(store), store.mark(), store.step_count("t"))
            clock.left = 0
            with raises(_Stopped, where=f"{name}: a clock that raises"):
                act()
            found = (contents(store), store.mark(), store.step_count("t"))
            assert_equal(found, before, where=f"{name}: where the clock raises")
            clock.left = 1
            with succeeds(name, where="a clock that can be asked once"):
                act()
            if name != "evict":
                stamps = {int(word) & 0xFFFFFFFF for word in store.metadata("t", ids)[:, 0]}
                # Columns of rows that are there leave their moments alone.
                is_stamped = is_new or name not in ("set_state", "a view")
                assert_equal(not is_stamped or stamps == {clock.now}, True, where=f"{name}: moments {stamps}")


class _Stopped(Exception):
    """What a clock raises."""


class _Hurrying:
    """A clock of which no two answers are the same; it can be asked ``left`` times."""

    def __init__(self) -> None:
        self.now, self.left = 1000, 0

    def __call__(self) -> int:
        if not self.left:
            raise _Stopped
        self.left -= 1
        self.now += 1
        return self.now


def _odd(values: torch.Tensor) -> torch.Tensor:
    """The same values, contiguous to torch, with strides that no dense tensor has where a dimension has one element."""
    strides = [
        stride if size > 1 and values.numel() else 7 for size, stride in zip(values.shape, values.stride(), strict=True)
    ]
    return torch.zeros(values.numel(), dtype=values.dtype).as_strided(tuple(values.shape), strides).copy_(values)


def _by_strides(kvstore: Any, layout: Any, keys: list[int], of: Callable[[torch.Tensor], torch.Tensor]) -> list[Any]:
    """What all verbs that take tensors do with those that ``of`` makes: each one's answer, or what it wrote."""
    count, width, found = len(keys), layout.embedding_dim, list[Any]()
    store = store_of(kvstore, layout)
    ids, view = of(ids_of(keys)), kvstore.KVTensor(store, ids_of(keys), "weight")
    rows = random_rows(store, keys, 3)
    weights, slot = torch.arange(count * width).float().reshape(count, width) + 1, layout.state_slots["momentum1"]
    state = torch.full((count, slot.count), 0.5)
    wrapper = kvstore.KVTensorWrapper([count, width], torch.float32, 0, sorted_indices=ids_of(keys))
    wrapper.set_dram_db_wrapper(store)
    words = torch.full((count, 1), 3 << 32 | 9)
    loaded = {"t.weight": of(rows), "t.weight_id": of(ids_of(keys)[:, None])}
    writes: dict[str, Callable[[], object]] = {
        "set": lambda: store.set("t", ids, of(weights)),
        "set_state": lambda: store.set_state("t", "momentum1", ids, of(state)),
        "apply_gradients": lambda: store.apply_gradients("t", ids, of(weights), 0.5),
        "set_scores": lambda: store.set_scores("t", ids, of(torch.ones(count))),
        "set_metadata": lambda: store.set_metadata("t", ids, of(words)),
        "set_rows": lambda: store.set_rows("t", of(rows)),
        "place": lambda: store.place("t", ids, of(weights * 2), 16),
        "a view": lambda: view.set_range(0, 0, count, of(weights * 3)),
        "a wrapper": lambda: wrapper.set_range(0, 0, count, of(weights * 4)),
        "load_state_dict": lambda: store.load_state_dict(loaded),
    }
    for name, write in writes.items():
        with succeeds(name, where=f"{count} x {width}"):
            write()
        found.append((name, contents(store)))
    for first, row_width in ((0, layout.row_bytes), (16, 1), (8, 8)):
        out = of(torch.zeros(count, row_width, dtype=torch.uint8))
        with succeeds("get_rows", where=f"{count} rows, {row_width} bytes into memory of the caller's"):
            told = store.get_rows("t", ids, offset_bytes=first, width_bytes=row_width, out=out)
        found.append((f"get_rows of {row_width}", told is out, out.tolist()))
    for used in {count, count // 2}:
        out = of(torch.zeros(count, width))
        with succeeds("get", where=f"{used} of {count} x {width} into memory of the caller's"):
            told = store.get("t", ids, out=out, count=used)
        found.append((f"get of {used}", told is out, out.tolist()))
    return found


@requirement(
    "KV-487",
    "A tensor that torch calls contiguous MUST be taken as a dense one is, read from and written to, whatever strides "
    "it has in dimensions of one element, or where it has no element.",
)
@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize("keys", [[], [7], [7, 2, -1]])
def test_odd_strides(kvstore: Any, keys: list[int], width: int) -> None:
    for made in (_odd(torch.ones(3, 1)), _odd(torch.ones(1, 3)), _odd(torch.ones(0, 3))):
        assert_equal(made.is_contiguous(), True, where=f"{tuple(made.shape)} by {made.stride()}")
    layout = kvstore.RowLayout(width, optimizer="rowwise_adagrad")
    found, expected = (_by_strides(kvstore, layout, keys, of) for of in (_odd, torch.Tensor.clone))
    for got, wanted in zip(found, expected, strict=True):
        assert_equal(got, wanted, where=f"{wanted[0]}, {len(keys)} x {width}")
