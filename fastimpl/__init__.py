"""The speed: drop-in implementations in C++ and CUDA of what ``refimpl`` means.

Where the library was not built (``FASTIMPL_BUILD=none``) every component is the reference's, with one warning.
"""

from __future__ import annotations

from importlib import metadata
from typing import Any

from twinproof import errors
from twinproof.errors import *  # noqa: F403

__all__ = [*errors.__all__, "build_info"]

# CUDA operators that a GPU has run, each with evidence under perf/results; what is registered beside them is unproven.
_PROVEN_CUDA_OPS: frozenset[str] = frozenset()


def build_info() -> dict[str, Any]:
    """What was built and what it runs on; ``library`` is None in a pure-Python install.

    ``torch`` and ``torch_cuda`` name the torch of this process and its CUDA toolkit, None in a CPU build;
    ``cuda_stream_symbol`` says whether torch's current CUDA stream was found in it: without, no CUDA operator runs.
    ``unproven_cuda_ops`` is what torch's dispatcher has of ours for CUDA, less what a GPU has run. The build's own
    record follows: compilers, ``cuda_architectures``, flags, and the digest of the sources.
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
    try:
        info["version"] = metadata.version("twinproof")
    except metadata.PackageNotFoundError:
        info["version"] = None
    return info
