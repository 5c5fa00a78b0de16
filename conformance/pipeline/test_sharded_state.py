"""E. State of sharded tables: saved whole, loaded under any plan and any number of ranks, edited in between."""

from __future__ import annotations

import copy
import gc
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from conformance.harness import Rank, assert_equal, raises, requirement, succeeds
from conformance.pipeline.batches import joined, values_of
from conformance.pipeline.model import OPTIMIZERS, Naive, assert_bits, hyper_of, random_tables
from conformance.pipeline.sharding import (
    assert_shards,
    batches_of,
    collection_of,
    expected_step,
    is_element_wise,
    placed,
    random_plan,
    sharded_of,
    train,
)
from twinproof.errors import MissingKeyError, ShapeError, UnsupportedError

KINDS = ("table_wise", "row_wise", "column_wise")


def state_of(sharded: Any) -> dict[str, Any]:
    """All that a checkpoint needs."""
    return {**sharded.state_dict(), **sharded.optimizer_state_dict()}


def _tables(pipeline: Any, seed: int, optimizer: str) -> Any:
    configs, weights, keys, limits = random_tables(pipeline, seed, rows=13)
    kinds = KINDS if is_element_wise(optimizer) else ("table_wise", "row_wise")
    return configs, weights, keys, limits, kinds


def _save(rank: Rank, folder: str, seed: int, optimizer: str) -> None:
    pipeline, checkpoint = rank.component("pipeline"), rank.component("checkpoint")
    configs, weights, keys, limits, kinds = _tables(pipeline, seed, optimizer)
    plan = random_plan(pipeline, configs, rank.world_size, seed, kinds)
    sharded = sharded_of(pipeline, collection_of(pipeline, configs, weights), plan, optimizer, rank.group)
    for step in range(1, 3):
        train(rank, sharded, batches_of(rank, keys, limits, step), step, pipeline)
    with checkpoint.HuggingFaceStorageWriter(folder, durable=False) as writer:
        dcp.save(state_of(sharded), storage_writer=writer, process_group=rank.group)


def _load(rank: Rank, folder: str, seed: int, optimizer: str, trained_on: int) -> None:
    pipeline, checkpoint = rank.component("pipeline"), rank.component("checkpoint")
    configs, weights, keys, limits, kinds = _tables(pipeline, seed, optimizer)
    # What the ranks that saved had trained, by the uncut tables.
    naive = Naive(configs, weights, optimizer)
    for step in range(1, 3):
        saver = Rank(0, trained_on, rank.group, rank.implementation)
        expected_step(naive, batches_of(saver, keys, limits, step), step, step)
    plan = random_plan(pipeline, configs, rank.world_size, seed + 1, kinds)
    zeros = [torch.zeros_like(weight) for weight in weights]
    sharded = sharded_of(pipeline, collection_of(pipeline, configs, zeros), plan, optimizer, rank.group)
    state = state_of(sharded)
    dcp.load(state, storage_reader=checkpoint.HuggingFaceStorageReader(folder), process_group=rank.group)
    sharded.load_state_dict({k: v for k, v in state.items() if k in sharded.state_dict()})
    sharded.load_optimizer_state_dict(state)
    assert_shards(sharded, naive, "loaded")
    batches = batches_of(rank, keys, limits, 3)
    train(rank, sharded, batches, 3, pipeline)
    expected_step(naive, batches, 3, 3)
    assert_shards(sharded, naive, "a step after loading")


@requirement(
    "PIPE-060",
    "Tables, optimizer states and the step that were saved under one plan MUST load under any other, on any number of "
    "ranks, bit for bit, and train on as if never saved.",
)
def test_reshard(rank_pool: Any, tmp_path: Path) -> None:
    for seed, (saving, loading) in enumerate(((2, 3), (3, 1), (1, 2), (2, 2), (3, 2), (1, 3))):
        optimizer, folder = OPTIMIZERS[(seed + 1) % len(OPTIMIZERS)], str(tmp_path / str(seed))
        rank_pool.run(_save, saving, folder, seed, optimizer)
        rank_pool.run(_load, loading, folder, seed, optimizer, saving)


