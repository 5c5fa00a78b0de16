"""F. Tables as torchrec describes them: every setting works or is refused by name, first weights, optimizers, names."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from itertools import product
from typing import Any

import pytest
import torch

from conformance.harness import Rank, assert_equal, assert_same_tensor, raises, requirement, succeeds
from conformance.pipeline.batches import Jagged, random_jagged, values_of
from conformance.pipeline.model import assert_bits
from conformance.pipeline.sharding import (
    collection_of,
    placed,
    sharded_of,
)
from twinproof.errors import ConfigError, ShapeError, UnsupportedError

FIELDS = [
    "num_embeddings",
    "embedding_dim",
    "name",
    "data_type",
    "feature_names",
    "weight_init_max",
    "weight_init_min",
    "num_embeddings_post_pruning",
    "init_fn",
    "need_pos",
    "input_dim",
    "total_num_buckets",
    "use_virtual_table",
    "virtual_table_eviction_policy",
    "enable_embedding_update",
    "stash_weights",
]
REFUSED = {
    "num_embeddings_post_pruning": 3,
    "need_pos": True,
    "input_dim": 3,
    "total_num_buckets": 3,
    "use_virtual_table": True,
    "virtual_table_eviction_policy": object(),
    "enable_embedding_update": True,
    "stash_weights": True,
}
DTYPES = {"FP32": torch.float32, "FP16": torch.float16, "BF16": torch.bfloat16}
OTHERS = ("INT64", "INT32", "INT8", "UINT8", "INT4", "INT2", "NFP8")


@requirement(
    "PIPE-220",
    "EmbeddingConfig and EmbeddingBagConfig MUST have torchrec's fields in its positions, assignable, with its dtypes "
    "and poolings by name; a setting that has no effect here MUST be refused by name, as is a dtype without tables.",
)
def test_configs(pipeline: Any) -> None:
    for name, fields in (("EmbeddingConfig", FIELDS), ("EmbeddingBagConfig", [*FIELDS, "pooling"])):
        kind = getattr(pipeline, name)
        assert_equal([each.name for each in dataclasses.fields(kind)], fields, where=name)
        for setting, value in REFUSED.items():
            with raises(UnsupportedError, mentions=(setting, "t")):
                kind(4, 4, "t", **{setting: value})
        config = kind(4, 2, "t")
        facts = (str(config.data_type), config.feature_names, config.num_features())
        assert_equal(facts, ("FP32", [], 0), where="defaults")
        assert_equal((config.get_weight_init_min(), config.get_weight_init_max()), (-0.5, 0.5), where="bounds")
        config.data_type, config.feature_names = pipeline.DataType.FP16, ["f"]
    collection = pipeline.EmbeddingBagCollection([config])
    assert_equal(collection.embedding_bags["t"].weight.dtype, torch.float16, where="an assigned dtype")
    for name in OTHERS:
        with raises(ConfigError, mentions=(name,)):
            pipeline.EmbeddingBagConfig(4, 4, "t", data_type=getattr(pipeline.DataType, name))
    for name, dtype in DTYPES.items():
        for given in (getattr(pipeline.DataType, name), dtype):
            config = pipeline.EmbeddingBagConfig(4, 4, "t", given)
            weight = pipeline.EmbeddingBagCollection([config]).embedding_bags["t"].weight
            assert_equal((weight.dtype, config.data_type), (dtype, given), where=name)
    assert_equal(pipeline.EmbeddingBagCollection([config]).feature_names, ["t"], where="a table without features")
    with raises(ConfigError, mentions=("pooling", "NONE")):
        pipeline.EmbeddingBagConfig(4, 4, "t", pooling=pipeline.PoolingType.NONE)
    config.embedding_dim = 0
    with raises(ConfigError):
        pipeline.EmbeddingBagCollection([config])


def _rows(weight: torch.Tensor) -> None:
    with torch.no_grad():
        weight.copy_(torch.arange(weight.numel()).reshape(weight.shape))


def _drawn(weight: torch.Tensor) -> torch.Tensor:
    return torch.randn(weight.shape)


@requirement(
    "PIPE-221",
    "First weights MUST be those of init_fn, in place or returned, or lie within the bounds, in every module, for "
    "every plan of a collection on meta the same; reset_parameters MUST make them again.",
)
@pytest.mark.parametrize("way", ["in place", "returned", "bounds"])
def test_first_weights(pipeline: Any, way: str) -> None:
    ways: dict[str, dict[str, Any]] = {
        "in place": {"init_fn": _rows},
        "returned": {"init_fn": _drawn},
        "bounds": {"weight_init_min": 2.0, "weight_init_max": 2.5},
    }
    options = ways[way]
    configs = [pipeline.EmbeddingBagConfig(6, 4, f"t{i}", feature_names=[f"f{i}"], **options) for i in range(2)]
    plain = pipeline.EmbeddingConfig(6, 4, "t0", feature_names=["f0"], **options)

    def right(weight: torch.Tensor, where: str) -> None:
        if way == "in place":
            assert_bits(weight, torch.arange(24.0).reshape(6, 4), where)
        elif way == "bounds":
            assert_equal(bool(((weight >= 2) & (weight <= 2.5)).all()), True, where=where)
        else:
            torch.manual_seed(3)
            assert_bits(weight, torch.randn(6, 4), where)

    for name, kind, some in (
        ("embedding_bags", pipeline.EmbeddingBagCollection, configs),
        ("embeddings", pipeline.EmbeddingCollection, [plain]),
    ):
        torch.manual_seed(3)
        module = kind(some)
        weight = getattr(module, name)["t0"].weight
        right(weight.detach(), f"{name} when made")
        with torch.no_grad():
            weight.zero_()
        torch.manual_seed(3)
        module.reset_parameters()
        right(weight.detach(), f"{name} made again")
    torch.manual_seed(3)
    right(pipeline.TableBatchedEmbeddingBags(configs).weight(0), "lookups")
    meta, found = pipeline.EmbeddingBagCollection(configs, device="meta"), []
    for plan in (pipeline.table_wise(0), pipeline.row_wise(), pipeline.column_wise([0]), pipeline.data_parallel()):
        sharded = pipeline.ShardedEmbeddingBagCollection(meta, {"t0": plan, "t1": plan}, seed=3)
        held = sharded.local_shards()
        found.append([held[t][1] if t in held else sharded.embedding_bags[t].weight.detach() for t in ("t0", "t1")])
    right(found[0][0], "cut on meta")
    for number, weights in enumerate(found):
        for one, other in zip(weights, found[0], strict=True):
            assert_bits(one, other, f"plan {number}")


def _in_place(weight: torch.Tensor) -> None:
    weight.fill_(2.0)
    weight[0] = 3.0


def _scaled(weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.Parameter(torch.full_like(weight, 2.0)) * 2


@requirement(
    "PIPE-649",
    "init_fn MUST be called without gradients, at first and by reset_parameters: it may write into the weight as it "
    "likes, and what it returns may have been made of what needs a gradient; the weight MUST stay a leaf that does.",
)
@pytest.mark.parametrize("init_fn", [_in_place, _scaled])
def test_without_gradients(pipeline: Any, init_fn: Any) -> None:
    bags = pipeline.EmbeddingBagConfig(3, 4, "t0", feature_names=["f0"], init_fn=init_fn)
    rows = pipeline.EmbeddingConfig(3, 4, "t0", feature_names=["f0"], init_fn=init_fn)
    expected = torch.tensor([[3.0], [2.0], [2.0]]).expand(3, 4) if init_fn is _in_place else torch.full((3, 4), 4.0)
    for name, kind, config in (
        ("embedding_bags", pipeline.EmbeddingBagCollection, bags),
        ("embeddings", pipeline.EmbeddingCollection, rows),
    ):
        with succeeds("making it", where=name):
            module = kind([config])
        weight = getattr(module, name)["t0"].weight
        for time in ("at first", "made again"):
            assert_bits(weight.detach(), expected.contiguous(), f"{name} {time}")
            assert_equal((weight.is_leaf, weight.requires_grad), (True, True), where=f"{name} {time}")
            torch.nn.init.zeros_(weight)
            with succeeds("reset_parameters()", where=name):
                module.reset_parameters()


OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.5}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.5, "eps": 1e-6}),
    "adam": (torch.optim.Adam, {"lr": 0.5, "betas": (0.5, 0.75)}),
}


@requirement(
    "PIPE-222",
    "apply_optimizer_in_backward MUST step a collection's tables in the backward, and those of one that is cut "
    "afterwards by the same optimizer and hyperparameters; what has no formula there MUST be refused, never replaced.",
)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize("kind", sorted(OPTIMIZERS))
def test_optimizers(pipeline: Any, kind: str) -> None:
    configs = [pipeline.EmbeddingBagConfig(6, 4, f"t{i}", feature_names=[f"f{i}"]) for i in range(2)]
    weights = [values_of((6, 4), i) for i in range(2)]
    optimizer, options = OPTIMIZERS[kind]
    batch, grad = random_jagged(["f0", "f1"], [6, 6], 3, 1), values_of((3, 8), 2)

    def carrying(names: list[str], kinds: Any = optimizer, given: Any = options) -> Any:
        whole = collection_of(pipeline, configs, weights)
        params = [whole.embedding_bags[name].weight for name in names]
        pipeline.apply_optimizer_in_backward(kinds, params, given)
        return whole

    whole = carrying(["t0", "t1"])
    whole(batch.kjt(pipeline)).values().backward(grad)
    torchs = [torch.nn.Parameter(weight.clone()) for weight in weights]
    plain = collection_of(pipeline, configs, weights)
    plain(batch.kjt(pipeline)).values().backward(grad)
    for index, param in enumerate(torchs):
        param.grad = plain.embedding_bags[f"t{index}"].weight.grad
        optimizer([param], **options).step()
        held = whole.embedding_bags[f"t{index}"].weight
        assert_bits(held.detach(), param.detach(), "stepped in the backward")
        assert_equal(held.grad, None, where="gradient")
    plan = {"t0": pipeline.table_wise(0), "t1": pipeline.data_parallel()}
    cut = pipeline.ShardedEmbeddingBagCollection(carrying(["t0", "t1"]), plan)
    fused = pipeline.FusedOptimizer(kind, lr=0.5, eps=1e-6 if kind == "adagrad" else 1e-8)
    if kind == "adam":
        fused = dataclasses.replace(fused, beta1=0.5, beta2=0.75)
    if kind == "sgd":
        fused = pipeline.FusedOptimizer("sgd", lr=0.5)
    expected = pipeline.ShardedEmbeddingBagCollection(collection_of(pipeline, configs, weights), plan, optimizer=fused)
    for module in (cut, expected):
        module(batch.kjt(pipeline)).values().backward(grad)
    assert_bits(cut.local_shards()["t0"][1], expected.local_shards()["t0"][1], "the cut table")
    assert_bits(cut.embedding_bags["t1"].weight.detach(), torchs[1].detach(), "the table on every rank")
    refused = [
        (carrying(["t0"]), {}),
        (carrying(["t0", "t1"], torch.optim.RMSprop, {"lr": 0.1}), {}),
        (carrying(["t0", "t1"], torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}), {}),
        (carrying(["t0", "t1"]), {"optimizer": fused}),
    ]
    for collection, more in refused:
        with raises(ConfigError):
            pipeline.ShardedEmbeddingBagCollection(collection, plan, **more)


# Values of their options that torch's optimizers do not have by default.
OTHERWISE: dict[str, Any] = {
    "momentum": 0.5, "dampening": 0.25, "weight_decay": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.5,
    **dict.fromkeys(("nesterov", "maximize", "amsgrad", "foreach"), True),
}  # fmt: skip


def _stepped(kind: Any, options: dict[str, Any]) -> torch.Tensor:
    """A parameter after two steps of torch's optimizer."""
    param = torch.nn.Parameter(values_of((6, 4), 1).double())
    optimizer = kind([param], **options)
    for seed in (2, 3):
        param.grad = values_of((6, 4), seed).double()
        optimizer.step()
    return param.detach()


