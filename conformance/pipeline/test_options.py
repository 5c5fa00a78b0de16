"""B. What options move: when batches are pulled, where they are copied, what runs ahead, and who averages replicas."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from conformance.harness import assert_equal, raises, requirement, succeeds
from conformance.pipeline.cases import EVAL_FUSED, FUSED, Breaking, Context, LoaderError
from conformance.pipeline.jobs import Batch, Between, Job, Shifted, assert_same_state, outputs_of
from conformance.pipeline.model import assert_bits
from conformance.pipeline.virtual_batches import KINDS, VirtualBatch, move, on_host, virtual
from conformance.provers.virtual_device import VirtualDevice
from twinproof.errors import ConfigError, PipelineError


@requirement(
    "PIPE-284",
    "With enqueue_batch_after_forward the last batch ahead MUST be pulled behind the forward, by SparseDist and Fused; "
    "what its loader raises then MUST come out of the next call, with the step whole and no batch lost.",
)
def test_enqueued_behind(pipeline: Any) -> None:
    for name in ("TrainPipelineSparseDist", FUSED):
        for late in (False, True):
            job, loop, seen = Job(pipeline, 5), Job(pipeline, 5), list[int]()

            def forward(batch: Batch, job: Job = job, seen: list[int] = seen) -> Any:
                seen.append(schedule.pulled_count)  # noqa: B023
                return job.model(batch)

            schedule = job.schedule(name, custom_model_fwd=forward, enqueue_batch_after_forward=late)
            loader, outcomes = Breaking(job.batches(6), {3}, LoaderError("here")), list[str]()
            batches = loop.batches(6)
            for _ in range(7):
                try:
                    output = schedule.progress(loader)
                except LoaderError:
                    outcomes.append("error")
                    assert_same_state(job, loop, f"{name} {late} after an error")
                    continue
                where = f"{name} {late} step {len(outcomes)}"
                assert_bits(output, loop.step(batches[outcomes.count("done")]), where)
                assert_same_state(job, loop, where)
                outcomes.append("done")
            expected = [2, 3, 4, 5, 6, 6] if late else [3, 4, 5, 6, 6, 6]
            assert_equal(seen, expected, where=f"{name} {late} batches pulled when a forward runs")
            order = ["done", "done" if late else "error", "error" if late else "done", *["done"] * 4]
            assert_equal(outcomes, order, where=f"{name} {late} outcomes")


@requirement(
    "PIPE-396",
    "After reset() an error that a loader raised behind the last forward MUST NOT come out of a later call.",
)
def test_reset_behind(pipeline: Any) -> None:
    name = "TrainPipelineSparseDist"
    job, loop = Job(pipeline, 5), Job(pipeline, 5)
    schedule = job.schedule(name, enqueue_batch_after_forward=True)
    schedule.progress(Breaking(job.batches(6), {2}, LoaderError("of the loader before")))
    loop.step(loop.batches(1)[0])
    schedule.reset()
    raised, outputs, loader = list[str](), list[Any](), iter(job.batches(3, 20))
    for _ in range(3):
        try:
            outputs.append(schedule.progress(loader))
        except LoaderError as error:
            raised.append(str(error))
    assert_equal(raised, [], where="what was raised after reset()")
    for number, (output, batch) in enumerate(zip(outputs, loop.batches(3, 20), strict=True)):
        assert_bits(output, loop.step(batch), f"output {number} after reset()")
    assert_same_state(job, loop, "after reset()")


@requirement(
    "PIPE-285",
    "context_type MUST make what stages are given beside a batch, one for each with its number, and contexts MUST "
    "hold those of the batches in flight.",
)
def test_contexts(pipeline: Any) -> None:
    name = "TrainPipelineSparseDist"
    for kind in (Context, None):
        job, seen = Job(pipeline, 5), list[Any]()

        class Watched(getattr(pipeline, name)):  # type: ignore[misc]
            def start_sparse_data_dist(self, batch: Any, context: Any, seen: list[Any] = seen) -> None:
                """Notes the context."""
                seen.append(context)
                super().start_sparse_data_dist(batch, context)

        schedule = Watched(job.model, job.optimizer, job.device, context_type=kind)
        loader = iter(job.batches(4))
        schedule.progress(loader)
        first, count = seen[0].index, len(schedule.contexts)
        assert_equal((first, count, len(schedule.batches)), (0, 2, 2), where=f"{kind} first context, contexts, batches")
        outputs_of(schedule, loader)
        assert_equal([each.index for each in seen], [0, 1, 2, 3], where=f"{kind} contexts of stages")
        assert_equal({type(each) is Context for each in seen}, {kind is Context}, where=f"{kind} made by context_type")


@requirement(
    "PIPE-407",
    "After reset() batches MUST be counted from 0 again: by contexts of either kind, and by what is done every so many "
    "batches.",
)
def test_counted_anew(pipeline: Any) -> None:
    name = "TrainPipelineSparseDist"
    for kind in (Context, None):
        job, seen = Job(pipeline, 5), list[int]()

        class Watched(getattr(pipeline, name)):  # type: ignore[misc]
            def sync_embeddings(self, model: Any, interval: Any, context: Any = None, seen: list[int] = seen) -> None:
                """Notes the batch's number."""
                seen.append(context.index)
                super().sync_embeddings(model, interval, context)

        schedule = Watched(job.model, job.optimizer, job.device, context_type=kind)
        for _ in range(2):
            schedule.progress(loader := iter(job.batches(3)))
            schedule.progress(loader)
            schedule.reset()
        assert_equal(seen, [0, 1, 0, 1], where=f"numbers of batches, context_type {kind}")


