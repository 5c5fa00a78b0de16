"""Places: tensors of a device are saved and loaded as those of the host are, each byte copied once.

The device is the pretend one: an operator with operands in two places raises there, as on a GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from conformance.checkpoint.cases import DTYPES, load, random_bits, save
from conformance.harness import assert_equal, assert_same_bytes, assert_same_tensor, requirement
from conformance.harness.places import on_pretend
from conformance.provers.pretend_device import on_host


def _state() -> dict[str, torch.Tensor]:
    state = {str(dtype): random_bits(dtype, (23, 17), seed) for seed, dtype in enumerate(DTYPES[:-1])}
    return state | {"big": random_bits(torch.float32, (300, 70), 7)}


def _payload(state: dict[str, torch.Tensor]) -> int:
    return sum(value.nbytes for value in state.values())


@requirement(
    "CKPT-480",
    "Tensors of a device, strided ones too, MUST be saved to the host's files byte for byte, each byte copied to the "
    "host once.",
)
def test_save(checkpoint: Any, tmp_path: Path) -> None:
    state = _state() | {"strided": torch.arange(600.0).reshape(20, 30).t()}
    save(checkpoint, state, tmp_path / "host")
    with on_pretend() as device:
        # Strides survive the way to the device only where the memory behind them is sent.
        there = {name: value.to(device.device) for name, value in state.items() if name != "strided"}
        there["strided"] = state["strided"].t().to(device.device).t()
        begin = device.mark
        save(checkpoint, there, tmp_path / "device")
        counts = device.counts(begin)
    names = sorted(path.name for path in (tmp_path / "host").iterdir())
    assert_equal(sorted(path.name for path in (tmp_path / "device").iterdir()), names, where="files")
    for name in names:
        assert_same_bytes(tmp_path / "device" / name, tmp_path / "host" / name, where=name)
    assert_equal(counts.to_host.size_bytes, _payload(state), where="bytes to the host")
    assert_equal(counts.to_device.size_bytes, 0, where="bytes to the device")


@requirement(
    "CKPT-481", "A load into tensors of a device MUST give the host's bits, and copy each byte to the device once."
)
def test_load(checkpoint: Any, tmp_path: Path) -> None:
    state = _state()
    save(checkpoint, state, tmp_path / "host")
    with on_pretend() as device:
        targets = {name: torch.zeros_like(value, device=device.device) for name, value in state.items()}
        begin = device.mark
        load(checkpoint, targets, tmp_path / "host")
        counts = device.counts(begin)
    for name, value in state.items():
        assert_same_tensor(on_host(targets[name]), value, where=name)
    assert_equal(counts.to_device.size_bytes, _payload(state), where="bytes to the device")
    assert_equal(counts.to_host.size_bytes, 0, where="bytes to the host")
