"""What the process is beside the pipeline: what a caller has set for its model, a default device first of all."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from conformance.harness import assert_equal, requirement, succeeds
from conformance.harness.surroundings import SURROUNDINGS
from conformance.pipeline.batches import values_of
from conformance.pipeline.cases import EVAL_FUSED
from conformance.pipeline.every_module import EVERY, batch_of, looked_up
from conformance.pipeline.jobs import KINDS, Job, assert_same_state
from conformance.pipeline.model import assert_bits, random_tables
from conformance.pipeline.sharding import placed, random_plan

SCHEDULES = ("TrainPipelineBase", "TrainPipelineSparseDist", "TrainPipelineFusedSparseDist", "TrainPipelineSemiSync")


def _within_meta(batches: list[Any]) -> Iterator[Any]:
    # The loader is the user's, and makes its batches where it likes.
    for batch in batches:
        with torch.device("cpu"):
            yield batch


@requirement(
    "PIPE-421",
    "The process's default device MUST NOT decide where anything lies: cutting, lookups, steps, schedules and state "
    "dicts under another one MUST be those without.",
)
def test_default_device(pipeline: Any) -> None:
    for seed, name in enumerate(SCHEDULES):
        loop, job = (Job(pipeline, seed, device="cpu") for _ in range(2))
        batches = loop.batches(4)
        expected = [loop.step(batch) for batch in batches[:2]]
        with torch.device("meta"), succeeds("a loop", where=name):
            found = [job.step(batch) for batch in batches[:2]]
        for step, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
            assert_bits(mine, theirs, f"{name}: output of step {step}")
        assert_same_state(job, loop, f"{name}: steps")
        plain = loop.schedule(name)
        with torch.device("meta"), succeeds("a schedule", where=name):
            schedule = job.schedule(name)
        straight, fed = iter(batches), _within_meta(batches)
        for step in range(len(batches)):
            output = plain.progress(straight)
            with torch.device("meta"), succeeds("a step", where=name):
                seen = schedule.progress(fed)
            assert_bits(seen, output, f"{name}: output {step} of a schedule")
        assert_same_state(job, loop, f"{name}: a schedule")
        for index, collection in enumerate(job.collections):
            with torch.device("meta"), succeeds("a state dict", where=name):
                state = {**collection.state_dict(), **collection.optimizer_state_dict()}
            whole = {**loop.collections[index].state_dict(), **loop.collections[index].optimizer_state_dict()}
            assert_equal(sorted(state), sorted(whole), where=f"{name}: names of collection {index}")
            for key, value in whole.items():
                assert_equal(state[key].device.type, "cpu", where=f"{name}: {key}")
                assert_bits(state[key], value, f"{name}: {key}")


def _made(pipeline: Any, configs: Any, plan: Any) -> dict[str, torch.Tensor]:
    """What is made of nothing: first weights of cut tables, and what batches say of their sizes."""
    cut = pipeline.ShardedEmbeddingBagCollection(pipeline.EmbeddingBagCollection(configs, device="meta"), plan, seed=3)
    found = dict(cut.state_dict())
    ids, lengths = torch.arange(6, device="cpu"), torch.tensor([2, 1, 0, 3], device="cpu")
    batches = {
        "of two sizes": pipeline.KeyedJaggedTensor(["f", "g"], ids, None, lengths, None, None, [[1], [3]]),
        "of one": pipeline.KeyedJaggedTensor(["f", "g"], ids, None, lengths),
        "empty": pipeline.KeyedJaggedTensor.empty(device=torch.device("cpu")),
    }
    other = pipeline.KeyedJaggedTensor(["h", "i"], ids, None, lengths, None, None, [[1], [3]])
    batches["joined"] = pipeline.KeyedJaggedTensor.concat([batches["of two sizes"], other])
    for name, batch in batches.items():
        found[f"{name}: lengths"], found[f"{name}: offsets"] = batch.lengths(), batch.offsets()
        strides = batch.stride_per_key_per_rank()
        found[f"{name}: strides"] = torch.tensor(strides, dtype=torch.int64, device="cpu")
        found[f"{name}: per key"] = torch.tensor(batch.length_per_key(), dtype=torch.int64, device="cpu")
    jagged = pipeline.JaggedTensor(ids, lengths=lengths)
    return found | {"jagged: offsets": jagged.offsets(), "jagged: dense": jagged.to_padded_dense(3)}


@requirement(
    "PIPE-422",
    "First weights of tables that are cut from meta, and what a batch says of its sizes, MUST NOT follow the process's "
    "default device.",
)
def test_made_of_nothing(pipeline: Any) -> None:
    configs, _, _, _ = random_tables(pipeline, 3)
    plan = random_plan(pipeline, configs, 1, 3, KINDS)
    expected = _made(pipeline, configs, plan)
    with torch.device("meta"), succeeds("what is made of nothing", where="on meta"):
        found = _made(pipeline, configs, plan)
    for name, value in expected.items():
        assert_equal(found[name].device.type, value.device.type, where=f"{name}: device")
        assert_bits(found[name], value, name)


WITHOUT_TRAINING = ("inference", "no gradients")


def _found(pipeline: Any, module: Any, surroundings: Any, *, trains: bool) -> dict[str, Any]:
    """A lookup inside of the surroundings, with its way back, and what it leaves."""
    batch = batch_of(3)
    weights = values_of((len(batch.flat()[0]),), 5)
    with surroundings():
        rows = looked_up(pipeline, module, batch, weights)
    if trains:
        grad = values_of(rows.shape, 9).to(rows.device)
        with surroundings():
            rows.backward(grad)  # type: ignore[no-untyped-call]
    held = dict(module.named_buffers()) | dict(module.named_parameters())
    return {"rows": rows.detach().clone(), **{f"gradient of {n}": p.grad for n, p in held.items()}, **held}


@requirement(
    "PIPE-430",
    "A default dtype, inference mode, a ban on gradients, deterministic algorithms and mixed precision, which callers "
    "set for their models, MUST NOT decide what any module looks up, trains, or is made of.",
)
@pytest.mark.parametrize("kind", sorted(SURROUNDINGS))
def test_modules_anywhere(pipeline: Any, kind: str) -> None:
    trains = kind not in WITHOUT_TRAINING
    for make in EVERY:
        module = make(pipeline)
        # The pretend device's tensors are wrapped, and cannot be detached inside of inference mode.
        module = module if kind == "inference" else placed(pipeline, module)
        again = copy.deepcopy(module)
        expected = _found(pipeline, module, torch.enable_grad, trains=trains)
        with succeeds("a lookup", where=f"{make.__name__}, {kind}"):
            found = _found(pipeline, again, SURROUNDINGS[kind], trains=trains)
        for name, value in expected.items():
            where = f"{make.__name__}, {kind}: {name}"
            assert_equal(found[name] is None, value is None, where=where)
            if value is not None:
                assert_bits(found[name].detach(), value.detach(), where)
    configs, _, _, _ = random_tables(pipeline, 3)
    plan = random_plan(pipeline, configs, 1, 3, KINDS)
    made = _made(pipeline, configs, plan)
    with SURROUNDINGS[kind](), succeeds("what is made of nothing", where=kind):
        again = _made(pipeline, configs, plan)
    for name, value in made.items():
        mine, theirs = (each.to_local() if hasattr(each, "to_local") else each for each in (again[name], value))
        assert_bits(mine, theirs, f"{kind}: {name}")


@requirement(
    "PIPE-431",
    "Nor MUST they decide what a schedule's step is, nor leave anything for the steps behind it: it is the loop's.",
)
@pytest.mark.parametrize("kind", sorted(SURROUNDINGS))
def test_schedules_anywhere(pipeline: Any, kind: str) -> None:
    trains, surroundings = kind not in WITHOUT_TRAINING, SURROUNDINGS[kind]
    # What mixed precision makes of the dense part is not the schedule's.
    of_the_loop = surroundings if kind == "mixed precision" else torch.enable_grad
    for seed, name in enumerate((*SCHEDULES, EVAL_FUSED)):
        loop, job = (Job(pipeline, seed, device="cpu") for _ in range(2))
        batches, where = loop.batches(4), f"{name}, {kind}"
        schedule, loader = job.schedule(name), iter(batches)
        if not trains:
            # What a loader makes when it is asked for a batch may be trained on later.
            loader = (job.batches(1, number)[0] for number in range(4))
        for step, batch in enumerate(batches):
            is_inside = step < 2
            for each in (loop, job):
                each.model.train((trains or not is_inside) and name != EVAL_FUSED)
            with (of_the_loop if is_inside else torch.enable_grad)():
                expected = loop.step(batch)
            with (surroundings if is_inside else torch.enable_grad)(), succeeds("a step", where=where):
                output = schedule.progress(loader)
            assert_bits(output, expected, f"{where}: output {step}")
        assert_same_state(job, loop, where)


class _NoStream:
    """Stands for a stream that nothing may be recorded on."""


@requirement(
    "PIPE-640",
    "record_stream of what lies on the host MUST do nothing, whatever parts there are: of batches, of bags of one "
    "feature, of columns, and of what a lookup takes. A batch that was never on the host MUST be moved uncounted.",
)
def test_nothing_recorded_on_the_host(pipeline: Any) -> None:
    stream, ids, meta = _NoStream(), torch.arange(3), torch.device("meta")
    for weights in (None, torch.ones(3)):
        for cut in ({"lengths": torch.tensor([1, 2])}, {"offsets": torch.tensor([0, 1, 3])}):
            batch = pipeline.KeyedJaggedTensor(["a"], ids, weights, **cut)
            bags = pipeline.JaggedTensor(ids, weights, **cut)
            columns = pipeline.KeyedTensor(["a"], [1], torch.zeros(2, 1))
            for part in (batch, bags, columns, batch.bags(), bags.bags()):
                with succeeds("record_stream", where=f"{type(part).__name__}, {list(cut)}"):
                    part.record_stream(stream)
            there = pipeline.KeyedJaggedTensor(
                ["a"], ids.to(meta), None, **{name: part.to(meta) for name, part in cut.items()}
            )
            with succeeds("a move", where=f"from meta, {list(cut)}"):
                moved = there.to(meta)
            assert_equal((moved.length_per_key_or_none(), moved.device().type), (None, "meta"), where=f"{list(cut)}")