@requirement(
    "PIPE-286",
    "With pipeline_postproc a module without trained parameters between the batch and a sharded module MUST run once "
    "a batch, ahead with its exchange, and not again in the model; otherwise the sharded module MUST be left to the "
    "model; either way the bits are the loop's and detach() gives the module back.",
)
def test_postproc(pipeline: Any) -> None:
    for name in ("TrainPipelineSparseDist", FUSED, "TrainPipelineSemiSync"):
        for asked, trained in ((True, False), (False, False), (True, True)):
            jobs = [Job(pipeline, 5, kinds=("table_wise", "row_wise")) for _ in range(2)]
            models = [Between(job.model, Shifted(pipeline, trained=trained)).to(job.device) for job in jobs]
            where = f"{name} {asked} {trained}"
            schedule = getattr(pipeline, name)(models[0], jobs[0].optimizer, jobs[0].device, pipeline_postproc=asked)
            driven = 2 if asked and not trained else 1
            assert_equal(len(schedule._pipelined_modules), driven, where=f"{where} modules that are driven")
            loader = iter(jobs[0].batches(4))
            for step, batch in enumerate(jobs[1].batches(4)):
                jobs[1].optimizer.zero_grad()
                losses, expected = models[1](jobs[1].there(batch))
                losses.sum().backward()
                jobs[1].optimizer.step()
                assert_bits(schedule.progress(loader), expected, f"{where} step {step}")
                assert_same_state(jobs[0], jobs[1], f"{where} step {step}")
            assert_equal(models[0].shifted.calls, 4, where=f"{where} calls of the module")
            schedule.detach()
            models[0](jobs[0].there(jobs[0].batch(0)))
            assert_equal(models[0].shifted.calls, 5, where=f"{where} calls of the module, detached")


