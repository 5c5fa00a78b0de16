"""Calls of the pipeline's CUDA operators: every table dtype, id type and optimizer, sums and means, weighted or not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from conformance.pipeline.model import DTYPES
from conformance.pipeline.strategies import LR, Arguments
from perf.gpu.operators import Calls, OperatorCall
from twinproof.optimizers import FUSED_OPTIMIZERS, OPTIMIZERS, Hyper

__all__ = ["CALLS"]

_FEATURES, _LONGEST = 4, 10
_IDS = (torch.int32, torch.int64)
_BUCKETS = 8


def _arguments(
    count: int,
    generator: torch.Generator,
    *,
    dtypes: Sequence[torch.dtype] = DTYPES,
    ids: torch.dtype = torch.int64,
    optimizer: str = "sgd",
    is_weighted: bool = False,
) -> Arguments:
    seed = int(torch.randint(1 << 30, (), generator=generator))
    # Rows occur several times, and those of several tables with their states are made in seconds.
    bags = max(1, count * 2 // (_FEATURES * _LONGEST))
    shape = {"features": _FEATURES, "bags": bags, "longest": _LONGEST, "rows": max(4, count // 8)}
    return Arguments.of(seed, dtypes, optimizer, is_weighted=is_weighted, ids=ids, **shape)


def _lookups(count: int, generator: torch.Generator) -> Iterator[tuple[str, Arguments]]:
    for dtype in DTYPES:
        for ids in _IDS:
            for is_weighted in (False, True):
                made = _arguments(count, generator, dtypes=[dtype, dtype], ids=ids, is_weighted=is_weighted)
                yield f"{dtype}, {ids}{', weighted' if is_weighted else ''}", made
    yield "all dtypes", _arguments(count, generator)


def _row_bytes(a: Arguments) -> int:
    """Of all rows that the ids of a batch name, each as often as it occurs."""
    lengths = a.lengths().view(len(a.feature_tables), -1).sum(dim=1).tolist()
    sizes = [a.tables[table].shape[1] * a.tables[table].element_size() for table in a.feature_tables]
    return int(sum(length * size for length, size in zip(lengths, sizes, strict=True)))


def _id_bytes(a: Arguments) -> int:
    return a.indices.nbytes + a.offsets.nbytes + (a.weights.nbytes if a.weights is not None else 0)


def _pool(count: int, generator: torch.Generator) -> Iterator[OperatorCall]:
    for label, a in _lookups(count, generator):
        out, means = torch.zeros_like(a.grad), [int(mean) for mean in a.means]
        arguments = (a.tables, a.feature_tables, a.indices, a.offsets, a.weights, means, out, -1, 0)
        yield OperatorCall(label, arguments, _row_bytes(a) + _id_bytes(a) + out.nbytes)


def _step(count: int, generator: torch.Generator) -> Iterator[OperatorCall]:
    for optimizer in sorted(FUSED_OPTIMIZERS):
        for is_weighted, ids in ((False, torch.int64), (True, torch.int32)):
            a = _arguments(count, generator, ids=ids, optimizer=optimizer, is_weighted=is_weighted)
            hyper = Hyper(LR, a.step_number, 1e-8, 0.9, 0.999)
            values = [LR, 1e-8, 0.9, 1 - 0.9, 0.999, 1 - 0.999, hyper.step_size, hyper.root_correction]
            bags = (a.feature_tables, a.indices, a.offsets, a.weights, [int(mean) for mean in a.means])
            code = OPTIMIZERS[optimizer].code
            arguments = (a.tables, a.momentum1, a.momentum2, *bags, a.grad, code, values, -1)
            label = f"{optimizer}, {ids}{', weighted' if is_weighted else ''}"
            yield OperatorCall(label, arguments, _id_bytes(a) + a.grad.nbytes + 2 * _touched_bytes(a))


def _touched_bytes(a: Arguments) -> int:
    """Of the distinct rows and their states, which a step reads and writes once."""
    total = 0
    ids = torch.split(a.indices, a.lengths().view(len(a.feature_tables), -1).sum(dim=1).tolist())
    for number, table in enumerate(a.tables):
        mine = [found for used, found in zip(a.feature_tables, ids, strict=True) if used == number]
        distinct = torch.unique(torch.cat(mine)).numel() if mine else 0
        rows = max(1, table.shape[0])
        state_bytes = a.momentum1[number].nbytes + a.momentum2[number].nbytes
        total += distinct * (table.nbytes + state_bytes) // rows
    return total


def _weight_gradients(count: int, generator: torch.Generator) -> Iterator[OperatorCall]:
    for label, a in _lookups(count, generator):
        means = [int(mean) for mean in a.means]
        arguments = (a.tables, a.feature_tables, a.indices, a.offsets, means, a.grad, -1)
        yield OperatorCall(label, arguments, _row_bytes(a) + _id_bytes(a) + a.grad.nbytes + 4 * a.indices.numel())


def _row_counts(a: Arguments) -> list[int]:
    return [a.tables[table].shape[0] for table in a.feature_tables]


def _bad_ids(count: int, generator: torch.Generator) -> Iterator[tuple[str, Arguments]]:
    for ids in _IDS:
        a = _arguments(count, generator, ids=ids)
        yield f"{ids}, good", a
        bad = torch.randint(0, 50, a.indices.shape, generator=generator) == 0
        a.indices = torch.where(bad, -1 - a.indices, a.indices)
        yield f"{ids}, some bad", a


def _check_ids(count: int, generator: torch.Generator) -> Iterator[OperatorCall]:
    for label, a in _bad_ids(count, generator):
        yield OperatorCall(label, (a.indices, a.offsets, _row_counts(a)), _id_bytes(a))


def _mend_ids(count: int, generator: torch.Generator) -> Iterator[OperatorCall]:
    for label, a in _bad_ids(count, generator):
        yield OperatorCall(label, (a.indices, a.offsets, _row_counts(a)), _id_bytes(a) + a.indices.nbytes)


def _settle_ids(count: int, generator: torch.Generator) -> Iterator[OperatorCall]:
    for label, a in _bad_ids(count, generator):
        # Ids and offsets are read and written.
        yield OperatorCall(label, (a.indices, a.offsets, _row_counts(a)), 2 * _id_bytes(a))
        wrong = a.offsets.clone()
        wrong[wrong.numel() // 2] = -1
        yield OperatorCall(f"{label}, wrong offsets", (a.indices, wrong, _row_counts(a)), 2 * _id_bytes(a))


def _gather_blocks(count: int, generator: torch.Generator) -> Iterator[OperatorCall]:
    for dtype in (torch.uint8, torch.bfloat16, torch.float32, torch.int64):
        data = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator).view(dtype)
        sizes = torch.randint(0, 2 * _LONGEST, (max(1, count // _LONGEST),), generator=generator)
        begins = (torch.rand(sizes.shape, generator=generator) * (count - sizes)).to(torch.int64)
        out = torch.zeros(int(sizes.sum()), dtype=dtype)
        yield OperatorCall(f"{dtype}", (data, begins, sizes, out), 2 * out.nbytes + begins.nbytes + sizes.nbytes)


def _bucketize(count: int, generator: torch.Generator) -> Iterator[OperatorCall]:
    for ids in _IDS:
        for is_weighted in (False, True):
            a = _arguments(count, generator, ids=ids, is_weighted=is_weighted)
            blocks = torch.tensor([-(-rows // _BUCKETS) for rows in _row_counts(a)])
            label = f"{ids}{', weighted' if is_weighted else ''}"
            # Ids, weights, and positions that are written; ids and weights that are read.
            moved_bytes = 2 * _id_bytes(a) + 8 * a.indices.numel()
            given = (a.indices, a.offsets, a.weights)
            yield OperatorCall(f"blocks, {label}", (*given, blocks, None, _FEATURES, _BUCKETS), moved_bytes)
            places = torch.randint(0, _BUCKETS, a.indices.shape, generator=generator)
            yield OperatorCall(
                f"destinations, {label}", (*given, None, places, 1, _BUCKETS), moved_bytes + places.nbytes
            )


CALLS: dict[str, Calls] = {
    "pipeline_bucketize": _bucketize,
    "pipeline_check_ids": _check_ids,
    "pipeline_gather_blocks": _gather_blocks,
    "pipeline_mend_ids": _mend_ids,
    "pipeline_pool": _pool,
    "pipeline_settle_ids": _settle_ids,
    "pipeline_step": _step,
    "pipeline_weight_gradients": _weight_gradients,
}
