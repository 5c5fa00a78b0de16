"""What an asynchronous save copies before training goes on."""

from __future__ import annotations

import warnings
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from conformance.checkpoint.cases import assert_loads, random_bits
from conformance.harness import (
    Rank,
    assert_equal,
    assert_same_tensor,
    assert_same_tensors,
    raises,
    requirement,
    succeeds,
)
from twinproof.checkpoint.native import NativeStorageWriter
from twinproof.errors import TwinproofError


@requirement(
    "CKPT-422",
    "An asynchronous save MUST store values, not storages: of conjugated, negated, expanded, strided and tied tensors, "
    "nested ones included, and memory that is one MUST be copied once.",
)
def test_values(checkpoint: Any, tmp_path: Path) -> None:
    whole = random_bits(torch.float32, [6, 8], 1)
    complex_ = torch.complex(torch.arange(6.0), torch.arange(6.0) - 3.5)
    state: dict[str, Any] = {
        "conjugated": complex_.conj(),
        "negated": complex_.conj().imag,
        "expanded": torch.arange(3.0).reshape(3, 1).expand(3, 5),
        "strided": whole.t()[1::2],
        "one": whole,
        "same": whole.view(6, 8),
        "parameter": torch.nn.Parameter(random_bits(torch.bfloat16, [4], 2)),
        "nested": {"list": [torch.tensor(3), torch.ones(2, 2)], "deeper": {"x": torch.zeros(0, 4)}},
    }
    names = ("nested.list.0", "nested.list.1", "nested.deeper.x")
    inner = dict(zip(names, (torch.tensor(3), torch.ones(2, 2), torch.zeros(0, 4)), strict=True))
    expected = {
        n: v.detach().clone().resolve_conj().resolve_neg() for n, v in {**state, **inner}.items() if n != "nested"
    }
    with checkpoint.HuggingFaceStorageWriter(tmp_path / "ck", durable=False) as writer:
        staged = writer.stage(state)
        assert_equal(staged["one"].data_ptr() == staged["same"].data_ptr(), True, where="tied memory")
        assert_equal(staged["one"].data_ptr() == whole.data_ptr(), False, where="memory of its own")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            future: Any = dcp.async_save(state, storage_writer=writer, no_dist=True)
            for changed in (whole, complex_, state["parameter"].data, state["nested"]["list"][1]):
                changed.fill_(0)
            future.result()
        writer.synchronize_staging()
    assert_loads(checkpoint, tmp_path / "ck", expected)


@requirement(
    "CKPT-616",
    "Views of the same memory with the same strides MUST be staged apart where their values differ: a conjugate and "
    "what it conjugates, a negation, another dtype.",
)
def test_views_of_one_memory(checkpoint: Any, tmp_path: Path) -> None:
    complex_ = torch.complex(torch.arange(6.0), torch.arange(6.0) - 3.5)
    state = {
        "complex": complex_,
        "conjugated": complex_.conj(),
        "imaginary": complex_.imag,
        "negated": complex_.conj().imag,
        "bits": complex_.imag.view(torch.int32),
    }
    expected = {name: value.clone().resolve_conj().resolve_neg() for name, value in state.items()}
    for names in (list(state), list(state)[::-1]):
        with checkpoint.HuggingFaceStorageWriter(tmp_path / names[0], durable=False) as writer:
            staged = writer.stage({name: state[name] for name in names})
        dtypes = {name: value.dtype for name, value in staged.items()}
        assert_equal(dtypes, {name: state[name].dtype for name in names}, where="dtypes")
        found = {name: value.resolve_conj().resolve_neg().contiguous() for name, value in staged.items()}
        assert_same_tensors(found, {name: expected[name].contiguous() for name in names}, where="values")


@requirement(
    "CKPT-620",
    "Views that begin at the same memory MUST be staged apart where they differ in strides or in shape: a square "
    "matrix and its transpose, a row, a column, one number repeated.",
)
def test_other_views_of_one_memory(checkpoint: Any, tmp_path: Path) -> None:
    square = torch.arange(9.0).reshape(3, 3)
    state = {
        "square": square,
        "transpose": square.t(),
        "row": square[0],
        "column": square[:, 0],
        "repeated": square[0, :1].expand(3),
        "rows": square[:2],
    }
    for names in (list(state), list(state)[::-1]):
        with checkpoint.HuggingFaceStorageWriter(tmp_path / names[0]) as writer:
            staged = writer.stage({name: state[name] for name in names})
        found = {name: value.contiguous() for name, value in staged.items()}
        assert_same_tensors(found, {name: state[name].contiguous() for name in names}, where="values")


