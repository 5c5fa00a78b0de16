"""What the process is beside a checkpoint: defaults and modes that a caller has set for its model."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.checkpoint.cases import INDEX, load, load_with, random_bits, save, zeros_like
from conformance.harness import assert_equal, assert_same_bytes, assert_same_tensors, requirement, succeeds
from conformance.harness.surroundings import SURROUNDINGS


@requirement(
    "CKPT-622",
    "The process's default device MUST NOT decide where a save or a load works: files and tensors under another one "
    "MUST be those without.",
)
def test_default_device(checkpoint: Any, tmp_path: Path) -> None:
    state = {
        f"t{i}": random_bits(dtype, shape, i)
        for i, (dtype, shape) in enumerate(
            [(torch.float32, (40, 7)), (torch.bfloat16, (3, 5, 4)), (torch.int64, ()), (torch.uint8, (0, 3))]
        )
    }
    state["turned"] = random_bits(torch.float32, (6, 9), 9).t()
    ways: dict[str, dict[str, Any]] = {
        "one file": {},
        "files": {"max_shard_size": 600, "block_bytes": 256},
        "sums": {"checksums": True, "block_bytes": 64},
        "cast": {"export_dtype": torch.bfloat16},
    }
    for name, options in ways.items():
        plain, folder = tmp_path / f"{name} plain", tmp_path / name
        save(checkpoint, state, plain, **options)
        with torch.device("meta"), succeeds("a save", where=name):
            save(checkpoint, state, folder, **options)
        names = sorted(path.name for path in plain.iterdir())
        assert_equal(sorted(path.name for path in folder.iterdir()), names, where=f"{name}: names")
        for file in names:
            assert_same_bytes((folder / file).read_bytes(), (plain / file).read_bytes(), where=f"{name}: {file}")
        expected, found = ({key: zeros_like(value) for key, value in state.items()} for _ in range(2))
        load(checkpoint, expected, plain, cast=True)
        with torch.device("meta"), succeeds("a load", where=name):
            load(checkpoint, found, plain, cast=True)
        assert_same_tensors(found, expected, where=name)
    checkpoint.save_file(state, tmp_path / "plain.safetensors")
    with torch.device("meta"), succeeds("a file", where="save_file and load_file"):
        checkpoint.save_file(state, tmp_path / "alone.safetensors")
        read = checkpoint.load_file(tmp_path / "alone.safetensors")
    assert_same_bytes(
        (tmp_path / "alone.safetensors").read_bytes(), (tmp_path / "plain.safetensors").read_bytes(), where="save_file"
    )
    assert_same_tensors(read, checkpoint.load_file(tmp_path / "plain.safetensors"), where="load_file")


def _quantized(checkpoint: Any, folder: Path) -> None:
    """A matrix of 8-bit floats and groups of 4-bit ones, with their scales."""
    folder.mkdir()
    state = {
        "m.weight": (torch.arange(63.0).reshape(7, 9) / 8).to(torch.float8_e4m3fn),
        "m.weight_scale_inv": torch.arange(1.0, 7.0).reshape(2, 3) / 3,
        "g_blocks": torch.arange(24, dtype=torch.uint8).reshape(2, 3, 4),
        "g_scales": torch.tensor([[120, 127, 130], [126, 128, 1]], dtype=torch.uint8),
    }
    checkpoint.save_file(state, folder / "model.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(state, "model.safetensors")}))


def _everything(
    checkpoint: Any, folder: Path, around: Callable[[], AbstractContextManager[Any]], where: str
) -> tuple[dict[str, bytes], dict[str, torch.Tensor]]:
    """Saves and loads of all kinds inside, each begun anew: the files, and what was loaded."""
    state = {
        "w": random_bits(torch.float32, (40, 7), 1),
        "half": random_bits(torch.bfloat16, (3, 5, 4), 2),
        "turned": torch.arange(54.0).reshape(6, 9).t(),
        "count": torch.tensor(7),
        "conjugate": random_bits(torch.complex64, (4, 4), 3).conj(),
    }
    ways: dict[str, dict[str, Any]] = {
        "files": {"max_shard_size": 600, "block_bytes": 256, "checksums": True},
        "cast": {"export_dtype": torch.bfloat16},
        "shards": {"enable_consolidation": False},
    }
    loaded: dict[str, torch.Tensor] = {}
    for name, options in ways.items():
        # Tensors made in inference mode can be written to in no other, whichever thread does it.
        with around(), succeeds("a save and a load", where=f"{where}, {name}"):
            targets = {key: zeros_like(value) for key, value in state.items()}
            save(checkpoint, state, folder / name, **options)
            load(checkpoint, targets, folder / name, cast=True, thread_count=3)
        loaded |= {f"{name}: {key}": value for key, value in targets.items()}
    _quantized(checkpoint, folder / "quantized")
    for dtype, through in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float64, None)):
        options = {} if through is None else {"target_dtype": through}
        reader = checkpoint.QuantizedHuggingFaceStorageReader(folder / "quantized", block_size=4, **options)
        with around(), succeeds("a quantized load", where=f"{where}, {dtype}"):
            numbers = {"m.weight": torch.zeros(7, 9, dtype=dtype), "g": torch.zeros(2, 24, dtype=dtype)}
            load_with(reader, {"m.weight": numbers["m.weight"], "g_blocks": numbers["g"]})
        loaded |= {f"quantized {key} as {dtype}": value for key, value in numbers.items()}
    with around(), succeeds("a file and a consolidation", where=where):
        checkpoint.save_file(state, folder / "alone.safetensors", checksums=True)
        loaded |= {f"alone: {key}": v for key, v in checkpoint.load_file(folder / "alone.safetensors").items()}
        checkpoint.consolidate_safetensors_files(folder / "shards", folder / "whole")
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return files, loaded


@requirement(
    "CKPT-641",
    "Under any default dtype and mode of the caller saves, loads, quantized loads, single files and consolidations "
    "MUST give the files and the bits that they give without.",
)
@pytest.mark.parametrize("surroundings", SURROUNDINGS)
def test_defaults_and_modes(checkpoint: Any, tmp_path: Path, surroundings: str) -> None:
    found = []
    for name, around in (("plain", nullcontext), (surroundings, SURROUNDINGS[surroundings])):
        (tmp_path / name).mkdir()
        found.append(_everything(checkpoint, tmp_path / name, around, name))
    (plain_files, plain), (files, values) = found
    assert_equal(sorted(files), sorted(plain_files), where="names of files")
    for file, content in plain_files.items():
        assert_same_bytes(files[file], content, where=file)
    assert_same_tensors(values, plain, where=surroundings)
