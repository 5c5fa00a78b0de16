"""D. Stages that subclasses of torchrec's pipelines call or override, generic pipelines, and models of other kinds."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from itertools import product
from typing import Any, TypeVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.harness import assert_equal, examples, raises, requirement, succeeds
from conformance.pipeline.batches import place_of, random_jagged, values_of
from conformance.pipeline.cases import EVAL_FUSED, EVALUATION, TRAINING, Context
from conformance.pipeline.jobs import Job, assert_same_state, outputs_of
from conformance.pipeline.model import assert_bits
from conformance.pipeline.sharding import collection_of, sharded_of
from twinproof.errors import ConfigError, PipelineError

ALL = (*TRAINING, *EVALUATION)
AHEAD = ("TrainPipelineSparseDist", "TrainPipelineFusedSparseDist", "TrainPipelineSemiSync")
In = TypeVar("In")
Out = TypeVar("Out")


@requirement(
    "PIPE-300",
    "In evaluation every schedule MUST take a model that returns (None, output); in training None for losses MUST be "
    "refused by name.",
)
def test_no_losses(pipeline: Any) -> None:
    for name in ALL:
        job = Job(pipeline, 3)

        def forward(batch: Any, job: Job = job) -> Any:
            return None, job.model(batch)[1]

        schedule = getattr(pipeline, name)(job.model, job.optimizer, job.device, custom_model_fwd=forward)
        job.model.eval()
        loop = Job(pipeline, 3)
        loop.model.eval()
        found = outputs_of(schedule, iter(job.batches(4)))
        assert_equal(len(found), 4, where=f"{name} outputs")
        for number, (got, batch) in enumerate(zip(found, loop.batches(4), strict=True)):
            assert_bits(got, loop.step(batch), f"{name} output {number}")
        if name in TRAINING:
            job.model.train()
            with raises(ConfigError, mentions=("losses",)):
                schedule.progress(iter(job.batches(4)))


class Lazy:
    """A result that is computed when it is waited for, as torchrec's are: made of a function, not of columns."""

    def __init__(self, finish: Any) -> None:
        self._finish, self._value = finish, None

    def wait(self) -> Any:
        """The columns."""
        self._value = self._finish() if self._value is None else self._value
        return self._value

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wait(), name)


@requirement(
    "PIPE-301",
    "SemiSync MUST drive modules whose output is a lazy result, as torchrec's are, as those whose output is there, bit "
    "for bit.",
)
def test_lazy_results(pipeline: Any) -> None:
    for start in (0, 10**6):
        plain, lazy = (Job(pipeline, 7, kinds=("table_wise", "row_wise")) for _ in range(2))
        for collection in lazy.collections:

            def output_dist(*args: Any, wrapped: Any = collection.output_dist) -> Any:
                given = wrapped(*args)
                return Lazy(given.wait)

            collection.output_dist = output_dist
        schedules = [job.schedule("TrainPipelineSemiSync", start_batch=start) for job in (plain, lazy)]
        loaders = [iter(job.batches(5)) for job in (plain, lazy)]
        for step in range(5):
            expected = schedules[0].progress(loaders[0])
            assert_bits(schedules[1].progress(loaders[1]), expected, f"start {start} step {step}")
            assert_same_state(lazy, plain, f"start {start} step {step}")


@requirement("PIPE-302", "Every schedule MUST be generic in batch and output: subscripted, and subclassed as such.")
def test_generic(pipeline: Any) -> None:
    refused = []
    for name in ALL:
        try:
            getattr(pipeline, name)[In, Out]
        except TypeError:
            refused.append(name)
    assert_equal(refused, [], where="schedules that cannot be subscripted")
    for name in ALL:
        kind = getattr(pipeline, name)

        class Mine(kind[In, Out]):  # type: ignore[misc, valid-type]
            """A pipeline of somebody's."""

        job, loop = Job(pipeline, 3), Job(pipeline, 3)
        if name in EVALUATION:
            loop.model.eval()
        options = {"start_batch": 10**6} if "Semi" in name else {}
        schedule: Any = Mine[Any, torch.Tensor](job.model, job.optimizer, job.device, **options)
        assert_equal(isinstance(schedule, kind), True, where=f"{name} a subclass of it")
        found = outputs_of(schedule, iter(job.batches(3)))
        for number, (got, batch) in enumerate(zip(found, loop.batches(3), strict=True)):
            assert_bits(got, loop.step(batch), f"{name} output {number}")


