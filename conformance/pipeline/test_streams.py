"""H. Stream safety: every edge of a schedule is seen by the virtual device, and no two conflicting accesses lack one.

Sizes are read on the host between their exchange and that of ids, which every schedule documents; the proof is for the
sizes of the batches at hand.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from conformance.harness import Rank, assert_equal, assert_le, raises, requirement
from conformance.pipeline.cases import EVAL_FUSED, EXACT, FUSED, PLACEMENTS
from conformance.pipeline.jobs import Job, assert_same_state
from conformance.pipeline.model import assert_bits
from conformance.pipeline.virtual_batches import KINDS, on_host, virtual
from conformance.provers.virtual_device import Costs, VirtualDevice
from twinproof.engine import CudaEngine
from twinproof.errors import ConfigError

VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (
    *((name, {}) for name in EXACT),
    *((FUSED, options) for options in PLACEMENTS[1:]),
    ("TrainPipelineSemiSync", {"start_batch": 1}),
)


@requirement(
    "PIPE-093",
    "No two conflicting accesses of a schedule MUST be unordered, for every schedule and placement, fill, steady "
    "state, evaluation, edits and drain, and nothing MUST be released while another stream needs it.",
    needs=("streams",),
)
def test_no_hazard(pipeline: Any) -> None:
    for number, (name, options) in enumerate(VARIANTS):
        # As late as events allow, and in a random order of what they allow, in turn.
        for late, seed in ((True, None), (True, 1))[number % 2 :: 2]:
            loop = Job(pipeline, 3, kinds=KINDS, device="cpu")
            expected: list[torch.Tensor | None] = []
            for step, batch in enumerate(loop.batches(6)):
                loop.model.train(step != 3)
                expected.append(None if "Semi" in name else loop.step(batch).clone())
            device = VirtualDevice(late=late, seed=seed)
            job = Job(pipeline, 3, kinds=KINDS, device="cpu")
            batches = [virtual(device, batch) for batch in on_host(device, job.batches(6))]
            with device:
                schedule, loader = job.schedule(name, engine=device.engine, **options), iter(batches)
                for step in range(6):
                    job.model.train(step != 3)
                    output = schedule.progress(loader)
                    with torch.utils._python_dispatch._disable_current_modes():
                        device.engine.settle_all()
                        wanted = expected[step]
                        if wanted is not None:
                            assert_bits(output, wanted, f"{name} {options} late {late} step {step}")
                schedule.detach()
            device.check(this_branch_only=True)
            if "Semi" not in name:
                assert_same_state(job, loop, f"{name} {options} late {late}")


class PastCounters(torch.optim.SGD):
    """Writes where no version counter sees it, as the kernels of other libraries do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Plain SGD."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.data.add_(param.grad, alpha=-group["lr"])


@requirement(
    "PIPE-401",
    "A lookup of what the optimizer updates MUST be ordered behind that, whichever of the modules reads it and whether "
    "or not a version counter has seen the write.",
    needs=("streams",),
)
def test_behind_the_optimizer(pipeline: Any) -> None:
    for placed in ({"emb_lookup_stream": "new"}, {"embedding_lookup_before_optimizer": True}):
        kinds, device = ("table_wise", "data_parallel"), VirtualDevice()
        # By this seed the first collection has whole tables only, and the second a replicated one.
        job = Job(pipeline, 9, kinds=kinds, device="cpu")
        job.optimizer = PastCounters(job.model.parameters(), lr=0.05)
        batches = [virtual(device, batch) for batch in on_host(device, job.batches(3))]
        with device:
            schedule, loader = job.schedule(FUSED, engine=device.engine, **placed), iter(batches)
            late = [schedule.is_late(call) for call in schedule.calls]
            assert_equal(late, [False, True], where="modules that read what the optimizer updates")
            for _ in range(3):
                schedule.progress(loader)
        assert_equal([str(hazard) for hazard in device.hazards], [], where=f"hazards of {placed}")