@requirement(
    "PIPE-398",
    "A forward that somebody put on a driven module itself, as hooks of other libraries do, MUST be there again after "
    "detach(), and MUST be what runs ahead where the module does.",
)
def test_forwards_of_others(pipeline: Any) -> None:
    job = Job(pipeline, 5, kinds=("table_wise", "row_wise"))
    model, called = Between(job.model, Shifted(pipeline)), list[str]()
    driven = {"shifted": model.shifted, "collection": job.collections[0]}

    def hooked(name: str, module: torch.nn.Module) -> Any:
        original = module.forward

        def forward(*given: Any) -> Any:
            called.append(name)
            return original(*given)

        return forward

    own = {name: hooked(name, module) for name, module in driven.items()}
    for name, module in driven.items():
        module.forward = own[name]
    schedule = pipeline.TrainPipelineSparseDist(model, job.optimizer, job.device, pipeline_postproc=True)
    for number in range(2):
        outputs_of(schedule, iter(job.batches(2)))
        assert_equal(called.count("shifted"), 2, where="calls of what runs ahead")
        schedule.detach()
        schedule.detach()
        found = {name: vars(module).get("forward") is own[name] for name, module in driven.items()}
        assert_equal(found, dict.fromkeys(own, True), where=f"own forwards after {number + 1} times of detach()")
        called.clear()
        model(job.there(job.batch(0)))
        assert_equal(sorted(called), ["collection", "shifted"], where="calls of the model, detached")
        called.clear()


@requirement(
    "PIPE-500",
    "A forward that is put on a module while a pipeline drives it MUST be there after detach() and MUST reach the "
    "module's own forward from then on.",
)
@pytest.mark.parametrize("is_own", [False, True])
def test_forwards_put_on_driven_modules(pipeline: Any, is_own: bool) -> None:
    job, called = Job(pipeline, 5), list[str]()
    module = job.collections[0]

    def put(name: str) -> Any:
        inner = module.forward

        def forward(*given: Any) -> Any:
            called.append(name)
            return inner(*given)

        module.forward = forward
        return forward

    if is_own:
        put("before")
    schedule = pipeline.TrainPipelineSparseDist(job.model, job.optimizer, job.device)
    schedule.progress(iter(job.batches(1)))
    mine = put("while driven")
    called.clear()
    schedule.progress(iter(job.batches(1)))
    assert_equal(called, ["while driven"], where="called in a step")
    for number in range(2):
        schedule.detach()
        assert_equal(
            vars(module).get("forward") is mine, True, where=f"the forward after {number + 1} times of detach()"
        )
        called.clear()
        with succeeds("the model", where="detached"):
            job.model(job.there(job.batch(0)))
        assert_equal(called, ["while driven", *["before"] * is_own], where="called by the model, detached")
        schedule.progress(iter(job.batches(1)))


@requirement(
    "PIPE-501",
    "A pipeline MUST go on driving a model that another pipeline, attached before it, lets go of.",
)
def test_other_pipelines_let_go(pipeline: Any) -> None:
    for name in ("TrainPipelineSparseDist", FUSED, "TrainPipelineSemiSync"):
        job, loop = Job(pipeline, 5), Job(pipeline, 5)
        first = job.schedule(name)
        outputs_of(first, iter(job.batches(2)))
        for batch in loop.batches(2):
            loop.step(batch)
        second, loader = job.schedule(name), iter(job.batches(4))
        for step, batch in enumerate(loop.batches(4)):
            expected = loop.step(batch)
            assert_bits(second.progress(loader), expected, f"{name} step {step}")
            first.detach()
            forwards = [type(module.forward) for module in job.collections]
            assert_equal(forwards, [second._pipelined_forward_type] * 2, where=f"{name} step {step}: forwards")
        second.detach()
        assert_equal(["forward" in vars(each) for each in job.collections], [False] * 2, where="another forward")


class Again(torch.nn.Module):
    """The job's model, whose ids of both modules go through one module, in two calls."""

    def __init__(self, model: Any, shifted: Shifted) -> None:
        super().__init__()
        self.model, self.shifted = model, shifted

    def forward(self, batch: Batch) -> Any:
        """As the model."""
        return self.model(Batch(batch.dense, [self.shifted(batch.ids[0]), self.shifted(batch.ids[1])], batch.target))


