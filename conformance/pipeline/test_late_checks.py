"""N. Checks of ids on a device, whose answer the host reads where it waits anyway; and operators that wait for nothing.

What a check finds, and what is raised, logged or changed for it, is the host's; only the moment is another: the first
``wait`` of a sharded collection's exchange, before anything is looked up.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.harness import Rank, assert_equal, assert_same_tensor, examples, raises, requirement
from conformance.harness.devices import kernel_sources
from conformance.harness.places import on_pretend
from conformance.pipeline.batches import Jagged, random_jagged, values_of
from conformance.pipeline.cases import FUSED
from conformance.pipeline.jobs import Job
from conformance.pipeline.model import DTYPES, OPTIMIZERS, assert_bits
from conformance.pipeline.sharding import collection_of, sharded_of, sharded_tensors
from conformance.pipeline.strategies import Arguments, draw_arguments
from conformance.pipeline.virtual_batches import on_host, virtual
from conformance.provers.pretend_device import launchers_of
from conformance.provers.virtual_device import VirtualDevice
from twinproof.errors import DistributedError, ShapeError, TwinproofError
from twinproof.pipeline.jagged import Bags

KINDS = ("table_wise", "column_wise", "row_wise", "data_parallel")
_NO_POSITION = 2**63 - 1


def _model(pipeline: Any, kind: str, check: str = "fatal", group: Any = None, rank: int = 0) -> Any:
    """Two features in tables of 6 rows, of which a batch's ids may be outside."""
    configs = [pipeline.EmbeddingBagConfig(6, 4, f"t{i}", feature_names=[f"f{i}"]) for i in range(2)]
    collection = collection_of(pipeline, configs, [values_of((6, 4), i) for i in range(2)])
    whose = {"table_wise": (rank,), "column_wise": ([rank],)}.get(kind, ())
    plan = {config.name: getattr(pipeline, kind)(*whose) for config in configs}
    return sharded_of(pipeline, collection, plan, "adagrad", group, bounds_check=check, device="cpu")


def _jagged(bad: Any) -> Jagged:
    """Some good ids, then bad ones in both features."""
    return Jagged(["f0", "f1"], [[[1, 2], [], [5]], [[0], [bad[0], 3, bad[1]], [2, 2]]])


def _state(sharded: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().cpu().clone() for name, value in sharded_tensors(sharded).items()}


def _outcome(sharded: Any, batch: Any, caplog: Any) -> tuple[str, list[str], Any]:
    """The error of a step or none, its lines in the log, and what was pooled; both devices take a step."""
    caplog.clear()
    try:
        pooled = sharded(batch).values()
    except TwinproofError as error:
        return f"{type(error).__name__}: {error}", [], None
    pooled.sum().backward()
    return "", [record.getMessage() for record in caplog.records], pooled.detach().cpu()


@requirement(
    "PIPE-331",
    "Ids outside of their tables MUST be told on a device as on the host, under every check and kind of sharding: the "
    "same error with the same count, first position, table and value; the same line in the log; the same bits.",
)
def test_same_as_on_the_host(pipeline: Any, caplog: Any) -> None:
    for kind in KINDS:
        for check in ("fatal", "warning", "ignore"):
            for bad in ((6, -1), (-(2**63), 2**63 - 1), (0, 7), (4, 4)):
                batch = _jagged(bad).kjt(pipeline)
                arms = [_model(pipeline, kind, check) for _ in range(2)]
                expected = _outcome(arms[0], batch, caplog)
                with on_pretend() as device:
                    found = _outcome(arms[1].to(device.device), batch.to(device.device), caplog)
                where = f"{kind}, {check}, {bad}"
                assert_equal(found[:2], expected[:2], where=where)
                if expected[2] is not None:
                    assert_bits(found[2], expected[2], f"{where}: pooled")
                for name, value in _state(arms[1]).items():
                    assert_bits(value, _state(arms[0])[name], f"{where}: {name}")


def _lengths(pipeline: Any, lengths: list[int]) -> Any:
    """A batch of 6 ids, whose lengths may be of more, or of fewer, or below zero."""
    ids = torch.tensor([1, 2, 5, 0, 3, 2])
    return pipeline.KeyedJaggedTensor(["f0", "f1"], ids, lengths=torch.tensor(lengths))


