"""D. Attaching, detaching, modes and edits: what happens between two steps is what the next one starts from."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import pytest
import torch

from conformance.harness import Rank, assert_equal, raises, requirement, succeeds
from conformance.pipeline.cases import EXACT, FUSED, TRAINING, WITHOUT_PREFETCH, Breaking, LoaderError, with_bad_id
from conformance.pipeline.jobs import Batch, Job, assert_same_state, outputs_of
from conformance.pipeline.model import assert_bits
from twinproof.errors import ConfigError, PipelineError


@requirement(
    "PIPE-042",
    "detach() MUST give the model back as it was, its own forward and names; progress() MUST attach again and go on, "
    "at every step; a driven module that is called directly, or after detach, MUST say so or work.",
)
def test_detach(pipeline: Any) -> None:
    for name in EXACT:
        job, loop = Job(pipeline, 9), Job(pipeline, 9)
        names = list(job.model.state_dict())
        schedule, loader = job.schedule(name), iter(job.batches(5))
        for step, batch in enumerate(loop.batches(5)):
            with raises(PipelineError, mentions=("detach", "collections.0")):
                job.model(job.there(batch))
            assert_bits(schedule.progress(loader), loop.step(batch), f"{name} step {step}")
            model = schedule.detach()
            assert_equal(model is job.model, True, where="the model")
            assert_equal(["forward" in vars(each) for each in job.collections], [False] * 2, where="another forward")
            assert_equal(list(model.state_dict()), names, where="names")
            with torch.no_grad():
                there = loop.there(batch)
                assert_bits(model(there)[1], loop.model(there)[1], f"{name} step {step} detached")
            schedule.attach()
    twice = Twice(job.model)
    with raises(ConfigError, mentions=("twice",)):
        getattr(pipeline, FUSED)(twice, job.optimizer)


@requirement(
    "PIPE-400",
    "A batch in flight MUST be sent and looked up anew after detach(): one that takes its place meanwhile is what the "
    "next call processes, however far the first had come.",
)
def test_changed_while_detached(pipeline: Any) -> None:
    semi_sync = ("TrainPipelineSemiSync", {"start_batch": 10**6})
    variants: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in EXACT]
    for name, options in (*variants, (FUSED, {"embedding_lookup_before_optimizer": True}), semi_sync):
        job, loop = Job(pipeline, 9), Job(pipeline, 9)
        schedule, loader = job.schedule(name, **options), iter(job.batches(5))
        expected = loop.batches(5)
        assert_bits(schedule.progress(loader), loop.step(expected[0]), f"{name} {options} step 0")
        schedule.detach()
        stride = expected[1].dense.shape[0]
        expected[1] = loop.batch(20, stride)
        # A batch in flight has been copied.
        schedule.batches[0] = job.there(job.batch(20, stride))
        for step, batch in enumerate(expected[1:], 1):
            assert_bits(schedule.progress(loader), loop.step(batch), f"{name} {options} step {step}")
        assert_same_state(job, loop, f"{name} {options}")


@requirement(
    "PIPE-444",
    "A model that attach() refuses MUST leave the pipeline as it was: it drives the model before, whose next steps are "
    "the loop's, with the batches in flight and no exchange again.",
)
def test_refused_model(pipeline: Any) -> None:
    for name in (FUSED, "TrainPipelineSemiSync"):
        options = {"start_batch": 10**6} if "Semi" in name else {}
        job, loop = (Job(pipeline, 4, kinds=("table_wise", "row_wise")) for _ in range(2))
        schedule, loader = job.schedule(name, strict=True, **options), iter(job.batches(4))
        # Data-parallel tables that the optimizer updates, and a module that is called twice.
        other = Job(pipeline, 4, kinds=("data_parallel",))
        job.optimizer.add_param_group({"params": list(other.model.parameters())})
        loop.optimizer.add_param_group({"params": []})
        batches, sent = loop.batches(4), list[int]()
        assert_bits(schedule.progress(loader), loop.step(batches[0]), f"{name} step 0")
        dist = job.collections[0].input_dist
        job.collections[0].input_dist = lambda *args, dist=dist, sent=sent: (sent.append(1), dist(*args))[1]
        for refused, why in ((Twice(other.model), "twice"), (other.model, "strict")):
            with raises(ConfigError, mentions=(why,)):
                schedule.attach(refused)
        assert_equal(sent, [], where=f"{name}: exchanges of refused models")
        for step, batch in enumerate(batches[1:], 1):
            with succeeds("a step", where=f"{name}, behind a model that was refused"):
                output = schedule.progress(loader)
            assert_bits(output, loop.step(batch), f"{name} step {step}")
        assert_equal(schedule.detach() is job.model, True, where=f"{name}: the model")


def _held(model: Any) -> dict[str, torch.Tensor]:
    """What training changes: tables, their states, and dense gradients."""
    found = {f"gradient of {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    for index, collection in enumerate(model.collections):
        for name, (_, weight, states) in collection.local_shards().items():
            found |= {f"{index} {name}": weight, **{f"{index} {name} {key}": state for key, state in states.items()}}
    return found


def _copies_of_driven(pipeline: Any, name: str, rank: Rank | None) -> None:
    job, loop = (Job(pipeline, 9, rank) for _ in range(2))
    options = {"start_batch": 10**6} if "Semi" in name else {}
    schedule, loader, batches = job.schedule(name, **options), iter(job.batches(4)), loop.batches(4)
    for step in (0, 1):
        assert_bits(schedule.progress(loader), loop.step(batches[step]), f"{name} step {step}")
    # A group cannot be pickled.
    ways = {"copied": copy.deepcopy} | (
        {"pickled": lambda model: pickle.loads(pickle.dumps(model))} if not rank else {}
    )
    apart = list[tuple[str, Any, Any]]()
    for way, make in ways.items():
        with succeeds(way, where=name):
            apart.append((f"{name}, {way}", make(job.model), copy.deepcopy(loop.model)))
    for step in (2, 3):
        assert_bits(schedule.progress(loader), loop.step(batches[step]), f"{name} step {step}")
    assert_same_state(job, loop, name)
    there = loop.there(batches[0])
    for where, model, expected in apart:
        for model_of in (model, expected):
            model_of.zero_grad()
        with succeeds("a step", where=where):
            losses, output = model(there)
        theirs, wanted = expected(there)
        assert_bits(output, wanted, f"{where}: output")
        losses.sum().backward()
        theirs.sum().backward()
        mine = _held(model)
        for key, value in _held(expected).items():
            assert_bits(mine[key], value, f"{where}: {key}")
    assert_same_state(job, loop, f"{name}, after steps of its copies")


def _copies_on_ranks(rank: Rank) -> None:
    _copies_of_driven(rank.component("pipeline"), FUSED, rank)


@requirement(
    "PIPE-443",
    "A copy of a model that a pipeline drives, deep or pickled, MUST be a model of its own, which looks up and trains "
    "as one that nobody drives: neither it nor the pipeline knows of the other. On several ranks it has their group.",
)
def test_copies_of_driven_models(pipeline: Any, rank_pool: Any) -> None:
    for name in WITHOUT_PREFETCH:
        _copies_of_driven(pipeline, name, None)
    rank_pool.run(_copies_on_ranks, 2)


class Twice(torch.nn.Module):
    """Calls its sharded module two times."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.collection = model.collections[0]

    def forward(self, batch: Any) -> Any:
        """The sum of both."""
        return self.collection(batch.ids[0]).values().sum() + self.collection(batch.ids[0]).values().sum()


