"""N. What the host waits for in a step, whatever is cut how: once for the sizes, and what checks found comes with them.

The device is the pretend one, which counts; stores lie there too. The host's own step says what every bit has to be.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.harness import (
    Rank,
    assert_equal,
    assert_le,
    assert_same_tensor,
    examples,
    raises,
    requirement,
    succeeds,
)
from conformance.harness.places import copies_of_program, on_pretend
from conformance.harness.threads import torch_threads
from conformance.pipeline.batches import KEYS, random_bags, random_jagged, values_of, vbe_of
from conformance.pipeline.cases import FUSED
from conformance.pipeline.jobs import Job, assert_same_state
from conformance.pipeline.model import assert_bits
from conformance.pipeline.sharding import collection_of, sharded_of, sharded_tensors
from conformance.provers.pretend_device import PretendEngine
from twinproof.errors import ConfigError, DistributedError, IdRangeError, ShapeError
from twinproof.pipeline.stages import move_batch

NEEDS = ("streams",)
_ROWS, _DIM, _CHUNK = 12, 4, 3
_PLANS = (
    ("table_wise", "row_wise", "row_wise"),
    ("data_parallel", "column_wise", "row_wise"),
    ("row_wise", "data_parallel", "data_parallel"),
    ("stored", "stored", "stored"),
    ("stored", "chunked", "chunked"),
    ("chunked", "row_wise", "stored"),
    ("stored", "table_wise", "data_parallel"),
)


def _configs(pipeline: Any) -> list[Any]:
    """Three tables of four features, one of them of two."""
    features = (["f0", "f1"], ["f2"], ["f3"])
    return [
        pipeline.EmbeddingBagConfig(_ROWS, _DIM, f"t{i}", feature_names=names, pooling=pipeline.PoolingType.MEAN)
        if i == 1
        else pipeline.EmbeddingBagConfig(_ROWS, _DIM, f"t{i}", feature_names=names)
        for i, names in enumerate(features)
    ]


def _store(kvstore: Any, names: list[str], *, is_there: bool) -> Any:
    layouts = {name: kvstore.RowLayout(_DIM, optimizer="adagrad") for name in names}
    if not is_there:
        return kvstore.KVStore(layouts, optimizer_in_row=True, clock=lambda: 1)
    from conformance.kvstore.simt.places import PretendStore

    store = PretendStore(layouts, optimizer_in_row=True, clock=lambda: 1)
    for name in names:
        store.reserve(name, 2000)
    return store


def _collection(
    rank: Rank, kinds: tuple[str, ...], *, is_there: bool, weighted: bool = False, check: str = "fatal"
) -> tuple[Any, Any]:
    """A sharded collection by these kinds, and its store or None; "chunked" are stored by buckets of three ids each."""
    pipeline, kvstore = rank.component("pipeline"), rank.component("kvstore")
    configs = _configs(pipeline)
    stored = [config.name for config, kind in zip(configs, kinds, strict=True) if kind in ("stored", "chunked")]
    store = _store(kvstore, stored, is_there=is_there) if stored else None
    last = rank.world_size - 1
    makers = {
        "table_wise": lambda: pipeline.table_wise(last),
        "column_wise": lambda: pipeline.column_wise([last]),
        "row_wise": pipeline.row_wise,
        "data_parallel": pipeline.data_parallel,
        "stored": lambda: pipeline.key_value(store, kvstore.Buckets(5)),
        "chunked": lambda: pipeline.key_value(store, kvstore.Buckets(_ROWS // _CHUNK, "chunk", _CHUNK)),
    }
    plan = {config.name: makers[kind]() for config, kind in zip(configs, kinds, strict=True)}
    whole = collection_of(
        pipeline, configs, [values_of((_ROWS, _DIM), i) for i in range(len(configs))], is_weighted=weighted
    )
    return sharded_of(pipeline, whole, plan, "adagrad", rank.group, bounds_check=check, device="cpu"), store


def _batch(rank: Rank, kinds: tuple[str, ...], seed: int, *, weighted: bool = False) -> Any:
    """A batch of this rank; rows of a stored table are found by any id, some of them below zero."""
    keys = ["f0", "f1", "f2", "f3"]
    jagged = random_jagged(keys, [_ROWS] * 4, 1 + (seed + rank.rank) % 3, 10 * seed + rank.rank, weighted=weighted)
    bags = [
        [[i - 6 if kind == "stored" else i for i in bag] for bag in feature]
        for kind, feature in zip((kinds[0], *kinds), jagged.bags, strict=True)
    ]
    moved: Any = type(jagged)(keys, bags, jagged.weights)
    return moved.kjt(rank.component("pipeline"), by_offsets=seed % 2 == 1)


def _pooled(pipeline: Any, modules: list[Any], batch: Any) -> list[torch.Tensor]:
    """One step of all modules, whose sizes are exchanged together."""
    contexts = [module.create_context() for module in modules]
    dists = [module.input_dist(ctx, batch) for module, ctx in zip(modules, contexts, strict=True)]
    pipeline.fuse_input_dists(dists)
    found = []
    for module, ctx, dist in zip(modules, contexts, dists, strict=True):
        pooled = module.compute_and_output_dist(ctx, dist.wait().wait()).wait().values()
        pooled.backward(torch.ones_like(pooled) / 3)
        found.append(pooled.detach())
    return found


def _waits_once(rank: Rank, kinds: tuple[str, ...], *, weighted: bool) -> None:
    pipeline = rank.component("pipeline")
    with on_pretend() as device:
        there = [_collection(rank, kinds, is_there=True, weighted=weighted) for _ in range(2)]
        here = [_collection(rank, kinds, is_there=False, weighted=weighted) for _ in range(2)]
        mine = [module.to(device.device) for module, _ in there]
        for step in range(3):
            batch = _batch(rank, kinds, step, weighted=weighted)
            moved = batch.to(device.device)
            begin = device.mark
            found = _pooled(pipeline, mine, moved)
            counts, where = device.counts(begin), f"{kinds}, weighted {weighted}, step {step}"
            if step:
                places = list(device.record.waits(begin))
                assert_equal((counts.host_waits, places[1:]), (1, []), where=f"{where}: waits of the host")
                assert_equal(copies_of_program(device, begin), [], where=f"{where}: copies to the device")
            for got, expected in zip(found, _pooled(pipeline, [module for module, _ in here], batch), strict=True):
                assert_bits(got.cpu(), expected, f"{where}: pooled")
        for (module, store), (other, host_store) in zip(there, here, strict=True):
            for name, value in sharded_tensors(module).items():
                assert_bits(value.detach().cpu(), sharded_tensors(other)[name].detach(), f"{kinds}: {name}")
            for table in () if store is None else store.tables:
                ids = host_store.ids(table)
                assert_bits(store.ids(table), ids, f"{kinds}: ids of {table}")
                assert_bits(store.get_rows(table, ids), host_store.get_rows(table, ids), f"{kinds}: rows of {table}")


def _all_plans(rank: Rank) -> None:
    for number, kinds in enumerate(_PLANS):
        # Two ranks and three differ in nothing but the number.
        if rank.world_size < 3 or number % 3 == 0:
            _waits_once(rank, kinds, weighted=number % 2 == 1)


@pytest.mark.night
@requirement(
    "PIPE-386",
    "In a step of any number of sharded collections, exchanged together, under any mix of kinds, replicated tables and "
    "key-value tables in a store on the device among them, the host MUST wait for the device once and send it nothing, "
    "on 1 to 3 ranks; and every bit MUST be the host's.",
    needs=NEEDS,
)
def test_mixed_plans(rank_pool: Any) -> None:
    for world_size in (1, 2, 3):
        rank_pool.run(_all_plans, world_size)


def _outside_buckets(rank: Rank) -> None:
    kinds = ("chunked", "row_wise", "stored")
    for bad in (-1, _ROWS, 2**63 - 1, -(2**63)):
        for check in ("fatal", "ignore"):
            told = [_told_outside(rank, kinds, bad, check, is_there=is_there) for is_there in (False, True)]
            assert_equal(told[1], told[0], where=f"{bad}, {check}: what is told")


def _told_outside(rank: Rank, kinds: tuple[str, ...], bad: int, check: str, *, is_there: bool) -> str:
    """What the last rank's ids raise; under "ignore" another is outside of its table, which does not matter."""
    pipeline, good = rank.component("pipeline"), _batch(rank, kinds, 0)
    ids = torch.tensor([1, bad, 2, 3, 5, bad if check == "ignore" else 0, bad])
    lengths = torch.tensor([1, 1, 1, 0, 2, 1, 0, 1])
    wrong = pipeline.KeyedJaggedTensor(["f0", "f1", "f2", "f3"], ids, lengths=lengths)
    where = f"{bad}, {check}, there {is_there}"
    with on_pretend() as device:
        module, store = _collection(rank, kinds, is_there=is_there, check=check)
        place = device.device if is_there else torch.device("cpu")
        module.to(place)
        before = {name: value.detach().clone() for name, value in sharded_tensors(module).items()}
        is_mine = rank.rank == rank.world_size - 1
        given = (wrong if is_mine else good).to(place)
        expected = ConfigError if is_mine else DistributedError
        with raises(expected, where=where, mentions=("outside all buckets", str(bad))) as raised:
            module.input_dist(module.create_context(), given).wait()
        assert_equal([store.size(table) for table in store.tables], [0, 0], where=f"{where}: rows")
        for name, value in sharded_tensors(module).items():
            assert_bits(value.detach(), before[name], f"{where}: {name}")
        module(good.to(place)).values().sum().backward()
    return str(raised.error)