def hazards_of(pipeline: Any, variants: Any, kinds: Any = KINDS, rank: Rank | None = None) -> list[str]:
    """What the virtual device finds in a few training steps of each schedule."""
    found = []
    for name, options in variants:
        device, job = VirtualDevice(), Job(pipeline, 6, rank, kinds=kinds, device="cpu")
        batches = [virtual(device, batch) for batch in on_host(device, job.batches(4))]
        with device:
            schedule, loader = job.schedule(name, engine=device.engine, **options), iter(batches)
            for _ in range(4):
                schedule.progress(loader)
        found += [f"{name} {options}: {hazard}" for hazard in device.hazards]
    return found


def _no_hazard_on_ranks(rank: Rank) -> None:
    found = hazards_of(rank.component("pipeline"), VARIANTS[1:4], rank=rank)
    assert_equal(found, [], where="accesses that nothing orders, collectives among them")


@pytest.mark.night
@requirement(
    "PIPE-198",
    "Nor MUST there be any on two ranks, where collectives read and write on the stream that they were started on.",
    needs=("streams",),
)
def test_no_hazard_on_ranks(rank_pool: Any) -> None:
    rank_pool.run(_no_hazard_on_ranks, 2)


class Alone(torch.nn.Module):
    """The bottom of the job's model, without tables."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.bottom = model.bottom

    def forward(self, batch: Any) -> Any:
        """Losses and an output."""
        dense = self.bottom(batch.dense)
        return (dense.mean() - batch.target).square().mean().reshape(1), dense.detach()


@requirement(
    "PIPE-094",
    "Whatever reads a batch on the device MUST be ordered behind its copy: exchanges, lookups and the forward.",
    needs=("streams",),
)
def test_copies_ordered(pipeline: Any) -> None:
    found = [hazard for hazard in hazards_of(pipeline, VARIANTS[1:3]) if "copy at" in hazard]
    assert_equal(found, [], where="accesses that no event orders behind a copy")
    for name, options in VARIANTS[:3]:
        device, job = VirtualDevice(), Job(pipeline, 6, kinds=KINDS, device="cpu")
        batches = [virtual(device, batch) for batch in on_host(device, job.batches(3))]
        with device:
            # Nothing is looked up, behind which the forward would be anyway.
            schedule = getattr(pipeline, name)(Alone(job.model), job.optimizer, engine=device.engine, **options)
            loader = iter(batches)
            for _ in range(3):
                schedule.progress(loader)
        assert_equal([str(hazard) for hazard in device.hazards], [], where=f"{name} {options} without tables")


@requirement(
    "PIPE-095",
    "Memory that one stream allocated and another uses MUST be recorded for the other before it is given back.",
    needs=("streams",),
)
def test_memory_recorded(pipeline: Any) -> None:
    found = [hazard for hazard in hazards_of(pipeline, VARIANTS[2:4]) if "released:" in hazard]
    assert_equal(found, [], where="memory given back while a stream needs it")


@requirement(
    "PIPE-128",
    "An edit of a table on the caller's stream between two steps MUST be ordered before the next lookup.",
    needs=("streams",),
)
def test_edit_ordered(pipeline: Any) -> None:
    for name, options in VARIANTS:
        device = VirtualDevice()
        job = Job(pipeline, 4, kinds=("table_wise", "row_wise"), device="cpu")
        batches = [virtual(device, batch) for batch in on_host(device, job.batches(5))]
        with device:
            schedule, loader = job.schedule(name, engine=device.engine, **options), iter(batches)
            for _ in range(5):
                schedule.progress(loader)
                for collection in job.collections:
                    for _, weight, _ in collection.local_shards().values():
                        weight.mul_(1.5)
        device.check(this_branch_only=True)


@requirement(
    "PIPE-409",
    "So MUST an edit of the tables of one of several modules, whichever it is: each module's own lookup waits for it.",
    needs=("streams",),
)
def test_edit_of_one_module_ordered(pipeline: Any) -> None:
    for edited in (0, 1):
        device = VirtualDevice()
        job = Job(pipeline, 4, kinds=("table_wise", "row_wise"), device="cpu")
        batches = [virtual(device, batch) for batch in on_host(device, job.batches(3))]
        with device:
            schedule = job.schedule(FUSED, engine=device.engine, emb_lookup_stream="new")
            loader = iter(batches)
            for _ in range(3):
                schedule.progress(loader)
                for _, weight, _ in job.collections[edited].local_shards().values():
                    weight.mul_(1.5)
        device.check(this_branch_only=True)


@requirement(
    "PIPE-158",
    "Called under a stream of the caller's, a pipeline MUST run the model there, leave that stream the current one, "
    "and have streams of its own that are pairwise distinct.",
    needs=("streams",),
)
def test_callers_stream(pipeline: Any) -> None:
    for name, options in VARIANTS[1:4]:
        device, job, loop = (
            VirtualDevice(),
            Job(pipeline, 4, kinds=KINDS, device="cpu"),
            Job(pipeline, 4, kinds=KINDS, device="cpu"),
        )
        batches = [virtual(device, batch) for batch in on_host(device, job.batches(4))]
        ran_on = set[str]()
        with device, device.engine.on(device.engine.stream("caller")):
            job.model.top.register_forward_hook(lambda *_, d=device, s=ran_on: s.add(d.engine.current()))
            schedule, loader = job.schedule(name, engine=device.engine, **options), iter(batches)
            for _ in range(4):
                schedule.progress(loader)
                assert_equal(device.engine.current(), "caller", where=f"{name} {options} the current stream after")
        device.check(this_branch_only=True)
        assert_equal(ran_on, {"caller"}, where=f"{name} {options} streams of the model")
        made = 4 if options.get("emb_lookup_stream") == "new" else 3
        assert_equal(device.engine.stream_count, made, where=f"{name} {options} streams, the caller's among them")
        for batch in loop.batches(4):
            loop.step(batch)
        assert_same_state(job, loop, f"{name} {options}")


@requirement(
    "PIPE-159",
    "From the exchange of ids on, in the lookup, its output, the backward and the tables' update, the host MUST NOT "
    "look at a value of the device.",
    needs=("streams",),
)
def test_host_does_not_look(pipeline: Any) -> None:
    for kinds in (("table_wise", "column_wise"), ("row_wise",), ("data_parallel",)):
        device, job = VirtualDevice(), Job(pipeline, 6, kinds=kinds, device="cpu")
        batch = virtual(device, on_host(device, [job.batch(1, 4)])[0])
        with device:
            for collection, ids in zip(job.collections, batch.to("cpu").ids, strict=True):
                ctx = collection.create_context()
                given = collection.input_dist(ctx, ids).wait().wait()
                device.not_covered.clear()
                pooled = collection.output_dist(ctx, collection.compute(ctx, given)).wait().values()
                pooled.sum().backward()
                assert_equal(device.not_covered, [], where=f"{kinds} looks of the host")


def costs_of(lookup_s: float, dense_s: float) -> Costs:
    """A lookup, and the momentum of one of the dense optimizer's parameters, take this long, all else nothing."""

    def op_s(name: str, size_bytes: int) -> float:
        if name == "twinproof::pipeline_pool":
            return lookup_s
        return dense_s if name == "aten::mul_" else 0.0

    return Costs(op_s=op_s)