@requirement(
    "PIPE-048",
    "Switches between train and eval at any step MUST equal the loop with the same switches: in evaluation no "
    "gradient, no update and no step is counted, and batches that were pulled in training count as any other.",
)
def test_modes(pipeline: Any) -> None:
    for name in EXACT:
        for options in ({}, {"embedding_lookup_before_optimizer": True}) if name == FUSED else ({},):
            for pattern in (0b0110100, 0b1011011, 0b1111111):
                job, loop = Job(pipeline, 10), Job(pipeline, 10)
                schedule, loader = job.schedule(name, **options), iter(job.batches(7))
                for step, batch in enumerate(loop.batches(7)):
                    for model in (job.model, loop.model):
                        model.train(not pattern >> step & 1)
                    where = f"{name} {options} pattern {pattern} step {step}"
                    assert_bits(schedule.progress(loader), loop.step(batch), where)
                    assert_same_state(job, loop, where)


@requirement(
    "PIPE-099",
    "Edits of tables and dense parameters in place, and loads, between two calls MUST be seen by the next batch, also "
    "where it was looked up before.",
)
def test_edits(pipeline: Any) -> None:
    for name in EXACT:
        for options in ({}, {"embedding_lookup_before_optimizer": True}) if name == FUSED else ({},):
            job, loop = Job(pipeline, 11), Job(pipeline, 11)
            schedule, loader = job.schedule(name, **options), iter(job.batches(5))
            for step, batch in enumerate(loop.batches(5)):
                assert_bits(schedule.progress(loader), loop.step(batch), f"{name} {options} step {step}")
                for each in (job, loop):
                    for collection in each.collections:
                        for _, weight, _ in collection.local_shards().values():
                            weight.mul_(1.5)
                    with torch.no_grad():
                        each.model.top.weight.add_(0.25)
            assert_same_state(job, loop, f"{name} {options}")


