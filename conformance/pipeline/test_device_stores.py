"""Key-value tables whose store lies on the device: ids, rows and gradients stay there, and every bit is the host's.

The device is the pretend one, and the store's operators those that a GPU would run, executed here.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from conformance.harness import Rank, assert_equal, requirement
from conformance.harness.places import copies_of_program, on_pretend
from conformance.pipeline.batches import random_jagged
from conformance.pipeline.cases import FUSED
from conformance.pipeline.jobs import Job, assert_same_state
from conformance.pipeline.model import assert_bits, random_tables
from conformance.pipeline.sharding import collection_of, sharded_of

NEEDS = ("streams",)
_PREFETCH = "PrefetchTrainPipelineSparseDist"


def _on_device(kvstore: Any) -> Any:
    """The component with stores on the pretend device."""
    from conformance.kvstore.simt.places import PretendStore

    return SimpleNamespace(
        KVStore=PretendStore, **{name: getattr(kvstore, name) for name in ("Buckets", "RowLayout", "rank_buckets")}
    )


def _train(components: tuple[Any, Any], rank: Rank | None, name: str) -> None:
    pipeline, kvstore = components
    loop = Job(pipeline, 4, rank, kinds=("table_wise",), kvstore=kvstore)
    with on_pretend() as device:
        stored = _on_device(kvstore)
        job = Job(pipeline, 4, rank, kinds=("table_wise",), kvstore=stored, device=device.device)
        schedule, loader = job.schedule(name), iter(job.batches(5))
        for step, batch in enumerate(loop.batches(5)):
            assert_bits(schedule.progress(loader), loop.step(batch), f"{name} step {step} output")
            assert_same_state(job, loop, f"{name} step {step}")


def _trains(rank: Rank) -> None:
    for name in ("TrainPipelineSparseDist", _PREFETCH):
        _train((rank.component("pipeline"), rank.component("kvstore")), rank, name)


@requirement(
    "PIPE-339",
    "Key-value tables in a store on a device MUST train to the loop's bits there, under the schedule that reads rows "
    "ahead too, on 1 and 2 ranks, and mix nothing.",
    needs=NEEDS,
)
@pytest.mark.night
@pytest.mark.parametrize("rank_count", [1, 2])
def test_trains(pipeline: Any, kvstore: Any, rank_pool: Any, rank_count: int) -> None:
    if rank_count == 1:
        for name in ("TrainPipelineSparseDist", FUSED, _PREFETCH):
            _train((pipeline, kvstore), None, name)
    else:
        rank_pool.run(_trains, rank_count)


@requirement(
    "PIPE-340",
    "A step of key-value tables in a store on a device MUST send nothing to the device from the second step on, and to "
    "the host sizes alone: as many bytes whatever the number of ids; the store makes the host wait for nothing.",
    needs=NEEDS,
)
def test_ids_stay(pipeline: Any, kvstore: Any) -> None:
    configs, weights, keys, limits = random_tables(pipeline, 4)
    with on_pretend() as device:
        layouts = {
            c.name: kvstore.RowLayout(c.embedding_dim, weight_dtype=c.data_type, optimizer="adagrad") for c in configs
        }
        store = _on_device(kvstore).KVStore(layouts, optimizer_in_row=True)
        for table in store.tables:
            store.reserve(table, 5000)
        plan = {config.name: pipeline.key_value(store, kvstore.Buckets(4)) for config in configs}
        sharded = sharded_of(pipeline, collection_of(pipeline, configs, weights), plan, "adagrad")
        sharded.to(device.device)
        bytes_to_host = []
        for step, ids_each in enumerate((1, 1, 3, 9)):
            flat = random_jagged(keys, limits, 6, step).flat()
            # Each id several times, in the bags that there are.
            ids = flat[0].repeat_interleave(ids_each)
            batch = pipeline.KeyedJaggedTensor(keys, ids, offsets=flat[1] * ids_each).to(device.device)
            begin = device.mark
            sharded(batch).values().sum().backward()
            where = f"step {step}"
            if step > 0:
                assert_equal(copies_of_program(device, begin), [], where=f"{where}: copies to the device")
                bytes_to_host.append(device.counts(begin).to_host.size_bytes)
            waits = [str(e) for e in device.events[begin:] if e.what.startswith("kvstore_") and e.wait_count]
            assert_equal(waits, [], where=f"{where}: waits of the store")
        assert_equal(bytes_to_host, bytes_to_host[:1] * 3, where="bytes to the host")
        rows = sum(store.size(table) for table in store.tables)
        assert_equal(rows > 0 and len(ids) > 100, True, where=f"{rows} rows were trained")
        assert_equal(torch.device(store.options.device).type, "pretend", where="the store's place")
