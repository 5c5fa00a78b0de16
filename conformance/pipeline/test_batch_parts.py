"""F. Batches some of whose parts are missing, empty or known already: what they answer, and what is refused by name."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from conformance.harness import assert_equal, raises, requirement, succeeds
from conformance.pipeline.batches import KEYS
from conformance.pipeline.model import assert_bits
from twinproof.errors import ConfigError, MissingKeyError, ShapeError, UnsupportedError


def _ids(count: int) -> torch.Tensor:
    return torch.arange(count)


def _ints(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def _parts_of(batch: Any) -> list[Any]:
    return [getattr(batch, name) for name in ("_values", "_weights", "_lengths", "_offsets")]


def _facts_of(batch: Any) -> list[Any]:
    return [None if part is None else (tuple(part.shape), part.dtype) for part in _parts_of(batch)]


@requirement(
    "PIPE-600",
    "dist_init MUST put the samples that ranks sent in the order of recat, and leave them as received where "
    "it is none or empty: for ranks of any numbers of samples, none at all too, with and without weights.",
)
@pytest.mark.parametrize("weighted", [False, True])
def test_received(pipeline: Any, weighted: bool) -> None:
    # Samples of three ranks, alike at the ends and another in the middle; bags of 1, 2, ... ids.
    for by_rank in ([1, 2, 1], [2, 2, 2], [2, 0, 2], [0, 0, 0], [0, 1, 3]):
        blocks, bag = [], 0
        for rank, stride in enumerate(by_rank):
            for feature in range(2):
                for sample in range(stride):
                    blocks.append((feature, rank, sample, [10 * bag + i for i in range(bag % 3)]))
                    bag += 1
        lengths = torch.tensor([len(block[3]) for block in blocks], dtype=torch.int64)
        values = torch.tensor([i for block in blocks for i in block[3]], dtype=torch.int64)
        order = sorted(range(len(blocks)), key=lambda i: blocks[i][:3])
        same = len(set(by_rank)) == 1
        turned = [rank * 2 + feature for feature in range(2) for rank in range(3)]
        for variable in (False, True):
            strides = torch.tensor([stride for stride in by_rank for _ in range(2)])
            # Where features differ a block is what one rank has of a feature.
            cuts = torch.tensor(turned if same or variable else order, dtype=torch.int32)
            tensors = [lengths, values, *([strides] if variable else []), *([values.float()] if weighted else [])]
            for given in (cuts, None, cuts[:0]):
                where = f"{by_rank}, variable={variable}, recat {None if given is None else given.tolist()}"
                with succeeds("dist_init", where=where):
                    made = pipeline.KeyedJaggedTensor.dist_init(
                        ["a", "b"], tensors, variable, 3, given, None if variable else by_rank
                    )
                turn = order if given is cuts else range(len(blocks))
                expected = [i for at in turn for i in blocks[at][3]]
                assert_equal(made.values().tolist(), expected, where=f"{where}: values")
                assert_equal(made.lengths().tolist(), [len(blocks[at][3]) for at in turn], where=f"{where}: lengths")
                scales = None if made.weights_or_none() is None else made.weights().tolist()
                assert_equal(scales, [float(i) for i in expected] if weighted else None, where=f"{where}: weights")


@requirement(
    "PIPE-601",
    "stride() MUST be the samples of the full batch, or of the largest feature, and 0 of a batch without features, "
    "whichever of lengths, offsets, sizes by rank and inverse indices there are, empty ones included.",
)
def test_strides(pipeline: Any) -> None:
    keyed, none = pipeline.KeyedJaggedTensor, _ints()
    rows = (["a", "b"], torch.tensor([[0, 0, 1, 0], [0, 1, 1, 0]]))
    empty_rows = (["a", "b"], torch.zeros(2, 0, dtype=torch.int64))
    cases = {
        "offsets": (keyed(["a", "b"], _ids(4), offsets=_ints(0, 1, 2, 3, 4)), 2),
        "lengths": (keyed(["a", "b"], _ids(4), lengths=_ints(1, 1, 1, 1)), 2),
        "both": (keyed(["a", "b"], _ids(4), lengths=_ints(1, 1, 1, 1), offsets=_ints(0, 1, 2, 3, 4)), 2),
        "offsets without elements": (keyed(["a", "b"], _ids(4), lengths=_ints(1, 1, 1, 1), offsets=none), 2),
        "sizes by rank": (keyed(["a", "b"], _ids(3), lengths=_ints(1, 1, 1), stride_per_key_per_rank=[[1], [2]]), 2),
        "sizes by rank of no ranks": (
            keyed(["a", "b"], _ids(4), lengths=_ints(1, 1, 1, 1), stride_per_key_per_rank=torch.zeros(2, 0).int()),
            2,
        ),
        "inverse indices": (
            keyed(
                ["a", "b"], _ids(4), None, _ints(1, 1, 1, 1), stride_per_key_per_rank=[[2], [2]], inverse_indices=rows
            ),
            4,
        ),
        "inverse indices without elements": (
            keyed(
                ["a", "b"],
                _ids(3),
                None,
                _ints(1, 1, 1),
                stride_per_key_per_rank=[[1], [2]],
                inverse_indices=empty_rows,
            ),
            2,
        ),
        "no features, offsets": (keyed([], none, offsets=_ints(0)), 0),
        "no features, lengths": (keyed([], none, lengths=none), 0),
        "no features, sizes by rank": (
            keyed([], none, lengths=none, stride_per_key_per_rank=torch.zeros(0, 1, dtype=torch.int32)),
            0,
        ),
        "neither lengths nor offsets": (keyed(["a"], none), 0),
    }
    for name, (batch, expected) in cases.items():
        with succeeds("stride()", where=name):
            found = batch.stride()
        assert_equal(found, expected, where=name)


class _Unseen(torch.Tensor):
    """Stands in for a tensor."""


@requirement(
    "PIPE-602",
    "A batch whose parts do not fit together MUST be refused by name where a feature is first taken: sizes by rank "
    "that are no table, sizes of another number of features, lengths that no longer cut the values, neither lengths "
    "nor offsets.",
)
def test_parts_that_do_not_fit(pipeline: Any) -> None:
    keyed = pipeline.KeyedJaggedTensor
    flat = keyed(["a"], _ids(2), lengths=_ints(1, 1), stride_per_key_per_rank=_ints(2))
    assert_equal(flat.stride_per_key(), [], where="sizes by rank of one dimension")
    with raises(ShapeError, mentions=("not [keys, ranks]", "(1,)"), where="sizes by rank"):
        flat.length_per_key()
    summed = keyed(["a", "b"], _ids(4), lengths=_ints(1, 1, 1, 1), stride_per_key=[4])
    with raises(ShapeError, mentions=("[keys * stride]", "[4]"), where="the sum of the sizes for all of them"):
        summed.length_per_key()
    lengths = _ints(1, 1, 2)
    changed = keyed(["a"], _ids(4), lengths=lengths)
    # Whoever puts something else in the place of values knows how many there are; nobody counts them.
    unseen = keyed(["a"], _ids(3).as_subclass(_Unseen), lengths=_ints(1, 1))
    with succeeds("a look at what cannot be counted", where="values of another class"):
        found = unseen.length_per_key()
    assert_equal(found, [2], where="values of another class")
    with raises(ConfigError, mentions=("lengths", "offsets"), where="values of another class, without bags"):
        keyed(["a"], _ids(3).as_subclass(_Unseen)).length_per_key()
    with succeeds("the first look", where="lengths that fit"):
        changed.length_per_key()
    lengths[2] = 1
    with raises(ShapeError, mentions=("lengths do not cut the values", "3", "4"), where="lengths that were changed"):
        changed.unsync().length_per_key()
    for question in ("lengths", "offsets", "bags", "length_per_key", "to_dict"):
        with raises(ConfigError, mentions=("lengths",), where=f"{question} of a batch without bags"):
            getattr(keyed(["a"], _ids(2)), question)()
    with raises(ConfigError, mentions=("inverse indices",), where="inverse_indices"):
        keyed(["a"], _ids(1), lengths=_ints(1)).inverse_indices()


@requirement(
    "PIPE-603",
    "What takes features out of a batch or puts batches together MUST refuse by name an order that is none, segments "
    "below zero, and parts of other numbers of samples or of other classes; an order told twice MUST be the same.",
)
def test_orders_and_parts(pipeline: Any) -> None:
    keyed = pipeline.KeyedJaggedTensor
    batch = keyed(KEYS, _ids(6), lengths=_ints(1, 1, 1, 1, 1, 1))
    with raises(ConfigError, mentions=("segments", "[4, -1]"), where="split"):
        batch.split([4, -1])
    for order, told in (([2, 0], _ints(2, 0)), ([1], _ints(1)), ([], _ints())):
        with succeeds("permute", where=f"{order} told twice"):
            found = batch.permute(order, told)
        assert_equal(found.keys(), [KEYS[i] for i in order], where=f"{order} told twice")
    wrong = {"others": _ints(0, 2), "more": _ints(2, 0, 1), "one": _ints(2), "of two dimensions": _ints(2, 0)[:, None]}
    for name, told in wrong.items():
        with raises(ConfigError, mentions=("not the same order",), where=f"permute, {name}"):
            batch.permute([2, 0], told)
    # Numbers that the host cannot see for nothing are not looked at: the list is what counts.
    unseen = torch.nn.Parameter(_ints(0, 2), requires_grad=False)
    for name, told in {"of another class": unseen, "on meta": torch.empty(2, dtype=torch.int64, device="meta")}.items():
        with succeeds("permute", where=f"a tensor {name}"):
            found = batch.permute([2, 0], told)
        assert_equal(found.keys(), ["c", "a"], where=f"permute, a tensor {name}")
    other = keyed(["d"], _ids(3), lengths=_ints(1, 1, 1))
    with raises(ShapeError, mentions=("different stride", "[2, 3]"), where="concat"):
        keyed.concat([batch, other])
    one = pipeline.JaggedTensor(_ids(2), lengths=_ints(1, 1))
    for parts in ([batch, one], [one, batch], [batch, None]):
        with raises(UnsupportedError, mentions=("not batches of ours",), where="concat"):
            keyed.concat(parts)
    columns = pipeline.KeyedTensor(["a", "b"], [1, 2], torch.zeros(2, 3))
    for name, take in (("KeyedTensor", columns.__getitem__), ("KeyedJaggedTensor", batch.__getitem__)):
        with raises(MissingKeyError, mentions=("got: z", "'b'"), where=name):
            take("z")


@requirement(
    "PIPE-712",
    "Bags of dense rows MUST be refused by name where there is not a length for each row or one lies outside the row; "
    "dist_splits MUST refuse runs below zero and runs of more features than there are.",
)
def test_sizes_outside(pipeline: Any) -> None:
    rows, made = torch.arange(6).reshape(3, 2), pipeline.JaggedTensor.from_dense_lengths
    for wrong in ([3, 1, 0], [0, 1, 3], [-1, 1, 2], [2, 2, -3]):
        names = ("do not cut the rows", str((min(wrong), max(wrong))))
        with raises(ShapeError, mentions=names, where=f"lengths {wrong}"):
            made(rows, _ints(*wrong))
    for lengths in (_ints(1, 2), _ints(1, 2, 0, 1), _ints(1, 2, 0)[:, None], torch.tensor(1)):
        with raises(ShapeError, mentions=("a length for each row", "(3, 2)"), where=f"{tuple(lengths.shape)}"):
            made(rows, lengths)
    with raises(ShapeError, mentions=("a length for each row", "(3,)"), where="values of one dimension"):
        made(rows[:, 0], _ints(1, 1, 1))
    for right in ([2, 2, 2], [0, 0, 0], [0, 1, 2]):
        with succeeds("bags", where=f"lengths {right}"):
            found = made(rows, _ints(*right))
        expected = torch.cat([row[:size] for row, size in zip(rows, right, strict=True)])
        assert_bits(found.values(), expected, f"values of {right}")
    batch = pipeline.KeyedJaggedTensor(KEYS, _ids(6), lengths=_ints(1, 1, 1, 1, 1, 1))
    for runs in ([4], [1, 3], [4, -1], [-1, 2], [-1]):
        with raises(ConfigError, mentions=("runs are not of the features", str(runs)), where=f"dist_splits of {runs}"):
            batch.dist_splits(runs)
    for runs, sums in (([], []), ([1], [2]), ([0, 2], [0, 4]), ([3], [6]), ([1, 2, 0], [2, 4, 0])):
        with succeeds("dist_splits", where=f"dist_splits of {runs}"):
            found = batch.dist_splits(runs)
        assert_equal(found[1], sums, where=f"dist_splits of {runs}")


@requirement(
    "PIPE-604",
    "A batch that is told to be of one size, as torchrec's own code tells it where all sizes turn out to be the same, "
    "MUST be cut, moved, put together and sent as one.",
)
def test_told_to_be_of_one_size(pipeline: Any) -> None:
    keyed = pipeline.KeyedJaggedTensor

    def told() -> Any:
        batch = keyed(KEYS, _ids(6), lengths=_ints(1, 1, 1, 1, 1, 1), stride_per_key_per_rank=[[2], [2], [2]])
        batch._variable_stride_per_key = False
        return batch

    ways: dict[str, Any] = {
        "split": lambda: told().split([1, 2])[1],
        "permute": lambda: told().permute([2, 0]),
        "flatten_lengths": lambda: told().flatten_lengths(),
        "to": lambda: told().to(torch.device("cpu")),
        "concat": lambda: keyed.concat([told(), keyed(["d"], _ids(2), lengths=_ints(1, 1))]),
        "empty_like": lambda: keyed.empty_like(told()),
    }
    for way, make in ways.items():
        with succeeds("a batch of one size", where=way):
            batch = make()
        assert_equal((batch.stride_per_key_per_rank(), batch.stride()), ([], 2), where=way)
    assert_equal(told().dist_labels(), ["lengths", "values"], where="dist_labels")
    assert_equal(len(told().dist_tensors()), 2, where="dist_tensors")


@requirement(
    "PIPE-605",
    "A batch without elements MUST be one: offsets or lengths without elements, of any dtype, where there are no "
    "values, and what empty() and empty_like() make, with the dtypes and weights that were asked for.",
)
def test_without_elements(pipeline: Any) -> None:
    jagged, keyed = pipeline.JaggedTensor, pipeline.KeyedJaggedTensor
    none = torch.empty(0)
    with succeeds("a batch", where="lengths and offsets without elements"):
        found = (
            jagged(_ids(0), lengths=none).offsets().tolist(),
            keyed(["a"], _ids(0), lengths=none).length_per_key(),
            keyed(["a"], _ids(0), offsets=_ints()).length_per_key(),
        )
    assert_equal(found, ([0], [0], [0]), where="lengths of floats, of a batch, and offsets without elements")
    with raises(ConfigError, mentions=("lengths nor offsets",), where="offsets without elements, values"):
        keyed(["a"], _ids(1), offsets=_ints()).length_per_key()
    dtypes = {"values_dtype": torch.int32, "weights_dtype": torch.float16, "lengths_dtype": torch.int64}
    for kind in (jagged, keyed):
        for weighted in (False, True):
            made = kind.empty(is_weighted=weighted, **dtypes)
            weights = made.weights_or_none()
            found = (made.values().dtype, made.lengths().dtype, None if weights is None else weights.dtype)
            expected = (torch.int32, torch.int64, torch.float16 if weighted else None)
            assert_equal(found, expected, where=f"{kind.__name__}.empty, weighted={weighted}")
        assert_equal(kind.empty().bags().offsets.tolist(), [0], where=f"bags of {kind.__name__}.empty")
        there = kind.empty(is_weighted=True, device=torch.device("meta"))
        places = {part.device.type for part in _parts_of(there) if part is not None}
        assert_equal(places, {"meta"}, where=f"{kind.__name__}.empty on meta")
    for by_offsets in (False, True):
        for weights in (None, torch.ones(3, dtype=torch.float16)):
            cut = {"offsets": _ints(0, 2, 3)} if by_offsets else {"lengths": _ints(2, 1)}
            full = jagged(_ids(3), weights, **cut)
            where = f"empty_like, {list(cut)}, weighted={weights is not None}"
            there = jagged.empty_like(full, device=torch.device("meta"))
            facts = _facts_of(full)
            assert_equal(_facts_of(there), facts, where=where)
            assert_equal({part.device.type for part in _parts_of(there) if part is not None}, {"meta"}, where=where)
            here = jagged.empty_like(full)
            assert_equal((here.values().numel(), here.values().dtype), (0, torch.int64), where=where)
            assert_equal(here.weights_or_none() is None, weights is None, where=f"{where}: weights")
            assert_equal(here.lengths().numel(), 0, where=f"{where}: lengths")


def _of_different_sizes(pipeline: Any, weights: torch.Tensor | None = None) -> Any:
    """Features of one and of two samples, and the row of each of three samples of the full batch."""
    rows = (["a", "b"], torch.tensor([[0, 0, 0], [0, 1, 1]]))
    return pipeline.KeyedJaggedTensor(
        ["a", "b"], _ids(4), weights, _ints(2, 1, 1), stride_per_key_per_rank=[[1], [2]], inverse_indices=rows
    )


@requirement(
    "PIPE-606",
    "to(dtype=...) MUST be the batch with its weights in that dtype, all else as it was; a dictionary that was given "
    "MUST be the answer of to_dict; dense weights MUST be cut as their values.",
)
def test_weights_and_dictionaries(pipeline: Any) -> None:
    here = torch.device("cpu")
    for weights in (None, torch.tensor([0.5, 1.5, 2.5, 3.5])):
        batch = _of_different_sizes(pipeline, weights)
        with succeeds("to", where=f"weighted={weights is not None}"):
            found = batch.to(here, dtype=torch.float16)
        expected = None if weights is None else weights.to(torch.float16)
        assert_equal(found.weights_or_none() is None, expected is None, where="weights")
        if weights is not None and expected is not None:
            assert_bits(found.weights(), expected, "weights in another dtype")
            assert_bits(batch.to(here).weights(), weights, "weights as they were")
        facts = (found.values().tolist(), found.stride_per_key(), found.inverse_indices()[1].tolist())
        assert_equal(facts, ([0, 1, 2, 3], [1, 2], [[0, 0, 0], [0, 1, 1]]), where="the rest")
    given = {"a": pipeline.JaggedTensor(_ids(1), lengths=_ints(1))}
    known = pipeline.KeyedJaggedTensor(["a"], _ids(1), lengths=_ints(1), jt_dict=given)
    assert_equal(known.to_dict()["a"] is given["a"], True, where="the dictionary that was given")
    dense = [torch.tensor([1, 2]), _ints(), torch.tensor([3])]
    scales = [torch.tensor([1.0, 2.0]), torch.empty(0), torch.tensor([3.0])]
    for weighted in (False, True):
        made = pipeline.JaggedTensor.from_dense(dense, scales if weighted else None)
        assert_equal(made.lengths().tolist(), [2, 0, 1], where="from_dense")
        found_weights = None if made.weights_or_none() is None else made.weights().tolist()
        assert_equal(found_weights, [1.0, 2.0, 3.0] if weighted else None, where="weights of from_dense")


@requirement(
    "PIPE-607",
    "copy_ MUST fill inverse indices where they lie, with their names, and clear_storage give back the memory of every "
    "part there is and say how much; batches of which one has weights MUST NOT be equal.",
)
def test_copied_and_cleared(pipeline: Any) -> None:
    mine, theirs = (_of_different_sizes(pipeline, weights) for weights in (torch.zeros(4), torch.ones(4)))
    theirs = theirs.to(torch.device("cpu"))
    theirs._inverse_indices = (["b", "a"], torch.tensor([[0, 0, 0], [1, 0, 1]]))
    kept = mine.inverse_indices()[1]
    with succeeds("copy_", where="inverse indices of the same sizes"):
        mine.copy_(theirs)
    assert_equal(kept.tolist(), [[0, 0, 0], [1, 0, 1]], where="the memory of inverse indices")
    assert_equal(mine.inverse_indices()[1] is kept, True, where="inverse indices")
    assert_equal(mine.inverse_indices()[0], ["b", "a"], where="names of inverse indices")
    bare, weighted = _of_different_sizes(pipeline), _of_different_sizes(pipeline, torch.ones(4))
    for one, other in ((bare, weighted), (weighted, bare)):
        features: Any = ((pipeline.kjt_is_equal, lambda batch: batch), (pipeline.jt_is_equal, lambda batch: batch["b"]))
        for same, of in features:
            with succeeds("a comparison", where=same.__name__):
                found = (same(of(one), of(other)), same(of(one), of(one)))
            assert_equal(found, (False, True), where=f"{same.__name__}, with and without weights")
    for batch, part_count in ((_of_different_sizes(pipeline), 2), (_of_different_sizes(pipeline, torch.ones(4)), 3)):
        parts = [part for part in _parts_of(batch) if part is not None]
        with succeeds("clear_storage", where=f"{part_count} parts"):
            size = batch.clear_storage()
        sizes = [part.untyped_storage().nbytes() for part in parts]
        # Values of 4 ids, 3 lengths and, where there are such, 4 weights.
        expected = (4 * 8 + 3 * 8 + (part_count - 2) * 4 * 4, [0] * part_count)
        assert_equal((size, sizes), expected, where=f"{part_count} parts")


@requirement(
    "PIPE-608",
    "A batch that went through a pytree MUST be the batch that it was, inverse indices and their names included, and "
    "keep them where its tensors are mapped; more parts than a batch has MUST be refused by name.",
)
def test_pytrees(pipeline: Any) -> None:
    plain = pipeline.KeyedJaggedTensor(["a", "b"], _ids(4), lengths=_ints(1, 1, 1, 1))
    for batch in (_of_different_sizes(pipeline, torch.ones(4)), plain):
        leaves, spec = pytree.tree_flatten(batch)
        strides = batch.stride_per_key()
        for made in (
            pytree.tree_unflatten(leaves, spec),
            pytree.tree_map(lambda part: None if part is None else part.clone(), batch),
        ):
            same = pipeline.kjt_is_equal(made, batch)
            assert_equal((same, made.keys(), made.stride_per_key()), (True, ["a", "b"], strides), where="parts")
            rows = made.inverse_indices_or_none()
            found = None if rows is None else (rows[0], rows[1].tolist())
            expected = None if batch is plain else (["a", "b"], [[0, 0, 0], [0, 1, 1]])
            assert_equal(found, expected, where="inverse indices")
    unflatten = pytree.SUPPORTED_NODES[pipeline.KeyedJaggedTensor].unflatten_fn
    parts = [_ids(2), None, _ints(1, 1)]
    assert_equal(unflatten(parts, [["a"], []]).length_per_key(), [2], where="the first parts alone")
    with raises(ShapeError, mentions=("more parts", "7", "6"), where="one part too many"):
        unflatten([*parts, None, None, None, None], [["a"], []])
    assert_equal(unflatten([*parts, None, None, None], [["a"], []]).length_per_key(), [2], where="all parts")


class _Foreign:
    """A batch of another library: torchrec's names, and no class of ours."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch
        self._stride_per_key_per_rank = batch._stride_per_key_per_rank

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batch, name)


