"""The only module that touches ``torch.ops``: loads the library, registers fake kernels, types the operators.

``bag_ops`` is the part of it for table-batched embeddings, ``row_ops`` that for the row store.

Prevents callers that depend on how an operator is registered, and stale autograd views of what an operator wrote: boxed
operators do not bump version counters, so the wrappers do.

A *descriptor* says how part of a rectangle of a row-major tensor lies in a file, in int64 words ``[ndim, base, skip,
count, shape..., offsets..., sizes...]``. ``base`` is the file offset of the tensor, ``skip`` and ``count`` select bytes
of the rectangle, the innermost dimension counts bytes. Several descriptors may follow each other; the dense buffer then
holds their bytes one after the other.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

from fastimpl.bag_ops import (
    advise_huge_pages,
    bag_weight_gradients,
    bucketize,
    check_bag_ids,
    gather_blocks,
    mend_bag_ids,
    pool_bags,
    register_bag_fakes,
    step_bags,
)
from fastimpl.row_ops import KVFilling, KVHandle, file_read, register_row_fakes, row_keys, saved_rows_fit, sort_ids
from twinproof.optimizers import AdamHyper

__all__ = [
    "KVFilling",
    "KVHandle",
    "adam_step",
    "advise_huge_pages",
    "available",
    "bag_weight_gradients",
    "bucketize",
    "check_bag_ids",
    "cuda_operators",
    "file_read",
    "gather_blocks",
    "library_path",
    "mend_bag_ids",
    "pack",
    "pool_bags",
    "rect_place",
    "rect_read",
    "rect_take",
    "row_keys",
    "saved_rows_fit",
    "sort_ids",
    "step_bags",
    "strided_gather",
    "strided_scatter",
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


def _warn_if_untested() -> None:
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if not _TESTED[0] <= version <= _TESTED[1]:
        tested = " to ".join(".".join(map(str, v)) for v in _TESTED)
        warnings.warn(f"twinproof is tested on torch {tested}; this is {torch.__version__}", stacklevel=3)


@functools.cache
def available() -> bool:
    """Load the library once; False, with one warning, where it was not built."""
    path = library_path()
    if path is None:
        reason = "no compiler, or FASTIMPL_BUILD=none"
        warnings.warn(f"fastimpl has no built library ({reason}): the reference is used", stacklevel=2)
        return False
    torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
    _warn_if_untested()
    for name in ("rect_place", "rect_take", "strided_gather", "strided_scatter", "adam_step", "pack", "unpack"):
        # These return nothing: under fake tensors there is nothing to make.
        torch.library.register_fake(f"twinproof::{name}", lambda *args: None)
    torch.library.register_fake("twinproof::rect_read", lambda file, dense, window, words: words.new_empty(3))
    register_row_fakes()
    register_bag_fakes()
    return True


def rect_place(window: torch.Tensor, window_start: int, dense: torch.Tensor, descriptors: torch.Tensor) -> None:
    """Copy dense bytes of rectangles to where they lie in a window of the file.

    Args:
        window: uint8 [n], CPU; file bytes ``window_start`` and on. Written.
        window_start: file offset of ``window[0]``.
        dense: uint8 [sum of counts].
        descriptors: int64, see the module.

    Raises:
        RuntimeError: shapes or descriptors that do not fit; nothing is written then.
    """
    torch.ops.twinproof.rect_place(window, window_start, dense, descriptors)
    torch.autograd.graph.increment_version(window)


def rect_take(window: torch.Tensor, window_start: int, dense: torch.Tensor, descriptors: torch.Tensor) -> None:
    """The inverse of ``rect_place``: ``dense`` is written."""
    torch.ops.twinproof.rect_take(window, window_start, dense, descriptors)
    torch.autograd.graph.increment_version(dense)


def rect_read(file: int, dense: torch.Tensor, window: torch.Tensor, descriptor: torch.Tensor) -> tuple[int, int, int]:
    """Read part of a rectangle from a file, gaps between its rows included, and keep the rectangle.

    Args:
        file: open file descriptor.
        dense: uint8 [count of the descriptor], CPU. Written.
        window: uint8 scratch; one read fills at most this much. Written.
        descriptor: int64, one descriptor; its base is a file offset.

    Returns:
        (status, calls, bytes): status is 0, an errno, or -1 where the file ends early.
    """
    status, calls, read_bytes = torch.ops.twinproof.rect_read(file, dense, window, descriptor).tolist()
    torch.autograd.graph.increment_version([dense, window])
    return status, calls, read_bytes


def strided_gather(source: torch.Tensor, start: int, dense: torch.Tensor) -> None:
    """Copy elements ``start`` and on, in row-major order, of a tensor of any strides into dense bytes.

    Args:
        source: any dtype of 1, 2, 4 or 8 bytes, at most 16 dimensions, CPU or CUDA.
        start: flat index of the first element.
        dense: uint8 [whole elements], same device. Written.
    """
    torch.ops.twinproof.strided_gather(source, start, dense)
    torch.autograd.graph.increment_version(dense)


def strided_scatter(target: torch.Tensor, start: int, dense: torch.Tensor) -> None:
    """The inverse of ``strided_gather``: ``target`` is written."""
    torch.ops.twinproof.strided_scatter(target, start, dense)
    torch.autograd.graph.increment_version(target)


def adam_step(
    hyper: AdamHyper,
    grads: Sequence[torch.Tensor],
    masters: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
    max_exp_avg_sqs: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    *,
    isa: int = -1,
) -> None:
    """One step of Adam or AdamW in one pass over host memory, to the bit that of ``twinproof.offload.adam``.

    Args:
        hyper: the same for all of them.
        grads: of the masters' shapes and strides, all float32, all bfloat16 or all float16, CPU.
        masters: float32, dense. Written.
        exp_avgs: float32. Written.
        exp_avg_sqs: float32. Written.
        max_exp_avg_sqs: float32, with amsgrad; else empty. Written.
        weights: of one dtype as the gradients are; get the masters, rounded to nearest even. Or empty. Written.
        isa: 0 plain, 1 AVX2, 2 AVX-512, -1 the best that this machine has; changes no bit.

    Raises:
        RuntimeError: lists that do not fit each other, or an ``isa`` that this machine lacks; nothing is written then.
    """
    if not masters:
        return
    lists = (masters, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, weights)
    torch.ops.twinproof.adam_step(grads, *lists, hyper.values, hyper.maximize, hyper.coupled, isa)
    for written in lists:
        torch.autograd.graph.increment_version(written)


def pack(sources: Sequence[torch.Tensor], slab: torch.Tensor, offsets: Sequence[int]) -> None:
    """Copy the bytes of many tensors into one slab: one call, on CUDA a launch for each 160 of them.

    Args:
        sources: dense, of any dtypes, CPU or one CUDA device.
        slab: uint8 [n], same device. Written.
        offsets: first byte of each tensor in the slab; ascending, apart.

    Raises:
        RuntimeError: tensors with gaps, on another device, or places that do not fit; nothing is written then.
    """
    torch.ops.twinproof.pack(sources, slab, offsets)
    torch.autograd.graph.increment_version(slab)


def unpack(targets: Sequence[torch.Tensor], slab: torch.Tensor, offsets: Sequence[int]) -> None:
    """The inverse of ``pack``: ``targets`` are written."""
    torch.ops.twinproof.unpack(targets, slab, offsets)
    torch.autograd.graph.increment_version(targets)
