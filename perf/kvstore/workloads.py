"""The shapes of the row store's bench: [rows of a batch, words of a row], ``tensor_count`` batches in all.

288 bytes are 64 weights in fp32, the metaheader and the state of row-wise Adagrad.
"""

from functools import partial

from perf.harness.workloads import Workload

__all__ = ["WORKLOADS"]

_GETS = ("ours", "gather", "torch")
_COPIES = (*_GETS, "copy", "memcpy")
_SETS = ("ours", "copy", "torch")
_READERS = ("ours", "gather", "locked", "one")
_SORTS = ("ours", "map", "torch")
_DATABASES = ("ours", "dict", "lmdb", "lmdb-batch", "rocksdb", "rocksdb-batch")

_kvstore = partial(Workload, component="kvstore", round_count=7)
_get = partial(Workload, component="kvstore", job="get", round_count=7)
# Two million rows of 288 bytes.
_288 = partial(Workload, component="kvstore", round_count=7, shape=(1_000_000, 72), tensor_count=2)
_short = partial(Workload, component="kvstore", round_count=6, shape=(100_000, 72), tensor_count=8)
_databases = partial(
    Workload, component="kvstore", shape=(262_144, 72), tensor_count=8, round_count=5, contenders=_DATABASES
)
_overhead = partial(
    Workload, component="kvstore", job="overhead", tensor_count=8, round_count=3, contenders=("ours", "dict")
)
_kernel = partial(Workload, component="kvstore", round_count=15, contenders=("ours", "copy", "four-times"))

WORKLOADS = (
    _get("kv-get-88-1e6", shape=(1_000_000, 22), tensor_count=2, contenders=_COPIES),
    _get("kv-get-152-1e6", shape=(1_000_000, 38), tensor_count=2, contenders=_COPIES),
    _288("kv-get-288-1e6", job="get", contenders=_COPIES),
    _get("kv-get-544-1e6", shape=(1_000_000, 136), tensor_count=2, contenders=_COPIES),
    _get("kv-get-1056-1e6", shape=(1_000_000, 264), contenders=_COPIES),
    _get("kv-get-288-1e5", shape=(100_000, 72), tensor_count=4, round_count=15, contenders=(*_COPIES, "by-ten")),
    _288("kv-get-zipf-288-1e6", job="get-zipf", contenders=_COPIES),
    _get("kv-get-288-3e4", shape=(31_250, 72), tensor_count=64, round_count=15, contenders=(*_GETS, "one-by-one")),
    _get("kv-get-288-1e3", shape=(1000, 72), tensor_count=2000, round_count=31, contenders=(*_GETS, "one-by-one")),
    _get("kv-get-544-262144", shape=(262_144, 136), tensor_count=8, round_count=9, contenders=(*_GETS, "copy")),
    _get("kv-get-1056-262144", shape=(262_144, 264), tensor_count=8, contenders=(*_GETS, "copy")),
    _get("kv-get-1552-262144", shape=(262_144, 388), tensor_count=6, contenders=(*_GETS, "copy")),
    _288("kv-set-288-1e6", job="set", contenders=_SETS),
    _kvstore("kv-set-1056-262144", job="set", shape=(262_144, 264), tensor_count=8, contenders=_SETS),
    _288("kv-set-fresh-288-2e6", job="set-fresh", contenders=("ours", "unreserved", "touched", "fresh", "torch")),
    # 14 MB of rows: inside a large L3 cache.
    _kvstore("kv-readers-288-5e4", job="read-together", shape=(10_000, 72), tensor_count=5, contenders=_READERS),
    _kvstore("kv-readers-288-2e6", job="read-together", shape=(100_000, 72), tensor_count=20, contenders=_READERS),
    _288("kv-save-288-2e6", job="save", round_count=5, contenders=("ours", "separate", "gathered", "plain")),
    _288("kv-load-288-2e6", job="load", round_count=5, contenders=("ours", "applied", "fresh")),
    # The short form's: 115 MB of rows or 230, beyond every cache.
    _short("kv-set-288-1e5", job="set", tensor_count=4, contenders=("ours", "copy", "by-ten")),
    _short("kv-save-288-8e5", job="save", contenders=("ours", "gathered", "plain")),
    _short("kv-load-288-8e5", job="load", contenders=("ours", "applied", "fresh")),
    # [ids, buckets].
    _kvstore("kv-sort-1e7", job="sort", shape=(10_000_000, 100), round_count=5, contenders=_SORTS),
    _kvstore("kv-sort-1e7-10000", job="sort", shape=(10_000_000, 10_000), round_count=5, contenders=_SORTS),
    _kvstore("kv-sort-1e6", job="sort", shape=(1_000_000, 100), contenders=("ours", "torch")),
    # Grown batch by batch, never reserved.
    _overhead("kv-overhead-288-2e6", shape=(250_000, 72)),
    _overhead("kv-overhead-288-5e5", shape=(62_500, 72)),
    _databases("kv-get-288-databases", job="get-databases"),
    _databases("kv-set-288-databases", job="set-databases"),
    # A store on a GPU: 16 million rows of 256 bytes, or 4 million of 1056.
    _kernel("gpu-kernel-get-256", job="gpu-kernel-get", shape=(1_000_000, 64), tensor_count=16),
    _kernel("gpu-kernel-get-1056", job="gpu-kernel-get", shape=(500_000, 264), tensor_count=8),
    _kernel("gpu-kernel-export-256", job="gpu-kernel-export", shape=(1_000_000, 64), tensor_count=4),
    _kernel("gpu-kernel-insert-256", job="gpu-kernel-insert", shape=(250_000, 64), tensor_count=16),
    _kernel("gpu-kernel-host-256", job="gpu-kernel-host", shape=(1_000_000, 64), tensor_count=4),
)
