"""What is left of pipelines that are copied, or dropped, and of the models that they drove."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, cast

import pytest
import torch

from conformance.harness import assert_equal, raises, requirement, succeeds
from conformance.harness.surroundings import without_collection
from conformance.pipeline.cases import EVALUATION, TRAINING, LoaderError, with_bad_id
from conformance.pipeline.jobs import Job, outputs_of
from conformance.pipeline.model import assert_bits
from twinproof.errors import PipelineError, UnsupportedError


@requirement(
    "PIPE-672",
    "A copy or a pickle of a pipeline, with batches in flight or without, MUST be refused by name; the pipeline goes "
    "on bit for bit, and a copy of its model is a plain one.",
)
@pytest.mark.parametrize("name", [*TRAINING, *EVALUATION])
def test_copied_pipelines(pipeline: Any, name: str) -> None:
    copies: dict[str, Any] = {"copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": pickle.dumps}
    outputs: list[Any] = []
    for is_copied in (True, False):
        job = Job(pipeline, 17)
        schedule, loader = job.schedule(name), iter(job.batches(5))
        outputs.append([])
        for _ in range(2):
            for kind, make in copies.items() if is_copied else ():
                count = len(schedule.batches)
                mentions = ("drives one model", "a copy of the model", f"where: {name}")
                with raises(UnsupportedError, mentions=mentions, where=f"{kind}, {count} in flight"):
                    make(schedule)
                assert_equal(len(schedule.batches), count, where=f"{kind}: batches in flight")
            outputs[-1].append(schedule.progress(loader))
        outputs[-1] += outputs_of(schedule, loader)
        if is_copied:
            copied, plain = copy.deepcopy(schedule._model), schedule.detach()
            with succeeds("a forward", where="the copied model"):
                predictions = copied(job.there(job.batch(0)))[1]
            assert_bits(predictions, plain(job.there(job.batch(0)))[1], where="the copied model")
    for step, (got, expected) in enumerate(zip(*outputs, strict=True)):
        assert_bits(got, expected, where=f"step {step}")


class _Watch:
    """What of jobs and their pipelines is there, by name; holds none of it."""

    def __init__(self) -> None:
        self._held: dict[str, weakref.ref[Any]] = {}

    def see(self, name: str, *things: Any) -> None:
        """From now on."""
        for number, thing in enumerate(things):
            self._held[f"{name} {number}"] = weakref.ref(thing)

    def see_job(self, job: Job) -> None:
        """The model, and memory of its tables, of dense parameters and of states."""
        self.see("model", job.model, *job.collections)
        self.see("optimizer", job.optimizer)
        self.see("store", *(store for store, _, _ in job.stored))
        params = list(job.model.parameters())
        momenta = [state["momentum_buffer"] for state in job.optimizer.state.values()]
        shards = [shard for collection in job.collections for shard in collection.local_shards().values()]
        tables = [tensor for _, weight, states in shards for tensor in (weight, *states.values())]
        self.see("memory", *(tensor.untyped_storage() for tensor in (*params, *momenta, *tables)))

    def left(self) -> list[str]:
        """The names of what is there."""
        return [name for name, thing in self._held.items() if thing() is not None]


def _warm(pipeline: Any, name: str) -> None:
    """What is imported in the first step of a process keeps frames in cycles of its own."""
    job = Job(pipeline, 5)
    _driven(job, job.schedule(name), iter(job.batches(3)))


def _driven(job: Job, schedule: Any, loader: Iterator[Any]) -> None:
    for _ in range(2):
        schedule.progress(loader)


def _detached(job: Job, schedule: Any, loader: Iterator[Any]) -> None:
    _driven(job, schedule, loader)
    schedule.detach()


def _switched(job: Job, schedule: Any, loader: Iterator[Any]) -> None:
    _driven(job, schedule, loader)
    job.model.eval()
    _driven(job, schedule, loader)


def _run_out(job: Job, schedule: Any, loader: Iterator[Any]) -> None:
    outputs_of(schedule, loader)
    schedule.reset()


WAYS: tuple[Callable[[Job, Any, Iterator[Any]], None], ...] = (_driven, _detached, _switched, _run_out)


@requirement(
    "PIPE-673",
    "A pipeline, the model that it drove, copies of it, its tables, its optimizer and batches in flight MUST be gone "
    "when nobody has them any more, without a garbage collection: of every schedule, over tables of every kind.",
)
@pytest.mark.parametrize("name", [*TRAINING, *EVALUATION])
def test_dropped_pipelines(pipeline: Any, kvstore: Any, name: str) -> None:
    _warm(pipeline, name)
    for way in WAYS:
        with without_collection():
            for options in ({"kvstore": kvstore}, {"processed": True, "kinds": ("table_wise", "column_wise")}):
                job, watch = Job(pipeline, 19, **options), _Watch()
                batches = job.batches(6)
                watch.see("batch", *batches, *(batch.dense for batch in batches))
                watch.see("ids", *(ids.values().untyped_storage() for batch in batches for ids in batch.ids))
                schedule, loader = job.schedule(name), iter(batches)
                del batches
                way(job, schedule, loader)
                if not job.stored:
                    watch.see("copy of the model", *copy.deepcopy(job.model).modules())
                watch.see("pipeline", schedule)
                watch.see("batch in flight", *schedule._queue)
                watch.see_job(job)
                del job, schedule, loader
                assert_equal(watch.left(), [], where=f"{name}, {way.__name__[1:]}, {', '.join(options)}: what is left")


@requirement(
    "PIPE-674",
    "The model of a pipeline that was dropped MUST be as one that was given back: its modules have the forwards that "
    "they had, and train; one that another pipeline has taken over meanwhile stays driven by that one.",
)
@pytest.mark.parametrize("name", [*TRAINING, *EVALUATION])
def test_models_of_dropped_pipelines(pipeline: Any, name: str) -> None:
    job, loop = Job(pipeline, 21), Job(pipeline, 21)
    own = job.collections[0].forward
    job.collections[0].forward = own
    schedule, loader = job.schedule(name), iter(job.batches(4))
    if name in EVALUATION:
        schedule.progress(loader)
    else:
        assert_bits(schedule.progress(loader), loop.step(loop.batches(1)[0]), where="the pipeline's step")
    assert_equal(job.collections[0].forward is own, False, where="forward of a driven module")
    del schedule
    assert_equal(job.collections[0].forward is own, True, where="a forward of its own, behind the pipeline")
    assert_equal("forward" in vars(job.collections[1]), False, where="its class's forward, behind the pipeline")
    for number in (1, 2):
        with succeeds("a step", where="behind the pipeline"):
            found = job.step(job.batch(number))
        assert_bits(found, loop.step(loop.batch(number)), where=f"batch {number}")
    first, second = job.schedule(name), job.schedule(name)
    del first
    with succeeds("progress", where="of the second, behind the first"):
        second.progress(iter(job.batches(3)))


@requirement(
    "PIPE-679",
    "A forward that was taken from a driven module and outlives it MUST refuse to be called and pickled, by name.",
)
@pytest.mark.parametrize("name", [*TRAINING, *EVALUATION])
def test_forwards_that_outlive_their_module(pipeline: Any, name: str) -> None:
    job = Job(pipeline, 29)
    schedule, loader = job.schedule(name), iter(job.batches(3))
    schedule.progress(loader)
    forward, batch = job.collections[1].forward, job.batch(0)
    schedule.detach()
    del job, schedule, loader
    gc.collect()
    for what, act in {"called": partial(forward, batch), "pickled": partial(pickle.dumps, forward)}.items():
        with raises(PipelineError, mentions=("has gone", "expected: a module", "where: "), where=f"{name}: {what}"):
            act()


class _Last(torch.nn.Module):
    """What can be told to raise, behind all lookups."""

    def __init__(self, *, fails: bool) -> None:
        super().__init__()
        self.fails = fails

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """The values."""
        if self.fails:
            raise LoaderError("in a forward")
        return values


def _failed(job: Job, schedule: Any, what: str) -> None:
    """Whatever is raised is caught, and forgotten by whoever caught it."""
    batches = job.batches(5)
    if what == "bad id":
        batches[2].ids[0] = with_bad_id(job.pipeline, batches[2].ids[0])

    def of_batches() -> Iterator[Any]:
        for number, batch in enumerate(batches):
            if number == 2 and what == "loader":
                raise LoaderError("of a loader")
            yield batch

    loader = of_batches()
    job.model.dropout = cast("Any", _Last(fails=what == "forward"))
    for _ in range(4):
        with suppress(Exception):
            schedule.progress(loader)
    if what == "untraceable":
        with suppress(Exception):
            schedule.attach(torch.nn.ModuleList([torch.nn.Sequential(job.collections[0]), job.collections[1]]))


@requirement(
    "PIPE-675",
    "What a pipeline raised, of its own, a loader's or a model's, MUST NOT keep the pipeline, its model or batches "
    "when nobody has the exception any more, without a garbage collection.",
)
@pytest.mark.parametrize("name", [*TRAINING, *EVALUATION])
def test_forgotten_exceptions(pipeline: Any, name: str) -> None:
    _warm(pipeline, name)
    for what in ("loader", "forward", "bad id", "untraceable"):
        with without_collection():
            job, watch = Job(pipeline, 23), _Watch()
            schedule = job.schedule(name)
            _failed(job, schedule, what)
            watch.see("pipeline", schedule)
            watch.see("batch in flight", *schedule._queue)
            watch.see_job(job)
            del job, schedule
            assert_equal(watch.left(), [], where=f"{name}, {what}: what is left")


@requirement(
    "PIPE-676",
    "A model whose place another one has taken MUST be gone, with its tables, when nobody else has it, without a "
    "garbage collection; the pipeline goes on with the other.",
)
@pytest.mark.parametrize("name", [*TRAINING, *EVALUATION])
def test_models_that_were_replaced(pipeline: Any, name: str) -> None:
    _warm(pipeline, name)
    with without_collection():
        job, other, watch = Job(pipeline, 25), Job(pipeline, 25), _Watch()
        schedule, loader = job.schedule(name), iter(job.batches(6))
        schedule.progress(loader)
        watch.see("model", job.model, *job.collections)
        tables = [weight for collection in job.collections for _, weight, _ in collection.local_shards().values()]
        watch.see("table", *(table.untyped_storage() for table in tables))
        del job, tables
        schedule.attach(other.model)
        with succeeds("progress", where="the other model"):
            schedule.progress(loader)
        assert_equal(watch.left(), [], where=f"{name}: what is left of the first model")


class _Keeping(torch.nn.Module):
    """A model that keeps what it has seen: numbers, results and buffers."""

    steps: torch.Tensor
    running: torch.Tensor

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model, self.count, self.last = model, 0, None
        self.register_buffer("steps", torch.zeros(1))
        self.register_buffer("running", torch.zeros(1))

    def forward(self, batch: Any) -> Any:
        """The model's, with a constant that torch's tracer puts on the model."""
        self.count += 1
        self.steps += 1.0
        self.running = self.running + 1.0
        losses, predictions = self.model(batch)
        self.last, self.seen = predictions, True
        return losses, predictions * torch.ones(1, device=self.steps.device)


@requirement(
    "PIPE-678",
    "What a forward assigns, to attributes or buffers, or writes in buffers, MUST happen once a step and in none of a "
    "pipeline's traces of it, which leave nothing on a model.",
)
@pytest.mark.parametrize("name", [*TRAINING, *EVALUATION])
def test_traces_leave_nothing(pipeline: Any, name: str) -> None:
    job = Job(pipeline, 27)
    model = _Keeping(job.model).to(job.device)
    job.model = cast("Any", model)
    attributes, buffers = dict(vars(model)), dict(model.named_buffers(recurse=False))
    schedule = job.schedule(name)
    assert_equal(set(vars(model)), set(attributes), where="attributes behind a trace")
    assert_equal((model.count, model.last is None), (0, True), where="values of attributes behind a trace")
    kept = all(getattr(model, key) is buffer for key, buffer in buffers.items())
    assert_equal(kept, True, where="buffers are those of before a trace")
    loader = iter(job.batches(9))
    for step in range(1, 7):
        # Each mode is traced, at its first step.
        model.train(step < 4)
        schedule.progress(loader)
        found = model.count, float(model.steps), float(model.running), isinstance(model.last, torch.Tensor)
        assert_equal(found, (step, float(step), float(step), True), where=f"step {step}")
    assert_equal(set(vars(model)) - set(attributes), {"seen"}, where="attributes that came")


@requirement(
    "PIPE-680",
    "Traces of a model MUST leave its buffers as they were that are made in inference mode, too, by the user or by a "
    "forward there; it goes on in either mode.",
)
@pytest.mark.parametrize("name", [*TRAINING, *EVALUATION])
def test_buffers_of_inference_mode(pipeline: Any, name: str) -> None:
    job = Job(pipeline, 31)
    model = _Keeping(job.model).to(job.device)
    job.model = cast("Any", model)
    with torch.inference_mode():
        model.running = torch.zeros_like(model.running)
    loader = iter(job.batches(9))
    with succeeds("progress", where="a buffer of inference mode"):
        schedule = job.schedule(name)
        schedule.progress(loader)
    assert_equal(float(model.running), 1.0, where="a buffer of inference mode, behind a step")
    # Torch detaches no tensor of a subclass, as the pretend device's are, that was made in inference mode.
    if name not in EVALUATION or job.device.type == "pretend":
        return
    with torch.inference_mode():
        model.steps = torch.zeros_like(model.steps)
        for step in range(1, 5):
            # Each mode is traced again; in inference mode a trace writes what was made there.
            model.train(step % 2 == 0)
            schedule.attach(model)
            schedule.progress(loader)
            found = float(model.steps), float(model.running)
            assert_equal(found, (float(step), step + 1.0), where=f"step {step} in inference mode")


class _Collecting(torch.nn.Module):
    """The model in another, which collects what it computes in collections of its own, and in those of a user."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model, self.last, self.counts = model, deque[Any](maxlen=2), Counter[str]()
        self.history, self.stats = list[Any](), {"steps": 0, "inside": [list[Any]()]}
        self.modes: set[bool] = set()

    def forward(self, batch: Any) -> Any:
        """As the model."""
        losses, predictions = self.model(batch)
        self.history.append(predictions)
        self.last.append(predictions)
        self.stats["steps"] += 1  # type: ignore[operator]
        self.stats["inside"][0].append(predictions)  # type: ignore[index]
        self.counts["steps"] += 1
        self.modes.add(self.training)
        return losses, predictions


