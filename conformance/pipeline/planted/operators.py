"""Faults of the operators under the embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from conformance.harness import PlantedBug, swap, wrap

Tensors = Sequence[torch.Tensor]


def _bug(id: str, sentence: str, requirement: str, operator: str, around: Any) -> PlantedBug:
    return PlantedBug(id, sentence, (requirement,), "fastimpl", wrap(f"fastimpl.ops:{operator}", around))


def _turned(indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Positions, those of each bag from the back."""
    ends, lengths = offsets[1:], offsets.diff()
    return (offsets[:-1] + ends - 1).repeat_interleave(lengths) - torch.arange(indices.numel())


def _pool_from_the_back(
    original: Any, tables: Tensors, used: Any, ids: Any, offsets: Any, weights: Any, *rest: Any, **options: Any
) -> None:
    order = _turned(ids, offsets)
    original(tables, used, ids[order], offsets, None if weights is None else weights[order], *rest, **options)


def _pool_fused(
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


def _one_by_one(
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
    if ids.numel() == 0:
        original(tables, m1, m2, used, ids, offsets, *rest, **options)
        return
    weights, others = rest[0], rest[1:]
    for at in range(ids.numel()):
        one = (offsets > at).to(torch.int64)
        weight = None if weights is None else weights[at : at + 1]
        original(tables, m1, m2, used, ids[at : at + 1], one, weight, *others, **options)


def _cut_off(original: Any, tables: Tensors, *rest: Any, **options: Any) -> None:
    wide = [table.float() if table.dtype is torch.bfloat16 else table for table in tables]
    original(wide, *rest, **options)
    for table, row in zip(tables, wide, strict=True):
        if table is not row:
            table.copy_((row.view(torch.int32) & -65536).view(torch.float32))


def _halves(
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


def _mended(place: int) -> Any:
    """Ids are mended where they should be refused."""

    def around(original: Any, *arguments: Any, **options: Any) -> Any:
        tables, used, ids = arguments[0], arguments[place], arguments[place + 1]
        smallest = min(tables[table].shape[0] for table in used) if used else 1
        return original(*arguments[: place + 1], ids.clamp(0, smallest - 1), *arguments[place + 2 :], **options)

    return around


def _unread(original: Any, *arguments: Any, **options: Any) -> Any:
    try:
        return original(*arguments, **options)
    except RuntimeError:
        return None


def _one_more(original: Any, ids: torch.Tensor, offsets: torch.Tensor, counts: Sequence[int]) -> Any:
    return original(ids, offsets, [count + 1 for count in counts])


def _wrapped(original: Any, ids: torch.Tensor, offsets: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    mended: torch.Tensor = original(ids, offsets, counts)
    rows = torch.tensor(counts).repeat_interleave(offsets.diff().view(len(counts), -1).sum(1)).clamp(min=1)
    return torch.where(ids < 0, torch.remainder(ids, rows).to(ids.dtype), mended)


def _blocks_of_the_first(
    original: Any, data: torch.Tensor, begins: torch.Tensor, sizes: torch.Tensor, out: torch.Tensor
) -> None:
    original(data, begins, sizes, out)
    if begins.numel() > 1 and int(sizes[0]) == int(sizes[1]) > 0:
        out[int(sizes[0]) : 2 * int(sizes[0])] = out[: int(sizes[0])].clone()


def _unstable(original: Any, ids: Any, offsets: Any, weights: Any, blocks: Any, count: int, **options: Any) -> Any:
    lengths, found, moved, positions = original(ids, offsets, weights, blocks, count, **options)
    order = _turned(found, torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]))
    return lengths, found[order], None if moved is None else moved[order], positions[order]


def _into_the_last(original: Any, ids: Any, offsets: Any, weights: Any, blocks: Any, count: int, **options: Any) -> Any:
    if blocks is None:
        return original(ids, offsets, weights, blocks, count, **options)
    of_id = blocks.repeat_interleave(offsets.diff().view(blocks.numel(), -1).sum(1))
    return original(torch.minimum(ids.clamp(min=0), of_id * count - 1), offsets, weights, blocks, count, **options)


def _undivided(
    original: Any, tables: Tensors, used: Any, ids: Any, offsets: Any, means: Any, grad: Any, **options: Any
) -> Any:
    return original(tables, used, ids, offsets, [False] * len(means), grad, **options)


PLANTED = (
    PlantedBug(
        "writes_of_operators_are_unseen",
        "Operators write without telling autograd, so that stale views go unnoticed.",
        ("PIPE-001",),
        "fastimpl",
        swap("torch.autograd.graph:increment_version", lambda tensors: None),
    ),
    _bug(
        "bags_are_added_from_the_back",
        "A unit adds the rows of a bag in another order.",
        "PIPE-002",
        "pool_bags",
        _pool_from_the_back,
    ),
    _bug(
        "weighted_pooling_is_contracted",
        "Weight and sum are a fused multiply-add.",
        "PIPE-002",
        "pool_bags",
        _pool_fused,
    ),
    _bug("duplicates_step_one_by_one", "Every occurrence of a row is a step.", "PIPE-003", "step_bags", _one_by_one),
    _bug(
        "rows_are_cut_off",
        "A bfloat16 row loses its lower bits instead of being rounded.",
        "PIPE-003",
        "step_bags",
        _cut_off,
    ),
    _bug("long_rows_are_summed_in_shares", "Threads share the sum of a row.", "PIPE-004", "step_bags", _halves),
    _bug("pooling_mends_bad_ids", "Pooling reads another row where an id is bad.", "PIPE-005", "pool_bags", _mended(1)),
    _bug("steps_swallow_bad_offsets", "A step with bad ids or offsets says nothing.", "PIPE-005", "step_bags", _unread),
    _bug(
        "the_row_behind_the_last_is_a_row",
        "An id equal to the number of rows passes.",
        "PIPE-006",
        "check_bag_ids",
        _one_more,
    ),
    _bug(
        "negative_ids_count_from_the_end",
        "A negative id is mended to a row from the end.",
        "PIPE-006",
        "mend_bag_ids",
        _wrapped,
    ),
    _bug(
        "a_block_is_gathered_cut_off",
        "Of two blocks of one size the first comes twice.",
        "PIPE-007",
        "gather_blocks",
        _blocks_of_the_first,
    ),
    _bug(
        "buckets_are_filled_from_the_back",
        "Ids of a bag are turned around in their bucket.",
        "PIPE-008",
        "bucketize",
        _unstable,
    ),
    _bug(
        "ids_beyond_the_last_block_stay_there",
        "Ids beyond the last block are put into it.",
        "PIPE-008",
        "bucketize",
        _into_the_last,
    ),
    _bug(
        "weights_of_means_are_undivided",
        "The gradient of weights forgets the mean.",
        "PIPE-009",
        "bag_weight_gradients",
        _undivided,
    ),
)