STAGES = (
    "fill_pipeline",
    "enqueue_batch",
    "copy_batch_to_gpu",
    "start_sparse_data_dist",
    "wait_sparse_data_dist",
    "extract_model_input_from_batch",
    "start_embedding_lookup",
    "_wait_for_batch",
    "wait_embedding_lookup",
    "_backward",
    "embedding_backward",
    "sync_embeddings",
    "_optimizer_step",
    "dequeue_batch",
)


def _noting(kind: Any, seen: list[tuple[str, Any]]) -> Any:
    """A subclass whose stages are noted with the number of their batch, and do what they did."""

    def noted(name: str) -> Any:
        def stage(self: Any, *args: Any) -> Any:
            index = [arg.index for arg in args if hasattr(arg, "index") and not isinstance(arg, torch.Tensor)]
            seen.append((name, index[0] if index else None))
            return getattr(kind, name)(self, *args)

        return stage

    return type("Noting", (kind,), {name: noted(name) for name in STAGES if hasattr(kind, name)})


@requirement(
    "PIPE-303",
    "A subclass's stages, under torchrec's names, MUST be called by progress(): for each batch once, exchange of "
    "sizes before exchange of ids before lookup, backward before replicas before optimizer; what they do by super() "
    "leaves the loop's bits.",
)
def test_overridden(pipeline: Any) -> None:
    for name in ALL:
        job, loop, seen = Job(pipeline, 3), Job(pipeline, 3), list[tuple[str, Any]]()
        if name in EVALUATION:
            loop.model.eval()
        kind = getattr(pipeline, name)
        options = {"start_batch": 10**6} if "Semi" in name else {}
        schedule, loader = _noting(kind, seen)(job.model, job.optimizer, job.device, **options), iter(job.batches(4))
        for step, batch in enumerate(loop.batches(4)):
            assert_bits(schedule.progress(loader), loop.step(batch), f"{name} step {step}")
        assert_same_state(job, loop, name)
        called = [stage for stage, _ in seen]
        for stage in STAGES:
            counted = {"fill_pipeline": 4, "enqueue_batch": 5, "copy_batch_to_gpu": 5}.get(stage, 4)
            training = stage in ("_backward", "embedding_backward", "sync_embeddings", "_optimizer_step")
            there = hasattr(kind, stage) and not (training and name in EVALUATION)
            assert_equal(called.count(stage), counted if there else 0, where=f"{name} calls of {stage}")
        for index in range(4):
            mine = [stage for stage, number in seen if number == index]
            order = [stage for stage in STAGES if stage in mine]
            assert_equal(mine, order, where=f"{name} stages of batch {index}")
        updates = [stage for stage in called if stage in ("_backward", "sync_embeddings", "_optimizer_step")]
        expected = [] if name in EVALUATION else ["_backward", "sync_embeddings", "_optimizer_step"] * 4
        assert_equal(updates, expected, where=f"{name} order of a step's end")


