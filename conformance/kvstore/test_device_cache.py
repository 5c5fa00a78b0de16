"""Rows in host memory, and the cache in front of them: the same rows, wherever each of them is.

The CUDA here is made of the CPU, and its stores prefetch before every verb, so that rows move all the time. The whole
suite runs on such stores with ``--twinproof-device simt-host``.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import settings

from conformance.harness import assert_equal, examples, raises, requirement, run_machine
from conformance.kvstore.cases import assert_bits, contents, ids_of, random_rows, store_of, weights_of
from conformance.kvstore.orders import OrdersMachine
from twinproof.errors import ConfigError, ShapeError, StoreClosedError, UnsupportedError

NEEDS = ("operators",)


def _cached(kvstore: Any) -> Any:
    """The component with rows in host memory, behind a cache."""
    from conformance.kvstore.simt import CachedStore

    names = ("Buckets", "EvictionPolicy", "KVTensor", "RowLayout", "SavedRows", "load", "save")
    return SimpleNamespace(KVStore=CachedStore, **{name: getattr(kvstore, name) for name in names})


@requirement(
    "KV-171",
    "A memory of rows that there is not, rows in host memory of a store that is no GPU's, and a cache without such "
    "rows or of no number of them MUST be refused by name.",
)
def test_refused_options(kvstore: Any) -> None:
    wrong: list[dict[str, Any]] = [
        {"row_memory": "ssd", "device": "cuda"},
        {"row_memory": None},
        {"row_memory": "host"},
        {"row_memory": "host", "device": "cpu", "cache_rows": 16},
        {"cache_rows": 16},
        {"cache_rows": {"t": 16}},
        {"cache_rows": {"u": 0}},
        *({"cache_rows": count, "row_memory": "host", "device": "cuda"} for count in (-1, 1.5, True, "16", 2**31 + 1)),
    ]
    for options in wrong:
        with raises(ConfigError, where=f"{options}") as refused:
            store_of(kvstore, **options)
        text = str(refused.error)
        assert_equal("memory" in text or "cache" in text or "rows" in text, True, where=f"{options}: {text}")
    assert_equal(store_of(kvstore, row_memory="device", cache_rows=0).size("t"), 0, where="what a store has anyway")


@requirement(
    "KV-172",
    "A store with rows in host memory behind a cache MUST hold exactly the rows of a dictionary after any program, "
    "with rows on their way between the two memories all the time.",
    needs=NEEDS,
)
def test_any_program(kvstore: Any, tmp_path: Path) -> None:
    stores = [store_of(component) for component in (_cached(kvstore), kvstore)]
    for store in stores:
        store.set_rows("t", random_rows(store, [*range(60), 1, 3, 2], 1))
        # Rows that are brought near, and those that make room for them.
        for begin in (0, 20, 40, 10, 30):
            store.prefetch("t", ids_of(range(begin, begin + 12)))
    assert_equal(contents(stores[0]), contents(stores[1]), where="rows that came and went")

    class Machine(OrdersMachine):
        pass

    Machine.kvstore, Machine.root = _cached(kvstore), tmp_path
    run_machine(Machine, settings=settings(examples(12), stateful_step_count=15))


@pytest.mark.night
@requirement(
    "KV-173",
    "With row_memory host the rows of a store MUST lie in pinned memory of the host, and of the device's memory the "
    "store MUST take what index and cache need; a cache of every size MUST give the same rows.",
    needs=NEEDS,
)
def test_memory(kvstore: Any) -> None:
    from conformance.kvstore.simt import SimtHandle, held_bytes

    layout, count = kvstore.RowLayout(500, optimizer="adagrad"), 6000
    ids, expected = ids_of(range(count)), None
    # What others left behind is not freed while memory is counted.
    gc.collect()
    for cache_rows in (None, 0, 1, 500):
        before = [held_bytes(pinned=pinned) for pinned in (False, True)]
        store = _made(kvstore, layout, cache_rows, SimtHandle)
        store.set("t", ids, torch.arange(count * 500).reshape(count, 500).to(torch.float32))
        for begin in range(0, count, 700):
            store.prefetch("t", ids[begin : begin + 700])
            store.apply_gradients("t", ids[begin : begin + 800], torch.ones(len(ids[begin : begin + 800]), 500), 0.5)
        on_device, on_host = (held_bytes(pinned=p) - b for p, b in zip((False, True), before, strict=True))
        rows, where = count * layout.row_bytes, f"cache {cache_rows}"
        if cache_rows is None:
            assert_equal((on_device > rows, on_host < 2**16), (True, True), where=f"{where}: {on_device}, {on_host}")
        else:
            lines = -(-cache_rows // 16) * 16 * (layout.row_bytes + 64)
            # 14 bytes an entry and half of the entries free at least, 4 bytes a slot, and slabs that are not full.
            most = lines + 64 * count + 2**18
            assert_equal((on_device <= most, on_host >= rows), (True, True), where=f"{where}: {on_device}, {on_host}")
            assert_equal(on_device >= lines, True, where=f"{where}: the cache is there")
        found = store.get_rows("t", ids)
        expected = found if expected is None else expected
        assert_bits(found[:, 16:], expected[:, 16:], where=f"{where}: rows")
        store.close()


def _made(kvstore: Any, layout: Any, cache_rows: int | None, handle: Any) -> Any:
    """A store with its rows on the device, or on the host behind a cache of so many."""
    from conformance.kvstore.simt import store_in

    options = {} if cache_rows is None else {"row_memory": "host", "cache_rows": {"t": cache_rows}}
    return store_in({"t": layout}, handle, options)


@requirement(
    "KV-174",
    "prefetch MUST change nothing that a store tells: rows, ids, headers, mark, changes, counters; it MUST insert "
    "nothing, and refuse what is no ids, an unknown table and a closed store by name.",
)
def test_prefetch(kvstore: Any) -> None:
    store = store_of(kvstore, track_changes=True)
    store.set("t", ids_of(range(40)), weights_of(store, 40, 1))
    before = contents(store), store.mark(), store.stats(), [found.tolist() for found in store.changes("t", 0)]
    for ids in (range(40), range(20, 60), [7, 7, 7, -1], [], range(100, 110)):
        store.prefetch("t", ids_of(ids))
        store.prefetch("t", ids_of(ids).to(torch.int32))
    after = contents(store), store.mark(), store.stats(), [found.tolist() for found in store.changes("t", 0)]
    for name, found, expected in zip(("rows", "mark", "counters", "changes"), after, before, strict=True):
        assert_equal(found, expected, where=name)
    wrong: list[tuple[type[Exception], Callable[[], Any]]] = [
        (ConfigError, lambda: store.prefetch("u", ids_of([1]))),
        (ShapeError, lambda: store.prefetch("t", ids_of([1]).reshape(1, 1))),
        (UnsupportedError, lambda: store.prefetch("t", torch.ones(2))),
    ]
    for error, call in wrong:
        with raises(error):
            call()
    store.close()
    with raises(StoreClosedError):
        store.prefetch("t", ids_of([1]))


class _Ids:
    """Ids on a GPU, as far as a prefetch looks at them."""

    device = torch.device("cuda")

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def to(self, device: torch.device) -> _Ids:
        self._log.append(f"ids to {device}")
        return self

    def record_stream(self, stream: Any) -> None:
        self._log.append(f"ids are used on {stream.name}")


class _Stream:
    def __init__(self, log: list[str], name: str) -> None:
        self._log, self.name = log, name

    def wait_stream(self, other: _Stream) -> None:
        self._log.append(f"{self.name} waits for {other.name}")


@requirement(
    "KV-176",
    "On a GPU a prefetch MUST run on one stream of the store's own, behind what the caller's stream has queued, with "
    "its scratch memory there, and keep the ids' memory for it.",
    needs=NEEDS,
)
def test_stream(kvstore: Any) -> None:
    from fastimpl.kvstore.device import DeviceHandle
    from fastimpl.ops import KVHandle

    log: list[str] = []

    def stream(*_: Any) -> _Stream:
        log.append("a stream is made")
        return _Stream(log, "its own")

    def operator(*_: Any) -> int:
        log.append("prefetch")
        return 0

    @contextmanager
    def on(chosen: _Stream) -> Iterator[None]:
        log.append(f"on {chosen.name}")
        yield
        log.append("on the caller's")

    fakes = {"Stream": stream, "current_stream": lambda *_: _Stream(log, "the caller's"), "stream": on}
    handle: Any = DeviceHandle(SimpleNamespace(device=_Ids.device))  # type: ignore[arg-type]
    with ExitStack() as patches:
        for name, fake in fakes.items():
            patches.enter_context(mock.patch.object(torch.cuda, name, fake))
        patches.enter_context(mock.patch.object(KVHandle, "prefetch", operator))
        assert_equal([handle.prefetch(0, _Ids(log)) for _ in range(2)], [0, 0], where="statuses")
    once = ["its own waits for the caller's", "on its own", "prefetch", "on the caller's", "ids are used on its own"]
    expected = ["ids to cuda", "a stream is made", *once, "ids to cuda", *once]
    assert_equal(log, expected, where="what was done, in order")


@requirement(
    "KV-175",
    "A prefetch and a write of rows in host memory MUST make the host wait for nothing; a snapshot MUST have the rows "
    "of its moment, those in the cache included, whatever is prefetched and written after it.",
    needs=NEEDS,
)
@pytest.mark.parametrize("cache_rows", [0, 16, 64])
def test_no_waits(kvstore: Any, cache_rows: int) -> None:
    from conformance.kvstore.simt import SimtHandle, host_waits

    store = _made(kvstore, kvstore.RowLayout(6, optimizer="adam"), cache_rows, SimtHandle)
    store.reserve("t", 2000)
    ids = ids_of(range(100))
    store.set("t", ids, weights_of(store, 100, 1))
    for turn in range(6):
        before = host_waits()
        store.prefetch("t", ids[13 * turn : 13 * turn + 30])
        store.set("t", ids[13 * turn : 13 * turn + 20], weights_of(store, len(ids[13 * turn : 13 * turn + 20]), turn))
        assert_equal(host_waits() - before, 0, where=f"turn {turn}")
        with store.snapshot() as moment:
            expected = contents(store)
            store.set("t", ids[::3].clone(), weights_of(store, 34, 50 + turn))
            store.prefetch("t", ids[50:80])
            assert_equal(contents(moment), expected, where=f"turn {turn}: a moment")


@requirement(
    "KV-231",
    "What a store tells its C++ side of a table MUST be what its options say of that table: sizes, places and types of "
    "states, initial values, seed, capacity, eviction, and where rows lie.",
    needs=NEEDS,
)
def test_messages(kvstore: Any) -> None:
    from fastimpl.kvstore.native import TableMessage, table_messages
    from twinproof.kvstore.options import StoreOptions

    layouts = {
        "plain": kvstore.RowLayout(5, torch.float16),
        "whole": kvstore.RowLayout(8, torch.float32, "adam", {"momentum1": torch.bfloat16}),
        "rowwise": kvstore.RowLayout(3, torch.bfloat16, "rowwise_adagrad"),
    }
    evictions = {
        "plain": None,
        "whole": kvstore.EvictionPolicy.score(4),
        "rowwise": kvstore.EvictionPolicy.count(2),
    }
    initializers = {
        "plain": kvstore.Initializer.zeros(),
        "whole": kvstore.Initializer.uniform(-0.5, 1.0),
        "rowwise": kvstore.Initializer.uniform(0.25, 0.5),
    }
    shared = {
        "initializer": initializers,
        "eviction": evictions,
        "capacity": {"plain": None, "whole": 7, "rowwise": 1},
        "num_shards": 3,
        "seed": 2**64 - 5,
        "clock": lambda: 0,
    }
    for memory, device, in_row, tracked in (("host", "cuda", True, True), ("device", "cpu", False, False)):
        cached = {"plain": 0, "whole": 2**31, "rowwise": 2} if memory == "host" else 0
        options = StoreOptions.make(
            layouts,
            **shared,
            optimizer_in_row=in_row,
            track_changes=tracked,
            device=device,
            row_memory=memory,
            cache_rows=cached,
        )
        words = table_messages(options).tolist()
        for index, (table, layout) in enumerate(options.rows.items()):
            got = TableMessage(*words[index])
            slots = [layout.state_slots.get(name) for name in ("momentum1", "momentum2")]
            codes = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
            states = [(s.offset_bytes, s.count, codes[s.dtype]) if s else (0, 0, 0) for s in slots]
            low, high = {"plain": (0.0, 0.0), "whole": (-0.5, 1.0), "rowwise": (0.25, 0.5)}[table]
            bits = torch.tensor([low, high - low], dtype=torch.float32).view(torch.int32).tolist()
            optimizer = {"none": 0, "adam": got.optimizer, "rowwise_adagrad": got.optimizer}[layout.optimizer]
            expected = [
                *(2, layout.row_bytes, layout.embedding_dim, codes[layout.weight_dtype], optimizer),
                *states[0],
                *states[1],
                *(table != "plain", *bits, -5, index, table != "whole", tracked),
                *({"plain": -1, "whole": 7, "rowwise": 1}[table], memory == "host"),
                *({"plain": 0, "whole": 2**31, "rowwise": 2}[table] if memory == "host" else 0, table != "plain"),
            ]
            assert_equal([int(word) for word in got], [int(word) for word in expected], where=f"{table}, {memory}")
