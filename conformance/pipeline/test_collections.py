"""F. Collections as torchrec has them: rows one by one, processors by name, traced models, other libraries' types."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.harness import assert_equal, assert_within_derived, examples, raises, requirement, succeeds
from conformance.pipeline.batches import Jagged, random_bags, random_jagged, values_of, vbe_of
from conformance.pipeline.model import Naive, assert_bits
from conformance.pipeline.sharding import (
    collection_of,
    sharded_of,
)
from refimpl.optimizers import Hyper
from twinproof.errors import ConfigError, IdRangeError, MissingKeyError, ShapeError, UnsupportedError


def rows_of(pipeline: Any, configs: Any, weights: Any, **options: Any) -> Any:
    """A collection of rows with these weights."""
    collection = pipeline.EmbeddingCollection(configs, **options)
    collection.load_state_dict({f"embeddings.{c.name}.weight": w for c, w in zip(configs, weights, strict=True)})
    return collection


@requirement(
    "PIPE-224",
    "EmbeddingCollection MUST give each feature the rows of its ids, bit for bit, with the lengths of the batch, and "
    "tables dense gradients whose duplicates are summed by feature, sample and position; a feature of several tables "
    "is named feature@table.",
)
@examples(25)
@given(seed=st.integers(0, 10**6), dtype=st.sampled_from(["FP32", "FP16", "BF16"]), need=st.booleans())
def test_rows(pipeline: Any, seed: int, dtype: str, need: bool) -> None:
    kinds = getattr(pipeline.DataType, dtype)
    configs = [
        pipeline.EmbeddingConfig(7, 5, "t0", kinds, ["a", "c"]),
        pipeline.EmbeddingConfig(7, 5, "t1", feature_names=["b", "c"]),
    ]
    weights = [values_of((7, 5), seed).to(configs[0].dtype), values_of((7, 5), seed + 1)]
    weights[1][2] = -0.0
    collection = rows_of(pipeline, configs, weights, need_indices=need)
    batch = random_jagged(["c", "b", "a"], [7, 7, 7], 3, seed)
    kjt = batch.kjt(pipeline, dtype=torch.int32)
    found = collection(kjt)
    names = [["a", "c@t0"], ["b", "c@t1"]]
    assert_equal((list(found), collection.embedding_names_by_table()), ([*names[0], *names[1]], names), where="names")
    grads = {}
    for name, bags in found.items():
        feature = kjt[name.split("@")[0]]
        table = 0 if name in names[0] else 1
        assert_bits(bags.values().detach(), weights[table][feature.values()].float(), f"rows of {name}")
        assert_bits(bags.lengths(), feature.lengths(), f"lengths of {name}")
        indices = bags.weights_or_none()
        assert_equal(
            None if indices is None else indices.tolist(), feature.values().tolist() if need else None, where=name
        )
        grads[name] = values_of(bags.values().shape, seed + 7)
    sum((bags.values() * grads[name]).sum() for name, bags in found.items()).backward()
    for table, config in enumerate(configs):
        naive = Naive([pipeline.EmbeddingBagConfig(7, 5, "t", feature_names=["x"])], [torch.zeros(7, 5)], "sgd")
        ids = [i for name in names[table] for i in kjt[name.split("@")[0]].values().tolist()]
        grad = torch.cat([grads[name] for name in names[table]])
        naive.step(Jagged(["x"], [[[i] for i in ids]]), grad, Hyper(-1.0))
        expected = naive.tables[0].weight.to(config.dtype)
        assert_bits(collection.embeddings[config.name].weight.grad, expected, f"gradient of {config.name}")


@requirement(
    "PIPE-499",
    'Results with indices MUST carry the ids that were looked up, in their dtype: 0 under "warning" and "ignore" for '
    "one outside of its table; the batch stays as it is.",
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("bounds", ["warning", "ignore"])
def test_looked_up_ids(pipeline: Any, bounds: str, dtype: torch.dtype) -> None:
    config = pipeline.EmbeddingConfig(6, 4, "t", feature_names=["a", "b"])
    rows = values_of((6, 4), 3)
    collection = rows_of(pipeline, [config], [rows], need_indices=True, bounds_check=bounds)
    batch = Jagged(["a", "b"], [[[2, 6], []], [[-1, 5], [3, 7]]])
    kjt = batch.kjt(pipeline, dtype=dtype)
    found = collection(kjt)
    for name, ids in (("a", [2, 0]), ("b", [0, 5, 3, 0])):
        indices = found[name].weights()
        assert_equal((indices.tolist(), indices.dtype), (ids, dtype), where=f"indices of {name}")
        assert_bits(found[name].values().detach(), rows[torch.tensor(ids)], f"rows of {name}")
    assert_equal(kjt.values().tolist(), [2, 6, -1, 5, 3, 7], where="ids of the batch")


@requirement(
    "PIPE-225",
    "EmbeddingCollection MUST refuse by name tables of different widths or that are pooled, bad ids, missing features "
    "and settings of sharded collections, and take features of different sizes as they are.",
)
def test_rows_refused(pipeline: Any) -> None:
    config = pipeline.EmbeddingConfig(6, 4, "t", feature_names=["a"])
    for tables in ([config, pipeline.EmbeddingConfig(6, 3, "u")], [pipeline.EmbeddingBagConfig(6, 4, "u")], []):
        with raises(ConfigError):
            pipeline.EmbeddingCollection(tables)
    for setting in ({"use_gather_select": True}, {"use_gather_select_per_sharding": {"row_wise": True}}):
        with raises(UnsupportedError, mentions=("use_gather_select",)):
            pipeline.EmbeddingCollection([config], **setting)
    collection = pipeline.EmbeddingCollection([config])
    with raises(IdRangeError, mentions=("6", "table t")):
        collection(Jagged(["a"], [[[6]]]).kjt(pipeline))
    with raises(MissingKeyError, mentions=("a",)):
        collection(Jagged(["b"], [[[1]]]).kjt(pipeline))
    with raises(UnsupportedError, mentions=("EmbeddingCollection",)):
        pipeline.ShardedEmbeddingBagCollection(collection, {"t": pipeline.table_wise(0)})
    facts = (
        collection.embedding_dim(),
        collection.need_indices(),
        collection.device.type,
        collection.use_gather_select(),
    )
    assert_equal(facts, (4, False, "cpu", False), where="facts")
    vbe = vbe_of(pipeline, random_bags([2, 3], 5, limit=6))
    found = collection(vbe)["a"]
    assert_equal(found.lengths().tolist(), vbe["a"].lengths().tolist(), where="lengths of a feature of its own size")


@requirement(
    "PIPE-226",
    "Processors by name MUST be one processor of all features, bit for bit, with their gradients, whole and cut, and "
    "split() MUST give them apart from the tables; ids of features without a processor weigh 1.",
)
def test_processors(pipeline: Any) -> None:
    configs = [pipeline.EmbeddingBagConfig(6, 4, f"t{i}", feature_names=[f"f{i}"]) for i in range(2)]
    weights, scales = [values_of((6, 4), i) for i in range(2)], [values_of((4,), 10 + i) for i in range(2)]
    kjt = random_jagged(["f1", "x", "f0"], [6, 6, 6], 5, 3).kjt(pipeline)
    grad, plan = values_of((5, 8), 4), {"t0": pipeline.table_wise(0), "t1": pipeline.column_wise([0])}
    found: list[list[torch.Tensor]] = []
    for kind in ("all", "each", "all cut", "each cut"):
        whole = collection_of(pipeline, configs, weights, is_weighted=True)
        each = {f"f{i}": pipeline.PositionWeightedModule(4) for i in range(2)}
        one = pipeline.PositionWeightedModuleCollection({"f0": 4, "f1": 4})
        params = [each[f"f{i}"].position_weight for i in range(2)]
        if "all" in kind:
            params = [one.position_weights[f"f{i}"] for i in range(2)]
        with torch.no_grad():
            for param, scale in zip(params, scales, strict=True):
                param.copy_(scale)
        module = pipeline.FeatureProcessedEmbeddingBagCollection(whole, one if "all" in kind else each)
        assert_equal(module.is_weighted(), True, where="is_weighted")
        if "cut" not in kind:
            processors, tables = module.split()
            assert_bits(tables(processors(kjt)).values(), module(kjt).values(), f"{kind} split")
            assert_bits(processors(kjt)["x"].weights(), torch.ones(kjt["x"].values().numel()), "no processor")
        module = sharded_of(pipeline, module, plan, "sgd", device="cpu") if "cut" in kind else module
        pooled = module(kjt).values()
        pooled.backward(grad)
        found.append([pooled.detach(), *(param.grad for param in params)])
    for kind, parts in zip(("each", "all cut", "each cut"), found[1:], strict=True):
        for one, other in zip(parts, found[0], strict=True):
            assert_bits(one, other, kind)
    whole = pipeline.EmbeddingBagCollection(configs, is_weighted=True)
    with raises(ConfigError, mentions=("f0",)):
        pipeline.FeatureProcessedEmbeddingBagCollection(whole, {"f1": pipeline.PositionWeightedModule(4)})
    with raises(IdRangeError, mentions=("5", "4")):
        pipeline.PositionWeightedModule(4)(pipeline.JaggedTensor(torch.zeros(5), lengths=torch.tensor([5])))
    ready = pipeline.PositionWeightedModuleCollection({"f0": 4, "f1": 4})
    plain = random_jagged(["f1", "f0"], [6, 6], 5, 3, weighted=True).kjt(pipeline)
    expected = ready(plain).weights().detach()
    ready.pre_process_input(plain)
    assert_bits(ready(plain).weights().detach(), expected, "positions written before")
    module = pipeline.FeatureProcessedEmbeddingBagCollection(whole, ready)
    with raises(ConfigError, mentions=("processed before",)):
        sharded_of(pipeline, module, plan, "sgd")
    inverse = (["f1", "f0"], torch.tensor([[0, 1, 1], [1, 2, 3]]))
    own = pipeline.KeyedJaggedTensor(
        ["f1", "f0"],
        torch.tensor([1, 2, 3, 4, 5, 0]),
        lengths=torch.tensor([1, 1, 1, 2, 0, 1]),
        stride_per_key_per_rank=[[2], [4]],
        inverse_indices=inverse,
    )
    full = Jagged(["f1", "f0"], [[[1], [2], [2]], [[4, 5], [], [0]]]).kjt(pipeline)
    together = pipeline.PositionWeightedModuleCollection({"f0": 4, "f1": 4})
    for processors in ({f"f{i}": pipeline.PositionWeightedModule(4) for i in range(2)}, together):
        twice = pipeline.FeatureProcessedEmbeddingBagCollection(
            collection_of(pipeline, configs, weights, is_weighted=True), processors
        )
        with succeeds("a lookup", where="features of different sizes"):
            pooled = twice(own).values().detach()
        assert_bits(pooled, twice(full).values().detach(), "features of different sizes")


@requirement(
    "PIPE-227",
    "Collections that torch.fx has traced or TorchScript compiled MUST give what they give untouched, within twice the "
    "error of the naive sum, and on meta the shapes alone.",
)
@pytest.mark.filterwarnings("ignore")  # TorchScript warns of its own age, and of torch.fx.
@pytest.mark.parametrize("kind", ["fx", "script", "fx, then script"])
def test_traced(pipeline: Any, kind: str, tolerance_factor: float) -> None:
    configs = [pipeline.EmbeddingBagConfig(6, 4, f"t{i}", feature_names=[f"f{i}", "f2"]) for i in range(2)]
    weights = [values_of((6, 4), i) for i in range(2)]
    batch = random_jagged(["f1", "f2", "f0"], [6, 6, 6], 5, 3)
    kjt, naive = batch.kjt(pipeline), Naive(configs, weights, "sgd").pooled(batch)
    plain = collection_of(pipeline, configs, weights)
    processed = pipeline.FeatureProcessedEmbeddingBagCollection(
        collection_of(pipeline, configs, weights, is_weighted=True),
        pipeline.PositionWeightedModuleCollection({"f0": 4, "f1": 4, "f2": 4}),
    )
    rows = rows_of(pipeline, [pipeline.EmbeddingConfig(6, 4, "t", feature_names=["f1"])], weights[:1])
    wide = [value.double() for value in weights]
    exact = torch.cat(
        [
            torch.stack([wide[t][part.long()].sum(0) for part in kjt[name].to_dense()])
            for t in range(2)
            for name in (f"f{t}", "f2")
        ],
        dim=1,
    )
    modules = {"plain": plain, "processed": processed, "rows": rows}
    for name, module in modules.items():
        if kind == "script" and name == "processed":
            continue
        traced: Any = torch.fx.symbolic_trace(module) if "fx" in kind else module
        traced = torch.jit.script(traced) if "script" in kind else traced
        if name == "rows":
            assert_bits(traced(kjt)["f1"].values(), module(kjt)["f1"].values(), f"{kind} rows")
            continue
        found, expected = traced(kjt), module(kjt)
        assert_equal((found.keys(), found.length_per_key()), (expected.keys(), expected.length_per_key()), where=kind)
        assert_bits(expected.values().detach(), naive, f"{name} untouched")
        assert_within_derived(found.values().detach(), naive, exact, factor=tolerance_factor, where=f"{kind} {name}")


@requirement(
    "PIPE-642",
    "A collection that torch.fx has traced or TorchScript compiled MUST give features that differ in size a row for "
    "every sample of the full batch, as it does untouched; a feature without inverse indices is refused by both.",
)
@pytest.mark.filterwarnings("ignore")  # TorchScript warns of its own age, and of torch.fx.
@pytest.mark.parametrize("kind", ["fx", "script"])
def test_traced_sizes(pipeline: Any, kind: str) -> None:
    configs = [pipeline.EmbeddingBagConfig(6, 4, f"t{i}", feature_names=[f"f{i}", "f2"]) for i in range(2)]
    plain = collection_of(pipeline, configs, [values_of((6, 4), i).round() for i in range(2)])
    made: Any = torch.fx.symbolic_trace if kind == "fx" else torch.jit.script
    traced, names = made(plain), ["f2", "f0", "f1"]
    rows = torch.tensor([[2, 0, 1, 2], [0, 0, 0, 0], [1, 0, 0, 1]])
    sizes: dict[str, Any] = {"stride_per_key_per_rank": [[1], [2], [3]]}
    lengths = torch.tensor([2, 1, 0, 0, 3, 1])
    for dtype in (torch.int64, torch.int32):
        batch = pipeline.KeyedJaggedTensor(
            ["f0", "f1", "f2"], torch.arange(7) % 6, None, lengths, inverse_indices=(names, rows.to(dtype)), **sizes
        )
        with succeeds("a lookup", where=f"{kind}, {dtype}"):
            found = traced(batch).values().detach()
        # Whole numbers, whose sums are one in every order.
        assert_bits(found, plain(batch).values().detach(), f"{kind}, {dtype}")
    # Where all features have the samples of the batch, none is spread, whatever the batch brings.
    batch = pipeline.KeyedJaggedTensor(
        ["f0", "f1", "f2"], torch.arange(7) % 6, None, lengths, inverse_indices=(names, rows[:, :2] * 0)
    )
    assert_bits(traced(batch).values().detach(), plain(batch).values().detach(), f"{kind}, alike")
    batch = pipeline.KeyedJaggedTensor(
        ["f0", "f1", "f2"], torch.arange(7) % 6, None, lengths, inverse_indices=(names[:2], rows[:2]), **sizes
    )
    for module in (plain, traced):
        with raises(Exception, mentions=("no inverse indices of this feature",), where=kind):
            module(batch)


@requirement(
    "PIPE-669",
    "A collection, of bags that are weighted by position, of features that differ in size or of rows, MUST be exported "
    "by torch.export, and the program give for bags of other lengths what the collection gives untouched.",
)
@pytest.mark.filterwarnings("ignore")  # Of what torch itself uses there.
@pytest.mark.parametrize("kind", ["processed", "sizes", "rows"])
def test_exported(pipeline: Any, kind: str) -> None:
    configs = [pipeline.EmbeddingBagConfig(6, 4, f"t{i}", feature_names=[f"f{i}", "f2"]) for i in range(2)]
    names, count = ["f2", "f1", "f0"], 9
    if kind == "processed":
        processors = pipeline.PositionWeightedModuleCollection(dict.fromkeys(names, 4))
        tables = collection_of(pipeline, configs, [values_of((6, 4), i).round() for i in range(2)], is_weighted=True)
        module = pipeline.FeatureProcessedEmbeddingBagCollection(tables, processors)
    elif kind == "sizes":
        module = collection_of(pipeline, configs, [values_of((6, 4), i).round() for i in range(2)])
    else:
        module = rows_of(pipeline, [pipeline.EmbeddingConfig(6, 4, "t", feature_names=names)], [values_of((6, 4), 1)])
    rows = torch.tensor([[2, 0, 1, 2], [0, 0, 0, 0], [1, 0, 0, 1]])
    sizes: dict[str, Any] = {"stride_per_key_per_rank": [[3], [1], [2]], "inverse_indices": (names, rows)}

    def batch_of(lengths: list[int]) -> Any:
        ids, more = torch.arange(count) % 6, sizes if kind == "sizes" else {}
        return pipeline.KeyedJaggedTensor(names, ids, None, torch.tensor(lengths), **more)

    def values_by(model: Any, batch: Any) -> list[torch.Tensor]:
        found = model(batch)
        return [found[name].values() for name in names] if kind == "rows" else [found.values()]

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, batch: Any) -> list[torch.Tensor]:
            return values_by(self.module, batch)

    with succeeds("an export", where=kind):
        program: Any = torch.export.export(Model(), (batch_of([1, 2, 0, 3, 1, 2]),)).module()
    for lengths in ([1, 2, 0, 3, 1, 2], [4, 0, 0, 0, 1, 4]):
        batch = batch_of(lengths)
        with succeeds("the program", where=f"{kind}, lengths {lengths}"):
            found = program(batch)
        # Whole numbers, whose sums are one in every order.
        for value, expected in zip(found, values_by(module, batch), strict=True):
            assert_bits(value.detach(), expected.detach(), f"{kind}, lengths {lengths}")


@requirement(
    "PIPE-538",
    "A collection of 16-bit tables that was traced or scripted MUST give float32 as the untouched one does, rows by "
    "their bits.",
)
@pytest.mark.filterwarnings("ignore")  # TorchScript warns of its own age, and of torch.fx.
@pytest.mark.parametrize("kind", ["fx", "script"])
@pytest.mark.parametrize("dtype", ["FP16", "BF16"])
def test_traced_halves(pipeline: Any, kind: str, dtype: str) -> None:
    given: dict[str, Any] = {"feature_names": ["f"], "data_type": getattr(pipeline.DataType, dtype)}
    kjt = random_jagged(["f"], [6], 5, 3).kjt(pipeline)
    rows = pipeline.EmbeddingCollection([pipeline.EmbeddingConfig(6, 4, "t", **given)])
    bags = pipeline.EmbeddingBagCollection([pipeline.EmbeddingBagConfig(6, 4, "t", **given)])
    made: Any = torch.fx.symbolic_trace if kind == "fx" else torch.jit.script
    assert_bits(made(rows)(kjt)["f"].values(), rows(kjt)["f"].values(), "rows")
    for module in (bags, made(bags)):
        assert_equal(module(kjt).values().dtype, torch.float32, where="dtype of what is pooled")


@requirement(
    "PIPE-228",
    "A collection on meta MUST give a batch on meta the shapes of its result, and a module its device; one of both on "
    "meta alone MUST be refused by name.",
)
def test_meta(pipeline: Any) -> None:
    configs = [pipeline.EmbeddingBagConfig(6, 4, f"t{i}", feature_names=[f"f{i}"]) for i in range(2)]
    kjt = random_jagged(["f0", "f1"], [6, 6], 3, 1).kjt(pipeline)
    there, here = pipeline.EmbeddingBagCollection(configs, device="meta"), pipeline.EmbeddingBagCollection(configs)
    found = there(kjt.to(torch.device("meta")))
    assert_equal((tuple(found.values().shape), found.device().type), ((3, 8), "meta"), where="pooled on meta")
    assert_equal(
        (there.device.type, here.device.type, here.to("meta").device.type), ("meta", "cpu", "meta"), where="device"
    )
    with raises(ConfigError, mentions=("meta",)):
        there(kjt)


def _foreign(kjt: Any) -> Any:
    """What another library's batch looks like: the same names, another class."""
    names = ["keys", "values", "weights_or_none", "lengths_or_none", "offsets_or_none", "length_per_key_or_none"]
    names += ["inverse_indices_or_none", "variable_stride_per_key"]
    return SimpleNamespace(**{name: getattr(kjt, name) for name in names})