@requirement(
    "PIPE-304",
    "Whoever pulls batches, takes the backward's loss or transforms a batch in an override, as public subclasses of "
    "torchrec's pipelines do, MUST have the pipeline's other promises kept.",
)
def test_public_overrides(pipeline: Any) -> None:
    for name in AHEAD:
        kind = getattr(pipeline, name)

        class Mine(kind):  # type: ignore[misc, valid-type]
            """Scales the loss, pulls by itself, and changes what was copied."""

            _dataloader_iter: Any

            def _next_batch(self, dataloader_iter: Iterator[Any]) -> Any:
                if dataloader_iter is not self._dataloader_iter:
                    self._dataloader_iter, self._dataloader_exhausted = dataloader_iter, False
                batch = None if self._dataloader_exhausted else next(dataloader_iter, None)
                self._dataloader_exhausted = batch is None
                return batch

            def _backward(self, losses: torch.Tensor) -> None:
                (2.0 * torch.sum(losses, dim=0)).backward()  # type: ignore[no-untyped-call]

            def copy_batch_to_gpu(self, dataloader_iter: Iterator[Any]) -> Any:
                """With other targets."""
                batch, context = super().copy_batch_to_gpu(dataloader_iter)
                if batch is not None:
                    batch.target = batch.target + 1
                return batch, context

        job, loop = Job(pipeline, 3), Job(pipeline, 3)
        options = {"start_batch": 10**6} if "Semi" in name else {}
        schedule = Mine(job.model, job.optimizer, job.device, **options)
        found = outputs_of(schedule, iter(job.batches(4)))
        assert_equal((len(found), schedule.pulled_count), (4, 4), where=f"{name} outputs and batches pulled")
        for number, (got, batch) in enumerate(zip(found, loop.batches(4), strict=True)):
            batch.target = batch.target + 1
            loop.optimizer.zero_grad()
            losses, expected = loop.model(loop.there(batch))
            (2.0 * losses.sum()).backward()
            loop.optimizer.step()
            assert_bits(got, expected, f"{name} output {number}")
        assert_same_state(job, loop, name)


@requirement(
    "PIPE-311",
    "Stages that are called by hand, ahead of their places, MUST NOT be done again by progress(): a pipeline may be "
    "filled, and its first batch sent and received, before the first step.",
)
def test_by_hand(pipeline: Any) -> None:
    for name in AHEAD:
        job, loop, sent = Job(pipeline, 3), Job(pipeline, 3), list[int]()
        options = {"start_batch": 10**6} if "Semi" in name else {}
        schedule, dist = job.schedule(name, **options), job.collections[0].input_dist
        job.collections[0].input_dist = lambda *args, sent=sent, dist=dist: (sent.append(1), dist(*args))[1]
        loader = iter(job.batches(6))
        schedule.fill_pipeline(loader)
        assert_equal(schedule.enqueue_batch(loader), True, where=f"{name} a batch more")
        schedule.start_sparse_data_dist(schedule.batches[0], schedule.contexts[0])
        schedule.wait_sparse_data_dist(schedule.contexts[0])
        for step, batch in enumerate(loop.batches(6)):
            assert_bits(schedule.progress(loader), loop.step(batch), f"{name} step {step}")
        assert_same_state(job, loop, name)
        assert_equal(len(sent), 6, where=f"{name} exchanges of six batches")


@requirement(
    "PIPE-305",
    "A subclass with a method that torchrec's progress() calls and this one has no place for MUST be refused when it "
    "is made, by the method's name; so MUST a backward hook at a site that is not torchrec's.",
)
def test_not_called(pipeline: Any) -> None:
    for name in ALL:
        job, kind = Job(pipeline, 3), getattr(pipeline, name)
        for method in ("_pipeline_model", "_set_module_context", "_mlp_forward"):
            with raises(ConfigError, mentions=(method,)):
                type("Mine", (kind,), {method: lambda self: None})(job.model, job.optimizer)
        with raises(ConfigError, mentions=("register_backward_hook",)):
            kind(job.model, job.optimizer).register_backward_hook("top", print)


