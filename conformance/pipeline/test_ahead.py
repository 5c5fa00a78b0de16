"""What is computed ahead is what the model computes: in the mode of the step, whoever hooks a module."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from conformance.harness import Rank, assert_equal, raises, requirement, succeeds
from conformance.pipeline.batches import place_of, random_jagged
from conformance.pipeline.cases import FUSED, TRAINING
from conformance.pipeline.jobs import Batch, Between, Job, Shifted, assert_same_state
from conformance.pipeline.model import assert_bits
from conformance.pipeline.sharding import collection_of, sharded_of
from twinproof.errors import ConfigError, PipelineError

MODES = (True, True, False, False, True, False, True)


def _options(name: str) -> dict[str, Any]:
    if name == "TrainPipelineBase":
        return {}
    hoists = {"embedding_lookup_before_optimizer": True} if name == FUSED else {}
    late = {"start_batch": 10**6} if "Semi" in name else {}
    return {"pipeline_postproc": True, **hoists, **late}


def _assert_modes(
    pipeline: Any, name: str, make: Any, rank: Rank | None = None, *, switched: Any = lambda model: model
) -> None:
    """A schedule of a model, made of a job's, is the loop through switches of the mode, of all or of a part of it."""
    job, loop = (Job(pipeline, 4, rank, kinds=("table_wise", "row_wise")) for _ in range(2))
    for each in (job, loop):
        each.model = make(each.model)
    schedule, loader = job.schedule(name, **_options(name)), iter(job.batches(len(MODES)))
    for step, batch in enumerate(loop.batches(len(MODES))):
        for model in (job.model, loop.model):
            switched(model).train(MODES[step])
        with succeeds("a step", where=f"{name} step {step}"):
            output = schedule.progress(loader)
        assert_bits(output, loop.step(batch), f"{name} step {step}")
        assert_same_state(job, loop, f"{name} step {step}")


class ShiftedInTraining(Shifted):
    """Leaves ids as they are in evaluation."""

    def forward(self, ids: Any) -> Any:
        """As its class, or what it is given."""
        return super().forward(ids) if self.training else ids


class Drawn(torch.nn.Module):
    """A module around the one that shifts, which has a mode of its own."""

    def __init__(self, pipeline: Any) -> None:
        super().__init__()
        self.inner = ShiftedInTraining(pipeline)

    def forward(self, ids: Any) -> Any:
        """As the inner one."""
        return self.inner(ids)


def _modes_on_ranks(rank: Rank) -> None:
    pipeline = rank.component("pipeline")
    _assert_modes(pipeline, FUSED, lambda model: Between(model, ShiftedInTraining(pipeline)), rank)
    _assert_modes(pipeline, FUSED, lambda model: Branching(model, pipeline), rank)


@requirement(
    "PIPE-512",
    "What a module gave that runs ahead MUST be of the mode of the batch's own step, through any switches between "
    "train() and eval(), of the model or of the module alone, on every rank.",
)
@pytest.mark.parametrize("name", TRAINING)
def test_modes_of_modules_ahead(pipeline: Any, rank_pool: Any, name: str) -> None:
    _assert_modes(pipeline, name, lambda model: Between(model, Drawn(pipeline)))  # type: ignore[arg-type]
    job, loop = (Job(pipeline, 4, kinds=("table_wise", "row_wise")) for _ in range(2))
    for each in (job, loop):
        each.model = Between(each.model, Drawn(pipeline))  # type: ignore[assignment, arg-type]
    schedule, loader = job.schedule(name, **_options(name)), iter(job.batches(4))
    for step, batch in enumerate(loop.batches(4)):
        for model in (job.model, loop.model):
            model.shifted.inner.train(step % 2 == 0)  # type: ignore[union-attr]
        assert_bits(schedule.progress(loader), loop.step(batch), f"{name} step {step}, the module's own mode")
    assert_same_state(job, loop, f"{name}, the module's own mode")
    if name == FUSED:
        rank_pool.run(_modes_on_ranks, 2)


