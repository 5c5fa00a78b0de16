"""Sharded, table-batched embeddings with the optimizer in the backward, in C++.

Meaning: ``refimpl.pipeline``, whose batches, configuration, plans and state dicts are used as they are.
"""

from typing import TYPE_CHECKING

from fastimpl import ops
from refimpl.pipeline import (
    Awaitable,
    ComputeJTDictToKJT,
    ComputeKJTToJTDict,
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    FeatureProcessedEmbeddingBagCollection,
    FeatureProcessor,
    FeatureProcessorsCollection,
    FusedOptimizer,
    InBackwardOptimizer,
    JaggedTensor,
    KeyedJaggedTensor,
    KeyedTensor,
    PoolingType,
    PositionWeightedModule,
    PositionWeightedModuleCollection,
    ShardedContext,
    TableShard,
    TableSharding,
    apply_optimizer_in_backward,
    column_wise,
    data_parallel,
    jt_is_equal,
    key_value,
    kjt_is_equal,
    permute_multi_embedding,
    regroup_kts,
    row_wise,
    table_wise,
)

if TYPE_CHECKING or ops.available():
    from fastimpl.pipeline.exchange import ShardedEmbeddingBagCollection
    from fastimpl.pipeline.input_dist import fuse_input_dists
    from fastimpl.pipeline.lookups import EmbeddingBagCollection, EmbeddingCollection, TableBatchedEmbeddingBags
    from fastimpl.pipeline.schedules import (
        EvalPipelineFusedSparseDist,
        EvalPipelineSparseDist,
        PrefetchTrainPipelineSparseDist,
        TrainPipelineBase,
        TrainPipelineFusedSparseDist,
        TrainPipelineSemiSync,
        TrainPipelineSparseDist,
    )
else:
    from refimpl.pipeline import (
        EmbeddingBagCollection,
        EmbeddingCollection,
        EvalPipelineFusedSparseDist,
        EvalPipelineSparseDist,
        PrefetchTrainPipelineSparseDist,
        ShardedEmbeddingBagCollection,
        TableBatchedEmbeddingBags,
        TrainPipelineBase,
        TrainPipelineFusedSparseDist,
        TrainPipelineSemiSync,
        TrainPipelineSparseDist,
        fuse_input_dists,
    )

# What the suite may ask beyond the contract.
_CAPABILITIES = {"bag_kernels", "counted_collectives", "streams"}
CAPABILITIES: frozenset[str] = frozenset(_CAPABILITIES if ops.available() else ())

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
