"""Parts of cut tables as torch's own saves have them: read by ``torch.load``, and copied for asynchronous saves."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import save, save_file
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


PLACES: dict[str, Any] = {
    "none": None,
    "a name": "cpu",
    "a device": torch.device("cpu"),
    "a dictionary": {"cpu": "cpu"},
    "a function": lambda storage, _: storage,
    "a function of nothing": lambda *_: None,
    "elsewhere": "meta",
}


@requirement(
    "PIPE-744",
    "A part of a table that torch.save or pickle has written MUST be read with any ``map_location`` of torch.load, a "
    "function too, whatever ``weights_only`` is: its place, shape and dtype, and the values where they were sent.",
)
@pytest.mark.parametrize("is_held", [True, False])
def test_any_place(pipeline: Any, is_held: bool) -> None:
    values = torch.arange(6.0, dtype=torch.bfloat16).reshape(3, 2)
    part = TableShard.make((9, 4), torch.bfloat16, values if is_held else None, (6, 2) if is_held else (0, 0))
    file = io.BytesIO()
    torch.save({"part": part}, file)

    def read(place: Any, weights_only: bool) -> Any:
        file.seek(0)
        return torch.load(file, map_location=place, weights_only=weights_only)["part"]

    found: dict[str, Any] = {}
    for where, place in PLACES.items():
        for weights_only in (True, False):
            with succeeds("torch.load", where=f"{where}, {weights_only}"):
                found[f"{where}, {weights_only}"] = read(place, weights_only)
    with succeeds("pickle", where="a part"):
        found["pickle"] = pickle.loads(pickle.dumps(part))
    for where, got in found.items():
        assert_equal((type(got), repr(got)), (TableShard, repr(part)), where=where)
        if is_held and where.startswith("elsewhere"):
            assert_equal(got.to_local().is_meta, True, where=where)
        elif is_held:
            assert_same_tensor(got.to_local(), values, where=where)


@requirement(
    "PIPE-745",
    "Memory of a part of a table that somebody asks for as that of a whole tensor, as savers of safetensors do, MUST "
    "be refused by a named error that says what to save instead; so MUST values that are put in the part's place.",
)
def test_no_storage(pipeline: Any) -> None:
    local = torch.ones(3, 2)
    part = TableShard.make((9, 4), torch.float32, local, (6, 2))
    asked: dict[str, Callable[[], Any]] = {
        "untyped_storage": part.untyped_storage,
        "storage": part.storage,
        "share_memory_": part.share_memory_,
        "is_shared": part.is_shared,
        "dlpack": part.__dlpack__,
        "save_file": lambda: save_file({"part": part}, "/nowhere"),
        "save": lambda: save({"part": part}),
    }
    for where, ask in asked.items():
        with raises(UnsupportedError, mentions=("to_local()", "torch.distributed.checkpoint"), where=where):
            ask()
    with raises(UnsupportedError, mentions=("load_state_dict", "to_local()"), where="data ="):
        part.data = torch.zeros(9, 4)
    with succeeds("data", where="a part"):
        assert_equal(repr(part.data), repr(part), where="data")
    assert_same_tensor(part.to_local(), torch.ones(3, 2), where="the part")


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
