"""pytest-benchmark's view of the checkpoint: saves and loads of one process, checked after timing.

The table and the gates are ``twinproof bench checkpoint``; this file gives adopters the familiar columns and storage.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from fastimpl import checkpoint


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    """16 MiB in 8 tensors."""
    return {f"layers.{i}.weight": torch.full((1024, 512), float(i)) for i in range(8)}


def _save(state: dict[str, torch.Tensor], path: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        save(dict(state), storage_writer=checkpoint.HuggingFaceStorageWriter(path), no_dist=True)


def _check(got: dict[str, torch.Tensor], state: dict[str, torch.Tensor]) -> None:
    assert got.keys() == state.keys()
    assert all(torch.equal(got[name], state[name]) for name in state)


def test_save(benchmark: Any, state: dict[str, torch.Tensor], tmp_path: Path) -> None:
    """One process, one file, replaced each time."""
    benchmark(_save, state, tmp_path / "ck")
    _check(safetensors.torch.load_file(tmp_path / "ck" / "model-00001-of-00001.safetensors"), state)


@pytest.mark.parametrize(
    "reader", [checkpoint.HuggingFaceStorageReader, HuggingFaceStorageReader], ids=["ours", "torch"]
)
def test_load(benchmark: Any, reader: Any, state: dict[str, torch.Tensor], tmp_path: Path) -> None:
    """Into preallocated tensors."""
    _save(state, tmp_path / "ck")
    targets = {name: torch.ones_like(value) for name, value in state.items()}

    def run() -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            load(dict(targets), storage_reader=reader(str(tmp_path / "ck")), no_dist=True)

    benchmark(run)
    _check(targets, state)