def _columns_state(rank: Rank, folder: str) -> None:
    pipeline, checkpoint = rank.component("pipeline"), rank.component("checkpoint")
    config = pipeline.EmbeddingBagConfig(5, 6, "t", feature_names=["f"])
    collection = collection_of(pipeline, [config], [values_of((5, 6), 1)])
    plans = [{"t": pipeline.column_wise([1, 0])}, {"t": pipeline.table_wise(0)}]
    cut, whole = (sharded_of(pipeline, collection, plan, "rowwise_adagrad", rank.group) for plan in plans)
    train(rank, cut, batches_of(rank, ["f"], [5], 1), 1, pipeline)
    name = "embedding_bags.t.momentum1"
    assert_equal(tuple(cut.optimizer_state_dict()[name].shape), (5, 2), where="one value for a row and column block")
    with raises(ShapeError, mentions=(name, "(5, 2)", "(5, 1)")):
        whole.load_optimizer_state_dict(cut.optimizer_state_dict())
    with checkpoint.HuggingFaceStorageWriter(folder, durable=False) as writer:
        dcp.save(state_of(cut), storage_writer=writer, process_group=rank.group)
    again = sharded_of(pipeline, collection, plans[0], "rowwise_adagrad", rank.group)
    state = state_of(again)
    dcp.load(state, storage_reader=checkpoint.HuggingFaceStorageReader(folder), process_group=rank.group)
    again.load_optimizer_state_dict(state)
    found, expected = again.local_shards()["t"], cut.local_shards()["t"]
    assert_bits(found[1], expected[1], "columns")
    assert_bits(found[2]["momentum1"], expected[2]["momentum1"], "momentum1 of the column block")


@requirement(
    "PIPE-107",
    "Row-wise states of column blocks MUST be saved by block, load into the same blocks, and be refused by others.",
)
def test_columns_state(rank_pool: Any, tmp_path: Path) -> None:
    rank_pool.run(_columns_state, 2, str(tmp_path / "ck"))


# Ranks of the column blocks of a table that is saved, and of one that is loaded, in which they are as many.
BLOCKS = (((1, 0), (0, 1)), ((0, 2), (2, 1)), ((2, 0, 1), (0, 1, 2)), ((0, 1, 2), (1, 2, 0)), ((2,), (1,)))


def _numbers(shard: Any, width: int, first: int) -> torch.Tensor:
    """Another number for each row and column of a whole tensor, or row and column block, of which a part is asked."""
    rows, columns = torch.arange(*shard.rows), torch.arange(*shard.columns)[:width]
    return (first + 100 * rows[:, None] + columns).to(torch.float32)


def _moved_blocks(rank: Rank, folder: str) -> None:
    pipeline, checkpoint = rank.component("pipeline"), rank.component("checkpoint")
    config = pipeline.EmbeddingBagConfig(5, 12, "t", feature_names=["f"])
    for optimizer in OPTIMIZERS:
        if is_element_wise(optimizer):
            continue
        for number, plans in enumerate(BLOCKS):
            collection = collection_of(pipeline, [config], [torch.zeros(5, 12)])
            saved, loaded = (
                sharded_of(pipeline, collection, {"t": pipeline.column_wise(list(ranks))}, optimizer, rank.group)
                for ranks in plans
            )
            for shard, weight, held in saved.local_shards().values():
                for first, part in enumerate([weight, *held.values()]):
                    part.copy_(_numbers(shard, part.shape[1], 1000 * first))
            where = str(Path(folder) / f"{optimizer} {number}")
            with checkpoint.HuggingFaceStorageWriter(where, durable=False) as writer:
                dcp.save(state_of(saved), storage_writer=writer, process_group=rank.group)
            state = state_of(loaded)
            dcp.load(state, storage_reader=checkpoint.HuggingFaceStorageReader(where), process_group=rank.group)
            loaded.load_state_dict({name: value for name, value in state.items() if name in loaded.state_dict()})
            loaded.load_optimizer_state_dict(state)
            for shard, weight, held in loaded.local_shards().values():
                for first, (name, part) in enumerate([("weight", weight), *held.items()]):
                    expected = _numbers(shard, part.shape[1], 1000 * first)
                    assert_bits(part.cpu(), expected, f"{optimizer}, ranks {plans}: {name} of {shard.columns}")


