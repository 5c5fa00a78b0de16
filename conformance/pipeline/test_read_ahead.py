"""What modules read that run ahead of the model: an edit of it between two steps is seen by the next batch."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from types import MethodType
from typing import Any

import pytest
import torch

from conformance.harness import Rank, assert_equal, raises, requirement, succeeds
from conformance.pipeline.batches import place_of
from conformance.pipeline.cases import EVAL_FUSED, EVALUATION, FUSED, TRAINING
from conformance.pipeline.jobs import Batch, Between, Job, Shifted, assert_same_state
from conformance.pipeline.model import assert_bits
from conformance.pipeline.sharding import collection_of
from twinproof.errors import PipelineError


class Part(torch.nn.Module):
    """A number in a buffer."""

    number: torch.Tensor

    def __init__(self, number: int, device: Any) -> None:
        super().__init__()
        self.register_buffer("number", torch.tensor([number], device=device))


class Divided(Shifted):
    """Ids that are divided by the product of whatever a module may read: 1, where nobody has edited it."""

    number: torch.Tensor

    def __init__(self, pipeline: Any, device: Any) -> None:
        super().__init__(pipeline)
        self.register_buffer("number", torch.ones(1, dtype=torch.int64, device=device))
        self.frozen = torch.nn.Parameter(torch.ones(1, device=device), requires_grad=False)
        self.plain, self.told = 1, 1
        self.loose, self.part = torch.ones(1, dtype=torch.int64, device=device), Part(1, device)

    def forward(self, ids: Any) -> Any:
        """Every id of a table's first rows."""
        self.calls += 1
        by = self.number * self.loose * self.part.number * self.frozen.to(torch.int64) * self.plain
        by = by * (2 if type(self.told) is bool else 1)
        return self.kind(ids.keys(), ids.values() // by, ids.weights_or_none(), lengths=ids.lengths())


def _filled(tensor: torch.Tensor, number: int) -> None:
    with torch.no_grad():
        tensor.fill_(number)


def _loaded(module: Divided, number: int) -> None:
    state = module.state_dict()
    module.load_state_dict({**state, "number": torch.full_like(state["number"], number)})


# How a module's number becomes another one.
EDITS: dict[str, Callable[[Divided, int], Any]] = {
    "a buffer is written": lambda module, number: _filled(module.number, number),
    "a buffer is assigned": lambda module, number: setattr(module, "number", torch.full_like(module.number, number)),
    "a state dict is loaded": _loaded,
    "a frozen parameter is written": lambda module, number: _filled(module.frozen, number),
    "an attribute is assigned": lambda module, number: setattr(module, "plain", number),
    "a number becomes a flag that equals it": lambda module, number: setattr(module, "told", (1, True)[number % 2]),
    "a tensor without a name is written": lambda module, number: _filled(module.loose, number),
    "a part is replaced": lambda module, number: setattr(module, "part", Part(number, module.number.device)),
}


def _options(name: str) -> dict[str, Any]:
    if name == "TrainPipelineBase":
        return {}
    own: dict[str, Any] = {
        FUSED: {"embedding_lookup_before_optimizer": True},
        "TrainPipelineSemiSync": {"start_batch": 10**6},
        EVAL_FUSED: {"enable_embedding_lookup_prefetch": True},
    }
    return {"pipeline_postproc": True, **own.get(name, {})}


def _assert_edits(
    pipeline: Any, name: str, edit: Callable[[Divided, int], Any], rank: Rank | None = None, *, own: bool = True
) -> None:
    """A schedule is the loop where each step but the first two is behind an edit, on this rank where it is its own."""
    job, loop = (Job(pipeline, 4, rank, kinds=("table_wise", "row_wise")) for _ in range(2))
    for each in (job, loop):
        module = Divided(pipeline, each.device)
        each.model = Between(each.model, module).train(name not in EVALUATION)  # type: ignore[assignment]
    schedule, loader = job.schedule(name, **_options(name)), iter(job.batches(6))
    for step, batch in enumerate(loop.batches(6)):
        for each in (job, loop) if own and step > 1 else ():
            edit(each.model.shifted, 2 + step % 2)  # type: ignore[arg-type]
        with succeeds("a step", where=f"{name} step {step}"):
            output = schedule.progress(loader)
        assert_bits(output, loop.step(batch), f"{name} step {step}")
        assert_same_state(job, loop, f"{name} step {step}")


@requirement(
    "PIPE-749",
    "What a module reads that runs ahead MUST be as it is at the batch's own step: buffers, frozen parameters, other "
    "tensors and plain values of its attributes, and its parts, written, assigned, replaced or loaded before it.",
)
@pytest.mark.parametrize("edited", EDITS)
@pytest.mark.parametrize("name", [*TRAINING, *EVALUATION])
def test_edits_of_modules_ahead(pipeline: Any, name: str, edited: str) -> None:
    _assert_edits(pipeline, name, EDITS[edited])


def _edited_on_one_rank(rank: Rank) -> None:
    pipeline = rank.component("pipeline")
    for name in (FUSED, "TrainPipelineSparseDist"):
        for edited in ("a buffer is written", "an attribute is assigned"):
            _assert_edits(pipeline, name, EDITS[edited], rank, own=rank.rank == 1)


@requirement("PIPE-750", "So MUST it be where one rank of several alone edits it, on which the others send anew, too.")
def test_edits_on_one_rank(pipeline: Any, rank_pool: Any) -> None:
    rank_pool.run(_edited_on_one_rank, 2)


class Counting(Shifted):
    """A module that counts its calls in a buffer, too."""

    number: torch.Tensor

    def __init__(self, pipeline: Any, device: Any) -> None:
        super().__init__(pipeline)
        self.register_buffer("number", torch.zeros(1, dtype=torch.int64, device=device))

    def forward(self, ids: Any) -> Any:
        """As its class."""
        self.number += 1
        return super().forward(ids)


@requirement(
    "PIPE-751",
    "A module that runs ahead and changes by its own calls, as one that counts them, MUST be called once a batch.",
)
@pytest.mark.parametrize("name", [*TRAINING, *EVALUATION])
def test_counts_of_modules_ahead(pipeline: Any, name: str) -> None:
    job = Job(pipeline, 4, kinds=("table_wise", "row_wise"))
    module = Counting(pipeline, job.device)
    job.model = Between(job.model, module).train(name not in EVALUATION)  # type: ignore[assignment]
    schedule, loader = job.schedule(name, **_options(name)), iter(job.batches(6))
    for step in range(6):
        with succeeds("a step", where=f"{name} step {step}"):
            schedule.progress(loader)
    assert_equal((module.calls, int(module.number)), (6, 6), where=f"{name}: calls")


class Summed(torch.nn.Module):
    """Looks up in one table that nothing trains; the output is the sum of its columns."""

    def __init__(self, pipeline: Any) -> None:
        super().__init__()
        config = pipeline.EmbeddingBagConfig(9, 4, "t", feature_names=["f"])
        whole = collection_of(pipeline, [config], [torch.zeros(9, 4)])
        self.sharded = pipeline.ShardedEmbeddingBagCollection(whole, {"t": pipeline.data_parallel()})

    def forward(self, ids: Any) -> Any:
        """No losses, and the sum [B]."""
        return None, self.sharded(ids).values().sum(1)


def _replace_weight(holder: Any, number: float, most: int = 200) -> None:
    """Another weight in the place of one that goes first, with its id and version where one of many has them."""
    made = [torch.full_like(holder.weight, number) for _ in range(most)]
    gone = id(holder.weight), holder.weight._version
    del holder.weight
    params = [torch.nn.Parameter(values, requires_grad=False) for values in made]
    alike = [param for param in params if (id(param), param._version) == gone]
    holder.weight = (alike or params)[0]


@requirement(
    "PIPE-752",
    "Where a table is replaced by another tensor between steps, a lookup that was hoisted MUST be done again, also "
    "where the one that is new has the address, and was written as often, as the one that has gone.",
)
def test_tables_that_go(pipeline: Any) -> None:
    model, device = Summed(pipeline).eval(), place_of(pipeline)
    model.to(device)
    schedule = pipeline.EvalPipelineFusedSparseDist(model, None, device, enable_embedding_lookup_prefetch=True)
    ids = pipeline.KeyedJaggedTensor(["f"], torch.tensor([1, 2]), lengths=torch.tensor([1, 1]))
    loader, number = iter([ids] * 12), 0.0
    holder: Any = model.sharded.embedding_bags["t"]
    for step in range(8):
        with succeeds("a step", where=f"step {step}"):
            output = schedule.progress(loader)
        assert_equal(output.tolist(), [4 * number] * 2, where=f"step {step}")
        number += 1.0
        _replace_weight(holder, number)


class Rule:
    """What a forward may go by."""

    def __init__(self, by: int) -> None:
        self.by = by


class Ruled(torch.nn.Module):
    """The job's model, whose first ids are divided by what it reads of itself: 1, where nobody has edited it.

    ``note`` is called with each batch.
    """

    by = 1

    def __init__(self, model: Any, pipeline: Any, note: Callable[[Any], None]) -> None:
        super().__init__()
        self.model, self.shifted, self.kind = model, Divided(pipeline, model.bottom.weight.device), [pipeline]
        self.plain, self.rule, self.steps, self.unread, self.scale = 1, Rule(1), 0, 0, 1.0
        self.note = note

    def forward(self, batch: Batch) -> Any:
        """As the model."""
        self.note(batch)
        self.steps += 1
        model, ids, by = self.model, batch.ids[0], self.plain * self.rule.by * self.by
        divided = self.kind[0].KeyedJaggedTensor(ids.keys(), ids.values() // by, lengths=ids.lengths())
        pooled = [model.collections[0](divided).values(), model.collections[1](self.shifted(batch.ids[1])).values()]
        scores = model.top(torch.cat([torch.tanh(model.bottom(batch.dense)), *pooled], dim=1))[:, 0] * self.scale
        return (scores - batch.target).square().mean().reshape(1), scores.detach()


def _shifted_by(model: Any, number: int) -> None:
    model.shifted = Divided(model.kind[0], model.model.bottom.weight.device)
    model.shifted.plain = number


# How a model's number becomes another one.
RULES: dict[str, Callable[[Any, int], Any]] = {
    "a number": lambda model, number: setattr(model, "plain", number),
    "an object": lambda model, number: setattr(model, "rule", Rule(number)),
    "what the class has": lambda model, number: setattr(model, "by", number),
    "a part": _shifted_by,
}


def _ruled(pipeline: Any, rank: Rank | None = None) -> tuple[Job, Job, list[int]]:
    """A job, its loop, and what notes the traces of the first."""
    job, loop = (Job(pipeline, 4, rank, kinds=("table_wise", "row_wise")) for _ in range(2))
    traced = list[int]()

    def note(batch: Any) -> None:
        if isinstance(batch, torch.fx.Proxy):
            traced.append(1)

    for each in (job, loop):
        ruled: Any = Ruled(each.model, pipeline, note)
        each.model = ruled
    return job, loop, traced


def _assert_rules(pipeline: Any, name: str, edit: Callable[[Any, int], Any], rank: Rank | None, *, own: bool) -> None:
    """A schedule is the loop where each step but the first two is behind an edit, on this rank where it is its own."""
    job, loop, _ = _ruled(pipeline, rank)
    schedule, loader = job.schedule(name, **_options(name)), iter(job.batches(6))
    for step, batch in enumerate(loop.batches(6)):
        for each in (job, loop) if own and step > 1 else ():
            edit(each.model, 1 + step % 3)
        with succeeds("a step", where=f"{name} step {step}"):
            output = schedule.progress(loader)
        assert_bits(output, loop.step(batch), f"{name} step {step}")
        assert_same_state(job, loop, f"{name} step {step}")


@requirement(
    "PIPE-705",
    "What a forward reads of its modules on the way to a sharded one MUST be as it is at the batch's own step: numbers "
    "and objects that attributes name, and parts, assigned before it.",
)
@pytest.mark.parametrize("edited", RULES)
@pytest.mark.parametrize("name", TRAINING)
def test_edits_of_forwards(pipeline: Any, name: str, edited: str) -> None:
    _assert_rules(pipeline, name, RULES[edited], None, own=True)


@requirement(
    "PIPE-767",
    "What a forward reads on the way to a sharded module and what was assigned in one mode MUST be seen by the next "
    "batches of every mode, whenever modes are switched and whichever of them were traced before.",
)
@pytest.mark.parametrize("modes", ["TTETTE", "TETETE", "ETTEET"])
@pytest.mark.parametrize("name", [FUSED, "TrainPipelineSparseDist"])
def test_edits_between_modes(pipeline: Any, name: str, modes: str) -> None:
    for edited, at in product(("a number", "a part"), range(1, len(modes))):
        job, loop, _ = _ruled(pipeline)
        schedule, loader = job.schedule(name), iter(job.batches(len(modes)))
        for step, (mode, batch) in enumerate(zip(modes, loop.batches(len(modes)), strict=True)):
            for each in (job, loop):
                each.model.train(mode == "T")
                if step == at:
                    RULES[edited](each.model, 2)
            where = f"{edited} at step {at}, step {step} of {modes}"
            with succeeds("a step", where=where):
                output = schedule.progress(loader)
            assert_bits(output, loop.step(batch), where)
        assert_same_state(job, loop, f"{edited} at step {at} of {modes}")


def _ruled_on_one_rank(rank: Rank) -> None:
    pipeline = rank.component("pipeline")
    for name in (FUSED, "TrainPipelineSparseDist"):
        _assert_rules(pipeline, name, RULES["a number"], rank, own=rank.rank == 1)


@requirement(
    "PIPE-706",
    "A number that a forward reads on the way to a sharded module, and that one rank alone assigns, MUST be seen by "
    "that rank's next batch, and no rank wait for another.",
)
def test_edits_of_forwards_on_one_rank(rank_pool: Any) -> None:
    rank_pool.run(_ruled_on_one_rank, 2)


@requirement(
    "PIPE-707",
    "A forward MUST be traced again where what it reads on the way to sharded modules was assigned, once, and not for "
    "what it reads behind them, never reads, or assigns by itself.",
)
def test_traces_of_edits(pipeline: Any) -> None:
    edits: dict[str, tuple[Callable[[Any, int], Any], int]] = {
        "nothing": (lambda model, number: None, 0),
        "what is read behind": (lambda model, number: setattr(model, "scale", float(number)), 0),
        "what nobody reads": (lambda model, number: setattr(model, "unread", number), 0),
        "the same number": (lambda model, number: setattr(model, "plain", 2 - 1), 0),
        "a number": (RULES["a number"], 4),
        "a number, and back": (lambda model, number: setattr(model, "plain", 5 if number == 4 else 1), 2),
    }
    for what, (edit, count) in edits.items():
        job, _, traced = _ruled(pipeline)
        schedule, loader, model = job.schedule(FUSED), iter(job.batches(6)), job.model
        schedule.progress(loader)
        traced.clear()
        for number in range(2, 6):
            edit(model, number)
            schedule.progress(loader)
        assert_equal(len(traced), count, where=f"{what}: traces")


@requirement(
    "PIPE-708",
    "A forward that is put on the model itself MUST be refused where it calls a sharded module with something else "
    "than what was made ahead, before anything is updated; one that calls it with the same goes on.",
)
@pytest.mark.parametrize("name", TRAINING)
def test_forwards_put_on_the_model(pipeline: Any, name: str) -> None:
    job, loop, _ = _ruled(pipeline)
    schedule, loader, batches = job.schedule(name), iter(job.batches(4)), loop.batches(4)
    assert_bits(schedule.progress(loader), loop.step(batches[0]), f"{name}, its class's own")
    own: Any = Ruled.forward
    job.model.forward = MethodType(own, job.model)  # type: ignore[method-assign]
    with succeeds("a step", where=f"{name}, the same"):
        output = schedule.progress(loader)
    assert_bits(output, loop.step(batches[1]), f"{name}, the same")

    def changed(model: Any, batch: Batch) -> Any:
        ids = batch.ids[0]
        halves = pipeline.KeyedJaggedTensor(ids.keys(), ids.values() // 2, lengths=ids.lengths())
        return own(model, Batch(batch.dense, [halves, batch.ids[1]], batch.target))

    job.model.forward = MethodType(changed, job.model)  # type: ignore[method-assign]
    with raises(PipelineError, mentions=("model.collections.0",), where=f"{name}, another"):
        schedule.progress(loader)
    assert_same_state(job, loop, f"{name}, another")