@requirement(
    "PIPE-229",
    "A batch and a table's configuration of another library with torchrec's names MUST be taken by every collection as "
    "ours, sharing its tensors; what has not these names MUST be refused by an error that says what to make.",
)
def test_foreign(pipeline: Any) -> None:
    own = [pipeline.EmbeddingBagConfig(6, 4, f"t{i}", feature_names=[f"f{i}"]) for i in range(2)]
    uniform = torch.nn.init.uniform_
    others = []
    for config in own:
        parts = {**vars(config), "data_type": SimpleNamespace(value="FP16"), "pooling": SimpleNamespace(value="MEAN")}
        others.append(SimpleNamespace(**{**parts, "init_fn": partial(uniform, a=2.0, b=2.5)}))
    collection = pipeline.EmbeddingBagCollection(others)
    assert_equal([each.is_mean for each in collection.embedding_bag_configs()], [True, True], where="pooling")
    weight = collection.embedding_bags["t0"].weight
    assert_equal((weight.dtype, bool((weight >= 2).all())), (torch.float16, True), where="dtype and first weights")
    kjt = random_jagged(["f1", "f0"], [6, 6], 3, 1, weighted=True).kjt(pipeline)
    plan = {"t0": pipeline.table_wise(0), "t1": pipeline.row_wise()}
    rows = pipeline.EmbeddingCollection([pipeline.EmbeddingConfig(6, 4, "t", feature_names=["f0"])])
    for module in (collection, sharded_of(pipeline, collection, plan, "sgd", device="cpu"), rows):
        found, expected = module(_foreign(kjt)), module(kjt)
        if module is rows:
            found, expected = found["f0"], expected["f0"]
        assert_bits(found.values().detach(), expected.values().detach(), type(module).__name__)
        for junk in (None, {"f0": torch.zeros(1)}, torch.zeros(3)):
            with raises(UnsupportedError, mentions=("from_lengths_sync",)):
                module(junk)
    with raises(ConfigError, mentions=("EmbeddingBagConfig",)):
        pipeline.EmbeddingBagCollection([{"name": "t"}])