@requirement(
    "PIPE-456",
    "With pipeline_postproc a module that the model calls twice MUST NOT run ahead: the sharded modules behind it are "
    "left to the model, whose bits are the loop's.",
)
def test_postproc_called_twice(pipeline: Any) -> None:
    for name in ("TrainPipelineSparseDist", "TrainPipelineSemiSync"):
        jobs = [Job(pipeline, 5, kinds=("table_wise", "row_wise")) for _ in range(2)]
        models = [Again(job.model, Shifted(pipeline)).to(job.device) for job in jobs]
        schedule = getattr(pipeline, name)(models[0], jobs[0].optimizer, jobs[0].device, pipeline_postproc=True)
        assert_equal(len(schedule._pipelined_modules), 0, where=f"{name}: modules that are driven")
        loader = iter(jobs[0].batches(3))
        for step, batch in enumerate(jobs[1].batches(3)):
            jobs[1].optimizer.zero_grad()
            losses, expected = models[1](jobs[1].there(batch))
            losses.sum().backward()
            jobs[1].optimizer.step()
            with succeeds("a step", where=name):
                output = schedule.progress(loader)
            assert_bits(output, expected, f"{name} step {step}")
            assert_same_state(jobs[0], jobs[1], f"{name} step {step}")
        assert_equal(models[0].shifted.calls, 6, where=f"{name}: calls of the module")


class DistributedModelParallel(torch.nn.Module):
    """What torchrec's wrapper is to a pipeline: a model inside of a model."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: Batch) -> Any:
        """The model's."""
        return self.module(batch)


class DMPCollection(DistributedModelParallel):
    """Of torchrec's class of this name: ``sync`` averages replicas."""

    def __init__(self, module: Any, order: list[str]) -> None:
        super().__init__(module)
        self.order = order

    def sync(self) -> None:
        """Notes it."""
        self.order.append("s")


@requirement(
    "PIPE-287",
    "A DMPCollection's replicas MUST be averaged behind the backward and before the dense optimizer, every "
    "dmp_collection_sync_interval_batches batches, None being never, and for each batch where a schedule has no such "
    "argument; no other model is asked to.",
)
def test_replicas(pipeline: Any) -> None:
    name = "dmp_collection_sync_interval_batches"
    for schedule_name, options, expected in (
        ("TrainPipelineSparseDist", {}, "bso" * 4),
        ("TrainPipelineSparseDist", {name: 2}, "bsobo" * 2),
        ("TrainPipelineSparseDist", {name: None}, "bo" * 4),
        ("TrainPipelineSemiSync", {name: 3}, "bsobobobso"),
        (FUSED, {}, "bso" * 4),
        ("TrainPipelineBase", {}, "bso" * 4),
        ("PrefetchTrainPipelineSparseDist", {}, "bso" * 4),
    ):
        job, order = Job(pipeline, 5), list[str]()
        job.model.top.register_full_backward_hook(lambda *_, order=order: order.append("b"))
        job.optimizer.register_step_pre_hook(lambda *_, order=order: order.append("o"))
        model = DMPCollection(job.model, order)
        schedule = getattr(pipeline, schedule_name)(model, job.optimizer, job.device, **options)
        outputs_of(schedule, iter(job.batches(4)))
        assert_equal("".join(order), expected, where=f"{schedule_name} {options} backwards, averages, updates")
    job, order = Job(pipeline, 5), []
    other = DistributedModelParallel(job.model)
    outputs_of(pipeline.TrainPipelineSparseDist(other, job.optimizer, job.device, **{name: 1}), iter(job.batches(2)))


