"""Faults that ``test_late_checks`` must notice."""

from __future__ import annotations

from typing import Any

import torch

from conformance.harness import fault
from twinproof.pipeline.jagged import Bags

_LATE = "twinproof.pipeline.modules:LateCheck"


@fault(kills=("PIPE-331", "PIPE-335"), at="fastimpl.ops:settle_bags")
def the_last_position_is_told(original: Any, indices: Any, offsets: Any, row_counts: Any) -> Any:
    """A check tells some position of an id outside, not the first."""
    ids, ends, found = original(indices, offsets, row_counts)
    changed = (ids != indices).nonzero()[:, 0]
    if changed.numel() > 1:
        found = torch.stack([found[0], changed[-1]])
    return ids, ends, found


@fault(kills="PIPE-331", at="fastimpl.pipeline.lookups:NativeLookup.mended")
def ids_that_wrap_around(original: Any, engine: Any, bags: Bags, row_counts: Any) -> torch.Tensor:
    """Under warning and ignore the host takes the last row for an id outside, a device the first."""
    mended: torch.Tensor = original(engine, bags, row_counts)
    wrapped: torch.Tensor = mended.where(mended == bags.indices, mended + (min(row_counts) - 1))
    return wrapped


@fault(kills="PIPE-332", at=f"{_LATE}.has_failed")
def only_ids_are_told(original: Any, check: Any) -> torch.Tensor:
    """Ranks are told of ids outside alone, and go on with lengths that are none."""
    failed: torch.Tensor = (check.found[0] > 0).to(torch.int64)
    return failed


@fault(kills="PIPE-332", at=f"{_LATE}.failure")
def lengths_are_not_read(original: Any, check: Any, count: int, first: int) -> Any:
    """Who reads the answer looks for ids outside alone."""
    return original(check, max(count, 0), first)


@fault(kills="PIPE-333", at="fastimpl.pipeline.lookups:NativeLookup.settled")
def ids_are_waited_for(original: Any, engine: Any, bags: Bags, row_counts: Any) -> Any:
    """Each collection's ids are looked at as on the host: it waits for each answer."""


@fault(kills="PIPE-333", at="fastimpl.pipeline.input_dist:InputDist.message")
def sizes_are_waited_for_twice(original: Any, exchange: Any) -> Any:
    """The host looks at the answer of a check before it reads the sizes."""
    for check in exchange._late:
        check.found.tolist()
    return original(exchange)


@fault(kills="PIPE-334", at="fastimpl.ops:pool_bags")
def bags_are_counted_on_the_host(
    original: Any, tables: Any, features: Any, indices: Any, offsets: Any, *rest: Any
) -> None:
    """Pooling reads how many ids there are."""
    int(offsets[-1])
    original(tables, features, indices, offsets, *rest)


@fault(kills="PIPE-334", at="fastimpl.ops:step_bags")
def offsets_sent_by_the_host(original: Any, *arguments: Any) -> None:
    """Each step sends a list of the host's to the device."""
    torch.tensor([0], device=arguments[4].device)
    original(*arguments)


@fault(kills="PIPE-335", at="fastimpl.ops:settle_bags")
def offsets_as_they_are(original: Any, indices: Any, offsets: Any, row_counts: Any) -> Any:
    """Offsets that are none are handed on."""
    ids, _, found = original(indices, offsets, row_counts)
    return ids, offsets, found


@fault(kills="PIPE-336", at="fastimpl.pipeline.stages:StreamedStages.receive")
def answers_read_elsewhere(original: Any, stages: Any, work: Any) -> None:
    """Sizes and answers are put together on the caller's stream, which nothing orders behind the checks."""
    work()
