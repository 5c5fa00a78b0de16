"""Sharded, table-batched embeddings with the optimizer in the backward, in plain PyTorch.

The meaning of ``fastimpl.pipeline``: the same names, the same bits. Batches, configuration, plans and state dicts live
here once and are shared.
"""

from refimpl.pipeline.awaitables import Awaitable, fuse_input_dists
from refimpl.pipeline.bags import InBackwardOptimizer, TableBatchedEmbeddingBags
from refimpl.pipeline.config import (
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    FusedOptimizer,
    PoolingType,
    TableSharding,
    column_wise,
    data_parallel,
    key_value,
    row_wise,
    table_wise,
)
from refimpl.pipeline.data import (
    ComputeJTDictToKJT,
    ComputeKJTToJTDict,
    JaggedTensor,
    KeyedJaggedTensor,
    KeyedTensor,
    jt_is_equal,
    kjt_is_equal,
    permute_multi_embedding,
    regroup_kts,
)
from refimpl.pipeline.embeddings import EmbeddingBagCollection
from refimpl.pipeline.in_backward import apply_optimizer_in_backward
from refimpl.pipeline.processors import (
    FeatureProcessedEmbeddingBagCollection,
    FeatureProcessor,
    FeatureProcessorsCollection,
    PositionWeightedModule,
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
from refimpl.pipeline.sequences import EmbeddingCollection
from refimpl.pipeline.sharded import ShardedEmbeddingBagCollection
from refimpl.pipeline.sharded_base import ShardedContext
from refimpl.pipeline.state import TableShard

# What the suite may ask beyond the contract.
CAPABILITIES: frozenset[str] = frozenset()

__all__ = [
    "Awaitable",
    "ComputeJTDictToKJT",
    "ComputeKJTToJTDict",
    "DataType",
    "EmbeddingBagCollection",
    "EmbeddingBagConfig",
    "EmbeddingCollection",
    "EmbeddingConfig",
    "EvalPipelineFusedSparseDist",
    "EvalPipelineSparseDist",
    "FeatureProcessedEmbeddingBagCollection",
    "FeatureProcessor",
    "FeatureProcessorsCollection",
    "FusedOptimizer",
    "InBackwardOptimizer",
    "JaggedTensor",
    "KeyedJaggedTensor",
    "KeyedTensor",
    "PoolingType",
    "PositionWeightedModule",
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
    "apply_optimizer_in_backward",
    "column_wise",
    "data_parallel",
    "fuse_input_dists",
    "jt_is_equal",
    "key_value",
    "kjt_is_equal",
    "permute_multi_embedding",
    "regroup_kts",
    "row_wise",
    "table_wise",
]
