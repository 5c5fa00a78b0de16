"""Paths, and other people's readers and writers."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor, Shard

from conformance.checkpoint.cases import (
    FILE,
    INDEX,
    PT,
    assert_folder,
    assert_loads,
    load,
    mesh_of,
    oracle,
    random_bits,
    save,
    save_ranks,
    sharded,
)
from conformance.harness import (
    Rank,
    assert_equal,
    assert_same_bytes,
    assert_same_tensor,
    assert_same_tensors,
    raises,
    requirement,
)
from twinproof.errors import ConfigError, TwinproofError


@requirement(
    "CKPT-087",
    "Text and Path paths MUST work, spaces and Unicode included; a URL MUST be refused by name and make no folder.",
)
def test_paths(checkpoint: Any, tmp_path: Path, monkeypatch: Any) -> None:
    state = {"a": torch.ones(2)}
    for path in (tmp_path / "a b" / "ünï", str(tmp_path / "text")):
        save(checkpoint, state, Path(path))
        assert_loads(checkpoint, Path(path), state)
    monkeypatch.chdir(tmp_path)
    for url in ("s3://bucket/x", "memory://x", "hf://a/b"):
        with raises(ConfigError, mentions=(url,)):
            checkpoint.HuggingFaceStorageWriter(url)
        with raises(ConfigError, mentions=(url,)):
            checkpoint.HuggingFaceStorageReader(url)
    assert_equal(sorted(os.listdir(tmp_path)), ["a b", "text"], where="folder")


def _torch_save(rank: Rank, path: str, consolidate: bool) -> None:
    state = {"w": sharded(random_bits(torch.float32, [7, 6], 1), mesh_of(rank), [Shard(1)]), "b": torch.arange(4.0)}
    writer = dcp.HuggingFaceStorageWriter(path, save_distributed=True, enable_consolidation=consolidate)
    dcp.save(state, storage_writer=writer)


_TORCH_STATE = {"w": random_bits(torch.float32, [7, 6], 1), "b": torch.arange(4.0)}


@requirement(
    "CKPT-088",
    "What it writes MUST load in torch's reader, safetensors and transformers, and it MUST read what they write.",
)
def test_interop(checkpoint: Any, rank_pool: Any, tmp_path: Path) -> None:
    state = {"w": torch.randn(5, 4), "b": torch.randn(3).bfloat16()}
    save(checkpoint, state, tmp_path / "ours")
    assert_same_tensors(safetensors.torch.load_file(tmp_path / "ours" / FILE), state, where="safetensors")
    targets = {name: torch.zeros_like(value) for name, value in state.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(targets, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path / "ours")), no_dist=True)
    assert_same_tensors(targets, state, where="torch's reader")
    safetensors.torch.save_file(state, tmp_path / "theirs.safetensors")
    assert_same_tensors(checkpoint.load_file(tmp_path / "theirs.safetensors"), state, where="safetensors' file")
    rank_pool.run(_torch_save, 2, str(tmp_path / "shards"), False)
    assert_loads(checkpoint, tmp_path / "shards", _TORCH_STATE)
    rank_pool.run(_torch_save, 2, str(tmp_path / "merged"), True)
    assert_loads(checkpoint, tmp_path / "merged", _TORCH_STATE)


@requirement(
    "CKPT-090",
    "A model that transformers saved MUST load bit for bit, and transformers MUST load what is saved from it.",
)
def test_transformers(checkpoint: Any, tmp_path: Path) -> None:
    from transformers import BertConfig, BertModel

    config = BertConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, vocab_size=50)
    model = BertModel(config)
    model.save_pretrained(tmp_path / "hf", max_shard_size="10KB")
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    stored = set(json.loads((tmp_path / "hf" / INDEX).read_text())["weight_map"])
    assert_loads(checkpoint, tmp_path / "hf", {name: state[name] for name in stored})
    save(checkpoint, {name: state[name] for name in stored}, tmp_path / "back", max_shard_size="10KB")
    config.save_pretrained(tmp_path / "back")
    again = BertModel.from_pretrained(tmp_path / "back")
    assert_same_tensors(dict(again.state_dict()), state, where="transformers' own load")


def _save_torch_shards(rank: Rank, path: str) -> None:
    mesh = mesh_of(rank)
    full = _shard_state()
    state = {
        "rows": sharded(full["rows"], mesh, [Shard(0)]),
        "columns": sharded(full["columns"], mesh, [Shard(1)]),
        "scalar": full["scalar"],
        "ints": full["ints"],
    }
    writer = dcp.HuggingFaceStorageWriter(
        path, fqn_to_index_mapping={"rows": 1, "columns": 2, "scalar": 2, "ints": 1}, save_distributed=True
    )
    dcp.save(state, storage_writer=writer)


def _shard_state() -> dict[str, torch.Tensor]:
    return {
        "rows": random_bits(torch.float32, [11, 5], 1),
        "columns": random_bits(torch.bfloat16, [6, 9], 2),
        "scalar": torch.tensor(2.5),
        "ints": torch.arange(5),
    }


def _consolidate_together(rank: Rank, source: str, target: str) -> None:
    consolidate = rank.component("checkpoint").consolidate_safetensors_files_on_every_rank
    consolidate(source, target, {"rows": 1, "columns": 2, "scalar": 2, "ints": 1}, num_threads=2)


@requirement(
    "CKPT-091",
    "Consolidating torch's shards, scalars and integers too, MUST give canonical files, from one process or all.",
)
def test_consolidate(checkpoint: Any, rank_pool: Any, tmp_path: Path) -> None:
    rank_pool.run(_save_torch_shards, 3, str(tmp_path / "out" / "sharded"))
    mapping = {"rows": 1, "columns": 2, "scalar": 2, "ints": 1}
    files = {
        "model-00001-of-00002.safetensors": ["rows", "ints"],
        "model-00002-of-00002.safetensors": ["columns", "scalar"],
    }
    checkpoint.consolidate_safetensors_files(
        str(tmp_path / "out" / "sharded"), str(tmp_path / "out"), mapping, num_threads=3
    )
    assert_folder(tmp_path / "out", files, _shard_state())
    assert_equal(len(list((tmp_path / "out" / "sharded").iterdir())), 6, where="shards that stay where they were")
    rank_pool.run(_consolidate_together, 3, str(tmp_path / "out" / "sharded"), str(tmp_path / "every"))
    assert_folder(tmp_path / "every", files, _shard_state())
    for path in ("out", "every"):
        assert_loads(checkpoint, tmp_path / path, _shard_state())


@requirement(
    "CKPT-713",
    "A folder that is already final MUST stay as it is where it is consolidated into itself by another spelling of its "
    "path: relative, through a link, or by way of its parent.",
)
def test_consolidate_final_by_any_path(checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mapping = {"a": 1, "b": 2}
    save(checkpoint, {"a": torch.randn(4), "b": torch.randn(2, 2)}, tmp_path / "ck", fqn_to_index_mapping=mapping)
    (tmp_path / "link").symlink_to("ck")
    monkeypatch.chdir(tmp_path)
    before = {p.name: (p.read_bytes(), p.stat().st_ino) for p in (tmp_path / "ck").iterdir()}
    # Another mapping, which a merge would go by.
    for source, target in (("ck", tmp_path / "ck"), (tmp_path / "link", "ck"), ("ck/../ck", "ck")):
        checkpoint.consolidate_safetensors_files(source, target, {"a": 1, "b": 1})
        after = {p.name: (p.read_bytes(), p.stat().st_ino) for p in (tmp_path / "ck").iterdir()}
        assert_equal(after == before, True, where=f"folder unchanged, {source} into {target}")


@requirement("CKPT-092", "Consolidating a folder that is already final into itself MUST verify it and change nothing.")
def test_consolidate_final(checkpoint: Any, tmp_path: Path) -> None:
    state = {"a": torch.randn(4), "b": torch.randn(2, 2)}
    save(checkpoint, state, tmp_path / "ck", fqn_to_index_mapping={"a": 1, "b": 2})
    before = {p.name: (p.read_bytes(), p.stat().st_mtime_ns, p.stat().st_ino) for p in (tmp_path / "ck").iterdir()}
    checkpoint.consolidate_safetensors_files(tmp_path / "ck", tmp_path / "ck", {"a": 1, "b": 2})
    after = {p.name: (p.read_bytes(), p.stat().st_mtime_ns, p.stat().st_ino) for p in (tmp_path / "ck").iterdir()}
    assert_equal(after == before, True, where="folder unchanged")
    (tmp_path / "ck" / "model-00002-of-00002.safetensors").unlink()
    with raises(TwinproofError, mentions=("model-00002-of-00002.safetensors",)):
        checkpoint.consolidate_safetensors_files(tmp_path / "ck", tmp_path / "ck", {"a": 1, "b": 2})


@requirement(
    "CKPT-653",
    "A folder MUST be the same under every name, relative, through a link or with dots in it: a final one that is "
    "consolidated into itself stays as it is, and each name loads what another saved.",
)
def test_names_of_a_folder(checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    names: list[Any] = [
        f"{tmp_path}/real/ck",
        "real/ck",
        "real/../real/ck/",
        "./link/ck",
        f"{tmp_path}/link/ck",
        Path("link/ck"),
    ]
    for number, name in enumerate(names):
        state = {key: torch.full((4,), 10.0 * number + i) for i, key in enumerate("abc")}
        save(checkpoint, state, name, max_shard_size=16)
        folder = tmp_path / "real/ck"
        before = {path.name: (path.read_bytes(), path.stat().st_ino) for path in folder.iterdir()}
        for other in names:
            where = f"saved as {name}, named as {other}"
            targets = {key: torch.zeros(4) for key in state}
            load(checkpoint, targets, other)
            assert_same_tensors(targets, state, where=where)
            checkpoint.consolidate_safetensors_files(name, other)
            after = {path.name: (path.read_bytes(), path.stat().st_ino) for path in folder.iterdir()}
            assert_equal(after == before, True, where=where)
    assert_equal((tmp_path / "link").is_symlink(), True, where="the link")
    assert_equal(sorted(os.listdir(tmp_path)), ["link", "real"], where="what is beside it")


@requirement(
    "CKPT-093", "save_file MUST write the bytes of safetensors.torch.save_file, and load_file give back what it reads."
)
def test_single_functions(checkpoint: Any, tmp_path: Path) -> None:
    state = {"a": torch.randn(3, 2), "b": torch.arange(5), "s": torch.tensor(1.5), "e": torch.empty(0, 2)}
    for metadata in (None, {}, {"format": "pt"}, {"k": "v"}):
        checkpoint.save_file(state, tmp_path / "ours.safetensors", metadata)
        safetensors.torch.save_file(state, tmp_path / "theirs.safetensors", metadata)
        assert_same_bytes(
            tmp_path / "ours.safetensors", (tmp_path / "theirs.safetensors").read_bytes(), where=str(metadata)
        )
    assert_same_tensors(checkpoint.load_file(tmp_path / "ours.safetensors"), state)


def _fsdp(rank: Rank, path: str) -> None:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(9, 7), torch.nn.Linear(7, 5, bias=False))
    whole = {name: value.detach().clone() for name, value in model.state_dict().items()}
    for layer in model:
        fully_shard(layer, mesh=mesh_of(rank))
    fully_shard(model, mesh=mesh_of(rank))
    save_ranks(rank, get_model_state_dict(model), Path(path), block_bytes=64)
    if rank.rank == 0:
        assert_same_bytes(Path(path) / FILE, oracle(whole, PT), where="FSDP2 state")
    dist.barrier()
    for value in model.state_dict().values():
        assert isinstance(value, DTensor)
        value.to_local().zero_()
    dcp.load(get_model_state_dict(model), storage_reader=rank.component("checkpoint").HuggingFaceStorageReader(path))
    for name, value in model.state_dict().items():
        expected = sharded(whole[name], mesh_of(rank), [Shard(0)]).to_local()
        assert_same_tensor(value.to_local(), expected, where=f"{name} on rank {rank.rank}")


@requirement(
    "CKPT-096",
    "A model under FSDP2's fully_shard MUST be saved as the unsharded model and loaded back into its shards.",
)
def test_fully_shard(checkpoint: Any, rank_pool: Any, tmp_path: Path) -> None:
    for world in (2, 3):
        rank_pool.run(_fsdp, world, str(tmp_path / str(world)))
