"""Key -> whole row: metaheader, weight and optimizer state, in plain PyTorch.

The meaning of ``fastimpl.kvstore``: the same names, the same bytes. Layout, configuration, argument checks, buckets,
views, checkpoint policy and modules live here once and are shared.
"""

from twinproof.kvstore.background import BackgroundEvictor
from twinproof.kvstore.buckets import Buckets, bucket_of, rank_buckets, sort_ids_by_bucket
from twinproof.kvstore.config import EvictionPolicy, EvictionStats, Initializer, StoreStats
from twinproof.kvstore.files import LoadReport, SaveReport, load, save
from twinproof.kvstore.layout import Header, RowLayout, StateSlot, pack_header, unpack_header
from twinproof.kvstore.modules import KVEmbedding, KVEmbeddingBag
from twinproof.kvstore.planners import KVLoadPlanner
from twinproof.kvstore.saved import SavedRows
from twinproof.kvstore.store import KVStore
from twinproof.kvstore.views import KVTensor
from twinproof.kvstore.wrapper import KVTensorWrapper

# What the suite may ask beyond the contract: the reference is one lock around a dictionary.
CAPABILITIES: frozenset[str] = frozenset()

__all__ = [
    "BackgroundEvictor",
    "Buckets",
    "EvictionPolicy",
    "EvictionStats",
    "Header",
    "Initializer",
    "KVEmbedding",
    "KVEmbeddingBag",
    "KVLoadPlanner",
    "KVStore",
    "KVTensor",
    "KVTensorWrapper",
    "LoadReport",
    "RowLayout",
    "SaveReport",
    "SavedRows",
    "StateSlot",
    "StoreStats",
    "bucket_of",
    "load",
    "pack_header",
    "rank_buckets",
    "save",
    "sort_ids_by_bucket",
    "unpack_header",
]