@requirement(
    "PIPE-230",
    "A mapping from features to torch's jagged nested tensors, as a TensorDict holds them, MUST be looked up as the "
    "batch of these features; one with values between its bags MUST be refused.",
)
def test_nested(pipeline: Any) -> None:
    kjt = random_jagged(["f1", "f0"], [6, 6], 3, 1).kjt(pipeline)
    configs = [pipeline.EmbeddingBagConfig(6, 4, f"t{i}", feature_names=[f"f{i}"]) for i in range(2)]
    collection = pipeline.EmbeddingBagCollection(configs)
    jagged = torch.nested.nested_tensor_from_jagged
    nested = {name: jagged(part.values(), offsets=part.offsets()) for name, part in kjt.to_dict().items()}
    assert_bits(collection(nested).values().detach(), collection(kjt).values().detach(), "nested tensors")
    holes = jagged(torch.arange(5), offsets=torch.tensor([0, 2, 4, 5]), lengths=torch.tensor([2, 1, 1]))
    with raises(ShapeError, mentions=("between", "f0")):
        collection({**nested, "f0": holes})


@requirement(
    "PIPE-403",
    "Jagged nested tensors of different numbers of bags MUST stay the bags of their own features: rows of each are "
    "looked up, and pooling, which has no batch for them, MUST refuse them in words.",
)
def test_nested_of_different_sizes(pipeline: Any) -> None:
    # In all they have as many bags as two features of three samples.
    sizes = {"f0": [1, 2], "f1": [1, 0, 1, 2]}
    nested: dict[str, torch.Tensor] = {}
    for name, counts in sizes.items():
        ends = torch.tensor([0, *counts]).cumsum(0)
        nested[name] = torch.nested.nested_tensor_from_jagged(torch.arange(sum(counts)), offsets=ends)
    configs = [pipeline.EmbeddingConfig(6, 4, f"t{i}", feature_names=[f"f{i}"]) for i in range(2)]
    rows = pipeline.EmbeddingCollection(configs)
    for name, found in rows(nested).items():
        weight = rows.embeddings[f"t{name[1]}"].weight
        assert_equal(found.lengths().tolist(), sizes[name], where=f"lengths of {name}")
        assert_bits(found.values().detach(), weight.detach()[: sum(sizes[name])], f"rows of {name}")
    pooled = [pipeline.EmbeddingBagConfig(6, 4, f"t{i}", feature_names=[f"f{i}"]) for i in range(2)]
    with raises(ConfigError, mentions=("inverse_indices",)):
        pipeline.EmbeddingBagCollection(pooled)(nested)


