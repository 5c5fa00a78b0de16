"""F. torchrec's batch types: every name and position, dtypes, bags of one feature as dense tensors, text, copies."""

from __future__ import annotations

import inspect
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.harness import assert_equal, examples, raises, requirement, succeeds
from conformance.pipeline.batches import as_lists, random_jagged, values_of
from conformance.pipeline.model import assert_bits
from conformance.pipeline.type_names import SIGNATURES
from twinproof.errors import ConfigError, LengthTypeError, ShapeError
from twinproof.pipeline.stages import move_batch


@requirement(
    "PIPE-200",
    "The batch types and collections MUST have every public name of torchrec 1.8's, with its arguments in their "
    "positions.",
)
@pytest.mark.parametrize("name", sorted(SIGNATURES))
def test_names(pipeline: Any, name: str) -> None:
    cls, found = getattr(pipeline, name), dict[str, list[str] | None]()
    for method in SIGNATURES[name]:
        kind = inspect.getattr_static(cls, method, None)
        function = getattr(kind, "__func__", kind)
        if isinstance(function, property):
            found[method] = None
        elif function is not None:
            parameters = inspect.signature(function).parameters.values()
            positional = [each.name for each in parameters if each.kind is not each.KEYWORD_ONLY]
            found[method] = [each for each in positional if each != "self"]
    assert_equal(found, SIGNATURES[name], where=name)


