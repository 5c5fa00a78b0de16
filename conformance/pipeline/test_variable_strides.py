"""F. Batches whose features differ in size (VBE): what they hold, how they are cut, sent and looked up."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.harness import assert_equal, examples, raises, requirement, succeeds
from conformance.pipeline.batches import KEYS, as_lists, generator_of, random_bags, values_of, vbe_of
from conformance.pipeline.model import assert_bits
from conformance.pipeline.sharding import (
    collection_of,
    placed,
    sharded_of,
)
from twinproof.errors import ConfigError, MissingKeyError, ShapeError


def bags_of(kjt: Any) -> list[list[list[int]]]:
    """Every feature's bags, by its place."""
    return [part[0] for part in (as_lists(kjt.permute([i])).bags for i in range(len(kjt.keys())))]


@requirement(
    "PIPE-202",
    "A batch whose features differ in size MUST give each feature its own bags and sizes, whole, permuted with "
    "repeats, split, put together, as a dictionary and back.",
)
@examples(30)
@given(
    seed=st.integers(0, 10**6),
    strides=st.lists(st.integers(0, 4), min_size=3, max_size=3),
    order=st.lists(st.integers(0, 2), min_size=1, max_size=4),
    weighted=st.booleans(),
)
def test_cuts(pipeline: Any, seed: int, strides: list[int], order: list[int], weighted: bool) -> None:
    bags = random_bags(strides, seed)
    kjt = vbe_of(pipeline, bags, weighted=weighted)
    ends = [sum(strides[:i]) for i in range(4)]
    facts = (kjt.variable_stride_per_key(), kjt.stride_per_key(), kjt.stride(), kjt.lengths_offset_per_key())
    assert_equal(facts, (True, strides, max(strides), ends), where="sizes")
    assert_equal(kjt.stride_per_key_per_rank(), [[stride] for stride in strides], where="sizes by rank")
    assert_equal(kjt.length_per_key(), [sum(map(len, feature)) for feature in bags], where="length_per_key")
    assert_equal(bags_of(kjt), bags, where="features")
    turned = kjt.permute(order)
    assert_equal(bags_of(turned), [bags[i] for i in order], where="permute")
    assert_equal(turned.stride_per_key(), [strides[i] for i in order], where="permuted sizes")
    parts = kjt.split([1, 0, 2])
    found = [bags_of(part) if part.keys() else [] for part in parts]
    assert_equal(found, [bags[:1], [], bags[1:]], where="split")
    again = pipeline.KeyedJaggedTensor.concat([parts[0], parts[2]])
    assert_equal((bags_of(again), again.stride_per_key()), (bags, strides), where="concat")
    assert_equal(bags_of(kjt.to(torch.device("cpu"))), bags, where="to")
    back = pipeline.KeyedJaggedTensor.from_jt_dict(kjt.to_dict())
    assert_equal((bags_of(back), back.stride_per_key()), (bags, strides), where="from_jt_dict")
    if weighted:
        scales = [part.weights().tolist() for part in (kjt["c"], kjt["a"])]
        picked = kjt.permute([2, 0])
        assert_equal(picked.weights().tolist(), scales[0] + scales[1], where="permuted weights")
        assert_equal(back.weights().tolist(), kjt.weights().tolist(), where="weights of the dictionary")


