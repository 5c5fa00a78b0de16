"""Sharded, table-batched embeddings with the optimizer in the backward, in plain PyTorch.

The meaning of ``fastimpl.pipeline``: the same names, the same bits. Batches, configuration, plans and state dicts live
here once and are shared.
"""

from twinproof.pipeline.awaitables import Awaitable, fuse_input_dists
from twinproof.pipeline.bags import InBackwardOptimizer, TableBatchedEmbeddingBags
from twinproof.pipeline.config import (
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
from twinproof.pipeline.data import (
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
from twinproof.pipeline.embeddings import EmbeddingBagCollection
from twinproof.pipeline.in_backward import apply_optimizer_in_backward
from twinproof.pipeline.processors import (
    FeatureProcessedEmbeddingBagCollection,
    FeatureProcessor,
    FeatureProcessorsCollection,
    PositionWeightedModule,
    PositionWeightedModuleCollection,
)
from twinproof.pipeline.schedules import (
    EvalPipelineFusedSparseDist,
    EvalPipelineSparseDist,
    PrefetchTrainPipelineSparseDist,
    TrainPipelineBase,
    TrainPipelineFusedSparseDist,
    TrainPipelineSemiSync,
    TrainPipelineSparseDist,
)
from twinproof.pipeline.sequences import EmbeddingCollection
from twinproof.pipeline.sharded import ShardedEmbeddingBagCollection
from twinproof.pipeline.sharded_base import ShardedContext
from twinproof.pipeline.state import TableShard

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