@requirement(
    "PIPE-201",
    "Lengths and offsets MUST keep their dtype in permute, split, concat, by key and in offsets(); offsets that the "
    "dtype cannot count MUST be refused.",
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("by_offsets", [False, True])
def test_dtypes(pipeline: Any, dtype: torch.dtype, by_offsets: bool) -> None:
    kjt = random_jagged(["a", "b", "c"], [9, 9, 9], 3, 5).kjt(pipeline, dtype=dtype, by_offsets=by_offsets)
    parts = {"batch": kjt, "permute": kjt.permute([2, 0]), "none": kjt.permute([]), "key": kjt["b"]}
    parts |= {"split": kjt.split([1, 2])[1], "to_dict": kjt.to_dict()["c"], "to": kjt.to(torch.device("cpu"))}
    parts["concat"] = pipeline.KeyedJaggedTensor.concat(kjt.split([2, 1]))
    for name, part in parts.items():
        assert_equal((part.lengths().dtype, part.offsets().dtype), (dtype, dtype), where=name)
    long = pipeline.KeyedJaggedTensor(["a"], torch.zeros(200), lengths=torch.tensor([100, 100], dtype=torch.uint8))
    assert_equal(long.offsets().tolist(), [0, 100, 200], where="offsets within uint8")
    many = pipeline.KeyedJaggedTensor(["a"], torch.zeros(300), lengths=torch.tensor([200, 100], dtype=torch.uint8))
    with raises(ShapeError, mentions=("uint8", "300", "255")):
        many.offsets()


_NARROW = (torch.int8, torch.uint8, torch.int16, torch.int32)


def _by_lengths(module: Any, pipeline: Any, dtype: torch.dtype, where: str, **sizes: Any) -> None:
    """A lookup of batches whose lengths are int64, and of this dtype, which counts each bag and not all values."""
    counts, ids, found, refused = torch.tensor([3, 2] * 80), torch.arange(400) % 6, list[torch.Tensor](), ""
    for kind in (torch.int64, dtype):
        try:
            result = module(pipeline.KeyedJaggedTensor(["f0", "f1"], ids, lengths=counts.to(kind), **sizes))
        except ShapeError as error:
            refused = str(error)
            break
        parts = [part.values() for part in result.values()] if isinstance(result, dict) else [result.values()]
        found.append(torch.cat(parts).detach())
    assert_equal(refused, "", where=f"what was refused, {where} {sorted(sizes)}")
    assert_bits(found[1], found[0], f"{where} {sorted(sizes)}")


def _different_sizes() -> dict[str, Any]:
    rows = torch.stack([torch.arange(80)] * 2)
    return {"stride_per_key_per_rank": [[80], [80]], "inverse_indices": (["f0", "f1"], rows)}


@requirement(
    "PIPE-402",
    "A lookup MUST take lengths of any integer dtype, however many values they count in all: pooled, by rows, sharded, "
    "and of features that differ in size.",
)
@pytest.mark.parametrize("dtype", _NARROW)
def test_narrow_lengths(pipeline: Any, dtype: torch.dtype) -> None:
    features = {"feature_names": ["f0", "f1"]}
    whole = pipeline.EmbeddingBagCollection([pipeline.EmbeddingBagConfig(6, 4, "t", **features)])
    sharded = pipeline.ShardedEmbeddingBagCollection(whole, {"t": pipeline.row_wise()})
    rows = pipeline.EmbeddingCollection([pipeline.EmbeddingConfig(6, 4, "t", **features)])
    for name, module in (("pooled", whole), ("sharded", sharded), ("rows", rows)):
        _by_lengths(module, pipeline, dtype, name)
    _by_lengths(whole, pipeline, dtype, "pooled", **_different_sizes())


@requirement(
    "PIPE-405",
    "Weights by position MUST take lengths of any integer dtype too, of one processor for all features or one for "
    "each.",
)
@pytest.mark.parametrize("dtype", _NARROW)
def test_narrow_lengths_by_position(pipeline: Any, dtype: torch.dtype) -> None:
    config = pipeline.EmbeddingBagConfig(6, 4, "t", feature_names=["f0", "f1"])
    weighted = pipeline.EmbeddingBagCollection([config], is_weighted=True)
    for processors in (
        pipeline.PositionWeightedModuleCollection({"f0": 3, "f1": 4}),
        {name: pipeline.PositionWeightedModule(4) for name in ("f0", "f1")},
    ):
        module = pipeline.FeatureProcessedEmbeddingBagCollection(weighted, processors)
        for sizes in ({}, _different_sizes()):
            _by_lengths(module, pipeline, dtype, type(processors).__name__, **sizes)


@requirement(
    "PIPE-203",
    "Values of any dtype and of more dimensions, and weights likewise, MUST be cut as they are; a lookup of what is "
    "no flat id, or of another number of weights, MUST be refused by name.",
)
def test_values_that_are_no_ids(pipeline: Any) -> None:
    values, weights = values_of((6, 3), 1), values_of((6, 2), 2)
    lengths = torch.tensor([1, 2, 0, 3])
    kjt = pipeline.KeyedJaggedTensor(["a", "b"], values, weights, lengths=lengths)
    turned = kjt.permute([1, 0])
    for name, part in (("permute", turned["a"]), ("split", kjt.split([1, 1])[0]), ("key", kjt["a"])):
        assert_bits(part.values(), values[:3], f"{name} values")
        assert_bits(part.weights(), weights[:3], f"{name} weights")
    assert_bits(turned.values(), torch.cat([values[3:], values[:3]]), "permuted values")
    config = pipeline.EmbeddingBagConfig(6, 4, "t", feature_names=["a"])
    collection = pipeline.EmbeddingBagCollection([config])
    plan = {"t": pipeline.table_wise(0)}
    for module in (collection, pipeline.ShardedEmbeddingBagCollection(collection, plan)):
        for ids in (values, torch.ones(6), torch.ones(6, 1, dtype=torch.int64)):
            with raises(ShapeError, mentions=("ids", "int64")):
                module(pipeline.KeyedJaggedTensor(["a", "b"], ids, lengths=lengths))
    weighted = pipeline.EmbeddingBagCollection([config], is_weighted=True)
    with raises(ShapeError, mentions=("weight", "6")):
        weighted(pipeline.KeyedJaggedTensor(["a", "b"], torch.ones(6).long(), torch.ones(7), lengths=lengths))
    with raises(ShapeError, mentions=("ids", "int64")):
        pipeline.TableBatchedEmbeddingBags([config])(torch.ones(2), torch.tensor([0, 2]))


@requirement(
    "PIPE-204",
    "Lengths or offsets that are no integers MUST be refused by name where bags are made, as an AssertionError too.",
)
def test_float_lengths(pipeline: Any) -> None:
    for lengths in ({"lengths": torch.tensor([1.0, 2.0])}, {"offsets": torch.tensor([0.0, 1.0, 3.0])}):
        for error in (LengthTypeError, AssertionError):
            with raises(error, mentions=("integers", "float32")):
                pipeline.JaggedTensor(torch.zeros(3), **lengths)
            with raises(error, mentions=("integers", "float32")):
                pipeline.KeyedJaggedTensor(["a"], torch.zeros(3), **lengths)
    with raises(ConfigError, mentions=("lengths", "offsets")):
        pipeline.JaggedTensor(torch.zeros(3))


_NO_INTEGERS = (torch.bool, torch.uint16, torch.float16, torch.bfloat16, torch.float64, torch.complex64)


@requirement(
    "PIPE-547",
    "Lengths and offsets MUST each be refused by name where they are no integers, alone or beside the other, whichever "
    "is wrong, by every way to make bags; weights that are no real numbers MUST be where they are looked up.",
)
@pytest.mark.parametrize("dtype", _NO_INTEGERS, ids=str)
def test_wrong_dtype_beside_a_right_one(pipeline: Any, dtype: torch.dtype) -> None:
    ids, keyed = torch.arange(3), pipeline.KeyedJaggedTensor
    right = {"lengths": torch.tensor([1, 2]), "offsets": torch.tensor([0, 1, 3])}
    ways: dict[str, Any] = {
        "JaggedTensor": lambda **parts: pipeline.JaggedTensor(ids, **parts),
        "JaggedTensor with weights": lambda **parts: pipeline.JaggedTensor(ids, torch.ones(3), **parts),
        "KeyedJaggedTensor": lambda **parts: keyed(["a"], ids, **parts),
        "KeyedJaggedTensor of sizes": lambda **parts: keyed(["a"], ids, stride_per_key_per_rank=[[2]], **parts),
    }
    alone: dict[str, Any] = {
        "from_dense_lengths": lambda lengths: pipeline.JaggedTensor.from_dense_lengths(torch.ones(2, 2), lengths),
        "from_lengths_sync": lambda lengths: keyed.from_lengths_sync(["a"], ids, lengths),
        "from_offsets_sync": lambda offsets: keyed.from_offsets_sync(["a"], ids, offsets),
        "dist_init": lambda lengths: keyed.dist_init(["a"], [lengths, ids], False, 1, None, [2]),
    }
    for wrong in right:
        given = {**right, wrong: right[wrong].to(dtype)}
        names = (f"{wrong} must be integers", str(dtype))
        for way, make in ways.items():
            with raises(LengthTypeError, mentions=names, where=f"{way} of {wrong}"):
                make(**{wrong: given[wrong]})
            with raises(LengthTypeError, mentions=names, where=f"{way} of {wrong} beside right ones"):
                make(**given)
            with succeeds("bags", where=f"{way} of both"):
                make(**right)
        for way, make in alone.items():
            if wrong in inspect.signature(make).parameters:
                with raises(LengthTypeError, mentions=names, where=f"{way} of {wrong}"):
                    make(given[wrong])
    config = pipeline.EmbeddingBagConfig(6, 4, "t", feature_names=["a"])
    weighted = pipeline.EmbeddingBagCollection([config], is_weighted=True)
    sharded = pipeline.ShardedEmbeddingBagCollection(weighted, {"t": pipeline.table_wise(0)})
    batch = keyed(["a"], ids, torch.ones(3).to(dtype), right["lengths"])
    for name, module in (("whole", weighted), ("sharded", sharded)):
        if dtype.is_complex:
            with raises(ShapeError, mentions=("weights are real", str(dtype)), where=name):
                module(batch)
        else:
            with succeeds("a lookup", where=f"{name}, weights of {dtype}"):
                module(batch)


@requirement(
    "PIPE-205",
    "A repeated key MUST be taken, and mean the last of its parts, by name and in a lookup; permute MUST repeat "
    "features as it is asked to.",
)
def test_repeated_keys(pipeline: Any) -> None:
    kjt = pipeline.KeyedJaggedTensor(["a", "b", "a"], torch.tensor([1, 2, 3, 4]), lengths=torch.tensor([1, 2, 1]))
    assert_equal(kjt["a"].values().tolist(), [4], where="by name")
    assert_equal(kjt.to_dict()["a"].values().tolist(), [4], where="to_dict")
    again = kjt.permute([1, 1, 0])
    assert_equal((again.keys(), again.values().tolist()), (["b", "b", "a"], [2, 3, 2, 3, 1]), where="permute")
    assert_equal(again.lengths().tolist(), [2, 2, 1], where="permuted lengths")
    configs = [pipeline.EmbeddingBagConfig(6, 4, f"t{i}", feature_names=["a"]) for i in range(2)]
    collection = pipeline.EmbeddingBagCollection(configs)
    twice = kjt.permute([0, 2])
    expected = [collection.embedding_bags[f"t{i}"].weight[4:5] for i in range(2)]
    assert_bits(collection(twice).values().detach(), torch.cat(expected, dim=1).detach(), "lookup")
    assert_equal(twice.index_per_key(), {"a": 1}, where="index_per_key")


@requirement(
    "PIPE-209",
    "Bags of one feature MUST go to lists, and to padded dense tensors of any width with any filling, and come from "
    "both, values and weights alike.",
)
@examples(30)
@given(seed=st.integers(0, 10**6), width=st.integers(0, 5), columns=st.integers(0, 2))
def test_dense(pipeline: Any, seed: int, width: int, columns: int) -> None:
    shape = (2,) * columns
    sizes = torch.randint(0, 4, (5,), generator=torch.Generator().manual_seed(seed)).tolist()
    values = [values_of((size, *shape), seed + i) for i, size in enumerate(sizes)]
    weights = [values_of((size, *shape), seed + 9 + i) for i, size in enumerate(sizes)]
    bags = pipeline.JaggedTensor.from_dense(values, weights)
    assert_equal((bags.lengths().tolist(), bags.lengths().dtype), (sizes, torch.int32), where="lengths")
    for found, expected in ((bags.to_dense(), values), (bags.to_dense_weights(), weights)):
        for one, other in zip(found, expected, strict=True):
            assert_bits(one, other, "to_dense")
    for desired in (None, width):
        columns_of = max(sizes) if desired is None else desired
        pairs = (
            (bags.to_padded_dense(desired, -1.5), values),
            (bags.to_padded_dense_weights(desired, -1.5), weights),
        )
        for dense, parts in pairs:
            full = torch.full((5, columns_of, *shape), -1.5)
            for row, part in enumerate(parts):
                kept = part[:columns_of]
                full[row, : len(kept)] = kept
            assert_bits(dense, full, f"to_padded_dense({desired})")
    if columns == 0:
        wide = bags.to_padded_dense(4)
        back = pipeline.JaggedTensor.from_dense_lengths(wide, bags.lengths(), bags.to_padded_dense_weights(4))
        assert_bits(back.values(), bags.values(), "from_dense_lengths")
        assert_bits(back.weights(), bags.weights(), "weights from_dense_lengths")
    plain = pipeline.JaggedTensor(bags.values(), offsets=bags.offsets())
    assert_equal((plain.to_dense_weights(), plain.to_padded_dense_weights()), (None, None), where="no weights")


@requirement("PIPE-208", "str() of the batch types MUST be torchrec's text.")
def test_text(pipeline: Any) -> None:
    values, lengths = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2, 0, 1, 0])
    bags = pipeline.JaggedTensor(values, lengths=lengths)
    assert_equal(str(bags), "JaggedTensor({\n    [[1.0, 2.0], [], [3.0], []]\n})\n", where="JaggedTensor")
    bags = pipeline.JaggedTensor(values[:, None], values, lengths=lengths)
    text = (
        'JaggedTensor({\n    "values": [[[1.0], [2.0]], [], [[3.0]], []],\n    "weights": [[1.0, 2.0], [], [3.0], []]'
    )
    assert_equal(str(bags), text + "\n})\n", where="weighted JaggedTensor")
    kjt = pipeline.KeyedJaggedTensor(["a", "b"], values, lengths=lengths)
    text = 'KeyedJaggedTensor({\n    "a": [[1.0, 2.0], []],\n    "b": [[3.0], []]\n})\n'
    assert_equal(str(kjt), text, where="KeyedJaggedTensor")
    kjt = pipeline.KeyedJaggedTensor(["a"], torch.tensor([7]), torch.ones(1), torch.tensor([1]))
    text = 'KeyedJaggedTensor({\n    "a": {\n        "values": [[7]],\n        "weights": [[1.0]]\n    }\n})\n'
    assert_equal(str(kjt), text, where="weighted KeyedJaggedTensor")
    assert_equal(str(pipeline.KeyedJaggedTensor([], values)), "KeyedJaggedTensor()\n", where="no keys")
    pooled = pipeline.KeyedTensor(["a", "b"], [1, 2], torch.tensor([[1.0, 2.0, 3.0]]))
    assert_equal(str(pooled), 'KeyedTensor({\n    "a": [[1.0]],\n    "b": [[2.0, 3.0]]\n})\n', where="KeyedTensor")
    assert_equal(str(pipeline.KeyedTensor([], [], torch.zeros(0))), "KeyedTensor()\n", where="no columns")


