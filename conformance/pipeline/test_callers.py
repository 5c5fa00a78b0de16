"""D, F. Loaders, hooks and callers of every sort: what they are and do beside a step does not change a bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import InitVar, dataclass, field
from typing import Any, NamedTuple

import pytest
import torch

from conformance.harness import Rank, assert_equal, raises, requirement, succeeds
from conformance.pipeline.cases import EXACT, VARIANTS
from conformance.pipeline.jobs import Batch, Job, assert_same_state, outputs_of
from conformance.pipeline.model import assert_bits

ALL = (*EXACT, "TrainPipelineSemiSync")


def _generated(batches: list[Batch]) -> Iterator[Batch]:
    yield from batches


def _loaded(batches: list[Batch]) -> Iterator[Batch]:
    loader: Any = torch.utils.data.DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
    return iter(loader)


LOADERS: tuple[Callable[[list[Batch]], Iterator[Batch]], ...] = (iter, _generated, _loaded)


@requirement(
    "PIPE-150",
    "Iterators of lists, generators and DataLoaders MUST give the same; a batch that comes twice is processed twice; "
    "and what the caller does to an output MUST NOT reach a later step.",
)
def test_loaders(pipeline: Any) -> None:
    for name in EXACT:
        for make in LOADERS:
            job, loop = Job(pipeline, 21), Job(pipeline, 21)
            batches = [batch for batch in job.batches(3) for _ in range(2)]
            schedule, loader = job.schedule(name), make(batches)
            for step, batch in enumerate(batch for batch in loop.batches(3) for _ in range(2)):
                output = schedule.progress(loader)
                assert_bits(output, loop.step(batch), f"{name} {make} step {step}")
                output.fill_(float("nan"))
                assert_same_state(job, loop, f"{name} {make} step {step}")
            with raises(StopIteration):
                schedule.progress(loader)


def _different(rank: Rank) -> None:
    pipeline = rank.component("pipeline")
    for name in EXACT:
        job, loop = Job(pipeline, 22, rank), Job(pipeline, 22, rank)
        sizes = [1 + (3 * step + rank.rank) % 5 for step in range(4)]
        schedule, loader = job.schedule(name), iter([job.batch(step, size) for step, size in enumerate(sizes)])
        for step, size in enumerate(sizes):
            # The last rank is late, by work and not by a clock.
            for _ in range(20 * rank.rank):
                torch.ones(120, 120) @ torch.ones(120, 120)
            expected = loop.step(loop.batch(step, size))
            assert_bits(schedule.progress(loader), expected, f"{name} step {step}")
        assert_same_state(job, loop, name)


@requirement("PIPE-151", "Batches of different size on each rank, and a rank that is late, MUST NOT change a bit.")
def test_different_sizes(rank_pool: Any) -> None:
    rank_pool.run(_different, 3)


@requirement(
    "PIPE-152",
    "Learning rates that schedulers change between steps, of tables and of the dense part, MUST be those of the step "
    "they are set for, however early its rows were looked up.",
)
def test_learning_rates(pipeline: Any) -> None:
    for name, options in VARIANTS[:-1]:
        jobs = [Job(pipeline, 23, kinds=("table_wise", "row_wise")) for _ in range(2)]
        schedulers: list[Any] = [
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            for job in jobs
            for optimizer in (job.optimizer, *(each.fused_optimizer for each in job.collections))
        ]
        job, loop = jobs
        schedule, loader = job.schedule(name, **options), iter(job.batches(4))
        for step, batch in enumerate(loop.batches(4)):
            assert_bits(schedule.progress(loader), loop.step(batch), f"{name} {options} step {step}")
            assert_same_state(job, loop, f"{name} {options} step {step}")
            for scheduler in schedulers:
                scheduler.step()


@requirement(
    "PIPE-153",
    "Hooks of modules and of the optimizer MUST fire once a step, in the loop's order, and a custom forward MUST be "
    "called once a step, in place of the model.",
)
def test_hooks(pipeline: Any) -> None:
    for name in ALL:
        job, seen = Job(pipeline, 24), list[str]()
        job.model.register_forward_hook(lambda *_, seen=seen: seen.append("model"))
        job.model.top.register_forward_hook(lambda *_, seen=seen: seen.append("top"))
        job.model.top.register_full_backward_hook(lambda *_, seen=seen: seen.append("top's gradient"))
        job.optimizer.register_step_pre_hook(lambda *_, seen=seen: seen.append("before the step"))
        job.optimizer.register_step_post_hook(lambda *_, seen=seen: seen.append("after the step"))

        def forward(batch: Batch, job: Job = job, seen: list[str] = seen) -> Any:
            seen.append("forward")
            return job.model(batch)

        schedule = job.schedule(name, custom_model_fwd=forward)
        assert_equal(len(outputs_of(schedule, iter(job.batches(3)))), 3, where=f"{name} outputs")
        order = ["forward", "top", "model", "top's gradient", "before the step", "after the step"]
        assert_equal(seen, 3 * order, where=f"{name} hooks")


@requirement(
    "PIPE-154", "Two pipelines in one process, stepped in turn, MUST each be its own loop; neither knows of the other."
)
def test_two_pipelines(pipeline: Any) -> None:
    for name in ALL:
        options = {"start_batch": 10**6} if "Semi" in name else {}
        jobs, loops = ([Job(pipeline, 25) for _ in range(2)] for _ in range(2))
        schedules = [job.schedule(name, **options) for job in jobs]
        loaders = [iter(job.batches(4, 4 * number)) for number, job in enumerate(jobs)]
        for step in range(4):
            for number, (schedule, loader, loop) in enumerate(zip(schedules, loaders, loops, strict=True)):
                expected = loop.step(loop.batches(4, 4 * number)[step])
                assert_bits(schedule.progress(loader), expected, f"{name} pipeline {number} step {step}")


@requirement(
    "PIPE-155",
    "attach() to another model MUST drive that one, and leave the first as it was; evaluation under no_grad and "
    "outside MUST give the same.",
)
def test_another_model(pipeline: Any) -> None:
    for name in ALL:
        first, second, loop = (Job(pipeline, seed) for seed in (26, 26, 26))
        trained = first.schedule(name)
        outputs_of(trained, iter(first.batches(3)))
        for job in (first, second, loop):
            job.model.eval()
        trained.attach(second.model)
        batches = second.batches(4, 3)
        loader, expected = iter(batches), [loop.step(batch) for batch in loop.batches(4, 3)]
        for step, wanted in enumerate(expected):
            with torch.set_grad_enabled(step % 2 == 0):
                assert_bits(trained.progress(loader), wanted, f"{name} step {step} of another model")
        with torch.no_grad():
            direct = first.model(first.there(first.batch(3, 4)))[1]
        assert_equal(tuple(direct.shape), (4,), where=f"{name} the first model, called directly")
        assert_equal(torch.equal(direct, expected[0][:1].expand(4)), False, where=f"{name} the first model was trained")


class Pair(NamedTuple):
    """A named tuple of a batch."""

    left: torch.Tensor
    right: list[torch.Tensor]


@dataclass
class Plain:
    """A batch without a ``to`` of its own."""

    parts: dict[str, Any]
    pair: Pair
    note: str


@dataclass
class Prepared:
    """Says how often it was prepared; its constructor does not take all of it."""

    given: torch.Tensor
    times: list[int]
    ready: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.times.append(1)
        self.ready = self.given * 2
        self.note = "not a field"


@dataclass(frozen=True)
class Frozen:
    """Cannot be assigned to; one of its parts is made by its constructor."""

    given: torch.Tensor
    factor: InitVar[float]
    ready: torch.Tensor = field(init=False)

    def __post_init__(self, factor: float) -> None:
        object.__setattr__(self, "ready", self.given * factor)


@dataclass(frozen=True, slots=True)
class Slotted:
    """Has no dictionary."""

    ready: torch.Tensor


@requirement(
    "PIPE-440",
    "A dataclass MUST be moved field by field, each with the values that it has, whatever its constructor takes or "
    "does: that is not called again, and the caller's is left as it was.",
)
def test_dataclasses_move(pipeline: Any) -> None:
    model, seen = torch.nn.Linear(2, 1), list[Any]()

    def forward(batch: Any) -> Any:
        seen.append(batch)
        loss = model(torch.ones(1, 2)).sum()
        return loss.reshape(1), loss.detach()

    for name in EXACT:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = getattr(pipeline, name)(model, optimizer, device="meta", custom_model_fwd=forward)
        given: list[Any] = [Prepared(torch.ones(3), []), Frozen(torch.ones(3), 4.0), Slotted(torch.ones(3))]
        given[0].ready = torch.ones(2, 5)
        with succeeds("a step", where=name):
            schedule.progress(iter([tuple(given)]))
        found = seen.pop()
        kinds = [(type(each).__name__, each.ready.device.type, tuple(each.ready.shape)) for each in found]
        expected = [("Prepared", "meta", (2, 5)), ("Frozen", "meta", (3,)), ("Slotted", "meta", (3,))]
        assert_equal(kinds, expected, where=f"{name}: what came")
        assert_equal((given[0].times, found[0].note), ([1], "not a field"), where=f"{name}: prepared once")
        assert_equal([each.ready.device.type for each in given], ["cpu"] * 3, where=f"{name}: the caller's")


@requirement(
    "PIPE-147",
    "A batch of lists, tuples, dictionaries, dataclasses and jagged tensors MUST be on the device with all of its "
    "tensors, and what is no tensor as it was.",
)
def test_batches_move(pipeline: Any) -> None:
    model, seen = torch.nn.Linear(2, 1), list[Any]()

    def forward(batch: Plain) -> Any:
        seen.append(batch)
        loss = model(torch.ones(1, 2)).sum()
        return loss.reshape(1), loss.detach()

    for name in EXACT:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = getattr(pipeline, name)(model, optimizer, device="meta", custom_model_fwd=forward)
        ids = pipeline.KeyedJaggedTensor(["a"], torch.tensor([1, 2]), lengths=torch.tensor([2]))
        schedule.progress(iter([Plain({"ids": ids}, Pair(torch.ones(1), [torch.ones(2)]), "note")]))
        got = seen.pop()
        tensors = [got.parts["ids"].values(), got.parts["ids"].lengths(), got.pair.left, *got.pair.right]
        assert_equal([tensor.device.type for tensor in tensors], ["meta"] * 4, where=f"{name} devices")
        assert_equal((type(got.pair).__name__, got.note), ("Pair", "note"), where=f"{name} what is no tensor")


@torch.fx.wrap
def _fewer(ids: Any, by: Any) -> Any:
    """Ids of a table's first rows."""
    count = by if isinstance(by, int) else 2
    return type(ids)(ids.keys(), ids.values() // count, ids.weights_or_none(), lengths=ids.lengths())


class WithDefaults(torch.nn.Module):
    """The job's model, whose ids are others where it is called with more than the batch."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Any, halves: Any = None, by: int = 1, *, thirds: Any = None) -> Any:
        """As the model."""
        first = _fewer(batch.ids[0], by)
        if halves is not None:
            first = _fewer(first, 2)
        if thirds is not None:
            first = _fewer(first, 3)
        pooled = [self.model.collections[0](first).values(), self.model.collections[1](batch.ids[1]).values()]
        scores = self.model.top(torch.cat([torch.tanh(self.model.bottom(batch.dense)), *pooled], dim=1))[:, 0]
        return (scores - batch.target).square().mean().reshape(1), scores.detach()


@requirement(
    "PIPE-509",
    "Arguments of a model behind the batch MUST have their defaults where a lookup is made ahead, as they have in the "
    "model's forward, by position and by keyword.",
)
@pytest.mark.parametrize("name", EXACT)
def test_defaults_of_a_model(pipeline: Any, name: str) -> None:
    job, loop = Job(pipeline, 4), Job(pipeline, 4)
    for each in (job, loop):
        each.model = WithDefaults(each.model)  # type: ignore[assignment]
    schedule, loader = job.schedule(name), iter(job.batches(4))
    for step, batch in enumerate(loop.batches(4)):
        assert_bits(schedule.progress(loader), loop.step(batch), f"step {step}")
    assert_same_state(job, loop, name)
