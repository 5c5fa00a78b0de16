"""Modules of others in a schedule: of the three-step protocol's four methods, whatever they take and return."""

from __future__ import annotations

import copy
import sys
import types
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch

from conformance.harness import assert_equal, raises, requirement, succeeds
from conformance.pipeline.batches import values_of
from conformance.pipeline.cases import FUSED, TRAINING
from conformance.pipeline.model import assert_bits
from conformance.provers.virtual_device import VirtualDevice
from twinproof.errors import PipelineError

TYPES = "torchrec.distributed.types"


class Held:
    """Waited for once by whoever asks."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def wait(self) -> Any:
        """What is held."""
        return self.value


class Known(Held):
    """In place of torchrec's lazy result, which a model waits for."""


class NoWait(Held):
    """In place of torchrec's wrapper of what is there."""


@dataclass
class Given:
    """A batch: ids of three samples, one each, and what else the module is called with."""

    ids: Any
    bags: Any
    values: torch.Tensor
    other: Any = None


class Two(NamedTuple):
    """Two parts of a batch."""

    whole: torch.Tensor
    rest: torch.Tensor


class Foreign(torch.nn.Module):
    """Rows of a table, returned in some way; with nothing but the protocol."""

    def __init__(self, returned: Any, *, is_trained: bool) -> None:
        super().__init__()
        self.returned, table = returned, values_of((9, 4), 5)
        if is_trained:
            self.table: Any = torch.nn.Parameter(table)
        else:
            self.register_buffer("table", table)

    def create_context(self) -> dict[str, Any]:
        """Of one batch."""
        return {}

    def input_dist(self, ctx: Any, ids: Any, *rest: Any, scale: float = 1.0) -> Any:
        """Nothing is sent."""
        ctx["scale"] = scale
        return Held(Held(ids))

    def compute(self, ctx: Any, given: Any) -> Any:
        """Rows."""
        return self.table[given.values()] * ctx["scale"]

    def output_dist(self, ctx: Any, output: Any) -> Any:
        """In the way that was asked for."""
        return self.returned(output)

    def forward(self, *args: Any, **options: Any) -> Any:
        """All steps."""
        ctx = self.create_context()
        return self.output_dist(ctx, self.compute(ctx, self.input_dist(ctx, *args, **options).wait().wait()))


@torch.fx.wrap
def _rows(found: Any) -> Any:
    if hasattr(found, "wait"):
        found = found.wait()
    if isinstance(found, dict):
        return torch.cat([_rows(part) for part in found.values()], dim=1)
    if isinstance(found, (list, tuple)):
        return found[0]
    return found if isinstance(found, torch.Tensor) else found.values()


class Model(torch.nn.Module):
    """Calls the module with all sorts of arguments."""

    def __init__(self, foreign: Foreign, columns: int = 4) -> None:
        super().__init__()
        self.foreign, self.top = foreign, torch.nn.Linear(columns, 1)
        with torch.no_grad():
            self.top.weight.copy_(values_of((1, columns), 7))
            self.top.bias.zero_()

    def forward(self, batch: Given) -> Any:
        """The loss and the scores."""
        values = batch.values
        parts = (batch.bags, values, [values, values], {"x": values}, 3, "name", batch.other, Two(values, values[1:]))
        scores = self.top(_rows(self.foreign(batch.ids, *parts, scale=2.0)))
        return scores.square().sum().reshape(1), scores.detach()


def _batches(pipeline: Any, count: int) -> list[Given]:
    found = []
    for number in range(count):
        ids = torch.tensor([number % 9, (3 * number + 1) % 9, 4])
        whole = pipeline.KeyedJaggedTensor(["a"], ids, lengths=torch.ones(3, dtype=torch.int64))
        bags = pipeline.JaggedTensor(ids, torch.ones(3), lengths=torch.ones(3, dtype=torch.int64))
        found.append(Given(whole, bags, values_of((3, 2), number)))
    return found


def _ways(pipeline: Any) -> dict[str, tuple[Any, int]]:
    """What a lookup returns, by name, and its columns."""

    def bags(rows: torch.Tensor) -> Any:
        return pipeline.JaggedTensor(rows, lengths=torch.ones(3, dtype=torch.int64))

    def weighted(rows: torch.Tensor) -> Any:
        return pipeline.JaggedTensor(rows, torch.ones(3), torch.ones(3, dtype=torch.int64))

    return {
        "rows": (lambda rows: rows, 4),
        "columns": (lambda rows: pipeline.KeyedTensor(["a", "b"], [1, 3], rows), 4),
        "bags": (bags, 4),
        "bags by feature": (lambda rows: {"a": bags(rows), "b": weighted(rows * 2)}, 8),
        "lazy bags by feature": (lambda rows: Known({"a": bags(rows), "b": rows}), 8),
        "lazy, of somebody": (lambda rows: Held(bags(rows)), 4),
    }