@requirement(
    "PIPE-210",
    "copy_ MUST fill every part that the target has, offsets and lengths alike, from a batch of the same features and "
    "sizes, and refuse any other before a byte is written; empty_like MUST have the sizes of its model.",
)
@pytest.mark.parametrize("by_offsets", [False, True])
def test_copies(pipeline: Any, by_offsets: bool) -> None:
    bags = pipeline.JaggedTensor(torch.zeros(3), lengths=torch.tensor([1, 2]))
    bags.offsets()
    bags.copy_(pipeline.JaggedTensor(torch.tensor([1.0, 2.0, 3.0]), lengths=torch.tensor([3, 0])))
    assert_equal([part.tolist() for part in bags.to_dense()], [[1.0, 2.0, 3.0], []], where="JaggedTensor.copy_")
    make = pipeline.KeyedJaggedTensor
    source = random_jagged(["a", "b"], [9, 9], 3, 1, weighted=True).kjt(pipeline, by_offsets=by_offsets)
    count = source.values().numel()
    target = make(["a", "b"], torch.full((count,), -1), torch.zeros(count), torch.tensor([count, 0, 0, 0, 0, 0]))
    target.offsets()
    target.sync()
    assert_equal(target.copy_(source) is target, True, where="copy_ returns self")
    assert_equal(as_lists(target), as_lists(source), where="copy_")
    assert_bits(target.offsets(), source.offsets(), "offsets of the copy")
    shorter = random_jagged(["a", "b"], [9, 9], 2, 1).kjt(pipeline)
    for other, error in ((shorter, ShapeError), (source.permute([1, 0]), ConfigError)):
        kept = target.values().clone()
        with raises(error):
            target.copy_(other)
        assert_bits(target.values(), kept, "target of a refused copy")
    room = make.empty_like(source, torch.device("cpu"))
    assert_equal(as_lists(room.copy_(source)), as_lists(source), where="copy_ into empty_like")
    none = make.empty_like(source)
    assert_equal((none.keys(), none.stride(), none.values().numel()), ([], source.stride(), 0), where="empty_like")
    assert_equal(source.clear_storage() > 0 and source.values().untyped_storage().nbytes(), 0, where="clear_storage")