def _wrong_lengths(rank: Rank) -> None:
    pipeline = rank.component("pipeline")
    wrong = [[1, 2, 3, 1], [1, 1, 1, 1], [2, -1, 4, 1], [0, 0, 2**62, 2**62]]
    for kind in KINDS[:3]:
        for check in ("fatal", "ignore"):
            sharded = _model(pipeline, kind, check, rank.group, rank.world_size - 1)
            before = _state(sharded)
            with on_pretend() as device:
                sharded.to(device.device)
                for lengths in wrong:
                    mine = lengths if rank.rank == 0 else [1, 2, 2, 1]
                    dist = sharded.input_dist(sharded.create_context(), _lengths(pipeline, mine).to(device.device))
                    expected = ShapeError if rank.rank == 0 else DistributedError
                    with raises(expected, where=f"{kind}, {check}, {lengths}", mentions=("offsets do not cut",)):
                        dist.wait()
                for name, value in _state(sharded).items():
                    assert_bits(value, before[name], f"{kind}, {check}: {name}")
                good = _lengths(pipeline, [1, 2, 2, 1]).to(device.device)
                sharded(good).values().sum().backward()


@requirement(
    "PIPE-332",
    "Lengths that do not cut the ids MUST be refused by name on a device at the first wait of the exchange, on every "
    "rank, whatever the check of ids; nothing is stepped, and the next batch runs.",
    needs=("streams",),
)
def test_wrong_lengths(rank_pool: Any) -> None:
    for world_size in (1, 2):
        rank_pool.run(_wrong_lengths, world_size)


def _one_wait(rank: Rank) -> None:
    pipeline = rank.component("pipeline")
    for kind in KINDS[:3]:
        with on_pretend() as device:
            where = rank.world_size - 1
            models = [_model(pipeline, kind, group=rank.group, rank=where).to(device.device) for _ in range(3)]
            for step in range(2):
                batch = random_jagged(["f0", "f1"], [6, 6], 3, step).kjt(pipeline).to(device.device)
                begin = device.mark
                contexts = [model.create_context() for model in models]
                dists = [model.input_dist(ctx, batch) for model, ctx in zip(models, contexts, strict=True)]
                pipeline.fuse_input_dists(dists)
                for model, ctx, given_ids in zip(models, contexts, dists, strict=True):
                    pooled = model.compute_and_output_dist(ctx, given_ids.wait().wait()).wait().values()
                    pooled.sum().backward()
                if step:
                    counts = device.counts(begin)
                    assert_equal(counts.host_waits, 1, where=f"{kind}: waits of the host")
                    assert_equal(counts.to_device.count, 0, where=f"{kind}: copies to the device")


@requirement(
    "PIPE-333",
    "In a step of any number of sharded collections, exchanged together, of tables that are cut, the host MUST wait "
    "for the device once, on 1 to 3 ranks; launchers wait for nothing and send no arguments in host memory.",
    needs=("streams",),
)
def test_one_wait(rank_pool: Any) -> None:
    for world_size in (1, 2, 3):
        rank_pool.run(_one_wait, world_size)


@requirement(
    "PIPE-334",
    "Pooling, the fused step, gradients of weights, checks and movement of ids MUST neither make the host wait nor "
    "copy host memory, so that a graph may hold their launches.",
    needs=("bag_kernels",),
)
def test_nothing_for_a_graph_to_refuse(pipeline: Any) -> None:
    from fastimpl import ops

    sources = kernel_sources()
    if sources is None:
        pytest.skip("the package has no CUDA sources, which say what launchers do")
    for name, launcher in launchers_of(sources).items():
        if name.startswith("twinproof::pipeline_"):
            assert_equal((launcher.wait_count, launcher.upload_count), (0, 0), where=name)
    for seed, optimizer in enumerate(OPTIMIZERS):
        a = Arguments.of(seed, DTYPES, optimizer, is_weighted=seed % 2 == 0)
        with on_pretend() as device:
            b = _there(a, device.device)
            out, counts = torch.empty_like(b.grad), [b.tables[table].shape[0] for table in b.feature_tables]
            begin = device.mark
            ids, offsets, found = ops.settle_bags(b.indices, b.offsets, counts)
            bags = (b.feature_tables, ids, offsets, b.weights, b.means)
            ops.pool_bags(b.tables, *bags, out)
            ops.bag_weight_gradients(b.tables, b.feature_tables, ids, offsets, b.means, b.grad)
            ops.step_bags(b.tables, b.momentum1, b.momentum2, *bags, b.grad, optimizer, 0.1)
            counted = device.counts(begin)
            assert_equal((counted.host_waits, counted.to_device.count), (0, 0), where=f"{optimizer}: in a graph")
            assert_equal(counted.launches >= 4, True, where=f"{optimizer}: launches")
            assert_equal(int(found[0]), 0, where=f"{optimizer}: ids outside")


