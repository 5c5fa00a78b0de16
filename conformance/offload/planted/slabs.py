"""Faults that ``test_slabs`` must notice."""

from __future__ import annotations

import mmap
import os
from typing import Any

import torch

from conformance.harness import fault


@fault(kills="OPT-288", at="fastimpl.ops:host_slab")
def slab_in_anothers_page(original: Any, size_bytes: int, **options: Any) -> torch.Tensor:
    """Memory begins in the middle of a page."""
    memory: torch.Tensor = original(size_bytes + 64, **options)[64:]
    return memory


@fault(kills="OPT-289", at="fastimpl.ops:slab_facts")
def slab_errors_kept_quiet(original: Any, memory: torch.Tensor) -> Any:
    """That the system refused a node is not said."""
    found = original(memory)
    return None if found is None else found._replace(bind_error=0)


@fault(kills="OPT-290", at="fastimpl.offload.transfers:StreamedTransfers.step")
def slab_for_each_step(original: Any, transfers: Any, *arguments: Any) -> Any:
    """A step takes host memory that it keeps."""
    transfers.__dict__.setdefault("_kept", []).append(transfers.plan.host_empty(4096))
    return original(transfers, *arguments)


_MAPPED: list[mmap.mmap] = []


@fault(kills="OPT-382", at="fastimpl.ops:host_slab")
def slab_never_unmapped(original: Any, size_bytes: int, **options: Any) -> torch.Tensor:
    """Pages that nobody has any more stay mapped."""
    _MAPPED.append(mmap.mmap(-1, size_bytes))
    memory: torch.Tensor = original(size_bytes, **options)
    return memory


@fault(kills="OPT-436", at="fastimpl.ops:host_slab")
def slabs_are_the_first_process_s(original: Any, size_bytes: int, **options: Any) -> torch.Tensor:
    """What another process than the first makes is never freed, as memory that a child inherited is not."""
    memory: torch.Tensor = original(size_bytes, **options)
    if os.getpid() != _FIRST:
        _INHERITED.append(memory)
    return memory


_FIRST = os.getpid()
_INHERITED: list[torch.Tensor] = []
