"""What a pipeline sees of a model's forward: its arguments, what it changes in place, and how far a trace comes."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

from conformance.harness import assert_equal, raises, requirement, succeeds
from conformance.pipeline.cases import FUSED, TRAINING
from conformance.pipeline.jobs import Batch, Between, Job, Shifted, assert_same_state
from conformance.pipeline.model import assert_bits
from twinproof.errors import ConfigError


def _options(name: str) -> dict[str, Any]:
    hoists = {"embedding_lookup_before_optimizer": True} if name == FUSED else {}
    return {"start_batch": 10**6} if "Semi" in name else hoists


def _jobs(pipeline: Any, make: Callable[[Any], Any]) -> tuple[Job, Job]:
    """A job and its loop, whose models are made of their own."""
    both = [Job(pipeline, 4, kinds=("table_wise", "row_wise")) for _ in range(2)]
    for each in both:
        each.model = make(each.model)
    return both[0], both[1]


class Scaled(torch.nn.Module):
    """The job's model, whose scores and first ids are those of more arguments."""

    def __init__(self, model: Any, *, takes_ids: bool) -> None:
        super().__init__()
        self.model, self.takes_ids = model, takes_ids

    def forward(self, batch: Batch, scale: Any, *, ids: Any, shift: float = 1.0) -> Any:
        """As the model."""
        model = self.model
        pooled = [model.collections[0](ids if self.takes_ids else batch.ids[0]).values()]
        pooled.append(model.collections[1](batch.ids[1]).values())
        scores = model.top(torch.cat([torch.tanh(model.bottom(batch.dense * scale + shift)), *pooled], dim=1))[:, 0]
        return (scores - batch.target).square().mean().reshape(1), scores.detach()


@requirement(
    "PIPE-577",
    "A model that takes more than the batch, which a custom forward gives it, MUST be driven as the loop calls it; a "
    "sharded module whose ids come from another argument MUST be left to it.",
)
@pytest.mark.parametrize("takes_ids", [False, True])
@pytest.mark.parametrize("name", TRAINING)
def test_more_than_the_batch(pipeline: Any, name: str, takes_ids: bool) -> None:
    job, loop = _jobs(pipeline, lambda model: Scaled(model, takes_ids=takes_ids))

    def given(each: Job, batch: Batch) -> Any:
        return each.model(batch, 0.5, ids=batch.ids[0])

    with succeeds("a schedule", where=name):
        schedule = job.schedule(name, custom_model_fwd=lambda batch: given(job, batch), **_options(name))
    loader = iter(job.batches(4))
    driven = [call.name for call in schedule.calls]
    expected = ["model.collections.0", "model.collections.1"][takes_ids:]
    assert_equal(driven, expected, where="modules that are driven")
    for step, batch in enumerate(loop.batches(4)):
        with succeeds("a step", where=f"{name} step {step}"):
            output = schedule.progress(loader)
        loop.optimizer.zero_grad()
        losses, scores = given(loop, loop.there(batch))
        losses.sum().backward()
        loop.optimizer.step()
        assert_bits(output, scores, f"{name} step {step}")
        assert_same_state(job, loop, f"{name} step {step}")


@torch.fx.wrap
def _halve(values: Any) -> None:
    """Changes what it is given, and returns nothing."""
    values.floor_divide_(2)


@torch.fx.wrap
def _halve_too(values: Any) -> None:
    """As of a module whose name stands behind torch's."""
    values.floor_divide_(2)


_halve_too.__module__ = "zoo"


@torch.fx.wrap
def _halved_(values: Any) -> Any:
    """Says by its name that it changes what it is given, and does."""
    return values.floor_divide_(2)


@torch.fx.wrap
def _size__(values: Any) -> Any:
    """Its name ends as that of a method of Python's, which changes nothing."""
    return values.numel()


