"""Faults that ``test_ops`` must notice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from conformance.checkpoint.planted.planting import nothing
from conformance.harness import fault, patched, swap, wrap

version_not_bumped = patched(
    "Operators write without raising version counters.",
    swap("torch.autograd.graph:increment_version", nothing),
    kills="CKPT-106",
    of="fastimpl",
)


@fault(kills="CKPT-105", at="fastimpl.ops:place_rectangles")
def misuse_ignored(original: Any, *arguments: Any) -> None:
    """What an operator refuses is passed over in silence."""
    try:
        original(*arguments)
    except RuntimeError:
        return


@fault(kills="CKPT-103", of="fastimpl")
def write_not_in_schema() -> Iterator[None]:
    """The schema of an operator does not say which tensor it writes."""
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


def _register(length: int) -> None:
    name = "twinproof::checkpoint_read"
    fake = lambda file, dense, window, words: words.new_empty(length)  # noqa: E731
    torch.library.register_fake(name, fake, allow_override=True)


@fault(kills="CKPT-103", of="fastimpl")
def fake_kernel_lies() -> Iterator[None]:
    """An operator's fake kernel announces another shape than the operator gives."""
    _register(2)
    try:
        yield
    finally:
        _register(3)


@fault(kills="CKPT-456", of="fastimpl")
def misused_conversion_ignored() -> Iterator[None]:
    """Values that a conversion refuses are passed over in silence."""

    def around(original: Any, *arguments: Any) -> None:
        try:
            original(*arguments)
        except RuntimeError:
            return

    # The operator is not there before the library is loaded.
    with wrap("torch:ops.twinproof.checkpoint_dequantize_fp8", around):
        yield


@fault(kills="CKPT-503", of="fastimpl")
def cuts_that_descend_are_sorted() -> Iterator[None]:
    """Cuts in any order give sums of what lies between them."""

    def around(original: Any, data: torch.Tensor, cuts: torch.Tensor) -> Any:
        return original(data, cuts.sort().values if cuts.dim() == 1 else cuts)

    with wrap("torch:ops.twinproof.checkpoint_crc32", around):
        yield


@fault(kills="CKPT-551", at="fastimpl.ops:place_rectangles")
def files_of_4_gib(original: Any, window: Any, start: int, dense: Any, words: Any) -> None:
    """Where a window begins in its file is counted in 32 bits."""
    original(window, start % (1 << 32), dense, words)


@fault(kills="CKPT-551", at="fastimpl.ops:strided_gather")
def elements_in_32_bits(original: Any, source: Any, start: int, dense: Any) -> None:
    """The first element is counted in 32 bits."""
    original(source, start % (1 << 32), dense)
