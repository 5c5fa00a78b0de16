"""The only module that touches ``torch.ops``: loads the library, registers fake kernels, types the operators.

Each component has a module of the same name with its operators; all are offered here.

Prevents callers that depend on how an operator is registered, and stale autograd views of what an operator wrote: boxed
operators do not bump version counters, so the wrappers do.

"""

from __future__ import annotations

import functools
import hashlib
import json
import warnings
from pathlib import Path
from typing import Any

import torch

from fastimpl.ops import checkpoint, kvstore, offload, pipeline
from fastimpl.ops.checkpoint import (
    crc32,
    crc32_between,
    dequantize_fp8,
    dequantize_mxfp4,
    place_rectangles,
    read_rectangle,
    strided_gather,
    strided_scatter,
    take_rectangles,
)
from fastimpl.ops.kvstore import KVFilling, KVHandle, file_read, row_keys, saved_rows_fit, sort_ids
from fastimpl.ops.offload import (
    SlabCounts,
    SlabFacts,
    adam_step,
    copy_all,
    copy_count,
    host_slab,
    pack,
    slab_counts,
    slab_facts,
    slot_step,
    unpack,
)
from fastimpl.ops.pipeline import (
    advise_huge_pages,
    bag_weight_gradients,
    bucketize,
    check_bag_ids,
    gather_blocks,
    mend_bag_ids,
    pool_bags,
    settle_bags,
    step_bags,
)
from twinproof.errors import ConfigError

__all__ = [
    "KVFilling",
    "KVHandle",
    "SlabCounts",
    "SlabFacts",
    "adam_step",
    "advise_huge_pages",
    "available",
    "bag_weight_gradients",
    "bucketize",
    "build_facts",
    "check_bag_ids",
    "copy_all",
    "copy_count",
    "crc32",
    "crc32_between",
    "cuda_operators",
    "dequantize_fp8",
    "dequantize_mxfp4",
    "file_read",
    "gather_blocks",
    "host_slab",
    "knows_cuda_stream",
    "library_path",
    "mend_bag_ids",
    "pack",
    "place_rectangles",
    "pool_bags",
    "read_rectangle",
    "refuse_if_stale",
    "row_keys",
    "saved_rows_fit",
    "settle_bags",
    "slab_counts",
    "slab_facts",
    "slot_step",
    "sort_ids",
    "sources_digest",
    "step_bags",
    "strided_gather",
    "strided_scatter",
    "take_rectangles",
    "unpack",
]

_LIBRARY = "libfastimpl_ops.so"
_TESTED = ((2, 11), (2, 13))


def library_path() -> Path | None:
    """The built library, or None. Wheels and editable installs put it in different entries of the package's path."""
    import fastimpl

    found = [Path(folder) / _LIBRARY for folder in fastimpl.__path__]
    return next((path for path in found if path.exists()), None)


def cuda_operators() -> list[str]:
    """Names of our operators that have a CUDA kernel; none in a build without CUDA."""
    if not available():
        return []
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("twinproof::")]
    with_cuda = [name for name in names if torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA")]
    return sorted(name.removeprefix("twinproof::").split(".")[0] for name in with_cuda)


def knows_cuda_stream() -> bool:
    """Whether torch's current CUDA stream can be asked for: in every build of torch with CUDA, a GPU or none."""
    return available() and bool(torch.ops.twinproof.common_stream_symbol())


def build_facts() -> dict[str, Any]:
    """What the build wrote beside the library: versions, architectures, flags, and the digest of its sources."""
    path = library_path()
    facts = path.with_name("build_info.json") if path is not None else None
    if facts is None or not facts.exists():
        return {}
    found: dict[str, Any] = json.loads(facts.read_text(encoding="utf-8"))
    return found


def sources_digest(folder: Path) -> str | None:
    """Digest of the sources that a library is built from, as ``CMakeLists.txt`` computes it; None where there are none.

    Args:
        folder: ``fastimpl/csrc`` of a tree or of an installation.
    """
    wanted = (".cpp", ".cu", ".cuh", ".h")
    files = {
        path.relative_to(folder).as_posix(): path
        for path in folder.rglob("*")
        if path.suffix in wanted or path.name == "CMakeLists.txt"
    }
    # CMake sorts by bytes.
    names = sorted((name for name in files if not name.startswith("tests/")), key=str.encode)
    lines = [f"{name} {hashlib.sha256(files[name].read_bytes()).hexdigest()}\n" for name in names]
    return hashlib.sha256("".join(lines).encode()).hexdigest() if lines else None


def refuse_if_stale(library: Path) -> None:
    """A library runs beside the sources that it was built from, or beside none: another would judge code not seen.

    Raises:
        ConfigError: the sources in the package's ``csrc`` are others, or the build left no record of its own.
    """
    import fastimpl

    digests = [sources_digest(Path(folder) / "csrc") for folder in fastimpl.__path__]
    expected = next((digest for digest in digests if digest is not None), None)
    got = build_facts().get("sources")
    if expected is not None and got != expected:
        raise ConfigError(
            "the library was built from other sources: build it again",
            got=f"sources {got or 'not recorded'} in build_info.json",
            expected=f"sources {expected}",
            where=str(library),
        )


def _warn_if_untested() -> None:
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if not _TESTED[0] <= version <= _TESTED[1]:
        tested = " to ".join(".".join(map(str, v)) for v in _TESTED)
        warnings.warn(f"twinproof is tested on torch {tested}; this is {torch.__version__}", stacklevel=3)


@functools.cache
def available() -> bool:
    """Load the library once; False, with one warning, where it was not built.

    Raises:
        ConfigError: the library is older than the sources beside it.
    """
    path = library_path()
    if path is None:
        reason = "no compiler, or FASTIMPL_BUILD=none"
        warnings.warn(f"fastimpl has no built library ({reason}): the reference is used", stacklevel=2)
        return False
    refuse_if_stale(path)
    torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
    _warn_if_untested()
    checkpoint.register_fakes()
    offload.register_fakes()
    kvstore.register_fakes()
    pipeline.register_fakes()
    return True
