"""The operators of table-batched embeddings, typed. ``fastimpl.ops`` loads the library and offers them.

One layout for all: ``tables`` are [rows, dim], contiguous, CPU, float32, float16 or bfloat16, each with its own rows,
dim and dtype. Feature f looks up ``tables[feature_tables[f]]``. Bag b of feature f has positions ``offsets[f * B + b]``
to ``offsets[f * B + b + 1]`` of ``indices``, int32 or int64 [N]; ``offsets`` is int64 [F * B + 1]. ``weights``, float32
[N], belong to positions. Pooled matrices are float32 [B, sum of the features' dims], feature after feature.

On the CPU offsets and ids are checked before anything is read by them or written: RuntimeError, naming the argument. On
a device no operator but ``check_bag_ids`` waits, and a graph may hold all others: ids outside of their tables are left
out, what no bucket has goes to the first, what no block has is 0, and offsets lead to no memory but the batch's.
``settle_bags`` says whether there are any, without waiting either.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from twinproof.errors import ConfigError
from twinproof.optimizers import FUSED_OPTIMIZERS, OPTIMIZERS, Hyper

__all__ = [
    "advise_huge_pages",
    "bag_weight_gradients",
    "bucketize",
    "check_bag_ids",
    "gather_blocks",
    "mend_bag_ids",
    "pool_bags",
    "register_fakes",
    "settle_bags",
    "step_bags",
]


Tensors = Sequence[torch.Tensor]


def register_fakes() -> None:
    """Shapes of what the operators return, for tracing."""
    for name in ("pipeline_pool", "pipeline_step", "pipeline_gather_blocks", "pipeline_advise_huge_pages"):
        torch.library.register_fake(f"twinproof::{name}", lambda *args: None)
    torch.library.register_fake(
        "twinproof::pipeline_weight_gradients",
        lambda tables, features, indices, *args: indices.new_empty(indices.shape, dtype=torch.float32),
    )
    torch.library.register_fake(
        "twinproof::pipeline_check_ids", lambda indices, offsets, counts: indices.new_empty(2, dtype=torch.int64)
    )
    torch.library.register_fake(
        "twinproof::pipeline_mend_ids", lambda indices, offsets, counts: indices.new_empty(indices.shape)
    )
    torch.library.register_fake(
        "twinproof::pipeline_settle_ids",
        lambda indices, offsets, counts: (
            indices.new_empty(indices.shape),
            offsets.new_empty(offsets.shape),
            indices.new_empty(2, dtype=torch.int64),
        ),
    )
    torch.library.register_fake("twinproof::pipeline_bucketize", _fake_bucketize)


def _fake_bucketize(
    indices: torch.Tensor,
    offsets: torch.Tensor,
    weights: torch.Tensor | None,
    block_sizes: torch.Tensor | None,
    destinations: torch.Tensor | None,
    feature_count: int,
    bucket_count: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    lengths = offsets.new_empty(bucket_count * (offsets.numel() - 1))
    count = indices.numel()
    moved = indices.new_empty(count if weights is not None else 0, dtype=torch.float32)
    return lengths, indices.new_empty(count), moved, offsets.new_empty(count)


def advise_huge_pages(memory: torch.Tensor) -> None:
    """Ask the system for huge pages under a large table, before anyone touches it: a fifth less time for random rows.

    Args:
        memory: contiguous, CPU, of any dtype; fresh from ``torch.empty``. No value changes.
    """
    torch.ops.twinproof.pipeline_advise_huge_pages(memory)


def pool_bags(
    tables: Tensors,
    feature_tables: Sequence[int],
    indices: torch.Tensor,
    offsets: torch.Tensor,
    weights: torch.Tensor | None,
    means: Sequence[bool],
    out: torch.Tensor,
    *,
    isa: int = -1,
    max_blocks: int = 0,
) -> None:
    """The sum of each bag's rows: from +0, in order of position, in float32, an empty bag +0.

    Args:
        tables: see the module.
        feature_tables: the table of each feature.
        indices: int32 or int64 [N].
        offsets: int64 [F * B + 1].
        weights: each row is multiplied by its own first, the product rounded; or None.
        means: by table: the sum is divided by the number of ids of its bag.
        out: float32 [B, columns]. Written.
        isa: 0 plain, 1 AVX2, 2 AVX-512, -1 the best that this machine has; changes no bit.
        max_blocks: of each launch's grid, so that others find room on the device; 0 fills it. Changes no bit.

    Raises:
        RuntimeError: arguments that do not fit; on the CPU also no offsets, ids outside their table. Then nothing is
            written.
    """
    arguments = (tables, feature_tables, indices, offsets, weights, _integers(means), out, isa, max_blocks)
    torch.ops.twinproof.pipeline_pool(*arguments)
    torch.autograd.graph.increment_version(out)


def step_bags(
    tables: Tensors,
    momentum1: Tensors,
    momentum2: Tensors,
    feature_tables: Sequence[int],
    indices: torch.Tensor,
    offsets: torch.Tensor,
    weights: torch.Tensor | None,
    means: Sequence[bool],
    grad: torch.Tensor,
    optimizer: str,
    lr: float,
    eps: float = 1e-8,
    beta1: float = 0.9,
    beta2: float = 0.999,
    step: int = 1,
    *,
    isa: int = -1,
) -> None:
    """The backward pass of ``pool_bags`` and one optimizer step of every row that occurs, in one.

    The gradient of an occurrence is that of its bag, divided by the bag's length under mean, then multiplied by its
    weight, each rounded. Those of a row are summed from +0 in order of position; then the row takes one step of
    ``refimpl.optimizers.update``, to the bit. Rows that do not occur keep every bit, and so do their states.

    Args:
        tables: see the module. Written.
        momentum1: float32 by table, [rows, dim], or [rows] or [rows, 1] where the optimizer keeps one value a row; an
            empty tensor where it has no such state. Written.
        momentum2: likewise. Written.
        feature_tables: the table of each feature.
        indices: int32 or int64 [N].
        offsets: int64 [F * B + 1].
        weights: float32 [N] or None.
        means: as in ``pool_bags``.
        grad: float32 [B, columns].
        optimizer: one of ``FUSED_OPTIMIZERS``.
        lr: as the four below, see ``Hyper``.
        eps: added to roots.
        beta1: decay of the average.
        beta2: decay of the average of squares.
        step: counts from 1.
        isa: as in ``pool_bags``.

    Raises:
        ConfigError: an optimizer or hyperparameters that are none.
        RuntimeError: as ``pool_bags``; nothing is written then.
    """
    if optimizer not in FUSED_OPTIMIZERS:
        raise ConfigError("no such optimizer", got=optimizer, expected=sorted(FUSED_OPTIMIZERS), where="optimizer")
    hyper = Hyper(lr, step, eps, beta1, beta2)
    values = [lr, eps, beta1, 1 - beta1, beta2, 1 - beta2, hyper.step_size, hyper.root_correction]
    bags = (feature_tables, indices, offsets, weights, _integers(means), grad)
    torch.ops.twinproof.pipeline_step(tables, momentum1, momentum2, *bags, OPTIMIZERS[optimizer].code, values, isa)
    torch.autograd.graph.increment_version([*tables, *momentum1, *momentum2])


def bag_weight_gradients(
    tables: Tensors,
    feature_tables: Sequence[int],
    indices: torch.Tensor,
    offsets: torch.Tensor,
    means: Sequence[bool],
    grad: torch.Tensor,
    *,
    isa: int = -1,
) -> torch.Tensor:
    """The gradient of ``weights``, float32 [N]: ``row_sum`` of row times its bag's, after the mean's division.

    Args:
        tables: see the module.
        feature_tables: the table of each feature.
        indices: int32 or int64 [N].
        offsets: int64 [F * B + 1].
        means: as in ``pool_bags``.
        grad: float32 [B, columns].
        isa: as in ``pool_bags``.

    Raises:
        RuntimeError: as ``pool_bags``.
    """
    found: torch.Tensor = torch.ops.twinproof.pipeline_weight_gradients(
        tables, feature_tables, indices, offsets, _integers(means), grad, isa
    )
    return found


def check_bag_ids(indices: torch.Tensor, offsets: torch.Tensor, row_counts: Sequence[int]) -> tuple[int, int]:
    """How many ids lie outside [0, rows of their feature), and the position of the first or -1.

    Args:
        indices: int32 or int64 [N].
        offsets: int64 [F * B + 1].
        row_counts: rows of each feature's table; -1 where they are found by id, and none is outside.

    The host waits for the answer, once.

    Raises:
        RuntimeError: offsets that are none.
    """
    count, first = torch.ops.twinproof.pipeline_check_ids(indices, offsets, row_counts).tolist()
    if count < 0:
        raise RuntimeError(f"offsets: not ascending from 0 to {indices.numel()}, wrong at {first}")
    return count, first if count else -1


def mend_bag_ids(indices: torch.Tensor, offsets: torch.Tensor, row_counts: Sequence[int]) -> torch.Tensor:
    """A copy of ``indices`` in which every id that ``check_bag_ids`` counts is 0. On the CPU it raises as that."""
    mended: torch.Tensor = torch.ops.twinproof.pipeline_mend_ids(indices, offsets, row_counts)
    return mended


def settle_bags(
    indices: torch.Tensor, offsets: torch.Tensor, row_counts: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids and offsets that lead nowhere else, and what was wrong with those given. Nothing is waited for.

    Args:
        indices: int32 or int64 [N].
        offsets: int64 [F * B + 1].
        row_counts: as in ``check_bag_ids``.

    Returns:
        The ids, those outside of their tables as 0; the offsets; and int64 [2]: how many ids were outside, and the
        position of the first, or the largest int64. Offsets that are none: -1, and which is wrong; then all ids are 0
        and belong to the last bag.
    """
    mended, ends, found = torch.ops.twinproof.pipeline_settle_ids(indices, offsets, row_counts)
    return mended, ends, found


