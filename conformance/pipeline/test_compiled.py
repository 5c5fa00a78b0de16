"""F. Lookups in a compiled model: the bits of the eager one, and nothing of a lookup in a graph."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from conformance.harness import assert_equal, assert_same_tensor, requirement, succeeds
from conformance.pipeline.batches import random_jagged, values_of


class _Model(torch.nn.Module):
    """A collection with dense gradients, a lookup with its optimizer in the backward, and a dense part over both."""

    def __init__(self, pipeline: Any) -> None:
        super().__init__()
        configs = [
            pipeline.EmbeddingBagConfig(9, 4, "t0", feature_names=["f0"]),
            pipeline.EmbeddingBagConfig(9, 6, "t1", feature_names=["f1"], pooling=pipeline.PoolingType.MEAN),
        ]
        weights = [values_of((9, 4), 1), values_of((9, 6), 2)]
        self.collection = pipeline.EmbeddingBagCollection(configs, is_weighted=True)
        state = {f"embedding_bags.t{i}.weight": weight for i, weight in enumerate(weights)}
        self.collection.load_state_dict(state)
        fused = pipeline.FusedOptimizer("adam", lr=0.1)
        self.lookups = pipeline.TableBatchedEmbeddingBags(configs, optimizer=fused, weights=weights)
        self.dense = torch.nn.Linear(20, 3)

    def forward(self, kjt: Any, flat: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
        pooled = torch.cat([self.collection(kjt).values(), self.lookups(*flat)], dim=1)
        return torch.relu(self.dense(pooled)).sum()


@pytest.mark.night
@requirement(
    "PIPE-116",
    "A compiled model MUST have the eager model's bits after every step, gradients of weights included, and one graph, "
    "that of its dense part, whatever the lengths, the learning rate and the step.",
)
@pytest.mark.filterwarnings("ignore")  # The compiler reads, and instantiates, what warns of that.
def test_compiled(pipeline: Any) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    eager = _Model(pipeline)
    traced, counter = copy.deepcopy(eager), CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(traced, backend=counter)
    for step in range(3):
        batch, found = random_jagged(["f0", "f1"], [9, 9], 3, step, weighted=True), []
        for model, call in ((eager, eager), (traced, compiled)):
            kjt, flat = batch.kjt(pipeline), batch.flat()
            result = call(kjt, (*flat[:2], kjt.weights().requires_grad_()))
            result.backward()
            grads = {name: param.grad for name, param in model.named_parameters()}
            found.append({"loss": result, "weights": kjt.weights().grad, **grads, **dict(model.named_buffers())})
            model.lookups.fused_optimizer.param_groups[0]["lr"] *= 0.5
            model.zero_grad()
        assert_equal(counter.frame_count, 1, where=f"graphs after step {step}")
        assert_equal(sorted(found[1]), sorted(found[0]), where="names")
        for name, expected in found[0].items():
            assert_same_tensor(found[1][name], expected, where=f"step {step} {name}")
    assert_equal(traced.lookups.fused_optimizer.step_count, 3, where="steps")


class _Driven(torch.nn.Module):
    """A cut table, and a dense part over it."""

    def __init__(self, pipeline: Any) -> None:
        super().__init__()
        tables = pipeline.EmbeddingBagCollection([pipeline.EmbeddingBagConfig(9, 4, "t0", feature_names=["f0"])])
        tables.load_state_dict({"embedding_bags.t0.weight": values_of((9, 4), 1)})
        self.tables = pipeline.ShardedEmbeddingBagCollection(tables, {"t0": pipeline.row_wise()})
        self.dense = torch.nn.Linear(4, 1)
        self.dense.load_state_dict({"weight": values_of((1, 4), 2), "bias": torch.zeros(1)})

    def forward(self, kjt: Any) -> tuple[torch.Tensor, torch.Tensor]:
        found = self.dense(self.tables(kjt).values())
        return found.square().mean(), found.detach()

    def bits(self) -> list[torch.Tensor]:
        return [each.detach().clone() for each in (*self.tables.local_weights(), *self.parameters())]


@pytest.mark.night
@requirement(
    "PIPE-668",
    "A model that torch.compile has wrapped MUST be driven by a pipeline as the model inside is, by the names that its "
    "sharded modules have there, and have the bits of a loop.",
)
@pytest.mark.filterwarnings("ignore")  # The compiler reads, and instantiates, what warns of that.
def test_driven_compiled(pipeline: Any) -> None:
    batches = [random_jagged(["f0"], [9], 3, step).kjt(pipeline) for step in range(4)]
    for kind in (pipeline.TrainPipelineSparseDist, pipeline.TrainPipelineFusedSparseDist):
        found, driven = [], list[str]()
        # Calls run the model as it is: what a compiler makes of it is asked above.
        with torch.compiler.set_stance("force_eager"):
            for is_compiled in (False, True):
                model = _Driven(pipeline)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                loader, given = iter(batches), torch.compile(model) if is_compiled else model
                with succeeds("a pipeline", where=f"{kind.__name__}, compiled: {is_compiled}"):
                    made = kind(given, optimizer, "cpu")
                    outputs = [made.progress(loader) for _ in batches]
                    driven = [call.name for call in made.calls]
                assert_equal(driven, ["tables"], where=f"{kind.__name__}: what is driven")
                found.append([*outputs, *model.bits()])
        for got, expected in zip(*found, strict=True):
            assert_same_tensor(got, expected, where=kind.__name__)