def _refused(rank: Rank, path: str, kind: str) -> None:
    checkpoint = rank.component("checkpoint")
    bad = {"meta": torch.empty(3, device="meta"), "sparse": torch.eye(3).to_sparse(), "object": [1, 2]}[kind]
    # A replica without memory harms nothing: another rank's is stored. This one stands on the last rank alone.
    state = {"w": torch.ones(2)} | ({"x": bad} if rank.rank == rank.world_size - 1 else {})
    group = dist.new_group(backend="gloo")
    with checkpoint.HuggingFaceStorageWriter(path) as writer:
        future: Any = dcp.async_save(state, storage_writer=writer, process_group=group)
        with raises(TwinproofError, mentions=["x"], where=f"a {kind} leaf on the last rank"):
            future.result()
    assert_equal(Path(path).exists(), False, where="nothing is written")


@requirement(
    "CKPT-423",
    "What the format cannot hold, on one rank of an asynchronous save, MUST be a named error on every rank, and never "
    "be staged as unfilled memory.",
)
def test_refusals(checkpoint: Any, rank_pool: Any, tmp_path: Path) -> None:
    for rank_count in (1, 2):
        for kind in ("meta", "sparse", "object"):
            rank_pool.run(_refused, rank_count, str(tmp_path / f"{kind}{rank_count}"), kind)


@requirement(
    "CKPT-845",
    "A manager's asynchronous save MUST copy tensors of any layout when it is called: sparse, compressed, jagged and "
    "quantized ones, which torch's format holds; meta tensors, of which there is no copy, MUST be handed on.",
)
@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:torch.quantize", "ignore:The PyTorch API of nested")
def test_other_layouts(tmp_path: Path) -> None:
    whole = torch.eye(3)
    state: dict[str, Any] = {
        "sparse": whole.to_sparse(),
        "compressed": whole.to_sparse_csr(),
        "quantized": torch.quantize_per_tensor(whole, 0.5, 0, torch.qint8),
        "jagged": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    }
    values: dict[str, Any] = {
        "sparse": lambda each: each.coalesce().values(),
        "compressed": lambda each: each.values(),
        "quantized": lambda each: each.int_repr(),
        "jagged": lambda each: each.values(),
    }
    before = {name: values[name](value).clone() for name, value in state.items()}
    meta = torch.empty(3, device="meta")
    with succeeds("a copy", where="meta beside others"):
        staged = NativeStorageWriter(tmp_path / "ck").stage({**state, "meta": meta})
    for name, value in state.items():
        changed = value if name == "quantized" else values[name](value)
        changed.copy_(torch.zeros(3, 3)) if name == "quantized" else changed.zero_()
        assert_equal(torch.equal(values[name](value), before[name]), False, where=f"{name}: a change")
        assert_equal((type(staged[name]), staged[name].layout), (type(value), value.layout), where=name)
        assert_same_tensor(values[name](staged[name]), before[name], where=name)
    assert_equal(staged["meta"] is meta, True, where="meta")


class _Queue(deque[Any]):
    """An object of the user's that holds others."""

    def __init__(self, *values: Any) -> None:
        super().__init__(values)
        self.seen = {"by": [1, 2]}


def _told(objects: Any) -> list[str]:
    return [repr(objects), repr(objects["a queue"].seen)]


@requirement(
    "CKPT-991",
    "A manager's asynchronous save MUST copy objects when it is called, with all that they hold, however deep: none of "
    "it changes with what training does to them.",
)
def test_objects(tmp_path: Path) -> None:
    objects: dict[str, Any] = {
        "a queue": _Queue([1, [2, 3]], {"x": [4]}),
        "a mapping": {"wiki": [3]},
        "a set": {1, 2},
        "in lists": [1, [_Queue([5])], (6, [7])],
    }
    expected = _told(objects)
    staged = NativeStorageWriter(tmp_path / "ck").stage(objects)
    assert_equal(_told(staged), expected, where="what was copied")
    objects["a queue"][0][1].append(0)
    objects["a queue"][1]["x"].clear()
    objects["a queue"].seen["by"].append(3)
    objects["a mapping"]["wiki"].append(0)
    objects["a set"].add(3)
    objects["in lists"][1][0][0].append(0)
    objects["in lists"][2][1].append(0)
    assert_equal(_told(objects) == expected, False, where="what changed")
    assert_equal(_told(staged), expected, where="what was copied, behind the changes")