def _options(name: str) -> dict[str, Any]:
    if "Semi" in name:
        return {"start_batch": 10**6}
    hoists = {"embedding_lookup_before_optimizer": True, "emb_lookup_max_blocks": 3}
    return hoists if name == FUSED else {}


def _pair(way: tuple[Any, int], *, is_trained: bool) -> tuple[Any, Any]:
    """Two equal models, each with its optimizer."""
    model = Model(Foreign(way[0], is_trained=is_trained), way[1])
    both = [model, copy.deepcopy(model)]
    return tuple((each, torch.optim.SGD(each.parameters(), lr=0.1)) for each in both)  # type: ignore[return-value]


def _looped(model: Any, optimizer: Any, batch: Given) -> torch.Tensor:
    """One step of the loop; no gradients are made in evaluation."""
    with torch.set_grad_enabled(model.training):
        losses, scores = model(batch)
    if model.training:
        optimizer.zero_grad()
        losses.sum().backward()
        optimizer.step()
    found: torch.Tensor = scores
    return found


@requirement(
    "PIPE-574",
    "A module that has the three-step protocol and nothing else MUST be driven by every schedule to the loop's bits, "
    "trained or not, in both modes and through edits of its table, whether it returns rows, pooled columns, bags, a "
    "dictionary or a lazy result of those, with torchrec there or not.",
)
@pytest.mark.parametrize("with_torchrec", [False, True])
@pytest.mark.parametrize("name", TRAINING)
def test_results_of_others(pipeline: Any, name: str, with_torchrec: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    there = types.ModuleType(TYPES)
    there.LazyAwaitable, there.LazyNoWait = Known, NoWait  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, TYPES, there if with_torchrec else None)
    for way, made in _ways(pipeline).items():
        for is_trained in (True, False):
            where = f"{name}, {way}, {'trained' if is_trained else 'edited'}"
            (model, optimizer), (expected, other) = _pair(made, is_trained=is_trained)
            schedule = getattr(pipeline, name)(model, optimizer, **_options(name))
            batches = _batches(pipeline, 7)
            loader = iter(batches)
            for step, batch in enumerate(batches):
                for each in (model, expected):
                    each.train(step not in (2, 3, 5))
                    if step % 2:
                        with torch.no_grad():
                            each.foreign.table.mul_(0.5)
                with succeeds("a step", where=f"{where}: step {step}"):
                    scores = schedule.progress(loader)
                assert_bits(scores, _looped(expected, other, batch), f"{where}: step {step}")
            for (key, value), theirs in zip(model.state_dict().items(), expected.state_dict().values(), strict=True):
                assert_bits(value, theirs, f"{where}: {key}")


class Around(Held):
    """A lazy result that knows the module that it is of, as some do."""

    def __init__(self, value: Any, module: torch.nn.Module) -> None:
        super().__init__(value)
        self.module = module


class Stays(Held):
    """A part of a batch that stays on the host when it is asked to go."""

    def to(self, device: Any, non_blocking: bool = False) -> Stays:
        """Where it is."""
        return self


@requirement(
    "PIPE-594",
    "On streams of a device what a module of others returns, in whatever way and lazily too, MUST be kept for the "
    "stream that reads it, and no access be unordered; the bits are the loop's.",
    needs=("streams",),
)
@pytest.mark.parametrize("name", TRAINING)
def test_results_on_streams(pipeline: Any, name: str) -> None:
    ways = {**_ways(pipeline), "lazy, with its module": (lambda rows: Around(rows, torch.nn.Linear(2, 1)), 4)}
    for way, made in ways.items():
        device = VirtualDevice(late=True)
        (model, optimizer), (expected, other) = _pair(made, is_trained=True)
        batches = _batches(pipeline, 4)
        for batch in batches:
            ids, bags = batch.ids, batch.bags
            parts = [ids.values(), ids.lengths(), ids.offsets(), bags.values(), bags.weights(), bags.lengths()]
            batch.other = Stays(torch.ones(2))
            for part in (*parts, bags.offsets(), batch.values, batch.other.value):
                device.tracker.memory_of(part, stream="host", on_host=True)
        new = {"emb_lookup_stream": "new"} if name == FUSED else {}
        with device, succeeds("steps", where=f"{name}, {way}"):
            schedule = getattr(pipeline, name)(model, optimizer, engine=device.engine, **{**_options(name), **new})
            loader = iter(batches)
            scores = [schedule.progress(loader) for _ in batches]
        assert_equal(device.hazards, [], where=f"{name}, {way}: hazards")
        for step, batch in enumerate(batches):
            assert_bits(scores[step], _looped(expected, other, batch), f"{name}, {way}: step {step}")


