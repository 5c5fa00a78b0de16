"""torchrec's sharded collection and its pipelines on the CPU; where it is not installed, none."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["Tables", "installed", "jagged", "pipelineable", "schedule", "sharded"]


def installed() -> bool:
    """Whether torchrec and the kernels under it are there."""
    return all(importlib.util.find_spec(name) is not None for name in ("torchrec", "fbgemm_gpu", "tensordict"))


def _module(name: str) -> Any:
    with warnings.catch_warnings():
        # Its import warns about what this torch deprecates.
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


def jagged() -> Any:
    """The class of its batches' ids."""
    return _module("torchrec").KeyedJaggedTensor


def pipelineable(batch_class: type) -> Any:
    """The class of batches as its pipelines demand it."""
    return type(batch_class.__name__, (batch_class, _module("torchrec.streamable").Pipelineable), {})


@dataclass(frozen=True)
class Tables:
    """Tables of one shape, and the optimizer in their backward, by our name of it."""

    rows: int
    dim: int
    count: int
    optimizer: str
    lr: float
    eps: float


def sharded(tables: Tables, rank_count: int, fill: Callable[[Any], None]) -> Any:
    """A run of tables for each rank."""
    torchrec, plans = _module("torchrec"), _module("torchrec.distributed.sharding_plan")
    sharder_class = _module("torchrec.distributed.embeddingbag").EmbeddingBagCollectionSharder
    environment = _module("torchrec.distributed.types").ShardingEnv
    kind = _module("fbgemm_gpu.split_embedding_configs").EmbOptimType[f"EXACT_{tables.optimizer.upper()}"]
    rows, dim, names = tables.rows, tables.dim, [f"t{i}" for i in range(tables.count)]
    configs = [
        torchrec.EmbeddingBagConfig(num_embeddings=rows, embedding_dim=dim, name=name, feature_names=[f"f{i}"])
        for i, name in enumerate(names)
    ]
    collection = torchrec.EmbeddingBagCollection(tables=configs, device=torch.device("cpu"))
    fill(collection)
    sharder = sharder_class(fused_params={"optimizer": kind, "learning_rate": tables.lr, "eps": tables.eps})
    chosen = {
        name: plans.table_wise(rank=i * rank_count // tables.count, compute_kernel="fused")
        for i, name in enumerate(names)
    }
    plan = plans.construct_module_sharding_plan(collection, chosen, sharder, rank_count, rank_count, device_type="cpu")
    whole = {name: param.detach().clone() for name, param in collection.named_parameters()}
    made = sharder.shard(collection, plan, environment.from_process_group(dist.group.WORLD), torch.device("cpu"))
    # Sharding begins with weights of its own.
    for name, value in made.state_dict().items():
        for shard in value.local_shards():
            shard.tensor.copy_(whole[name])
    return made


def schedule(name: str, model: Any, optimizer: Any) -> Any:
    """One of its pipelines, on the CPU."""
    classes = _module("torchrec.distributed.train_pipeline")
    return getattr(classes, name)(model, optimizer, torch.device("cpu"))