@requirement(
    "PIPE-213",
    "A lookup of features of different sizes MUST give each sample of the full batch the bag that inverse_indices "
    "name, as the full batch itself would, sharded or not, gradients of weights included; without them it MUST be "
    "refused.",
)
@pytest.mark.parametrize("sharded", [False, True])
def test_lookup(pipeline: Any, sharded: bool) -> None:
    configs = [pipeline.EmbeddingBagConfig(9, 4, f"t{i}", feature_names=[KEYS[i]]) for i in range(3)]
    collection = collection_of(pipeline, configs, [values_of((9, 4), i) for i in range(3)], is_weighted=True)
    module = collection
    if sharded:
        plan = {"t0": pipeline.table_wise(0), "t1": pipeline.row_wise(), "t2": pipeline.data_parallel()}
        # Tables of its own: a replicated one goes to the device as it is.
        module = sharded_of(pipeline, copy.deepcopy(collection), plan, "sgd")
    bags = random_bags([2, 3, 1], 7)
    rows = [torch.randint(0, len(feature), (5,), generator=generator_of(i)) for i, feature in enumerate(bags)]
    turned = (["c", "a", "b"], torch.stack([rows[2], rows[0], rows[1]]))
    kjt = vbe_of(pipeline, bags, weighted=True, inverse_indices=turned)
    assert_equal(kjt.stride(), 5, where="samples of the full batch")
    scales = kjt.weights().requires_grad_()
    every = [[feature[row] for row in rows[i].tolist()] for i, feature in enumerate(bags)]
    full = vbe_of(pipeline, every, stride_per_key_per_rank=None)
    ends, places = kjt.offsets().tolist(), list[int]()
    for i in range(3):
        for row in rows[i].tolist():
            bag = kjt.lengths_offset_per_key()[i] + row
            places += range(ends[bag], ends[bag + 1])
    spread = scales.detach()[places].requires_grad_()
    full = pipeline.KeyedJaggedTensor(KEYS, full.values(), spread, full.lengths())
    grad = values_of((5, 12), 3)
    pooled = module(placed(pipeline, kjt) if sharded else kjt).values()
    pooled.backward(grad.to(pooled.device))
    expected = collection(full).values()
    if not sharded:
        assert_bits(module(kjt).values().detach(), expected.detach(), "pooled")
    expected.backward(grad)
    total = torch.zeros_like(scales).index_add_(0, torch.tensor(places, dtype=torch.int64), spread.grad)
    assert_bits(scales.grad, total, "gradient of weights")
    refused = [(ConfigError, None), (MissingKeyError, (["a", "b"], torch.stack(rows[:2])))]
    refused.append((ShapeError, (KEYS, torch.stack([rows[0], rows[1] + 3, rows[2]]))))
    for error, inverse in refused:
        with raises(error, mentions=("inverse",)):
            module(vbe_of(pipeline, bags, weighted=True, inverse_indices=inverse).to(pooled.device))
    same = vbe_of(pipeline, every, weighted=True).to(pooled.device)
    plain = pipeline.KeyedJaggedTensor(KEYS, same.values(), same.weights(), same.lengths())
    assert_bits(module(same).values().detach(), module(plain).values().detach(), "features that do not differ")


@requirement(
    "PIPE-548",
    "Batches that are put together MUST give each sample the bags that its part gave it, in whatever order a part "
    "names its inverse indices, and if it names features that it has not; of a repeated feature the last part's. Parts "
    "of other numbers of samples MUST be refused.",
)
@examples(20)
@given(
    seed=st.integers(0, 10**6),
    order=st.permutations(range(3)),
    cut=st.sampled_from([(1, 2), (2, 1), (1, 1, 1)]),
    named=st.lists(st.permutations(range(3)), min_size=3, max_size=3),
    all_named=st.booleans(),
    repeats=st.booleans(),
)
def test_inverse_indices_of_parts(
    pipeline: Any, seed: int, order: list[int], cut: tuple[int, ...], named: Any, all_named: bool, repeats: bool
) -> None:
    configs = [pipeline.EmbeddingBagConfig(9, 4, f"t{i}", feature_names=[KEYS[i]]) for i in range(3)]
    collection = collection_of(pipeline, configs, [values_of((9, 4), i) for i in range(3)])
    bags = random_bags([2, 3, 1], seed)
    rows = [torch.randint(0, len(each), (5,), generator=generator_of(seed + i)) for i, each in enumerate(bags)]

    def part(features: list[int], names: Any, of: Any, samples: Any) -> Any:
        held = [i for i in names if all_named or i in features]
        # Nothing is known here of what another part has.
        said = [samples[i] if i in features else torch.zeros_like(samples[i]) for i in held]
        keys, ids = [KEYS[i] for i in features], [each for i in features for bag in of[i] for each in bag]
        lengths = torch.tensor([len(bag) for i in features for bag in of[i]])
        sizes = {"stride_per_key_per_rank": [[len(of[i])] for i in features]}
        inverse = ([KEYS[i] for i in held], torch.stack(said))
        values = torch.tensor(ids, dtype=torch.int64)
        return pipeline.KeyedJaggedTensor(keys, values, lengths=lengths, inverse_indices=inverse, **sizes)

    ends = [sum(cut[:i]) for i in range(len(cut) + 1)]
    parts = [part(order[ends[i] : ends[i + 1]], named[i], bags, rows) for i in range(len(cut))]
    if repeats:
        others = random_bags([2, 3, 1], seed + 50)
        parts.insert(0, part([order[0]], named[0], others, [row.flip(0) for row in rows]))
    full = vbe_of(pipeline, [[bags[i][row] for row in rows[i].tolist()] for i in range(3)])
    expected = collection(full).values().detach()
    with succeeds("concat", where="parts"):
        whole = pipeline.KeyedJaggedTensor.concat(parts)
        twice = pipeline.KeyedJaggedTensor.concat([pipeline.KeyedJaggedTensor.concat(parts[:-1]), parts[-1]])
        found = {"at once": collection(whole), "by and by": collection(twice), "moved": collection(whole.to("cpu"))}
    for way, pooled in found.items():
        assert_bits(pooled.values().detach(), expected, f"put together {way}")
    fewer = part(order[:1], named[0], bags, [row[:4] for row in rows])
    with raises(ShapeError, mentions=("samples", "[5, 4]"), where="parts of other numbers of samples"):
        pipeline.KeyedJaggedTensor.concat([parts[-1], fewer])


