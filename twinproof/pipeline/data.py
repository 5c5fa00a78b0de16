"""Jagged batches by feature, and pooled columns by feature: torchrec's three types, as nodes of pytrees too."""

from twinproof.pipeline import trees as _trees
from twinproof.pipeline.equality import ComputeJTDictToKJT, ComputeKJTToJTDict, jt_is_equal, kjt_is_equal
from twinproof.pipeline.jagged_tensor import JaggedTensor
from twinproof.pipeline.keyed_jagged import KeyedJaggedTensor
from twinproof.pipeline.keyed_tensor import KeyedTensor, permute_multi_embedding, regroup_kts

__all__ = [
    "ComputeJTDictToKJT",
    "ComputeKJTToJTDict",
    "JaggedTensor",
    "KeyedJaggedTensor",
    "KeyedTensor",
    "jt_is_equal",
    "kjt_is_equal",
    "permute_multi_embedding",
    "regroup_kts",
]

assert _trees is not None
