"""The command line: inspect, verify, consolidate."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.checkpoint.cases import assert_folder, random_bits, save, save_ranks
from conformance.harness import Rank, assert_equal, requirement

NEEDS = ("staged_copies",)


def _run(impl: Any, *arguments: str) -> tuple[int, dict[str, Any], str]:
    command = [sys.executable, "-m", f"{impl.__name__}.checkpoint", *arguments, "--json"]
    environment = {"PYTHONPATH": ":".join(path for path in sys.path if path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    return done.returncode, json.loads(done.stdout or "{}"), done.stderr


def _run_here(impl: Any, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    main = importlib.import_module(f"{impl.__name__}.checkpoint.__main__").main
    code = main([*arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def _save_shards(rank: Rank, path: str) -> None:
    save_ranks(
        rank, {f"r{rank.rank}": random_bits(torch.float32, (3,), rank.rank)}, Path(path), enable_consolidation=False
    )


@requirement(
    "CKPT-107",
    "The command line MUST inspect, verify and consolidate, as JSON too, and exit 1 naming what is wrong.",
    needs=NEEDS,
)
def test_command_line(
    impl: Any, checkpoint: Any, rank_pool: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = {"w": torch.randn(4, 3), "n": torch.tensor(5)}
    save(checkpoint, state, tmp_path / "ck", fqn_to_index_mapping={"w": 1, "n": 2}, metadata={"step": "7"})
    code, facts = _run_here(impl, capsys, "inspect", str(tmp_path / "ck"))
    assert_equal((code, facts["payload_bytes"], facts["metadata"]["step"]), (0, 56, "7"), where="inspect")
    assert_equal(facts["tensors"]["w"]["shape"], [4, 3], where="inspect")
    code, facts = _run_here(impl, capsys, "verify", str(tmp_path / "ck"))
    assert_equal((code, facts["ok"], facts["warnings"]), (0, True, []), where="verify")
    (tmp_path / "ck" / "model-00002-of-00002.safetensors").unlink()
    broken = (1, False, "CorruptionError")
    code, facts = _run_here(impl, capsys, "verify", str(tmp_path / "ck"))
    assert_equal((code, facts["ok"], facts.get("error")), broken, where="verify a broken folder")
    code, facts, errors = _run(impl, "verify", str(tmp_path / "ck"))
    assert_equal((code, facts["ok"], facts.get("error")), broken, where=f"as a process: {errors[-500:]}")
    rank_pool.run(_save_shards, 2, str(tmp_path / "shards"))
    code, facts = _run_here(
        impl, capsys, "consolidate", str(tmp_path / "shards"), str(tmp_path / "out"), "--threads", "2"
    )
    assert_equal((code, facts["ok"]), (0, True), where="consolidate")
    whole = {f"r{r}": random_bits(torch.float32, (3,), r) for r in (0, 1)}
    assert_folder(tmp_path / "out", {"model-00001-of-00001.safetensors": ["r0", "r1"]}, whole)
