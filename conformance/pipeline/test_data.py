"""F. Batches: what they hold, how they are cut, and what they refuse."""

from __future__ import annotations

import functools
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.harness import assert_equal, examples, raises, requirement, succeeds
from conformance.pipeline.batches import Jagged, as_lists, random_jagged, values_of
from conformance.pipeline.model import assert_bits
from twinproof.errors import ConfigError, MissingKeyError, ShapeError, TwinproofError


def as_float32(batch: Jagged) -> Jagged:
    """The batch with weights as float32 holds them."""
    if batch.weights is None:
        return batch
    return Jagged(batch.keys, batch.bags, [[torch.tensor(b).tolist() for b in f] for f in batch.weights])


@requirement(
    "PIPE-100",
    "A jagged batch MUST give each feature its own bags and weights, from lengths or offsets, int32 or int64; permute, "
    "split and concat MUST move whole features and change nothing.",
)
@examples(40)
@given(
    seed=st.integers(0, 10**6),
    order=st.permutations(range(3)),
    cut=st.integers(0, 3),
    stride=st.integers(1, 5),
    weighted=st.booleans(),
    dtype=st.sampled_from([torch.int64, torch.int32]),
    by_offsets=st.booleans(),
)
def test_batches(
    pipeline: Any, seed: int, order: list[int], cut: int, stride: int, weighted: bool, dtype: Any, by_offsets: bool
) -> None:
    batch = as_float32(random_jagged(["a", "b", "c"], [9, 9, 9], stride, seed, weighted=weighted))
    kjt = batch.kjt(pipeline, dtype=dtype, by_offsets=by_offsets)
    copies = [part.clone() for part in (kjt.values(), kjt.lengths(), kjt.offsets())]
    assert_equal(as_lists(kjt), batch, where="features")
    assert_equal((kjt.keys(), kjt.stride(), kjt.values().dtype), (batch.keys, stride, dtype), where="facts")
    lengths = [sum(map(len, feature)) for feature in batch.bags]
    assert_equal(kjt.length_per_key(), lengths, where="length_per_key")
    assert_equal(kjt.offset_per_key(), [sum(lengths[:i]) for i in range(4)], where="offset_per_key")
    names = [batch.keys[i] for i in order]
    assert_equal(as_lists(kjt.permute(order)), batch.picked(names), where="permute")
    parts = kjt.split([cut, 3 - cut])
    expected = [batch.keys[:cut], batch.keys[cut:]]
    assert_equal([part.keys() for part in parts], expected, where="split")
    assert_equal(as_lists(pipeline.KeyedJaggedTensor.concat(parts)), batch, where="split and concat")
    assert_equal(as_lists(kjt.to("cpu")), batch, where="to")
    for part, copy in zip((kjt.values(), kjt.lengths(), kjt.offsets()), copies, strict=True):
        assert_bits(part, copy, "parts of the caller")


