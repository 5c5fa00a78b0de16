"""How a store on a device grows: the host keeps a bound and waits for no count; when it learns one changes no row.

The CUDA here is made of the CPU: it counts where a host waits, and holds back copies to the host for as long as a test
says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from conformance.harness import assert_equal, requirement
from conformance.kvstore.cases import Clock, contents, ids_of, random_rows, store_of, weights_of

NEEDS = ("operators",)


def _store(kvstore: Any, **options: Any) -> Any:
    from conformance.kvstore.simt import SimtStore

    return SimtStore({"t": kvstore.RowLayout(6, optimizer="adam")}, optimizer_in_row=True, seed=7, **options)


def _writes(store: Any) -> dict[str, Callable[[], Any]]:
    """Writes of rows that are there and of new ones, with duplicates: 12 ids of 40 at most each."""
    ids, slot = ids_of([3, 1, 3, 9, -4, 20, 21, 22, 23, 9, 30, 31]), store.slot("t", "momentum1")
    return {
        "set": lambda: store.set("t", ids, weights_of(store, 12, 1)),
        "set of some": lambda: store.set("t", ids + 5, weights_of(store, 12, 2), count=7),
        "set_rows": lambda: store.set_rows("t", random_rows(store, (ids + 9).tolist(), 3)),
        "set_state": lambda: store.set_state("t", "momentum1", ids + 2, torch.ones(12, slot.count)),
        "apply_gradients": lambda: store.apply_gradients("t", ids - 7, torch.ones(12, 6), 0.5),
        "set_scores": lambda: store.set_scores("t", ids, torch.ones(12)),
        "set_metadata": lambda: store.set_metadata("t", ids, torch.ones(12, 1, dtype=torch.int64)),
        "nothing": lambda: store.set("t", ids[:0], weights_of(store, 0, 1)),
    }


def _waiting(store: Any) -> dict[str, Callable[[], Any]]:
    ids = ids_of(range(1500))
    return {
        "size": lambda: store.size("t"),
        "delete": lambda: store.delete("t", ids[:3]),
        "growth": lambda: store.set("t", ids, weights_of(store, 1500, 1)),
    }


@requirement(
    "KV-167",
    "A write to a store on a device MUST make the host wait for nothing, new rows included, while all ids since the "
    "last known count have room; with a capacity, too, while they stay below it.",
    needs=NEEDS,
)
def test_no_waits(kvstore: Any) -> None:
    from conformance.kvstore.simt import host_waits, late_copies

    for capacity in (None, 2000):
        for is_late in (False, True):
            store = _store(kvstore, capacity=capacity)
            store.reserve("t", 1000)
            with late_copies(is_late=is_late):
                for turn in range(4):
                    for name, write in _writes(store).items():
                        before = host_waits()
                        write()
                        where = f"capacity {capacity}, late {is_late}, turn {turn}: {name}"
                        assert_equal(host_waits() - before, 0, where=where)
                # The counter counts: who asks waits, and so does who needs memory.
                for name, verb in _waiting(store).items():
                    before = host_waits()
                    verb()
                    assert_equal(host_waits() > before, True, where=f"{name} waits")


@requirement(
    "KV-168",
    "Rows, ids, counters and order of a store on a device MUST NOT depend on when the host learns how many rows there "
    "are, through growth, deletes, a full table and snapshots.",
    needs=NEEDS,
)
def test_any_time(kvstore: Any) -> None:
    from conformance.kvstore.simt import late_copies

    for capacity in (None, 150):
        clock, generator = Clock(), torch.Generator().manual_seed(capacity or 0)
        plain = store_of(kvstore, kvstore.RowLayout(6, optimizer="adam"), capacity=capacity, clock=clock)
        batches = [
            torch.randint(-40 - 4 * step, 40 + 4 * step, (1 + 7 * step % 97,), generator=generator)
            for step in range(STEPS)
        ]
        expected = [facts for step in range(STEPS) for facts in _one_step(plain, clock, step, batches[step])]
        # Copies arrive at once, when somebody waits for them, or after three steps at the latest.
        for late_steps in (0, STEPS, 3):
            store, found = _store(kvstore, capacity=capacity, clock=clock), []
            for first in range(0, STEPS, late_steps or STEPS):
                with late_copies(is_late=late_steps > 0):
                    for step in range(first, min(STEPS, first + (late_steps or STEPS))):
                        found += _one_step(store, clock, step, batches[step])
            for number, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
                assert_equal(mine, theirs, where=f"capacity {capacity}, late for {late_steps} steps, moment {number}")


STEPS = 40


def _one_step(store: Any, clock: Clock, step: int, ids: torch.Tensor) -> list[Any]:
    """Writes and removals; in some steps then what there is, by which somebody waits."""
    clock.now, weights = 1000 + step, weights_of(store, ids.numel(), step)
    store.set("t", ids, weights)
    if step % 5 == 4:
        store.delete("t", ids[::2].clone())
    if step % 11 == 10:
        store.apply_gradients("t", ids, weights.nan_to_num(0, 0, 0).clamp(-1, 1), 0.1, step)
    if step % 8 < 7:
        return []
    with store.snapshot() as moment:
        return [(store.size("t"), store.stats().evicted_count, contents(moment))]


# Memory of a call up to so much is a part of a larger piece, ``kSmallBytes`` in C++.
PIECE_BYTES = 4 << 20


@requirement(
    "KV-421",
    "A store on a device MUST answer batches whose scratch memory is as large as a part of its pieces can be, and "
    "larger, as a store on the CPU does, bit for bit: reads, steps of the optimizer, and deletes.",
    needs=NEEDS,
)
@pytest.mark.parametrize("more", [0, 1])
def test_large_scratch_memory(kvstore: Any, more: int) -> None:
    from conformance.kvstore.simt import SimtStore

    # A word for each id; few rows, of which each stands many times in the batch.
    count, layout = PIECE_BYTES // 8 + more, kvstore.RowLayout(1, optimizer="adagrad")
    ids = (torch.arange(count) * 7919).remainder(613)
    ids[-1] = 700
    stores = [
        kind({"t": layout}, optimizer_in_row=True, seed=7, clock=Clock()) for kind in (SimtStore, kvstore.KVStore)
    ]
    answers = []
    for store in stores:
        store.set("t", ids_of(range(500)), weights_of(store, 500, 1).nan_to_num(0, 0, 0).clamp(-1, 1))
        store.apply_gradients("t", ids, (ids % 5).float()[:, None], 0.5)
        answers.append((store.get("t", ids), store.contains("t", ids + 1), store.delete("t", ids[7:])))
    for number, (mine, theirs) in enumerate(zip(*answers, strict=True)):
        assert_equal(
            torch.equal(torch.as_tensor(mine), torch.as_tensor(theirs)), True, where=f"answer {number}, {more}"
        )
    assert_equal(contents(stores[0]), contents(stores[1]), where=f"what is left, {more} more than a piece has")
