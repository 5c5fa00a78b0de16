"""The operators under the embeddings: registered as torch expects, the same bits on every unit and thread count,
and refusing what would read or write outside.
"""

from __future__ import annotations

import mmap
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.harness import assert_equal, assert_refused, assert_same_tensor, examples, raises, requirement
from conformance.harness.threads import torch_threads
from conformance.pipeline.model import DTYPES, OPTIMIZERS
from conformance.pipeline.strategies import Arguments, draw_arguments
from refimpl.optimizers import row_sum

KERNELS = ("bag_kernels",)
# Of Linux; Python names it from 3.13 on.
_MAP_NORESERVE = 0x4000
UNITS = {"AVX512": [-1, 0, 1, 2], "AVX2": [-1, 0, 1]}.get(torch.backends.cpu.get_cpu_capability(), [-1, 0])


@requirement(
    "PIPE-001", "Every operator MUST pass torch.library.opcheck, and version counters see writes.", needs=KERNELS
)
def test_pipe_001_opcheck(pipeline: Any) -> None:
    from fastimpl import ops

    a = Arguments.of(seed=3, dtypes=DTYPES, optimizer="adam", is_weighted=True)
    out, empty = torch.zeros_like(a.grad), torch.empty(10)
    begins, sizes = torch.tensor([3, 0]), torch.tensor([4, 6])
    bags = (a.feature_tables, a.indices, a.offsets)
    means = [int(mean) for mean in a.means]
    counts = [a.tables[table].shape[0] for table in a.feature_tables]
    blocks = torch.tensor(counts)
    # Hyper and code of Adam's step 1.
    hyper = ([0.1, 1e-8, 0.9, 0.1, 0.999, 0.001, 1.0, 0.03], -1)
    calls: list[tuple[str, tuple[Any, ...]]] = [
        ("pipeline_pool", (a.tables, *bags, a.weights, means, out, -1)),
        ("pipeline_step", (a.tables, a.momentum1, a.momentum2, *bags, a.weights, means, a.grad, 4, *hyper)),
        ("pipeline_weight_gradients", (a.tables, *bags, means, a.grad, -1)),
        ("pipeline_check_ids", (a.indices, a.offsets, counts)),
        ("pipeline_mend_ids", (a.indices, a.offsets, counts)),
        ("pipeline_settle_ids", (a.indices, a.offsets, counts)),
        ("pipeline_gather_blocks", (torch.arange(10.0), begins, sizes, empty)),
        ("pipeline_bucketize", (a.indices, a.offsets, a.weights, blocks, None, len(counts), 2)),
        ("pipeline_advise_huge_pages", (out,)),
    ]
    for name, arguments in calls:
        operator = getattr(torch.ops.twinproof, name)
        outcome = torch.library.opcheck(operator.default, arguments, raise_exception=False)
        wrong = {check: str(result) for check, result in outcome.items() if result != "SUCCESS"}
        assert_equal(wrong, {}, where=name)
    written = [out, empty, *a.tables, *a.momentum1, *a.momentum2]
    before = [tensor._version for tensor in written]
    ops.pool_bags(a.tables, *bags, a.weights, a.means, out)
    a.step(ops, a.tables)
    ops.gather_blocks(torch.arange(10.0), begins, sizes, empty)
    seen = [tensor._version > version for tensor, version in zip(written, before, strict=True)]
    assert_equal(seen, [True] * len(written), where="versions")


@requirement(
    "PIPE-002", "Pooling MUST have the bits of a sum in order of position, on any unit and threads.", needs=KERNELS
)
@examples(60)
@given(st.data(), st.sampled_from(UNITS), st.integers(1, 4))
def test_pipe_002_pooling(pipeline: Any, data: st.DataObject, isa: int, threads: int) -> None:
    from fastimpl import ops

    a = draw_arguments(data)
    out = torch.full_like(a.grad, 7.0)
    with torch_threads(threads):
        ops.pool_bags(a.tables, a.feature_tables, a.indices, a.offsets, a.weights, a.means, out, isa=isa)
    assert_same_tensor(out, a.pooled(), where=f"pooled on unit {isa}, {threads} threads")