# What a forward does with its first ids, whether what that gives is of use, and whether it changes them.
CHANGES: dict[str, tuple[Callable[[Any], Any], bool, bool]] = {
    "a function of torch's": (lambda values: torch.clamp_(values, max=0), False, True),
    "a function of torch's with a result": (lambda values: torch.clamp_(values, max=0), True, True),
    "a function of torch's in Python": (lambda values: torch.nn.functional.relu(values), False, False),
    "a function without a result": (lambda values: _halve(values), False, True),
    "a function of another module": (lambda values: _halve_too(values), False, True),
    "a function by its name": (lambda values: _halved_(values), True, True),
    "a method of Python's": (lambda values: values.__reversed__(), True, False),
    "a function with a result": (lambda values: _size__(values), True, False),
}


class Changing(torch.nn.Module):
    """The job's model, which does something with its first ids before; what that gives may be of use."""

    def __init__(self, model: Any, change: Callable[[Any], Any], *, uses: bool) -> None:
        super().__init__()
        self.model, self.change, self.uses = model, change, uses

    def forward(self, batch: Batch) -> Any:
        """As the model."""
        model = self.model
        found = self.change(batch.ids[0].values())
        pooled = [model.collections[0](batch.ids[0]).values(), model.collections[1](batch.ids[1]).values()]
        scores = model.top(torch.cat([torch.tanh(model.bottom(batch.dense)), *pooled], dim=1))[:, 0]
        return (scores - batch.target).square().mean().reshape(1), (scores.detach(), found if self.uses else None)


@requirement(
    "PIPE-578",
    "A function that changes ids in place, by torch's name for such or without a result, MUST leave what reads them to "
    "the model; one that changes nothing, whatever its name, MUST leave it driven; either way the step is the loop's.",
)
@pytest.mark.parametrize("what", CHANGES)
def test_functions_in_place(pipeline: Any, what: str) -> None:
    change, uses, changes = CHANGES[what]
    for name in TRAINING:
        job, loop = _jobs(pipeline, lambda model: Changing(model, change, uses=uses))
        schedule, loader = job.schedule(name, **_options(name)), iter(job.batches(3))
        driven = [call.name for call in schedule.calls]
        expected = ["model.collections.0", "model.collections.1"][changes:]
        assert_equal(driven, expected, where=f"{name}: modules that are driven")
        for step, batch in enumerate(loop.batches(3)):
            loop.optimizer.zero_grad()
            losses, (scores, _) = loop.model(loop.there(batch))
            losses.sum().backward()
            loop.optimizer.step()
            assert_bits(schedule.progress(loader)[0], scores, f"{name} step {step}")
            assert_same_state(job, loop, f"{name} step {step}")


