"""F. Batches without bags: of features of no samples, however it is said; and what is made of no features at all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from conformance.harness import assert_equal, raises, requirement, succeeds
from conformance.pipeline.batches import values_of
from conformance.pipeline.model import assert_bits, lookups_of
from conformance.pipeline.sharding import collection_of, sharded_of
from twinproof.errors import ConfigError

FEATURES = ["a", "b"]


def _ints(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def _batches(pipeline: Any, weights: torch.Tensor | None = None) -> dict[str, Any]:
    """Two features of no samples, by every way to say it."""
    none, sizes = _ints(), {"stride_per_key_per_rank": [[0], [0]]}
    cuts: dict[str, dict[str, Any]] = {
        "lengths": {"lengths": none},
        "lengths of two dimensions": {"lengths": none.reshape(2, 0)},
        "offsets": {"offsets": _ints(0)},
        "offsets without elements": {"offsets": none},
        "both": {"lengths": none, "offsets": _ints(0)},
        "both without elements": {"lengths": none, "offsets": none},
        "a stride of 0": {"lengths": none, "stride": 0},
        "sizes by rank": {"lengths": none, **sizes},
        "sizes by rank, offsets without elements": {"offsets": none, **sizes},
        "inverse indices": {"lengths": none, **sizes, "inverse_indices": (FEATURES, torch.zeros(2, 0).long())},
    }
    return {name: pipeline.KeyedJaggedTensor(FEATURES, none, weights, **cut) for name, cut in cuts.items()}


def _said_of(batch: Any) -> dict[str, Any]:
    """What a batch of two features says of itself and of its parts."""
    parts = {"itself": batch, "split": batch.split([1, 1])[1], "permute": batch.permute([1, 0])}
    facts: dict[str, Any] = {
        "stride": batch.stride(),
        "length_per_key": batch.length_per_key(),
        "offset_per_key": batch.offset_per_key(),
        "lengths_offset_per_key": batch.lengths_offset_per_key(),
    }
    for name, part in {**parts, "by name": batch["a"], "to_dict": batch.to_dict()["b"]}.items():
        facts[name] = (part.lengths().numel(), part.values().numel(), part.bags().offsets.tolist())
    bags = batch["b"]
    return {**facts, "offsets by name": bags.offsets().tolist(), "to_dense": (bags.to_dense(), bags.to_dense_weights())}


@requirement(
    "PIPE-630",
    "A batch whose features have no samples MUST say so, cut and put in order too, however it was made: lengths of "
    "none, sizes and sums of 0, and to whoever looks up the one offset 0.",
)
@pytest.mark.parametrize("weighted", [False, True])
def test_no_samples(pipeline: Any, weighted: bool) -> None:
    weights = torch.empty(0) if weighted else None
    same = dict.fromkeys(("itself", "split", "permute", "by name", "to_dict"), (0, 0, [0]))
    expected = {
        "stride": 0,
        "length_per_key": [0, 0],
        "offset_per_key": [0, 0, 0],
        "lengths_offset_per_key": [0, 0, 0],
        **same,
        "offsets by name": [0],
        "to_dense": ([], [] if weighted else None),
    }
    for name, batch in _batches(pipeline, weights).items():
        with succeeds("questions", where=name):
            found = _said_of(batch)
        assert_equal(found, expected, where=name)
    for name, bags in {"offsets": {"offsets": _ints()}, "lengths": {"lengths": _ints()}}.items():
        with succeeds("bags", where=f"of one feature, {name}"):
            alone = pipeline.JaggedTensor(_ints(), weights, **bags).bags()
        assert_equal(alone.offsets.tolist(), [0], where=f"of one feature, {name}")


@requirement(
    "PIPE-631",
    "Bags of one feature that there are none of MUST be padded to no rows: as wide as is asked for, else of no width, "
    "weights as values.",
)
def test_none_padded(pipeline: Any) -> None:
    for columns in ((), (3,)):
        values = torch.empty(0, *columns)
        for name, cut in {"lengths": {"lengths": _ints()}, "offsets": {"offsets": _ints(0)}}.items():
            bags = pipeline.JaggedTensor(values, values, **cut)
            for width in (None, 0, 2):
                where = f"{name}, columns {columns}, {width} wide"
                with succeeds("a padded tensor", where=where):
                    found = (bags.to_padded_dense(width), bags.to_padded_dense_weights(width))
                assert_equal([tuple(part.shape) for part in found], [(0, width or 0, *columns)] * 2, where=where)


def _lookups(pipeline: Any, *, is_weighted: bool) -> Iterator[tuple[str, Any]]:
    """Every module that looks a batch up, as it is, and in the hands of torch's tools; each is made in its turn."""
    pooled = [
        pipeline.EmbeddingBagConfig(6, 4, "t", feature_names=FEATURES),
        pipeline.EmbeddingBagConfig(6, 3, "u", feature_names=["a"]),
    ]
    weights = [values_of((6, 4), 1), values_of((6, 3), 2)]
    bags = collection_of(pipeline, pooled, weights, is_weighted=is_weighted)
    rows = pipeline.EmbeddingCollection([pipeline.EmbeddingConfig(6, 4, "t", feature_names=FEATURES)])
    plan = {"t": pipeline.row_wise(), "u": pipeline.table_wise(0)}
    yield "sharded", sharded_of(pipeline, bags, plan, "sgd", device="cpu")
    lookups = lookups_of(pipeline, pooled, weights)
    yield "table-batched", lambda batch: _Values(lookups(batch.values(), _ints(0), batch.weights_or_none()))
    whole = {"bags": bags} if is_weighted else {"bags": bags, "rows": rows}
    script: Any = torch.jit.script
    for way, make in {"itself": lambda module: module, "fx": torch.fx.symbolic_trace, "script": script}.items():
        yield from ((f"{name}, {way}", make(module)) for name, module in whole.items())


