"""Upstream's own stream code under the race prover: what is found in the pinned releases, and nothing else.

The table of docs/race.md, kept by a test: a hazard that upstream has mended fails here, as a new one does. Skipped
where a package is not installed; ci/peers installs them.
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from conformance.peers.races.megatron_offload import installed

_HERE = Path(__file__).parent / "races"
Pairs = set[tuple[str, str, str]]

_TO_HOST, _TO_DEVICE = "cpu_offload.py:72 copy_", "cpu_offload.py:135 copy_"
TORCHAO: dict[str, Pairs] = {
    "plain": set(),
    "grads": set(),
    "accumulate": {("race", _TO_HOST, "torchao_offload.py:main add_")},
    "skip": {("released", _TO_HOST, "cpu_offload.py:147 given back")},
    "eval": {("race", "torchao_offload.py:loss addmm", _TO_DEVICE)},
}
_CAST = "hybrid_optimizer.py:93 _to_copy"
MEGATRON: dict[str, Pairs] = {
    "plain": set(),
    "half": {
        ("race", _CAST, "hybrid_optimizer.py:168 _foreach_lerp_"),
        ("race", _CAST, "hybrid_optimizer.py:168 _foreach_addcmul_"),
    },
    "serial": set(),
}
_FUSED, _FBGEMM = "TrainPipelineFusedSparseDist", "fbgemm::split_embedding"
_LOOKUP = f"lookup_rowwise_adagrad.py:222 {_FBGEMM}_codegen_forward_unweighted_pt2_wrapper"
_UPDATE = f"train_pipelines.py:833 {_FBGEMM}_backward_codegen_rowwise_adagrad_unweighted_pt2_wrapper"
TORCHREC: dict[str, Pairs] = {
    "TrainPipelineSparseDist": set(),
    _FUSED: set(),
    f"{_FUSED} cold=True": {("race", "embeddingbag.py:1606 uniform_", _LOOKUP)},
    f"{_FUSED} edit=True": {("race", "torchrec_pipelines.py:main mul_", _LOOKUP)},
    f"{_FUSED} emb_lookup_stream=new": {
        ("race", _LOOKUP, "torchrec_pipelines.py:forward addmm"),
        ("race", _LOOKUP, "train_pipelines.py:833 mm"),
        ("released", _UPDATE, "split_table_batched_embeddings_ops_training.py:2602 given back before"),
        (
            "released",
            "jagged_tensor.py:154 fbgemm::asynchronous_complete_cumsum",
            "train_pipelines.py:1538 given back before",
        ),
    },
    f"{_FUSED} emb_lookup_stream=current": set(),
    "TrainPipelineSemiSync start_batch=0": set(),
    "PrefetchTrainPipelineSparseDist": set(),
    "EvalPipelineFusedSparseDist": {
        ("released", "torchrec_pipelines.py:forward addmm", "torchrec_pipelines.py:forward given back before")
    },
}


def _found(program: str, *arguments: str) -> Pairs:
    """(kind, place and op, place and op) of every hazard; values that the host reads do not matter here."""
    command = [sys.executable, "-P", "-m", "conformance.harness.cli", "race", "--json", "--accept", "value"]
    done = subprocess.run([*command, str(_HERE / program), *arguments], check=False, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["failure"] is None
    return {(one["kind"], _place(one["first"]), _place(one["second"])) for one in report["hazards"]}


def _place(use: dict[str, Any]) -> str:
    path = Path(use["file"])
    # Of the programs here the function is enough; upstream's lines are those of the pinned release.
    return f"{path.name}:{use['function'] if path.parent == _HERE else use['line']} {use['op']}"


def _needs(name: str, version: str) -> None:
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"needs {name}")
    assert found == version, f"the table is of {name} {version}, and {found} is installed"


@pytest.mark.parametrize("mode", TORCHAO)
def test_torchao(mode: str) -> None:
    _needs("torchao", "0.18.0")
    assert _found("torchao_offload.py", mode) == TORCHAO[mode]


@pytest.mark.parametrize("mode", MEGATRON)
def test_megatron(mode: str) -> None:
    _needs("megatron-core", "0.16.1")
    path = installed()
    assert path is not None
    assert _found("megatron_offload.py", mode, str(path)) == MEGATRON[mode]


@pytest.mark.parametrize("words", TORCHREC)
def test_torchrec(words: str) -> None:
    _needs("torchrec", "1.8.0")
    assert _found("torchrec_pipelines.py", *words.split()) == TORCHREC[words]