@requirement(
    "PIPE-211",
    "dist_init MUST make the batch of all ranks out of their dist_tensors, for features of one size, of one by rank "
    "and of different sizes, and dist_splits MUST say how much goes where.",
)
@pytest.mark.parametrize("kind", ["same", "by rank", "variable"])
@pytest.mark.parametrize("weighted", [False, True])
def test_exchange(pipeline: Any, kind: str, weighted: bool) -> None:
    strides = {"same": [[2, 2]] * 3, "by rank": [[1, 3]] * 3, "variable": [[1, 2], [0, 3], [2, 1]]}[kind]
    variable = kind == "variable"
    ranks = []
    for rank in range(2):
        bags = random_bags([each[rank] for each in strides], 10 * rank)
        options = {} if variable else {"stride_per_key_per_rank": None, "stride": strides[0][rank]}
        ranks.append(vbe_of(pipeline, bags, weighted=weighted, **options))
    labels = ["lengths", "values", *(["strides"] if variable else []), *(["weights"] if weighted else [])]
    assert_equal(ranks[0].dist_labels(), labels, where="labels")
    sizes = [sum(ranks[0].length_per_key()[:2]), ranks[0].length_per_key()[2]]
    samples = [strides[0][0] + strides[1][0], strides[2][0]]
    splits = [samples, sizes, *([[2, 1]] if variable else []), *([sizes] if weighted else [])]
    assert_equal(ranks[0].dist_splits([2, 1]), splits, where="splits")
    tensors = [torch.cat(parts) for parts in zip(*(kjt.dist_tensors() for kjt in ranks), strict=True)]
    # Blocks were received by rank, then feature; they are wanted by feature, then rank.
    blocks = [rank * 3 + feature for feature in range(3) for rank in range(2)]
    if kind == "by rank":
        begins = [0, 1, 2, 3, 6, 9]
        blocks = [begins[block] + i for block in blocks for i in range([1, 1, 1, 3, 3, 3][block])]
    recat = torch.tensor(blocks, dtype=torch.int32)
    by_rank = None if variable else [strides[0][rank] for rank in range(2)]
    made = pipeline.KeyedJaggedTensor.dist_init(KEYS, tensors, variable, 2, recat, by_rank)
    expected = [one + other for one, other in zip(bags_of(ranks[0]), bags_of(ranks[1]), strict=True)]
    assert_equal(bags_of(made), expected, where="bags")
    if weighted:
        scales = [w for key in KEYS for kjt in ranks for w in kjt[key].weights().tolist()]
        assert_equal(made.weights().tolist(), scales, where="weights")
    if variable:
        assert_equal(made.stride_per_key_per_rank(), strides, where="sizes by rank")


@requirement(
    "PIPE-455",
    "size_in_bytes() MUST be the bytes of all that is there: values, weights, lengths, offsets when they are known, "
    "and the sizes of features that differ.",
)
@pytest.mark.parametrize("weighted", [False, True])
def test_size_in_bytes(pipeline: Any, weighted: bool) -> None:
    bags = random_bags([2, 3, 1], 5)
    count = sum(len(bag) for feature in bags for bag in feature)
    expected = 8 * count + (4 * count if weighted else 0)
    kjt = vbe_of(pipeline, bags, weighted=weighted)
    cuts = kjt.lengths().element_size() * 6
    # An int32 for each feature and rank.
    assert_equal(kjt.size_in_bytes(), expected + cuts + 4 * 3, where="features that differ")
    kjt.offsets()
    assert_equal(kjt.size_in_bytes(), expected + cuts + cuts // 6 * 7 + 4 * 3, where="with offsets")
    same = pipeline.KeyedJaggedTensor(["a", "b"], kjt.values(), kjt.weights_or_none(), kjt.lengths())
    assert_equal(same.size_in_bytes(), expected + cuts, where="features of one size")
    one = pipeline.JaggedTensor(kjt.values(), kjt.weights_or_none(), kjt.lengths())
    assert_equal(one.size_in_bytes(), expected + cuts, where="one feature")
    one.offsets()
    assert_equal(one.size_in_bytes(), expected + cuts + cuts // 6 * 7, where="one feature with offsets")
