"""Who waits for whom: readers never for each other, and nobody for ever."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from conformance.harness import assert_equal, raises, requirement
from conformance.kvstore.cases import ids_of, store_of
from twinproof.errors import StoreClosedError

LONG_COUNT, WIDTH, ATTEMPTS = 200_000, 128, 50
THREADS, VERBS, KEYS, PATIENCE_SECONDS = 4, 60, 60, 5.0


def finished_inside(long: Callable[[torch.Tensor], Any], short: Callable[[], Any], out: torch.Tensor) -> bool:
    """Whether ``short`` began and ended while ``long`` was filling ``out``: nothing here is measured by a clock.

    ``long`` has begun where the first element is there, and has not ended where the last one is missing.
    """
    out.zero_()
    first, last = out[:1, :1], out[-1:, -1:]
    thread = threading.Thread(target=long, args=(out,))
    thread.start()
    try:
        while thread.is_alive() and not bool(first.any()):
            pass
        short()
        return not bool(last.any())
    finally:
        thread.join()


@requirement(
    "KV-123",
    "A reader MUST NOT wait until another reader has finished: while one fills its result, another begins and ends.",
    needs=("shared_readers",),
)
@pytest.mark.parametrize("verb", ["get", "get_rows", "snapshot"])
def test_readers_beside_readers(kvstore: Any, verb: str) -> None:
    store = store_of(kvstore, kvstore.RowLayout(WIDTH))
    store.set("t", ids_of(range(1000)), torch.ones(1000, WIDTH))
    ids, few = torch.arange(LONG_COUNT) % 1000, ids_of([1, 2, 3])
    source = store.snapshot() if verb == "snapshot" else store

    def rows_into(out: torch.Tensor) -> None:
        source.get_rows("t", ids, offset_bytes=16, width_bytes=4 * WIDTH, out=out.view(torch.uint8))

    def weights_into(out: torch.Tensor) -> None:
        source.get("t", ids, out=out)

    out = torch.zeros(LONG_COUNT, WIDTH)
    long = rows_into if verb == "get_rows" else weights_into
    shorts: dict[str, Callable[[], Any]] = {
        "get": lambda: source.get("t", few),
        "get_rows": lambda: source.get_rows("t", few),
        "contains": lambda: source.contains("t", few),
        "size": lambda: source.size("t"),
    }
    for name, short in shorts.items():
        seen = any(finished_inside(long, short, out) for _ in range(ATTEMPTS))
        assert_equal(seen, True, where=f"{name} ends while a long {verb} goes on, in one of {ATTEMPTS} attempts")


def program(kvstore: Any, store: Any, seed: int, closing: bool) -> Callable[[threading.Event, list[int], int], None]:
    """Random verbs in one thread; every row's weight is one number throughout, whoever wrote it last."""
    policy = kvstore.EvictionPolicy.count(2, 0.5)

    def act(draw: random.Random) -> None:
        ids = ids_of([draw.randrange(KEYS) for _ in range(draw.randrange(1, 20))])
        values = torch.full((ids.numel(), 8), float(draw.randrange(1, 9)))
        verb = draw.randrange(11)
        if verb == 0:
            store.set("t", ids, values)
        elif verb == 1:
            store.set_rows("t", store.get_rows("t", ids))
        elif verb == 2:
            store.apply_gradients("t", ids, values, 0.1)
        elif verb == 3:
            store.delete("t", ids)
        elif verb == 4:
            store.evict("t", policy=policy)
        elif verb == 5:
            store.start_eviction("t", policy=policy, slice_rows=5).run()
        elif verb == 6:
            with store.snapshot() as taken:
                check_rows(taken, ids)
                store.set("t", ids, values)
        elif verb == 7:
            state = store.state_dict(chunk_rows=7)
            assert_equal(state["t.weight"].shape[0], state["t.weight_id"].shape[0], where="rows of a state dict")
            state["t.weight"].full_tensor()
        elif verb == 8:
            store.changes("t", draw.randrange(store.mark() + 1))
            store.ids("t")
            store.stats()
        elif verb == 9:
            store.reserve("t", draw.randrange(3000))
        else:
            check_rows(store, ids)

    def run(begin: threading.Event, progress: list[int], place: int) -> None:
        draw = random.Random(f"{seed} {place}")
        begin.wait()
        for turn in range(VERBS):
            try:
                if closing and place == 0 and turn == VERBS // 2:
                    store.close()
                act(draw)
            except StoreClosedError:
                # Another thread closed it, which every verb may meet; without a close it is an answer out of place.
                assert_equal(closing, True, where="a store that nobody closed")
            progress[place] += 1

    return run


def check_rows(source: Any, ids: torch.Tensor) -> None:
    """Each row has its own key and one number as its weight."""
    rows = source.get_rows("t", ids)
    keys = rows[:, :8].contiguous().view(torch.int64)[:, 0]
    assert_equal(keys.tolist(), ids.tolist(), where="keys")
    weights = rows[:, 16:48].contiguous().view(torch.float32)
    assert_equal(bool((weights == weights[:, :1]).all()), True, where="rows of one number")


def run_to_the_end(run: Callable[[threading.Event, list[int], int], None], where: str) -> None:
    """Run it in threads; threads of which none ends a verb for ``PATIENCE_SECONDS`` are stuck."""
    begin, progress, errors = threading.Event(), [0] * THREADS, list[BaseException]()

    def guarded(place: int) -> None:
        try:
            run(begin, progress, place)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(place,), daemon=True) for place in range(THREADS)]
    for thread in threads:
        thread.start()
    begin.set()
    for thread in threads:
        before: list[int] = []
        while thread.is_alive() and before != progress:
            before = list(progress)
            thread.join(PATIENCE_SECONDS)
        stuck = f"verbs done by thread: {progress}" if thread.is_alive() else "none"
        assert_equal(stuck, "none", where=f"{where}: threads that wait for ever")
    for error in errors:
        raise error


@requirement(
    "KV-124",
    "Verbs of every kind in random order in threads, eviction in the background and close among them, MUST all end, "
    "and leave whole rows, one block each, and no snapshot.",
)
def test_interleavings(kvstore: Any) -> None:
    for seed in range(6):
        closing = seed % 2 == 1
        store = store_of(
            kvstore,
            kvstore.RowLayout(8, optimizer="adagrad"),
            track_changes=True,
            initializer=kvstore.Initializer.zeros(),
        )
        policy, where = kvstore.EvictionPolicy.count(3), f"seed {seed}"
        with kvstore.BackgroundEvictor(store, "t", trigger_rows=KEYS // 2, policy=policy, slice_rows=4):
            run_to_the_end(program(kvstore, store, seed, closing), where)
        if closing:
            with raises(StoreClosedError, where=where):
                store.stats()
            continue
        ids, stats = store.ids("t"), store.stats()
        check_rows(store, ids)
        assert_equal((stats.row_count, stats.block_count), (ids.numel(),) * 2, where=f"{where}: one block for each row")