def makespan_of(pipeline: Any, name: str, options: dict[str, Any], costs: Costs, count: int) -> float:
    """Seconds of the virtual clock for some batches."""
    device = VirtualDevice(costs=costs)
    job = Job(pipeline, 5, kinds=("table_wise",), device="cpu")
    batches = [virtual(device, batch) for batch in on_host(device, job.batches(count))]
    with device:
        schedule, loader = job.schedule(name, engine=device.engine, **options), iter(batches)
        for _ in range(count):
            schedule.progress(loader)
        made: float = device.engine.makespan_s
    device.check(this_branch_only=True)
    return made


@pytest.mark.night
@requirement(
    "PIPE-109",
    "On the virtual clock a step of Fused MUST take the longer of lookup and dense optimizer, where SparseDist takes "
    "both, and never longer than SparseDist, nor that than Base, whatever these two take.",
    needs=("streams",),
)
def test_makespan(pipeline: Any) -> None:
    for lookup_s, dense_s in ((4.0, 1.0), (1.0, 4.0), (3.0, 0.0)):
        costs = costs_of(lookup_s, dense_s)
        short, long = ({name: makespan_of(pipeline, name, {}, costs, n) for name in EXACT} for n in (4, 6))
        steps = {name: (long[name] - short[name]) / 2 for name in EXACT}
        base, sparse_dist, fused = (steps[name] for name in EXACT)
        where = f"lookup {lookup_s}, dense {dense_s}"
        # Two lookups and four parameters.
        assert_equal(sparse_dist, 2 * lookup_s + 4 * dense_s, where=f"a step of SparseDist, {where}")
        assert_equal(fused, max(2 * lookup_s, 4 * dense_s), where=f"a step of Fused, {where}")
        assert_le(sparse_dist, base, where=f"SparseDist against Base, {where}")
        assert_le(fused, sparse_dist, where=f"Fused against SparseDist, {where}")