@requirement(
    "PIPE-413",
    "So MUST edits of the tables of one of several modules, whichever it is, where lookups were hoisted.",
)
def test_edits_of_one_module(pipeline: Any) -> None:
    for edited in (0, 1):
        # By this seed both have lookups that are hoisted: no table is the optimizer's.
        job, loop = (Job(pipeline, 4, kinds=("table_wise", "row_wise")) for _ in range(2))
        schedule = job.schedule(FUSED, embedding_lookup_before_optimizer=True)
        loader = iter(job.batches(4))
        for step, batch in enumerate(loop.batches(4)):
            assert_bits(schedule.progress(loader), loop.step(batch), f"module {edited} edited, step {step}")
            for each in (job, loop):
                for _, weight, _ in each.collections[edited].local_shards().values():
                    weight.mul_(1.5)
        assert_same_state(job, loop, f"module {edited} edited")


@requirement(
    "PIPE-503",
    "So MUST edits of what the module holds itself and no optimizer has: a replicated table, a feature processor's "
    "positions.",
)
@pytest.mark.parametrize("processed", [False, True])
def test_edits_of_parameters(pipeline: Any, processed: bool) -> None:
    # Feature processors need whole bags.
    kinds = ("table_wise",) if processed else ("data_parallel", "row_wise")
    job, loop = (Job(pipeline, 4, kinds=kinds, processed=processed) for _ in range(2))
    for each in (job, loop):
        dense = [param for name, param in each.model.named_parameters() if not name.startswith("collections")]
        each.optimizer = torch.optim.SGD(dense, lr=0.05, momentum=0.5)
    schedule = job.schedule(FUSED, embedding_lookup_before_optimizer=True)
    loader = iter(job.batches(4))
    for step, batch in enumerate(loop.batches(4)):
        assert_bits(schedule.progress(loader), loop.step(batch), f"step {step}")
        edited = [[p for c in each.collections for _, p in torch.nn.Module.named_parameters(c)] for each in (job, loop)]
        assert_equal(len(edited[0]) > 1, True, where="parameters that are edited")
        with torch.no_grad():
            for param in (param for params in edited for param in params):
                param.mul_(1.5)
    assert_same_state(job, loop, "after edits")


@requirement(
    "PIPE-415",
    "A batch that was looked up ahead MUST be looked up anew after detach(): its step begins with the model as it is "
    "then, whatever the schedule.",
)
def test_looked_up_anew(pipeline: Any) -> None:
    for name, options in (
        ("TrainPipelineSemiSync", {"start_batch": 0}),
        (FUSED, {"embedding_lookup_before_optimizer": True}),
    ):
        job = Job(pipeline, 9)
        given = job.batches(4)
        schedule, loader = job.schedule(name, **options), iter(given)
        for _ in range(2):
            schedule.progress(loader)
        with torch.no_grad():
            expected = schedule.detach()(job.there(given[2]))[1]
        errors, outputs = list[str](), list[Any]()
        try:
            outputs.append(schedule.progress(loader))
        except (KeyError, PipelineError) as error:
            errors.append(repr(error))
        assert_equal(errors, [], where=f"{name}: errors of the step after detach()")
        assert_bits(outputs[0], expected, f"{name}: the step after detach()")
        assert_equal(len(outputs_of(schedule, loader)), 1, where=f"{name}: the steps that are left")