@requirement(
    "PIPE-412",
    "to_dict() MUST be of the parts that the batch has now, whatever dictionary it was made with: after copy_, in "
    "empty_like's memory, and where a pipeline moved it.",
)
def test_dictionary_of_before(pipeline: Any) -> None:
    def made(first: int, lengths: list[int], known: Any = None) -> Any:
        values, scales = torch.arange(first, first + 3), torch.zeros(3)
        return pipeline.KeyedJaggedTensor(["a", "b"], values, scales, torch.tensor(lengths), jt_dict=known)

    def parts(batch: Any) -> list[Any]:
        return [(each.values().tolist(), each.weights().tolist()) for each in batch.to_dict().values()]

    source, known = made(10, [2, 1]), made(0, [1, 2]).to_dict()
    expected = [([10, 11], [0.0, 0.0]), ([12], [0.0])]
    target = made(0, [1, 2], known)
    assert_equal(parts(target.copy_(source)), expected, where="copy_")
    room = pipeline.KeyedJaggedTensor.empty_like(made(0, [1, 2], known), torch.device("cpu"))
    assert_equal(parts(room.copy_(source)), expected, where="copy_ into empty_like")
    moved = move_batch(made(0, [1, 2], known), torch.clone, torch.device("cpu"))
    known["a"].values().fill_(7)
    assert_equal(parts(moved), [([0], [0.0]), ([1, 2], [0.0, 0.0])], where="a batch that a pipeline moved")


