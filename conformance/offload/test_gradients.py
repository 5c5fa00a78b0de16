"""Gradients that an offloader cannot serve exactly are refused before anything is changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from conformance.harness import assert_equal, assert_same_tensor, raises, requirement
from conformance.offload.cases import proven, values
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