@requirement(
    "PIPE-552",
    "Weights and states of a table that is cut by columns MUST stay with their columns when it is loaded with its "
    "blocks on other ranks, in any order, whatever states the optimizer keeps: of each value, or one for a row and "
    "block.",
)
def test_moved_blocks(rank_pool: Any, tmp_path: Path) -> None:
    rank_pool.run(_moved_blocks, 3, str(tmp_path))


def _between(rank: Rank) -> None:
    pipeline = rank.component("pipeline")
    configs, weights, keys, limits = random_tables(pipeline, 11, rows=13)
    plan = random_plan(pipeline, configs, rank.world_size, 11, KINDS)
    sharded = sharded_of(pipeline, collection_of(pipeline, configs, weights), plan, "adagrad", rank.group)
    saved = copy.deepcopy(state_of(sharded))
    train(rank, sharded, batches_of(rank, keys, limits, 1), 1, pipeline)
    whole = [values_of(weight.shape, 50 + i, weight.dtype) for i, weight in enumerate(weights)]
    names = [f"embedding_bags.{config.name}.weight" for config in configs]
    # Whole tensors are cut to this rank's part; the states come back as they were saved.
    sharded.load_state_dict(dict(zip(names, whole, strict=True)))
    sharded.load_optimizer_state_dict(saved)
    naive = Naive(configs, whole, "adagrad")
    assert_shards(sharded, naive, "loaded from whole tensors")
    assert_equal(sharded.fused_optimizer.step_count, 0, where="steps")
    for _, weight, _ in sharded.local_shards().values():
        weight.mul_(2)
    naive = Naive(configs, [2 * weight for weight in whole], "adagrad")
    batches = batches_of(rank, keys, limits, 2)
    train(rank, sharded, batches, 2, pipeline)
    expected_step(naive, batches, 2, 1)
    assert_shards(sharded, naive, "after an edit")
    with raises(RuntimeError, mentions=("Missing key", names[0])):
        sharded.load_state_dict({})
    with raises(MissingKeyError, mentions=("step",)):
        sharded.load_optimizer_state_dict({})
    view = sharded.state_dict()[names[0]]
    with raises(UnsupportedError, mentions=("to_local",)):
        view.sum()


@requirement(
    "PIPE-059",
    "A load of whole tensors or of saved parts, and an edit in place, between steps MUST be what the next step starts "
    "from; names that are absent MUST be refused.",
)
def test_between(rank_pool: Any) -> None:
    for world_size in (1, 2, 3):
        rank_pool.run(_between, world_size)


def _made_here(rank: Rank) -> list[tuple[str, Any, Any, bytes]]:
    pipeline = rank.component("pipeline")
    configs, _, _, _ = random_tables(pipeline, 21, rows=13)
    parts = []
    for seed in (1, 2, 3):
        plan = random_plan(pipeline, configs, rank.world_size, seed, (*KINDS, "data_parallel"))
        collection = pipeline.EmbeddingBagCollection(configs, device="meta")
        sharded = sharded_of(pipeline, collection, plan, "sgd", rank.group, seed=7)
        held = {
            name: (shard.rows, shard.columns, weight) for name, (shard, weight, _) in sharded.local_shards().items()
        }
        for name, table in sharded.embedding_bags.items():
            if name not in held and isinstance(table.weight, torch.nn.Parameter):
                whole = table.weight.detach()
                held[name] = ((0, whole.shape[0]), (0, whole.shape[1]), whole)
        for name, (rows, columns, weight) in held.items():
            parts.append((name, rows, columns, weight.cpu().contiguous().view(torch.uint8).numpy().tobytes()))
    return parts