def gather_blocks(data: torch.Tensor, begins: torch.Tensor, sizes: torch.Tensor, out: torch.Tensor) -> None:
    """Blocks ``data[begins[k] : begins[k] + sizes[k]]`` one after the other, as a jagged permutation wants them.

    Args:
        data: [M] of any dtype, contiguous, CPU.
        begins: int64 [K].
        sizes: int64 [K].
        out: [sum of sizes] of the same dtype. Written.

    Raises:
        RuntimeError: on the CPU a block that does not lie in ``data``, an ``out`` of another size; nothing is written
            then.
    """
    torch.ops.twinproof.pipeline_gather_blocks(data, begins, sizes, out)
    torch.autograd.graph.increment_version(out)


def bucketize(
    indices: torch.Tensor,
    offsets: torch.Tensor,
    weights: torch.Tensor | None,
    block_sizes: torch.Tensor | None,
    bucket_count: int,
    *,
    destinations: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Ids by bucket; inside of it by feature, bag and position.

    Args:
        indices: int32 or int64 [N].
        offsets: int64 [F * B + 1].
        weights: float32 [N], which move with their ids, or None.
        block_sizes: int64 [F]: an id goes to bucket ``id // block_sizes[f]`` as ``id % block_sizes[f]``, or, where that
            is 0, to the first as it is; or None.
        bucket_count: how many buckets there are.
        destinations: int64 [N]: the bucket of each position; ids stay as they are. In place of ``block_sizes``.

    Returns:
        lengths, int64 [bucket_count * F * B]; indices; weights or None; and int64 [N], the position that each had.

    Raises:
        RuntimeError: on the CPU an id, or a destination, that no bucket has.
    """
    # Destinations are by position: which feature a bag belongs to makes no difference to them.
    features = block_sizes.numel() if block_sizes is not None else min(1, offsets.numel() - 1)
    lengths, ids, moved, positions = torch.ops.twinproof.pipeline_bucketize(
        indices, offsets, weights, block_sizes, destinations, features, bucket_count
    )
    return lengths, ids, moved if weights is not None else None, positions


def _integers(flags: Sequence[bool]) -> list[int]:
    return [int(flag) for flag in flags]
