"""Faults where the component meets what is around it: numpy, placements, the dispatcher, the command line."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from conformance.checkpoint.planted.making import both, fast, nothing
from conformance.harness import swap, wrap


def _needs_numpy(original: Callable[..., bytes], *arguments: Any) -> bytes:
    importlib.import_module("numpy")
    return original(*arguments)


@contextmanager
def _without_alias_marks() -> Iterator[None]:
    """An operator of the same behaviour whose schema does not say that it writes."""
    # torch's own stubs lack types here.
    library: Any = torch.library.Library("twinproof_planted", "FRAGMENT")  # type: ignore[no-untyped-call]
    try:
        library.define("checkpoint_place(Tensor window, int start, Tensor dense, Tensor words) -> ()")
        library.impl("checkpoint_place", torch.ops.twinproof.checkpoint_place.default, "CPU")
        torch.library.register_fake("twinproof_planted::checkpoint_place", lambda *arguments: None, lib=library)
        with swap("torch:ops.twinproof.checkpoint_place", torch.ops.twinproof_planted.checkpoint_place):
            yield
    finally:
        library._destroy()


def _always_zero(original: Callable[..., int], *arguments: Any) -> int:
    original(*arguments)
    return 0


PLANTED = (
    fast(
        "cuda_copies_not_awaited",
        "Pinned buffers are read before their copies ended.",
        ("CKPT-110",),
        swap("fastimpl.checkpoint.device_copies:CudaCopies.wait", nothing),
    ),
    both(
        "numpy_needed",
        "The index is built with numpy, which need not be installed.",
        ("CKPT-082",),
        wrap("twinproof.checkpoint.dcp:build_index", _needs_numpy),
    ),
    both(
        "partial_taken_as_whole",
        "A partial sum is stored as if it were the value.",
        ("CKPT-029",),
        # torch itself refuses it; an implementation that brings planning of its own has to, too.
        swap("torch.distributed.tensor:DTensor._raise_if_contains_partial_placements", nothing),
    ),
    fast(
        "write_not_in_schema",
        "The schema of an operator does not say which tensor it writes.",
        ("CKPT-103",),
        _without_alias_marks,
    ),
    fast(
        "exit_status_always_zero",
        "The command line ends with 0 whatever it found.",
        ("CKPT-107",),
        wrap("fastimpl.checkpoint.__main__:main", _always_zero),
    ),
)
