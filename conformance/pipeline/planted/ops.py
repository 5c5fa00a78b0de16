"""Faults that ``test_ops`` must notice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from conformance.harness import fault, swap

Tensors = Sequence[torch.Tensor]


@fault(kills="PIPE-001", at="torch.autograd.graph:increment_version", of="fastimpl")
def writes_of_operators_are_unseen(original: Any, tensors: Any) -> None:
    """Operators write without telling autograd, so that stale views go unnoticed."""


def _turned(indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Positions, those of each bag from the back."""
    ends, lengths = offsets[1:], offsets.diff()
    return (offsets[:-1] + ends - 1).repeat_interleave(lengths) - torch.arange(indices.numel())


@fault(kills="PIPE-002", at="fastimpl.ops:pool_bags")
def bags_are_added_from_the_back(
    original: Any, tables: Tensors, used: Any, ids: Any, offsets: Any, weights: Any, *rest: Any, **options: Any
) -> None:
    """A unit adds the rows of a bag in another order."""
    order = _turned(ids, offsets)
    original(tables, used, ids[order], offsets, None if weights is None else weights[order], *rest, **options)


@fault(kills="PIPE-002", at="fastimpl.ops:pool_bags")
def weighted_pooling_is_contracted(
    original: Any,
    tables: Tensors,
    used: Any,
    ids: Any,
    offsets: Any,
    weights: Any,
    means: Any,
    out: torch.Tensor,
    **options: Any,
) -> None:
    """Weight and sum are a fused multiply-add."""
    original(tables, used, ids, offsets, weights, means, out, **options)
    if weights is None or any(means):
        return
    # As a fused multiply-add leaves it: the product is not rounded before it is added.
    column, count = 0, out.shape[0]
    for feature, table in enumerate(used):
        dim = tables[table].shape[1]
        for bag in range(count):
            first, last = offsets[feature * count + bag : feature * count + bag + 2].tolist()
            total = torch.zeros(dim)
            for at in range(first, last):
                row = tables[table][int(ids[at])].double()
                total = (total.double() + weights[at].double() * row).float()
            out[bag, column : column + dim] = total
        column += dim


@fault(kills="PIPE-003", at="fastimpl.ops:step_bags")
def duplicates_step_one_by_one(
    original: Any,
    tables: Tensors,
    m1: Any,
    m2: Any,
    used: Any,
    ids: torch.Tensor,
    offsets: torch.Tensor,
    *rest: Any,
    **options: Any,
) -> None:
    """Every occurrence of a row is a step."""
    if ids.numel() == 0:
        original(tables, m1, m2, used, ids, offsets, *rest, **options)
        return
    weights, others = rest[0], rest[1:]
    for at in range(ids.numel()):
        one = (offsets > at).to(torch.int64)
        weight = None if weights is None else weights[at : at + 1]
        original(tables, m1, m2, used, ids[at : at + 1], one, weight, *others, **options)


@fault(kills="PIPE-003", at="fastimpl.ops:step_bags")
def rows_are_cut_off(original: Any, tables: Tensors, *rest: Any, **options: Any) -> None:
    """A bfloat16 row loses its lower bits instead of being rounded."""
    wide = [table.float() if table.dtype is torch.bfloat16 else table for table in tables]
    original(wide, *rest, **options)
    for table, row in zip(tables, wide, strict=True):
        if table is not row:
            table.copy_((row.view(torch.int32) & -65536).view(torch.float32))


@fault(kills="PIPE-004", at="fastimpl.ops:step_bags")
def long_rows_are_summed_in_shares(
    original: Any,
    tables: Tensors,
    m1: Any,
    m2: Any,
    used: Any,
    ids: torch.Tensor,
    offsets: torch.Tensor,
    weights: Any,
    *rest: Any,
    **options: Any,
) -> None:
    """Threads share the sum of a row."""
    if torch.get_num_threads() > 1 and ids.numel() > 4096 and weights is None:
        # Each thread sums its share of a long row: the sum of the shares is another one.
        means, grad, *others = rest
        half = offsets.numel() // 2
        order = torch.cat([torch.arange(half, offsets.numel() - 1), torch.arange(half)])
        grad = grad[order]
        lengths = offsets.diff()[order]
        places = torch.cat([torch.arange(int(offsets[half]), ids.numel()), torch.arange(int(offsets[half]))])
        ids, offsets = ids[places], torch.cat([offsets[:1], lengths.cumsum(0)])
        original(tables, m1, m2, used, ids, offsets, weights, means, grad, *others, **options)
        return
    original(tables, m1, m2, used, ids, offsets, weights, *rest, **options)


@fault(kills="PIPE-005", at="fastimpl.ops:pool_bags")
def pooling_mends_bad_ids(original: Any, tables: Tensors, used: Any, ids: Any, *rest: Any, **options: Any) -> Any:
    """Pooling reads another row where an id is bad."""
    smallest = min(tables[table].shape[0] for table in used) if used else 1
    return original(tables, used, ids.clamp(0, smallest - 1), *rest, **options)


