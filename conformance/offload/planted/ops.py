"""Faults that ``test_ops`` must notice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from conformance.harness import fault, wrap


@fault(kills="OPT-345", of="fastimpl")
def tensors_behind_the_slab_are_left_out() -> Iterator[None]:
    """Of tensors whose place lies behind the slab nothing is packed, and nothing is said."""

    def around(original: Any, sources: Any, slab: Any, offsets: Any) -> None:
        some = [i for i in range(min(len(sources), len(offsets))) if offsets[i] <= slab.numel() - sources[i].nbytes]
        original([sources[i] for i in some], slab, [offsets[i] for i in some])

    with wrap("torch:ops.twinproof.offload_pack", around):
        yield
