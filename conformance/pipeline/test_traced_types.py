"""F. The batch types under torch's tools: pytrees, torch.fx, TorchScript, torch.jit.trace, meta."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree

from conformance.harness import assert_equal, raises, requirement, succeeds
from conformance.pipeline.batches import as_lists, random_jagged, values_of
from conformance.pipeline.model import assert_bits
from conformance.pipeline.scripted import Asked, Cuts, Pooled
from twinproof.errors import ShapeError


@requirement(
    "PIPE-206",
    "The batch types MUST be nodes of torch's pytrees: their tensors are leaves by name, a map over them gives the "
    "same type with the same features, and leaves may be anything while they are mapped.",
)
def test_pytrees(pipeline: Any) -> None:
    plain = random_jagged(["a", "b"], [9, 9], 3, 1, weighted=True).kjt(pipeline)
    inverse = (["b", "a"], torch.zeros(2, 4, dtype=torch.int64))
    sizes = {"stride_per_key_per_rank": [[4], [2]], "inverse_indices": inverse}
    variable = pipeline.KeyedJaggedTensor(["a", "b"], plain.values(), plain.weights(), plain.lengths(), **sizes)
    for kjt in (plain, variable):
        leaves, spec = pytree.tree_flatten({"x": [kjt]})
        assert_equal(sum(leaf is kjt.values() for leaf in leaves), 1, where="values are a leaf")
        back = pytree.tree_unflatten(leaves, spec)["x"][0]
        assert_equal(as_lists(back.permute([1, 0])), as_lists(kjt.permute([1, 0])), where="features")
        assert_equal(back.stride_per_key_per_rank(), kjt.stride_per_key_per_rank(), where="sizes")
        names = [each and each[0] for each in (back.inverse_indices_or_none(), kjt.inverse_indices_or_none())]
        assert_equal(names[0], names[1], where="names of inverse indices")
    moved = pytree.tree_map_only(torch.Tensor, lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, plain)
    assert_bits(moved["b"].weights(), plain["b"].weights().double(), "a map")
    marks = pytree.tree_map(lambda leaf: "mark", plain)
    assert_equal((type(marks), marks.keys(), marks.values()), (type(plain), ["a", "b"], "mark"), where="other leaves")
    named = {str(path[0]): leaf for path, leaf in pytree.tree_flatten_with_path(plain)[0]}
    assert_bits(named["._weights"], plain.weights(), "a leaf by name")
    leaves, spec = pytree.tree_flatten(plain)
    with raises((ShapeError, ValueError)):
        pytree.tree_unflatten([*leaves, *leaves], spec)
    bags = pytree.tree_map_only(torch.Tensor, lambda leaf: leaf * 1, plain["a"])
    assert_equal([part.tolist() for part in bags.to_dense()], [p.tolist() for p in plain["a"].to_dense()], where="bags")
    pooled = pipeline.KeyedTensor(["a", "b"], [1, 2], values_of((2, 3), 1))
    assert_bits(pytree.tree_map(lambda leaf: leaf + 1, pooled)["b"], pooled["b"] + 1, "columns")
    turned = pipeline.KeyedTensor(["a"], [2], values_of((2, 3), 1), 0)
    assert_equal(pytree.tree_map(lambda leaf: leaf, turned).key_dim(), 0, where="key_dim")


def _batch(pipeline: Any, seed: int, stride: int) -> Any:
    return random_jagged(["a", "b"], [9, 9], stride, seed, weighted=True).kjt(pipeline, dtype=torch.int32)


@requirement(
    "PIPE-207",
    "A model that takes, makes, cuts and returns the batch types MUST be traced by torch.fx and scripted by "
    "TorchScript, and then give for other batches what it gives untouched.",
)
@pytest.mark.filterwarnings("ignore")  # TorchScript warns of its own age.
@pytest.mark.parametrize("kind", ["fx", "script", "fx, then script"])
def test_traced(pipeline: Any, kind: str) -> None:
    model: Any = Cuts()
    traced = torch.fx.symbolic_trace(model) if "fx" in kind else model
    traced = torch.jit.script(traced) if "script" in kind else traced
    for seed, stride in ((1, 3), (2, 5)):
        kjt = _batch(pipeline, seed, stride)
        found, expected = traced(kjt), model(kjt)
        for name in ("values", "weights", "lengths", "offsets"):
            assert_bits(getattr(found, name)(), getattr(expected, name)(), f"{kind} {name}")
        assert_equal((found.keys(), found.length_per_key()), (expected.keys(), expected.length_per_key()), where=kind)


@requirement(
    "PIPE-214",
    "Pooled columns MUST be regrouped by a model that torch.fx has traced or TorchScript compiled, as by the model "
    "itself, and a batch on meta MUST have shapes without being read.",
)
@pytest.mark.filterwarnings("ignore")  # TorchScript warns of its own age.
def test_pooled_and_meta(pipeline: Any) -> None:
    pooled = [
        pipeline.KeyedTensor(["a", "b"], [1, 2], values_of((2, 3), 1)),
        pipeline.KeyedTensor(["c"], [2], values_of((2, 2), 2)),
    ]
    model: Any = Pooled()
    expected = model(pooled)
    for kind, traced in (("script", torch.jit.script(model)), ("fx", torch.fx.symbolic_trace(model))):
        found = traced(pooled)
        assert_equal(sorted(found), sorted(expected), where=kind)
        for name, columns in expected.items():
            assert_bits(found[name], columns, f"{kind} {name}")
    kjt = _batch(pipeline, 3, 2).to(torch.device("meta"))
    whole = kjt.values().numel()
    assert_equal((kjt.device().type, sum(kjt.unsync().length_per_key())), ("meta", whole), where="meta")
    assert_equal([part.keys() for part in kjt.split([1, 1])], [["a"], ["b"]], where="split on meta")
    assert_equal(kjt.permute([1, 0]).values().shape, kjt.values().shape, where="permute on meta")


@requirement(
    "PIPE-216",
    "A model that cuts a batch by name MUST be traced by torch.jit.trace with one number of samples and run with "
    "others.",
)
@pytest.mark.filterwarnings("ignore")  # The tracer warns of every host read.
def test_jit_traced(pipeline: Any) -> None:
    def lengths_of_a(offsets: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        kjt = pipeline.KeyedJaggedTensor.from_offsets_sync(["a", "b"], values, offsets)
        found: torch.Tensor = kjt["a"].lengths()
        return found

    trace: Any = torch.jit.trace
    traced = trace(lengths_of_a, (torch.tensor([0, 2, 3]), torch.arange(3)))
    found = traced(torch.tensor([0, 2, 2, 3, 4, 6, 8]), torch.arange(8))
    assert_equal(found.tolist(), [2, 0, 1], where="lengths of more samples")


def _numbers_of(answer: Any) -> Any:
    """An answer of ``Asked``, as Python has it."""
    sizes, dense, texts, batches = answer
    tensors = [[part.tolist() for part in parts] for parts in dense]
    names = ("keys", "length_per_key", "stride_per_key", "stride_per_key_per_rank")
    made = [[getattr(batch, name)() for name in names] for batch in batches]
    return sizes, tensors, texts, made, [(batch.values().tolist(), batch.lengths().tolist()) for batch in batches]


@pytest.fixture(scope="module")
def compiled() -> None:
    """Classes are compiled once in a process: here, as they are, before a planted bug changes what Python runs."""
    torch.jit.script(Asked())


@requirement(
    "PIPE-636",
    "A scripted model MUST be answered as the model itself by batches whose lengths, offsets, sizes by rank and orders "
    "of receipt are integers of any dtype: sizes, dense bags, texts, batches put together, received and of a "
    "dictionary.",
)
@pytest.mark.filterwarnings("ignore")  # TorchScript warns of its own age.
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("variable", [False, True])
@pytest.mark.parametrize("by_offsets", [False, True])
def test_scripted_integers(pipeline: Any, by_offsets: bool, variable: bool) -> None:
    model: Any = Asked()
    scripted: Any = torch.jit.script(model)
    values, weights = torch.arange(4), torch.arange(4) * 2
    for dtype in (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8):
        counts = torch.tensor([1, 3, 0] if variable else [1, 0, 2, 1], dtype=dtype)
        ends = torch.cat([counts.new_zeros(1), counts.cumsum(0).to(dtype)])
        cut = {"offsets": ends} if by_offsets else {"lengths": counts}
        if variable:
            cut["stride_per_key_per_rank"] = torch.tensor([[1], [2]], dtype=dtype)
        batch = pipeline.KeyedJaggedTensor(["a", "b"], values, weights, **cut)
        bags = pipeline.JaggedTensor(values, weights, **{k: v for k, v in cut.items() if k in ("lengths", "offsets")})
        recat = torch.tensor([1, 0], dtype=torch.int32 if dtype == torch.uint8 else dtype)
        expected = _numbers_of(model(batch, bags, recat))
        with succeeds("a scripted model", where=str(dtype)):
            found = _numbers_of(scripted(batch, bags, recat))
        assert_equal(found, expected, where=str(dtype))
