"""Faults that ``test_copies`` must notice."""

from __future__ import annotations

import unittest.mock
from typing import Any

import torch

from conformance.harness import fault


@fault(kills="OPT-284", at="fastimpl.ops:copy_all")
def copies_of_the_first_twice(original: Any, targets: Any, sources: Any) -> None:
    """The second tensor gets the bytes of the first where they are as many."""
    some = list(sources)
    if len(some) > 1 and some[0].shape == some[1].shape:
        some[1] = some[0]
    original(targets, some)


@fault(kills="OPT-284", at="fastimpl.ops:copy_all")
def copies_over_gaps(original: Any, targets: Any, sources: Any) -> None:
    """Padding between two neighbours is copied with them."""
    original(targets, sources)
    for target in targets[:-1]:
        whole = torch.empty(0, dtype=torch.uint8).set_(target.untyped_storage())
        end = 4 * target.storage_offset() + target.nbytes
        if (whole[end : end + 4] == 0xEE).all():
            whole[end : end + 4] = 0


@fault(kills="OPT-285", at="fastimpl.ops:copy_all")
def copies_before_checks(original: Any, targets: Any, sources: Any) -> None:
    """A call that is refused has copied the first tensor."""
    if targets and sources:
        targets[0].copy_(sources[0])
    original(targets, sources)


@fault(kills="OPT-286", at="fastimpl.ops:copy_all")
def copies_unseen(original: Any, targets: Any, sources: Any) -> None:
    """Version counters do not see what the operator wrote."""
    with unittest.mock.patch("torch.autograd.graph.increment_version"):
        original(targets, sources)


class _OneByOne:
    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def copy_many(self, targets: Any, sources: Any) -> None:
        for target, source in zip(targets, sources, strict=True):
            self._engine.copy(target, source)


@fault(kills="OPT-287", at="fastimpl.offload.transfers:StreamedTransfers._copy_out")
def copies_out_one_by_one(original: Any, transfers: Any, *arguments: Any) -> None:
    """Copies out are asked for one by one."""
    engine = transfers.engine
    transfers.engine = _OneByOne(engine)
    try:
        original(transfers, *arguments)
    finally:
        transfers.engine = engine
