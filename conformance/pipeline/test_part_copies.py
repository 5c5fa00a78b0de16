"""Parts of cut tables as torch's own saves have them: read by ``torch.load``, and copied for asynchronous saves."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions

from conformance.harness import assert_equal, assert_same_tensor, raises, requirement, succeeds
from twinproof.errors import ShapeError, UnsupportedError
from twinproof.pipeline.sharded import TableShard


@requirement(
    "PIPE-666",
    "What state dicts of cut tables hold MUST be read by torch.load as it is by default, each part as it was.",
)
def test_saved_by_torch(pipeline: Any) -> None:
    tables = [pipeline.EmbeddingBagConfig(9, 4, "one"), pipeline.EmbeddingBagConfig(5, 2, "two")]
    collection = pipeline.EmbeddingBagCollection(tables)
    plan = {"one": pipeline.row_wise(), "two": pipeline.table_wise(0)}
    sharded = pipeline.ShardedEmbeddingBagCollection(collection, plan)
    state, file = {**sharded.state_dict(), **sharded.optimizer_state_dict()}, io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    with succeeds("torch.load", where="a state dict"):
        found = torch.load(file)
    assert_equal(list(found), list(state), where="names")
    for name, value in found.items():
        assert_equal((type(value), repr(value)), (type(state[name]), repr(state[name])), where=name)
    expected = [weight.clone() for weight in sharded.local_weights()]
    for weight in sharded.local_weights():
        weight.zero_()
    sharded.load_state_dict({name: value for name, value in found.items() if name in sharded.state_dict()})
    for got, weight in zip(sharded.local_weights(), expected, strict=True):
        assert_same_tensor(got, weight, where="a table that was loaded")


def _staged(part: Any) -> dict[str, Any]:
    """The copies that torch's own asynchronous saves write, and one that somebody keeps."""
    options = StagingOptions(False, False, False, False)
    stagers: dict[str, Any] = {"blocking": BlockingAsyncStager(), "default": DefaultStager(options)}
    found = {name: stager.stage({"part": part})["part"] for name, stager in stagers.items()}
    return {**found, "clone": part.clone()}


@requirement(
    "PIPE-667",
    "A part of a table MUST be copied by torch's stagers of asynchronous saves and by clone(), place and absence too, "
    "and the copies MUST stay as they are when the table is written.",
)
@pytest.mark.parametrize("is_held", [True, False])
def test_copies_of_parts(pipeline: Any, is_held: bool) -> None:
    local = torch.arange(6.0).reshape(3, 2) if is_held else None
    part = TableShard.make((9, 4), torch.float32, local, (6, 2) if is_held else (0, 0))
    found: dict[str, Any] = {}
    with succeeds("copies", where="a part"):
        found = _staged(part)
    assert_equal(sorted(found), ["blocking", "clone", "default"], where="copies")
    if local is not None:
        local.zero_()
    for name, copied in found.items():
        assert_equal((type(copied), repr(copied)), (TableShard, repr(part)), where=name)
        if is_held:
            assert_same_tensor(copied.to_local(), torch.arange(6.0).reshape(3, 2), where=name)
    # Another shape, or another part, is nothing that can be made of it.
    other = TableShard.make((9, 4), torch.float32, torch.ones(3, 2), (0, 2))
    with raises(ShapeError, mentions=("another place",), where="a copy of another part"):
        other.copy_(TableShard.make((9, 4), torch.float32, torch.ones(3, 2), (6, 2)))
    with raises(UnsupportedError, mentions=("to_local",), where="other sizes"):
        part.new_empty((2, 2))
    with raises(UnsupportedError, mentions=("to_local",), where="a whole table into a part"):
        part.copy_(torch.ones(9, 4))
    with raises(UnsupportedError, mentions=("to_local",), where="a part into a whole table"):
        torch.ones(9, 4).copy_(part)


@requirement(
    "PIPE-646",
    "Memory for a part of a table that is asked for in another dtype MUST be refused by name, and not be of the "
    "part's own without a word.",
)
def test_other_dtypes(pipeline: Any) -> None:
    part: Any = TableShard.make((9, 4), torch.float32, torch.ones(3, 2), (6, 2))
    for where, make in (("zeros_like", torch.zeros_like), ("new_empty", lambda of, **o: of.new_empty((9, 4), **o))):
        for dtype in (None, torch.float32):
            with succeeds("memory for a part", where=f"{where}, {dtype}"):
                assert_equal(make(part, dtype=dtype).dtype, torch.float32, where=f"{where}, {dtype}")
        with raises(UnsupportedError, mentions=("to_local",), where=f"{where} of another dtype"):
            make(part, dtype=torch.float64)