@requirement(
    "PIPE-416",
    "After copy_ parts that disagree MUST be refused as in a batch that is made of them, also where those of before "
    "were looked at.",
)
def test_copied_parts_are_checked(pipeline: Any) -> None:
    def made(lengths: list[int]) -> Any:
        return pipeline.KeyedJaggedTensor(["a", "b"], torch.arange(3), lengths=torch.tensor(lengths))

    target = made([1, 2]).sync()
    with raises(ShapeError, mentions=("cut the values",)):
        target.copy_(made([4, -1]))["a"]


@requirement(
    "PIPE-397",
    "After copy_ a batch whose features differ in size MUST answer every question about sizes as its source does, "
    "whatever it answered before; one of other inverse indices, or of none, MUST be refused before a byte is written.",
)
def test_copied_sizes(pipeline: Any) -> None:
    def made(ranks: list[list[int]], first: int, rows: torch.Tensor | None) -> Any:
        lengths, values = torch.ones(6, dtype=torch.int64), torch.arange(first, first + 6)
        inverse = None if rows is None else (["a", "b"], rows)
        return pipeline.KeyedJaggedTensor(
            ["a", "b"], values, lengths=lengths, stride_per_key_per_rank=ranks, inverse_indices=inverse
        )

    def sizes(batch: Any) -> list[Any]:
        return [
            batch.stride(), batch.stride_per_key(), batch.stride_per_key_per_rank(), batch.length_per_key(),
            batch.offset_per_key(), batch.lengths_offset_per_key(), batch.variable_stride_per_key(), as_lists(batch),
        ]  # fmt: skip

    target, source = made([[3], [3]], 0, None), made([[1], [5]], 10, None)
    before, expected = sizes(target), sizes(made([[1], [5]], 10, None))
    assert_equal(sizes(target.copy_(source)), expected, where=f"sizes of a copy that was {before}")
    rows = torch.zeros(2, 5, dtype=torch.int64)
    with_rows, short_rows = made([[1], [5]], 20, rows), made([[1], [5]], 30, rows[:, :4])
    wrong = ((source, with_rows, ConfigError), (with_rows, source, ConfigError), (with_rows, short_rows, ShapeError))
    for mine, other, error in wrong:
        kept = mine.values().clone()
        with raises(error, mentions=("inverse",)):
            mine.copy_(other)
        assert_bits(mine.values(), kept, "values of a target that refused other inverse indices")