class Branching(torch.nn.Module):
    """The job's model, which shifts its first ids in training; ``measures``: evaluation ends with a number."""

    def __init__(self, model: Any, pipeline: Any, *, measures: bool = False) -> None:
        super().__init__()
        self.model, self.kind, self.measures, self.measured = model, pipeline.KeyedJaggedTensor, measures, list[float]()

    def forward(self, batch: Batch) -> Any:
        """As the model; a trace cannot go through a number, whose value it has not."""
        ids, model = batch.ids[0], self.model
        if self.training and not self.measures:
            ids = self.kind(ids.keys(), ids.values() // 2, lengths=ids.lengths())
        pooled = [model.collections[0](ids).values(), model.collections[1](batch.ids[1]).values()]
        scores = model.top(torch.cat([torch.tanh(model.bottom(batch.dense)), *pooled], dim=1))[:, 0]
        if self.measures and not self.training:
            self.measured.append(float(scores.sum()))
        return (scores - batch.target).square().mean().reshape(1), scores.detach()


@requirement(
    "PIPE-513",
    "A forward that branches on its mode on the way to a sharded module MUST be followed into the mode of each step. "
    "One that calls the same with the same in both, of which one cannot be traced to its end, MUST go on.",
)
@pytest.mark.parametrize("measures", [False, True])
@pytest.mark.parametrize("name", TRAINING)
def test_branches_on_modes(pipeline: Any, name: str, measures: bool) -> None:
    _assert_modes(pipeline, name, lambda model: Branching(model, pipeline, measures=measures))


class Dividing(Branching):
    """The same calls in both modes, of which one differs in a keyword argument."""

    def forward(self, batch: Batch) -> Any:
        """As the model, whose first ids are divided in training."""
        ids, model = batch.ids[0], self.model
        values = torch.floor_divide(ids.values(), other=2 if self.training else 1)
        pooled = [
            model.collections[0](self.kind(ids.keys(), values, lengths=ids.lengths())).values(),
            model.collections[1](batch.ids[1]).values(),
        ]
        scores = model.top(torch.cat([torch.tanh(model.bottom(batch.dense)), *pooled], dim=1))[:, 0]
        return (scores - batch.target).square().mean().reshape(1), scores.detach()


@requirement("PIPE-532", "So MUST one whose modes call the same with another value of a keyword argument.")
@pytest.mark.parametrize("name", [FUSED, "TrainPipelineSparseDist"])
def test_modes_that_differ_in_a_keyword(pipeline: Any, name: str) -> None:
    _assert_modes(pipeline, name, lambda model: Dividing(model, pipeline))


class Holding(torch.nn.Module):
    """A model that only calls another one."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, batch: Batch) -> Any:
        """As the inner one."""
        return self.inner(batch)


@requirement(
    "PIPE-527",
    "So MUST a branch on the mode of a module inside of the model that alone is switched.",
)
@pytest.mark.parametrize("name", [FUSED, "TrainPipelineSparseDist"])
def test_branches_on_modes_of_inner_modules(pipeline: Any, name: str) -> None:
    _assert_modes(pipeline, name, lambda model: Holding(Branching(model, pipeline)), switched=lambda model: model.inner)


class OneOfTwo(torch.nn.Module):
    """Looks up in a cut table in training, in one that the optimizer updates in evaluation."""

    def __init__(self, pipeline: Any) -> None:
        super().__init__()
        config = pipeline.EmbeddingBagConfig(7, 4, "t", feature_names=["a"])
        self.cut, self.updated = (
            sharded_of(pipeline, pipeline.EmbeddingBagCollection([config]), {"t": way}, "sgd", device="cpu")
            for way in (pipeline.table_wise(0), pipeline.data_parallel())
        )
        self.top = torch.nn.Linear(4, 1)

    def forward(self, ids: Any) -> Any:
        """The loss, and again without its gradient."""
        found = self.cut(ids) if self.training else self.updated(ids)
        loss = self.top(found.values()).sum()
        return loss, loss.detach()


@requirement(
    "PIPE-531",
    "Where strict refuses what a mode looks up ahead, it MUST do so at each step of that mode, and go on in the other.",
)
def test_refused_at_each_step(pipeline: Any) -> None:
    model, ids = OneOfTwo(pipeline), random_jagged(["a"], [7], 3, 1).kjt(pipeline)
    schedule = pipeline.TrainPipelineFusedSparseDist(
        model, torch.optim.SGD(model.parameters(), lr=0.1), torch.device("cpu"), strict=True
    )
    loader = iter([ids] * 9)
    schedule.progress(loader)
    model.eval()
    for step in range(3):
        with raises(ConfigError, mentions=("strict", "updated"), where=f"step {step} of the other mode"):
            schedule.progress(loader)
    model.train()
    with succeeds("a step", where="in the mode of before"):
        schedule.progress(loader)


def _flipped(ids: Any) -> Any:
    """The same bags, each with other ids of the tables' first rows."""
    return type(ids)(ids.keys(), (ids.values() + 1) % 2, lengths=ids.lengths())


def _shifted_batch(batch: Batch) -> Batch:
    return Batch(batch.dense, [_flipped(batch.ids[0]), batch.ids[1]], batch.target)


# Who hooks what, and the module whose arguments it changes.
CHANGING: dict[str, tuple[Any, str]] = {
    "model": (lambda m: m.register_forward_pre_hook(lambda _, given: (_shifted_batch(*given),)), "shifted"),
    "module": (lambda m: m.shifted.register_forward_pre_hook(lambda _, given: (_flipped(*given),)), "shifted"),
    "result": (lambda m: m.shifted.register_forward_hook(lambda _, given, found: _flipped(found)), "collections.0"),
    "table": (
        lambda m: m.model.collections[0].register_forward_pre_hook(lambda _, given: (_flipped(*given),)),
        "collections.0",
    ),
}


@requirement(
    "PIPE-514",
    "A hook that changes what a module is called with whose result was made ahead MUST be refused by that module's "
    "name, before anything is updated, whenever it was registered; without it the next batch is the loop's.",
)
@pytest.mark.parametrize("hooked", CHANGING)
@pytest.mark.parametrize("name", TRAINING[1:])
def test_hooks_that_change(pipeline: Any, name: str, hooked: str) -> None:
    job, loop = (Job(pipeline, 4, kinds=("table_wise", "row_wise")) for _ in range(2))
    for each in (job, loop):
        each.model = Between(each.model, Shifted(pipeline))  # type: ignore[assignment]
    schedule, loader = job.schedule(name, **_options(name)), iter(job.batches(4))
    batches, (register, mentioned) = loop.batches(4), CHANGING[hooked]
    assert_bits(schedule.progress(loader), loop.step(batches[0]), f"{name} step 0")
    handle = register(job.model)
    with raises(PipelineError, mentions=("hook", mentioned)):
        schedule.progress(loader)
    assert_same_state(job, loop, f"{name} behind a step that was refused")
    handle.remove()
    for step in (2, 3):
        assert_bits(schedule.progress(loader), loop.step(batches[step]), f"{name} step {step}")


def _only(module: Any, change: Callable[[Any], Any]) -> Any:
    """A hook of all modules that changes what one of them is called with, or gives."""
    return lambda each, given, *found: change(*found or given) if each is module else None


# Hooks of all modules of the process, and the module whose arguments they change; None where they only look.
EVERYWHERE: dict[str, tuple[Any, str | None]] = {
    "a table's arguments": (
        lambda m: register_module_forward_pre_hook(_only(m.model.collections[0], _flipped)), "collections.0",
    ),
    "a module's arguments": (lambda m: register_module_forward_pre_hook(_only(m.shifted, _flipped)), "shifted"),
    "a module's result": (lambda m: register_module_forward_hook(_only(m.shifted, _flipped)), "collections.0"),
    "nothing": (lambda m: register_module_forward_pre_hook(lambda *_: None), None),
    "no result": (lambda m: register_module_forward_hook(lambda *_: None), None),
}  # fmt: skip


def _assert_hooked(
    pipeline: Any, name: str, register: Any, mentioned: str | None, wrap: Callable[[Any], Any] = lambda model: model
) -> None:
    """A step with a hook is refused by a module's name, or is the loop's; the one behind it is."""
    job, loop = (Job(pipeline, 4, kinds=("table_wise", "row_wise")) for _ in range(2))
    for each in (job, loop):
        each.model = wrap(Between(each.model, Shifted(pipeline)))
    schedule, loader = job.schedule(name, **_options(name)), iter(job.batches(4))
    batches = loop.batches(4)
    assert_bits(schedule.progress(loader), loop.step(batches[0]), f"{name} step 0")
    handle = register(job.model)
    try:
        if mentioned is None:
            with succeeds("a step", where=f"{name}, hooks that look"):
                output = schedule.progress(loader)
            assert_bits(output, loop.step(batches[1]), f"{name}, hooks that look")
        else:
            with raises(PipelineError, mentions=("hook", mentioned), where=name):
                schedule.progress(loader)
            assert_same_state(job, loop, f"{name} behind a step that was refused")
    finally:
        handle.remove()
    assert_bits(schedule.progress(loader), loop.step(batches[2]), f"{name} without the hook")


@requirement(
    "PIPE-753",
    "So MUST a hook that torch calls for every module of the process, where it changes that; where it only looks, "
    "steps are the loop's.",
)
@pytest.mark.parametrize("hooked", EVERYWHERE)
@pytest.mark.parametrize("name", TRAINING[1:])
def test_hooks_of_all_modules(pipeline: Any, name: str, hooked: str) -> None:
    _assert_hooked(pipeline, name, *EVERYWHERE[hooked])


class DistributedModelParallel(Holding):
    """A wrapper, known by torchrec's name of it."""

    @property
    def module(self) -> torch.nn.Module:
        """What is inside."""
        return self.inner


# Of three wrappers around each other.
WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "the outermost": lambda model: model,
    "the middle one": lambda model: model.inner,
    "the innermost": lambda model: model.inner.inner,
}