@requirement(
    "PIPE-387",
    'Ids that "chunk" puts outside all buckets MUST be told on a device as on the host, whatever the check of other '
    "ids: in the same words on every rank, at the first wait of the exchange; nothing is stepped, and the next batch "
    "runs.",
    needs=NEEDS,
)
def test_outside_all_buckets(rank_pool: Any) -> None:
    for world_size in (1, 2):
        rank_pool.run(_outside_buckets, world_size)


def _outside_of_two(rank: Rank) -> None:
    """Ids outside of a table alone, and outside of all buckets besides."""
    pipeline, kinds = rank.component("pipeline"), ("chunked", "row_wise", "stored")
    for chunked in (1, _ROWS):
        told = []
        for is_there in (False, True):
            with on_pretend() as device:
                module, _ = _collection(rank, kinds, is_there=is_there)
                ids = torch.tensor([chunked, 2, _ROWS, 3])
                lengths = torch.ones(4, dtype=torch.int64)
                wrong = pipeline.KeyedJaggedTensor(["f0", "f1", "f2", "f3"], ids, lengths=lengths)
                place = device.device if is_there else torch.device("cpu")
                given = (wrong if rank.rank == 0 else _batch(rank, kinds, 0)).to(place)
                expected = IdRangeError if rank.world_size == 1 else (IdRangeError, DistributedError)
                with raises(expected, mentions=("outside of their tables", "t1")) as raised:
                    module.to(place)
                    module.input_dist(module.create_context(), given).wait()
                told.append(str(raised.error))
        assert_equal(told[1], told[0], where=f"{chunked} in buckets: what is told")


