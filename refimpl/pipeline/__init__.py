"""Sharded, table-batched embeddings with the optimizer in the backward, in plain PyTorch.

The meaning of ``fastimpl.pipeline``: the same names, the same bits. Batches, configuration, plans and state dicts live
here once and are shared.
"""

from refimpl.pipeline.awaitables import Awaitable, fuse_input_dists
from refimpl.pipeline.bags import InBackwardOptimizer, TableBatchedEmbeddingBags
from refimpl.pipeline.config import (
    EmbeddingBagConfig,
    FusedOptimizer,
    PoolingType,
    TableSharding,
    column_wise,
    data_parallel,
    key_value,
    row_wise,
    table_wise,
)
from refimpl.pipeline.data import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from refimpl.pipeline.embeddings import (
    EmbeddingBagCollection,
    FeatureProcessedEmbeddingBagCollection,
    PositionWeightedModuleCollection,
)
from refimpl.pipeline.schedules import (
    EvalPipelineFusedSparseDist,
    EvalPipelineSparseDist,
    PrefetchTrainPipelineSparseDist,
    TrainPipelineBase,
    TrainPipelineFusedSparseDist,
    TrainPipelineSemiSync,
    TrainPipelineSparseDist,
)
from refimpl.pipeline.sharded import ShardedEmbeddingBagCollection
from refimpl.pipeline.sharded_base import ShardedContext
from refimpl.pipeline.state import TableShard

# What the suite may ask beyond the contract.
CAPABILITIES: frozenset[str] = frozenset()

__all__ = [
    "Awaitable",
    "EmbeddingBagCollection",
    "EmbeddingBagConfig",
    "EvalPipelineFusedSparseDist",
    "EvalPipelineSparseDist",
    "FeatureProcessedEmbeddingBagCollection",
    "FusedOptimizer",
    "InBackwardOptimizer",
    "JaggedTensor",
    "KeyedJaggedTensor",
    "KeyedTensor",
    "PoolingType",
    "PositionWeightedModuleCollection",
    "PrefetchTrainPipelineSparseDist",
    "ShardedContext",
    "ShardedEmbeddingBagCollection",
    "TableBatchedEmbeddingBags",
    "TableShard",
    "TableSharding",
    "TrainPipelineBase",
    "TrainPipelineFusedSparseDist",
    "TrainPipelineSemiSync",
    "TrainPipelineSparseDist",
    "column_wise",
    "data_parallel",
    "fuse_input_dists",
    "key_value",
    "row_wise",
    "table_wise",
]
