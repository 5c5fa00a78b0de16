"""The component of ``torchrec_pipeline``: FBGEMM's lookups, torchrec's collections, sharding and two of its pipelines.

Pipelines that overlap on streams (FusedSparseDist, SemiSync) call ``record_stream`` and ``torch.cuda`` whatever the
device is, and so are absent here, as are modules that torchrec has in another form.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from twinproof.pipeline.config import FusedOptimizer
from twinproof.pipeline.sharding import Shard

__all__ = ["pipeline"]

torchrec: Any = importlib.import_module("torchrec")
embedding_configs: Any = importlib.import_module("torchrec.modules.embedding_configs")
embeddingbag: Any = importlib.import_module("torchrec.distributed.embeddingbag")
plans: Any = importlib.import_module("torchrec.distributed.sharding_plan")
schedules: Any = importlib.import_module("torchrec.distributed.train_pipeline")
streamable: Any = importlib.import_module("torchrec.streamable")
types: Any = importlib.import_module("torchrec.distributed.types")
common: Any = importlib.import_module("fbgemm_gpu.split_table_batched_embeddings_ops_common")
training: Any = importlib.import_module("fbgemm_gpu.split_table_batched_embeddings_ops_training")
kinds: Any = importlib.import_module("fbgemm_gpu.split_embedding_configs").EmbOptimType

_CPU = torch.device("cpu")
_DTYPES = {
    torch.float32: embedding_configs.DataType.FP32,
    torch.float16: embedding_configs.DataType.FP16,
    torch.bfloat16: embedding_configs.DataType.BF16,
}
_KINDS = {
    "sgd": kinds.EXACT_SGD,
    "adagrad": kinds.EXACT_ADAGRAD,
    "rowwise_adagrad": kinds.EXACT_ROWWISE_ADAGRAD,
    "adam": kinds.ADAM,
    "partial_rowwise_adam": kinds.PARTIAL_ROWWISE_ADAM,
    "lamb": kinds.LAMB,
}


def _config(
    num_embeddings: int,
    embedding_dim: int,
    name: str,
    data_type: torch.dtype = torch.float32,
    feature_names: Any = (),
    pooling: Any = torchrec.PoolingType.SUM,
) -> Any:
    return torchrec.EmbeddingBagConfig(
        num_embeddings=num_embeddings,
        embedding_dim=embedding_dim,
        name=name,
        data_type=_DTYPES[data_type],
        feature_names=list(feature_names),
        pooling=pooling,
    )


def _fused(optimizer: FusedOptimizer) -> dict[str, Any]:
    betas = {"beta1": optimizer.beta1, "beta2": optimizer.beta2}
    return {"optimizer": _KINDS[optimizer.kind], "learning_rate": optimizer.lr, "eps": optimizer.eps, **betas}


class _LearningRate(torch.optim.Optimizer):
    """What torchrec's own wrapper does: a step hands the learning rate to the kernel, which updates in the backward."""

    def __init__(self, lookups: Any, lr: float) -> None:
        super().__init__([torch.nn.Parameter(torch.empty(0))], {"lr": lr})
        self.lookups = lookups

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.lookups.set_learning_rate(self.param_groups[0]["lr"])

    @property
    def step_count(self) -> int:
        return int(self.lookups.iter_cpu)


class _Bags(torch.nn.Module):
    """One of FBGEMM's lookups, which has one pooling and one dtype for all of its tables."""

    def __init__(
        self, tables: Any, *, optimizer: FusedOptimizer, bounds_check: str = "fatal", weights: Any = None
    ) -> None:
        super().__init__()
        forms = {(table.pooling, table.data_type) for table in tables}
        if len(forms) > 1:
            raise TypeError("one of FBGEMM's lookups has one pooling and one dtype")
        ((pooling, dtype),) = forms
        self.lookups = training.SplitTableBatchedEmbeddingBagsCodegen(
            [
                (t.num_embeddings, t.embedding_dim, common.EmbeddingLocation.HOST, training.ComputeDevice.CPU)
                for t in tables
            ],
            feature_table_map=[i for i, table in enumerate(tables) for _ in table.feature_names],
            pooling_mode=common.PoolingMode[pooling.name],
            weights_precision=embedding_configs.data_type_to_sparse_type(dtype),
            stochastic_rounding=False,
            bounds_check_mode=training.BoundsCheckMode[bounds_check.upper()],
            **_fused(optimizer),
        )
        # Without any, they are upstream's own.
        for mine, given in zip(self.lookups.split_embedding_weights(), weights or [], strict=weights is not None):
            mine.copy_(given)
        self.fused_optimizer = _LearningRate(self.lookups, optimizer.lr)

    def forward(self, ids: Any, offsets: Any, weights: Any = None) -> Any:
        return self.lookups(ids, offsets, weights)

    def weight(self, index: int) -> torch.Tensor:
        """Upstream's split view."""
        found: torch.Tensor = self.lookups.split_embedding_weights()[index]
        return found

    def states(self, index: int) -> dict[str, torch.Tensor]:
        """Upstream's states, a value for a row as [E, 1]."""
        if self.lookups.optimizer is kinds.EXACT_SGD:
            return {}
        states = [s for s in self.lookups.split_optimizer_states()[index] if s.numel() > 1]
        rows = self.weight(index).shape[0]
        return {f"momentum{number}": state.reshape(rows, -1) for number, state in enumerate(states, 1)}