@requirement(
    "PIPE-101",
    "A batch whose parts disagree MUST be refused by name before a feature is taken from it: where it is made by "
    "from_lengths_sync or from_offsets_sync, else where it is first cut, put together or looked up.",
)
def test_batch_refusals(pipeline: Any) -> None:
    make, ids = pipeline.KeyedJaggedTensor, torch.tensor([1, 2, 3])
    wrong: list[tuple[Any, dict[str, Any]]] = [(ConfigError, {})]
    wrong += [(ShapeError, {"lengths": torch.tensor(lengths)}) for lengths in ([1, 1], [4, -1], [1, 2, 0])]
    wrong += [(ShapeError, {"offsets": torch.tensor(offsets)}) for offsets in ([0, 1, 2], [1, 2, 3], [0, 4, 3])]
    wrong.append((ConfigError, {"lengths": torch.tensor([1, 2]), "offsets": torch.tensor([0, 2, 3])}))
    wrong.append((ShapeError, {"lengths": torch.tensor([1, 2]), "stride": 2}))
    wrong.append((ShapeError, {"lengths": torch.tensor([1, 2]), "weights": torch.ones(2)}))
    known = ({"length_per_key": [2, 1]}, {"offset_per_key": [0, 2, 3]}, {"lengths_offset_per_key": [0, 2, 2]})
    wrong += [(ShapeError, {"lengths": torch.tensor([1, 2]), **each}) for each in known]
    for ranks in ([[1]], [[1], [2]], [[1], [1], [0]]):
        wrong.append((ShapeError, {"lengths": torch.tensor([1, 2]), "stride_per_key_per_rank": ranks}))
    good = make(["a", "b"], ids, lengths=torch.tensor([1, 2]))
    collection = pipeline.EmbeddingBagCollection([pipeline.EmbeddingBagConfig(9, 4, "t", feature_names=["a", "b"])])
    uses: dict[str, Any] = {
        "by name": lambda kjt: kjt["a"],
        "to_dict": lambda kjt: kjt.to_dict(),
        "permute": lambda kjt: kjt.permute([1, 0]),
        "split": lambda kjt: kjt.split([1, 1]),
        "concat": lambda kjt: make.concat([good, kjt]),
        "lookup": collection,
    }
    for error, parts in wrong:
        for name, use in uses.items():
            with raises(error, where=f"{name} of {parts}"):
                use(make(["a", "b"], ids, **parts))
    with raises(ShapeError, mentions=("lengths", "3")):
        make.from_lengths_sync(["a"], ids, torch.tensor([1, 1]))
    with raises(ShapeError, mentions=("offsets", "3")):
        make.from_offsets_sync(["a"], ids, torch.tensor([0, 2]))
    with raises(MissingKeyError, mentions=("c",)):
        good["c"]
    with raises(ConfigError):
        good.weights()
    with raises(ConfigError):
        good.permute([2])
    with raises(ConfigError, mentions=("order",)):
        good.permute([1, 0], torch.tensor([0, 1]))
    with raises(ConfigError):
        good.split([1])
    with raises(ConfigError):
        make.concat([good, make(["c"], ids, torch.ones(3), lengths=torch.tensor([3]))])
    by_rank = [make(["a"], ids, lengths=torch.tensor([1, 2]), stride_per_key_per_rank=[n]) for n in ([2], [1, 1])]
    with raises(ShapeError, mentions=("ranks",)):
        make.concat(by_rank)


@requirement(
    "PIPE-447",
    "Lengths and offsets that do not cut the values MUST be refused whatever integers they are, those that have no "
    "sign among them.",
)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8])
def test_integers_that_do_not_cut(pipeline: Any, dtype: torch.dtype) -> None:
    wrong: list[dict[str, list[int]]] = [
        {"offsets": each} for each in ([0, 3, 2, 4], [0, 5, 2, 4], [0, 1, 2, 3], [1, 2, 3, 4])
    ]
    wrong += [{"lengths": each} for each in ([2, 1, 0], [2, 1, 2], [0, 0, 0])]
    # 260 is 4 where a sum is of eight bits.
    wrong.append({"lengths": [120, 120, 20]})
    for parts in wrong:
        given = {name: torch.tensor(each, dtype=dtype) for name, each in parts.items()}
        with raises(ShapeError, where=f"{dtype} {parts}"):
            pipeline.KeyedJaggedTensor(["a", "b", "c"], torch.arange(4), **given)["b"]


_LENGTHS = torch.tensor([1, 2, 1, 1])
# Of two features and five values: what a batch is made of, beside its lengths or in their place.
DISAGREEING: dict[str, dict[str, Any]] = {
    "a length below 0": {"lengths": torch.tensor([3, -1, 2, 1])},
    "too many values": {"lengths": torch.tensor([1, 1, 1, 1])},
    "too few values": {"lengths": torch.tensor([3, 1, 2, 1])},
    "too few weights": {"weights": torch.ones(3)},
    "too many weights": {"weights": torch.ones(7)},
    "an odd number of lengths": {"lengths": torch.tensor([1, 2, 2])},
    "another stride": {"stride": 3},
    "other strides": {"stride_per_key_per_rank": [[2], [1]]},
    "strides of three features": {"stride_per_key_per_rank": [[2], [1], [1]]},
    "a stride below 0": {"stride_per_key_per_rank": [[5], [-1]]},
    "strides that do not add up": {"stride_per_key": [1, 4]},
    "offsets from 1": {"lengths": None, "offsets": torch.tensor([1, 2, 3, 4, 5])},
    "offsets to 4": {"lengths": None, "offsets": torch.tensor([0, 2, 3, 4, 4])},
    "offsets that step down": {"lengths": None, "offsets": torch.tensor([0, 3, 2, 4, 5])},
    "offsets of other bags": {"offsets": torch.tensor([0, 2, 3, 4, 5])},
    "neither lengths nor offsets": {"lengths": None},
    "no offsets": {"lengths": None, "offsets": torch.tensor([], dtype=torch.int64)},
    "other sizes": {"length_per_key": [2, 3]},
    "other places of values": {"offset_per_key": [0, 2, 5]},
    "other places of lengths": {"lengths_offset_per_key": [0, 1, 4]},
}