@requirement(
    "PIPE-212",
    "Pooled columns MUST be put together along cat_dim, given by name, regrouped under names along their own "
    "dimension, moved and counted in bytes; a repeated key means its last columns.",
)
def test_pooled_columns(pipeline: Any) -> None:
    parts = [values_of((3, width), width) for width in (2, 1, 4)]
    left = pipeline.KeyedTensor.from_tensor_list(["a", "b"], parts[:2])
    right = pipeline.KeyedTensor.from_tensor_list(["c", "b"], [parts[2], parts[1] + 1])
    found = pipeline.KeyedTensor.regroup_as_dict([left, right], [["c", "a"], ["b"]], ["x", "y"])
    assert_equal(sorted(found), ["x", "y"], where="names of groups")
    assert_bits(found["x"], torch.cat([parts[2], parts[0]], dim=1), "x")
    assert_bits(found["y"], parts[1] + 1, "y")
    for regroup in (pipeline.regroup_kts, pipeline.permute_multi_embedding):
        assert_bits(regroup([left, right], [["b", "c"]])[0], torch.cat([parts[1] + 1, parts[2]], 1), "by other names")
    with raises(ShapeError):
        pipeline.KeyedTensor.regroup_as_dict([left], [["a"]], ["x", "y"])
    rows = pipeline.KeyedTensor.from_tensor_list(["a", "b"], [parts[0], parts[0] + 1], key_dim=0, cat_dim=0)
    assert_bits(rows["b"], parts[0] + 1, "along rows")
    for regroup in (pipeline.regroup_kts, pipeline.permute_multi_embedding, pipeline.KeyedTensor.regroup):
        (again,) = regroup([rows], [["b", "a"]])
        assert_bits(again, torch.cat([parts[0] + 1, parts[0]], dim=0), "regrouped along rows")
        cube = pipeline.KeyedTensor(["a", "b"], [2, 2], values_of((3, 4, 5), 7))
        (again,) = regroup([cube], [["b", "a"]])
        assert_bits(again, cube.values()[:, [2, 3, 0, 1]], "regrouped with a dimension behind")
    twice = pipeline.KeyedTensor(["a", "a"], [2, 1], torch.cat([parts[0], parts[1]], dim=1))
    assert_bits(twice["a"], parts[1], "a repeated key")
    columns = left.to_dict()
    assert_equal(list(columns), ["a", "b"], where="names of to_dict")
    for name, part in zip(columns, parts, strict=False):
        assert_bits(columns[name], part, f"to_dict of {name}")
    assert_equal((left.size_in_bytes(), left.to(torch.device("cpu")).device().type), (36, "cpu"), where="facts")


@requirement("PIPE-215", "Bags as a dictionary of features MUST make the batch again, and equal batches be told so.")
def test_dictionaries(pipeline: Any) -> None:
    kjt = random_jagged(["a", "b"], [9, 9], 3, 4, weighted=True).kjt(pipeline, dtype=torch.int32)
    parts = pipeline.ComputeKJTToJTDict()(kjt)
    back = pipeline.ComputeJTDictToKJT()(parts)
    assert_equal(as_lists(back), as_lists(kjt), where="from_jt_dict")
    assert_equal(pipeline.kjt_is_equal(back, kjt), True, where="equal")
    others = [
        kjt.permute([1, 0]),
        pipeline.KeyedJaggedTensor(["a", "b"], kjt.values() + 1, kjt.weights(), kjt.lengths()),
    ]
    others.append(pipeline.KeyedJaggedTensor(["a", "b"], kjt.values(), kjt.weights() + 1, kjt.lengths()))
    others.append(pipeline.KeyedJaggedTensor(["a", "b"], kjt.values(), None, kjt.lengths()))
    # The same bags in the same order, dealt to the features in another way.
    strides = [[kjt.stride() - 1], [kjt.stride() + 1]]
    parts_of = (kjt.keys(), kjt.values(), kjt.weights(), kjt.lengths())
    others.append(pipeline.KeyedJaggedTensor(*parts_of, stride_per_key_per_rank=strides))
    for number, other in enumerate([*others, "no batch"]):
        assert_equal(pipeline.kjt_is_equal(other, kjt), False, where=f"another batch {number}")
    assert_equal(pipeline.jt_is_equal(parts["a"], kjt["a"]), True, where="equal bags")
    assert_equal(pipeline.jt_is_equal(parts["a"], parts["b"]), False, where="other bags")
    lazy = kjt.to_dict(compute_offsets=False)["b"]
    assert_equal(lazy.offsets_or_none(), None, where="offsets are not computed")
    assert_bits(lazy.offsets(), parts["b"].offsets_or_none(), "offsets")
    bare = pipeline.JaggedTensor(parts["a"].values(), lengths=parts["a"].lengths())
    with raises(ConfigError, mentions=("weights",)):
        pipeline.KeyedJaggedTensor.from_jt_dict({"a": bare, "b": parts["b"]})