@requirement(
    "PIPE-003", "A step MUST have the bits of the optimizers' formulas on sums in order of position.", needs=KERNELS
)
@examples(80)
@given(st.data(), st.sampled_from(OPTIMIZERS), st.sampled_from(UNITS), st.integers(1, 4))
def test_pipe_003_steps(pipeline: Any, data: st.DataObject, optimizer: str, isa: int, threads: int) -> None:
    from fastimpl import ops

    a = draw_arguments(data, optimizer)
    expected = a.stepped()
    with torch_threads(threads):
        a.step(ops, a.tables, isa=isa)
    for name, mine, theirs in zip(("weight", "momentum1", "momentum2"), a.written(), expected, strict=True):
        for table, (got, wanted) in enumerate(zip(mine, theirs, strict=True)):
            assert_same_tensor(got, wanted, where=f"{name} of table {table} by {optimizer} on unit {isa}")


@requirement(
    "PIPE-004", "A row that occurs 100000 times MUST get the same bits on any number of threads.", needs=KERNELS
)
def test_pipe_004_one_row_very_often(pipeline: Any) -> None:
    from fastimpl import ops

    generator = torch.Generator().manual_seed(1)
    indices = torch.where(torch.rand(120_000, generator=generator) < 5 / 6, 7, torch.randint(0, 50, (120_000,)))
    offsets, grad = torch.arange(301) * 400, torch.randn(300, 72, generator=generator)
    before, expected = torch.randn(50, 72, generator=generator), torch.empty(0)
    for count in (1, 2, 3, 4):
        table, momentum = before.clone(), torch.zeros(50)
        with torch_threads(count):
            none = [torch.empty(0)]
            ops.step_bags([table], [momentum], none, [0], indices, offsets, None, [False], grad, "rowwise_adagrad", 0.1)
        if count == 1:
            expected = table
            sums = torch.zeros(72)
            for bag in (indices == 7).nonzero()[:, 0].tolist():
                sums = sums + grad[bag // 400]
            square = row_sum(sums[None] * sums[None])[0] / torch.tensor(72.0)
            assert_same_tensor(momentum[7:8], square, where="momentum of the row")
        assert_same_tensor(table, expected, where=f"table with {count} threads")


@requirement(
    "PIPE-005",
    "What would read or write outside MUST raise RuntimeError and change nothing. It says how many ids, where the "
    "first is, and which shape is wanted.",
    needs=KERNELS,
)
@examples(60)
@given(st.data())
def test_pipe_005_refusals(pipeline: Any, data: st.DataObject) -> None:
    from fastimpl import ops

    a = draw_arguments(data, "adagrad", is_filled=True)
    changes = ("a negative id", "an id too large", "falling offsets", "offsets that end early", "a first offset of 1")
    change = data.draw(st.sampled_from(changes))
    offsets, indices = a.offsets.clone(), a.indices.clone()
    at = data.draw(st.integers(0, indices.numel() - 1))
    if change == "a negative id":
        indices[at] = -1
    elif change == "an id too large":
        indices[at] = max(table.shape[0] for table in a.tables)
    elif change == "falling offsets":
        offsets[offsets.numel() // 2] = indices.numel() + 1
    elif change == "offsets that end early":
        offsets[-1] -= 1
    else:
        offsets[0] = 1
    before = [[tensor.clone() for tensor in group] for group in a.written()]
    out = torch.full_like(a.grad, 7.0)
    bad = Arguments(**{**vars(a), "indices": indices, "offsets": offsets})
    bags = (a.feature_tables, indices, offsets)
    said = (f"1 outside of their tables, the first at position {at}",) if change.endswith(("id", "large")) else ()
    with raises(RuntimeError, mentions=said, where=f"pooling with {change}"):
        ops.pool_bags(a.tables, *bags, a.weights, a.means, out)
    with raises(RuntimeError, mentions=said, where=f"a step with {change}"):
        bad.step(ops, a.tables)
    with raises(RuntimeError, where=f"gradients of weights with {change}"):
        ops.bag_weight_gradients(a.tables, *bags, a.means, a.grad)
    (bag_count, width), good = out.shape, (a.feature_tables, a.indices, a.offsets)
    with raises(RuntimeError, mentions=(f"got [{bag_count + 1}, {width}], expected [{bag_count}, {width}]",)):
        ops.pool_bags(a.tables, *good, a.weights, a.means, torch.zeros(bag_count + 1, width))
    assert_same_tensor(out, torch.full_like(out, 7.0), where=f"out after {change}")
    for mine, theirs in zip(a.written(), before, strict=True):
        for got, wanted in zip(mine, theirs, strict=True):
            assert_same_tensor(got, wanted, where=f"tables and states after {change}")


@requirement(
    "PIPE-006", "Ids outside of their table MUST be counted, the first placed, and mended to 0.", needs=KERNELS
)
@examples(60)
@given(st.data(), st.integers(1, 4))
def test_pipe_006_ids(pipeline: Any, data: st.DataObject, threads: int) -> None:
    from fastimpl import ops

    a = draw_arguments(data)
    counts = [data.draw(st.integers(0, 5)) for _ in a.feature_tables]
    indices = a.indices + data.draw(st.integers(-3, 3))
    rows = torch.tensor(counts).repeat_interleave(a.lengths().view(len(counts), -1).sum(1))
    bad = (indices < 0) | (indices >= rows)
    with torch_threads(threads):
        found = ops.check_bag_ids(indices, a.offsets, counts)
        mended = ops.mend_bag_ids(indices, a.offsets, counts)
    assert_equal(found, (int(bad.sum()), int(bad.nonzero()[0]) if bad.any() else -1), where="ids outside")
    assert_same_tensor(mended, indices.masked_fill(bad, 0), where="mended ids")


@requirement("PIPE-007", "Blocks MUST be gathered one after the other, and one outside be refused.", needs=KERNELS)
@examples(60)
@given(
    st.sampled_from([torch.uint8, torch.float16, torch.float32, torch.int64]),
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=8),
)
def test_pipe_007_blocks(pipeline: Any, dtype: torch.dtype, blocks: list[tuple[int, int]]) -> None:
    from fastimpl import ops

    data = torch.arange(24).to(dtype)
    begins, sizes = torch.tensor(blocks, dtype=torch.int64).reshape(-1, 2).unbind(1)
    out = torch.empty(int(sizes.sum()), dtype=dtype)
    ops.gather_blocks(data, begins.contiguous(), sizes.contiguous(), out)
    expected = [data[begin : begin + size] for begin, size in blocks]
    assert_same_tensor(out, torch.cat([data[:0], *expected]), where="gathered blocks")
    for begin, size in ((-1, 2), (23, 2), (25, 0), (0, -1)):
        with raises(RuntimeError, where=f"block {begin}, {size}"):
            ops.gather_blocks(data, torch.tensor([begin]), torch.tensor([size]), torch.empty(max(size, 0), dtype=dtype))


@requirement("PIPE-008", "Ids MUST be bucketized by block, stably, or as told, and none be lost.", needs=KERNELS)
@examples(60)
@given(st.data(), st.integers(1, 4), st.integers(1, 4))
def test_pipe_008_buckets(pipeline: Any, data: st.DataObject, bucket_count: int, threads: int) -> None:
    from fastimpl import ops

    a = draw_arguments(data)
    scale = data.draw(st.sampled_from([1, 1_000_003, 2**58]))
    sizes = torch.tensor([scale * data.draw(st.integers(1, 4)) for _ in a.feature_tables])
    of_id = sizes.repeat_interleave(a.lengths().view(sizes.numel(), -1).sum(1))
    buckets = torch.remainder(a.indices.long(), bucket_count)
    indices = buckets * of_id + torch.remainder(a.indices.long() * 7 - 1, of_id)
    order = torch.argsort(buckets, stable=True)
    bags = torch.arange(a.lengths().numel()).repeat_interleave(a.lengths())
    lengths = torch.bincount(buckets * a.lengths().numel() + bags, minlength=bucket_count * a.lengths().numel())
    for blocks, told, ids in ((sizes, None, indices - buckets * of_id), (None, buckets, indices)):
        with torch_threads(threads):
            found = ops.bucketize(indices, a.offsets, a.weights, blocks, bucket_count, destinations=told)
        assert_same_tensor(found[0], lengths, where="lengths")
        assert_same_tensor(found[3], order, where="positions")
        assert_same_tensor(found[1], ids[order], where="ids")
        assert_equal(found[2] is None, a.weights is None, where="weights")
        if found[2] is not None and a.weights is not None:
            assert_same_tensor(found[2], a.weights[order], where="weights")
    if indices.numel():
        outside = indices.clone()
        outside[-1] = -1 if scale == 2**58 else bucket_count * int(of_id[-1])
        with raises(RuntimeError, where="an id beyond the last block"):
            ops.bucketize(outside, a.offsets, a.weights, sizes, bucket_count)


@requirement("PIPE-009", "The gradient of a weight MUST have the bits of row_sum of row times gradient.", needs=KERNELS)
@examples(60)
@given(st.data(), st.sampled_from(UNITS), st.integers(1, 4))
def test_pipe_009_weight_gradients(pipeline: Any, data: st.DataObject, isa: int, threads: int) -> None:
    from fastimpl import ops

    a = draw_arguments(data)
    with torch_threads(threads):
        got = ops.bag_weight_gradients(a.tables, a.feature_tables, a.indices, a.offsets, a.means, a.grad, isa=isa)
    wanted = [row_sum((grad * a.tables[t][row].float())[None])[0] for t, row, grad, _ in a.occurrences()]
    assert_same_tensor(got, torch.cat([torch.empty(0), *wanted]), where="gradients of weights")


@requirement(
    "PIPE-361",
    "Operators that gather blocks and that send ids to buckets MUST refuse tensors and numbers that do not fit each "
    "other, and leave what they would write as it was.",
    needs=KERNELS,
)
def test_misuse_of_buckets(pipeline: Any) -> None:
    operators = torch.ops.twinproof
    data, begins, sizes, out = torch.arange(10.0), torch.tensor([3, 0]), torch.tensor([4, 6]), torch.full((10,), 7.0)
    gathers: dict[str, tuple[torch.Tensor, ...]] = {
        "data in two dimensions": (data.view(2, 5), begins, sizes, out),
        "data with gaps": (torch.arange(20.0)[::2], begins, sizes, out),
        "begins of int32": (data, begins.int(), sizes, out),
        "a size for two begins": (data, begins, sizes[:1], out),
        "begins with gaps": (data, torch.tensor([3, 0, 0, 0])[::2], sizes, out),
        "sizes in two dimensions": (data, begins, sizes.view(2, 1), out),
        "another dtype to write": (data, begins, sizes, out.double()),
        "sizes whose sum wraps": (data, begins, torch.tensor([2**63 - 1, 2]), out),
    }
    for what, arguments in gathers.items():
        with raises(RuntimeError, where=what):
            operators.pipeline_gather_blocks(*arguments)
        assert_same_tensor(out, torch.full((10,), 7.0), where=f"written with {what}")
    ids, offsets, blocks, to = (
        torch.tensor([0, 5, 3]),
        torch.tensor([0, 1, 3]),
        torch.tensor([3]),
        torch.tensor([0, 1, 1]),
    )
    good = (ids, offsets, None, blocks, None, 1, 2)
    operators.pipeline_bucketize(*good)
    changes: dict[str, dict[int, Any]] = {
        "-1 features": {5: -1},
        "no bucket": {6: 0},
        "2**31 buckets": {6: 2**31},
        "neither blocks nor destinations": {3: None},
        "both blocks and destinations": {4: to},
        "blocks of two features": {3: torch.tensor([3, 3])},
        "blocks of int32": {3: blocks.int()},
        "blocks of less than no ids": {3: torch.tensor([-1])},
        "two destinations of three": {3: None, 4: to[:2]},
        "a destination behind the last bucket": {3: None, 4: torch.tensor([0, 2, 1])},
        "a destination before the first bucket": {3: None, 4: torch.tensor([0, -1, 1])},
        "more lengths than memory holds": {1: torch.tensor([0] * 1024 + [3]), 6: 2**31 - 1},
        "destinations of int32": {3: None, 4: to.int()},
        "weights of two": {2: torch.ones(2)},
        "ids of float32": {0: ids.float()},
        "ids in two dimensions": {0: ids.view(3, 1)},
        "ids with gaps": {0: torch.zeros(6, dtype=torch.int64)[::2]},
    }
    for what, change in changes.items():
        with raises(RuntimeError, where=what):
            operators.pipeline_bucketize(*(change.get(position, value) for position, value in enumerate(good)))


def _bag_calls() -> dict[str, tuple[Any, list[Any]]]:
    """Calls of the operators of bags whose arguments do not fit: two tables, a feature of each, two bags."""
    operators, numbers = torch.ops.twinproof, [0.1, 1e-8, 0.9, 0.1, 0.999, 0.001, 1.0, 0.03]
    tables = [torch.ones(6, 4), torch.ones(5, 3, dtype=torch.float16)]
    momenta = [torch.ones(6, 4), torch.ones(5, 3)]
    ids, offsets, weights, grad = (
        torch.tensor([0, 5, 3, 4]),
        torch.tensor([0, 1, 2, 3, 4]),
        torch.ones(4),
        torch.ones(2, 7),
    )
    gaps = torch.zeros(8, dtype=torch.int64)[::2]
    batch: dict[str, dict[str, Any]] = {
        "no mean": {"means": []},
        "three means": {"means": [0, 0, 0]},
        "a table in one dimension": {"tables": [tables[0], torch.ones(15)]},
        "a table with gaps": {"tables": [tables[0], torch.ones(5, 6)[:, ::2]]},
        "a table without columns": {"tables": [tables[0], torch.ones(5, 0)]},
        "a table of float64": {"tables": [tables[0].double(), tables[1]]},
        "table -1": {"used": [0, -1]},
        "table 2": {"used": [0, 2]},
        "ids of float32": {"ids": ids.float()},
        "ids in two dimensions": {"ids": ids.view(2, 2)},
        "ids with gaps": {"ids": gaps},
        "an id less": {"ids": ids[:3]},
        "offsets of int32": {"offsets": offsets.int()},
        "offsets in two dimensions": {"offsets": offsets.view(1, 5)},
        "offsets with gaps": {"offsets": torch.zeros(10, dtype=torch.int64)[::2]},
        "no offset": {"offsets": offsets[:0]},
        "bags of half a feature": {"offsets": offsets[:4]},
        "no feature for four bags": {"used": []},
        "an instruction set that nobody has": {"isa": 99},
        "an instruction set of -2": {"isa": -2},
    }
    weighted = {
        "a weight less": {"weights": weights[:3]},
        "weights of float64": {"weights": weights.double()},
        "weights in two dimensions": {"weights": weights.view(2, 2)},
    }
    pooled = {
        "a column less": {"grad": grad[:, :6].contiguous()},
        "a bag more": {"grad": torch.ones(3, 7)},
        "pooled in one dimension": {"grad": torch.ones(14)},
        "pooled of float64": {"grad": grad.double()},
        "pooled with gaps": {"grad": torch.ones(7, 2).t()},
    }
    stepped: dict[str, dict[str, Any]] = {
        "optimizer 0": {"optimizer": 0},
        "an optimizer that is none": {"optimizer": 99},
        "seven numbers": {"numbers": numbers[:7]},
        "a first momentum": {"first": momenta[:1]},
        "no second momentum": {"second": []},
        "a momentum of fewer rows": {"first": [torch.ones(5, 4), momenta[1]]},
        "a momentum of fewer columns": {"first": [torch.ones(6, 3), momenta[1]]},
        "a momentum of float16": {"first": [momenta[0].half(), momenta[1]]},
        "a momentum in one dimension": {"second": [momenta[0].view(-1), momenta[1]]},
        "a momentum of SGD": {"optimizer": 1},
    }
    good = {"tables": tables, "used": [0, 1], "ids": ids, "offsets": offsets, "weights": weights, "means": [0, 1],
            "grad": grad, "isa": -1, "first": momenta, "second": momenta, "optimizer": 4, "numbers": numbers,
            "blocks": 0}  # fmt: skip
    orders = {
        "pipeline_pool": ("tables", "used", "ids", "offsets", "weights", "means", "grad", "isa", "blocks"),
        "pipeline_step": ("tables", "first", "second", "used", "ids", "offsets", "weights", "means", "grad",
                          "optimizer", "numbers", "isa"),
        "pipeline_weight_gradients": ("tables", "used", "ids", "offsets", "means", "grad", "isa"),
    }  # fmt: skip
    changes = {
        "pipeline_pool": {**batch, **weighted, **pooled, "-1 blocks": {"blocks": -1}},
        "pipeline_step": {**batch, **weighted, **pooled, **stepped},
        "pipeline_weight_gradients": {**batch, **pooled},
    }
    return {
        f"{name}: {what}": (getattr(operators, name), [{**good, **change}[key] for key in orders[name]])
        for name, of_it in changes.items()
        for what, change in of_it.items()
    }


def _id_calls() -> dict[str, tuple[Any, list[Any]]]:
    operators, ids, offsets = torch.ops.twinproof, torch.tensor([0, 5, 3, 4]), torch.tensor([0, 1, 2, 3, 4])
    calls: dict[str, tuple[Any, list[Any]]] = {}
    for name in ("check", "mend", "settle"):
        operator = getattr(operators, f"pipeline_{name}_ids")
        calls |= {
            f"{name}: a table of -2 rows": (operator, [ids, offsets, [6, -2]]),
            f"{name}: ids of float32": (operator, [ids.float(), offsets, [6, 5]]),
            f"{name}: ids with gaps": (operator, [torch.zeros(8, dtype=torch.int64)[::2], offsets, [6, 5]]),
            f"{name}: bags of half a feature": (operator, [ids, offsets[:4], [6, 5]]),
            f"{name}: no offset": (operator, [ids, offsets[:0], [6, 5]]),
            f"{name}: no feature for four bags": (operator, [ids, offsets, []]),
            f"{name}: offsets of int32": (operator, [ids, offsets.int(), [6, 5]]),
        }
    calls["memory with gaps"] = (operators.pipeline_advise_huge_pages, [torch.ones(8)[::2]])
    return calls


def _step_too_many_rows() -> None:
    """A step whose word, of a row and what goes with it, would need more than 64 bits: 2**42 rows and 2**21 bags."""
    # Nothing of it is touched.
    reserved = mmap.mmap(-1, 1 << 29, flags=mmap.MAP_PRIVATE | _MAP_NORESERVE)
    count, bag_count = 1 << 14, 1 << 21
    tables, nothing = [torch.frombuffer(reserved, dtype=torch.float16).view(-1, 1)] * count, [torch.empty(0)] * count
    offsets = torch.zeros(bag_count + 1, dtype=torch.int64)
    offsets[-1] = 1
    torch.ops.twinproof.pipeline_step(
        tables, nothing, nothing, [0], torch.tensor([5]), offsets, None, [0] * count, torch.ones(bag_count, 1), 1,
        [0.1] * 8, -1,
    )  # fmt: skip


@requirement(
    "PIPE-362",
    "Every operator of bags and ids MUST refuse tensors and numbers that do not fit each other, and then change "
    "nothing; batches without features, bags or ids are no misfit.",
    needs=KERNELS,
)
def test_misfits(pipeline: Any) -> None:
    for what, (operator, arguments) in {**_bag_calls(), **_id_calls()}.items():
        assert_refused(operator, arguments, where=what)
    operators, none, table = torch.ops.twinproof, torch.tensor([], dtype=torch.int64), [torch.ones(3, 2)]
    start, out = torch.tensor([0]), torch.full((0, 2), 7.0)
    operators.pipeline_pool(table, [0], none, start, None, [0], out, -1)
    operators.pipeline_pool(table, [], none, start, None, [0], torch.full((4, 0), 7.0), -1)
    assert_equal(operators.pipeline_check_ids(none, start, []).tolist()[0], 0, where="ids of no feature")
    assert_equal(operators.pipeline_mend_ids(none, start, [3]).numel(), 0, where="ids of no bag")
    operators.pipeline_step(
        table, [torch.empty(0)], [torch.empty(0)], [0], none, start, None, [0], out, 1, [0.1] * 8, -1
    )
    with raises(RuntimeError, mentions=("too many rows",), where="steps of too many rows for so many bags"):
        _step_too_many_rows()
    operators.pipeline_advise_huge_pages(torch.zeros(3))
    operators.pipeline_advise_huge_pages(torch.zeros(8 << 20, dtype=torch.uint8))
    assert_same_tensor(table[0], torch.ones(3, 2), where="table after steps of nothing")