@requirement(
    "PIPE-306",
    "batches and contexts MUST be queues of what is in flight: a subclass may fill and empty them as torchrec's do, "
    "one batch and its context together.",
)
def test_queues(pipeline: Any) -> None:
    job = Job(pipeline, 3)
    kind = pipeline.TrainPipelineSparseDist

    class Mine(kind):  # type: ignore[misc, valid-type]
        """Keeps its queues by hand."""

        def dequeue_batch(self) -> None:
            """As torchrec writes it."""
            self.batches.popleft()
            self.contexts.popleft()

    schedule, given, loop = Mine(job.model, job.optimizer, job.device), job.batches(5), Job(pipeline, 3)
    schedule.batches.append(job.there(given[0]))
    schedule.contexts.append(None)
    first = schedule.batches[0]
    assert_equal((len(schedule.batches), len(schedule.contexts)), (1, 1), where="queues after one batch")
    loader = iter(given[1:])
    for step, batch in enumerate(loop.batches(5)):
        assert_equal(schedule.batches[0] is first, step == 0, where=f"the first batch before step {step}")
        assert_bits(schedule.progress(loader), loop.step(batch), f"step {step}")
    assert_equal((len(schedule.batches), len(schedule.contexts)), (0, 0), where="queues at the end")
    with raises(PipelineError):
        schedule.batches.insert(0, None) if schedule.batches else schedule.contexts.append(None)


@requirement(
    "PIPE-406",
    "What is taken out of batches and out of contexts, one and then the other from either end, MUST be a batch and its "
    "own context; reset() between the two MUST leave nothing of either.",
)
def test_taken_together(pipeline: Any) -> None:
    for first, second in (("batches", "contexts"), ("contexts", "batches")):
        for end in ("popleft", "pop"):
            job, loop = Job(pipeline, 3), Job(pipeline, 3)
            schedule, given = job.schedule("TrainPipelineSparseDist", context_type=Context), job.batches(3)
            where = f"{end} of {first}, then of {second}"

            def taken(queue: str, schedule: Any = schedule, end: str = end) -> Any:
                return getattr(getattr(schedule, queue), end)()

            for batch in given:
                schedule.enqueue_batch(iter([batch]))
            one = taken(first)
            assert_equal(len(getattr(schedule, second)), 3, where=f"{where}: the second queue before it is emptied")
            found = {first: one, second: taken(second)}
            number = 0 if end == "popleft" else 2
            assert_equal(found["contexts"].index, number, where=f"{where}: the context")
            assert_bits(found["batches"].dense, given[number].dense, f"{where}: the batch")
            assert_equal((len(schedule.batches), len(schedule.contexts)), (2, 2), where=f"{where}: what is left")
            taken(first)
            schedule.reset()
            assert_equal((len(schedule.batches), len(schedule.contexts)), (0, 0), where=f"{where}: after reset()")
            output = schedule.progress(iter(job.batches(2)))
            assert_bits(output, loop.step(loop.batches(1)[0]), f"{where}: the step after reset()")


TAKING: dict[str, Any] = {
    "popleft": lambda queue, place: queue.popleft(),
    "pop": lambda queue, place: queue.pop(),
    "pop from a place": lambda queue, place: queue.pop(place),
    "pop from a place of the end": lambda queue, place: queue.pop(place - len(queue)),
    "del": lambda queue, place: queue.__delitem__(place),
}


def _taken(way: str, held: list[Any], place: int) -> Any:
    """What a list of the same gives, which is no longer in it."""
    found = held.pop({"popleft": 0, "pop": -1}.get(way, place))
    return None if way == "del" else found


@requirement(
    "PIPE-545",
    "Whatever is taken out of batches and out of contexts, in any order, by any method and from any place, each MUST "
    "give and keep what a queue of its own would.",
)
@examples(60)
@given(
    ways=st.lists(
        st.tuples(st.sampled_from(["batches", "contexts"]), st.sampled_from(sorted(TAKING)), st.integers(0, 3)),
        min_size=2,
        max_size=8,
    )
)
def test_taken_in_any_order(pipeline: Any, ways: list[tuple[str, str, int]]) -> None:
    job = Job(pipeline, 3, kinds=("table_wise",))
    schedule = job.schedule("TrainPipelineSparseDist", context_type=Context)
    for batch in job.batches(4):
        schedule.enqueue_batch(iter([batch]))
    held = {name: list(getattr(schedule, name)) for name in ("batches", "contexts")}
    done = list[str]()
    for name, way, place in ways:
        if not held[name]:
            continue
        queue, place = getattr(schedule, name), place % len(held[name])
        done.append(f"{way} {place} of {name}")
        with succeeds("what is taken", where=f"{done}"):
            got = TAKING[way](queue, place)
        assert_equal(got is _taken(way, held[name], place), True, where=f"{done}: what was taken")
        for each, rest in held.items():
            now = list(getattr(schedule, each))
            assert_equal([id(one) for one in now], [id(one) for one in rest], where=f"{done}: what {each} keep")
            assert_equal(len(getattr(schedule, each)), len(rest), where=f"{done}: how many {each} there are")


