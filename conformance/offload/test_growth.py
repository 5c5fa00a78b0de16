"""What a step and an attachment cost grows with the parameters, and not with their square."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from conformance.harness import assert_equal, assert_le, requirement
from conformance.offload.cases import values
from twinproof.engine import InlineEngine
from twinproof.offload import states


class _Walked(list[Any]):
    """Parameters of a group that count who goes through all of them."""

    walks = 0

    def __iter__(self) -> Any:
        self.walks += 1
        return super().__iter__()


def _params(count: int, dtype: torch.dtype = torch.float32, width: int = 8) -> list[torch.nn.Parameter]:
    """Views of one tensor."""
    return [torch.nn.Parameter(part) for part in torch.split(values((count * width,), 1, dtype), width)]


def _step(params: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    for number, param in enumerate(params):
        param.grad = values(param.shape, number, param.dtype)
    optimizer.step()


@requirement(
    "OPT-560",
    "A step MUST NOT go through the lists of parameters once more for each chunk, wherever it is made.",
)
def test_walks_through_groups(offload: Any) -> None:
    for step_device in ("cpu", "device"):
        walks = []
        for chunk_bytes in (0, 64):
            params = _params(24)
            optimizer = torch.optim.AdamW(params)
            options = {"step_device": step_device, "engine": InlineEngine(), "chunk_bytes": chunk_bytes}
            offloader = offload.OptimizerStateOffloader(optimizer, **options)
            _step(params, optimizer)
            listed = _Walked(params)
            optimizer.param_groups[0]["params"] = listed
            _step(params, optimizer)
            walks.append(listed.walks)
            offloader.close()
        assert_equal(walks[1], walks[0], where=f"step_device={step_device!r}: walks with chunks of a parameter each")


@requirement(
    "OPT-561",
    "What a step looks at to know who wrote to parameters that are views of one tensor MUST grow with their number, "
    "and not with its square.",
)
def test_views_of_one_tensor(offload: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    reads, own = [0], states.version_of

    def counted(tensor: torch.Tensor) -> Any:
        reads[0] += 1
        return own(tensor)

    monkeypatch.setattr(states, "version_of", counted)
    for where in ("plain", "cpu", "device"):
        counts = []
        for count in (16, 32):
            params = _params(count, torch.bfloat16)
            masters = offload.MasterWeights(params)
            optimizer = torch.optim.AdamW(masters.parameters())
            if where == "plain":
                masters.attach(optimizer)
            else:
                options = {"step_device": where, "engine": InlineEngine(), "chunk_bytes": 64}
                offload.OptimizerStateOffloader(optimizer, master_weights=masters, **options)
            _step(params, optimizer)
            reads[0] = 0
            _step(params, optimizer)
            masters.refresh()
            counts.append(reads[0])
        assert_le(counts[1], 2 * counts[0], where=f"{where}: versions that are read for twice as many parameters")


@requirement(
    "OPT-562",
    "To attach an offloader MUST NOT make an optimizer for each parameter: one for each form of parameters in a group "
    "is enough to foresee their states.",
)
def test_parameters_of_one_form(offload: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made, own = [0], torch.optim.Optimizer.__init__

    def counted(*given: Any) -> None:
        made[0] += 1
        own(*given)

    monkeypatch.setattr(torch.optim.Optimizer, "__init__", counted)
    counts = []
    for count in (2, 8):
        groups: list[dict[str, Any]] = [
            {"params": [*_params(count), *_params(count, width=4)]},
            {"params": _params(count), "amsgrad": True},
        ]
        optimizer = torch.optim.AdamW(groups)
        made[0] = 0
        offloader = offload.OptimizerStateOffloader(optimizer, engine=InlineEngine())
        counts.append(made[0])
        for group in optimizer.param_groups:
            _step(group["params"], optimizer)
        names = [sorted(state) for state in optimizer.state.values()]
        plain = ["exp_avg", "exp_avg_sq", "step"]
        assert_equal(names, [plain] * 2 * count + [[*plain[:2], "max_exp_avg_sq", "step"]] * count, where="states")
        offloader.close()
    assert_equal(counts[1], counts[0], where="optimizers made for four times as many parameters")
