"""What modules take, list and hand out beside their lookups: on meta, by name, of other classes, and in state dicts."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from conformance.harness import Rank, assert_equal, raises, requirement, succeeds
from conformance.pipeline.batches import place_of, random_jagged, values_of
from conformance.pipeline.cases import FUSED, TRAINING
from conformance.pipeline.jobs import Job, assert_same_state
from conformance.pipeline.model import assert_bits
from conformance.pipeline.sharding import collection_of, sharded_of
from twinproof.errors import ConfigError, UnsupportedError

META = torch.device("meta")


def _configs(pipeline: Any, kind: str = "EmbeddingBagConfig") -> list[Any]:
    return [getattr(pipeline, kind)(6, 4, f"t{i}", feature_names=[f"f{i}"]) for i in range(2)]


def _weights(pipeline: Any) -> Any:
    """A collection with weights of two features."""
    return collection_of(pipeline, _configs(pipeline), [values_of((6, 4), i) for i in range(2)], is_weighted=True)


def _cut(pipeline: Any, group: Any = None) -> Any:
    """Two tables: one whole on the first rank, one by rows."""
    whole = collection_of(pipeline, _configs(pipeline), [values_of((6, 4), i) for i in range(2)])
    plan = {"t0": pipeline.table_wise(0), "t1": pipeline.row_wise()}
    return sharded_of(pipeline, whole, plan, "adagrad", group)


@requirement(
    "PIPE-582",
    "A collection of rows on meta MUST give a batch on meta its shapes, indices too; a batch or tables on meta, of "
    "which the other is not, MUST be refused by every collection by its name; and nothing is filled on meta.",
)
def test_on_meta(pipeline: Any) -> None:
    kjt = random_jagged(["f0", "f1"], [6, 6], 3, 1).kjt(pipeline)
    rows = partial(pipeline.EmbeddingCollection, _configs(pipeline, "EmbeddingConfig"))
    bags = partial(pipeline.EmbeddingBagCollection, _configs(pipeline))
    for make in (rows, partial(rows, need_indices=True), bags):
        there, here = make(device="meta"), make()
        name = type(there).__bases__[0].__name__
        for module, batch in ((there, kjt), (here, kjt.to(META))):
            with raises(ConfigError, mentions=("meta", name), where=f"{name}: one of both"):
                module(batch)
        with succeeds("reset_parameters", where=f"{name} on meta"):
            there.reset_parameters()
        assert_equal({each.device.type for each in there.parameters()}, {"meta"}, where=f"{name}: after a reset")
    # The batch on meta knows of each feature what was known of it on the host.
    kjt.length_per_key()
    for needs in (False, True):
        found = rows(device="meta", need_indices=needs)(kjt.to(META))
        for key, part in found.items():
            count = kjt[key].values().numel()
            kinds = [part.values().device.type, *([part.weights().device.type] if needs else [])]
            assert_equal((tuple(part.values().shape), set(kinds)), ((count, 4), {"meta"}), where=f"rows of {key}")
            assert_equal(part.weights_or_none() is not None, needs, where=f"indices of {key}")


@requirement(
    "PIPE-583",
    "A traced collection of rows MUST give indices where it is asked for them, and a traced collection whose features "
    "have a processor each MUST weigh as the module itself.",
)
@pytest.mark.filterwarnings("ignore")  # torch.fx warns of its own age.
def test_traced_by_feature(pipeline: Any) -> None:
    kjt = random_jagged(["f1", "f0"], [6, 6], 5, 3).kjt(pipeline)
    rows = pipeline.EmbeddingCollection(_configs(pipeline, "EmbeddingConfig"), need_indices=True)
    for key, part in torch.fx.symbolic_trace(rows)(kjt).items():
        assert_bits(part.values(), rows(kjt)[key].values(), f"rows of {key}")
        indices = part.weights_or_none()
        found = None if indices is None else indices.tolist()
        assert_equal(found, kjt[key].values().tolist(), where=f"indices of {key}")
    processors = {f"f{i}": pipeline.PositionWeightedModule(4) for i in range(2)}
    with torch.no_grad():
        for seed, processor in enumerate(processors.values()):
            # Sums of few such numbers are exact in any order.
            processor.position_weight.copy_((values_of((4,), seed) * 8).round() / 8)
    tables = _weights(pipeline)
    with torch.no_grad():
        for weight in tables.parameters():
            weight.copy_((weight * 8).round() / 8)
    module = pipeline.FeatureProcessedEmbeddingBagCollection(tables, processors)
    with succeeds("a trace", where="a processor for each feature"):
        traced = torch.fx.symbolic_trace(module)
    pooled, expected = traced(kjt), module(kjt)
    assert_equal(pooled.keys(), expected.keys(), where="names")
    assert_bits(pooled.values(), expected.values(), "pooled")


@requirement(
    "PIPE-584",
    "Processors by position MUST be 1 again after reset_parameters(), give a batch without ids no weights and one on "
    "meta their shape; a processor that says nothing MUST refuse its call, and any other class be refused by cut "
    "tables by its name.",
)
def test_processors(pipeline: Any) -> None:
    whole, one = pipeline.PositionWeightedModuleCollection({"f0": 3, "f1": 4}), pipeline.PositionWeightedModule(3)
    for module in (whole, one):
        with torch.no_grad():
            for weight in module.parameters():
                weight.mul_(5.0)
        module.reset_parameters()
        found = {each for weight in module.parameters() for each in weight.tolist()}
        assert_equal(found, {1.0}, where=type(module).__name__)
    ids, lengths = torch.empty(0, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    with succeeds("weights", where="no ids"):
        parts = [one(pipeline.JaggedTensor(ids, lengths=lengths))]
        parts.append(whole(pipeline.KeyedJaggedTensor(["f0"], ids, lengths=lengths)))
    assert_equal([tuple(each.weights().shape) for each in parts], [(0,), (0,)], where="weights of no ids")
    bags = pipeline.JaggedTensor(torch.tensor([1, 2, 3]), torch.zeros(3), lengths=torch.tensor([2, 1]))
    one.pre_process_input(bags)
    with succeeds("weights", where="on meta"):
        there = one.to(META)(bags.to(META)).weights()
    assert_equal((tuple(there.shape), there.device.type), ((3,), "meta"), where="on meta")
    for kind in (pipeline.FeatureProcessor, pipeline.FeatureProcessorsCollection):
        with raises(NotImplementedError, mentions=("processor",), where=kind.__name__):
            kind()(bags)
        own = type("Own", (kind,), {})
        given = own() if kind is pipeline.FeatureProcessorsCollection else {name: own() for name in ("f0", "f1")}
        processed = pipeline.FeatureProcessedEmbeddingBagCollection(_weights(pipeline), given)
        plan = {f"t{i}": pipeline.table_wise(0) for i in range(2)}
        with raises(ConfigError, mentions=("Own", "processors"), where=f"a {kind.__name__} of somebody's"):
            pipeline.ShardedEmbeddingBagCollection(processed, plan)


@requirement(
    "PIPE-585",
    "What a load says is missing or unexpected MUST be just that, of table-batched and of cut tables, alone and inside "
    "of a model: a surplus name beside what is taken, or a name that is not there.",
)
def test_names_of_loads(pipeline: Any) -> None:
    bags = pipeline.TableBatchedEmbeddingBags(_configs(pipeline))
    for module, absent in ((bags, "step"), (_cut(pipeline), "embedding_bags.t1.weight")):
        for prefix, loaded in (("", module), ("inner.", torch.nn.ModuleDict({"inner": module}))):
            state, where = dict(loaded.state_dict()), f"{type(module).__name__} {prefix}"
            surplus = {**state, f"{prefix}surplus": torch.ones(1)}
            with raises(RuntimeError, mentions=("surplus",), where=where):
                loaded.load_state_dict(surplus)
            found = loaded.load_state_dict(surplus, strict=False)
            assert_equal(tuple(map(list, found)), ([], [f"{prefix}surplus"]), where=f"{where}: one too many")
            state.pop(f"{prefix}{absent}")
            with raises(RuntimeError, mentions=(absent,), where=where):
                loaded.load_state_dict(state)
            found = loaded.load_state_dict(state, strict=False)
            assert_equal(tuple(map(list, found)), ([f"{prefix}{absent}"], []), where=f"{where}: one missing")


@requirement(
    "PIPE-586",
    "Parameters of cut tables MUST be listed under any prefix, and be the tables' memory whatever became of it: one "
    "whose memory was exchanged is listed anew, and what was listed before counts no longer.",
)
def test_listed_anew(pipeline: Any) -> None:
    sharded = _cut(pipeline)
    names = [f"embedding_bags.t{i}.weight" for i in range(2)]
    for prefix in ("", "model", "a.b"):
        found = [name for name, _ in sharded.named_parameters(prefix=prefix)]
        assert_equal(found, [f"{prefix}.{name}" if prefix else name for name in names], where=f"prefix {prefix!r}")
    before = dict(sharded.named_parameters())
    _, weight, _ = sharded.local_shards()["t0"]
    weight.data = weight.data.clone()
    listed = list(sharded.listed_parameters())
    assert_equal([each is before[names[1]] for each in listed], [True], where="what counts of what was listed")
    after = dict(sharded.named_parameters())
    assert_equal(after[names[1]] is before[names[1]], True, where="a table that stayed")
    with torch.no_grad():
        after[names[0]].fill_(3.0)
    assert_bits(sharded.local_shards()["t0"][1].cpu(), torch.full((6, 4), 3.0), "written through what is listed")


def _absent_parts(rank: Rank) -> None:
    pipeline = rank.component("pipeline")
    sharded, meta = _cut(pipeline, rank.group), torch.empty(6, 4, device="meta")
    with raises(UnsupportedError, mentions=("embedding_bags.t0.weight", "meta")):
        sharded.load_state_dict({**sharded.state_dict(), "embedding_bags.t0.weight": meta})
    states = sharded.optimizer_state_dict()
    with raises(UnsupportedError, mentions=("embedding_bags.t0.momentum1", "meta")):
        sharded.load_optimizer_state_dict({**states, "embedding_bags.t0.momentum1": meta})
    part = sharded.state_dict()["embedding_bags.t0.weight"]
    assert_equal(part.to_local() is None, rank.rank > 0, where="a rank without a part")
    with succeeds("detach", where="a part"):
        kept = part.detach()
    assert_equal(kept.to_local() is part.to_local(), True, where="the part, detached")
    for what in (torch.exp, torch.neg, torch.sum):
        with raises(UnsupportedError, mentions=("to_local",)):
            what(part)


@requirement(
    "PIPE-587",
    "A rank without a part of a table MUST refuse for it what the ranks with one refuse; a part MUST be itself where "
    "it is detached, and refuse what would need the whole.",
)
def test_absent_parts(rank_pool: Any) -> None:
    rank_pool.run(_absent_parts, 2)


@requirement(
    "PIPE-588",
    "A sharded module with a parameter or a buffer that is None, as torch has them, MUST be driven as one without.",
)
@pytest.mark.parametrize("name", TRAINING)
def test_members_that_are_none(pipeline: Any, name: str) -> None:
    job, loop = (Job(pipeline, 3, kinds=("table_wise", "row_wise")) for _ in range(2))
    for collection in job.collections:
        collection.register_parameter("absent", None)
        collection.register_buffer("nothing", None)
        assert_equal([each for each in collection.listed_parameters() if each is None], [], where="listed")
    options = {"start_batch": 10**6} if "Semi" in name else {}
    hoists = {"embedding_lookup_before_optimizer": True} if name == FUSED else {}
    schedule, loader = job.schedule(name, **options, **hoists), iter(job.batches(4))
    for step, batch in enumerate(loop.batches(4)):
        with succeeds("a step", where=f"step {step}"):
            output = schedule.progress(loader)
        assert_bits(output, loop.step(batch), f"step {step}")
        assert_same_state(job, loop, f"step {step}")


@requirement(
    "PIPE-589",
    "Another library's configuration MUST give the table that it describes, with what it leaves out by our defaults: a "
    "uniform init_fn between two bounds the same weights for every plan, any other as it is.",
)
def test_configurations_of_others(pipeline: Any) -> None:
    base = {"num_embeddings": 5, "embedding_dim": 4, "name": "t", "feature_names": ["f"]}
    uniform, constant = torch.nn.init.uniform_, torch.nn.init.constant_
    bounds = {"both": (partial(uniform, a=-2.0, b=-1.0), (-2, -1)), "one": (partial(uniform, a=0.5), (0.5, 1.0))}
    cases = bounds | {"a constant": (partial(constant, val=3.0), (3, 3)), "none": (None, (-1, 1))}
    for what, (function, (low, high)) in cases.items():
        given = SimpleNamespace(**base, **({} if function is None else {"init_fn": function}))
        with succeeds("a collection", where=what):
            collection = pipeline.EmbeddingBagCollection([given], device=place_of(pipeline))
        (config,) = collection.embedding_bag_configs()
        assert_equal((config.pooling.value, config.dtype), ("SUM", torch.float32), where=f"{what}: defaults")
        (weight,) = collection.parameters()
        inside = bool(((weight >= low) & (weight <= high)).all())
        assert_equal(inside, True, where=f"{what}: weights between {low} and {high}")
    cuts = [
        pipeline.ShardedEmbeddingBagCollection(
            pipeline.EmbeddingBagCollection([SimpleNamespace(**base, init_fn=bounds["both"][0])], device="meta"), plan
        )
        for plan in ({"t": pipeline.table_wise(0)}, {"t": pipeline.column_wise([0])}, {"t": pipeline.row_wise()})
    ]
    parts = [cut.local_shards()["t"][1] for cut in cuts]
    for part in parts[1:]:
        assert_bits(part, parts[0], "weights of another plan")


@requirement(
    "PIPE-590",
    "The handle on the optimizer in the backward MUST call a closure once where step() is given one and return what it "
    "gives, and nothing without one; either way no row is stepped.",
)
def test_steps_of_a_handle(pipeline: Any) -> None:
    sharded, called = _cut(pipeline), list[int]()
    before = [weight.clone() for _, weight, _ in sharded.local_shards().values()]
    optimizer = sharded.fused_optimizer

    def closure() -> int:
        called.append(1)
        return 7

    assert_equal((optimizer.step(), optimizer.step(closure)), (None, 7), where="returned")
    assert_equal((called, optimizer.step_count), ([1], 0), where="calls of the closure, and steps")
    for (_, weight, _), was in zip(sharded.local_shards().values(), before, strict=True):
        assert_bits(weight, was, "a table")
