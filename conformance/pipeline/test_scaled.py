"""D. Cut tables under torch's GradScaler, which knows the dense optimizer alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from conformance.harness import assert_equal, requirement
from conformance.pipeline.batches import random_jagged, values_of
from conformance.pipeline.model import assert_bits
from conformance.pipeline.sharding import collection_of, sharded_of
from twinproof.optimizers import FUSED_OPTIMIZERS

ROWS, WIDTH, NAMES, STEPS, OVERFLOW = 8, 4, ("a", "b"), 5, 3
SCHEDULES = ("Base", "SparseDist", "FusedSparseDist", "SemiSync")


class _Model(torch.nn.Module):
    """Two cut tables and a dense layer.

    Args:
        losses: what is made of the loss.
        hook: of the gradient of the pooled rows.
    """

    def __init__(self, pipeline: Any, optimizer: str, losses: Callable[[Any], Any], hook: Any = None) -> None:
        super().__init__()
        configs = [pipeline.EmbeddingBagConfig(ROWS, WIDTH, name, feature_names=[name]) for name in NAMES]
        collection = collection_of(pipeline, configs, [values_of((ROWS, WIDTH), seed) for seed in (1, 2)])
        plan = {"a": pipeline.row_wise(), "b": pipeline.table_wise(0)}
        self.tables = sharded_of(pipeline, collection, plan, optimizer, device="cpu")
        self.top, self.losses, self.count = torch.nn.Linear(2 * WIDTH, 1), losses, 0
        if hook is not None:
            self.tables.register_forward_hook(lambda _, __, output: _hook(output.values(), hook))
        torch.nn.init.constant_(self.top.weight, 0.5)
        torch.nn.init.constant_(self.top.bias, 0.25)

    def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        loss = self.top(self.tables(batch).values()).square().mean()
        return loss, loss.detach()

    def scaled(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The forward that a pipeline is told to call: a scaler is nothing that torch.fx can trace."""
        self.count += 1
        loss, output = self(batch)
        return self.losses(loss), output

    def held(self) -> dict[str, torch.Tensor]:
        """Every weight and state of the cut tables, by name."""
        found = dict[str, torch.Tensor]()
        for name, (_, weight, states) in self.tables.local_shards().items():
            found |= {f"{name}": weight, **{f"{name}.{state}": value for state, value in states.items()}}
        return found


def _hook(pooled: torch.Tensor, hook: Callable[[torch.Tensor], torch.Tensor]) -> None:
    pooled.register_hook(hook)  # type: ignore[no-untyped-call]


class _Scaled:
    """The dense optimizer as a scaler steps it."""

    def __init__(self, scaler: Any, optimizer: Any) -> None:
        self.scaler, self.optimizer, self.param_groups = scaler, optimizer, optimizer.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def step(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()


def _scaler() -> Any:
    return torch.amp.GradScaler("cpu", init_scale=4.0)


def _run(pipeline: Any, schedule: str, model: _Model, scaler: Any = None) -> list[dict[str, torch.Tensor]]:
    """The tables behind each step, and the dense layer's weight."""
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.5)
    stepped = optimizer if scaler is None else _Scaled(scaler, optimizer)
    made = getattr(pipeline, f"TrainPipeline{schedule}")(
        model, stepped, torch.device("cpu"), custom_model_fwd=model.scaled
    )
    batches = iter([random_jagged(list(NAMES), [ROWS, ROWS], 3, seed).kjt(pipeline) for seed in range(STEPS)])
    found = []
    for _ in range(STEPS):
        made.progress(batches)
        held = {**model.held(), "top": model.top.weight.detach()}
        found.append({name: value.clone() for name, value in held.items()})
    return found


@requirement(
    "PIPE-748",
    "Under a GradScaler cut tables MUST take the gradients that come to them, scaled and not finite ones too, in steps "
    "that the scaler cannot skip; where a hook of the pooled rows takes the scale out and puts zeros for what is not "
    "finite, each step of each schedule MUST be the one without a scaler, bit for bit.",
)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("optimizer", FUSED_OPTIMIZERS)
def test_grad_scaler(pipeline: Any, schedule: str, optimizer: str) -> None:
    def spoilt(losses: Any, model: _Model, factor: float) -> Any:
        return losses * (factor if model.count == OVERFLOW else 1.0)

    plain = _Model(pipeline, optimizer, lambda loss: spoilt(loss, plain, 0.0))
    expected = _run(pipeline, schedule, plain)

    scaler = _scaler()
    hooked = _Model(
        pipeline,
        optimizer,
        lambda loss: scaler.scale(spoilt(loss, hooked, float("inf"))),
        lambda grad: (grad / scaler.get_scale()).nan_to_num(0, 0, 0),
    )
    found = _run(pipeline, schedule, hooked, scaler)
    assert_equal(scaler.get_scale(), 2.0, where="the scale, behind an overflow")
    assert_equal(hooked.tables.fused_optimizer.step_count, STEPS, where="steps of the tables")
    for step, (got, want) in enumerate(zip(found, expected, strict=True)):
        for name, value in want.items():
            assert_bits(got[name], value, f"{schedule}, {optimizer}, step {step}: {name}")
    assert_bits(found[OVERFLOW - 1]["top"], found[OVERFLOW - 2]["top"], "a step that is skipped")

    # Without the hook gradients are four times as large, until they are not finite.
    again = _scaler()
    scaled = _Model(pipeline, optimizer, lambda loss: again.scale(spoilt(loss, scaled, float("inf"))))
    larger = _Model(pipeline, optimizer, lambda loss: loss, lambda grad: grad * 4.0)
    taken, told = _run(pipeline, schedule, scaled, again), _run(pipeline, schedule, larger)
    for step in range(OVERFLOW - 1):
        for name in told[step]:
            assert_bits(taken[step][name], told[step][name], f"{schedule}, {optimizer}, step {step}, scaled: {name}")
    finite = [bool(value.isfinite().all()) for name, value in taken[OVERFLOW - 1].items() if name in NAMES]
    assert_equal(finite, [False, False], where="tables that took what is not finite")
