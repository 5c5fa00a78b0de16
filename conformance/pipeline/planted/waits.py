"""Faults that ``test_waits`` must notice."""

from __future__ import annotations

from typing import Any

import torch

from conformance.harness import fault, mutated, patched

_CHECKED = "twinproof.pipeline.modules:check_each"


@fault(kills="PIPE-386", at="fastimpl.pipeline.route:_find_cuts")
def cut_features_are_taken_out(original: Any, layout: Any, *, cuts_all: bool) -> Any:
    """The features of tables that are cut are taken out first, wherever the batch lies."""
    return original(layout, cuts_all=False)


@fault(kills="PIPE-386", at="fastimpl.pipeline.input_dist:InputDist._hear")
def sizes_are_not_kept(original: Any, exchange: Any, said: list[int]) -> None:
    """How many ids the features of replicated tables have is read with the sizes, and forgotten."""
    original(exchange, said)
    exchange._ctx.bags.sizes = None


@fault(kills="PIPE-387", at="twinproof.pipeline.sharding:LateBuckets.failure")
def ids_of_no_bucket_go_to_the_nearest(original: Any, check: Any, count: int, first: int) -> None:
    """An id outside of all buckets goes to the nearest, and nobody is told."""


@fault(kills="PIPE-387", at="twinproof.pipeline.sharding:LateBuckets.has_failed")
def one_rank_knows(original: Any, check: Any) -> torch.Tensor:
    """The rank whose ids are outside of all buckets knows; the others go on."""
    return torch.zeros_like(check.found[0])


@fault(kills="PIPE-388", at=_CHECKED)
def one_answer_after_the_other(original: Any, parts: Any, *options: Any) -> Any:
    """The host waits for the answer to each feature's check by itself."""
    return [bags for part in parts for bags in original([part], *options)]


@fault(kills="PIPE-388", at="twinproof.pipeline.jagged:KeyedMoves._check_features")
def nobody_remembers_that_lengths_were_seen(original: Any, batch: Any) -> None:
    """The host sees that lengths cut the ids, and asks the device again."""
    original(batch)
    batch._is_cut = False


@fault(kills="PIPE-389", at="twinproof.pipeline.modules:select")
def lengths_of_a_device_are_trusted(original: Any, *arguments: Any, **options: Any) -> Any:
    """Under ignore nobody asks whether lengths cut the ids, though the host has not seen it."""
    bags = original(*arguments, **options)
    bags.is_cut = True
    return bags


@fault(kills="PIPE-389", at="twinproof.pipeline.modules:LateCheck.failure")
def lengths_are_not_looked_at(original: Any, check: Any, count: int, first: int) -> Any:
    """Bags whose lengths do not cut the ids are all the last one."""
    return original(check, max(count, 0), first)


@fault(kills="PIPE-390", at="fastimpl.pipeline.exchange:AllToAll._segments")
def ids_are_counted_before_they_are_sent(original: Any, exchange: Any, route: Any, bags: Any, **options: Any) -> Any:
    """Each collection asks how many ids its features have."""
    bags.offsets[:: max(1, (bags.offsets.numel() - 1) // len(exchange.layout.feature_tables))].tolist()
    return original(exchange, route, bags, **options)


@fault(kills="PIPE-391", at="fastimpl.ops:check_bag_ids")
def ids_below_zero_are_outside(original: Any, indices: Any, offsets: Any, row_counts: Any) -> Any:
    """Rows that are found by id have none below zero."""
    return original(indices, offsets, [2**63 - 1 if rows < 0 else rows for rows in row_counts])


@fault(kills="PIPE-392", at="fastimpl.ops:bucketize")
def ids_that_are_not_cut_are_made_local(
    original: Any, ids: Any, offsets: Any, weights: Any, blocks: Any, count: int, **options: Any
) -> Any:
    """Ids of a feature that is not cut are taken for those of one large block, which has none below zero."""
    if blocks is None:
        return original(ids, offsets, weights, blocks, count, **options)
    of_id = blocks.repeat_interleave(offsets.diff().view(blocks.numel(), -1).sum(1))
    return original(ids.where(of_id > 0, ids.clamp(min=0)), offsets, weights, blocks, count, **options)


@fault(kills="PIPE-393", at="twinproof.pipeline.jagged:KeyedMoves._count_here")
def sizes_stay_behind(original: Any, batch: Any, device: torch.device) -> None:
    """A batch leaves the host without what is known of it there."""


@fault(kills="PIPE-393", at="twinproof.pipeline.jagged:KeyedMoves._count_here")
def parts_are_refused_on_the_way(original: Any, batch: Any, device: torch.device) -> None:
    """A batch whose parts disagree cannot be moved."""
    batch._check_features()


@fault(kills="PIPE-394", at="twinproof.pipeline.batches:_rows_of")
def rows_are_looked_at_one_by_one(original: Any, features: Any, name: str) -> torch.Tensor:
    """The host looks at the rows of each feature by itself."""
    rows: torch.Tensor = original(features, name)
    rows.amax().item()
    return rows


@fault(kills="PIPE-395", at="twinproof.pipeline.modules:_too_long")
def longest_bags_are_asked_for(original: Any, weight: torch.Tensor, positions: torch.Tensor, *rest: Any) -> None:
    """The host asks for the longest bag of each feature by itself."""
    original(weight, positions, rest[0], None)


last_check_is_told = patched(
    "Of several late checks the last is told.",
    mutated("fastimpl.pipeline.input_dist:InputDist._hear", "if self._failure is None:", "if True:"),
    kills="PIPE-595",
    of="fastimpl",
)