@dataclass(frozen=True)
class _Values:
    """What is pooled, as a collection gives it."""

    pooled: torch.Tensor

    def values(self) -> torch.Tensor:
        """Itself."""
        return self.pooled


def _shapes(result: Any) -> Any:
    if isinstance(result, dict):
        return {name: (tuple(part.values().shape), part.lengths().numel()) for name, part in result.items()}
    return tuple(result.values().shape)


@requirement(
    "PIPE-632",
    "A lookup of a batch whose features have no samples MUST be of no rows, by every module, as it is, traced by "
    "torch.fx and compiled by TorchScript.",
)
@pytest.mark.filterwarnings("ignore")  # TorchScript warns of its own age.
@pytest.mark.parametrize("weighted", [False, True])
def test_traced_without_bags(pipeline: Any, weighted: bool) -> None:
    weights = torch.empty(0) if weighted else None
    for kind, module in _lookups(pipeline, is_weighted=weighted):
        expected: Any = dict.fromkeys(FEATURES, ((0, 4), 0)) if "rows" in kind else (0, 11)
        for name, batch in _batches(pipeline, weights).items():
            with succeeds("a lookup", where=f"{kind}, {name}"):
                found = _shapes(module(batch))
            assert_equal(found, expected, where=f"{kind}, {name}")


@requirement(
    "PIPE-633",
    "A dictionary without features MUST be refused as a batch by an error that says what to make instead, and so MUST "
    "one of features with and without weights.",
)
def test_dictionaries_of_nothing(pipeline: Any) -> None:
    bags, keyed = pipeline.JaggedTensor, pipeline.KeyedJaggedTensor
    with raises(ConfigError, mentions=("no features", "KeyedJaggedTensor.empty()")):
        keyed.from_jt_dict({})
    plain = bags(_ints(1, 2), lengths=_ints(2))
    weighted = bags(_ints(3), torch.ones(1), _ints(1))
    for given in ({"a": plain, "b": weighted}, {"a": weighted, "b": plain}):
        with raises(ConfigError, mentions=("some features have weights",), where=str(list(given))):
            keyed.from_jt_dict(given)
    for part in (plain, weighted):
        with succeeds("a batch", where="one feature"):
            made = keyed.from_jt_dict({"a": part})
        assert_bits(made.values(), part.values(), "one feature")
        assert_equal(made.weights_or_none() is None, part is plain, where="weights of one feature")
