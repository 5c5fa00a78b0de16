"""What a call leaves alone: of a store with two tables every verb that is told one of them changes nothing else."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from conformance.harness import assert_equal, requirement, succeeds
from conformance.kvstore.cases import contents, filled, fresh, ids_of, random_rows, save, weights_of

KEYS = range(-4, 5)


def _told(store: Any, table: str, mark: int) -> dict[str, Any]:
    """All that a store says of one table."""
    changed, removed = store.changes(table, mark)
    return {
        "rows": contents(store)[table],
        "size": store.size(table),
        "changed": changed.tolist(),
        "removed": removed.tolist(),
        "step": store.step_count(table),
    }


def _verbs(kvstore: Any, checkpoint: Any, store: Any, table: str, folder: Path) -> dict[str, Callable[[], Any]]:
    """Calls that are told one table."""
    ids, only, layout = ids_of([0, 1, 50]), {"tables": (table,)}, store.layout(table)
    width, slot, foreign = layout.embedding_dim, layout.state_slots["momentum1"], folder / "foreign"
    other = fresh(kvstore, return_whole_row=True)
    kvstore.load(other, foreign)
    state = other.state_dict(**only)
    module = kvstore.KVEmbeddingBag(store, table=table, lr=0.1)
    wrapper = kvstore.KVTensorWrapper([3, width], layout.weight_dtype, 0, sorted_indices=ids, table=table)
    wrapper.set_dram_db_wrapper(store)

    def by_planner() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            views = store.state_dict(snapshot=False, **only)
            dcp.save(views, storage_writer=dcp.FileSystemWriter(folder / "views"), no_dist=True)
            # Other headers than those that are loaded.
            store.set_metadata(table, store.ids(table), torch.ones(store.size(table), 1, dtype=torch.int64))
            reader = dcp.FileSystemReader(folder / "views")
            dcp.load(views, storage_reader=reader, planner=kvstore.KVLoadPlanner(), no_dist=True)

    def by_views() -> None:
        for view in ("weight", "momentum1", "row", "metadata"):
            made = kvstore.KVTensor(store, ids, view, table=table)
            made.set_range(0, 0, 3, made.full_tensor())

    def begun(slice_rows: int, decay: float) -> Any:
        return store.start_eviction(table, policy=kvstore.EvictionPolicy.count(3, decay), slice_rows=slice_rows)

    return {
        "set": lambda: store.set(table, ids, weights_of(store, 3, 8, table)),
        "set_rows": lambda: store.set_rows(table, random_rows(store, [0, 51], 8, table)),
        "set_state": lambda: store.set_state(table, "momentum1", ids, torch.ones(3, slot.count, dtype=slot.dtype)),
        "set_scores": lambda: store.set_scores(table, ids, torch.ones(3)),
        "set_metadata": lambda: store.set_metadata(table, ids, torch.ones(3, 1, dtype=torch.int64)),
        "apply_gradients": lambda: store.apply_gradients(table, ids, torch.ones(3, width), 0.1, 77),
        "set_step_count": lambda: store.set_step_count(table, 78),
        "reserve": lambda: store.reserve(table, 500),
        "prefetch": lambda: store.prefetch(table, ids),
        "views": by_views,
        "a wrapper": lambda: wrapper.set_range(0, 0, 3, wrapper.narrow(0, 0, 3)),
        "a module": lambda: module(ids.reshape(1, 3)).sum().backward(),
        "evict": lambda: store.evict(table, policy=kvstore.EvictionPolicy.count(2)),
        "a slice of a round": lambda: begun(1, 0.5).step(),
        "a round": lambda: begun(100, 0.5).run(),
        "load": lambda: kvstore.load(store, foreign, **only),
        "load a part": lambda: kvstore.load(store, foreign, owned=(0, 0), **only),
        "load weights": lambda: kvstore.load(store, foreign, weights_only=True, **only),
        "load_state_dict": lambda: store.load_state_dict(state, **only),
        "load weights of a state dict": lambda: store.load_state_dict(state, weights_only=True, **only),
        "load_state_dict that clears": lambda: store.load_state_dict(state, clear=True, **only),
        "load_state_dict of a module": lambda: module.load_state_dict(module.state_dict()),
        "a planner": by_planner,
        "delete": lambda: store.delete(table, ids),
        "clear": lambda: store.clear(table),
        "load into an empty table": lambda: kvstore.load(store, foreign, **only),
    }


@requirement(
    "KV-292",
    "A verb that is told one table MUST leave alone what a store says of the others: rows, size, what changed and "
    "went, the step, and which deltas may be loaded next.",
)
def test_other_tables(kvstore: Any, checkpoint: Any, tmp_path: Path) -> None:
    source = filled(kvstore, KEYS, track_changes=True)
    mark = save(kvstore, source, tmp_path / "full").mark
    for table in "ab":
        source.set(table, ids_of([2, 60]), weights_of(source, 2, 3, table))
        source.delete(table, ids_of([3]))
    save(kvstore, source, tmp_path / "delta", since=mark)
    foreign = filled(kvstore, range(2, 11))
    for table in "ab":
        foreign.set_step_count(table, 55)
    save(kvstore, foreign, tmp_path / "foreign")
    expected = contents(source)
    for table, other in (("a", "b"), ("b", "a")):
        for capacity in (None, 30):
            store, where = fresh(kvstore, track_changes=True, capacity=capacity), f"{table}, capacity {capacity}"
            verbs = _verbs(kvstore, checkpoint, store, table, tmp_path)
            kvstore.load(store, tmp_path / "full")
            store.set_step_count(other, 4)
            begun = store.mark()
            before = _told(store, other, begun)
            for name, act in verbs.items():
                act()
                assert_equal(_told(store, other, begun), before, where=f"{name} of {where}")
            with succeeds("load", where=f"the delta of {other} beside {where}"):
                kvstore.load(store, tmp_path / "delta", tables=(other,))
            assert_equal(contents(store)[other], expected[other], where=f"the delta of {other} beside {where}")
