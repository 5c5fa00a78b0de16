"""What modules read that run ahead of the model: an edit of it between two steps is seen by the next batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from conformance.harness import Rank, assert_equal, requirement, succeeds
from conformance.pipeline.batches import place_of
from conformance.pipeline.cases import EVAL_FUSED, EVALUATION, FUSED, TRAINING
from conformance.pipeline.jobs import Between, Job, Shifted, assert_same_state
from conformance.pipeline.model import assert_bits
from conformance.pipeline.sharding import collection_of


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
        self.plain, self.loose, self.part = 1, torch.ones(1, dtype=torch.int64, device=device), Part(1, device)

    def forward(self, ids: Any) -> Any:
        """Every id of a table's first rows."""
        self.calls += 1
        by = self.number * self.loose * self.part.number * self.frozen.to(torch.int64) * self.plain
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
