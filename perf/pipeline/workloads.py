"""The shapes of the pipeline's bench: [rows of a table, dim], ``tensor_count`` tables."""

from functools import partial

from perf.harness.workloads import Workload

__all__ = ["WORKLOADS"]

_KERNELS = ("ours", "fbgemm", "one-thread")
_READ = ("ours", "one-thread", "read")
_BOTH_FBGEMM = ("ours", "fbgemm", "fbgemm-plain", "one-thread")
_SCHEDULES = (
    "semi-sync",
    *(f"fused:{when}" for when in ("data_dist", "current", "new")),
    *(f"fused-before-optimizer:{when}" for when in ("data_dist", "current", "new")),
    "sparse-dist",
    "base",
)
_SAVINGS = (
    *("fused:data_dist", "sparse-dist", "blocking", "one-stream", "two-streams"),
    *("saved", "saved-by-blocking", "hideable", "idle"),
)

_pipeline = partial(Workload, component="pipeline")
_train = partial(Workload, component="pipeline", shape=(1_000_000, 128), tensor_count=4, round_count=13)
_train_torch = partial(
    Workload, component="pipeline", job="train-adagrad", tensor_count=4, contenders=("ours", "torch")
)
_sparse_nn = partial(Workload, component="pipeline", shape=(50_000, 64), tensor_count=20, rank_count=2, round_count=9)
_seed_table = partial(Workload, component="pipeline", job="seed-table", tensor_count=20, rank_count=2, round_count=2)
_config = partial(
    Workload, component="pipeline", shape=(100_000, 128), tensor_count=100, round_count=3, contenders=_SAVINGS
)
_kernel = partial(
    Workload,
    component="pipeline",
    shape=(1_000_000, 128),
    tensor_count=8,
    round_count=15,
    contenders=("ours", "copy", "four-times"),
)

WORKLOADS = (
    # Training steps of table-batched embeddings: a batch has 4096 bags of each table, of 20 ids or of one; all tables
    # are in the caller's memory, ids are new in every run.
    _train("train-sgd-128", job="train-sgd", contenders=_BOTH_FBGEMM),
    _train("train-adagrad-128", job="train-adagrad", contenders=_BOTH_FBGEMM),
    _train("train-rowwise-128", job="train-rowwise", contenders=(*_BOTH_FBGEMM, "read")),
    _train("train-rowwise-half-128", job="train-rowwise-half", contenders=(*_BOTH_FBGEMM, "read")),
    _train("train-rowwise-zipf-128", job="train-rowwise-zipf", contenders=_KERNELS),
    _train("train-rowwise-one-128", job="train-rowwise-one", round_count=31, contenders=_KERNELS),
    _train("train-rowwise-8", job="train-rowwise", shape=(1_000_000, 8), round_count=21, contenders=_KERNELS),
    _train("train-rowwise-16", job="train-rowwise", shape=(1_000_000, 16), round_count=21, contenders=_KERNELS),
    _train("train-rowwise-512", job="train-rowwise", shape=(250_000, 512), contenders=(*_KERNELS, "read")),
    _train_torch("train-adagrad-128-torch", shape=(250_000, 128), round_count=9),
    _train_torch("train-adagrad-128-small", shape=(50_000, 128), tensor_count=2, round_count=7),
    _train("train-rowwise-128-small", job="train-rowwise", shape=(100_000, 128), contenders=_READ),
    # SparseNN on 2 ranks: 20 tables, 1024 samples a rank, 10 ids a bag on average, table-wise, Adagrad in the tables
    # and SGD beside them as in the benchmark of torchrec PR 2916; the same with row-wise Adagrad; and 4 samples of 2
    # tables on one rank, where the host's own work is nearly all there is.
    _sparse_nn(
        "sparse-nn-20x50k",
        job="sparse-nn",
        contenders=("ours", "torchrec", "fused", "sparse-dist", "torchrec-sparse-dist"),
    ),
    _sparse_nn(
        "sparse-nn-20x50k-rowwise",
        job="sparse-nn-rowwise",
        contenders=("ours", "torchrec", "fused", "torchrec-sparse-dist", "read-tables", "reference"),
    ),
    _pipeline(
        "sparse-nn-tiny",
        job="sparse-nn-tiny",
        shape=(64, 8),
        tensor_count=2,
        round_count=15,
        contenders=("ours", "fused", "torchrec", "torchrec-sparse-dist"),
    ),
    # The table of torchrec PR 2916: its model at its own size, 82 GB of tables and states, on one GPU; and one that any
    # CPU holds. A round has ten steps of each schedule.
    _pipeline(
        "seed-table-gpu-200x100k",
        job="seed-table-gpu",
        shape=(100_000, 512),
        tensor_count=200,
        round_count=2,
        contenders=(*_SCHEDULES, "hoarder"),
    ),
    _seed_table("seed-table-20x20k", shape=(20_000, 64), round_count=5, contenders=_SCHEDULES),
    _seed_table("seed-table-20x2k", shape=(2000, 64), contenders=("semi-sync", "fused:data_dist", "sparse-dist")),
    # A dense optimizer that is worth hiding, one that is bound by memory as the lookup is, and a step that is too short
    # for its host.
    _config("gpu-config-a-100x100k", job="gpu-config-a"),
    _config("gpu-config-b-100x100k", job="gpu-config-b"),
    _config("gpu-config-c-100x100k", job="gpu-config-c"),
    # Operators of a lookup on a GPU: 8192 bags of each table, of 20 ids, or 163,840 of one; far more rows than a cache
    # holds.
    _kernel("gpu-kernel-pool-128", job="gpu-kernel-pool"),
    _kernel("gpu-kernel-pool-float16-128", job="gpu-kernel-pool-float16"),
    _kernel("gpu-kernel-pool-bfloat16-128", job="gpu-kernel-pool-bfloat16"),
    _kernel("gpu-kernel-pool-one-128", job="gpu-kernel-pool-one"),
    _kernel("gpu-kernel-step-128", job="gpu-kernel-step"),
    # A step on the pretend device: 4 tables without weights and 4 with, 16 samples. Counts do not depend on sizes.
    *(
        _pipeline(
            f"{job}-8x200",
            job=job,
            shape=(200, 16),
            tensor_count=8,
            round_count=1,
            contenders=("base", "sparse-dist", "fused", "semi-sync", "careless"),
        )
        for job in ("pretend-step", "pretend-mixed-step")
    ),
    _pipeline(
        "host-calls-16x20",
        job="host-calls",
        shape=(20, 8),
        tensor_count=16,
        round_count=1,
        contenders=("base", "sparse-dist", "fused", "semi-sync", "careless"),
    ),
)
