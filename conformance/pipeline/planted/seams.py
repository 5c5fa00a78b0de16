"""Faults that ``test_seams`` must notice."""

from __future__ import annotations

from typing import Any

import torch

from conformance.harness import fault, mutated, patched
from conformance.pipeline.cases import COPIED_BYTES, LONG_ROW, PART_IDS, SPLIT_WORDS
from conformance.pipeline.planted.planting import lookups
from twinproof.pipeline.jagged import Bags


def _last_share(indices: torch.Tensor, offsets: torch.Tensor, counts: Any) -> int:
    """The first wrong id of the last share that has one, which is a thread's."""
    rows = torch.tensor(counts).repeat_interleave(offsets.diff().view(len(counts), -1).sum(1))
    wrong = ((indices < 0) | (indices >= rows)).nonzero()[:, 0]
    share = max(1, PART_IDS // 2)
    return int(wrong[wrong >= int(wrong[-1]) // share * share][0])


@fault(kills="PIPE-350", at="fastimpl.ops:check_bag_ids")
def first_of_the_last_thread(original: Any, indices: Any, offsets: Any, counts: Any) -> tuple[int, int]:
    """Of several wrong ids, the one told is the first of the thread that ended last."""
    count, first = original(indices, offsets, counts)
    is_shared = torch.get_num_threads() > 1 and indices.numel() >= PART_IDS
    return count, _last_share(indices, offsets, counts) if count and is_shared else first


@fault(kills="PIPE-351", at="fastimpl.ops:bucketize")
def quotient_by_reciprocal(
    original: Any, ids: Any, offsets: Any, weights: Any, blocks: Any, count: int, **options: Any
) -> Any:
    """The bucket of an id is its product with the reciprocal of the block, cut off, and nothing more."""
    if blocks is None or not ids.numel():
        return original(ids, offsets, weights, blocks, count, **options)
    of_id = blocks.repeat_interleave(offsets.diff().view(blocks.numel(), -1).sum(1))
    told = (ids.double() * of_id.double().reciprocal()).long().clamp(0, count - 1)
    lengths, found, moved, order = original(ids, offsets, weights, None, count, destinations=told)
    return lengths, found - (told * of_id)[order], moved, order


@fault(kills="PIPE-352", at=lookups("pool"))
def means_by_reciprocal(original: Any, engine: Any, tables: Any, features: Any, bags: Bags) -> torch.Tensor:
    """A mean is the sum times the reciprocal of the bag's length."""
    pooled: torch.Tensor = original(engine, tables, features, bags)
    column, count = 0, len(features)
    for feature, table in enumerate(features):
        width = tables[table].weight.shape[1]
        if tables[table].is_mean:
            sizes = bags.feature(feature, count).lengths().clamp(min=1).float()
            columns = pooled[:, column : column + width]
            columns.copy_((columns * sizes).double().float() * sizes.reciprocal())
        column += width
    return pooled


@fault(kills="PIPE-353", at="fastimpl.ops:pool_bags")
def first_row_is_copied(
    original: Any, tables: Any, used: Any, ids: Any, offsets: Any, weights: Any, means: Any, out: Any, **options: Any
) -> None:
    """The first 16-bit row of a bag is widened where the sum is to be, not added to +0."""
    original(tables, used, ids, offsets, weights, means, out, **options)
    column, count = 0, out.shape[0]
    for feature, table in enumerate(used):
        width = tables[table].shape[1]
        for bag in range(count) if tables[table].dtype is not torch.float32 and weights is None else ():
            first, last = offsets[feature * count + bag : feature * count + bag + 2].tolist()
            values = out[bag, column : column + width]
            negative = tables[table][ids[first:last].long()].float().signbit().all(0) & (last > first)
            values[negative & (values == 0)] = -0.0
        column += width


@fault(kills="PIPE-354", at="fastimpl.ops:step_bags")
def shares_sorted_apart(
    original: Any, tables: Any, m1: Any, m2: Any, used: Any, ids: Any, offsets: Any, *rest: Any, **options: Any
) -> None:
    """Threads that share the sorting put the occurrences of the last share before those of the first."""
    weights, means, grad, *others = rest
    if torch.get_num_threads() > 1 and ids.numel() >= 2 * SPLIT_WORDS and grad.shape[0] == ids.numel():
        half = ids.numel() // 2
        ids, grad = torch.cat([ids[half:], ids[:half]]), torch.cat([grad[half:], grad[:half]])
    original(tables, m1, m2, used, ids, offsets, weights, means, grad, *others, **options)


@fault(kills="PIPE-354", at="fastimpl.ops:step_bags")
def row_stepped_by_two_threads(
    original: Any, tables: Any, m1: Any, m2: Any, used: Any, ids: Any, offsets: Any, *rest: Any, **options: Any
) -> None:
    """A row whose occurrences are cut between two threads takes a step in each."""
    weights, means, grad, *others = rest
    parts = [slice(None)]
    if torch.get_num_threads() > 1 and ids.numel() >= PART_IDS and grad.shape[0] == ids.numel():
        parts = [slice(ids.numel() // 2), slice(ids.numel() // 2, None)]
    for part in parts:
        some = None if weights is None else weights[part]
        bags = offsets[: ids[part].numel() + 1] if len(parts) > 1 else offsets
        original(tables, m1, m2, used, ids[part], bags, some, means, grad[part], *others, **options)


@fault(kills="PIPE-355", at="fastimpl.ops:step_bags")
def rows_of_long_payloads_carry(
    original: Any, tables: Any, m1: Any, m2: Any, used: Any, ids: Any, offsets: Any, *rest: Any, **options: Any
) -> None:
    """A NaN whose payload is all ones is rounded up, past all NaNs, to a zero."""
    original(tables, m1, m2, used, ids, offsets, *rest, **options)
    grad = rest[2]
    for table in tables:
        if table.dtype is not torch.float32 and table.shape == grad.shape:
            table[(grad.view(torch.int32) & 0x7FFFFFFF) > 0x7FFF8000] = 0


@fault(kills="PIPE-356", at="fastimpl.ops:gather_blocks")
def refused_blocks_cleared(original: Any, data: Any, begins: Any, sizes: Any, out: torch.Tensor) -> None:
    """What blocks are gathered into is cleared before they are looked at."""
    out.zero_()
    original(data, begins, sizes, out)


@fault(kills="PIPE-410", at="fastimpl.ops:gather_blocks")
def shares_begin_with_their_block(
    original: Any, data: Any, begins: torch.Tensor, sizes: torch.Tensor, out: torch.Tensor
) -> None:
    """A thread whose share begins inside of a block copies from where the block begins."""
    original(data, begins, sizes, out)
    ends, at = sizes.cumsum(0), out.numel() // 2
    if torch.get_num_threads() > 1 and out.nbytes > COPIED_BYTES:
        block = int((ends <= at).sum())
        begin, end = int(begins[block]), int(ends[block])
        out[at:end] = data[begin : begin + end - at]


def _step_of_some_columns(
    original: Any, plain: dict[int, Any], tables: Any, m1: Any, m2: Any, *rest: Any, **options: Any
) -> None:
    """Where threads share the columns of a row, those behind the first 16 are stepped with other arguments."""
    copies, ids = [table.clone() for table in tables], rest[1]
    original(tables, m1, m2, *rest, **options)
    if torch.get_num_threads() > 1 and ids.numel() and int(ids.long().clamp(min=0).bincount().max()) >= LONG_ROW:
        original(copies, m1, m2, *(plain.get(place, each) for place, each in enumerate(rest)), **options)
        for table, copied in zip(tables, copies, strict=True):
            table[:, 16:] = copied[:, 16:]


@fault(kills="PIPE-411", at="fastimpl.ops:step_bags")
def means_of_the_first_columns(original: Any, *args: Any, **options: Any) -> None:
    """Of a row that is shared by columns only the first are divided by the length of the bag."""
    _step_of_some_columns(original, {4: [False] * len(args[0])}, *args, **options)


@fault(kills="PIPE-411", at="fastimpl.ops:step_bags")
def weights_of_the_first_columns(original: Any, *args: Any, **options: Any) -> None:
    """Of a row that is shared by columns only the first are weighted."""
    _step_of_some_columns(original, {3: None}, *args, **options)


first_weights_at_the_wrong_row = patched(
    "The first weights behind a seam stand where those before it do.",
    mutated("twinproof.pipeline.sharding:initial_shard", "begin - shard.rows[0] :", "(begin - shard.rows[0]) // 2 :"),
    kills="PIPE-370",
)

last_of_the_first_weights_missing = patched(
    "A last row that would be made alone is not.",
    mutated(
        "twinproof.pipeline.sharding:initial_shard",
        'weight = torch.empty(shard.rows[1] - shard.rows[0], shard.width, dtype=table.dtype, device="cpu")\n'
        "    for begin in range(*shard.rows, INIT_ROWS)",
        'weight = torch.zeros(shard.rows[1] - shard.rows[0], shard.width, dtype=table.dtype, device="cpu")\n'
        "    for begin in range(shard.rows[0], shard.rows[1] - 1, INIT_ROWS)",
    ),
    kills="PIPE-370",
)