@requirement(
    "PIPE-637",
    "A subclass that averages replicas by hand without a context MUST count the batch whose step it is, and where none "
    "is under way be refused by name; a context in flight MUST say what ran ahead under torchrec's name for it.",
)
def test_stages_without_a_context(pipeline: Any) -> None:
    job, order, numbers = Job(pipeline, 5), list[str](), list[int]()

    class ByHand(pipeline.TrainPipelineSparseDist):  # type: ignore[misc]
        def sync_embeddings(self, model: Any, interval_batches: int | None, context: Any = None) -> None:
            """Without what it is given."""
            numbers.append(context.index)
            super().sync_embeddings(model, interval_batches)

    model = DMPCollection(job.model, order)
    schedule = ByHand(model, job.optimizer, job.device, dmp_collection_sync_interval_batches=2)
    loader, found = iter(job.batches(4)), list[int]()
    for _ in range(4):
        with succeeds("a step", where=f"batch {len(found)}"):
            schedule.progress(loader)
        found.append(len(order))
    assert_equal((numbers, found), ([0, 1, 2, 3], [1, 1, 2, 2]), where="batches, averages so far")
    average = super(ByHand, schedule).sync_embeddings
    with raises(PipelineError, mentions=("context", "sync_embeddings"), where="outside of a step"):
        average(model, 2)
    with succeeds("nothing", where="no interval, and no such model"):
        average(model, None)
        average(job.model, 2)
    assert_equal(len(order), 2, where="averages in the end")
    between = Between(job.model, Shifted(pipeline)).to(job.device)
    ahead = pipeline.TrainPipelineSparseDist(between, job.optimizer, job.device, pipeline_postproc=True)
    ahead.progress(iter(job.batches(3)))
    for is_driven in (True, False):
        if not is_driven:
            ahead.detach()
        ahead.start_sparse_data_dist(ahead.batches[0], ahead.contexts[0])
        made = ahead.contexts[0].postproc_fwd_results
        assert_equal(list(made), ["shifted"], where=f"what ran ahead, driven: {is_driven}")
        expected = ahead.batches[0].ids[0].values() // 2
        assert_bits(made["shifted"].values(), expected, f"what ran ahead, driven: {is_driven}")


class Unpacked(torch.nn.Module):
    """The job's model for a batch that is a list, which the pipeline moves part by part."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, parts: Any) -> Any:
        """As the model."""
        return self.model(Batch(parts[0], [parts[1], parts[2]], parts[3]))


class OnItsOwn(VirtualBatch):
    """A batch that is told which stream to copy on, as torchrec's are."""

    copied_on: list[Any]

    def to(self, device: Any, non_blocking: bool = False, data_copy_stream: Any = None) -> Batch:
        """Copies there; memory is of the stream that it is called on."""
        self.copied_on.append(data_copy_stream)
        return super().to(device)


@requirement(
    "PIPE-288",
    "With enable_inplace_copy_batch the memory of copies MUST be allocated on the caller's stream, and copied into "
    "behind what that stream was given: no access is unordered, and the bits are the loop's; a batch with a to() of "
    "its own is handed the stream to copy on, or refused by name.",
    needs=("streams",),
)
def test_copies_in_place(pipeline: Any) -> None:
    for name in ("TrainPipelineBase", "TrainPipelineSparseDist", FUSED, "TrainPipelineSemiSync"):
        for in_place in (False, True):
            loop, job, device = (
                Job(pipeline, 6, kinds=KINDS, device="cpu"),
                Job(pipeline, 6, kinds=KINDS, device="cpu"),
                VirtualDevice(),
            )
            options: dict[str, Any] = {"start_batch": 10**6} if "Semi" in name else {}
            made_on, allocate = set[str](), device.engine.device_empty

            def noted(size: int, device: Any = device, allocate: Any = allocate, made_on: set[str] = made_on) -> Any:
                made_on.add(device.engine.current())
                return allocate(size)

            device.engine.device_empty = noted  # type: ignore[method-assign, assignment]
            batches = [[b.dense, *b.ids, b.target] for b in on_host(device, job.batches(4))]
            with device:
                schedule = getattr(pipeline, name)(
                    Unpacked(job.model),
                    job.optimizer,
                    engine=device.engine,
                    enable_inplace_copy_batch=in_place,
                    **options,
                )
                loader = iter(batches)
                for _ in range(4):
                    schedule.progress(loader)
            device.check(this_branch_only=True)
            for batch in loop.batches(4):
                loop.step(batch)
            where = f"{name} in place {in_place}"
            assert_same_state(job, loop, where)
            assert_equal(sorted(made_on), ["default" if in_place else "memcpy"], where=f"{where} streams of the copies")
    device, job = VirtualDevice(), Job(pipeline, 6, kinds=KINDS, device="cpu")
    mine = [virtual(device, batch) for batch in on_host(device, job.batches(3))]
    with device:
        schedule = job.schedule("TrainPipelineBase", engine=device.engine, enable_inplace_copy_batch=True)
        with raises(ConfigError, mentions=("data_copy_stream",)):
            schedule.progress(iter(mine))
        told = [OnItsOwn(batch.dense, batch.ids, batch.target) for batch in mine]
        copied_on = list[Any]()
        for batch in told:
            batch.device, batch.copied_on = device, copied_on
        schedule.reset()
        schedule.progress(iter(told))
    assert_equal(copied_on, ["memcpy"] * 2, where="streams that a batch was told to copy on")