def _readers(pipeline: Any) -> dict[str, Any]:
    """Every way by which a batch is read."""
    configs = [pipeline.EmbeddingBagConfig(9, 4, name, feature_names=[name]) for name in "ab"]
    rows = [pipeline.EmbeddingConfig(9, 4, name, feature_names=[name]) for name in "ab"]
    whole = pipeline.EmbeddingBagCollection(configs)
    return {
        "by name": lambda kjt: kjt["b"],
        "to_dict": lambda kjt: kjt.to_dict(),
        "length_per_key": lambda kjt: kjt.length_per_key(),
        "offset_per_key": lambda kjt: kjt.offset_per_key(),
        "split": lambda kjt: kjt.split([1, 1]),
        "permute": lambda kjt: kjt.permute([1, 0]),
        "flatten_lengths": lambda kjt: kjt.flatten_lengths(),
        "concat": lambda kjt: pipeline.KeyedJaggedTensor.concat([kjt]),
        "sync": lambda kjt: kjt.sync(),
        "dist_splits": lambda kjt: kjt.dist_splits([1, 1]),
        "to": lambda kjt: kjt.to(torch.device("cpu"))["b"],
        "deepcopy": lambda kjt: deepcopy(kjt)["b"],
        "bags": whole,
        "bags of one": pipeline.EmbeddingBagCollection(configs[1:]),
        "rows": pipeline.EmbeddingCollection(rows),
        "sharded": pipeline.ShardedEmbeddingBagCollection(whole, {name: pipeline.table_wise(0) for name in "ab"}),
    }


@requirement(
    "PIPE-549",
    "A batch that was refused MUST be refused again, whatever is wrong with it, whoever read it first, and by every "
    "way to read it or a copy of it.",
)
@pytest.mark.parametrize("fault", sorted(DISAGREEING))
def test_refused_again(pipeline: Any, fault: str) -> None:
    parts: dict[str, Any] = {"lengths": _LENGTHS, **DISAGREEING[fault]}
    readers = _readers(pipeline)
    # More weights than values are refused where all features are put in another order, or beside others.
    strict = {"permute", "concat"} if fault == "too many weights" else set(readers)
    for first in sorted(strict):
        for before in sorted(set(readers) - strict) or [first]:
            kjt = pipeline.KeyedJaggedTensor(["a", "b"], torch.arange(5), **parts)
            if before != first:
                readers[before](kjt)
            for number, reader in enumerate([first, *sorted(strict), first]):
                with raises(TwinproofError, where=f"{fault}: {reader}, which is reader {number} behind {first}"):
                    readers[reader](kjt)


@requirement(
    "PIPE-454",
    "A batch put together on a device that is not waited for MUST know the sizes of its features where the host knows "
    "those of all parts, and of none where it knows some.",
)
@pytest.mark.parametrize("known", [(), (0,), (1,), (0, 1)])
def test_sizes_of_some_parts(pipeline: Any, known: tuple[int, ...]) -> None:
    made = functools.partial(torch.empty, dtype=torch.int64, device="meta")
    parts = [
        pipeline.KeyedJaggedTensor(keys, made(3 * len(keys)), lengths=made(2 * len(keys)))
        for keys in (["a", "b"], ["c"])
    ]
    for part in known:
        parts[part].length_per_key()
    with succeeds("concat", where=f"sizes known of parts {known}"):
        whole = pipeline.KeyedJaggedTensor.concat(parts)
        found = whole.length_per_key_or_none()
        sizes = whole.length_per_key()
    assert_equal(found, [3, 3, 3] if len(known) == 2 else None, where=f"sizes known of parts {known}: of the whole")
    assert_equal(sizes, [3, 3, 3], where=f"sizes known of parts {known}: when asked for")


