"""Whole-row saves and loads against plain writes and copies of the same bytes, and what memory either takes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from conformance.harness import Rank
from perf.harness.counters import Counters
from perf.harness.paired import Round, Sample, interleave, seconds_of
from perf.harness.workloads import Workload
from perf.kvstore.rows import TABLE, THREADS, Filled, fill, fresh_memory
from perf.peers.plain_rows import Workers, copy_bytes
from twinproof.checkpoint.format import buffer_of

__all__ = ["measure_loads", "measure_saves"]

_BLOCK_BYTES = 8 << 20
_BUCKETS = 100


def _write(rows: torch.Tensor, path: Path) -> None:
    data = buffer_of(rows)
    with path.open("wb", buffering=0) as file:
        for start in range(0, len(data), _BLOCK_BYTES):
            file.write(data[start : start + _BLOCK_BYTES])
        os.fsync(file.fileno())


def _counted(job: Callable[[], object]) -> Sample:
    counters = Counters()
    counters.start()
    sample = seconds_of(job)()
    return sample | counters.stop()


def _check(kvstore: Any, filled: Filled, store: Any) -> None:
    filled.check(torch.arange(filled.ids.numel()), store.get_rows(TABLE, filled.ids), "a saved and loaded store")


def measure_saves(rank: Rank, workload: Workload, folder: str, round_count: int, seed: int) -> list[Round]:
    """The whole store to files: ``ours``; ``separate``, weight and state apart; ``gathered``, all rows first and then
    the file; ``plain``, the bytes of one matrix.
    """
    filled, kvstore, checkpoint = fill(rank, workload), rank.component("kvstore"), rank.component("checkpoint")
    options = {"buckets": kvstore.Buckets(_BUCKETS), "save_distributed": False}

    def gathered(path: Path) -> None:
        ids = filled.store.ids(TABLE)
        checkpoint.save_file({"ids": ids, "rows": filled.store.get_rows(TABLE, ids)}, path / "rows.safetensors")

    def run_of(who: str) -> Callable[[], Sample]:
        path = Path(folder) / who

        def run() -> Sample:
            shutil.rmtree(path, ignore_errors=True)
            if who in ("ours", "separate"):
                form = "rows" if who == "ours" else who
                return _counted(lambda: kvstore.save(filled.store, path, form=form, **options))
            path.mkdir()
            return _counted(lambda: gathered(path) if who == "gathered" else _write(filled.matrix, path / "rows"))

        return run

    rounds = interleave({who: run_of(who) for who in workload.contenders}, round_count=round_count, seed=seed)
    with kvstore.KVStore(filled.store.options.layouts, optimizer_in_row=True) as other:
        kvstore.load(other, Path(folder) / "ours")
        _check(kvstore, filled, other)
    filled.store.close()
    return rounds


def measure_loads(rank: Rank, workload: Workload, folder: str, round_count: int, seed: int) -> list[Round]:
    """Saved rows into an empty store: ``ours``; ``applied``, the tensors of the separate form, loaded and then set;
    ``fresh``, a copy of the same bytes into memory that no one has touched.
    """
    filled, kvstore, checkpoint = fill(rank, workload), rank.component("kvstore"), rank.component("checkpoint")
    layouts = filled.store.options.layouts
    options = {"buckets": kvstore.Buckets(_BUCKETS), "save_distributed": False}
    workers = Workers(THREADS)
    kvstore.save(filled.store, Path(folder) / "rows", **options)
    kvstore.save(filled.store, Path(folder) / "separate", form="separate", **options)
    filled.store.close()

    def applied(store: Any) -> None:
        found = [checkpoint.load_file(path) for path in sorted((Path(folder) / "separate").glob("*.safetensors"))]
        tensors = {name.removeprefix(f"{TABLE}."): tensor for some in found for name, tensor in some.items()}
        ids = tensors["ids"].reshape(-1)
        store.set(TABLE, ids, tensors["weight"])
        store.set_state(TABLE, "momentum1", ids, tensors["momentum1"])

    def run_of(who: str) -> Callable[[], Sample]:
        def run() -> Sample:
            if who == "fresh":
                return _counted(lambda: copy_bytes(filled.matrix, fresh_memory(filled.matrix.shape), workers))
            with kvstore.KVStore(layouts, optimizer_in_row=True) as store:
                sample = _counted(
                    lambda: kvstore.load(store, Path(folder) / "rows") if who == "ours" else applied(store)
                )
                if who == "ours":
                    _check(kvstore, filled, store)
            return sample

        return run

    return interleave({who: run_of(who) for who in workload.contenders}, round_count=round_count, seed=seed)