@requirement(
    "PIPE-132",
    "Edits and a switch of the mode between a loader's error and the next call MUST be seen by the batch that waits.",
)
def test_edits_after_an_error(pipeline: Any) -> None:
    for name in WITHOUT_PREFETCH:
        for at in (2, 3):
            job, loop = Job(pipeline, 16), Job(pipeline, 16)
            schedule, loader = job.schedule(name), Breaking(job.batches(6), {at}, LoaderError("here"))
            batches = iter(loop.batches(6))
            for call in range(7):
                # In evaluation when the loader fails, in training afterwards.
                for each in (job, loop):
                    each.model.train(call != 1)
                try:
                    output = schedule.progress(loader)
                except LoaderError:
                    for each in (job, loop):
                        for collection in each.collections:
                            for _, weight, _ in collection.local_shards().values():
                                weight.mul_(1.5)
                    continue
                assert_bits(output, loop.step(next(batches)), f"{name} error at {at} call {call}")
                assert_same_state(job, loop, f"{name} error at {at} call {call}")


def _detached_with_a_bad_batch(rank: Rank, name: str) -> None:
    pipeline = rank.component("pipeline")
    job = Job(pipeline, 7, rank)
    batches = job.batches(4)
    if rank.rank == 1:
        batches[1].ids[1] = with_bad_id(pipeline, batches[1].ids[1])
    schedule, loader, outcomes = job.schedule(name), iter(batches), []
    for step in (schedule.progress, lambda _: schedule.detach(), schedule.progress):
        try:
            step(loader)
            outcomes.append("done")
        except Exception as error:
            outcomes.append(type(error.__cause__ or error).__name__)
    assert_equal(outcomes, ["done", "done", "IdRangeError"], where=f"{name}: a step, detach, the bad batch's own step")
    schedule.reset()
    schedule.progress(iter(job.batches(1, 30)))


@requirement(
    "PIPE-133",
    "detach() MUST work while a bad batch is in flight, whose error comes out at its own step, on every rank.",
)
def test_detached_with_a_bad_batch(rank_pool: Any) -> None:
    for name in WITHOUT_PREFETCH:
        rank_pool.run(_detached_with_a_bad_batch, 2, name)


@requirement(
    "PIPE-457",
    "What the exchange of a batch raised MUST be forgotten by detach(): the batch is sent anew, and where it has been "
    "mended meanwhile, its step is the loop's.",
)
def test_mended_while_detached(pipeline: Any) -> None:
    for name in WITHOUT_PREFETCH:
        options = {"start_batch": 10**6} if "Semi" in name else {}
        job, loop = Job(pipeline, 7), Job(pipeline, 7)
        given, expected = job.batches(4), loop.batches(4)
        for batches in (given, expected):
            batches[1].ids[1] = with_bad_id(pipeline, batches[1].ids[1])
        expected[1].ids[1].values()[0] = 0
        schedule, loader = job.schedule(name, **options), iter(given)
        assert_bits(schedule.progress(loader), loop.step(expected[0]), f"{name} step 0")
        schedule.detach()
        schedule.batches[0].ids[1].values()[0] = 0
        for step, batch in enumerate(expected[1:], 1):
            with succeeds("a step", where=f"{name} step {step}, mended"):
                output = schedule.progress(loader)
            assert_bits(output, loop.step(batch), f"{name} step {step}, mended")
        assert_same_state(job, loop, f"{name} mended")


class Looked(torch.nn.Module):
    """Its output is what was looked up, itself."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.collections = model.collections

    def forward(self, batch: Any) -> Any:
        """The mean of squares of both modules' columns, and those of the first."""
        pooled = [self.collections[0](batch.ids[0]).values(), self.collections[1](batch.ids[1]).values()]
        return (pooled[0].square().mean() + pooled[1].square().mean()).reshape(1), pooled[0]