@requirement(
    "PIPE-307",
    "attach() MUST start the exchange of the first batch in flight, attach(sparse_dist=False) MUST leave it to the "
    "next step; either way the next steps are the loop's.",
)
def test_attach(pipeline: Any) -> None:
    for name in AHEAD:
        for sparse_dist in (True, False):
            job, loop = Job(pipeline, 3), Job(pipeline, 3)
            options = {"start_batch": 10**6} if "Semi" in name else {}
            schedule, loader = job.schedule(name, **options), iter(job.batches(5))
            batches = loop.batches(5)
            for step in (0, 1):
                assert_bits(schedule.progress(loader), loop.step(batches[step]), f"{name} step {step}")
            schedule.detach()
            sent, dist = list[int](), job.collections[0].input_dist
            job.collections[0].input_dist = lambda *args, sent=sent, dist=dist: (sent.append(1), dist(*args))[1]
            schedule.attach(sparse_dist=sparse_dist)
            assert_equal(len(sent), int(sparse_dist), where=f"{name} {sparse_dist} exchanges when attached")
            for step in (2, 3, 4):
                assert_bits(schedule.progress(loader), loop.step(batches[step]), f"{name} {sparse_dist} step {step}")
            assert_equal(len(sent), 3, where=f"{name} {sparse_dist} exchanges of three batches")
            assert_same_state(job, loop, f"{name} {sparse_dist}")


@requirement(
    "PIPE-492",
    "A copy of a driven model MUST have the forwards that its modules had of their own before they were driven.",
)
def test_copies_have_their_own_forwards(pipeline: Any) -> None:
    for name in AHEAD:
        job = Job(pipeline, 3)
        said = object()
        job.collections[0].forward = lambda features, said=said: said
        schedule = job.schedule(name)
        schedule.progress(iter(job.batches(3)))
        copied = copy.deepcopy(schedule._model)
        with succeeds("a forward", where=name):
            found = copied.collections[0](None)
        assert_equal(found is said, True, where=f"{name}: the copy's own forward is called")


class Alike(Context):
    """A context that equals every other, as one without values of its own does."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Alike)

    def __hash__(self) -> int:
        return 0


@requirement(
    "PIPE-480",
    "A stage MUST be of the batch that its context was made for, though contexts of other batches in flight equal it.",
)
def test_equal_contexts(pipeline: Any) -> None:
    job, loop = Job(pipeline, 3), Job(pipeline, 3)
    schedule, loader = job.schedule("TrainPipelineSparseDist", context_type=Alike), iter(job.batches(4))
    sent, dist = list[torch.Tensor](), job.collections[0].input_dist

    def send(*given: Any) -> Any:
        sent.append(given[-1].values())
        return dist(*given)

    job.collections[0].input_dist = send
    with succeeds("stages by hand", where="contexts that are equal"):
        schedule.fill_pipeline(loader)
        schedule.enqueue_batch(loader)
        schedule.start_sparse_data_dist(schedule.batches[-1], schedule.contexts[-1])
    last = loop.there(loop.batches(4)[len(schedule.batches) - 1])
    assert_bits(sent[-1], last.ids[0].values(), "ids of the batch whose context was given")
    for number, batch in enumerate(loop.batches(4)):
        with succeeds("a step", where=f"contexts that are equal, step {number}"):
            output = schedule.progress(loader)
        assert_bits(output, loop.step(batch), f"contexts that are equal, output {number}")
    assert_same_state(job, loop, "contexts that are equal")


class DMPCollection(torch.nn.Module):
    """Of torchrec's class of this name: ``sync`` averages replicas."""

    def __init__(self, module: Any, steps: list[int]) -> None:
        super().__init__()
        self.module, self.steps, self.count = module, steps, 0

    def forward(self, batch: Any) -> Any:
        """The model's."""
        return self.module(batch)

    def sync(self) -> None:
        """Notes the step."""
        self.steps.append(self.count)