@fault(kills="PIPE-005", at="fastimpl.ops:step_bags")
def steps_swallow_bad_offsets(original: Any, *arguments: Any, **options: Any) -> Any:
    """A step with bad ids or offsets says nothing."""
    try:
        return original(*arguments, **options)
    except RuntimeError:
        return None


@fault(kills="PIPE-006", at="fastimpl.ops:check_bag_ids")
def the_row_behind_the_last_is_a_row(
    original: Any, ids: torch.Tensor, offsets: torch.Tensor, counts: Sequence[int]
) -> Any:
    """An id equal to the number of rows passes."""
    return original(ids, offsets, [count + 1 for count in counts])


@fault(kills="PIPE-006", at="fastimpl.ops:mend_bag_ids")
def negative_ids_count_from_the_end(
    original: Any, ids: torch.Tensor, offsets: torch.Tensor, counts: Sequence[int]
) -> torch.Tensor:
    """A negative id is mended to a row from the end."""
    mended: torch.Tensor = original(ids, offsets, counts)
    rows = torch.tensor(counts).repeat_interleave(offsets.diff().view(len(counts), -1).sum(1)).clamp(min=1)
    return torch.where(ids < 0, torch.remainder(ids, rows).to(ids.dtype), mended)


@fault(kills="PIPE-007", at="fastimpl.ops:gather_blocks")
def a_block_is_gathered_cut_off(
    original: Any, data: torch.Tensor, begins: torch.Tensor, sizes: torch.Tensor, out: torch.Tensor
) -> None:
    """Of two blocks of one size the first comes twice."""
    original(data, begins, sizes, out)
    if begins.numel() > 1 and int(sizes[0]) == int(sizes[1]) > 0:
        out[int(sizes[0]) : 2 * int(sizes[0])] = out[: int(sizes[0])].clone()


@fault(kills="PIPE-008", at="fastimpl.ops:bucketize")
def buckets_are_filled_from_the_back(
    original: Any, ids: Any, offsets: Any, weights: Any, blocks: Any, count: int, **options: Any
) -> Any:
    """Ids of a bag are turned around in their bucket."""
    lengths, found, moved, positions = original(ids, offsets, weights, blocks, count, **options)
    order = _turned(found, torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]))
    return lengths, found[order], None if moved is None else moved[order], positions[order]


@fault(kills="PIPE-008", at="fastimpl.ops:bucketize")
def ids_beyond_the_last_block_stay_there(
    original: Any, ids: Any, offsets: Any, weights: Any, blocks: Any, count: int, **options: Any
) -> Any:
    """Ids beyond the last block are put into it."""
    if blocks is None:
        return original(ids, offsets, weights, blocks, count, **options)
    of_id = blocks.repeat_interleave(offsets.diff().view(blocks.numel(), -1).sum(1))
    return original(torch.minimum(ids.clamp(min=0), of_id * count - 1), offsets, weights, blocks, count, **options)


@fault(kills="PIPE-009", at="fastimpl.ops:bag_weight_gradients")
def weights_of_means_are_undivided(
    original: Any, tables: Tensors, used: Any, ids: Any, offsets: Any, means: Any, grad: Any, **options: Any
) -> Any:
    """The gradient of weights forgets the mean."""
    return original(tables, used, ids, offsets, [False] * len(means), grad, **options)


@fault(kills="PIPE-361", of="fastimpl")
def sizes_beyond_the_begins() -> Iterator[None]:
    """Where there are fewer sizes than begins, only so many blocks are gathered."""
    gather = torch.ops.twinproof.pipeline_gather_blocks

    def gathered(data: torch.Tensor, begins: torch.Tensor, sizes: torch.Tensor, out: torch.Tensor) -> None:
        if sizes.numel() < begins.numel():
            begins, out = begins[: sizes.numel()], out[: int(sizes.sum())]
        gather(data, begins, sizes, out)

    with swap("torch:ops.twinproof.pipeline_gather_blocks", gathered):
        yield


@fault(kills="PIPE-362", of="fastimpl")
def columns_beyond_the_gradient_are_left_out() -> Iterator[None]:
    """Where the pooled gradient lacks columns, it is filled up with zeros."""
    step = torch.ops.twinproof.pipeline_step

    def stepped(tables: Any, first: Any, second: Any, used: Any, *more: Any) -> None:
        ids, offsets, weights, means, grad, *rest = more
        in_range = grad.dim() == 2 and all(0 <= table < len(tables) for table in used)
        width = sum(tables[table].shape[-1] for table in used) if in_range else 0
        if in_range and grad.shape[1] < width:
            grad = torch.nn.functional.pad(grad, (0, width - grad.shape[1]))
        step(tables, first, second, used, ids, offsets, weights, means, grad, *rest)

    with swap("torch:ops.twinproof.pipeline_step", stepped):
        yield