@requirement(
    "PIPE-595",
    "Of several checks of ids whose answers are late the first that fails MUST be told, as on the host, whether or not "
    "one behind it fails.",
    needs=NEEDS,
)
def test_first_of_several_checks(rank_pool: Any) -> None:
    for world_size in (1, 2):
        rank_pool.run(_outside_of_two, world_size)


def _unsharded(pipeline: Any, check: str = "fatal") -> dict[str, tuple[Any, Any]]:
    """Modules of three tables and four features, and what calls each."""
    configs = _configs(pipeline)
    rows = [pipeline.EmbeddingConfig(_ROWS, _DIM, c.name, feature_names=c.feature_names) for c in configs]

    def by_bags(module: Any, batch: Any) -> torch.Tensor:
        bags = batch.bags()
        found: torch.Tensor = module(bags.indices, bags.offsets)
        return found

    return {
        "bags": (pipeline.EmbeddingBagCollection(configs, bounds_check=check), lambda m, batch: m(batch).values()),
        "rows": (
            pipeline.EmbeddingCollection(rows, bounds_check=check),
            lambda m, batch: torch.cat([part.values() for part in m(batch).values()]),
        ),
        "table-batched": (pipeline.TableBatchedEmbeddingBags(configs, bounds_check=check), by_bags),
    }


@requirement(
    "PIPE-388",
    "Collections of bags, of sequences and table-batched bags that are not sharded MUST make the host wait once in a "
    'step, however many tables and features there are: for what the check of ids found; under "ignore" for nothing, '
    "where the batch came from the host, which has seen that its lengths cut the ids.",
    needs=NEEDS,
)
def test_unsharded(pipeline: Any) -> None:
    for check in ("fatal", "warning", "ignore"):
        for name, (module, call) in _unsharded(pipeline, check).items():
            knows = check == "ignore" and name != "table-batched"
            for order in (["f0", "f1", "f2", "f3"], ["f3", "f1", "f0", "f2"]):
                if name != "table-batched" or order[0] == "f0":
                    _steps_unsharded(pipeline, module, call, order, f"{name}, {check}", 0 if knows else 1)


