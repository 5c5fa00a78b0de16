"""The speed: drop-in implementations in C++ and CUDA of what ``refimpl`` means.

Where the library was not built (``FASTIMPL_BUILD=none``) every component is the reference's, with one warning.
"""

from __future__ import annotations

from importlib import metadata
from typing import Any

from twinproof import errors
from twinproof.errors import *  # noqa: F403

__all__ = [*errors.__all__, "build_info"]

# The digest of the sources that a GPU has run, an H200 with torch 2.11, and the CUDA operators of theirs that it ran.
# Each has evidence under perf/results; what is registered beside them is unproven.
_RAN_SOURCES = "7683f8f813f5363e041b8a5753c10d7464078bcda035418d7eb9599979c23889"
_PROVEN_CUDA_OPS: frozenset[str] = frozenset(
    (
        "checkpoint_gather",
        "checkpoint_scatter",
        "kvstore_begin_round",
        "kvstore_changes",
        "kvstore_clear",
        "kvstore_close",
        "kvstore_contains",
        "kvstore_create",
        "kvstore_delete",
        "kvstore_evict",
        "kvstore_fail_after",
        "kvstore_ids",
        "kvstore_mark",
        "kvstore_prefetch",
        "kvstore_read",
        "kvstore_reserve",
        "kvstore_size",
        "kvstore_snapshot",
        "kvstore_stats",
        "kvstore_update",
        "kvstore_write",
        "kvstore_write_metadata",
        "kvstore_write_rows",
        "offload_copy",
        "offload_pack",
        "offload_slot_step",
        "offload_unpack",
        "pipeline_bucketize",
        "pipeline_check_ids",
        "pipeline_gather_blocks",
        "pipeline_mend_ids",
        "pipeline_pool",
        "pipeline_settle_ids",
        "pipeline_step",
        "pipeline_weight_gradients",
    )
)


def build_info() -> dict[str, Any]:
    """What was built and what it runs on; ``library`` is None in a pure-Python install.

    ``torch`` and ``torch_cuda`` name the torch of this process and its CUDA toolkit, None in a CPU build;
    ``cuda_stream_symbol`` says whether torch's current CUDA stream was found in it: without, no CUDA operator runs.
    ``unproven_cuda_ops`` is what torch's dispatcher has of ours for CUDA, less what a GPU has run;
    ``cuda_ops_ran_on`` is the digest of the sources that it ran, to be held beside ``sources``. The build's own record
    follows: compilers, ``cuda_architectures``, flags, and the digest of the sources.
    """
    import torch

    from fastimpl import ops

    library = ops.library_path()
    unproven = sorted(set(ops.cuda_operators()) - _PROVEN_CUDA_OPS)
    info: dict[str, Any] = {"library": library.name if library else None, "unproven_cuda_ops": unproven}
    info |= {
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "cuda_stream_symbol": ops.knows_cuda_stream(),
    }
    info |= ops.build_facts()
    info["cuda_ops_ran_on"] = _RAN_SOURCES
    try:
        info["version"] = metadata.version("twinproof")
    except metadata.PackageNotFoundError:
        info["version"] = None
    return info