@requirement(
    "PIPE-754",
    "So MUST a hook of any wrapper around the model, the outermost and those inside of it.",
)
@pytest.mark.parametrize("hooked", WRAPPERS)
@pytest.mark.parametrize("name", [FUSED, "TrainPipelineSparseDist"])
def test_hooks_of_wrappers(pipeline: Any, name: str, hooked: str) -> None:
    def wrapped(model: torch.nn.Module) -> torch.nn.Module:
        for _ in WRAPPERS:
            model = DistributedModelParallel(model)
        return model

    def register(model: Any) -> Any:
        return WRAPPERS[hooked](model).register_forward_pre_hook(lambda _, given: (_shifted_batch(*given),))

    _assert_hooked(pipeline, name, register, "shifted", wrapped)


# What a hook gives a module instead of its batch, by the part that differs.
PARTS: dict[str, Any] = {
    "ids": lambda ids: type(ids)(ids.keys(), (ids.values() + 1) % 7, ids.weights(), lengths=ids.lengths()),
    "weights": lambda ids: type(ids)(ids.keys(), ids.values(), ids.weights() * 0.5, lengths=ids.lengths()),
    "lengths": lambda ids: type(ids)(ids.keys(), ids.values(), ids.weights(), lengths=ids.lengths().flip(0)),
}