@requirement(
    "PIPE-418",
    "Every option of an optimizer that parameters carry, other than its hyperparameters here, MUST be refused by name "
    "when the collection is cut, where it changes what torch's optimizer computes.",
)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize("kind", sorted(OPTIMIZERS))
def test_options_of_optimizers(pipeline: Any, kind: str) -> None:
    optimizer, given = OPTIMIZERS[kind]
    names = set(inspect.signature(optimizer).parameters) & set(OTHERWISE)
    config = pipeline.EmbeddingBagConfig(6, 4, "t", feature_names=["f"])
    plain, plan = _stepped(optimizer, given), {"t": pipeline.table_wise(0)}
    for name in sorted(names):
        # Nesterov's and dampened momentum are none without momentum, and each excludes the other.
        besides = {"momentum": 0.5} if name in ("nesterov", "dampening") else {}
        options = {**given, **besides, name: OTHERWISE[name]}
        changes = not torch.allclose(_stepped(optimizer, options), plain)
        collection = collection_of(pipeline, [config], [values_of((6, 4), 1)])
        pipeline.apply_optimizer_in_backward(optimizer, collection.parameters(), options)
        assert_equal(_is_refused(pipeline, collection, plan, name), changes, where=f"{name} of {kind} is refused")


def _is_refused(pipeline: Any, collection: Any, plan: Any, name: str) -> bool:
    """Whether the collection cannot be cut, for an option of this name."""
    try:
        pipeline.ShardedEmbeddingBagCollection(collection, plan)
    except ConfigError as error:
        return name in str(error)
    return False


