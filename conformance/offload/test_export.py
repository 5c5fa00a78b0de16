"""Host memory as a checkpoint writes it, and parameters on more than one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from conformance.harness import assert_equal, assert_same_tensor, raises, requirement
from conformance.offload.cases import Twins, proven_on
from twinproof.errors import ConfigError


@requirement(
    "OPT-052",
    "The live state in host memory MUST be written to safetensors as it lies there, and come back bit for bit.",
)
def test_export(offload: Any, device: str, checkpoint: Any, tmp_path: Path) -> None:
    with proven_on(device, late=True) as place:
        twins = Twins(offload, place)
        for _ in range(2):
            twins.step()
        twins.offloader.settle()
        live = twins.optimizer.state_dict()["state"]
        with _disable_current_modes():
            tensors = {f"{number}.{name}": value for number, state in live.items() for name, value in state.items()}
            checkpoint.save_file(tensors, tmp_path / "state.safetensors")
            got = checkpoint.load_file(tmp_path / "state.safetensors")
            plain = twins.plain.state_dict()["state"]
            expected = {f"{number}.{name}": value for number, state in plain.items() for name, value in state.items()}
            assert_equal(sorted(got), sorted(expected), where="names")
            for name, value in expected.items():
                assert_same_tensor(got[name], value, where=name)
        twins.step()
        twins.check()
        twins.offloader.close()


@requirement("OPT-089", "Parameters on several devices MUST be refused at attachment, with the devices named.")
def test_devices(offload: Any) -> None:
    params = [torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(3, device="meta"))]
    optimizer = torch.optim.SGD(params, lr=0.1)
    with raises(ConfigError, mentions=("cpu", "meta")):
        offload.OptimizerStateOffloader(optimizer)
    assert_equal("step" in vars(optimizer), False, where="step taken over")