@requirement(
    "PIPE-481",
    "Where replicas are averaged every so many batches, reset() MUST begin to count anew: the first batch behind it is "
    "averaged, whatever number of batches came before.",
)
def test_averaged_behind_reset(pipeline: Any) -> None:
    for name in ("TrainPipelineSparseDist", "TrainPipelineSemiSync"):
        job, steps = Job(pipeline, 3), list[int]()
        model = DMPCollection(job.model, steps)
        options = {"dmp_collection_sync_interval_batches": 3}
        schedule = getattr(pipeline, name)(model, job.optimizer, job.device, **options)
        for count in (1, 2, 4):
            loader = iter(job.batches(count))
            for _ in range(count):
                schedule.progress(loader)
                model.count += 1
            schedule.reset()
        assert_equal(steps, [0, 1, 3, 6], where=f"{name} steps that average, with reset() behind the first and third")


@requirement(
    "PIPE-482",
    "With enqueue_batch_after_forward the evaluation of Fused, too, MUST pull the last batch ahead behind the forward.",
)
def test_evaluation_pulls_behind(pipeline: Any) -> None:
    for late in (False, True):
        job, seen = Job(pipeline, 3), list[int]()

        def forward(batch: Any, job: Job = job, seen: list[int] = seen) -> Any:
            seen.append(schedule.pulled_count)  # noqa: B023
            return job.model(batch)

        schedule = job.schedule(EVAL_FUSED, custom_model_fwd=forward, enqueue_batch_after_forward=late)
        outputs_of(schedule, iter(job.batches(5)))
        expected = [2, 3, 4, 5, 5] if late else [3, 4, 5, 5, 5]
        assert_equal(seen, expected, where=f"batches pulled when a forward runs, behind it {late}")


@requirement(
    "PIPE-484",
    "Every schedule MUST honour the arguments that it shares with others: custom_model_fwd runs once a step, "
    "execute_all_batches=False leaves the last batches, and with enable_inplace_copy_batch batches come by "
    "inplace_copy_batch_to_gpu, otherwise by copy_batch_to_gpu alone.",
)
@pytest.mark.parametrize("name", ALL)
def test_shared_arguments(pipeline: Any, name: str) -> None:
    kind, ahead = getattr(pipeline, name), getattr(pipeline, name).ahead_count
    for in_place, whole in ((False, True), (True, False)):
        job, calls, copies = Job(pipeline, 3), list[int](), list[int]()

        class Watched(kind):  # type: ignore[misc, valid-type]
            def inplace_copy_batch_to_gpu(self, loader: Any, copies: list[int] = copies) -> Any:
                """Notes the copy."""
                copies.append(1)
                return super().inplace_copy_batch_to_gpu(loader)

        def forward(batch: Any, job: Job = job, calls: list[int] = calls) -> Any:
            calls.append(1)
            return job.model(batch)

        options = {"enable_inplace_copy_batch": in_place, "execute_all_batches": whole, "custom_model_fwd": forward}
        if "enable_inplace_copy_batch" not in inspect.signature(kind).parameters:
            options.pop("enable_inplace_copy_batch")
        schedule = Watched(job.model, job.optimizer, job.device, **options)
        outputs, where = outputs_of(schedule, iter(job.batches(7))), f"{name} in place {in_place}, all batches {whole}"
        expected = 7 if whole else 7 - ahead
        assert_equal((len(outputs), len(calls)), (expected, expected), where=f"{where}: outputs and forwards")
        # The last time there is nothing to copy.
        assert_equal(len(copies), 8 if in_place else 0, where=f"{where}: copies in place")