def _steps_unsharded(pipeline: Any, module: Any, call: Any, order: list[str], name: str, wait_count: int) -> None:
    with on_pretend() as device:
        module.to(device.device)
        for step in range(3):
            batch = random_jagged(order, [_ROWS] * 4, 3, step).kjt(pipeline, by_offsets=step == 1)
            there, begin = batch.to(device.device), device.mark
            call(module, there).square().sum().backward()
            places = list(device.record.waits(begin))
            where, found = f"{name}, {order}, step {step}", device.counts(begin).host_waits
            assert_equal((found, places[wait_count:]), (wait_count, []), where=f"{where}: waits of the host")
            assert_equal(copies_of_program(device, begin), [], where=f"{where}: copies to the device")


@requirement(
    "PIPE-389",
    "Bags and sequences that are not sharded MUST refuse on a device by name what the host refuses: lengths that do "
    'not cut the ids, under every check, and under "fatal" ids outside of their tables, with the host\'s words.',
    needs=NEEDS,
)
def test_unsharded_refusals(pipeline: Any) -> None:
    keys, ids = ["f0", "f1", "f2", "f3"], torch.tensor([1, 2, 3, _ROWS, 4])
    wrong = [[1, 1, 1, 1], [2, -1, 2, 2], [2, 2, 2, 2]]
    for check in ("fatal", "ignore"):
        for name in ("bags", "table-batched"):
            module, call = _unsharded(pipeline, check)[name]
            with on_pretend() as device:
                module.to(device.device)
                for lengths in wrong:
                    batch = pipeline.KeyedJaggedTensor(keys, ids, lengths=torch.tensor(lengths))
                    with raises(ShapeError, where=f"{name}, {check}, {lengths}"):
                        call(module, batch.to(device.device))
    for name, (module, call) in _unsharded(pipeline).items():
        batch, told = pipeline.KeyedJaggedTensor(keys, ids, lengths=torch.tensor([1, 1, 2, 1])), []
        with on_pretend() as device:
            for place in (torch.device("cpu"), device.device):
                module.to(place)
                with raises(IdRangeError, where=name, mentions=(str(_ROWS),)) as raised:
                    call(module, batch.to(place))
                told.append(str(raised.error))
        assert_equal(told[1], told[0], where=f"{name}: what is told")


@requirement(
    "PIPE-393",
    "A batch that leaves the host MUST know how many values each feature has, by lengths or by offsets, so that nobody "
    "waits to ask the device; parts that disagree MUST be refused where they are looked up, and not before.",
    needs=NEEDS,
)
def test_known_sizes(pipeline: Any) -> None:
    for by_offsets in (False, True):
        for strides in ([3, 3], [2, 0], [0, 0]):
            bags = random_bags(strides, 7)
            batch = vbe_of(pipeline, bags)
            if by_offsets:
                ends = torch.nn.functional.pad(batch.lengths().cumsum(0), (1, 0))
                ranks = [[stride] for stride in strides]
                batch = pipeline.KeyedJaggedTensor(
                    batch.keys(), batch.values(), offsets=ends, stride_per_key_per_rank=ranks
                )
            sizes = [sum(map(len, feature)) for feature in bags]
            with on_pretend() as device:
                for there in (batch.to(device.device), move_batch(batch, _moved(device), device.device)):
                    begin, where = device.mark, f"{strides}, by offsets {by_offsets}"
                    assert_equal(there.length_per_key(), sizes, where=where)
                    assert_equal(there["b"].values().shape[0], sizes[1], where=where)
                    assert_equal(list(device.record.waits(begin)), [], where=f"{where}: waits of the host")
    collection = pipeline.EmbeddingBagCollection([pipeline.EmbeddingBagConfig(9, 4, "t", feature_names=["a", "b"])])
    with on_pretend() as device:
        collection.to(device.device)
        for lengths in ([1, 1, 1, 1], [2, -1, 2, 2]):
            batch = pipeline.KeyedJaggedTensor(["a", "b"], torch.arange(5), lengths=torch.tensor(lengths))
            with succeeds("a move", where=str(lengths)):
                moved = batch.to(device.device), move_batch(batch, _moved(device), device.device)
            for there in moved:
                with raises(ShapeError, where=str(lengths)):
                    collection(there)


def _moved(device: Any) -> Any:
    return lambda tensor: tensor.to(device.device)


def _of_different_sizes(pipeline: Any, rows: torch.Tensor) -> Any:
    inverse = KEYS, rows
    return vbe_of(pipeline, random_bags([2, 3, 1], 5), weighted=True, inverse_indices=inverse)