# For each hyperparameter that a kind has here, another value than that of ``OPTIMIZERS``.
APART: dict[str, list[dict[str, Any]]] = {
    "sgd": [{"lr": 0.25}],
    "adagrad": [{"lr": 0.25}, {"eps": 1e-3}],
    "adam": [{"lr": 0.25}, {"eps": 1e-3}, {"betas": (0.25, 0.75)}, {"betas": (0.5, 0.5)}],
}


@requirement(
    "PIPE-497",
    "Tables that are cut together and carry optimizers that differ, in one hyperparameter alone or in their kind, MUST "
    "be refused, whichever of the tables it is; equal ones MUST be taken.",
)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize("kind", sorted(OPTIMIZERS))
def test_optimizers_that_differ(pipeline: Any, kind: str) -> None:
    optimizer, given = OPTIMIZERS[kind]
    other = next(name for name in sorted(OPTIMIZERS) if name != kind)
    configs = [pipeline.EmbeddingBagConfig(6, 4, f"t{i}", feature_names=[f"f{i}"]) for i in range(3)]
    plan = {config.name: pipeline.table_wise(0) for config in configs}

    def cut(odd: int, odd_kind: Any, odd_options: dict[str, Any]) -> Any:
        whole = collection_of(pipeline, configs, [values_of((6, 4), i) for i in range(3)])
        for i, config in enumerate(configs):
            one, options = (odd_kind, odd_options) if i == odd else (optimizer, given)
            pipeline.apply_optimizer_in_backward(one, [whole.embedding_bags[config.name].weight], options)
        return pipeline.ShardedEmbeddingBagCollection(whole, plan)

    with succeeds("a cut", where=f"{kind} of all tables"):
        cut(0, optimizer, dict(given))
    for odd in range(3):
        for change in APART[kind]:
            with raises(ConfigError, mentions=("one optimizer",), where=f"{kind}, table {odd} with {change}"):
                cut(odd, optimizer, {**given, **change})
        with raises(ConfigError, mentions=("one optimizer",), where=f"{kind}, table {odd} with {other}"):
            cut(odd, *OPTIMIZERS[other])