@requirement("PIPE-108", "Weights made from a collection on meta MUST be the same for every plan and number of ranks.")
def test_made_here(rank_pool: Any, pipeline: Any) -> None:
    configs, _, _, _ = random_tables(pipeline, 21, rows=13)
    plan = {config.name: pipeline.table_wise(0) for config in configs}
    alone = pipeline.ShardedEmbeddingBagCollection(
        pipeline.EmbeddingBagCollection(configs, device="meta"), plan, seed=7
    ).local_shards()
    for world_size in (1, 2, 3):
        for parts in rank_pool.run(_made_here, world_size):
            for name, rows, columns, found in parts:
                whole = alone[name][1]
                part = whole[slice(*rows), slice(*columns)]
                got = torch.frombuffer(bytearray(found), dtype=whole.dtype).reshape(part.shape)
                assert_bits(got, part, f"{name} at {rows}, {columns}")
                bound = torch.tensor(whole.shape[0] ** -0.5).to(whole.dtype)
                assert_equal(bool((whole.abs() <= bound).all()), True, where=f"bound of {name}")


def _key_value(rank: Rank, optimizer: str) -> None:
    pipeline, kvstore = rank.component("pipeline"), rank.component("kvstore")
    keys = [-5, 0, 3, 2**40, -(2**63), 17, 18, 19]
    configs = [
        pipeline.EmbeddingBagConfig(len(keys), 6, "kv", feature_names=["a", "b"], pooling=pipeline.PoolingType.MEAN),
        pipeline.EmbeddingBagConfig(len(keys), 4, "t", feature_names=["a"]),
    ]
    layout = kvstore.RowLayout(6, optimizer=optimizer)
    # Values whose sums are exact, so that the order of ranks in a bag's sum cannot matter.
    initial = torch.randint(-8, 9, (len(keys), 6), generator=torch.Generator().manual_seed(1)) / 4
    buckets = kvstore.Buckets(4)
    store = kvstore.KVStore({"kv": layout}, optimizer_in_row=True, clock=lambda: 1)
    weights = [initial, values_of((len(keys), 4), 2)]
    plan = {"kv": pipeline.key_value(store, buckets), "t": pipeline.table_wise(rank.world_size - 1)}
    # Tables of both kinds see the same batch: ids of the key-value table are keys, so "t" is told to take row 0.
    sharded = sharded_of(
        pipeline,
        collection_of(pipeline, configs, weights),
        plan,
        optimizer,
        rank.group,
        bounds_check="ignore",
        device="cpu",
    )
    ids = torch.tensor(keys)
    begin, end = kvstore.rank_buckets(4, rank.world_size, rank.rank)
    mine = ids[(ids.remainder(4) >= begin) & (ids.remainder(4) < end)]
    store.set("kv", mine, initial[torch.isin(ids, mine)])
    naive = Naive(configs[:1], [initial], optimizer)
    batches = batches_of(rank, ["a", "b"], [len(keys)] * 2, 3, uneven=True)
    keyed = [type(batch)(batch.keys, [[[keys[i] for i in bag] for bag in f] for f in batch.bags]) for batch in batches]
    pooled = sharded(keyed[rank.rank].kjt(pipeline)).values()
    grads = [values_of((b.stride, 16), r) for r, b in enumerate(batches)]
    pooled.backward(grads[rank.rank])
    expected = torch.split(naive.pooled(joined(batches)), [b.stride for b in batches])
    assert_bits(pooled.detach()[:, :12], expected[rank.rank], "pooled")
    whole = torch.cat([grad[:, :12] / rank.world_size for grad in grads])
    naive.step(joined(batches), whole, hyper_of(1))
    got = store.get("kv", mine)
    assert_bits(got, naive.tables[0].weight[torch.isin(ids, mine)], "rows of this rank")
    assert_equal(store.size("kv"), mine.numel(), where="rows: only this rank's own")
    state = sharded.key_value_state_dict(snapshot=False)
    total = state["embedding_bags.kv.weight"].global_row_count
    assert_equal(total, len(keys), where="rows over all ranks")


