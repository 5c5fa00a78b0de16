"""Loads of block-quantized weights: the shape of the workload is that of the float32 tensors that come out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load

import refimpl.checkpoint
from conformance.harness import Mismatch, Rank
from perf.checkpoint.model import remove_folder
from perf.checkpoint.runs import Run, measure
from perf.harness.paired import Round
from perf.harness.workloads import Workload

__all__ = ["measure_fp8_loads", "measure_mxfp4_loads"]

_FP8_BLOCK = 128
_GROUP_BYTES = 16
_FILE = "model-00001-of-00001.safetensors"
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

Tensors = dict[str, torch.Tensor]


def measure_fp8_loads(rank: Rank, workload: Workload, folder: str, round_count: int, seed: int) -> list[Round]:
    """Matrices of e4m3 in blocks of 128 x 128, as ``ours`` and ``torch`` read them with one thread."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = workload.shape
    block_shape = -(-rows // _FP8_BLOCK), -(-columns // _FP8_BLOCK)
    stored, expected = {}, {}
    for number in range(workload.tensor_count):
        values = torch.randn(rows, columns, generator=generator).mul_(64).clamp_(-448, 448).to(torch.float8_e4m3fn)
        scales = torch.rand(block_shape, generator=generator).add_(0.5)
        name = f"layers.{number}.weight"
        stored[name], stored[f"{name}_scale_inv"] = values, scales
        spread = scales.repeat_interleave(_FP8_BLOCK, 0).repeat_interleave(_FP8_BLOCK, 1)
        expected[name] = values.float() * spread[:rows, :columns]
    return _measure(rank, workload, Path(folder) / "saved", stored, expected, round_count, seed)


def measure_mxfp4_loads(rank: Rank, workload: Workload, folder: str, round_count: int, seed: int) -> list[Round]:
    """MXFP4 as ``ours`` and ``reference`` read it with one thread; ``plain`` copies as many bytes as come out."""
    generator = torch.Generator().manual_seed(seed)
    *before, columns = workload.shape
    groups = columns // (2 * _GROUP_BYTES)
    numbers = torch.tensor((*_MAGNITUDES, *(-magnitude for magnitude in _MAGNITUDES)))
    stored, expected = {}, {}
    for number in range(workload.tensor_count):
        blocks = torch.randint(0, 256, (*before, groups, _GROUP_BYTES), generator=generator, dtype=torch.uint8)
        scales = torch.randint(110, 140, (*before, groups), generator=generator, dtype=torch.uint8)
        name = f"layers.{number}.weight"
        stored[f"{name}_blocks"], stored[f"{name}_scales"] = blocks, scales
        halves = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2).int()
        values = numbers[halves] * torch.exp2(scales.float() - 127).unsqueeze(-1)
        expected[f"{name}_blocks"] = values.reshape(workload.shape)
    return _measure(rank, workload, Path(folder) / "saved", stored, expected, round_count, seed)


def _measure(
    rank: Rank, workload: Workload, path: Path, stored: Tensors, expected: Tensors, round_count: int, seed: int
) -> list[Round]:
    torch.set_num_threads(1)
    path.mkdir()
    save_file(stored, path / _FILE)
    # torch finds the scales by the index.
    index = {"metadata": {}, "weight_map": dict.fromkeys(stored, _FILE)}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    targets = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    readers: dict[str, Callable[[], Any]] = {
        "ours": lambda: rank.component("checkpoint").QuantizedHuggingFaceStorageReader(path),
        "reference": lambda: refimpl.checkpoint.QuantizedHuggingFaceStorageReader(path),
        "torch": lambda: QuantizedHuggingFaceStorageReader(str(path)),
    }

    def work_of(who: str) -> Callable[[], None]:
        if who == "plain":
            return lambda: _copy(targets, expected)
        return lambda: load(dict(targets), storage_reader=readers[who]())

    def check(who: str) -> None:
        for name, tensor in targets.items():
            if not torch.equal(tensor, expected[name]):
                raise Mismatch(f"{who} loaded other values than are stored", where=name)

    def blank() -> None:
        for target in targets.values():
            target.zero_()

    def run_of(who: str) -> Run:
        work = work_of(who)
        return Run(work=work, check=lambda: check(who), prepare=blank, finish=lambda: None, last=round_count)

    rounds = measure({who: run_of(who) for who in workload.contenders}, round_count, seed)
    remove_folder(path)
    return rounds


def _copy(targets: Tensors, sources: Tensors) -> None:
    for name, target in targets.items():
        target.copy_(sources[name])