class Weighted(torch.nn.Module):
    """Looks up by weights in one cut table."""

    def __init__(self, pipeline: Any) -> None:
        super().__init__()
        config = pipeline.EmbeddingBagConfig(7, 4, "t", feature_names=["a"])
        whole = pipeline.EmbeddingBagCollection([config], is_weighted=True)
        self.cut = sharded_of(pipeline, whole, {"t": pipeline.table_wise(0)}, "sgd", device="cpu")
        self.top = torch.nn.Linear(4, 1)

    def forward(self, ids: Any) -> Any:
        """The loss, and again without its gradient."""
        loss = self.top(self.cut(ids).values()).sum()
        return loss, loss.detach()


@requirement(
    "PIPE-533", "A hook MUST be refused whatever it changes of a batch: ids, weights or lengths; or nothing, and go on."
)
@pytest.mark.parametrize("part", [*PARTS, "nothing"])
def test_parts_that_hooks_change(pipeline: Any, part: str) -> None:
    model = Weighted(pipeline)
    ids = pipeline.KeyedJaggedTensor(["a"], torch.tensor([1, 2, 4]), torch.ones(3), lengths=torch.tensor([1, 2]))
    change = PARTS.get(part, lambda ids: ids)
    model.cut.register_forward_pre_hook(lambda _, given: (change(*given),))
    schedule = pipeline.TrainPipelineSparseDist(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.device("cpu"))
    refused = raises(PipelineError, mentions=("hook", "cut"), where=part) if part in PARTS else None
    with refused or succeeds("a step", where="beside a hook that changes nothing"):
        schedule.progress(iter([ids] * 3))