@requirement("PIPE-102", "Pooled columns MUST be found under their feature's name and regroup in the order asked for.")
def test_keyed_tensor(pipeline: Any) -> None:
    parts = {name: values_of((4, width), width) for name, width in (("a", 2), ("b", 1), ("c", 3))}
    left = pipeline.KeyedTensor.from_tensor_list(["a", "b"], [parts["a"], parts["b"]])
    right = pipeline.KeyedTensor(["c"], [3], parts["c"])
    for name, expected in parts.items():
        assert_bits((right if name == "c" else left)[name], expected, name)
    assert_equal((left.length_per_key(), left.offset_per_key()), ([2, 1], [0, 2, 3]), where="widths")
    groups = pipeline.KeyedTensor.regroup([left, right], [["c", "a"], ["b"]])
    assert_bits(groups[0], torch.cat([parts["c"], parts["a"]], dim=1), "first group")
    assert_bits(groups[1], parts["b"], "second group")
    with raises(MissingKeyError, mentions=("d",)):
        pipeline.KeyedTensor.regroup([left], [["d"]])
    with raises(ShapeError):
        pipeline.KeyedTensor(["a"], [3], parts["a"])


# What own code is not told of another library's batch, and so cannot be wrong about.
_UNTOLD = ("strides that do not add up", "other places of values", "other places of lengths", "too many weights")


def _of_others(kjt: Any) -> Any:
    """The same batch as another library has it: torchrec's names, and no class of ours."""
    names = ["keys", "values", "weights_or_none", "lengths_or_none", "offsets_or_none", "length_per_key_or_none"]
    names += ["inverse_indices_or_none", "variable_stride_per_key", "_stride", "_stride_per_key_per_rank"]
    return SimpleNamespace(**{name: getattr(kjt, name) for name in names})


def _pooled(found: Any) -> torch.Tensor:
    """The rows of a lookup of any kind, in one tensor."""
    parts = found.values()
    return parts.detach() if isinstance(parts, torch.Tensor) else torch.cat([part.values().detach() for part in parts])


@requirement(
    "PIPE-619",
    "Another library's batch whose parts disagree MUST be refused by every lookup, whichever of its facts are known "
    "already, and however often; facts that lookups do not ask for MUST NOT change what is found.",
)
@pytest.mark.parametrize("fault", ["nothing", *sorted(DISAGREEING)])
def test_batches_of_others_that_disagree(pipeline: Any, fault: str) -> None:
    readers = _readers(pipeline)
    lookups = {name: readers[name] for name in ("bags", "bags of one", "rows", "sharded")}
    turned = [pipeline.EmbeddingBagConfig(9, 4, name, feature_names=[name]) for name in "ba"]
    lookups["bags in another order"] = pipeline.EmbeddingBagCollection(turned)
    good = pipeline.KeyedJaggedTensor(["a", "b"], torch.arange(5), lengths=_LENGTHS)
    for sizes in (None, [3, 2]):
        parts: dict[str, Any] = {"lengths": _LENGTHS, "length_per_key": sizes, **DISAGREEING.get(fault, {})}
        for name, lookup in lookups.items():
            batch = _of_others(pipeline.KeyedJaggedTensor(["a", "b"], torch.arange(5), **parts))
            where = f"{fault}, sizes {sizes}: {name}"
            if fault in ("nothing", *_UNTOLD):
                with succeeds("a lookup", where=where):
                    found = _pooled(lookup(batch))
                assert_bits(found, _pooled(lookup(good)), where)
                continue
            for _ in range(2):
                with raises(TwinproofError, where=where):
                    lookup(batch)
