"""I. Memory: nothing grows from step to step, and a batch that is done is gone."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch

from conformance.harness import Rank, assert_equal, assert_le, requirement
from conformance.harness.surroundings import without_collection
from conformance.pipeline.batches import values_of
from conformance.pipeline.cases import EVALUATION, TRAINING, Breaking, LoaderError
from conformance.pipeline.every_module import EVERY, batch_of, looked_up
from conformance.pipeline.jobs import KINDS, Job, outputs_of
from conformance.pipeline.virtual_batches import on_host, virtual
from conformance.provers.virtual_device import VirtualDevice

LONGEST = ("TrainPipelineFusedSparseDist", "TrainPipelineSemiSync")


def live() -> tuple[int, int]:
    """How many tensors there are, and the bytes of their storages."""
    gc.collect()
    found = [value for value in gc.get_objects() if type(value) in (torch.Tensor, torch.nn.Parameter)]
    # Sparse tensors of other tests have no storage.
    tensors = [value for value in found if value.layout is torch.strided]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return len(tensors), sum(storages.values())


@pytest.mark.night
@requirement("PIPE-103", "200 steady steps MUST leave as many tensors, and as many bytes in them, as 20 did.")
def test_growth(pipeline: Any) -> None:
    for name in LONGEST:
        job = Job(pipeline, 14)
        schedule, batch = job.schedule(name), job.batch(0)
        loader = iter([batch] * 210)
        for step in range(200):
            schedule.progress(loader)
            if step == 20:
                before = live()
        assert_equal(live(), before, where=f"{name} tensors and bytes")


def peaks_of(pipeline: Any, name: str, **options: Any) -> tuple[int, int]:
    """Device bytes at the worst moment: alive, and alive or still needed by a stream."""
    device, job = VirtualDevice(), Job(pipeline, 17, kinds=("table_wise",), device="cpu")
    batches = [virtual(device, batch) for batch in on_host(device, [job.batch(number, 64) for number in range(6)])]
    with device:
        schedule, loader = job.schedule(name, engine=device.engine, **options), iter(batches)
        for _ in range(6):
            schedule.progress(loader)
    return device.tracker.peak_bytes, device.tracker.peak_held_bytes


@requirement(
    "PIPE-156",
    "Live bytes of Fused MUST be at most those of SparseDist and one lookup output, and with the lookup on the stream "
    "of the exchange, bytes that are held at most those with a stream of its own.",
    needs=("streams",),
)
def test_peak(pipeline: Any) -> None:
    fused = "TrainPipelineFusedSparseDist"
    output_bytes = 64 * Job(pipeline, 17, kinds=("table_wise",), device="cpu").width * 4
    base, _ = peaks_of(pipeline, "TrainPipelineSparseDist")
    live_bytes, held_bytes = peaks_of(pipeline, fused)
    assert_le(live_bytes, base + output_bytes, where="live bytes of Fused")
    assert_le(held_bytes, peaks_of(pipeline, fused, emb_lookup_stream="new")[1], where="bytes held")


@requirement("PIPE-157", "Loaders and models that fail again and again MUST leave as many tensors as one failure did.")
def test_failures_leave_nothing(pipeline: Any) -> None:
    for name in LONGEST:
        job = Job(pipeline, 18)
        batch, failing = job.batch(0), set[int]()
        schedule = job.schedule(name, custom_model_fwd=partial(_fail_at, job, failing))
        for turn in range(12):
            loader = Breaking([batch] * 8, {3}, LoaderError("here"))
            failing.add(turn)
            while True:
                try:
                    schedule.progress(loader)
                except LoaderError:
                    continue
                except StopIteration:
                    break
            if turn == 1:
                before = live()
        assert_equal(live(), before, where=f"{name} tensors and bytes after failures")


def _fail_at(job: Job, failing: set[int], batch: Any) -> Any:
    losses = job.model(batch)
    if failing:
        failing.clear()
        raise LoaderError("in forward")
    return losses


@requirement(
    "PIPE-131", "A batch that was processed MUST be gone once the caller lets go of it, in steady state and at the end."
)
def test_released(pipeline: Any) -> None:
    for name in LONGEST:
        job = Job(pipeline, 15)
        schedule = job.schedule(name)
        seen: list[Any] = []

        def loader(job: Job = job, seen: list[Any] = seen) -> Any:
            for number in range(6):
                batch = job.batch(number)
                seen.append(weakref.ref(batch.dense))
                yield batch
                del batch

        batches = loader()
        for step in range(3):
            schedule.progress(batches)
            alive = [reference() is not None for reference in seen[: step + 1]]
            assert_equal(alive, [False] * (step + 1), where=f"{name} processed batches after step {step}")
        outputs_of(schedule, batches)
        assert_equal([reference() is not None for reference in seen], [False] * 6, where=f"{name} batches at the end")


def _young() -> int:
    """Tensors that have come since, garbage among them."""
    return sum(issubclass(type(value), torch.Tensor) for value in gc.get_objects(generation=0))


@requirement(
    "PIPE-435",
    "After reset() a schedule MUST hold no more than one that has processed all it was given: nothing of batches in "
    "flight, whatever was exchanged, looked up or read ahead for them.",
)
def test_reset_leaves_nothing(pipeline: Any, kvstore: Any) -> None:
    for name in (*TRAINING, *EVALUATION):
        with without_collection():
            job = Job(pipeline, 13, kinds=("table_wise",), kvstore=kvstore)
            schedule = job.schedule(name)
            outputs_of(schedule, iter(job.batches(4)))
            before = _young()
            for detaches in (False, True):
                loader = iter(job.batches(4))
                for _ in range(2):
                    schedule.progress(loader)
                del loader
                if detaches:
                    schedule.detach()
                schedule.reset()
                assert_le(_young(), before, where=f"{name}, detached {detaches}: tensors after reset()")


def _growth(work: Callable[[], Any]) -> int:
    """How many tensors are more after the work was done six times than after three, garbage among them."""
    found = []
    with without_collection():
        for _ in range(6):
            work()
            found.append(_young())
    # A thread that sent something may let go of it a moment later.
    return max(0, min(found[3:]) - min(found[:3]))


def _no_cycles(rank: Rank | None, pipeline: Any, kvstore: Any, schedules: Iterable[str]) -> None:
    for name in schedules:
        job = Job(pipeline, 13, rank, kinds=KINDS, kvstore=kvstore)
        schedule, batch = job.schedule(name, **({"start_batch": 0} if "Semi" in name else {})), job.batch(0)
        loader = iter([batch] * 12)
        for _ in range(2):
            schedule.progress(loader)
        assert_equal(_growth(partial(schedule.progress, loader)), 0, where=f"{name}: tensors that a step leaves")
    job = Job(pipeline, 13, rank, kinds=KINDS, kvstore=kvstore)
    job.step(job.batch(0))
    assert_equal(_growth(partial(job.step, job.batch(0))), 0, where="the loop: tensors that a step leaves")


def _no_cycles_of_rank(rank: Rank) -> None:
    _no_cycles(rank, rank.component("pipeline"), rank.component("kvstore"), LONGEST[:1])


@requirement(
    "PIPE-437",
    "A step MUST NOT leave tensors in cycles of references, which would keep their memory until a garbage collection: "
    "of every schedule and of a loop, over tables of every kind, on one rank and on several.",
)
def test_no_cycles(pipeline: Any, kvstore: Any, rank_pool: Any) -> None:
    _no_cycles(None, pipeline, kvstore, (*TRAINING, *EVALUATION))
    rank_pool.run(_no_cycles_of_rank, 2)


@requirement("PIPE-438", "Nor MUST a lookup and a backward of any module, nor one whose way back nobody takes.")
def test_no_cycles_of_modules(pipeline: Any) -> None:
    batch = batch_of(3)
    weights = values_of((len(batch.flat()[0]),), 5)
    for make in EVERY:
        module = make(pipeline)

        def work(module: Any = module) -> None:
            looked_up(pipeline, module, batch, weights)
            looked_up(pipeline, module, batch, weights).sum().backward()  # type: ignore[no-untyped-call]

        work()
        assert_equal(_growth(work), 0, where=f"{make.__name__}: tensors that a lookup leaves")