def _ways_to(optimizer: Any, options: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """Ways to give an optimizer that was made of ``options`` another hyperparameter."""

    def by_hand(held: Any) -> None:
        held.param_groups[0].update(change)

    def loaded(held: Any) -> None:
        held.load_state_dict(optimizer(held.param_groups[0]["params"], **{**options, **change}).state_dict())

    ways: dict[str, Any] = {"by hand": by_hand, "from a loaded state": loaded}
    if "lr" in change:
        share = change["lr"] / options["lr"]
        schedulers = torch.optim.lr_scheduler
        ways["by a scheduler"] = lambda held: schedulers.LambdaLR(held, lambda step: share)
        ways["by a cycle"] = lambda held: schedulers.OneCycleLR(
            held, options["lr"], total_steps=8, div_factor=1 / share, cycle_momentum=False
        )
    return ways


@requirement(
    "PIPE-546",
    "The optimizer in the backward, of cut tables and of replicated ones, MUST be the tables' own as they are when "
    "they are cut, whoever changed them since they were made: by hand, a loaded state or a scheduler; an option "
    "that has no formula MUST be refused, and so MUST a change of one table alone.",
)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize("kind", sorted(OPTIMIZERS))
def test_optimizers_as_they_are(pipeline: Any, kind: str) -> None:
    optimizer, given = OPTIMIZERS[kind]
    configs = [pipeline.EmbeddingBagConfig(6, 4, f"t{i}", feature_names=[f"f{i}"]) for i in range(3)]
    batch, grad = random_jagged(["f0", "f1", "f2"], [6, 6, 6], 3, 1), values_of((3, 12), 2)
    plan = {"t0": pipeline.table_wise(0), "t1": pipeline.data_parallel(), "t2": pipeline.row_wise()}

    def cut(options: dict[str, Any], change: Any = None, tables: int = 3) -> Any:
        whole = collection_of(pipeline, configs, [values_of((6, 4), i) for i in range(3)])
        weights = [whole.embedding_bags[config.name].weight for config in configs]
        pipeline.apply_optimizer_in_backward(optimizer, weights, options)
        for weight in weights[:tables] if change is not None else []:
            change(weight._in_backward_optimizers[0])
        return pipeline.ShardedEmbeddingBagCollection(whole, plan)

    def stepped(module: Any) -> list[torch.Tensor]:
        for _ in range(2):
            module(batch.kjt(pipeline)).values().backward(grad)
        shards = module.local_shards()
        return [shards["t0"][1], module.embedding_bags["t1"].weight.detach(), shards["t2"][1]]

    for changed in APART[kind]:
        expected = stepped(cut({**given, **changed}))
        for way, change in _ways_to(optimizer, given, changed).items():
            where = f"{kind}, {changed} {way}"
            with succeeds("a cut", where=where):
                module = cut(given, change)
            for table, (got, want) in enumerate(zip(stepped(module), expected, strict=True)):
                assert_bits(got, want, f"{where}: table {table}")
            with raises(ConfigError, mentions=("one optimizer",), where=f"{where}: of one table"):
                cut(given, change, tables=1)
    for name in ("weight_decay", "maximize"):
        with raises(ConfigError, mentions=(name,), where=f"{kind}, {name}"):
            cut(given, lambda held, name=name: held.param_groups[0].update({name: OTHERWISE[name]}))


@requirement(
    "PIPE-774",
    "A collection whose tables carry an optimizer that has stepped MUST NOT be cut, for its states would be lost: the "
    "refusal names the optimizer and its steps, and changes nothing. One that keeps no states MUST be cut.",
)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize("way", ["table_wise(0)", "row_wise()", "data_parallel()"])
@pytest.mark.parametrize("kind", sorted(OPTIMIZERS))
def test_optimizers_that_have_stepped(pipeline: Any, kind: str, way: str) -> None:
    optimizer, given = OPTIMIZERS[kind]
    configs = [pipeline.EmbeddingBagConfig(6, 4, f"t{i}", feature_names=[f"f{i}"]) for i in range(2)]
    whole = collection_of(pipeline, configs, [values_of((6, 4), i) for i in range(2)])
    pipeline.apply_optimizer_in_backward(optimizer, whole.parameters(), given)
    batch, plan = random_jagged(["f0", "f1"], [6, 6], 3, 1), {"t0": pipeline.table_wise(0)}
    plan["t1"] = {"row_wise()": pipeline.row_wise(), "data_parallel()": pipeline.data_parallel()}.get(way, plan["t0"])
    for _ in range(2):
        whole(batch.kjt(pipeline)).values().backward(values_of((3, 8), 2))
    held = [table.weight._in_backward_optimizers[0] for table in whole.embedding_bags.values()]
    before = [dict(one.state_dict()["state"].get(0, {})) for one in held]
    if kind == "sgd":
        with succeeds("a cut", where=kind):
            pipeline.ShardedEmbeddingBagCollection(whole, plan)
        return
    with raises(ConfigError, mentions=(f"{optimizer.__name__} after 2 steps",), where=kind):
        pipeline.ShardedEmbeddingBagCollection(whole, plan)
    for one, states in zip(held, before, strict=True):
        for name, value in states.items():
            assert_bits(one.state_dict()["state"][0][name], value, f"{name} behind the refusal")
    # Whoever begins anew says so.
    for one in held:
        one.state.clear()
    with succeeds("a cut", where=f"{kind}, cleared"):
        pipeline.ShardedEmbeddingBagCollection(whole, plan)


@requirement(
    "PIPE-223",
    "Tables MUST be found under embedding_bags.{table}.weight by get_model_state_dict of the model around them and by "
    "named_parameters of their module, cut or not; an optimizer over the model MUST not be handed cut tables.",
)
def test_names_of_tables(pipeline: Any) -> None:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    configs = [pipeline.EmbeddingBagConfig(6, 4, f"t{i}", feature_names=[f"f{i}"]) for i in range(3)]
    weights = [values_of((6, 4), i) for i in range(3)]
    plan = {"t0": pipeline.table_wise(0), "t1": pipeline.row_wise(), "t2": pipeline.data_parallel()}
    collection = collection_of(pipeline, configs, weights)
    cut = sharded_of(pipeline, collection, plan, "sgd")
    names = sorted(f"embedding_bags.t{i}.weight" for i in range(3))
    for module in (collection, cut):
        found = dict(module.named_parameters())
        assert_equal(sorted(found), names, where="named_parameters")
        for index, weight in enumerate(weights):
            assert_bits(found[f"embedding_bags.t{index}.weight"].detach(), weight, f"t{index}")
        model = torch.nn.ModuleDict({"sparse": module})
        assert_equal(sorted(get_model_state_dict(model)), [f"sparse.{name}" for name in names], where="state dict")
    model = torch.nn.ModuleDict({"sparse": cut})
    assert_equal([name for name, _ in model.named_parameters()], ["sparse.embedding_bags.t2.weight"], where="the model")
    again = [id(param) for param in cut.parameters()]
    assert_equal([id(param) for param in cut.parameters()], again, where="the same parameters each time")
    state: dict[str, Any] = {f"sparse.embedding_bags.t{i}.weight": weight + 1 for i, weight in enumerate(weights)}
    set_model_state_dict(model, state)
    for name, (_, weight, _) in cut.local_shards().items():
        assert_bits(weight, weights[int(name[1:])] + 1, f"loaded {name}")
        assert_bits(cut.embedding_bags[name].weight.to_local(), weight, f"part of {name}")
    before = cut.local_shards()["t0"][1].clone()
    optimizer = torch.optim.SGD(cut.parameters(), lr=0.1)
    batch = Jagged(["f0", "f1", "f2"], [[[1]], [[2]], [[3]]]).kjt(pipeline)
    cut(placed(pipeline, batch)).values().sum().backward()
    changed = cut.local_shards()["t0"][1].clone()
    optimizer.step()
    assert_equal(bool((before != changed).any()), True, where="the backward steps")
    assert_bits(cut.local_shards()["t0"][1], changed, "an optimizer has no gradient of cut tables")


@requirement(
    "PIPE-408",
    "A collection on meta that is cut MUST leave torch's generator as it was, whatever init_fn draws from it and for "
    "every plan: what the program draws afterwards is its own.",
)
@pytest.mark.parametrize("is_drawn", [True, False], ids=["init_fn", "bounds"])
def test_generator(pipeline: Any, is_drawn: bool) -> None:
    options = {"init_fn": _drawn} if is_drawn else {}
    configs = [pipeline.EmbeddingBagConfig(6, 4, f"t{i}", feature_names=[f"f{i}"], **options) for i in range(2)]
    meta = pipeline.EmbeddingBagCollection(configs, device="meta")
    for plan in (pipeline.table_wise(0), pipeline.row_wise(), pipeline.column_wise([0]), pipeline.data_parallel()):
        torch.manual_seed(11)
        before = torch.get_rng_state()
        pipeline.ShardedEmbeddingBagCollection(meta, {"t0": plan, "t1": plan}, seed=3)
        assert_same_tensor(torch.get_rng_state(), before, where=f"the generator's state, {plan.kind}")


def _memory_of_shards(rank: Rank) -> None:
    pipeline = rank.component("pipeline")
    for where, init_fn in (("drawn", _drawn), ("filled", _rows), ("bounds", None)):
        config = pipeline.EmbeddingBagConfig(12, 4, "t0", feature_names=["f0"], init_fn=init_fn)
        for device in ("meta", "cpu"):
            whole = pipeline.EmbeddingBagCollection([config], device=device)
            for plan in (pipeline.table_wise(0), pipeline.row_wise(), pipeline.column_wise([0, 1])):
                sharded = pipeline.ShardedEmbeddingBagCollection(whole, {"t0": plan})
                for shard, weight, _ in sharded.local_shards().values():
                    found = weight.untyped_storage().nbytes()
                    expected = (shard.rows[1] - shard.rows[0]) * shard.width * weight.element_size()
                    assert_equal(found, expected, where=f"bytes of a shard, {plan.kind}, {where}, from {device}")


@requirement(
    "PIPE-648",
    "Weights of a shard MUST hold the memory of that shard alone, however they were made: by an init_fn of the whole "
    "table, by bounds, or from a table that was there; cut by table, by rows and by columns.",
)
def test_memory_of_shards(pipeline: Any, rank_pool: Any) -> None:
    rank_pool.run(_memory_of_shards, 2)


@requirement(
    "PIPE-414",
    "Tables of one collection on meta MUST NOT start alike where init_fn draws: each from a seed of its own, which is "
    "the collection's and the table's place.",
)
def test_seeds_of_tables(pipeline: Any) -> None:
    configs = [pipeline.EmbeddingBagConfig(6, 4, f"t{i}", feature_names=[f"f{i}"], init_fn=_drawn) for i in range(3)]
    meta = pipeline.EmbeddingBagCollection(configs, device="meta")
    sharded = pipeline.ShardedEmbeddingBagCollection(meta, {f"t{i}": pipeline.row_wise() for i in range(3)}, seed=3)
    for number in range(3):
        torch.manual_seed(3 + number)
        assert_bits(sharded.local_shards()[f"t{number}"][1], torch.randn(6, 4), f"table {number}")


@requirement(
    "PIPE-483",
    "First weights of another shape MUST be refused by the table's name, those too that would be broadcast: a row for "
    "all, a column for all, one number; of a table on meta when it is cut.",
)
def test_first_weights_of_another_shape(pipeline: Any) -> None:
    for shape in ((4,), (1, 4), (6, 1), (), (1,), (4, 6)):
        config = pipeline.EmbeddingBagConfig(
            6, 4, "t0", feature_names=["f0"], init_fn=lambda weight, shape=shape: torch.zeros(shape)
        )
        plain = pipeline.EmbeddingConfig(6, 4, "t0", feature_names=["f0"], init_fn=config.init_fn)
        on_meta = pipeline.EmbeddingBagCollection([config], device="meta")
        ways: dict[str, Any] = {
            "bags": lambda config=config: pipeline.EmbeddingBagCollection([config]),
            "rows": lambda plain=plain: pipeline.EmbeddingCollection([plain]),
            "cut": lambda meta=on_meta: pipeline.ShardedEmbeddingBagCollection(meta, {"t0": pipeline.row_wise()}),
        }
        for way, make in ways.items():
            with raises(ConfigError, mentions=("shape", "t0"), where=f"{way} of first weights {shape}"):
                make()


@requirement(
    "PIPE-486",
    "A store whose rows are not the table's MUST be refused by the table's name when the collection is cut: rows of "
    "another width, dtype or optimizer, one without states for one with them and the other way round.",
)
def test_rows_of_a_store(pipeline: Any, kvstore: Any) -> None:
    config = pipeline.EmbeddingBagConfig(6, 4, "t0", feature_names=["f0"])

    def cut(dim: int, dtype: torch.dtype, kind: str, asked: str) -> Any:
        layout = kvstore.RowLayout(dim, weight_dtype=dtype, optimizer=kind)
        store = kvstore.KVStore({"t0": layout}, optimizer_in_row=True, clock=lambda: 1)
        plan = {"t0": pipeline.key_value(store, kvstore.Buckets(4))}
        collection = pipeline.EmbeddingBagCollection([config], device="meta")
        return pipeline.ShardedEmbeddingBagCollection(collection, plan, optimizer=pipeline.FusedOptimizer(asked))

    for kind in ("sgd", "adagrad", "rowwise_adagrad", "adam"):
        with succeeds("rows of the table", where=kind):
            cut(4, torch.float32, kind, kind)
        for dim, dtype in ((5, torch.float32), (4, torch.float16)):
            with raises(ConfigError, mentions=("t0", "rows"), where=f"{kind}: rows of {dim} {dtype}"):
                cut(dim, dtype, kind, kind)
        for asked in {"sgd", "adagrad", "rowwise_adagrad", "adam"} - {kind}:
            with raises(ConfigError, mentions=("t0", "rows"), where=f"rows of {kind}, a step of {asked}"):
                cut(4, torch.float32, kind, asked)


@requirement(
    "PIPE-559",
    "Weights that are given to a lookup MUST be the tables' memory, which the caller sees each update in; what cannot "
    "be, strided, of another shape or dtype, or no tensor, MUST be refused by the table's name.",
)
def test_given_weights(pipeline: Any) -> None:
    tables = [pipeline.EmbeddingBagConfig(9, 4, name, feature_names=[name]) for name in ("a", "b")]
    optimizer = pipeline.FusedOptimizer("sgd", lr=0.5)
    whole = values_of((9, 4), 1)
    wrong: dict[str, Any] = {
        "some columns": values_of((9, 8), 2)[:, :4],
        "every other row": values_of((18, 4), 3)[::2],
        "transposed": values_of((4, 9), 4).t(),
        "one row again and again": values_of((1, 4), 5).expand(9, 4),
        "wider": values_of((9, 5), 6),
        "longer": values_of((10, 4), 7),
        "another dtype": whole.to(torch.bfloat16),
        "flat": values_of((36,), 8),
        "a list": whole.tolist(),
        "none": None,
    }
    for what, weight in wrong.items():
        for place, name in enumerate(("a", "b")):
            weights = [whole, whole.clone()]
            weights[place] = weight
            with raises((ShapeError, ConfigError), mentions=(name,), where=f"{what} for {name}"):
                pipeline.TableBatchedEmbeddingBags(tables, optimizer=optimizer, weights=weights)
    stacked = values_of((2, 9, 4), 10)
    both = pipeline.TableBatchedEmbeddingBags(tables, optimizer=optimizer, weights=stacked)
    places = [both.weight(place).data_ptr() for place in range(2)]
    assert_equal(places, [part.data_ptr() for part in stacked], where="memory of both in one tensor")
    wide = values_of((19, 4), 9)
    given = {"its own": whole, "a part of another": wide[5:14], "a parameter": torch.nn.Parameter(values_of((9, 4), 2))}
    for what, weight in given.items():
        batch, before = random_jagged(["a", "b"], [9, 9], 3, 4), weight.detach().clone()
        lookups = pipeline.TableBatchedEmbeddingBags(tables, optimizer=optimizer, weights=[weight, whole.clone()])
        twin = pipeline.TableBatchedEmbeddingBags(tables, optimizer=optimizer, weights=[before, whole.clone()])
        for each in (lookups, twin):
            ids, offsets, _ = batch.flat()
            each(ids, offsets).sum().backward()
        assert_equal(lookups.weight(0).data_ptr(), weight.data_ptr(), where=f"memory of {what}")
        assert_bits(weight.detach(), twin.weight(0), f"{what} behind an update")


@requirement(
    "PIPE-683",
    "An update of tables MUST be made with the learning rate that their optimizer has at its moment: set between "
    "steps, in a step that a load takes back and that is made again, or by a load of the optimizer's state.",
)
def test_rates_of_the_moment(pipeline: Any) -> None:
    ids, ends = torch.tensor([0, 1, 2]), torch.tensor([0, 1, 2, 3])
    for events in product(("step", "a load", "a rate", "its state"), repeat=4):
        tables = placed(
            pipeline,
            pipeline.TableBatchedEmbeddingBags(
                [pipeline.EmbeddingBagConfig(3, 4, "t", feature_names=["f"])],
                optimizer=pipeline.FusedOptimizer("sgd", lr=1.0),
            ),
        )
        optimizer = tables.fused_optimizer
        kept = {name: value.clone() for name, value in tables.state_dict().items()}
        states, rate = copy.deepcopy(optimizer.state_dict()), 1.0
        for number, event in enumerate((*events, "step"), start=1):
            if event == "a load":
                tables.load_state_dict(kept)
            elif event == "a rate":
                rate = 0.5**number
                optimizer.param_groups[0]["lr"] = rate
            elif event == "its state":
                optimizer.load_state_dict(copy.deepcopy(states))
                rate = 1.0
            else:
                with torch.no_grad():
                    # Powers of two are exact in what a step leaves of these.
                    tables.weight(0).fill_(4.0)
                tables(placed(pipeline, ids), placed(pipeline, ends)).sum().backward()
                expected = torch.full((3, 4), 4.0 - rate)
                assert_bits(tables.weight(0).detach(), expected, f"{events}: event {number}, rate {rate}")