def _told_of(batch: Any) -> tuple[list[int], list[Any]]:
    """The tensors whose memory is kept for a stream when the batch is told of it, by their sizes; and the streams."""
    sizes, streams = list[int](), list[Any]()

    def noted(tensor: torch.Tensor, stream: Any) -> None:
        sizes.append(tensor.numel())
        streams.append(stream)

    with mock.patch.object(torch.Tensor, "record_stream", noted):
        batch.record_stream("a stream")
    return sorted(sizes), sorted(set(streams))


@requirement(
    "PIPE-441",
    "record_stream MUST keep the memory of every part that a batch has on a device, values, weights, lengths, offsets "
    "and inverse indices, and nothing of the host's.",
)
def test_record_stream(pipeline: Any) -> None:
    def made(device: str) -> dict[str, Any]:
        def sized(count: int) -> torch.Tensor:
            return torch.zeros(count, dtype=torch.int64, device=device)

        rows = (["a", "b"], sized(10).view(2, 5))
        sizes = {"stride_per_key_per_rank": [[2], [4]], "inverse_indices": rows}
        return {
            "JaggedTensor": pipeline.JaggedTensor(sized(8), sized(8), sized(6), sized(7)),
            "without weights": pipeline.JaggedTensor(sized(8), lengths=sized(6)),
            "KeyedJaggedTensor": pipeline.KeyedJaggedTensor(
                ["a", "b"], sized(8), sized(8), sized(6), sized(7), **sizes
            ),
            "of one size": pipeline.KeyedJaggedTensor(["a", "b"], sized(8), lengths=sized(6)),
            "KeyedTensor": pipeline.KeyedTensor(["a"], [3], sized(12).view(4, 3)),
        }

    expected = {
        "JaggedTensor": [6, 7, 8, 8],
        "without weights": [6, 8],
        "KeyedJaggedTensor": [6, 7, 8, 8, 10],
        "of one size": [6, 8],
        "KeyedTensor": [12],
    }
    for name, batch in made("meta").items():
        assert_equal(_told_of(batch), (expected[name], ["a stream"]), where=name)
    for name, batch in made("cpu").items():
        assert_equal(_told_of(batch), ([], []), where=f"{name} of the host")


@requirement(
    "PIPE-522",
    "Batches MUST be told equal by their numbers, whatever dtypes they have: ids and lengths to the last digit, also "
    "large ones, and weights where they are close; and MUST NOT be where one number is another.",
)
def test_equal_numbers(pipeline: Any) -> None:
    def bags(ids: list[int], weight: float = 0.5, dtype: Any = torch.int64, weights: Any = torch.float32) -> Any:
        lengths = torch.tensor([len(ids), 0], dtype=dtype)
        return torch.tensor(ids, dtype=dtype), torch.full((len(ids),), weight, dtype=weights), lengths

    one = [10**6, 10**9]
    cases: list[tuple[bool, Any]] = [
        (True, bags(one, dtype=torch.int32)),
        (True, bags(one, weights=torch.bfloat16)),
        (True, bags(one, weights=torch.float64)),
        (True, bags(one, 0.5 + 1e-7)),
        (False, bags([10**6 + 5, 10**9])),
        (False, bags([10**6, 10**9 + 1], dtype=torch.int32)),
        (False, bags(one, 0.75, weights=torch.float16)),
        (False, bags([*one, 1])),
    ]
    for expected, others in cases:
        for kind, same in (("KeyedJaggedTensor", pipeline.kjt_is_equal), ("JaggedTensor", pipeline.jt_is_equal)):
            keys = [["a"]] if kind == "KeyedJaggedTensor" else []
            mine, theirs = (getattr(pipeline, kind)(*keys, *parts) for parts in (bags(one), others))
            with succeeds("a comparison", where=f"{kind}, {others}"):
                found = same(mine, theirs)
            assert_equal(found, expected, where=f"{kind}, {others}")


