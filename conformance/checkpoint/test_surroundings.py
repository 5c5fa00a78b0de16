"""What the process is beside a checkpoint: a default device that a caller has set for its model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from conformance.checkpoint.cases import load, random_bits, save, zeros_like
from conformance.harness import assert_equal, assert_same_bytes, assert_same_tensors, requirement, succeeds


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
