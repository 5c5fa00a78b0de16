"""What is done ahead of a batch's own step, where it fails, and what a step finds out once."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from conformance.harness import Rank, assert_equal, assert_le, raises, requirement, succeeds
from conformance.pipeline.cases import EVAL_FUSED, EVALUATION, FUSED, TRAINING, LoaderError
from conformance.pipeline.jobs import Batch, Job, assert_same_state, outputs_of
from conformance.pipeline.model import assert_bits
from twinproof.errors import ConfigError, DistributedError, IdRangeError

STAGES = ("input_dist", "compute", "output_dist")
EARLY: tuple[dict[str, Any], ...] = (
    {},
    {"embedding_lookup_before_optimizer": True},
    {"embedding_lookup_after_data_dist": True},
)


def _interrupt(module: Any, method: str, at: int) -> None:
    """An interrupt in place of this call of a module's method, once."""
    own, number = getattr(module, method), itertools.count()

    def call(*given: Any) -> Any:
        if next(number) == at:
            raise KeyboardInterrupt
        return own(*given)

    setattr(module, method, call)


def _steps(schedule: Any, batches: list[Any]) -> tuple[list[torch.Tensor], list[str]]:
    """All outputs, and the classes of what was raised between them; a pipeline that only raises is left."""
    found, errors, loader = list[torch.Tensor](), list[str](), iter(batches)
    while len(errors) < 3:
        try:
            found.append(schedule.progress(loader))
        except StopIteration:
            break
        except (Exception, KeyboardInterrupt) as error:
            errors.append(type(error).__name__)
    return found, errors


@requirement(
    "PIPE-650",
    "An interrupt in the exchange or the lookup of a batch MUST come out once: the next calls go on, with the bits of "
    "the loop over all batches but at most the one whose step was stopped.",
)
@pytest.mark.parametrize("name", TRAINING)
def test_interrupted_stages(pipeline: Any, name: str) -> None:
    loops = []
    for lost in (None, 0, 1, 2):
        loop = Job(pipeline, 3)
        loops.append([loop.step(batch) for number, batch in enumerate(loop.batches(4)) if number != lost])
    for method, at in itertools.product(STAGES, (0, 2)):
        job, where = Job(pipeline, 3), f"{method}, call {at}"
        _interrupt(job.collections[1], method, at)
        found, errors = _steps(job.schedule(name), job.batches(4))
        assert_equal(errors, ["KeyboardInterrupt"], where=f"{where}: raised")
        equal = [len(one) == len(found) and all(map(torch.equal, found, one)) for one in loops]
        assert_equal(any(equal), True, where=f"{where}: the loop's bits, of {len(found)} steps")


def _fail_at(module: Any, stride: int) -> None:
    """Lookups of a batch of so many samples fail, each time."""
    own = module.compute

    def compute(ctx: Any, *given: Any) -> Any:
        if set(ctx.strides) == {stride}:
            raise LoaderError("no rows")
        return own(ctx, *given)

    module.compute = compute


@requirement(
    "PIPE-651",
    "What a lookup raises MUST come out at its own batch's step, once, however early it was looked up: the step before "
    "is whole, and those behind have the loop's bits.",
)
@pytest.mark.parametrize("name", [*TRAINING, *EVALUATION])
def test_failing_lookups(pipeline: Any, name: str) -> None:
    variants: tuple[dict[str, Any], ...] = EARLY if name == FUSED else ({},)
    if name == EVAL_FUSED:
        variants = ({"enable_embedding_lookup_prefetch": True}, {})
    if name == "TrainPipelineSemiSync":
        variants = ({"start_batch": 0}, {})
    for options in variants:
        job, loop = Job(pipeline, 4), Job(pipeline, 4)
        given, where = job.batches(5), f"{options}"
        given[2] = job.batch(2, stride=7)
        _fail_at(job.collections[1], 7)
        schedule, raised = job.schedule(name, **options), list[tuple[int, str]]()
        loader, found = iter(given), list[torch.Tensor]()
        while len(raised) < 3:
            try:
                found.append(schedule.progress(loader))
            except StopIteration:
                break
            except Exception as error:
                raised.append((schedule.processed_count, type(error).__name__))
        assert_equal(raised, [(2, "LoaderError")], where=f"{where}: raised")
        assert_equal(len(found), 4, where=f"{where}: steps")
        if "start_batch" in options:
            continue
        if name in EVALUATION:
            loop.model.eval()
        for got, batch in zip(found, [*loop.batches(2), *loop.batches(2, first=3)], strict=True):
            assert_bits(got, loop.step(batch), f"{where}: outputs")
        assert_same_state(job, loop, where)


