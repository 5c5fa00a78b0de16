"""The speed: drop-in implementations in C++ and CUDA of what ``refimpl`` means.

Where the library was not built (``FASTIMPL_BUILD=none``) every component is the reference's, with one warning.
"""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Any

__all__ = ["build_info"]

# CUDA operators that no GPU has run yet; an operator leaves the list with evidence under perf/results.
UNPROVEN_CUDA_OPS = (
    "bag_weight_gradients",
    "pack",
    "pool_bags",
    "step_bags",
    "strided_gather",
    "strided_scatter",
    "unpack",
)


def build_info() -> dict[str, Any]:
    """Versions, architectures and flags of the built library; ``library`` is None in a pure-Python install."""
    from fastimpl import ops

    library = ops.library_path()
    info: dict[str, Any] = {"library": library.name if library else None, "unproven_cuda_ops": list(UNPROVEN_CUDA_OPS)}
    for folder in (Path(p) for p in __path__):
        if (folder / "build_info.json").exists():
            info |= json.loads((folder / "build_info.json").read_text())
    try:
        info["version"] = metadata.version("twinproof")
    except metadata.PackageNotFoundError:
        info["version"] = None
    return info