@requirement(
    "PIPE-394",
    "Features of different sizes MUST be spread over the batch at one wait of the host, however many features there "
    "are, with the host's bits; rows outside of a feature MUST be refused on a device in the host's words.",
    needs=NEEDS,
)
def test_different_sizes(pipeline: Any) -> None:
    configs = [pipeline.EmbeddingBagConfig(9, _DIM, f"t{i}", feature_names=[key]) for i, key in enumerate(KEYS)]
    collection = pipeline.EmbeddingBagCollection(configs, is_weighted=True)
    rows = torch.tensor([[0, 1, 1, 0], [2, 0, 1, 2], [0, 0, 0, 0]])
    with on_pretend() as device:
        batch = _of_different_sizes(pipeline, rows)
        expected = collection(batch).values()
        there, mine = batch.to(device.device), copy.deepcopy(collection).to(device.device)
        begin = device.mark
        found = mine(there).values()
        # The other is for the check of ids.
        places = list(device.record.waits(begin))
        assert_equal(device.counts(begin).host_waits, 2, where=f"waits of the host: {places}")
        assert_bits(found.detach().cpu(), expected.detach(), "pooled")
        for row in (3, -1):
            wrong, told = rows.clone(), []
            wrong[1, 2] = row
            for module, place in ((collection, torch.device("cpu")), (mine, device.device)):
                with raises(ShapeError, where=f"row {row}", mentions=("inverse", str(row))) as raised:
                    module(_of_different_sizes(pipeline, wrong).to(place))
                told.append(str(raised.error))
            assert_equal(told[1], told[0], where=f"row {row}: what is told")


@requirement(
    "PIPE-395",
    "Weights by position of cut tables MUST cost the host one wait for each group of tables that is looked up "
    "together, however many features there are, forward and backward.",
    needs=NEEDS,
)
def test_positions(pipeline: Any) -> None:
    configs = _configs(pipeline)
    whole = pipeline.EmbeddingBagCollection(configs, is_weighted=True)
    processors = pipeline.PositionWeightedModuleCollection({f"f{i}": 4 for i in range(3)})
    processed = pipeline.FeatureProcessedEmbeddingBagCollection(whole, processors)
    plan = {config.name: pipeline.table_wise(0) if i else pipeline.column_wise([0]) for i, config in enumerate(configs)}
    module = sharded_of(pipeline, processed, plan, "adagrad")
    with on_pretend() as device:
        module.to(device.device)
        for step in range(3):
            batch = random_jagged(["f0", "f1", "f2", "f3"], [_ROWS] * 4, 3, step).kjt(pipeline).to(device.device)
            begin = device.mark
            module(batch).values().square().sum().backward()
            # The other is for the sizes.
            places = list(device.record.waits(begin))
            if step:
                assert_equal(device.counts(begin).host_waits, 2, where=f"step {step}: waits of the host: {places}")


def _beside_others(data: st.DataObject) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[int]]:
    """Ids, offsets and the feature of each id; features of which some are of any int64, and rows of the others."""
    features = data.draw(st.integers(1, 4))
    lengths = torch.tensor(data.draw(st.lists(st.integers(0, 4), min_size=2 * features, max_size=2 * features)))
    of_id = torch.arange(features).repeat_interleave(lengths.view(features, 2).sum(1))
    any_id = st.sampled_from([-(2**63), -1, 0, 3, 4, 5, 2**63 - 1])
    ids = torch.tensor(data.draw(st.lists(any_id, min_size=len(of_id), max_size=len(of_id))), dtype=torch.int64)
    rows = data.draw(st.lists(st.sampled_from([-1, 0, 4, 5]), min_size=features, max_size=features))
    return ids, torch.nn.functional.pad(lengths.cumsum(0), (1, 0)), of_id, rows