@requirement(
    "PIPE-575",
    "A result of a kind that cannot be cut off from its tables MUST be refused by its type in SemiSync, and be driven "
    "by the schedules that need not cut it.",
)
def test_results_of_no_kind(pipeline: Any) -> None:
    for name in TRAINING:
        (model, optimizer), (expected, other) = _pair((lambda rows: [rows], 4), is_trained=True)
        schedule, batches = getattr(pipeline, name)(model, optimizer, **_options(name)), _batches(pipeline, 2)
        if "Semi" in name:
            with raises(PipelineError, mentions=("cut off", "list"), where=name):
                schedule.progress(iter(batches))
            continue
        assert_bits(schedule.progress(iter(batches)), _looped(expected, other, batches[0]), name)

    def ids(rows: torch.Tensor) -> Any:
        return pipeline.KeyedJaggedTensor(["a"], rows[:, 0].contiguous(), lengths=torch.ones(3, dtype=torch.int64))

    ((model, optimizer), _) = _pair((ids, 4), is_trained=True)
    schedule = pipeline.TrainPipelineSemiSync(model, optimizer)
    with raises(PipelineError, mentions=("cut off", "KeyedJaggedTensor"), where="a batch"):
        schedule.progress(iter(_batches(pipeline, 1)))


class Thing:
    """Of another library."""


# What a hook gives the module instead, by what differs: the place among the arguments, and what stands there.
CHANGES: dict[str, tuple[int, Any]] = {
    "another type": (2, lambda values: [values]),
    "a shape": (2, lambda values: values.reshape(2, 3)),
    "a dtype": (2, lambda values: values.double()),
    "a value": (2, lambda values: values + 1),
    "fewer of a list": (3, lambda parts: parts[:1]),
    "one of a list": (3, lambda parts: [parts[0], parts[1] + 1]),
    "a key": (4, lambda parts: {"y": parts["x"]}),
    "a value by key": (4, lambda parts: {"x": parts["x"] + 1}),
    "a number": (5, lambda number: number + 1),
    "a word": (6, lambda word: word + "s"),
    "weights of bags": (1, lambda bags: type(bags)(bags.values(), bags.weights() + 1, bags.lengths())),
    "a plain tuple for a pair": (8, tuple),
    "something for nothing": (7, lambda nothing: Thing()),
}
EQUAL: dict[str, tuple[int, Any]] = {
    "the same tensor anew": (2, lambda values: values.clone()),
    "the same list anew": (3, lambda parts: [part.clone() for part in parts]),
    "the same dictionary anew": (4, lambda parts: {key: part.clone() for key, part in parts.items()}),
    "the same number": (5, lambda number: int(str(number))),
    "the same bags anew": (1, lambda bags: type(bags)(bags.values(), bags.weights().clone(), bags.lengths())),
    "the same pair anew": (8, lambda pair: Two(pair.whole.clone(), pair.rest.clone())),
    "nothing": (7, lambda nothing: nothing),
}


def _hooked(pipeline: Any, batch: Given, place: int, change: Any) -> Any:
    """A schedule whose module is called with something else than the forward's; its error, or None."""
    ((model, optimizer), _) = _pair((lambda rows: rows, 4), is_trained=True)

    def hook(module: Any, args: tuple[Any, ...], options: Any) -> Any:
        return (*args[:place], change(args[place]), *args[place + 1 :]), options

    model.foreign.register_forward_pre_hook(hook, with_kwargs=True)
    return pipeline.TrainPipelineSparseDist(model, optimizer), iter([batch])


@requirement(
    "PIPE-576",
    "A hook that changes any argument of a driven module MUST be refused, of whatever type the argument is: another "
    "type, shape, dtype, value, number of parts, key, number or word; one that gives an equal argument anew MUST NOT.",
)
def test_arguments_that_hooks_change(pipeline: Any) -> None:
    (batch,) = _batches(pipeline, 1)
    for what, (place, change) in CHANGES.items():
        schedule, loader = _hooked(pipeline, batch, place, change)
        with raises(PipelineError, mentions=("hook", "foreign"), where=what):
            schedule.progress(loader)
    for what, (place, change) in EQUAL.items():
        schedule, loader = _hooked(pipeline, batch, place, change)
        with succeeds("a step", where=what):
            schedule.progress(loader)
    # What is of another library is told apart by its type alone.
    schedule, loader = _hooked(pipeline, replace(batch, other=Thing()), 7, lambda thing: Thing())
    with succeeds("a step", where="another thing of the same type"):
        schedule.progress(loader)