@requirement(
    "PIPE-369",
    "What a loader gives on the device, whole batches or some of their tensors, MUST be read by exchanges, lookups and "
    "the forward behind the work of the caller's stream that made it, wherever copies are allocated.",
    needs=("streams",),
)
@pytest.mark.parametrize("in_place", [False, True])
def test_made_on_the_device(pipeline: Any, in_place: bool) -> None:
    for name in ("TrainPipelineBase", "TrainPipelineSparseDist", FUSED):
        loop, job, device = (
            Job(pipeline, 6, kinds=KINDS, device="cpu"),
            Job(pipeline, 6, kinds=KINDS, device="cpu"),
            VirtualDevice(),
        )
        given = on_host(device, job.batches(4))

        def loader(device: Any = device, given: Any = given) -> Iterator[Any]:
            for number, batch in enumerate(given):
                there = move(device, batch)
                ids = [batch.ids[0] if number == 1 else there.ids[0], there.ids[1]]
                yield [there.dense if number % 2 else batch.dense, *ids, there.target]

        with device:
            schedule = getattr(pipeline, name)(
                Unpacked(job.model), job.optimizer, engine=device.engine, enable_inplace_copy_batch=in_place
            )
            batches = loader()
            for _ in given:
                schedule.progress(batches)
        where = f"{name} in place {in_place}"
        assert_equal([str(hazard) for hazard in device.hazards], [], where=f"{where} hazards")
        for batch in loop.batches(4):
            loop.step(batch)
        assert_same_state(job, loop, where)


@requirement(
    "PIPE-399",
    "What a loader gave MUST be held while its batch is in flight, wherever the copy's memory is allocated: until then "
    "nobody knows that the copy from it is over. Behind the batch's step it MUST be let go.",
    needs=("streams",),
)
@pytest.mark.parametrize("in_place", [False, True])
def test_held_while_copied(pipeline: Any, in_place: bool) -> None:
    job, device, seen = Job(pipeline, 6, kinds=KINDS, device="cpu"), VirtualDevice(), list[Any]()
    given = [[b.dense, *b.ids, b.target] for b in on_host(device, job.batches(6))]

    def loader() -> Iterator[Any]:
        while given:
            seen.append(weakref.ref(given[0][0]))
            yield given.pop(0)

    with device:
        schedule = pipeline.TrainPipelineSparseDist(
            Unpacked(job.model), job.optimizer, engine=device.engine, enable_inplace_copy_batch=in_place
        )
        batches = loader()
        for step in range(1, 7):
            schedule.progress(batches)
            held = [number for number, ref in enumerate(seen) if ref() is not None]
            assert_equal(held, list(range(step, len(seen))), where=f"batches held behind step {step}")