@requirement(
    "PIPE-609",
    "A lookup MUST take another library's batch whose features differ in size, and jagged nested tensors whose lengths "
    "are those between their offsets, as the same batch of ours; a mapping to anything else MUST be refused by name.",
)
def test_batches_of_others(pipeline: Any) -> None:
    configs = [pipeline.EmbeddingBagConfig(9, 2, f"t{i}", feature_names=[name]) for i, name in enumerate("ab")]
    lookup = pipeline.EmbeddingBagCollection(configs)
    cut = pipeline.ShardedEmbeddingBagCollection(lookup, dict.fromkeys(("t0", "t1"), pipeline.row_wise()))
    ours = _of_different_sizes(pipeline)
    with succeeds("a lookup", where="another library's batch"):
        found = lookup(_Foreign(ours)).values()
    assert_bits(found, lookup(ours).values(), "features of different sizes")
    offsets = _ints(0, 2, 3)
    nested = torch.nested.nested_tensor_from_jagged
    expected = lookup(pipeline.KeyedJaggedTensor(["a", "b"], _ids(6), lengths=_ints(2, 1, 2, 1))).values()
    for lengths in (None, offsets.diff()):
        parts = [nested(values, offsets, lengths=lengths) for values in (_ids(6)[:3], _ids(6)[3:])]
        for name, module in (("whole", lookup), ("cut", cut)):
            with succeeds("a lookup", where=f"nested tensors, {name}"):
                found = module(dict(zip("ab", parts, strict=True))).values()
            assert_bits(found, expected, f"nested tensors, lengths={lengths}, {name}")
    for wrong in ({"a": [1, 2], "b": [3]}, {"a": parts[0], "b": _ids(3)}, {"a": None}):
        with raises(UnsupportedError, mentions=("not a batch",), where=f"{wrong}"):
            lookup(wrong)


