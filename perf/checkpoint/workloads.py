"""The shapes of the checkpoint bench: tensors of fp32, over files, by ranks that divide ``shard_dim``."""

from functools import partial

from perf.harness.workloads import Workload

__all__ = ["WORKLOADS"]

_16_MIB = (4096, 1024)
_4_MIB = (1024, 1024)
_TWO = ("ours", "torch")
_FOUR = ("ours", "ours-best", "torch", "torch-best")
_COUNTED = ("ours", "ours-64k", "torch", "plain", "mapped")
_LOADERS = ("ours", "safetensors", "fastsafetensors", "runai", "mapped", "plain", "by-128")
_PLANNED = ("ours@8", "ours@64", "torch@8", "torch@64")
_QUADRATIC = ("quadratic@8", "quadratic@64")

_LINEAR = ("ours@pp2-fsdp8-tp4", "ours@fsdp4-tp2", "quadratic@pp2-fsdp8-tp4", "quadratic@fsdp4-tp2")


def _placed(placement: str) -> tuple[str, ...]:
    return tuple(f"{who}@{placement}" for who in ("ours", "torch", "rank0", "formula"))


_save = partial(Workload, component="checkpoint", job="save", file_count=4, rank_count=2, shape=_16_MIB, round_count=3)
# One file, so that torch's growth shows at this size.
_save_memory = partial(
    Workload, component="checkpoint", job="save", shape=_4_MIB, rank_count=2, round_count=1, contenders=_TWO
)
_count = partial(Workload, component="checkpoint", job="count", file_count=4, rank_count=2, round_count=1)
_load = partial(Workload, component="checkpoint", job="load", file_count=4, rank_count=2, shape=_16_MIB)
_load_fresh = partial(Workload, component="checkpoint", job="load-fresh", contenders=_LOADERS)
_load_fp8 = partial(Workload, component="checkpoint", job="load-fp8", tensor_count=2, contenders=_TWO)
_load_mxfp4 = partial(
    Workload, component="checkpoint", job="load-mxfp4", tensor_count=2, contenders=("ours", "plain", "reference")
)
_consolidate = partial(
    Workload, component="checkpoint", job="consolidate", file_count=4, rank_count=2, shape=_16_MIB, round_count=3
)
_open = partial(Workload, component="checkpoint", job="open", contenders=_TWO)
_plan = partial(Workload, component="checkpoint", job="plan", shape=_16_MIB, round_count=3)
# Stands for as many bytes as the model has, in tensors of the size of an expert's.
_scale = partial(Workload, component="checkpoint", job="scale", shape=(7168, 1024), round_count=1)