@requirement(
    "PIPE-485",
    "Batches that a subclass appends MUST have numbers of their own, in order with those of the loader, and what is "
    "done every so many batches MUST count them.",
)
def test_numbers_of_appended_batches(pipeline: Any) -> None:
    job, steps = Job(pipeline, 3), list[int]()
    model = DMPCollection(job.model, steps)
    options = {"dmp_collection_sync_interval_batches": 2}
    schedule = pipeline.TrainPipelineSparseDist(model, job.optimizer, job.device, **options)
    given = job.batches(6)
    for batch in given[:2]:
        schedule.batches.append(job.there(batch))
    numbers = [context.index for context in schedule.contexts]
    schedule.enqueue_batch(loader := iter(given[2:]))
    numbers.append(schedule.contexts[2].index)
    assert_equal(numbers, [0, 1, 2], where="numbers of two batches that were appended, and of the loader's")
    for _ in given:
        schedule.progress(loader)
        model.count += 1
    assert_equal(steps, [0, 2, 4], where="steps that average")


class _Calls(torch.nn.Module):
    """Calls one sharded module with the batch, with a trained layer's result, or with the batch as it was changed."""

    def __init__(self, pipeline: Any, kinds: tuple[str, ...]) -> None:
        super().__init__()
        tables = [pipeline.EmbeddingBagConfig(10, 4, "t", feature_names=["f"])]
        collection = collection_of(pipeline, tables, [values_of((10, 4), 1)])
        self.sharded = sharded_of(pipeline, collection, {"t": pipeline.table_wise(0)}, "sgd")
        self.scale = torch.nn.Parameter(torch.ones(1, device=place_of(pipeline)))
        self._make, self._kinds = pipeline.KeyedJaggedTensor, kinds

    def forward(self, batch: Any) -> Any:
        """The sum of all, and each."""
        found = []
        for kind in self._kinds:
            if kind == "changed":
                batch.values().add_(1)
            scaled = (batch.values() * self.scale * 2).long() % 10
            given = batch if kind != "more" else self._make(["f"], scaled, lengths=batch.lengths())
            found.append(self.sharded(given).values().sum())
        return torch.stack(found).sum() * self.scale.sum(), torch.stack(found)


@requirement(
    "PIPE-557",
    "A sharded module that is called several times in one forward MUST be refused when a schedule is made if any of "
    "the calls could run ahead, whichever comes first and whatever the others are given; if none could, it MUST train "
    "as the loop.",
)
def test_several_calls(pipeline: Any) -> None:
    kinds = ("batch", "more", "changed")
    for name, order in product(AHEAD[:2], (*product(kinds, repeat=2), ("more", "changed", "batch", "more"))):
        job, loop = (_Calls(pipeline, order) for _ in range(2))
        schedule_of, optimizer = getattr(pipeline, name), torch.optim.SGD([job.scale], 0.125)
        # What the forward changed is changed for the calls behind it, too.
        ahead = [kind == "batch" and "changed" not in order[:place] for place, kind in enumerate(order)]
        if any(ahead):
            with raises(ConfigError, mentions=("twice", "sharded"), where=f"{name}: {order}"):
                schedule_of(job, optimizer, place_of(pipeline))
            continue
        trained = torch.optim.SGD([loop.scale], 0.125)
        batches = [random_jagged(["f"], [2], 3, step) for step in range(3)]
        loader = iter([batch.kjt(pipeline) for batch in batches])
        schedule = schedule_of(job, optimizer, place_of(pipeline))
        for step, batch in enumerate(batches):
            output = schedule.progress(loader)
            trained.zero_grad()
            loss, expected = loop(batch.kjt(pipeline).to(place_of(pipeline)))
            loss.backward()
            trained.step()
            assert_bits(output.detach(), expected.detach(), f"{name}: {order}, step {step}")