@requirement(
    "PIPE-610",
    "Positions MUST be written over weights of any dtype that holds them, complex numbers included, and over none of a "
    "batch without ids.",
)
def test_positions(pipeline: Any) -> None:
    processors = pipeline.PositionWeightedModuleCollection({"a": 3})
    for dtype in (torch.float32, torch.float16, torch.complex64, torch.int8):
        for lengths in ([2, 1], [0, 0]):
            weights = torch.full((sum(lengths),), 7).to(dtype)
            batch = pipeline.KeyedJaggedTensor(["a"], _ids(sum(lengths)), weights, torch.tensor(lengths))
            with succeeds("positions", where=f"{dtype}, {lengths}"):
                processors.pre_process_input(batch)
            expected = torch.tensor([i for length in lengths for i in range(length)]).to(dtype)
            assert_equal(weights.tolist(), expected.tolist(), where=f"{dtype}, {lengths}")
            with succeeds("positions that nobody can see", where=f"{dtype}, {lengths}"):
                processors.pre_process_input(batch.to(torch.device("meta")))


def _made_of(pipeline: Any, batch: Any, full: Any) -> dict[str, tuple[Any, list[str]]]:
    """What can be made of a batch without features, beside one of as many samples that has some; and its features."""
    keyed, keys = pipeline.KeyedJaggedTensor, full.keys()
    return {
        "itself": (batch, []),
        "concat of one": (keyed.concat([batch]), []),
        "concat of two": (keyed.concat([batch, batch]), []),
        "concat, in front": (keyed.concat([batch, full]), keys),
        "concat, behind": (keyed.concat([full, batch]), keys),
        "split": (batch.split([0, 0])[1], []),
        "permute": (batch.permute([]), []),
        "flatten_lengths": (batch.flatten_lengths(), []),
        "to": (batch.to(torch.device("cpu")), []),
        "empty_like": (keyed.empty_like(batch), []),
        "deepcopy": (copy.deepcopy(batch), []),
        "sync": (copy.deepcopy(batch).sync().unsync(), []),
    }