WORKLOADS = (
    # 128 tensors of 16 MiB over 4 files, by 2 ranks.
    _save("save-rows-2gib", tensor_count=128, contenders=(*_FOUR, "plain")),
    _save("save-rows-256mib", tensor_count=16, contenders=(*_FOUR, "plain")),
    # Runs of 2 KiB.
    _save("save-columns-2gib", tensor_count=128, shard_dim=1, contenders=_FOUR),
    # Runs of 4 bytes. Torch needs three quarters of a minute for each save.
    _save("save-4-byte-runs-64mib", shape=(8_388_608, 2), file_count=1, shard_dim=1, contenders=_TWO),
    # The second is four times the first.
    _save_memory("save-columns-64mib-1-file", tensor_count=16, shard_dim=1),
    _save_memory("save-columns-256mib-1-file", tensor_count=64, shard_dim=1),
    # What CI counts on.
    _save("save-rows-64mib", shape=(2048, 1024), tensor_count=8, round_count=1, contenders=_TWO),
    # Every write counted below libc, where sockets and what a writer says of itself do not count. Runs of columns are
    # longer here, so that the record of a control that writes each of them stays short.
    _count("count-rows-256mib", shape=_16_MIB, tensor_count=16, contenders=_COUNTED),
    _count("count-rows-64mib", shape=(2048, 1024), tensor_count=8, contenders=_COUNTED),
    _count("count-columns-256mib", shape=(128, 32_768), tensor_count=16, shard_dim=1, contenders=_COUNTED),
    _count("count-columns-64mib", shape=(64, 32_768), tensor_count=8, shard_dim=1, contenders=_COUNTED),
    _count("count-4-byte-runs-64mib", shape=(8_388_608, 2), file_count=1, shard_dim=1, contenders=("ours", "ours-64k")),
    _count("count-4-byte-runs-2mib", shape=(262_144, 2), file_count=1, shard_dim=1, contenders=("ours", "ours-64k")),
    _load("load-rows-2gib", tensor_count=128, round_count=7, contenders=(*_TWO, "plain", "by-page")),
    _load("load-columns-2gib", tensor_count=128, shard_dim=1, round_count=5, contenders=_TWO),
    _load("load-rows-256mib", tensor_count=16, round_count=3, contenders=(*_TWO, "plain-dcp", "by-512")),
    _load("load-rows-256mib-1-file", shape=_4_MIB, tensor_count=64, file_count=1, round_count=1, contenders=_TWO),
    # Into memory that the load makes: one file, and 32.
    _load_fresh("load-1-file-512mib", shape=_16_MIB, tensor_count=32, round_count=11),
    _load_fresh("load-1-file-64mib", shape=_4_MIB, tensor_count=16, round_count=11),
    _load_fresh("load-32-files-512mib", shape=_4_MIB, tensor_count=128, file_count=32, round_count=11),
    # The matrices of DeepSeek-V3's experts; the short forms are an eighth of them.
    _load_fp8("load-fp8-112mib", shape=(7168, 2048), round_count=7),
    _load_fp8("load-fp8-14mib", shape=(896, 2048), round_count=9),
    _load_mxfp4("load-mxfp4-112mib", shape=(7168, 2048), round_count=7),
    _load_mxfp4("load-mxfp4-28mib", shape=(1792, 2048), round_count=9),
    _consolidate("consolidate-rows-2gib", tensor_count=128, round_count=5, contenders=(*_FOUR, "plain", "by-page")),
    _consolidate("consolidate-rows-256mib", tensor_count=16, contenders=_FOUR),
    _consolidate("consolidate-columns-2gib", tensor_count=128, shard_dim=1, contenders=_FOUR),
    # A folder that 64 ranks wrote: every tensor has a row in each of the 64 files.
    _open("open-2000x64", shape=(64, 2), tensor_count=2000, file_count=64, round_count=5),
    _open("open-500x16", shape=(16, 2), tensor_count=500, file_count=16, round_count=6),
    # Planning: ranks are simulated in one process, and their number is the contender's suffix.
    _plan(
        "plan-1000-large",
        tensor_count=1000,
        contenders=("ours@64", "ours@512", "torch@64", "torch@512", "torch-pickled@512", *_QUADRATIC),
    ),
    _plan("plan-1000", tensor_count=1000, contenders=(*_PLANNED, "torch-pickled@8", "torch-pickled@64", *_QUADRATIC)),
    _plan("plan-200", tensor_count=200, round_count=1, contenders=_PLANNED),
    # Planning for a model of 671 billion parameters on 512 ranks, and for one of 14 billion on 64 and 8; the placement
    # is the contender's suffix.
    _scale("scale-512", tensor_count=45_710, contenders=(*_placed("pp8-ep8-fsdp8"), *_placed("pp4-fsdp16-tp8"))),
    _scale("scale-64", tensor_count=948, contenders=(*_placed("pp2-ep4-fsdp8"), *_placed("pp2-fsdp8-tp4"))),
    _scale("scale-linear-512", tensor_count=45_710, round_count=3, contenders=("ours@pp4-fsdp16-tp8", *_LINEAR)),
    _scale("scale-linear-64", tensor_count=948, round_count=6, contenders=_LINEAR),
    # A GPU's own: 1 GiB in 64 tensors, in the blocks in which a save writes them. Prediction: 0.9 of one pinned copy; a
    # pageable copy takes three times as long.
    Workload(
        "checkpoint-gpu-stage-1gib",
        component="checkpoint",
        job="gpu_stage",
        shape=_16_MIB,
        tensor_count=64,
        round_count=9,
        contenders=("ours", "copy", "loop"),
    ),
)