def _world() -> Any:
    """All ranks; a process without any becomes a group of one, without which torchrec cuts nothing."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return dist.group.WORLD


def _parts(value: Any) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """This rank's parts of one of torchrec's tensors, and where they begin."""
    if not hasattr(value, "local_shards"):
        yield (0,) * value.dim(), value.detach()
        return
    for part in value.local_shards():
        yield tuple(part.metadata.shard_offsets), part.tensor


class _InOrder(torch.nn.Module):
    """Pooled columns in the order of the uncut collection: upstream's are by sharding, then rank."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.names, self.widths = module._embedding_names, module._lengths_per_embedding

    def forward(self, result: Any) -> Any:
        """Waits for upstream's lazy result."""
        found = result.wait()
        return torchrec.KeyedTensor(self.names, self.widths, torch.cat([found[name] for name in self.names], dim=1))


class _Sharded(torch.nn.Module):
    """torchrec's sharded collection."""

    def __init__(
        self,
        module: Any,
        plan: Any,
        *,
        optimizer: FusedOptimizer | None = None,
        process_group: Any = None,
        bounds_check: str = "fatal",
    ) -> None:
        super().__init__()
        fused = _fused(optimizer or FusedOptimizer())
        # Upstream's default bounds check on the CPU warns and goes on; the contract's is to refuse.
        fused["bounds_check_mode"] = training.BoundsCheckMode[bounds_check.upper()]
        sharder = embeddingbag.EmbeddingBagCollectionSharder(fused_params=fused)
        self.process_group = process_group or _world()
        size = dist.get_world_size(self.process_group)
        env = types.ShardingEnv.from_process_group(self.process_group)
        chosen = plans.construct_module_sharding_plan(module, plan, sharder, size, size, device_type="cpu")
        # Upstream makes new tables, and leaves it to its callers to load the old ones.
        given = module.state_dict()
        self.module = sharder.shard(module, chosen, env, _CPU)
        for name, value in self.module.state_dict().items():
            for at, part in _parts(value):
                part.copy_(given[name][tuple(slice(b, b + n) for b, n in zip(at, part.shape, strict=True))])
        self.in_order = _InOrder(module)
        self._names = [config.name for config in module.embedding_bag_configs()]
        self.fused_optimizer = self.module.fused_optimizer
        # Upstream counts lookups inside its kernels, not backwards: there is no count of steps to compare, so none is.
        self.fused_optimizer.step_count = 0

    def forward(self, features: Any) -> Any:
        """A KeyedTensor, as of the uncut collection."""
        return self.in_order(self.module(features))

    @property
    def embedding_bags(self) -> Any:
        """Upstream's."""
        return self.module.embedding_bags

    def named_parameters(self, *args: Any, **options: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Upstream's, whose names are the contract's."""
        for name, param in super().named_parameters(*args, **options):
            yield name.removeprefix("module."), param

    def local_shards(self) -> dict[str, tuple[Shard, torch.Tensor, dict[str, torch.Tensor]]]:
        """This rank's part of each table, read from torchrec's state dicts."""
        weights, rank = self.module.state_dict(), dist.get_rank(self.process_group)
        every = self.fused_optimizer.state_dict()["state"]
        found = {}
        for index, name in enumerate(self._names):
            key = f"embedding_bags.{name}.weight"
            if not hasattr(weights[key], "local_shards"):
                continue
            for at, weight in _parts(weights[key]):
                rows, columns = ((begin, begin + size) for begin, size in zip(at, weight.shape, strict=True))
                states = {
                    label.rpartition(".")[2].replace("_", ""): part.reshape(weight.shape[0], -1)
                    for label, state in every.get(key, {}).items()
                    if hasattr(state, "local_shards")
                    for _, part in _parts(state)
                }
                found[name] = Shard(index, rank, "", rows, columns), weight, states
        return found


def _schedule(kind: Any) -> Any:
    def make(model: Any, optimizer: Any, device: Any = _CPU, *, process_group: Any = None, **options: Any) -> Any:
        # A batch has to say that it can be moved; on the CPU nothing else is asked of it.
        streamable.Pipelineable.register(importlib.import_module("conformance.pipeline.jobs").Batch)
        return kind(model, optimizer, torch.device(device), **options)

    return make


class pipeline:
    """The component."""

    KeyedJaggedTensor = torchrec.KeyedJaggedTensor
    KeyedTensor = torchrec.KeyedTensor
    JaggedTensor = torchrec.JaggedTensor
    PoolingType = torchrec.PoolingType
    EmbeddingBagConfig = staticmethod(_config)
    FusedOptimizer = FusedOptimizer
    EmbeddingBagCollection = torchrec.EmbeddingBagCollection
    TableBatchedEmbeddingBags = _Bags
    ShardedEmbeddingBagCollection = _Sharded
    # On the CPU upstream's own choice is tables without an optimizer of their own.
    table_wise = staticmethod(partial(plans.table_wise, compute_kernel="fused"))
    row_wise = staticmethod(partial(plans.row_wise, compute_kernel="fused"))
    column_wise = staticmethod(partial(plans.column_wise, compute_kernel="fused"))
    data_parallel = staticmethod(plans.data_parallel)
    TrainPipelineBase = staticmethod(_schedule(schedules.TrainPipelineBase))
    TrainPipelineSparseDist = staticmethod(_schedule(schedules.TrainPipelineSparseDist))