@requirement(
    "PIPE-618",
    "A batch without features MUST keep its samples, with weights or none, whatever it was made by, and in all that is "
    "made of it: put together with itself or with others, cut, moved, copied, synced.",
)
def test_samples_of_no_features(pipeline: Any) -> None:
    keyed = pipeline.KeyedJaggedTensor
    for weights, by_offsets in product((None, torch.ones(3)), (False, True)):
        cut = {"offsets": _ints(0, 1, 1, 3)} if by_offsets else {"lengths": _ints(1, 0, 2)}
        full = keyed(["a"], _ids(3), weights, **cut)
        without = {
            "split": full.split([0, 1])[0],
            "permute": full.permute([]),
            "empty_like": keyed.empty_like(full),
            "samples alone": keyed([], _ids(0), None if weights is None else weights[:0], _ints(), stride=3),
        }
        for name, batch in without.items():
            with succeeds("batches", where=f"made of {name}, {list(cut)}"):
                every = _made_of(pipeline, batch, full)
            for way, (made, keys) in every.items():
                where = f"{way} of {name}, {list(cut)}, weighted={weights is not None}"
                facts = (made.stride(), made.keys(), made.stride_per_key(), made.weights_or_none() is None)
                assert_equal(facts, (3, keys, [3] * len(keys), weights is None), where=where)


@requirement(
    "PIPE-682",
    "A batch that was received from ranks in two stages MUST say how many samples came of each rank in the order in "
    "which they stand, for every number of ranks and every stagger that divides it.",
)
def test_every_stagger(pipeline: Any) -> None:
    for world_size, feature_count in product(range(1, 13), (1, 2)):
        keys = [f"f{number}" for number in range(feature_count)]
        # Samples by rank, then feature: no two alike.
        strides = torch.arange(1, world_size * feature_count + 1)
        lengths, none = torch.zeros(int(strides.sum()), dtype=torch.int64), torch.empty(0, dtype=torch.int64)
        for stagger in (n for n in range(1, world_size + 1) if world_size % n == 0):
            made = pipeline.KeyedJaggedTensor.dist_init(
                keys, [lengths, none, strides], True, world_size, None, None, stagger
            )
            each = world_size // stagger
            order = [x + each * y for x in range(each) for y in range(stagger)]
            expected = [[rank * feature_count + number + 1 for rank in order] for number in range(feature_count)]
            where = f"{world_size} ranks, {stagger}, {feature_count} features"
            assert_equal(made.stride_per_key_per_rank(), expected, where=where)