@requirement(
    "PIPE-391",
    "An operator MUST find no id outside of a table whose rows are found by id, and leave each as it is; beside it ids "
    "outside of other tables are counted, found and mended as ever.",
    needs=("bag_kernels",),
)
@examples(80)
@given(st.data(), st.integers(1, 3))
def test_any_row(pipeline: Any, data: st.DataObject, threads: int) -> None:
    from fastimpl import ops

    ids, offsets, of_id, rows = _beside_others(data)
    limits = torch.tensor(rows)[of_id]
    outside = (limits >= 0) & ((ids < 0) | (ids >= limits))
    places = outside.nonzero()[:, 0].tolist()
    with torch_threads(threads):
        found = ops.check_bag_ids(ids, offsets, rows)
        assert_equal(found, (len(places), places[0] if places else -1), where="what is found")
        assert_same_tensor(ops.mend_bag_ids(ids, offsets, rows), ids.masked_fill(outside, 0), where="mended")
        settled, ends, answer = ops.settle_bags(ids, offsets, rows)
    assert_same_tensor(settled, ids.masked_fill(outside, 0), where="settled")
    assert_same_tensor(ends, offsets, where="offsets")
    assert_equal(int(answer[0]), len(places), where="what is found later")


@requirement(
    "PIPE-392",
    "Ids of a feature with blocks of 0 MUST stay in the first bucket as they are, whichever they are, beside features "
    "that are cut.",
    needs=("bag_kernels",),
)
@examples(80)
@given(st.data(), st.integers(1, 3))
def test_not_cut(pipeline: Any, data: st.DataObject, threads: int) -> None:
    from fastimpl import ops

    ids, offsets, of_id, _ = _beside_others(data)
    sizes = torch.tensor(data.draw(st.lists(st.integers(0, 3), min_size=4, max_size=4)))[: int(offsets.numel() // 2)]
    size = sizes[of_id]
    ids = ids.where(size == 0, ids.remainder(3 * size.clamp(min=1)))
    buckets = torch.where(size == 0, 0, ids.div(size.clamp(min=1), rounding_mode="floor"))
    order, bag_count = buckets.argsort(stable=True), offsets.numel() - 1
    bags = torch.arange(bag_count).repeat_interleave(offsets.diff())
    with torch_threads(threads):
        lengths, found, _, positions = ops.bucketize(ids, offsets, None, sizes, 3)
    assert_same_tensor(positions, order, where="positions")
    assert_same_tensor(found, (ids - buckets * size)[order], where="ids")
    counted = torch.bincount(buckets * bag_count + bags, minlength=3 * bag_count)
    assert_same_tensor(lengths, counted, where="lengths")


_SCHEDULES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("TrainPipelineBase", {}),
    ("TrainPipelineSparseDist", {}),
    ("PrefetchTrainPipelineSparseDist", {}),
    (FUSED, {}),
    (FUSED, {"embedding_lookup_before_optimizer": True}),
    ("TrainPipelineSemiSync", {"start_batch": 1}),
)


@requirement(
    "PIPE-390",
    "In a step of every schedule, of a model of two sharded collections under any mix of kinds, key-value tables in a "
    "store on the device among them, the host MUST wait at most twice, but for copies of a batch that lies in pageable "
    "memory; and every bit MUST be that of the same schedule on the host.",
    needs=NEEDS,
)
def test_schedules(pipeline: Any, kvstore: Any) -> None:
    for number, (name, options) in enumerate(_SCHEDULES):
        for stored in (False, True):
            _counted_schedule(pipeline, kvstore if stored else None, number, name, options)


def _counted_schedule(pipeline: Any, kvstore: Any, seed: int, name: str, options: dict[str, Any]) -> None:
    with on_pretend() as device:
        there = kvstore if kvstore is None else _on_device(kvstore)
        jobs = (
            Job(pipeline, seed, kvstore=there, device=device.device),
            Job(pipeline, seed, kvstore=kvstore, device="cpu"),
        )
        for store, table, _ in jobs[0].stored:
            store.reserve(table, 2000)
        mine, theirs = jobs[0].schedule(name, engine=PretendEngine(), **options), jobs[1].schedule(name, **options)
        mine_loader, their_loader = iter(jobs[0].batches(6)), iter(jobs[1].batches(6))
        for step in range(6):
            begin, where = device.mark, f"{name} {options} stored {kvstore is not None} step {step}"
            output = mine.progress(mine_loader)
            if step:
                waits = [event for event in device.events[begin:] if event.wait_count and event.kind != "to device"]
                assert_le(sum(event.wait_count for event in waits), 2, where=f"{where}: {waits}")
            assert_bits(output.cpu(), theirs.progress(their_loader), f"{where}: output")
        assert_same_state(*jobs, f"{name} {options}")


def _on_device(kvstore: Any) -> Any:
    """The component with stores on the pretend device."""
    from conformance.kvstore.simt.places import PretendStore

    names = ("Buckets", "RowLayout", "rank_buckets")
    return SimpleNamespace(KVStore=PretendStore, **{name: getattr(kvstore, name) for name in names})