@requirement(
    "PIPE-337",
    "The stream of the lookups' own MUST have the priority that was asked for, 0 if none was, and every other stream "
    "0; a priority without such a stream, or one that is no integer, is refused by name.",
    needs=("streams",),
)
def test_priority(pipeline: Any) -> None:
    for name in (FUSED, EVAL_FUSED):
        for given, expected in (({}, 0), ({"emb_lookup_stream_priority": -1}, -1)):
            device, job = VirtualDevice(), Job(pipeline, 4, device="cpu")
            job.schedule(name, engine=device.engine, emb_lookup_stream="new", **given)
            wanted = {"memcpy": 0, "data_dist": 0, "emb_lookup": expected}
            assert_equal(device.engine.priorities, wanted, where=f"{name} {given}: priorities of streams")
        for stream, priority in (("data_dist", -1), ("current", -1), ("new", "high"), ("new", True)):
            options: dict[str, Any] = {"emb_lookup_stream": stream, "emb_lookup_stream_priority": priority}
            with raises(ConfigError, mentions=("emb_lookup_stream_priority",), where=f"{name} {options}"):
                Job(pipeline, 4, device="cpu").schedule(name, **options)
    with mock.patch("torch.cuda.Stream") as stream:
        CudaEngine("cuda:0").stream("emb_lookup", -1)
    stream.assert_called_once_with(torch.device("cuda:0"), priority=-1)


class _Grids(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most blocks that each pooling may have."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() == "twinproof::pipeline_pool":
            self.found.append(args[8] if len(args) > 8 else 0)
        return func(*args, **(kwargs or {}))


@requirement(
    "PIPE-338",
    "Every lookup of a schedule MUST have a grid of at most the blocks that were asked for, any number if none were, "
    "and a lookup outside of it any number; fewer than one are refused by name, and no bit changes.",
    needs=("streams",),
)
def test_grids(pipeline: Any) -> None:
    for name in (FUSED, EVAL_FUSED):
        for given, expected in (({}, 0), ({"emb_lookup_max_blocks": 7}, 7)):
            loop, job = Job(pipeline, 4, kinds=KINDS, device="cpu"), Job(pipeline, 4, kinds=KINDS, device="cpu")
            loop.model.train("Train" in name)
            schedule, loader = job.schedule(name, emb_lookup_stream="new", **given), iter(job.batches(5))
            for step, batch in enumerate(loop.batches(3)):
                with _Grids() as grids:
                    output = schedule.progress(loader)
                assert_equal(set(grids.found), {expected}, where=f"{name} {given} step {step}: blocks")
                assert_bits(output, loop.step(batch), f"{name} {given} step {step}")
            schedule.detach()
            with _Grids() as grids:
                job.collections[0](job.batch(9).ids[0])
            assert_equal(set(grids.found), {0}, where=f"{name} {given}: blocks outside of the schedule")
    for blocks in (0, -1, 2.5, True):
        with raises(ConfigError, mentions=("emb_lookup_max_blocks",), where=str(blocks)):
            Job(pipeline, 4, device="cpu").schedule(FUSED, emb_lookup_max_blocks=blocks)