@requirement(
    "PIPE-529",
    "The names and widths of a result MUST be its own: who changes them changes no other result, of a collection and "
    "of one that is sharded. A batch without features MUST split into no parts.",
)
def test_names_of_results(pipeline: Any) -> None:
    configs = [pipeline.EmbeddingBagConfig(6, 4, f"t{i}", feature_names=[f"f{i}"]) for i in range(2)]
    whole = pipeline.EmbeddingBagCollection(configs)
    sharded = sharded_of(pipeline, whole, dict.fromkeys(("t0", "t1"), pipeline.table_wise(0)), "sgd", device="cpu")
    batch = Jagged(["f0", "f1"], [[[1]], [[2, 3]]]).kjt(pipeline)
    for kind, module in (("whole", whole), ("sharded", sharded)):
        for _ in range(2):
            with succeeds("a lookup", where=kind):
                found = module(batch)
            assert_equal((found.keys(), found.length_per_key()), (["f0", "f1"], [4, 4]), where=f"{kind}: the result")
            found.keys().append("other")
            found.length_per_key().append(3)
    with succeeds("a split", where="into no parts"):
        assert_equal(pipeline.KeyedJaggedTensor.empty().split([]), [], where="parts of no features")


def _ways_to_look_up(module: Any) -> dict[str, Any]:
    """The module itself, and traced, scripted, and traced to be scripted."""
    traced = torch.fx.symbolic_trace(module)
    return {
        "untouched": module,
        "fx": traced,
        "script": torch.jit.script(module),
        "fx, then script": torch.jit.script(traced),
    }