@requirement(
    "PIPE-289",
    "With enable_embedding_lookup_prefetch an evaluation MUST look the next batch up behind this one's forward; edits "
    "between two steps MUST be seen all the same.",
    needs=("streams",),
)
def test_eval_prefetch(pipeline: Any) -> None:
    for asked in (False, True):
        job, loop = (Job(pipeline, 9, kinds=("table_wise", "row_wise")) for _ in range(2))
        order = list[str]()
        for collection in job.collections:

            def compute(*args: Any, wrapped: Any = collection.compute, order: list[str] = order) -> Any:
                order.append("l")
                return wrapped(*args)

            collection.compute = compute
        job.model.register_forward_hook(lambda *_, order=order: order.append("f"))
        loop.model.eval()
        schedule, loader = job.schedule(EVAL_FUSED, enable_embedding_lookup_prefetch=asked), iter(job.batches(4))
        for step, batch in enumerate(loop.batches(4)):
            assert_bits(schedule.progress(loader), loop.step(batch), f"{asked} step {step}")
            if step == 1:
                for each in (job, loop):
                    for collection in each.collections:
                        for _, weight, _ in collection.local_shards().values():
                            weight.mul_(1.5)
        # The batch that was looked up before the edit is looked up again.
        expected = "llfllf" + ("ll" if asked else "") + "llfllf"
        assert_equal("".join(order), expected, where=f"{asked} lookups and forwards")


class Packed(torch.nn.Module):
    """The job's model for a batch whose dense parts are in types of ours too."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, parts: Any) -> Any:
        """As the model."""
        dense, target = parts["dense"], parts["target"]
        columns = torch.cat([dense["x"], dense["y"]], dim=1)
        return self.model(Batch(columns, [parts["a"], parts["b"]], target.values() * target.weights()))


def _streams_of_copies(device: VirtualDevice) -> list[str]:
    """The stream of each copy from here on."""
    found, copy = list[str](), device.engine.copy

    def noted(target: torch.Tensor, source: torch.Tensor) -> None:
        found.append(device.engine.current())
        copy(target, source)

    device.engine.copy = noted  # type: ignore[method-assign]
    return found


def _packed(pipeline: Any, device: VirtualDevice, batch: Batch) -> dict[str, Any]:
    count = batch.target.shape[0]
    parts = [batch.target, torch.ones(count), torch.ones(count, dtype=torch.int64)]
    for part in parts:
        device.tracker.memory_of(part, stream="host", on_host=True)
    dense = pipeline.KeyedTensor(["x", "y"], [2, 4], batch.dense)
    return {"dense": dense, "a": batch.ids[0], "b": batch.ids[1], "target": pipeline.JaggedTensor(*parts)}


@requirement(
    "PIPE-429",
    "JaggedTensors and KeyedTensors of a batch MUST be copied as its tensors are, wherever copies are allocated: no "
    "access is unordered, all memory is of the one stream, and the bits are the loop's.",
    needs=("streams",),
)
@pytest.mark.parametrize("in_place", [False, True])
def test_types_of_ours_copied(pipeline: Any, in_place: bool) -> None:
    for name in ("TrainPipelineBase", FUSED):
        (loop, job), device = (Job(pipeline, 6, kinds=KINDS, device="cpu") for _ in range(2)), VirtualDevice()
        copied = _streams_of_copies(device)
        batches = [_packed(pipeline, device, batch) for batch in on_host(device, job.batches(4))]
        with device, succeeds("a step", where=f"{name} in place {in_place}"):
            schedule = getattr(pipeline, name)(
                Packed(job.model), job.optimizer, engine=device.engine, enable_inplace_copy_batch=in_place
            )
            loader = iter(batches)
            for _ in range(4):
                schedule.progress(loader)
        device.check(this_branch_only=True)
        for batch in loop.batches(4):
            loop.step(batch)
        where = f"{name} in place {in_place}"
        assert_same_state(job, loop, where)
        # Of each batch: columns; three parts of the targets; values, lengths and offsets of two batches of ids.
        assert_equal(copied, ["memcpy"] * len(copied), where=f"{where}: streams of the copies")
        assert_equal(len(copied), 4 * 10, where=f"{where}: copies")