@requirement(
    "PIPE-112",
    "A key-value table MUST be dealt to the ranks by bucket, take any int64 id, pool over all ranks' rows, and update "
    "each row where it lives, as the uncut table.",
)
def test_key_value(rank_pool: Any) -> None:
    for world_size, optimizer in ((1, "adam"), (2, "rowwise_adagrad"), (3, "sgd"), (4, "partial_rowwise_adam")):
        rank_pool.run(_key_value, world_size, optimizer)


@requirement(
    "PIPE-539",
    "A collection's key_value_state_dict() MUST hold the rows of the moment, with snapshot=False those of the store as "
    "it is when they are read, in chunks of chunk_rows either way.",
)
def test_moments_of_key_values(pipeline: Any, kvstore: Any) -> None:
    rows, ids = torch.ones(5, 12), torch.arange(5)
    for snapshot in (None, True, False):
        store = kvstore.KVStore({"kv": kvstore.RowLayout(12, optimizer="sgd")}, optimizer_in_row=True)
        store.set("kv", ids, rows)
        sharded = sharded_of(
            pipeline,
            pipeline.EmbeddingBagCollection([pipeline.EmbeddingBagConfig(5, 12, "kv", feature_names=["a"])]),
            {"kv": pipeline.key_value(store, kvstore.Buckets(4))},
            "sgd",
        )
        options = {} if snapshot is None else {"snapshot": snapshot}
        view = sharded.key_value_state_dict(chunk_rows=2, **options)["embedding_bags.kv.weight"]
        store.set("kv", ids, 2 * rows)
        where = f"snapshot: {snapshot}"
        assert_bits(view.full_tensor(), rows * (2 if snapshot is False else 1), where)
        assert_equal([len(part) for _, part in view.chunks()], [2, 2, 1], where=f"{where}: chunks")


def _counted(rank: Rank, module_count: int) -> None:
    import torch.distributed as dist

    pipeline = rank.component("pipeline")
    modules = []
    for index in range(module_count):
        configs, weights, keys, limits = random_tables(pipeline, index)
        plan = random_plan(pipeline, configs, rank.world_size, index, KINDS)
        sharded = sharded_of(pipeline, collection_of(pipeline, configs, weights), plan, "sgd", rank.group)
        modules.append((sharded, batches_of(rank, keys, limits, index)))
    calls: list[str] = []
    names = ["all_to_all_single", "all_gather_object", "all_gather_into_tensor", "all_reduce", "all_gather"]
    names += [name for name in ("all_gather_single",) if hasattr(dist, name)]
    originals = {name: getattr(dist, name) for name in names}

    def counting(name: str) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            calls.append(name)
            return originals[name](*args, **options)

        return call

    for name in names:
        setattr(dist, name, counting(name))
    try:
        contexts = [module.create_context() for module, _ in modules]
        dists = [
            module.input_dist(ctx, placed(pipeline, batches[rank.rank].kjt(pipeline)))
            for (module, batches), ctx in zip(modules, contexts, strict=True)
        ]
        pipeline.fuse_input_dists(dists)
        assert_equal(calls, ["all_to_all_single"], where="sizes of all modules")
        inputs = [each.wait().wait() for each in dists]
        assert_equal(len(calls), 1 + module_count, where="and ids, once a module")
        results = [
            module.compute_and_output_dist(ctx, given).wait().values()
            for (module, _), ctx, given in zip(modules, contexts, inputs, strict=True)
        ]
        assert_equal(len(calls), 1 + 2 * module_count, where="and pooled columns")
        torch.cat(results, dim=1).sum().backward()  # type: ignore[no-untyped-call]
        assert_equal(len(calls), 1 + 3 * module_count, where="and gradients")
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
    for (module, batches), found in zip(modules, results, strict=True):
        with torch.no_grad():
            again = module(placed(pipeline, batches[rank.rank].kjt(pipeline))).values()
        assert_equal(tuple(again.shape), tuple(found.shape), where="a plain call of the same module")


