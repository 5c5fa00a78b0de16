"""What is left of offloaders and optimizers that are dropped, and what holds what until then."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from conformance.harness import assert_equal, assert_same_tensor, raises, requirement, succeeds
from conformance.harness.surroundings import without_collection
from conformance.offload.cases import values
from twinproof.engine import InlineEngine
from twinproof.errors import ConfigError

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "masters": {"masters": True},
    "on request": {"release": "on_request"},
    "masters on request": {"release": "on_request", "masters": True},
    "cpu": {"step_device": "cpu"},
    "masters on the cpu": {"step_device": "cpu", "masters": True},
    "in chunks": {"chunk_bytes": 64},
    "in part": {"fraction": 0.5},
}


class _Job:
    """A model, an optimizer and an offloader of it."""

    def __init__(self, offload: Any, *, masters: bool = False, schedules: bool = False, **options: Any) -> None:
        dtype = torch.bfloat16 if masters else torch.float32
        self.params = [torch.nn.Parameter(values((4, 6), number).to(dtype)) for number in range(3)]
        self.masters = offload.MasterWeights(self.params) if masters else None
        stepped = self.masters.parameters() if self.masters is not None else self.params
        self.optimizer = torch.optim.AdamW(stepped, lr=0.1)
        engine = InlineEngine("cpu")
        self.offloader = offload.OptimizerStateOffloader(
            self.optimizer, master_weights=self.masters, engine=engine, **options
        )
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1) if schedules else None

    def step(self) -> None:
        """One step of the loop, with the verbs of one that releases on request."""
        for number, param in enumerate(self.params):
            param.grad = values((4, 6), 10 + number).to(param.dtype)
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        if self.offloader.options.release == "on_request":
            self.offloader.offload()
            self.offloader.release_gpu_memory()
            self.offloader.prefetch()

    def watched(self) -> dict[str, weakref.ref[Any]]:
        """Whatever must go, by name."""
        states = [state for states in self.optimizer.state.values() for state in states.values()]
        named: dict[str, Any] = {
            "offloader": self.offloader,
            "optimizer": self.optimizer,
            "transfers": self.offloader.transfers,
            **{f"parameter {number}": param for number, param in enumerate(self.params)},
            **{f"state {number}": state.untyped_storage() for number, state in enumerate(states)},
        }
        if self.masters is not None:
            named |= {"masters": self.masters}
            named |= {f"master {number}": master for number, master in enumerate(self.masters.parameters())}
        return {name: weakref.ref(thing) for name, thing in named.items()}


def _left(watched: dict[str, weakref.ref[Any]]) -> list[str]:
    return [name for name, thing in watched.items() if thing() is not None]


@requirement(
    "OPT-537",
    "An offloader, its optimizer, their states, masters and parameters MUST be gone when nobody has them any more, "
    "without a garbage collection: open or closed, whatever is moved where, with a scheduler too.",
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_dropped_offloaders(offload: Any, variant: str) -> None:
    # What is imported in the first step of a process keeps frames in cycles of its own.
    _Job(offload, **VARIANTS[variant]).step()
    with without_collection():
        for closes in (False, True):
            for schedules in (False, True):
                job = _Job(offload, schedules=schedules, **VARIANTS[variant])
                for _ in range(2):
                    job.step()
                watched = job.watched()
                if closes:
                    job.offloader.close()
                del job
                assert_equal(
                    _left(watched), [], where=f"{variant}, closed {closes}, scheduler {schedules}: what is left"
                )


@requirement(
    "OPT-538",
    "An offloader MUST have its optimizer as long as somebody has the offloader, and drive its steps as long as "
    "somebody has the optimizer.",
)
def test_who_holds_whom(offload: Any) -> None:
    alone, twin = _Job(offload), _Job(offload)
    offloader = alone.offloader
    del alone.optimizer, alone.offloader
    with succeeds("offloader.optimizer", where="nobody else has the optimizer"):
        alone.optimizer = offloader.optimizer
    alone.offloader = offloader
    del twin.offloader
    optimizer = twin.optimizer
    assert_equal("step" in vars(optimizer), True, where="step of an optimizer whose offloader nobody else has")
    for param in twin.params:
        param.grad = torch.ones_like(param)
    for param in alone.params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    alone.optimizer.step()
    assert_equal(offloader.stats().step_count, 1, where="steps that the offloader drove")
    held: Any = vars(optimizer)["_twinproof_offloader"]
    assert_equal(held.stats().step_count, 1, where="steps, nobody else has the offloader")
    for number, (got, expected) in enumerate(zip(alone.params, twin.params, strict=True)):
        assert_same_tensor(got.detach(), expected.detach(), where=f"parameter {number}")


@requirement("OPT-539", "A step that somebody kept of an optimizer that has gone MUST be refused by name.")
def test_steps_of_dropped_optimizers(offload: Any) -> None:
    job = _Job(offload)
    step = job.optimizer.step
    with succeeds("step", where="the optimizer is there"):
        step()
    del job
    with raises(ConfigError, mentions=("has gone", "where: step")):
        step()
