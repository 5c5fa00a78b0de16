"""Key -> whole row in C++: sharded maps with SIMD probing over a dense pool of 64-byte aligned rows.

Meaning: ``refimpl.kvstore``, whose layout, checks, views, checkpoint policy and modules are used as they are.
"""

from typing import TYPE_CHECKING

from fastimpl import ops
from refimpl.kvstore import (
    BackgroundEvictor,
    Buckets,
    EvictionPolicy,
    EvictionStats,
    Header,
    Initializer,
    KVEmbedding,
    KVLoadPlanner,
    KVTensor,
    KVTensorWrapper,
    LoadReport,
    RowLayout,
    SavedRows,
    SaveReport,
    StateSlot,
    StoreStats,
    bucket_of,
    pack_header,
    rank_buckets,
    unpack_header,
)

if TYPE_CHECKING or ops.available():
    from fastimpl.kvstore.buckets import sort_ids_by_bucket
    from fastimpl.kvstore.files import load, save
    from fastimpl.kvstore.modules import KVEmbeddingBag
    from fastimpl.kvstore.store import KVStore
else:
    from refimpl.kvstore import KVEmbeddingBag, KVStore, load, save, sort_ids_by_bucket

# What the suite may ask beyond the contract; without the library this is the reference, which promises none of it.
CAPABILITIES = frozenset(
    {"injected_allocation_failure", "large_batches", "operators", "shared_readers", "streamed_saves"}
    if ops.available()
    else ()
)

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