class Measuring(torch.nn.Module):
    """The job's model, which in evaluation looks other ids up, and reads a number on the way to the second."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> Any:
        """As the model; a trace cannot go through a number, whose value it has not."""
        ids, model = batch.ids[0], self.model
        if not self.training:
            ids = type(ids)(ids.keys(), ids.values() // 2, lengths=ids.lengths()) if float(ids.values()[0]) else ids
        pooled = [model.collections[0](ids).values(), model.collections[1](batch.ids[1]).values()]
        scores = model.top(torch.cat([torch.tanh(model.bottom(batch.dense)), *pooled], dim=1))[:, 0]
        return (scores - batch.target).square().mean().reshape(1), scores.detach()


class LooksUpLess(Measuring):
    """In evaluation a number is read behind the first of two lookups."""

    def forward(self, batch: Batch) -> Any:
        """As the model, or half of it."""
        if self.training:
            return self.model(batch)
        first = self.model.collections[0](batch.ids[0]).values()
        return (first.sum() * float(first.sum())).reshape(1), first.detach()


@requirement(
    "PIPE-579",
    "A mode in which a forward cannot be traced MUST be refused at its steps where it calls other modules, or fewer, "
    "than the mode before, and the steps behind it, in that mode, MUST be the loop's.",
)
@pytest.mark.parametrize("kind", [Measuring, LooksUpLess])
@pytest.mark.parametrize("name", TRAINING)
def test_modes_that_cannot_be_traced(pipeline: Any, name: str, kind: Any) -> None:
    job, loop = _jobs(pipeline, kind)
    schedule, loader = job.schedule(name, **_options(name)), iter(job.batches(4))
    batches = loop.batches(4)
    assert_bits(schedule.progress(loader), loop.step(batches[0]), f"{name} step 0")
    job.model.eval()
    for _ in range(2):
        with raises(ConfigError, mentions=("trace", kind.__name__), where="in the mode that cannot be traced"):
            schedule.progress(loader)
    job.model.train()
    for step in (1, 2, 3):
        assert_bits(schedule.progress(loader), loop.step(batches[step]), f"{name} step {step}")
    assert_same_state(job, loop, name)


@requirement(
    "PIPE-580",
    "A forward that takes the place of a module's own, put on a module that runs ahead while it is driven, MUST be "
    "what runs ahead, and so MUST one that calls the driven one.",
)
@pytest.mark.parametrize("name", TRAINING[1:])
def test_forwards_put_on_what_runs_ahead(pipeline: Any, name: str) -> None:
    def forward(ids: Any) -> Any:
        return type(ids)(ids.keys(), ids.values() % 2 * 0, lengths=ids.lengths())

    job, loop = _jobs(pipeline, lambda model: Between(model, Shifted(pipeline)))
    schedule, loader = job.schedule(name, pipeline_postproc=True, **_options(name)), iter(job.batches(8))
    batches = loop.batches(8)
    assert_bits(schedule.progress(loader), loop.step(batches[0]), f"{name} step 0")
    schedule.detach()
    schedule.attach(sparse_dist=False)
    for each in (job, loop):
        vars(each.model.shifted)["forward"] = forward
    for step in (1, 2):
        with succeeds("a step", where=f"{name} step {step}"):
            output = schedule.progress(loader)
        assert_bits(output, loop.step(batches[step]), f"{name} step {step}")
        assert_same_state(job, loop, f"{name} step {step}")
    schedule.detach()
    schedule.attach(sparse_dist=False)
    shifted: Any = job.model.shifted
    inner = shifted.forward
    shifted.forward = lambda ids: inner(ids)
    with succeeds("a step", where=f"{name}: one that calls the driven one"):
        output = schedule.progress(loader)
    assert_bits(output, loop.step(batches[3]), f"{name}: one that calls the driven one")
    assert_same_state(job, loop, f"{name}: one that calls the driven one")


def _halved_behind(inner: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A forward that calls another one, and halves its ids."""

    def forward(ids: Any) -> Any:
        found = inner(ids)
        return type(found)(found.keys(), found.values() // 2, lengths=found.lengths())

    return forward


def _halved(inner: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A forward in the place of another one."""
    return lambda ids: type(ids)(ids.keys(), ids.values() // 4, lengths=ids.lengths())


@requirement(
    "PIPE-635",
    "A forward that is put on a module that runs ahead, or taken off, between two steps MUST be that of the next step "
    "and of all behind it, with the loop's bits, whatever was made ahead by another; detach() MUST leave it there.",
)
@pytest.mark.parametrize("name", TRAINING[1:])
def test_forwards_put_on_between_steps(pipeline: Any, name: str) -> None:
    for make in (_halved, _halved_behind):
        for detaches in (False, True):
            job, loop = _jobs(pipeline, lambda model: Between(model, Shifted(pipeline)))
            schedule, loader = job.schedule(name, pipeline_postproc=True, **_options(name)), iter(job.batches(9))
            where = f"{name}, {make.__name__}, detached before: {detaches}"
            for step, batch in enumerate(loop.batches(9)):
                if step in (2, 4):
                    if detaches:
                        schedule.detach()
                    for each in (job, loop):
                        shifted: Any = each.model.shifted
                        shifted.forward = make(shifted.forward)
                if step == 6:
                    for each in (job, loop):
                        del vars(each.model.shifted)["forward"]
                with succeeds("a step", where=f"{where}: step {step}"):
                    output = schedule.progress(loader)
                assert_bits(output, loop.step(batch), f"{where}: step {step}")
                assert_same_state(job, loop, f"{where}: step {step}")
    last: Any = job.model.shifted
    kept = last.forward = make(last.forward)
    schedule.detach()
    assert_equal(vars(last)["forward"] is kept, True, where=f"{name}: behind detach()")


class Both(NamedTuple):
    """Two parts of a batch."""

    ids: Any
    dense: torch.Tensor


class OfBoth(Shifted):
    """As it, of a pair that has names."""

    def forward(self, both: Any) -> Any:
        """Of its ids."""
        return super().forward(both.ids)


class Named(torch.nn.Module):
    """The job's model, whose first ids go through a module that is called with a pair that has names."""

    def __init__(self, model: Any, shifted: torch.nn.Module) -> None:
        super().__init__()
        self.model, self.shifted = model, shifted

    def forward(self, batch: Batch) -> Any:
        """As the model."""
        model, shifted = self.model, self.shifted(Both(batch.ids[0], batch.dense))
        pooled = [model.collections[0](shifted).values(), model.collections[1](batch.ids[1]).values()]
        scores = model.top(torch.cat([torch.tanh(model.bottom(batch.dense)), *pooled], dim=1))[:, 0]
        return (scores - batch.target).square().mean().reshape(1), scores.detach()


@requirement(
    "PIPE-638",
    "A module that runs ahead MUST be called with what the model calls it with, of the model's own classes: a tuple "
    "that has names too.",
)
@pytest.mark.parametrize("name", TRAINING[1:])
def test_named_arguments(pipeline: Any, name: str) -> None:
    job, loop = _jobs(pipeline, lambda model: Named(model, OfBoth(pipeline)))
    schedule, loader = job.schedule(name, pipeline_postproc=True, **_options(name)), iter(job.batches(4))
    assert_equal(schedule.calls[0].name, "model.collections.0", where=f"{name}: what is driven")
    for step, batch in enumerate(loop.batches(4)):
        with succeeds("a step", where=f"{name} step {step}"):
            output = schedule.progress(loader)
        assert_bits(output, loop.step(batch), f"{name} step {step}")
        assert_same_state(job, loop, f"{name} step {step}")
    shifted: Any = job.model.shifted
    assert_equal(shifted.calls, 4, where=f"{name}: calls, one a batch")


@dataclass
class Described:
    """A batch that says of what class its parts are."""

    values: torch.Tensor
    kinds: Any


@requirement(
    "PIPE-581",
    "A class in a batch, a dataclass too, MUST be as it was on the device, and what stands beside it be moved.",
)
def test_classes_in_batches(pipeline: Any) -> None:
    model, seen = torch.nn.Linear(2, 1), list[Any]()

    def forward(batch: Any) -> Any:
        seen.append(batch)
        loss = model(torch.ones(1, 2)).sum()
        return loss.reshape(1), loss.detach()

    for name in TRAINING:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = getattr(pipeline, name)(model, optimizer, device="meta", custom_model_fwd=forward)
        with succeeds("a step", where=name):
            schedule.progress(iter([[Described(torch.ones(3), [Described, int]), Described]]))
        (moved, kind) = seen.pop()
        kinds = [each is one for each, one in zip((kind, *moved.kinds), (Described, Described, int), strict=True)]
        assert_equal((kinds, moved.values.device.type), ([True] * 3, "meta"), where=name)


class Kept(torch.nn.Module):
    """Ids of which half are 0, by a module that drops; its results in evaluation are what it is given."""

    def __init__(self, pipeline: Any) -> None:
        super().__init__()
        self.kind, self.dropout = pipeline.KeyedJaggedTensor, torch.nn.Dropout(0.5)

    def forward(self, ids: Any) -> Any:
        """Of the same lengths."""
        kept = self.dropout(torch.ones_like(ids.values(), dtype=torch.float32)) > 0
        return self.kind(ids.keys(), ids.values() * kept, ids.weights_or_none(), lengths=ids.lengths())


# How a forward draws which of its first ids are kept.
DRAWS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "a function": lambda model, ones: torch.rand_like(ones) < 0.5,
    "a method": lambda model, ones: ones.uniform_(0.0, 1.0) < 0.5,
    "dropout": lambda model, ones: torch.nn.functional.dropout(ones, 0.5, model.training) > 0,
}


class Thinned(torch.nn.Module):
    """The job's model, which draws which of its first ids are kept, and drops some of what it looks up."""

    def __init__(self, model: Any, pipeline: Any, way: str) -> None:
        super().__init__()
        self.model, self.kept, self.way, self.kind = model, Kept(pipeline), way, pipeline.KeyedJaggedTensor

    def forward(self, batch: Batch) -> Any:
        """As the model."""
        model, ids = self.model, batch.ids[0]
        if self.way in DRAWS:
            kept = DRAWS[self.way](self, torch.ones_like(ids.values(), dtype=torch.float32))
            ids = self.kind(ids.keys(), ids.values() * kept, lengths=ids.lengths())
        else:
            ids = self.kept(ids)
        pooled = [model.collections[0](ids).values(), model.collections[1](batch.ids[1]).values()]
        dropped = torch.nn.functional.dropout(torch.cat(pooled, dim=1), 0.5, self.training)
        scores = model.top(torch.cat([torch.tanh(model.bottom(batch.dense)), dropped], dim=1))[:, 0]
        return (scores - batch.target).square().mean().reshape(1), scores.detach()


@requirement(
    "PIPE-709",
    "A sharded module whose ids the forward draws at random MUST be left to it: every draw of a step is the loop's, by "
    "functions and methods of torch's and by modules that drop. Where dropout draws nothing it is driven.",
)
@pytest.mark.parametrize("way", [*DRAWS, "a module"])
@pytest.mark.parametrize("name", TRAINING)
def test_drawn_on_the_way(pipeline: Any, name: str, way: str) -> None:
    job, loop = _jobs(pipeline, lambda model: Thinned(model, pipeline, way))
    postproc = {} if name == "TrainPipelineBase" else {"pipeline_postproc": True}
    schedule, loader = job.schedule(name, **postproc, **_options(name)), iter(job.batches(4))
    states = list[torch.Tensor]()
    for step, batch in enumerate(loop.batches(4)):
        torch.manual_seed(step)
        expected = loop.step(batch)
        states.append(torch.get_rng_state())
        torch.manual_seed(step)
        with succeeds("a step", where=f"{name} step {step}"):
            output = schedule.progress(loader)
        assert_bits(torch.get_rng_state(), states[-1], f"{name} step {step}: the generator")
        assert_bits(output, expected, f"{name} step {step}")
        assert_same_state(job, loop, f"{name} step {step}")
    assert_equal([call.name for call in schedule.calls], ["model.collections.1"], where=f"{name}: what is driven")
    if way == "dropout":
        job.model.eval()
        schedule.progress(iter(job.batches(1)))
        assert_equal(len(schedule.calls), 2, where=f"{name}: what is driven in evaluation")


class Lucky(torch.nn.Module):
    """The job's model, whose scores are scaled by what Python and numpy draw."""

    def __init__(self, model: Any, numpy: Any) -> None:
        super().__init__()
        self.model, self.numpy = model, numpy

    def forward(self, batch: Batch) -> Any:
        """As the model."""
        losses, scores = self.model(batch)
        scale = random.random() + (0.0 if self.numpy is None else float(self.numpy.rand()))
        return losses * scale, scores * scale


def _numpy() -> Any:
    try:
        return importlib.import_module("numpy.random")
    except ImportError:
        return None


@requirement(
    "PIPE-719",
    "A forward that draws from Python's generator or numpy's MUST draw what it draws in the loop: pipelines that are "
    "made, and switches of the mode, draw nothing.",
)
@pytest.mark.parametrize("name", TRAINING)
def test_draws_of_other_generators(pipeline: Any, name: str) -> None:
    numpy, found, state = _numpy(), list[Any](), random.getstate()
    for each in _jobs(pipeline, lambda model: Lucky(model, _numpy())):
        random.seed(3)
        if numpy is not None:
            numpy.seed(3)
        schedule = None if found else each.schedule(name, **_options(name))
        loader, outputs = iter(each.batches(4)), list[torch.Tensor]()
        for mode in (True, False, False, True):
            each.model.train(mode)
            outputs.append(each.step(next(loader)) if schedule is None else schedule.progress(loader))
        found.append((outputs, random.random(), None if numpy is None else float(numpy.rand())))
    random.setstate(state)
    for step, (got, expected) in enumerate(zip(found[0][0], found[1][0], strict=True)):
        assert_bits(got, expected, f"{name} step {step}")
    assert_equal(found[0][1:], found[1][1:], where=f"{name}: what is drawn next")
