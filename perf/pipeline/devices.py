"""Whether the pipeline can be measured on a GPU here: one must be there, and so must the kernels."""

from __future__ import annotations

import torch

__all__ = ["gpu_kernels_missing", "reason_against_gpu"]

# What a step of table-wise tables on one rank calls.
_NEEDED = ("pipeline_settle_ids", "pipeline_pool", "pipeline_step")


def gpu_kernels_missing() -> list[str]:
    """Operators that the loaded library has no CUDA kernel for."""
    return [
        name for name in _NEEDED if not torch._C._dispatch_has_kernel_for_dispatch_key(f"twinproof::{name}", "CUDA")
    ]


def reason_against_gpu() -> str | None:
    """Why nothing can be measured on a GPU, or None."""
    if not torch.cuda.is_available():
        return "no GPU here"
    missing = gpu_kernels_missing()
    return f"no CUDA kernel of {', '.join(missing)}" if missing else None
