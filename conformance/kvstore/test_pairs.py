"""How rows travel from one store to another: every option of either, of the way and of the call meets every other."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from conformance.harness import assert_equal, pairs_of, requirement, succeeds
from conformance.kvstore.cases import Clock, ids_of, save, store_of

# One process saves here, which torch warns of.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
MANY = 2**62
KEYS = {"a": [5, -3, 0, MANY, 12, 7], "b": [2, 9]}
# Ids that the target has before: one of the source's, and one of its own.
THERE = [7, 100]
WAYS = ("file", "separate file", "state dict", "plain tensors", "live views", "delta", "dcp", "rows", "set")
OPTIMIZERS = ("adam", "partial_rowwise_adam", "rowwise_adagrad", "sgd", "none")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OPTIONS: dict[str, tuple[Any, ...]] = {
    "way": WAYS,
    "optimizer": OPTIMIZERS,
    "weight": DTYPES,
    "state": DTYPES,
    "in_row": (True, False),
    "whole": (False, True),
    "tracked": (False, True),
    "shards": (1, 5),
    "tables": (None, ("a",)),
    "buckets": (1, 3),
    "chunk_rows": (None, 1, 2),
    "to_weight": DTYPES,
    "to_state": DTYPES,
    "to_shards": (3, 1),
    "to_tracked": (False, True),
    "capacity": (None, 8),
    "weights_only": (False, True),
    "clear": (False, True),
    "before": ("rows", "nothing"),
}


def _allowed(case: Mapping[str, Any]) -> bool:
    """Rows without their optimizer are no whole rows; deltas need marks; only state dicts clear a table.

    What has no layout beside it, whole rows as plain bytes, cannot be converted.
    """
    takes_options = case["way"] not in ("rows", "set", "dcp")
    is_same = (case["weight"], case["state"]) == (case["to_weight"], case["to_state"])
    return (
        (case["in_row"] or not case["whole"])
        and (case["way"] != "delta" or (case["tracked"] and case["before"] == "nothing"))
        and (case["tables"] is None or case["way"] not in ("dcp", "rows", "set"))
        and (not case["clear"] or case["way"] in ("state dict", "plain tensors", "live views"))
        and (not case["weights_only"] or takes_options)
        and (is_same or (takes_options and not (case["way"] == "plain tensors" and case["whole"])))
    )


def _store(kvstore: Any, case: Mapping[str, Any], prefix: str, now: int, **options: Any) -> Any:
    kind = case["optimizer"]
    layouts = {}
    for table, dim in (("a", 4), ("b", 6)):
        names = kvstore.RowLayout(dim, optimizer=kind).state_slots
        states = {name: case[f"{prefix}state"] for name in names if kind != "rowwise_adagrad"}
        layouts[table] = kvstore.RowLayout(dim, case[f"{prefix}weight"], kind, states)
    return store_of(kvstore, layouts, optimizer_in_row=case["in_row"], clock=Clock(now), **options)


def _states(store: Any, table: str) -> list[str]:
    return list(store.layout(table).state_slots) if store.options.optimizer_in_row else []


def _fill(store: Any, keys: Mapping[str, list[int]], seed: int) -> None:
    """Values that every dtype holds, so that a conversion has one answer; times and counts by row."""
    for table, some in keys.items():
        ids, generator = ids_of(some), torch.Generator().manual_seed(seed)
        layout = store.layout(table)
        values = torch.randint(-64, 64, (ids.numel(), layout.embedding_dim), generator=generator) / 8
        store.set(table, ids, values.to(layout.weight_dtype))
        for number, name in enumerate(_states(store, table), start=1):
            slot = layout.state_slots[name]
            state = torch.randint(1, 64, (ids.numel(), slot.count), generator=generator) / 8 + number
            store.set_state(table, name, ids, state.to(slot.dtype))
        words = torch.tensor([(3 + seed + i) << 32 | (900 + seed + i) for i in range(ids.numel())])
        store.set_metadata(table, ids, words.unsqueeze(1))
        store.set_step_count(table, 10 * seed + len(some))


Told = dict[str, tuple[dict[int, tuple[list[float], ...]], int]]


def _told(store: Any) -> Told:
    """Table -> (id -> its word, weight and states as numbers, step)."""
    found: Told = {}
    for table in store.tables:
        ids = store.ids(table)
        parts = [store.metadata(table, ids), store.get(table, ids)]
        parts += [store.get_state(table, name, ids) for name in _states(store, table)]
        rows = zip(ids.tolist(), *(part.double().tolist() for part in parts), strict=True)
        found[table] = ({key: tuple(values) for key, *values in rows}, store.step_count(table))
    return found


def _expected(source: Told, target: Told, case: Mapping[str, Any]) -> Told:
    result = dict(target)
    for table in case["tables"] or source:
        rows, step = source[table]
        held, old_step = target[table]
        if case["weights_only"]:
            rows = {key: (*row[:2], *([0.0] * len(state) for state in row[2:])) for key, row in rows.items()}
        has_step = case["in_row"] and case["optimizer"] != "none" and not case["weights_only"]
        has_step = has_step and case["way"] not in ("rows", "set")
        result[table] = (rows if case["clear"] else {**held, **rows}, step if has_step else old_step)
    return result


def _travel(kvstore: Any, source: Any, target: Any, case: Mapping[str, Any], folder: Path) -> None:
    """What the source holds, into the target."""
    way, buckets = case["way"], kvstore.Buckets(case["buckets"])
    chosen = {"tables": case["tables"], "weights_only": case["weights_only"]}
    if way in ("file", "separate file", "delta"):
        form = "separate" if way == "separate file" else "rows"
        since = {"since": source.begun} if way == "delta" else {}
        save(kvstore, source.store, folder, buckets=buckets, form=form, chunk_rows=case["chunk_rows"], **since)
        options = {} if case["chunk_rows"] is None else {"chunk_rows": case["chunk_rows"]}
        kvstore.load(target, folder, **chosen, **options)
    elif way in ("state dict", "plain tensors", "live views"):
        state = source.store.state_dict(
            buckets=buckets, snapshot=way != "live views", chunk_rows=case["chunk_rows"], tables=case["tables"]
        )
        if way == "plain tensors":
            state = {n: v.full_tensor() if hasattr(v, "full_tensor") else v for n, v in state.items()}
        target.load_state_dict(state, clear=case["clear"], **chosen)
    elif way == "dcp":
        state = source.store.state_dict(buckets=buckets, chunk_rows=case["chunk_rows"])
        dcp.save(state, checkpoint_id=folder, no_dist=True)
        empty = {n: torch.zeros(tuple(v.shape), dtype=v.dtype) for n, v in state.items()}
        dcp.load(empty, checkpoint_id=folder, no_dist=True)
        target.load_state_dict(empty)
    else:
        for table in source.store.tables:
            ids = source.store.ids(table)
            if way == "rows":
                target.set_rows(table, source.store.get_rows(table, ids))
                continue
            target.set(table, ids, source.store.get(table, ids))
            for name in _states(target, table):
                target.set_state(table, name, ids, source.store.get_state(table, name, ids))
            target.set_metadata(table, ids, source.store.metadata(table, ids))


class _Source:
    """A filled store, and its mark from before it was."""

    def __init__(self, kvstore: Any, case: Mapping[str, Any]) -> None:
        options = {"return_whole_row": case["whole"], "track_changes": case["tracked"], "num_shards": case["shards"]}
        self.store = _store(kvstore, case, "", 1000, **options)
        self.begun = self.store.mark()
        _fill(self.store, KEYS, 1)


@requirement(
    "KV-336",
    "Rows MUST come into another store as they are, whatever way they take and whatever either store's options, the "
    "options of the way and those of the load are: all pairs of them.",
)
def test_ways_of_rows(kvstore: Any, tmp_path: Path) -> None:
    for number, case in enumerate(pairs_of(OPTIONS, allowed=_allowed)):
        source = _Source(kvstore, case)
        target = _store(
            kvstore, case, "to_", 2000, num_shards=case["to_shards"], track_changes=case["to_tracked"],
            capacity=case["capacity"],
        )  # fmt: skip
        if case["before"] == "rows":
            _fill(target, {"a": THERE, "b": THERE}, 2)
        before, where = _told(source.store), f"case {number}: {case}"
        expected = _expected(before, _told(target), case)
        with succeeds("a way", where=where):
            _travel(kvstore, source, target, case, tmp_path / f"{number}")
        assert_equal(_told(target), expected, where=where)
        assert_equal(_told(source.store), before, where=f"the source of {where}")
