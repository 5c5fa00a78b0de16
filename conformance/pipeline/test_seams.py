"""Where the work of an operator is cut: sizes next to every threshold, seams of threads, quotients that round."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from conformance.harness import assert_equal, assert_same_tensor, raises, requirement
from conformance.harness.threads import torch_threads
from conformance.kvstore.model import LR
from conformance.pipeline.cases import COPIED_BYTES, LONG_ROW, PART_IDS, SPLIT_WORDS
from conformance.pipeline.model import DTYPES, lookups_of

KERNELS = ("bag_kernels",)
UNITS = {"AVX512": [0, 1, 2], "AVX2": [0, 1]}.get(torch.backends.cpu.get_cpu_capability(), [0])


def one_id_a_bag(count: int) -> torch.Tensor:
    """Offsets of ``count`` bags."""
    return torch.arange(count + 1)


@requirement(
    "PIPE-350",
    "Of several ids that are wrong, in any parts of a batch, all MUST be counted and the first be told, by every "
    "check, with any number of threads, in batches of sizes next to those that are cut for threads.",
    needs=KERNELS,
)
@pytest.mark.parametrize("count", [PART_IDS // 2, PART_IDS, PART_IDS + 1, 6 * PART_IDS + 1])
def test_first_of_several(pipeline: Any, count: int) -> None:
    from fastimpl import ops

    # Ids and bags count alike where a batch is cut: seams are at multiples of half a part, and at even shares.
    places = {0, 1, PART_IDS // 2 - 1, PART_IDS // 2, count // 3, count // 2, count - 2, count - 1}
    seams = sorted(place for place in places if place < count)
    for number, first in enumerate(seams):
        wrong = seams[number:]
        indices = torch.arange(count) % 5
        indices[wrong] = torch.tensor([5, -1, 2**62, -(2**63)])[torch.arange(len(wrong)) % 4]
        for features in (1, 2) if count % 2 == 0 else (1,):
            offsets, expected = one_id_a_bag(count), (len(wrong), first)
            for thread_count in (1, 2, 3):
                where = f"{wrong} of {count}, {features} features, {thread_count} threads"
                with torch_threads(thread_count):
                    assert_equal(ops.check_bag_ids(indices, offsets, [5] * features), expected, where=where)
                    mended, _, found = ops.settle_bags(indices, offsets, [5] * features)
                    assert_equal(tuple(found.tolist()), expected, where=f"{where}: settled")
                    right = (indices >= 0) & (indices < 5)
                    assert_same_tensor(mended, indices.where(right, 0), where=f"{where}: settled ids")
                    blocks = torch.full((features,), 5)
                    with raises(RuntimeError, where=f"{where}: buckets") as caught:
                        ops.bucketize(indices, offsets, None, blocks, 1)
                    numbers = [int(word) for word in re.findall(r"-?\d+", str(caught.error))]
                    assert_equal(set(expected) <= set(numbers), True, where=f"{where}: {numbers} in the message")


@requirement(
    "PIPE-351",
    "An id MUST go to the bucket of its block, exactly: the last id of a block and the first of the next, for sizes "
    "whose reciprocal rounds up and down, and ids beyond what a float64 holds.",
    needs=KERNELS,
)
def test_quotients(pipeline: Any) -> None:
    from fastimpl import ops

    sizes = [1, 3, 5, 7, 10, 41, 49, 98, 103, 107, 161, 187, 1_000_003, 2**31 - 1, 2**53 + 1, 3 * 2**52 + 1]
    for size in sizes:
        bucket_count = min(300, (2**63 - 1) // size)
        blocks = torch.arange(bucket_count)
        indices = torch.cat([blocks * size, blocks * size + size - 1, blocks * size + size // 2])
        wanted = blocks.repeat(3)
        local = indices - wanted * size
        order = wanted.argsort(stable=True)
        for thread_count in (1, 2, 3):
            with torch_threads(thread_count):
                bags, given = one_id_a_bag(indices.numel()), torch.tensor([size])
                lengths, ids, _, positions = ops.bucketize(indices, bags, None, given, bucket_count)
            where = f"blocks of {size}, {thread_count} threads"
            assert_same_tensor(positions, order, where=f"{where}: positions")
            assert_same_tensor(ids, local[order], where=f"{where}: ids")
            counts = lengths.view(bucket_count, -1).sum(1)
            assert_same_tensor(counts, torch.full_like(counts, 3), where=f"{where}: lengths")


@requirement(
    "PIPE-352",
    "A mean MUST be the sum divided by the bag's length, forward and backward, to the bit, also where the reciprocal "
    "of the length rounds.",
)
def test_means(pipeline: Any) -> None:
    lengths = [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 41, 47, 49, 55, 61, 83, 97, 98]
    generator = torch.Generator().manual_seed(1)
    for dtype in DTYPES:
        weight = torch.randn(sum(lengths), 20, generator=generator).to(dtype)
        config = pipeline.EmbeddingBagConfig(weight.shape[0], 20, "t", dtype, ["f"], pooling=pipeline.PoolingType.MEAN)
        bags = torch.split(torch.arange(weight.shape[0]), lengths)
        module = lookups_of(pipeline, [config], [weight])
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), torch.tensor(lengths).cumsum(0)])
        pooled = module(torch.arange(weight.shape[0]), offsets)
        grad = torch.randn(pooled.shape, generator=generator)
        pooled.backward(grad)
        for number, bag in enumerate(bags):
            total = torch.zeros(20)
            for row in bag.tolist():
                total = total + weight[row].float()
            size = torch.tensor(float(len(bag)))
            assert_same_tensor(pooled[number].detach(), total / size, where=f"mean of {len(bag)} rows of {dtype}")
            stepped = (weight[bag].float() - torch.tensor(LR) * (grad[number] / size)).to(dtype)
            assert_same_tensor(module.weight(0)[bag], stepped, where=f"rows of a bag of {len(bag)}, {dtype}")


@requirement(
    "PIPE-353",
    "Pooling MUST start at +0: rows of -0 give +0, weighted or not, sums and means, of every dtype and width on every "
    "unit.",
    needs=KERNELS,
)
def test_zeros(pipeline: Any) -> None:
    from fastimpl import ops

    for dtype in DTYPES:
        for dim in (1, 4, 7, 8, 15, 16, 17, 33, 64):
            table = torch.full((3, dim), -0.0, dtype=dtype)
            offsets = torch.tensor([0, 1, 3, 3, 4])
            for unit in UNITS:
                for weights in (None, torch.tensor([1.0, -0.0, 2.0, 0.5])):
                    for mean in (False, True):
                        out = torch.full((4, dim), 7.0)
                        ops.pool_bags([table], [0], torch.tensor([0, 1, 2, 2]), offsets, weights, [mean], out, isa=unit)
                        expected = torch.zeros(4, dim)
                        where = f"{dtype} of {dim} on unit {unit}, weights {weights is not None}, mean {mean}"
                        assert_same_tensor(out.view(torch.int32), expected.view(torch.int32), where=where)


@requirement(
    "PIPE-354",
    "The gradients of a row MUST be added in order of position, and each row take one step, with any number of "
    "threads, in batches so large that threads share the sorting, and rows that stand where shares meet.",
    needs=KERNELS,
)
@pytest.mark.parametrize("count", [2 * PART_IDS, 2 * PART_IDS + 1, 2 * SPLIT_WORDS, 3 * SPLIT_WORDS + 1])
def test_shares(pipeline: Any, count: int) -> None:
    from fastimpl import ops

    rows = 37
    generator = torch.Generator().manual_seed(count)
    # Few rows: every share ends within one. Sums of these depend on their order.
    indices = torch.randint(0, rows, (count,), generator=generator)
    grad = torch.tensor([1e8, 1.0, -1e8, 3.0])[torch.randint(0, 4, (count,), generator=generator)].reshape(-1, 1)
    sums = torch.zeros(rows, 1).index_add_(0, indices, grad)
    for thread_count in (1, 2, 3):
        for weights in (None, torch.ones(count)):
            table, none = torch.zeros(rows, 1), [torch.empty(0)]
            with torch_threads(thread_count):
                arguments = (indices, one_id_a_bag(count), weights, [False], grad, "sgd", 1.0)
                ops.step_bags([table], none, none, [0], *arguments)
            where = f"{count} ids, {thread_count} threads, weights {weights is not None}"
            assert_same_tensor(table, 0 - sums, where=where)


@requirement(
    "PIPE-355",
    "A step MUST round rows to 16 bits to nearest even for every exponent and every pattern of bits, on every unit, "
    "and keep NaNs NaNs whatever their payload.",
    needs=KERNELS,
)
def test_every_rounding(pipeline: Any) -> None:
    from fastimpl import ops

    low = torch.tensor([0, 0x1000, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF], dtype=torch.int32)
    grads = ((torch.arange(65536, dtype=torch.int32) << 16)[:, None] | low).view(torch.float32)
    # A width that leaves a rest in every vector unit.
    grad = torch.cat([grads.reshape(-1), torch.zeros(16)]).reshape(-1, 331)
    count, dim = grad.shape
    for dtype in (torch.float16, torch.bfloat16):
        for unit in UNITS:
            table, none = torch.zeros(count, dim, dtype=dtype), [torch.empty(0)]
            arguments = (torch.arange(count), one_id_a_bag(count), None, [False], grad, "sgd", 1.0)
            ops.step_bags([table], none, none, [0], *arguments, isa=unit)
            expected, where = (0 - grad).to(dtype), f"{dtype} on unit {unit}"
            assert_same_tensor(table.isnan(), expected.isnan(), where=f"NaNs of {where}")
            numbers = [value.masked_fill(value.isnan(), 0) for value in (table, expected)]
            assert_same_tensor(numbers[0], numbers[1], where=f"numbers of {where}")


@requirement(
    "PIPE-356",
    "Blocks that are refused, the last of many among them, MUST leave what was to be written as it was.",
    needs=KERNELS,
)
def test_refused_blocks(pipeline: Any) -> None:
    from fastimpl import ops

    data = torch.arange(100.0)
    for wrong in ((-1, 2), (99, 2), (101, 0), (0, -1), (2**62, 2), (0, 2**63 - 1)):
        for number in (0, 1, 4):
            blocks = [(0, 20), (50, 30), (99, 1), (10, 40), (0, 9)]
            blocks[number] = wrong
            begins, sizes = (torch.tensor(column) for column in zip(*blocks, strict=True))
            for count in (sum(size for _, size in blocks), 100):
                out = torch.full((max(0, min(count, 1000)),), 7.0)
                with raises(RuntimeError, where=f"block {number} is {wrong}"):
                    ops.gather_blocks(data, begins, sizes, out)
                assert_same_tensor(out, torch.full_like(out, 7.0), where=f"out, block {number} is {wrong}")
    out = torch.full((10,), 7.0)
    for length in (9, 11):
        with raises(RuntimeError, where=f"an out of {length} for 10"):
            ops.gather_blocks(
                data, torch.tensor([3, 50]), torch.tensor([5, 5]), out[:length] if length < 10 else data[:11]
            )
    assert_same_tensor(out, torch.full_like(out, 7.0), where="an out that is too short")
    assert_same_tensor(data, torch.arange(100.0), where="data")


@requirement(
    "PIPE-410",
    "Blocks MUST be gathered whole where threads share one: sizes next to a thread's share and multiples of it, "
    "elements of every size, with any number of threads.",
    needs=KERNELS,
)
def test_shared_blocks(pipeline: Any) -> None:
    from fastimpl import ops

    for dtype in (torch.uint8, torch.float16, torch.float32, torch.int64):
        share = COPIED_BYTES // dtype.itemsize
        data = (torch.arange(5 * share + 50) % 251).to(dtype)
        for sizes in ([share], [share + 1], [2 * share], [3 * share + 1], [2, 3 * share, 0, share - 1, share]):
            begins = [7 * number + 3 for number in range(len(sizes))]
            expected = torch.cat([data[begin : begin + size] for begin, size in zip(begins, sizes, strict=True)])
            for thread_count in (1, 2, 3):
                out = torch.full_like(expected, 7)
                with torch_threads(thread_count):
                    ops.gather_blocks(data, torch.tensor(begins), torch.tensor(sizes), out)
                assert_same_tensor(out, expected, where=f"blocks of {sizes} {dtype}, {thread_count} threads")


@requirement(
    "PIPE-411",
    "A row that occurs very often MUST take the step of the sum over its occurrences in order of position, in all of "
    "its columns, whichever table it is of: sums and means, weighted or not, of every dtype, for widths that threads "
    "share, by any number of threads.",
    needs=KERNELS,
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_long_rows(pipeline: Any, dtype: torch.dtype) -> None:
    from fastimpl import ops

    generator = torch.Generator().manual_seed(LONG_ROW)
    rows, sizes = 3, torch.tensor([1, 2, 3, 5, 7] * (LONG_ROW // 16))
    count = int(sizes.sum())
    # Of every twenty ids nineteen are one row's.
    indices = torch.where(torch.arange(count) % 20 == 3, torch.arange(count) % rows, 1)
    # Another table's rows come first, one in each bag.
    ids = torch.cat([torch.arange(sizes.numel()) % 2, indices])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), torch.ones_like(sizes).cumsum(0)])
    offsets = torch.cat([offsets, sizes.numel() + sizes.cumsum(0)])
    for dim in (16, 33, 70):
        grad = torch.randn(sizes.numel(), dim, generator=generator)
        before = torch.randn(rows, dim, generator=generator).to(dtype)
        for mean, weights in ((m, w) for m in (False, True) for w in (None, torch.rand(count, generator=generator))):
            of_bags = grad / sizes[:, None] if mean else grad
            terms = of_bags.repeat_interleave(sizes, 0) * (1 if weights is None else weights[:, None])
            expected = (before.float() - torch.zeros(rows, dim).index_add_(0, indices, terms)).to(dtype)
            # The other table's gradients are 0, whatever their weights.
            given = torch.cat([torch.zeros(sizes.numel(), 4), grad], dim=1)
            known = None if weights is None else torch.cat([torch.ones(sizes.numel()), weights])
            for thread_count in (1, 2, 3):
                other, table, none = torch.zeros(2, 4, dtype=dtype), before.clone(), [torch.empty(0)] * 2
                with torch_threads(thread_count):
                    arguments = (ids, offsets, known, [mean, mean], given, "sgd", 1.0)
                    ops.step_bags([other, table], none, none, [0, 1], *arguments)
                where = f"{dim} columns, mean {mean}, weights {weights is not None}, {thread_count} threads"
                assert_same_tensor(table, expected, where=where)


@requirement(
    "PIPE-370",
    "First weights of a shard MUST NOT depend on how many rows are made at once: fewer, as many, one more, multiples.",
)
def test_first_weights(pipeline: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from twinproof.pipeline.sharding import Shard, initial_shard

    table = pipeline.EmbeddingBagConfig(num_embeddings=13, embedding_dim=8, name="t", feature_names=["f"])

    def made(rows: tuple[int, int]) -> torch.Tensor:
        return initial_shard(table, 1, Shard(0, 0, "row_wise", rows, (2, 6)), 7)

    monkeypatch.setattr("twinproof.pipeline.sharding.INIT_ROWS", 1000)
    whole = made((0, 13))
    for rows in ((0, 13), (4, 13), (4, 12), (5, 6)):
        count = rows[1] - rows[0]
        for at_once in sorted({1, 2, 3, 4, count - 1, count, count + 1} - {0}):
            monkeypatch.setattr("twinproof.pipeline.sharding.INIT_ROWS", at_once)
            assert_same_tensor(made(rows), whole[slice(*rows)], where=f"rows {rows}, {at_once} at once")
