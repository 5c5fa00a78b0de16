"""Gradients that an offloader cannot serve exactly are refused before anything is changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from conformance.harness import assert_equal, assert_same_tensor, raises, requirement, succeeds
from conformance.offload.cases import assert_same_state, proven, values
from conformance.offload.corners import by_formula
from twinproof.errors import UnsupportedError


@requirement(
    "OPT-025", "A step with a sparse gradient MUST be refused by name, with parameters, states and counts as they were."
)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")  # Torch 2.11, of its own accord.
@pytest.mark.parametrize("kind", ["SGD", "Adagrad", "Adam"])
@pytest.mark.parametrize("with_masters", [False, True])
def test_sparse(offload: Any, kind: str, with_masters: bool) -> None:
    dtype = torch.bfloat16 if with_masters else torch.float32
    start = [values((6, 4), 0, dtype), values((5,), 1, dtype)]
    with proven() as device:
        params = [torch.nn.Parameter(value.clone()) for value in start]
        masters = offload.MasterWeights(params) if with_masters else None
        optimizer = getattr(torch.optim, kind)(masters.parameters() if masters else params, lr=0.1)
        offloader = offload.OptimizerStateOffloader(optimizer, engine=device.engine, master_weights=masters)
        # The dense one comes first; it must not have been stepped when the other is refused.
        params[1].grad = torch.ones(5, dtype=dtype)
        params[0].grad = torch.sparse_coo_tensor(
            torch.tensor([[1, 3]]), values((2, 4), 2, dtype), (6, 4), check_invariants=True
        )
        with raises(UnsupportedError, mentions=("sparse",)):
            optimizer.step()
        assert_equal(offloader.stats().step_count, 0, where="steps")
        with _disable_current_modes():
            for param, value in zip(params, start, strict=True):
                assert_same_tensor(param.detach(), value, where="parameter after a refused step")
        params[0].grad = None
        optimizer.step()
        with _disable_current_modes():
            assert_equal(torch.equal(params[1], start[1]), False, where="the dense parameter is the old one")
        offloader.close()


_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.bfloat16)


@requirement(
    "OPT-396",
    "Gradients of another dtype than their parameters, as grad_dtype allows them, MUST be stepped as the plain masters "
    "step them on either device, also where parameters of several dtypes have gradients of one.",
)
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("step_device", ["device", "cpu"])
def test_dtypes_apart(offload: Any, step_device: str, grad_dtype: torch.dtype) -> None:
    with proven() as device:
        # A float32 parameter is its own master, whose gradients torch does not cast.
        dtypes = [dtype for dtype in _DTYPES if step_device == "cpu" or dtype in (torch.bfloat16, torch.float16)]
        arms: list[tuple[list[torch.nn.Parameter], Any, torch.optim.Optimizer]] = []
        # The formula steps one parameter at a time: nothing can be mixed up.
        plain: Any = by_formula(torch.optim.AdamW) if step_device == "cpu" else torch.optim.AdamW
        for kind in (plain, torch.optim.AdamW):
            params = [torch.nn.Parameter(values((5, 3 + i), i, dtype)) for i, dtype in enumerate(dtypes)]
            for param in params:
                param.grad_dtype = grad_dtype
            masters = offload.MasterWeights(params)
            arms.append((params, masters, kind(masters.parameters(), lr=0.1, foreach=False)))
        arms[0][1].attach(arms[0][2])
        offloader = offload.OptimizerStateOffloader(
            arms[1][2], engine=device.engine, master_weights=arms[1][1], step_device=step_device, chunk_bytes=0
        )
        for number in range(2):
            for params, _, optimizer in arms:
                for i, param in enumerate(params):
                    param.grad = values(param.shape, 10 * number + i, grad_dtype)
                with succeeds("a step", where=f"on {step_device} with gradients of {grad_dtype}"):
                    optimizer.step()
            offloader.settle()
            with _disable_current_modes():
                for i, (theirs, mine) in enumerate(zip(arms[0][0], arms[1][0], strict=True)):
                    assert_same_tensor(mine.detach(), theirs.detach(), where=f"parameter {i} after step {number}")
        offloader.close()


@requirement(
    "OPT-446",
    "A differentiable step whose gradients have a graph, which would end where states move, MUST be refused by name, "
    "with parameters, states and counts as they were; without a graph it MUST be the plain optimizer's.",
)
@pytest.mark.parametrize("kind", ["SGD", "Adam"])
def test_differentiable(offload: Any, kind: str) -> None:
    options: dict[str, Any] = {"lr": 0.1, "differentiable": True, **({"momentum": 0.9} if kind == "SGD" else {})}
    with proven() as device:
        params, plain_params = [values((3, 4), 0)], [values((3, 4), 0)]
        optimizer, plain = (getattr(torch.optim, kind)(each, **options) for each in (params, plain_params))
        with offload.OptimizerStateOffloader(optimizer, engine=device.engine) as offloader:
            for number in range(2):
                for each in (params, plain_params):
                    each[0].grad = values((3, 4), number)
                plain.step()
                optimizer.step()
            with_graph = values((3, 4), 7).requires_grad_()
            params[0].grad = with_graph * 2
            with raises(UnsupportedError, mentions=("differentiable", "(3, 4)")):
                optimizer.step()
            assert_equal(offloader.stats().step_count, 2, where="steps")
            saved = offloader.snapshot()
            with _disable_current_modes():
                assert_same_tensor(params[0], plain_params[0], where="parameter")
                assert_same_state(saved, plain.state_dict())