class _Modules:
    """Counts how often the modules of some are gone through."""

    def __init__(self, patch: pytest.MonkeyPatch, some: list[Any]) -> None:
        own: Any = torch.nn.Module.named_modules
        self.count = 0

        def named_modules(module: Any, *given: Any, **options: Any) -> Any:
            self.count += any(module is each for each in some)
            return own(module, *given, **options)

        patch.setattr(torch.nn.Module, "named_modules", named_modules)


@requirement(
    "PIPE-652",
    "A step MUST go through the modules of a sharded collection once at most, and know all the same what its optimizer "
    "updates: of parameters that were replaced and groups that were added before it, or in its forward.",
)
@pytest.mark.parametrize("name", TRAINING)
def test_modules_of_a_step(pipeline: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    job = Job(pipeline, 6, kinds=("data_parallel",))
    left = {id(param) for each in job.collections for param in each.parameters()}
    for group in job.optimizer.param_groups:
        group["params"] = [param for param in group["params"] if id(param) not in left]
    first, added = job.collections[0], list[Any]()

    def forward(batch: Any) -> Any:
        answer = job.model(batch)
        while added:
            job.optimizer.add_param_group({"params": added.pop()})
        return answer

    schedule, loader, seen = job.schedule(name, custom_model_fwd=forward), iter(job.batches(9)), list[list[int]]()
    own = schedule._stages.optimize

    def optimize(late: list[Any], work: Any) -> None:
        seen.append([job.collections.index(call.module) for call in late])
        own(late, work)

    schedule._stages.optimize = optimize
    counted = _Modules(monkeypatch, job.collections)

    def step() -> None:
        counted.count = 0
        schedule.progress(loader)
        assert_le(counted.count, len(job.collections), where=f"step {len(seen)}: listings of two collections")

    step()
    job.optimizer.add_param_group({"params": list(first.parameters())})
    step()
    for module in first.embedding_bags.values():
        module.weight = torch.nn.Parameter(module.weight.detach().clone())
    step()
    job.optimizer.add_param_group({"params": list(first.parameters())})
    step()
    added.append(list(job.collections[1].parameters()))
    schedule.progress(loader)
    step()
    expected = [[], [0], [], [0], [0, 1], [0, 1]]
    assert_equal(seen, expected, where="collections that the optimizer updates, by step")


@requirement(
    "PIPE-653",
    "Losses that nothing can be trained by MUST be refused by name, in a step that updates nothing, and the next step "
    "go on: those of no_grad(), and those that were cut off.",
)
def test_losses_without_a_gradient(pipeline: Any) -> None:
    for where, is_cut in (("no_grad", False), ("detached", True)):
        job, loop, cuts = Job(pipeline, 2), Job(pipeline, 2), [is_cut]

        def forward(batch: Any, job: Job = job, cuts: list[bool] = cuts) -> Any:
            losses, output = job.model(batch)
            return losses.detach() if cuts and cuts.pop() else losses, output

        schedule, loader = job.schedule(FUSED, custom_model_fwd=forward), iter(job.batches(3))
        with raises(ConfigError, mentions=["losses", "no_grad()"], where=where), torch.set_grad_enabled(is_cut):
            schedule.progress(loader)
        found = outputs_of(schedule, loader)
        expected = [loop.step(batch) for batch in loop.batches(2, first=1)]
        assert_equal(len(found), 2, where=f"{where}: steps")
        for got, wanted in zip(found, expected, strict=True):
            assert_bits(got, wanted, f"{where}: outputs")
        assert_same_state(job, loop, where)


def _with_a_bag(pipeline: Any, job: Job, batch: Batch, count: int) -> Batch:
    """The batch, whose second ids are one bag of so many: positions have four weights."""
    keys, stride = batch.ids[1].keys(), batch.target.numel()
    lengths = torch.zeros(len(keys) * stride, dtype=torch.int64)
    lengths[0] = count
    ids = pipeline.KeyedJaggedTensor(keys, torch.zeros(count, dtype=torch.int64), lengths=lengths)
    return job.there(Batch(batch.dense, [batch.ids[0], ids], batch.target))


def _long_bag_of_one_rank(rank: Rank, name: str) -> None:
    pipeline = rank.component("pipeline")
    job = Job(pipeline, 4, rank, processed=True, kinds=("table_wise", "column_wise"))
    given = job.batches(8)
    if rank.rank == 1:
        given[:2] = [_with_a_bag(pipeline, job, batch, 4 + number) for number, batch in enumerate(given[:2])]
    schedule, loader = job.schedule(name), iter(given)
    with succeeds("a step", where=f"{name}, a bag of four"):
        schedule.progress(loader)
    with raises((IdRangeError, DistributedError), mentions=["a bag longer than its weights"], where=name):
        schedule.progress(loader)
    schedule.reset()
    with succeeds("a step", where=f"{name}, behind reset()"):
        schedule.progress(loader)


@requirement(
    "PIPE-665",
    "A bag that is longer than its position weights MUST stop every rank at its batch's step, by name, whichever rank "
    "has it and whichever looks it up, and all go on behind reset().",
)
def test_long_bag_of_one_rank(rank_pool: Any) -> None:
    for name in (FUSED, "TrainPipelineSparseDist"):
        rank_pool.run(_long_bag_of_one_rank, 2, name)


def _stopped(rank: Rank, what: str) -> None:
    pipeline = rank.component("pipeline")
    job = Job(pipeline, 3, rank)
    given = job.batches(8)
    if what == "lookup":
        given[1] = job.batch(1, stride=7)
        _fail_at(job.collections[1], 7)
    else:
        _interrupt(job.collections[1], what, 1)
    schedule = job.schedule("TrainPipelineSemiSync", start_batch=0) if what == "lookup" else job.schedule(FUSED)
    loader, errors = iter(given), list[tuple[int, str]]()
    while len(errors) < 2:
        try:
            schedule.progress(loader)
        except (Exception, KeyboardInterrupt) as error:
            errors.append((schedule.processed_count, type(error).__name__))
    # How early ids are sent is up to the schedule, and when SemiSync looks up is its meaning.
    steps = 0 if what == "lookup" else errors[0][0]
    first = "LoaderError" if what == "lookup" else "KeyboardInterrupt"
    assert_equal(errors, [(steps, first), (steps, "PipelineError")], where=f"{what}: steps before, and what was raised")
    schedule.reset()
    with succeeds("a step", where=f"{what}, behind reset()"):
        schedule.progress(loader)


@requirement(
    "PIPE-643",
    "On several ranks, an interrupt in the exchange of a batch, or what a lookup ahead of its turn raises, MUST come "
    "out at once, every later call MUST be refused by name, and all ranks go on behind reset().",
)
def test_stopped_on_ranks(rank_pool: Any) -> None:
    for what in ("input_dist", "lookup"):
        rank_pool.run(_stopped, 2, what)


@requirement(
    "PIPE-644",
    "An exchange that was interrupted MUST be told by name where it is waited for again: half of one is no answer, and "
    "its other half cannot be asked for twice.",
)
def test_interrupted_exchanges(pipeline: Any) -> None:
    calls = list[int]()

    def interrupted() -> Any:
        calls.append(len(calls))
        raise KeyboardInterrupt

    exchange, raised = pipeline.Awaitable(interrupted), list[tuple[str, bool]]()
    for _ in range(3):
        try:
            exchange.wait()
        except (Exception, KeyboardInterrupt) as error:
            raised.append((type(error).__name__, "interrupted in the middle" in str(error)))
    named = ("DistributedError", True)
    assert_equal(raised, [("KeyboardInterrupt", False), named, named], where="raised")
    assert_equal(calls, [0], where="tries")


@torch.fx.wrap
def _checked(ids: Any, target: torch.Tensor) -> Any:
    """The ids; those of a batch of seven samples are refused."""
    if target.numel() == 7:
        raise LoaderError("not these")
    return ids


class Checking(torch.nn.Module):
    """The job's model, whose second ids a function has looked at."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> Any:
        """As the model."""
        model = self.model
        checked = _checked(batch.ids[1], batch.target)
        pooled = [model.collections[0](batch.ids[0]).values(), model.collections[1](checked).values()]
        scores = model.top(torch.cat([torch.tanh(model.bottom(batch.dense)), *pooled], dim=1))[:, 0]
        return (scores - batch.target).square().mean().reshape(1), scores.detach()


class Foreign(torch.nn.Module):
    """A sharded collection that has the three steps and no more, as another library's."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.own = own
        self.create_context, self.input_dist, self.output_dist = own.create_context, own.input_dist, own.output_dist
        self.compute = own.compute

    def forward(self, ids: Any) -> Any:
        """Its own."""
        return self.own(ids)


def _failing_on_the_way(rank: Rank, name: str, is_foreign: bool) -> None:
    pipeline = rank.component("pipeline")
    job, loop = Job(pipeline, 4, rank), Job(pipeline, 4, rank)
    given, failed = job.batches(8), list[int]()
    if rank.rank == 1 or is_foreign:
        given[2] = job.batch(2, stride=7)
    for each in (job, loop):
        if is_foreign:
            each.model.collections[0] = Foreign(each.collections[0])
        model: Any = Checking(each.model)
        each.model = model
    schedule = job.schedule(name, **({"start_batch": 4} if "Semi" in name else {}))
    own = schedule.extract_model_input_from_batch

    def extract(batch: Batch) -> Any:
        if batch.target.numel() == 7:
            failed.append(schedule.processed_count)
        return own(batch)

    schedule.extract_model_input_from_batch = extract
    loader, errors = iter(given), list[tuple[int, str]]()
    while len(errors) < 2:
        try:
            schedule.progress(loader)
        except Exception as error:
            errors.append((schedule.processed_count, type(error).__name__))
    at, mine = failed[0] if is_foreign else 2, bool(failed)
    expected = [(at, "LoaderError" if mine else "DistributedError"), (at, "PipelineError")]
    assert_equal(errors, expected, where=f"{name}: steps before, and what was raised")
    for batch in loop.batches(at):
        loop.step(batch)
    assert_same_state(job, loop, f"{name}: the steps before")
    schedule.reset()
    with succeeds("a step", where=f"{name}, behind reset()"):
        schedule.progress(loader)


@requirement(
    "PIPE-698",
    "What a forward raises on one rank on the way to a sharded module MUST come out at that batch's step, as it is "
    "there and as DistributedError on the others; the steps before are whole, and all go on behind reset().",
)
def test_failing_on_the_way(rank_pool: Any) -> None:
    for name in (FUSED, "PrefetchTrainPipelineSparseDist", "TrainPipelineSemiSync"):
        rank_pool.run(_failing_on_the_way, 2, name, False)


@requirement(
    "PIPE-699",
    "On several ranks, what a forward raises on the way to a sharded module that cannot tell the others MUST come out "
    "of the call of progress() in which it was raised; every later one is refused by name until reset().",
)
def test_failing_on_the_way_to_others(rank_pool: Any) -> None:
    for name in (FUSED, "TrainPipelineSparseDist"):
        rank_pool.run(_failing_on_the_way, 2, name, True)
