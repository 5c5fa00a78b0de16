"""The speed: drop-in implementations in C++ and CUDA of what ``refimpl`` means.

Where the library was not built (``FASTIMPL_BUILD=none``) every component is the reference's, with one warning.
"""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Any

from twinproof import errors
from twinproof.errors import *  # noqa: F403

__all__ = [*errors.__all__, "build_info"]

# CUDA operators that a GPU has run, each with evidence under perf/results; what is registered beside them is unproven.
_PROVEN_CUDA_OPS: frozenset[str] = frozenset()


def build_info() -> dict[str, Any]:
    """Versions, architectures and flags of the built library; ``library`` is None in a pure-Python install.

    ``unproven_cuda_ops`` is what torch's dispatcher has of ours for CUDA, less what a GPU has run.
    """
    from fastimpl import ops

    library = ops.library_path()
    unproven = sorted(set(ops.cuda_operators()) - _PROVEN_CUDA_OPS)
    info: dict[str, Any] = {"library": library.name if library else None, "unproven_cuda_ops": unproven}
    for folder in map(Path, __path__):  # noqa: F405
        if (folder / "build_info.json").exists():
            info |= json.loads((folder / "build_info.json").read_text())
    try:
        info["version"] = metadata.version("twinproof")
    except metadata.PackageNotFoundError:
        info["version"] = None
    return info
