"""The libraries that loads are measured against give the tensors of all files, and the jobs check what they give."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from conformance.harness import RankPool
from perf.checkpoint import JOBS
from perf.harness.workloads import Workload
from perf.peers.loaders import LOADERS, installed, map_files

_ROUNDS = 1


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"part-{number}.safetensors" for number in range(3)]
    for number, path in enumerate(paths):
        values = torch.arange(40, dtype=torch.int32) + 100 * number
        save_file({f"a{number}": values.view(5, 8).clone(), f"b{number}": values.to(torch.bfloat16)}, path)
    return paths


def _check(tensors: dict[str, torch.Tensor]) -> None:
    assert sorted(tensors) == ["a0", "a1", "a2", "b0", "b1", "b2"]
    for number in range(3):
        values = torch.arange(40, dtype=torch.int32) + 100 * number
        assert torch.equal(tensors[f"a{number}"], values.view(5, 8))
        assert torch.equal(tensors[f"b{number}"], values.to(torch.bfloat16))


@pytest.mark.parametrize("name", LOADERS)
def test_a_loader_gives_every_tensor(name: str, files: list[Path]) -> None:
    if not installed(name):
        pytest.skip(f"{name} is not installed")
    _check(LOADERS[name][1](files, 2))


def test_a_map_gives_every_tensor(files: list[Path]) -> None:
    _check(map_files(files))


def test_what_is_no_loader_is_not_installed() -> None:
    assert not installed("ours")


@pytest.mark.parametrize(
    ("job", "shape", "contenders"),
    [
        ("load-fresh", (16, 8), ("ours", *LOADERS, "mapped", "plain", "by-128")),
        ("load-fp8", (200, 130), ("ours", "torch")),
        ("load-mxfp4", (6, 64), ("ours", "plain", "reference")),
    ],
)
def test_every_contender_of_a_job_loads_what_is_stored(
    job: str, shape: tuple[int, int], contenders: tuple[str, ...], tmp_path: Path
) -> None:
    workload = Workload(
        job,
        component="checkpoint",
        job=job,
        shape=shape,
        tensor_count=4,
        file_count=2,
        round_count=_ROUNDS,
        contenders=contenders,
    )
    with RankPool("fastimpl") as pool:
        (rounds,) = pool.run(JOBS[job], 1, workload, str(tmp_path), _ROUNDS, 0, timeout_s=300.0)
    assert len(rounds) == _ROUNDS
    assert set(rounds[0]) == {who for who in contenders if who not in LOADERS or installed(who)}