@requirement(
    "PIPE-083",
    "Several modules MUST exchange the sizes of their ids in one collective; each then sends ids once, pooled columns "
    "once and gradients once, whatever its plan mixes.",
    needs=("counted_collectives",),
)
def test_collectives(rank_pool: Any) -> None:
    rank_pool.run(_counted, 2, 3)


def _tensors_alive() -> dict[int, int]:
    """Where each storage of a living tensor begins, and its bytes; sparse tensors of other tests have none."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter)]
    strided = [each.untyped_storage() for each in tensors if each.layout is torch.strided]
    return {storage.data_ptr(): storage.nbytes() for storage in strided}


@requirement(
    "PIPE-502",
    "A copy of a sharded collection, by copy.deepcopy or pickle, MUST list its own tables as parameters and not the "
    "original's, whether those were listed before or not, and hold its tables once.",
)
@pytest.mark.parametrize("is_listed", [False, True], ids=["not listed", "listed"])
@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_copies_list_their_own(pipeline: Any, way: str, is_listed: bool) -> None:
    names = ["t0", "t1"]
    configs = [pipeline.EmbeddingBagConfig(640, 32, name, feature_names=[f"f{name}"]) for name in names]
    collection = collection_of(pipeline, configs, [values_of((640, 32), seed) for seed in (1, 2)])
    sharded = sharded_of(pipeline, collection, dict.fromkeys(names, pipeline.table_wise(0)), "sgd")
    if is_listed:
        assert_equal(len(list(sharded.named_parameters())), 2, where="parameters")
    before = _tensors_alive()
    copied = copy.deepcopy(sharded) if way == "deepcopy" else pickle.loads(pickle.dumps(sharded))
    made = sum(size for begin, size in _tensors_alive().items() if begin not in before)
    # Two tables, and less than half of one for all else.
    assert_equal(made // (640 * 32 * 4 // 2), 4, where=f"halves of a table that were made ({made} bytes)")
    params = dict(copied.named_parameters())
    for name, (_, weight, _) in copied.local_shards().items():
        param = params[f"embedding_bags.{name}.weight"]
        assert_equal(param.data_ptr(), weight.data_ptr(), where=f"where the parameter of {name} lies")
        assert_equal(param._in_backward_optimizers, [copied.fused_optimizer], where=f"what updates {name}")


@requirement(
    "PIPE-504",
    "Values that require a gradient, as parameters and kept variables do, MUST be loaded as values: tables and states "
    "of the optimizer stay leaves of no graph, and can be copied.",
)
def test_values_with_a_graph(pipeline: Any) -> None:
    collection = collection_of(pipeline, [_config(pipeline)], [values_of((5, 4), 1)])
    sharded = sharded_of(pipeline, collection, {"t": pipeline.row_wise()}, "adagrad")
    weights = collection.state_dict(keep_vars=True), dict(collection.named_parameters())
    made = values_of((5, 4), 2).requires_grad_() * 2
    for state in (*weights, {"embedding_bags.t.weight": made}):
        expected = state["embedding_bags.t.weight"]
        assert_equal(expected.requires_grad, True, where="values that require a gradient")
        sharded.load_state_dict(state)
        _, weight, _ = sharded.local_shards()["t"]
        assert_bits(weight, expected.detach(), "table")
        assert_equal((weight.requires_grad, weight.grad_fn), (False, None), where="graph of a table")
    states = sharded.optimizer_state_dict()
    sharded.load_optimizer_state_dict({**states, "embedding_bags.t.momentum1": made})
    _, weight, held = sharded.local_shards()["t"]
    assert_bits(held["momentum1"], made.detach(), "state")
    assert_equal((held["momentum1"].requires_grad, held["momentum1"].grad_fn), (False, None), where="graph of a state")
    assert_bits(copy.deepcopy(sharded).local_shards()["t"][1], weight, "copy")


def _config(pipeline: Any, name: str = "t") -> Any:
    return pipeline.EmbeddingBagConfig(5, 4, name, feature_names=[f"f{name}"])


def _not_at_hand(rank: Rank) -> None:
    pipeline, names = rank.component("pipeline"), ["t", "u"]
    collection = collection_of(pipeline, [_config(pipeline, n) for n in names], [values_of((5, 4), 1)] * 2)
    plan = dict.fromkeys(names, pipeline.row_wise())
    sharded = sharded_of(pipeline, collection, plan, "adagrad", rank.group)
    before, last, whole = copy.deepcopy(sharded.local_shards()), "embedding_bags.u", values_of((5, 4), 3)
    view = sharded.state_dict()[f"{last}.weight"]
    values = {
        "meta": whole.to("meta"),
        "part on meta": pipeline.TableShard.make((5, 4), whole.dtype, view.to_local().to("meta"), view.origin),
        "sparse": whole.to_sparse(),
        "quantized": torch.quantize_per_tensor(whole, 0.1, 0, torch.qint8),
        "distributed": distribute_tensor(whole, init_device_mesh("cpu", (rank.world_size,))),
    }
    for kind, value in values.items():
        refused = ShapeError if kind == "quantized" else UnsupportedError
        with raises(refused, mentions=(f"{last}.weight",), where=f"table, {kind}"):
            sharded.load_state_dict({"embedding_bags.t.weight": whole, f"{last}.weight": value})
        states = {**sharded.optimizer_state_dict(), "embedding_bags.t.momentum1": whole}
        with raises(refused, mentions=(f"{last}.momentum1",), where=f"state, {kind}"):
            sharded.load_optimizer_state_dict({**states, f"{last}.momentum1": value})
        for name, (_, weight, held) in sharded.local_shards().items():
            assert_bits(weight, before[name][1], f"table {name}, {kind}")
            assert_bits(held["momentum1"], before[name][2]["momentum1"], f"state of {name}, {kind}")


@requirement(
    "PIPE-505",
    "Values that cannot be copied, on meta, sparse, quantized or distributed, MUST be refused by name before any table "
    "or state is changed, also in the part of a table.",
)
def test_values_not_at_hand(rank_pool: Any) -> None:
    rank_pool.run(_not_at_hand, 2)


def _refused_states(rank: Rank) -> None:
    pipeline = rank.component("pipeline")
    configs, weights, keys, limits = random_tables(pipeline, 12, rows=13)
    plan = random_plan(pipeline, configs, rank.world_size, 12, KINDS)
    sharded, other = (
        sharded_of(pipeline, collection_of(pipeline, configs, weights), plan, "adam", rank.group) for _ in range(2)
    )
    train(rank, sharded, batches_of(rank, keys, limits, 1), 1, pipeline)
    train(rank, other, batches_of(rank, keys, limits, 2), 2, pipeline)
    states, tables = other.optimizer_state_dict(), other.state_dict()
    before = copy.deepcopy(sharded.local_shards())
    sharded.fused_optimizer.step_count = 7
    last, table_of_all = [name for name in states if not name.endswith("step")][-1], list(tables)[-1]
    narrow = torch.zeros(states[last].shape, dtype=torch.float16)
    wrong: list[tuple[Any, dict[str, Any], str, Any]] = [
        (sharded.load_optimizer_state_dict, states, last, torch.zeros(1, 1)),
        (sharded.load_optimizer_state_dict, states, last, narrow),
        (sharded.load_optimizer_state_dict, states, last, 1.0),
        (sharded.load_state_dict, tables, table_of_all, torch.zeros(1, 1)),
        (sharded.load_state_dict, tables, table_of_all, None),
    ]
    for load, state, name, given in wrong:
        where = f"{name} of {type(given).__name__}"
        with raises(ShapeError if isinstance(given, torch.Tensor) else UnsupportedError, mentions=(name,), where=where):
            load({**state, name: given})
        for table, (_, weight, held) in sharded.local_shards().items():
            assert_bits(weight, before[table][1], f"{table}, after {where}")
            for key, value in held.items():
                assert_bits(value, before[table][2][key], f"{table} {key}, after {where}")
        assert_equal(sharded.fused_optimizer.step_count, 7, where=f"steps, after {where}")


@requirement(
    "PIPE-445",
    "Tables, or states of the optimizer, of which one does not fit MUST be refused by its name before any of them is "
    "changed, and before the step is.",
)
def test_refused_states(rank_pool: Any) -> None:
    for world_size in (1, 2):
        rank_pool.run(_refused_states, world_size)


def _exported(rank: Rank, folder: str) -> None:
    pipeline, checkpoint = rank.component("pipeline"), rank.component("checkpoint")
    configs, weights, _, _ = random_tables(pipeline, 12, rows=13)
    plan = random_plan(pipeline, configs, rank.world_size, 12, KINDS)
    sharded = sharded_of(pipeline, collection_of(pipeline, configs, weights), plan, "adam", rank.group)
    for name, part in sharded.state_dict().items():
        for dtype in (torch.bfloat16, torch.float16):
            where = f"{name} as {dtype}"
            with succeeds("a cast", where=where):
                made = part.to(dtype)
            found = (type(made), made.dtype, made.shape, made.origin)
            assert_equal(found, (pipeline.TableShard, dtype, part.shape, part.origin), where=where)
            assert_equal(made.to_local() is None, part.to_local() is None, where=f"{where}: a part")
            if part.to_local() is not None:
                assert_bits(made.to_local(), part.to_local().to(dtype), where)
        for dtype in (part.dtype, torch.float16):
            where = f"{name} elsewhere, as {dtype}"
            with succeeds("a copy", where=where):
                made = part.to("meta", dtype)
            assert_equal((made.dtype, made.shape, made.origin), (dtype, part.shape, part.origin), where=where)
            if part.to_local() is not None:
                assert_equal((made.to_local().is_meta, made.to_local().dtype), (True, dtype), where=where)
        with raises(UnsupportedError, mentions=("_to_copy",), where=f"{name} in pinned memory"):
            torch.ops.aten._to_copy(part, pin_memory=True)
    with checkpoint.CheckpointManager(folder, model=sharded, interval=9, export_dtype="bfloat16") as manager:
        manager.save(1, last_step=True)
    wholes = {f"embedding_bags.{config.name}.weight": weight for config, weight in zip(configs, weights, strict=True)}
    targets = {name: torch.zeros(whole.shape, dtype=torch.bfloat16) for name, whole in wholes.items()}
    dcp.load(targets, checkpoint_id=f"{folder}/step-1", process_group=rank.group)
    for name, whole in wholes.items():
        assert_bits(targets[name], whole.to(torch.bfloat16), f"{name}, exported")


@requirement(
    "PIPE-690",
    "A part of a table MUST become one of the same place in another dtype, so that a trainer's last save of cut tables "
    "may be cast in torch's format, too; sent to a device its values MUST be there. A copy of another kind of "
    "memory MUST be refused.",
)
def test_parts_in_another_dtype(rank_pool: Any, checkpoint: Any, tmp_path: Path) -> None:
    rank_pool.run(_exported, 2, str(tmp_path))


@requirement(
    "PIPE-686",
    "Optimizer state of sharded tables that is asked for again and again MUST say the step of its time, and what was "
    "given before MUST keep the step that it said.",
)
def test_asked_again(pipeline: Any) -> None:
    collection = collection_of(pipeline, [_config(pipeline)], [values_of((5, 4), 1)])
    sharded = sharded_of(pipeline, collection, {"t": pipeline.row_wise()}, "adam")
    batch = pipeline.KeyedJaggedTensor(["ft"], torch.tensor([1, 4]), lengths=torch.tensor([2]))
    states = [sharded.optimizer_state_dict()]
    for _ in range(2):
        sharded(batch).values().sum().backward()
        states.append(sharded.optimizer_state_dict())
    steps = [[value.tolist() for name, value in state.items() if name.endswith("step")] for state in states]
    assert_equal(steps, [[[0]], [[1]], [[2]]], where="the step of each")