def _there(a: Arguments, device: torch.device) -> Arguments:
    """The same on a device."""
    found = Arguments.__new__(Arguments)
    for name, value in vars(a).items():
        if isinstance(value, torch.Tensor):
            value = value.to(device)
        elif isinstance(value, list) and value and isinstance(value[0], torch.Tensor):
            value = [part.to(device) for part in value]
        setattr(found, name, value)
    return found


@requirement(
    "PIPE-335",
    "What a late check hands on MUST lead nowhere else, whatever it was given: ids outside of their tables are 0, and "
    "of offsets that are none every id is 0 and in the last bag; it says how many, and which is the first.",
    needs=("bag_kernels",),
)
@examples(80)
@given(st.data())
def test_what_is_handed_on(pipeline: Any, data: st.DataObject) -> None:
    from fastimpl import ops

    a = draw_arguments(data)
    counts = [a.tables[table].shape[0] for table in a.feature_tables]
    of_id = torch.tensor(counts).repeat_interleave(a.lengths().view(len(counts), -1).sum(1))
    indices = a.indices.clone()
    for place in data.draw(st.lists(st.integers(0, max(0, indices.numel() - 1)), max_size=4)):
        if indices.numel():
            indices[place] = data.draw(st.sampled_from([-1, counts[-1], 2**31 - 1, -(2**31)]))
    offsets = a.offsets.clone()
    if data.draw(st.booleans()):
        place = data.draw(st.integers(0, offsets.numel() - 1))
        offsets[place] = data.draw(st.sampled_from([-1, 0, int(offsets[-1]) + 1, 2**63 - 1]))
    ids, ends, found = ops.settle_bags(indices, offsets, counts)
    falls = [at for at in range(1, offsets.numel()) if offsets[at] < offsets[at - 1]]
    wrong = ([0] if offsets[0] else []) + falls + ([offsets.numel() - 1] if offsets[-1] != indices.numel() else [])
    if wrong:
        assert_equal(found.tolist(), [-1, min(wrong)], where="wrong offsets")
        assert_same_tensor(ids, torch.zeros_like(indices), where="ids of wrong offsets")
        last = torch.zeros_like(offsets)
        last[-1] = indices.numel()
        assert_same_tensor(ends, last, where="offsets in their place")
        return
    outside = ((indices < 0) | (indices >= of_id)).nonzero()[:, 0].tolist()
    assert_equal(found.tolist(), [len(outside), outside[0] if outside else _NO_POSITION], where="ids outside")
    mended = indices.clone()
    mended[outside] = 0
    assert_same_tensor(ids, mended, where="ids in their place")
    assert_same_tensor(ends, offsets, where="right offsets")


@requirement(
    "PIPE-336",
    "In every schedule the answer of a late check, and the bags that it hands on, MUST be ordered behind what makes "
    "them, and kept until they are read.",
    needs=("streams",),
)
def test_answers_are_ordered(pipeline: Any) -> None:
    from fastimpl import ops
    from fastimpl.pipeline.lookups import NativeLookup

    made = []

    def settled(engine: Any, bags: Bags, row_counts: Any) -> tuple[Bags, torch.Tensor]:
        # The virtual device is memory of the host, of which answers are known at once.
        ids, offsets, found = ops.settle_bags(bags.indices, bags.offsets, row_counts)
        made.append(found)
        return Bags(ids, offsets, bags.weights), found

    variants: tuple[tuple[str, dict[str, Any]], ...] = (
        ("TrainPipelineSparseDist", {}),
        (FUSED, {"emb_lookup_stream": "new"}),
        (FUSED, {"emb_lookup_stream": "new", "embedding_lookup_before_optimizer": True}),
        ("TrainPipelineSemiSync", {"start_batch": 1}),
    )
    for name, options in variants:
        device, job = VirtualDevice(late=True), Job(pipeline, 6, kinds=("table_wise", "row_wise"), device="cpu")
        batches = [virtual(device, batch) for batch in on_host(device, job.batches(4))]
        with mock.patch.object(NativeLookup, "settled", settled), device:
            schedule, loader = job.schedule(name, engine=device.engine, **options), iter(batches)
            for _ in range(4):
                schedule.progress(loader)
        assert_equal(device.hazards, [], where=f"{name} {options}")
    assert_equal(len(made) >= 4 * len(variants), True, where="checks that were late")