@requirement(
    "PIPE-523",
    "Positions MUST be written over weights exactly, or the weights' dtype be refused by name before any is written: "
    "bfloat16 has all to 256, float16 to 2048. A processor that was refused MUST go on taking weights for weights.",
)
def test_positions_in_narrow_weights(pipeline: Any) -> None:
    for dtype, most in ((torch.bfloat16, 256), (torch.float16, 2048), (torch.uint8, 255), (torch.float32, 5000)):
        for count in (most + 1, most + 2):
            weights = torch.ones(count + 1).to(dtype)
            lengths = torch.tensor([count, 1])
            batch = pipeline.KeyedJaggedTensor(["a"], torch.zeros(count + 1, dtype=torch.int64), weights, lengths)
            processors = pipeline.PositionWeightedModuleCollection({"a": count})
            if count == most + 2 and dtype is not torch.float32:
                with raises(ConfigError, mentions=(str(dtype), str(most)), where=f"{dtype}, {count}"):
                    processors.pre_process_input(batch)
                assert_equal(bool((weights == 1).all()), True, where=f"{dtype}: weights that were refused")
                continue
            with succeeds("positions", where=f"{dtype}, {count}"):
                processors.pre_process_input(batch)
            expected = torch.cat([torch.arange(count), torch.zeros(1, dtype=torch.int64)])
            assert_bits(weights.to(torch.int64), expected, f"{dtype}, {count}")
    ids, lengths = torch.tensor([7, 8, 9, 7]), torch.tensor([3, 1])
    one: Any = (pipeline.PositionWeightedModule(4), lambda weights: pipeline.JaggedTensor(ids, weights, lengths))
    each: Any = (
        pipeline.PositionWeightedModuleCollection({"a": 4}),
        lambda weights: pipeline.KeyedJaggedTensor(["a"], ids, weights, lengths),
    )
    for processor, jagged in (one, each):
        with torch.no_grad():
            next(processor.parameters()).copy_(torch.tensor([2.0, 3.0, 4.0, 5.0]))
        for wrong in (None, torch.ones(4, dtype=torch.bool)):
            with raises(ConfigError, where=f"{type(processor).__name__}, {wrong}"):
                processor.pre_process_input(jagged(wrong))
            with succeeds("a batch behind it", where=type(processor).__name__):
                found = processor(jagged(torch.full((4,), 3.0))).weights().detach()
            assert_bits(found, torch.tensor([2.0, 3.0, 4.0, 2.0]), f"{type(processor).__name__} behind a refused batch")


@requirement(
    "PIPE-535", "A batch whose lengths were changed in place MUST be the batch of the new ones after unsync()."
)
def test_lengths_changed_in_place(pipeline: Any) -> None:
    lengths = torch.tensor([1, 1, 2, 2])
    kjt = pipeline.KeyedJaggedTensor(["a", "b"], torch.arange(6), lengths=lengths)
    assert_equal(kjt["b"].values().tolist(), [2, 3, 4, 5], where="before")
    lengths.copy_(torch.tensor([2, 2, 1, 1]))
    with succeeds("unsync", where="a batch whose lengths were changed"):
        kjt.unsync()
        found = (kjt["b"].values().tolist(), kjt.length_per_key(), kjt.offset_per_key(), kjt.split([1, 1])[1].values())
    assert_equal((*found[:3], found[3].tolist()), ([4, 5], [4, 2], [0, 4, 6], [4, 5]), where="behind unsync()")


@requirement(
    "PIPE-537",
    "Batches of other dtypes MUST be compared by value, in either order: numbers that are equal only in the narrower "
    "dtype are not, those that both hold are.",
)
def test_equal_across_dtypes(pipeline: Any) -> None:
    def bags(dtype: torch.dtype, *values: float) -> Any:
        return pipeline.JaggedTensor(torch.tensor(values, dtype=dtype), lengths=torch.tensor([1, len(values) - 1]))

    far, third = float(2**32), 1 / 3
    cases = [
        (bags(torch.int32, 1, 2), bags(torch.int64, 1, 2), True),
        (bags(torch.int32, 1, 2), bags(torch.int64, 1 + far, 2), False),
        (bags(torch.int32, 1, 2), bags(torch.int64, 1, 2 - far), False),
        (bags(torch.int64, 1, 2), bags(torch.float64, 1, 2), True),
        (bags(torch.int64, 1, 2), bags(torch.float64, 1, 2 + third), False),
        (bags(torch.bfloat16, third, 2), bags(torch.float64, third, 2), False),
        (bags(torch.float16, 0.5, 2), bags(torch.float32, 0.5, 2), True),
    ]
    for number, (one, other, same) in enumerate(cases):
        for left, right in ((one, other), (other, one)):
            assert_equal(pipeline.jt_is_equal(left, right), same, where=f"bags {number}")
            keyed = [pipeline.KeyedJaggedTensor(["a"], each.values(), None, each.lengths()) for each in (left, right)]
            assert_equal(pipeline.kjt_is_equal(*keyed), same, where=f"batches {number}")