@requirement(
    "PIPE-515",
    "Hooks that only look, and those that change what a sharded module returns, MUST be called once a step, and the "
    "step be the loop's: arguments that the forward makes anew are the same where they are equal.",
)
@pytest.mark.parametrize("name", TRAINING)
def test_hooks_that_look(pipeline: Any, name: str) -> None:
    job, loop = (Job(pipeline, 4, kinds=("table_wise", "row_wise")) for _ in range(2))
    seen: dict[bool, list[str]] = {True: [], False: []}
    for each in (job, loop):
        mine, model = seen[each is job], Branching(each.model, pipeline)
        for at in ("", "model.collections.0", "model.collections.1"):
            module = model.get_submodule(at)
            module.register_forward_pre_hook(lambda _, given, mine=mine, at=at: mine.append(at))
        first = model.model.collections[0]
        first.register_forward_hook(
            lambda _, given, found: type(found)(found.keys(), found.length_per_key(), found.values() * 2)
        )
        each.model = model  # type: ignore[assignment]
    schedule, loader = job.schedule(name, **_options(name)), iter(job.batches(4))
    for step, batch in enumerate(loop.batches(4)):
        with succeeds("a step", where=f"{name} step {step}"):
            output = schedule.progress(loader)
        assert_bits(output, loop.step(batch), f"{name} step {step}")
    assert_equal(seen[True], seen[False], where=f"{name}: calls of hooks")
    assert_same_state(job, loop, name)


class Halved(torch.nn.Module):
    """Changes what it is given, and returns nothing."""

    def forward(self, ids: Any) -> None:
        """In place."""
        ids.values().floor_divide_(2)


class InPlace(torch.nn.Module):
    """The job's model, which moves its first ids among the first rows of a table, in place."""

    def __init__(self, model: Any, how: str) -> None:
        super().__init__()
        self.model, self.how, self.halved = model, how, Halved()

    def forward(self, batch: Any) -> Any:
        """As the model; the second ids, and what lies beside the ids, are none of the change."""
        ids, model = batch.ids[0], self.model
        if self.how == "method":
            ids.values().floor_divide_(2)
        elif self.how == "operator":
            values = batch.ids[0].values()
            values //= 2
        elif self.how == "function":
            torch.floor_divide(ids.values(), 2, out=ids.values())
        elif self.how == "attribute":
            ids._values = ids._values // 2
        elif self.how == "module":
            self.halved(ids)
        else:
            batch.dense.mul_(0.5)
        pooled = [model.collections[0](ids).values(), model.collections[1](batch.ids[1]).values()]
        scores = model.top(torch.cat([torch.tanh(model.bottom(batch.dense)), *pooled], dim=1))[:, 0]
        scores += 0.5
        return (scores - batch.target).square().mean().reshape(1), scores.detach()


@requirement(
    "PIPE-524",
    "A sharded module whose input the forward changes in place before, by a method, an operator, a function, an "
    "attribute or a module that returns nothing, MUST be left to the model, with a line in the log: the step is the "
    "loop's; what is changed beside it MUST leave it driven.",
)
@pytest.mark.parametrize("how", ["method", "operator", "function", "attribute", "module", "beside"])
def test_inputs_changed_in_place(pipeline: Any, how: str, caplog: Any) -> None:
    for name in ("TrainPipelineBase", FUSED, "TrainPipelineSemiSync"):
        job, loop = (Job(pipeline, 4, kinds=("table_wise", "row_wise")) for _ in range(2))
        for each in (job, loop):
            each.model = InPlace(each.model, how)  # type: ignore[assignment]
        caplog.clear()
        schedule, loader = job.schedule(name, **_options(name)), iter(job.batches(4))
        driven = [call.name for call in schedule.calls]
        expected = ["model.collections.0", "model.collections.1"][how != "beside" :]
        assert_equal(driven, expected, where=f"{name}: modules that are driven")
        said = ["collections.0" in each.getMessage() for each in caplog.records if "in place" in each.getMessage()]
        assert_equal(said, [True] * (how != "beside"), where=f"{name}: lines in the log")
        for step, batch in enumerate(loop.batches(4)):
            for model in (job.model, loop.model):
                model.train(step != 2)
            assert_bits(schedule.progress(loader), loop.step(batch), f"{name} step {step}")
            assert_same_state(job, loop, f"{name} step {step}")