@requirement(
    "PIPE-460",
    "Columns that a step in evaluation gives out MUST NOT have a way back to the tables, also where they were looked "
    "up in training before.",
)
def test_no_way_back(pipeline: Any) -> None:
    for options in ({}, {"embedding_lookup_before_optimizer": True}):
        job = Job(pipeline, 4, kinds=("table_wise", "row_wise"))
        model, found = Looked(job.model), list[bool]()
        schedule = getattr(pipeline, FUSED)(model, job.optimizer, job.device, **options)
        loader = iter(job.batches(4))
        for training in (True, False, False, True):
            model.train(training)
            found.append(schedule.progress(loader).requires_grad)
        assert_equal(found, [True, False, False, True], where=f"{options}: whether outputs require a gradient")


class FirstUngraded(torch.nn.Module):
    """The job's model, which looks up its first collection without gradients."""

    def __init__(self, model: Any, how: str) -> None:
        super().__init__()
        self.model, self.how = model, how

    def forward(self, batch: Batch) -> Any:
        """As the model."""
        model = self.model
        with torch.no_grad() if self.how == "no_grad" else torch.set_grad_enabled(False):
            first = model.collections[0](batch.ids[0]).values()
        pooled = [first, model.collections[1](batch.ids[1]).values()]
        scores = model.top(torch.cat([torch.tanh(model.bottom(batch.dense)), *pooled], dim=1))[:, 0]
        return (scores - batch.target).square().mean().reshape(1), scores.detach()


@requirement(
    "PIPE-506",
    "Tables that a model looks up without gradients, as under torch.no_grad(), MUST NOT be trained, and count no step: "
    "other tables and the dense part are the loop's.",
)
@pytest.mark.parametrize("how", ["no_grad", "set_grad_enabled"])
@pytest.mark.parametrize("name", TRAINING)
def test_looked_up_without_gradients(pipeline: Any, name: str, how: str) -> None:
    job, loop = (Job(pipeline, 4, kinds=("table_wise", "row_wise")) for _ in range(2))
    for each in (job, loop):
        each.model = FirstUngraded(each.model, how)  # type: ignore[assignment]
    schedule, loader = job.schedule(name), iter(job.batches(4))
    for step, batch in enumerate(loop.batches(4)):
        assert_bits(schedule.progress(loader), loop.step(batch), f"step {step}")
    assert_equal([c.fused_optimizer.step_count for c in job.collections], [0, 4], where="steps of the tables")
    assert_same_state(job, loop, name)


class Doubling(torch.nn.Module):
    """The job's model, which in evaluation doubles in place what it looks up."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> Any:
        """As the model."""
        model, dense = self.model, torch.tanh(self.model.bottom(batch.dense))
        pooled = [model.collections[0](batch.ids[0]).values(), model.collections[1](batch.ids[1]).values()]
        if not self.training:
            for each in pooled:
                each.mul_(2.0)
        scores = model.top(torch.cat([dense, *pooled], dim=1))[:, 0]
        return (scores - batch.target).square().mean().reshape(1), scores.detach()


@requirement(
    "PIPE-703",
    "What is looked up ahead inside inference mode MUST be such that a step outside of it may change it in place, as "
    "what the loop looks up, and the other way round.",
)
def test_ahead_of_inference_mode(pipeline: Any) -> None:
    variants: tuple[tuple[str, dict[str, Any]], ...] = (
        ("EvalPipelineFusedSparseDist", {"enable_embedding_lookup_prefetch": True}),
        ("TrainPipelineSemiSync", {"start_batch": 0}),
        (FUSED, {"embedding_lookup_before_optimizer": True}),
    )
    for name, options in variants:
        job, loop = Job(pipeline, 4), Job(pipeline, 4)
        for each in (job, loop):
            model: Any = Doubling(each.model).eval()
            each.model = model
        schedule, loader = job.schedule(name, **options), iter(job.batches(6))
        for step, batch in enumerate(loop.batches(6)):
            with torch.inference_mode(step % 2 == 0), torch.no_grad():
                expected = loop.step(batch)
                with succeeds("a step", where=f"{name} step {step}"):
                    output = schedule.progress(loader)
                assert_bits(output, expected, f"{name} step {step}")


@requirement("PIPE-055", "A pipeline MUST leave no thread behind, however it ends.")
def test_threads(pipeline: Any) -> None:
    before = threading.active_count()
    for name in WITHOUT_PREFETCH:
        job = Job(pipeline, 12)
        schedule = job.schedule(name)
        schedule.progress(iter(job.batches(4)))
        del schedule
    assert_equal(threading.active_count(), before, where="threads")