@requirement(
    "PIPE-755",
    "What a forward adds to lists, dictionaries, sets and deques that its modules name, or to those inside of them, "
    "MUST be added once a step, and nothing by a pipeline's traces: no value of a trace is left there.",
)
@pytest.mark.parametrize("name", [*TRAINING, *EVALUATION])
def test_traces_collect_nothing(pipeline: Any, name: str) -> None:
    job = Job(pipeline, 27)
    model = _Collecting(job.model)
    job.model = cast("Any", model)
    history = model.history
    model.counts["before"] = 2
    schedule, loader = job.schedule(name), iter(job.batches(9))
    found = [len(model.history), len(model.last), model.stats["steps"], dict(model.counts), set(model.modes)]
    assert_equal(found, [0, 0, 0, {"before": 2}, set()], where="behind a trace")
    for step in range(1, 7):
        # Each mode is traced, at its first step.
        model.train(step < 4)
        with succeeds("a step", where=f"step {step}"):
            schedule.progress(loader)
        inside: Any = model.stats["inside"]
        counts = [len(model.history), len(inside[0]), model.stats["steps"], dict(model.counts), len(model.last)]
        assert_equal(counts, [step, step, step, {"before": 2, "steps": step}, min(step, 2)], where=f"step {step}")
        kinds = {isinstance(each, torch.Tensor) for each in (*model.history, *model.last, *inside[0])}
        assert_equal((kinds, model.history is history), ({True}, True), where=f"step {step}: what was collected")
        assert_equal(model.modes, {True} if step < 4 else {True, False}, where=f"step {step}: modes")