def _looked_up_by_name(found: Any) -> dict[str, torch.Tensor]:
    """Pooled columns or rows, by name."""
    if isinstance(found, dict):
        return {name: bags.values().detach() for name, bags in found.items()}
    return {name: found[name].detach() for name in found.keys()}  # noqa: SIM118


@requirement(
    "PIPE-620",
    "A table of another library's configuration MUST have the features that it has by our own, its own name where "
    "none are named, in collections of pooled and of single rows that are untouched, traced, scripted or cut, and keep "
    "them where the configuration is changed later.",
)
@pytest.mark.filterwarnings("ignore")  # TorchScript warns of its own age, and of torch.fx.
def test_features_of_others_tables(pipeline: Any) -> None:
    kjt = random_jagged(["c", "t1", "b", "t0", "a"], [6] * 5, 3, 1).kjt(pipeline)
    weights = [values_of((6, 4), number) for number in range(3)]
    kinds = {"bags": ("EmbeddingBag", collection_of), "rows": ("Embedding", rows_of)}
    for features in ([[], ["a", "b"], ["c"]], [["a"], [], ["b", "c"]], [[], [], ["c"]], [["a"], ["b", "t0"], ["c"]]):
        for kind, (prefix, make) in kinds.items():
            config = getattr(pipeline, f"{prefix}Config")
            own = [config(6, 4, f"t{i}", feature_names=each or [f"t{i}"]) for i, each in enumerate(features)]
            sizes = {"num_embeddings": 6, "embedding_dim": 4}
            others = [SimpleNamespace(**sizes, name=f"t{i}", feature_names=[*each]) for i, each in enumerate(features)]
            modules = [make(pipeline, each, weights) for each in (own, others)]
            for other in others:
                other.feature_names.append("changed")
            with succeeds("modules", where=f"{kind} of {features}"):
                ways = [_ways_to_look_up(module) for module in modules]
            if kind == "bags":
                plan = {"t0": pipeline.table_wise(0), "t1": pipeline.row_wise(), "t2": pipeline.data_parallel()}
                for each, module in zip(ways, modules, strict=True):
                    each["cut"] = sharded_of(pipeline, module, plan, "sgd", device="cpu")
            for way, module in ways[0].items():
                where = f"{kind} of {features}, {way}"
                with succeeds("a lookup", where=where):
                    found = _looked_up_by_name(ways[1][way](kjt))
                expected = _looked_up_by_name(module(kjt))
                assert_equal(list(found), list(expected), where=where)
                for name, rows in expected.items():
                    assert_bits(found[name], rows, f"{where}: {name}")