class Operated(torch.nn.Module):
    """The job's model, behind an operator that changes its first ids in place."""

    def __init__(self, model: Any, change: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.model, self.change = model, change

    def forward(self, batch: Any) -> Any:
        """The sum of what was looked up."""
        self.change(batch.ids[0].values(), 1)
        first, second = self.model.collections
        return first(batch.ids[0]).values().sum() + second(batch.ids[1]).values().sum()


@requirement("PIPE-536", "Every operator that changes ids in place MUST be seen: what reads them is left to the model.")
@pytest.mark.parametrize(
    "name", ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"]
)
def test_operators_in_place(pipeline: Any, name: str) -> None:
    # A quotient of integers has no place among them.
    ids = torch.arange(1, 9, dtype=torch.float32 if name == "truediv" else torch.int64)
    change = getattr(operator, f"i{name}")
    assert_equal(change(ids, 1) is ids, True, where="the operator changes its operand")
    job = Job(pipeline, 4, kinds=("table_wise", "row_wise"))
    job.model = Operated(job.model, change)  # type: ignore[assignment]
    schedule = job.schedule(FUSED, **_options(FUSED))
    assert_equal([call.name for call in schedule.calls], ["model.collections.1"], where="modules that are driven")


def _assert_replaced(pipeline: Any, name: str, rank: Rank | None = None) -> None:
    job, loop = (Job(pipeline, 4, rank, kinds=("table_wise", "row_wise")) for _ in range(2))
    options = {key: value for key, value in _options(name).items() if key != "pipeline_postproc"}
    schedule, loader, expected = job.schedule(name, **options), iter(job.batches(5)), loop.batches(5)
    for step in range(5):
        if step in (1, 2):
            stride = expected[step].dense.shape[0]
            expected[step] = loop.batch(20 + step, stride)
            schedule.batches[0] = job.there(job.batch(20 + step, stride))
        # A pipeline may see that it was about to take another batch's.
        with succeeds("a step", where=f"{name} step {step}"):
            found = schedule.progress(loader)
        assert_bits(found, loop.step(expected[step]), f"{name} step {step}")
    assert_same_state(job, loop, name)


def _replaced_on_ranks(rank: Rank) -> None:
    _assert_replaced(rank.component("pipeline"), FUSED, rank)


@requirement(
    "PIPE-525",
    "A batch that is put in the place of one in flight MUST be what its step processes, however far the first had "
    "come: it is sent and looked up anew, on every rank.",
)
@pytest.mark.parametrize("name", TRAINING)
def test_replaced_in_flight(pipeline: Any, rank_pool: Any, name: str) -> None:
    _assert_replaced(pipeline, name)
    if name == FUSED:
        rank_pool.run(_replaced_on_ranks, 2)


class Drawing(torch.nn.Module):
    """The job's model, whose scores are scaled by a number that is drawn in each forward."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> Any:
        """As the model."""
        losses, scores = self.model(batch)
        return losses * torch.rand(1).to(losses.device), scores


@requirement(
    "PIPE-526",
    "To look into a model, when it is attached and when its mode is another for the first time, MUST draw nothing from "
    "torch's generator: a forward that draws by itself draws what it draws in the loop.",
)
@pytest.mark.parametrize("name", TRAINING)
def test_draws_nothing(pipeline: Any, name: str) -> None:
    found = list[list[torch.Tensor]]()
    jobs = [Job(pipeline, 4, kinds=("table_wise", "row_wise")) for _ in range(2)]
    for job in jobs:
        job.model = Drawing(job.model)  # type: ignore[assignment]
        torch.manual_seed(5)
        step = job.step
        if job is jobs[0]:
            schedule, loader = job.schedule(name, **_options(name)), iter(job.batches(len(MODES)))
            step = lambda batch: schedule.progress(loader)  # noqa: B023, E731
        for mode, batch in zip(MODES, job.batches(len(MODES)), strict=True):
            job.model.train(mode)
            step(batch)
        found.append([torch.rand(1)])
    assert_bits(found[0][0], found[1][0], f"{name}: the number that comes next")
    assert_same_state(jobs[0], jobs[1], name)


def _drawn_ids(ids: Any) -> Any:
    """Other ids of the same features, as negatives are drawn."""
    draws = torch.randint(0, 1000, (ids.values().numel(),), device=ids.values().device)
    return type(ids)(ids.keys(), draws, lengths=ids.lengths())


def _drawn_pair(ids: Any) -> Any:
    return [_drawn_ids(ids), ids]


torch.fx.wrap("_drawn_ids")
torch.fx.wrap("_drawn_pair")


class DrawingBatch:
    """A batch that draws by a method."""

    def __init__(self, ids: Any) -> None:
        self.ids = ids

    def to(self, device: Any, non_blocking: bool = False) -> DrawingBatch:
        """As torchrec's batches have it."""
        return DrawingBatch(self.ids.to(device))

    def drawn(self) -> Any:
        """Other ids."""
        return _drawn_ids(self.ids)


class DrawingModule(torch.nn.Module):
    """A module that draws."""

    def forward(self, ids: Any) -> Any:
        """Other ids."""
        return _drawn_ids(ids)


class ReadTwice(torch.nn.Module):
    """Two collections of equal weights look the same drawn ids up; the output is how their columns differ."""

    def __init__(self, pipeline: Any, way: str) -> None:
        super().__init__()
        self.way, self.kind, self.drawing = way, pipeline.KeyedJaggedTensor, DrawingModule()
        self.collections, self.top = torch.nn.ModuleList(), torch.nn.Linear(4, 1)
        for _ in range(2):
            config = pipeline.EmbeddingBagConfig(1000, 4, "t", feature_names=["f"])
            weights = [torch.arange(4000.0).reshape(1000, 4)]
            whole, plan = collection_of(pipeline, [config], weights), {"t": pipeline.table_wise(0)}
            self.collections.append(
                pipeline.ShardedEmbeddingBagCollection(whole, plan, optimizer=pipeline.FusedOptimizer("sgd", lr=0.0))
            )

    def forward(self, batch: DrawingBatch) -> Any:
        """Losses, and the difference."""
        ids = batch.ids
        if self.way == "a function":
            given = [_drawn_ids(ids)] * 2
        elif self.way == "an item of what a function gave":
            pair = _drawn_pair(ids)
            given = [pair[0], pair[0]]
        elif self.way == "features of what a function gave":
            drawn = _drawn_ids(ids)
            given = [drawn.permute([1, 0]), drawn.permute([0])]
        elif self.way == "a method":
            given = [batch.drawn()] * 2
        elif self.way == "a module":
            given = [self.drawing(ids)] * 2
        else:
            kept = torch.bernoulli(torch.full_like(ids.values(), 0.5, dtype=torch.float32)).to(torch.int64)
            given = [self.kind(ids.keys(), ids.values() * kept, lengths=ids.lengths()) for _ in range(2)]
        one, other = (each(ids).values() for each, ids in zip(self.collections, given, strict=True))
        return self.top(one - other).mean(), (one - other).detach()


@requirement(
    "PIPE-550",
    "Whatever several sharded modules read on their way MUST be computed once for all of them: what a function, a "
    "method, a module or an operator draws is the same for each, as in the loop.",
)
@pytest.mark.parametrize(
    "way",
    [
        "a function", "an item of what a function gave", "features of what a function gave", "a method", "a module",
        "an operator",
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", TRAINING)
def test_drawn_once_for_all(pipeline: Any, name: str, way: str) -> None:
    device = place_of(pipeline)
    model = ReadTwice(pipeline, way).to(device)

    def batch(number: int) -> DrawingBatch:
        ids = torch.arange(16) + 50 * number
        lengths = torch.tensor([3, 5, 6, 2])
        return DrawingBatch(pipeline.KeyedJaggedTensor(["f", "g"], ids, lengths=lengths))

    assert_equal(model(batch(0).to(device))[1].abs().max().item(), 0.0, where=f"{way}, the loop")
    optimizer = torch.optim.SGD(model.top.parameters(), lr=0.0)
    schedule, loader = getattr(pipeline, name)(model, optimizer, device, **_options(name)), iter(map(batch, range(5)))
    for step in range(5):
        with succeeds("a step", where=f"{name}, {way}, step {step}"):
            output = schedule.progress(loader)
        assert_equal(output.abs().max().item(), 0.0, where=f"{name}, {way}, step {step}: how the columns differ")
