"""Plans that torch's default planners do not make, and targets and look-ups of other kinds than theirs."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

from conformance.checkpoint.cases import (
    FILE,
    INDEX,
    PT,
    Tiled,
    assert_loads,
    load,
    load_with,
    oracle,
    save,
    save_ranks,
    zeros_like,
)
from conformance.checkpoint.trainer import alone
from conformance.harness import (
    Rank,
    assert_equal,
    assert_same_bytes,
    assert_same_tensor,
    assert_same_tensors,
    raises,
    requirement,
    succeeds,
)
from conformance.harness.raising import errors_inside
from twinproof.errors import FormatError, MissingKeyError, PlanError, TwinproofError, UnsupportedError

NEEDS = ("staged_copies",)
STATE = {"w": torch.arange(6.0).view(2, 3), "s": torch.tensor(3), "e": torch.empty(0, 2)}


class _Changed(DefaultSavePlanner):
    """Changes each item of the plan."""

    def __init__(self, change: Callable[[WriteItem], WriteItem]) -> None:
        super().__init__()
        self.change = change

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        return replace(plan, items=[self.change(item) for item in plan.items])


class _Own(SavePlanner):
    """Asks a default planner for everything, and is none itself."""

    def __init__(self) -> None:
        self.inner = DefaultSavePlanner()

    def set_up_planner(
        self, state_dict: Any, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        self.inner.set_up_planner(state_dict, storage_meta, is_coordinator)

    def create_local_plan(self) -> SavePlan:
        return self.inner.create_local_plan()

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return self.inner.create_global_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return self.inner.finish_plan(new_plan)

    def resolve_data(self, write_item: WriteItem) -> Any:
        return self.inner.resolve_data(write_item)


def _without_offset(item: WriteItem) -> WriteItem:
    return replace(item, index=MetadataIndex(item.index.fqn))


@requirement(
    "CKPT-769",
    "A planner whose items do not say in their index where they lie, and one that is not derived from torch's default "
    "one, MUST save what the default one saves, into every layout, with checksums and with compared replicas.",
)
def test_other_planners(checkpoint: Any, tmp_path: Path) -> None:
    makers: dict[str, Callable[[], SavePlanner]] = {
        "no offsets": lambda: _Changed(_without_offset),
        "of its own": _Own,
    }
    kinds: tuple[dict[str, Any], ...] = (
        {},
        {"checksums": True},
        {"check_replicas": True},
        {"enable_consolidation": False},
    )
    for number, options in enumerate(kinds):
        save(checkpoint, STATE, tmp_path / f"{number}", **options)
        for what, make in makers.items():
            where, folder = f"{what}, {options}", tmp_path / f"{what} {number}"
            with succeeds("a save and a load", where=where):
                save(checkpoint, STATE, folder, planner=make(), **options)
                assert_loads(checkpoint, folder, STATE)
            found, wanted = (sorted(path.iterdir()) for path in (folder, tmp_path / f"{number}"))
            assert_equal([path.name for path in found], [path.name for path in wanted], where=f"{where}: files")
            for one, other in zip(found, wanted, strict=True):
                assert_same_bytes(one, other.read_bytes(), where=f"{where}: {one.name}")


class _Placeholder(DefaultSavePlanner):
    """Gives nothing for a plan that it says it gave before, and knows the plan of all ranks."""

    global_plan: list[SavePlan] = []  # noqa: RUF012

    def create_local_plan(self) -> SavePlan:
        self.global_plan = [super().create_local_plan()]
        return SavePlan([], usable=False)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return super().create_global_plan(self.global_plan)


class _OfTwoSizes(Tiled):
    """Says of its second part that the whole is longer."""

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        items = super().__create_write_items__(fqn, object)
        data = items[1].tensor_data
        assert data is not None
        return [items[0], replace(items[1], tensor_data=replace(data, size=torch.Size([9])))]


def _halves(kind: type[Tiled]) -> Tiled:
    made: Any = Tiled.of((4,), {(0,): torch.ones(2), (2,): torch.zeros(2)}, torch.float32)
    made.__class__ = kind
    result: Tiled = made
    return result


@requirement(
    "CKPT-770",
    "Plans that cannot be stored MUST be refused by name: an item that says nothing of its tensor, parts of one tensor "
    "that disagree about its size, several parts in a shard file, and replicas of which nothing is known.",
)
def test_plans_that_cannot_be_stored(checkpoint: Any, tmp_path: Path) -> None:
    cases: dict[str, tuple[Any, SavePlanner | None, dict[str, Any], type[TwinproofError], str]] = {
        "no tensor data": (
            STATE["w"],
            _Changed(lambda item: replace(item, tensor_data=None)),
            {},
            UnsupportedError,
            "tensors only",
        ),
        "two sizes": (_halves(_OfTwoSizes), None, {}, PlanError, "disagree about a tensor"),
        "two parts": (_halves(Tiled), None, {"enable_consolidation": False}, PlanError, "one chunk of a tensor"),
        "a placeholder": (STATE["w"], _Placeholder(), {"check_replicas": True}, PlanError, "replicas of this rank"),
    }
    for where, (value, planner, options, error, said) in cases.items():
        with raises(error, mentions=(said,), where=where):
            save(checkpoint, {"w": value}, tmp_path / "ck", planner=planner, **options)
        assert_equal(list(tmp_path.iterdir()), [], where=f"what is left after {where}")
    for where, options in (("parts", {}), ("a mapping", {"fqn_to_index_mapping": {"w": 1}})):
        with succeeds("a save", where=where):
            save(checkpoint, {"w": _halves(Tiled)}, tmp_path / where, **options)
        assert_same_bytes(tmp_path / where / FILE, oracle({"w": torch.tensor([1.0, 1, 0, 0])}, PT), where=where)


def _without_dense_memory(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    zeros = torch.zeros(3, 4, dtype=dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*quantized tensor creation|Sparse CSR")
        return {
            "sparse": zeros.to_sparse(),
            "rows": zeros.to_sparse_csr(),
            "quantized": torch.quantize_per_tensor(zeros.float(), 0.1, 0, torch.qint8),
        }


@requirement(
    "CKPT-771",
    "A target without dense memory MUST be refused by name before anything is filled, sparse or quantized, by a load "
    "that converts too, and by the reader of quantized weights.",
)
@pytest.mark.parametrize("kind", ["plain", "cast", "weights"])
def test_targets_without_dense_memory(checkpoint: Any, tmp_path: Path, kind: str) -> None:
    values = {"w.weight": torch.ones(3, 4).to(torch.float8_e4m3fn), "w.weight_scale_inv": torch.ones(1, 1)}
    state = values if kind == "weights" else {"w.weight": torch.ones(3, 4)}
    checkpoint.save_file({**state, "other": torch.ones(2)}, tmp_path / "f.safetensors")
    for dtype in (torch.float32, torch.float64) if kind == "cast" else (torch.float32,):
        for where, target in _without_dense_memory(dtype).items():
            if kind == "weights":
                reader = checkpoint.QuantizedHuggingFaceStorageReader(tmp_path / "f.safetensors")
            else:
                reader = checkpoint.HuggingFaceStorageReader(tmp_path / "f.safetensors", cast=kind == "cast")
            other = torch.zeros(2)
            is_no_float = kind == "weights" and where == "quantized"
            said = "is read as floating point" if is_no_float else "without dense memory"
            with raises(UnsupportedError, mentions=(said, "w.weight"), where=f"{where} of {dtype}"):
                load_with(reader, {"other": other, "w.weight": target})
            assert_same_tensor(other, torch.zeros(2), where=f"another target beside {where}")


@requirement(
    "CKPT-772",
    "HuggingFaceLoadPlanner MUST load what torch's format holds beside tensors as torch's planner does, into a target "
    "that is a tensor too, and a checkpoint's scales that no values go with MUST be read as they are.",
)
def test_what_is_no_tensor(checkpoint: Any, tmp_path: Path) -> None:
    with alone():
        dcp.save({"w": torch.ones(2), "n": 5}, checkpoint_id=tmp_path / "torch")
    target: Any
    for target in (0, "text", torch.zeros(3)):
        state = {"w": torch.zeros(2), "n": target}
        with alone(), succeeds("a load", where=f"into {target!r}"):
            dcp.load(state, checkpoint_id=tmp_path / "torch", planner=checkpoint.HuggingFaceLoadPlanner())
        assert_same_tensor(state["w"], torch.ones(2), where=f"w beside {target!r}")
        assert_equal(state["n"], 5, where=f"n into {target!r}")
    for target in (5, "text", [torch.zeros(2)]):
        with (
            raises(ValueError, mentions=("Invalid checkpoint metadata", "for w"), where=f"a tensor into {target!r}"),
            alone(),
        ):
            planner = checkpoint.HuggingFaceLoadPlanner(flatten_state_dict=False)
            dcp.load({"w": target}, checkpoint_id=tmp_path / "torch", planner=planner)
    scales = {"x_scales": torch.arange(2, dtype=torch.uint8), "y.weight_scale_inv": torch.ones(2), "z": torch.ones(1)}
    checkpoint.save_file(scales, tmp_path / "f.safetensors")
    targets = {name: zeros_like(value) for name, value in scales.items()}
    with succeeds("a load", where="scales alone"):
        load_with(checkpoint.QuantizedHuggingFaceStorageReader(tmp_path / "f.safetensors"), targets)
    assert_same_tensors(targets, scales, where="scales alone")


@requirement(
    "CKPT-773",
    "What a reader found MUST be looked up by name and offset as in any mapping: no offset is that of the first part, "
    "and an unknown name or offset is none.",
)
def test_lookups(checkpoint: Any, tmp_path: Path) -> None:
    save(checkpoint, STATE, tmp_path / "ck")
    found = load(checkpoint, {name: zeros_like(value) for name, value in STATE.items()}, tmp_path / "ck").storage_data
    for name, value in STATE.items():
        zeros = (0,) * value.dim()
        for at in (None, zeros, torch.Size(zeros), list(zeros)):
            index: Any = MetadataIndex(name)
            index = index if at is None else replace(index, offset=at)
            with succeeds("a look-up", where=f"{name} at {at}"):
                chunk = found[index]
            assert_equal((chunk.shape, chunk.dtype), (tuple(value.shape), value.dtype), where=f"{name} at {at}")
            assert_equal((tmp_path / "ck" / FILE).samefile(chunk.relative_path), True, where=f"file of {name}")
    for index in (MetadataIndex("x"), MetadataIndex("w", (1, 0)), MetadataIndex("w", (0,)), MetadataIndex("s", (1,))):
        with raises(KeyError, mentions=(index.fqn,), where=str(index)):
            found[index]
        assert_equal((found.get(index), index in found), (None, False), where=str(index))
    assert_equal({index.fqn for index in found}, set(STATE), where="names")


@requirement(
    "CKPT-774",
    "A file whose name begins with two dots MUST be refused as a member of an index, and a hidden file in the folder "
    "of a save MUST neither keep it out nor be touched by it.",
)
def test_names_with_dots(checkpoint: Any, tmp_path: Path) -> None:
    folder = tmp_path / "ck"
    folder.mkdir()
    for name in ("..safetensors", "...safetensors", "..x.safetensors", ".x.safetensors", "x..safetensors"):
        checkpoint.save_file(STATE, folder / name)
        (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(STATE, name)}))
        if name.startswith(".."):
            with raises(FormatError, mentions=("outside its folder", name), where=name):
                load(checkpoint, {name: zeros_like(value) for name, value in STATE.items()}, folder)
        else:
            with succeeds("a load", where=name):
                assert_loads(checkpoint, folder, STATE)
    for options in ({"enable_consolidation": False}, {"single_file": True}, {}):
        target = tmp_path / str(len(options) and next(iter(options)))
        target.mkdir()
        (target / ".x.safetensors").write_bytes(b"1")
        with succeeds("a save", where=f"beside a hidden file, {options}"):
            save(checkpoint, STATE, target, **options)
            assert_loads(checkpoint, target, STATE)
        assert_same_bytes(target / ".x.safetensors", b"1", where=f"the hidden file, {options}")


class _Unchecked(_Changed):
    """Does not look at the plan of all ranks."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return all_plans, Metadata({})


def _chunk_at(first: int, count: int) -> Callable[[WriteItem], WriteItem]:
    def change(item: WriteItem) -> WriteItem:
        assert item.tensor_data is not None
        chunk = ChunkStorageMetadata(torch.Size([first]), torch.Size([count]))
        return replace(item, tensor_data=replace(item.tensor_data, chunk=chunk))

    return change


@requirement(
    "CKPT-798",
    "A planner whose part of a tensor begins before it, ends behind it or leaves some of it out MUST be refused by "
    "name, and nothing be made; a load planner that was told of no checkpoint MUST say which names are missing.",
)
def test_parts_outside(checkpoint: Any, tmp_path: Path) -> None:
    for first, count, said in (
        (-1, 4, "lies outside"),
        (-4, 4, "lies outside"),
        (1, 4, "lies outside"),
        (0, 5, "lies outside"),
        (0, 3, "leave a gap"),
        (1, 3, "leave a gap"),
    ):
        with raises(PlanError, mentions=(said, "where: w"), where=f"{count} from {first}"):
            save(checkpoint, {"w": torch.ones(4)}, tmp_path / "ck", planner=_Unchecked(_chunk_at(first, count)))
    assert_equal(list(tmp_path.iterdir()), [], where="what was made")
    with succeeds("a save", where="4 from 0"):
        save(checkpoint, {"w": torch.ones(4)}, tmp_path / "ck", planner=_Unchecked(_chunk_at(0, 4)))
    assert_loads(checkpoint, tmp_path / "ck", {"w": torch.ones(4)})
    planner = checkpoint.HuggingFaceLoadPlanner()
    planner.set_up_planner({"w": torch.ones(2), "x": torch.ones(2)})
    with raises(MissingKeyError, mentions=("not in the checkpoint", "w", "x"), where="no checkpoint"):
        planner.create_local_plan()


class _Late(DefaultSavePlanner):
    """Changes its mind when the save is planned: about its last plan, or about everything that it holds."""

    def __init__(self, change: Callable[[list[WriteItem]], object], *, of_all: bool = False) -> None:
        super().__init__()
        self.change, self.of_all, self.held = change, of_all, list[WriteItem]()

    def create_local_plan(self) -> SavePlan:
        made = super().create_local_plan()
        self.held = made.items
        return made

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        finished = super().finish_plan(new_plan)
        self.change(self.held if self.of_all else finished.items)
        return finished


@requirement(
    "CKPT-814",
    "A planner whose last plan has fewer or more items than were planned MUST be refused by name, with both numbers, "
    "in every layout: a checkpoint with bytes that nobody wrote is never shown.",
)
def test_items_lost_at_last(checkpoint: Any, tmp_path: Path) -> None:
    changes: dict[str, tuple[Callable[[list[WriteItem]], object], int]] = {
        "the first left out": (lambda items: items.pop(0), 2),
        "the last left out": (lambda items: items.pop(), 2),
        "none": (lambda items: items.clear(), 0),
        "one twice": (lambda items: items.append(items[0]), 4),
    }
    for options in ({}, {"enable_consolidation": False}, {"single_file": True}):
        for where, (change, count) in changes.items():
            said = (f"got: {count} items", "expected: 3 items", "where: finish_plan")
            with raises(PlanError, mentions=said, where=f"{where}, {options}"):
                save(checkpoint, STATE, tmp_path / "ck", planner=_Late(change), **options)
            assert_equal(list(tmp_path.iterdir()), [], where=f"what was made, {where}, {options}")


def _lose_replicas(rank: Rank, path: str) -> list[str]:
    planner = _Late(lambda items: items.clear(), of_all=rank.rank == 1)
    planner.change = planner.change if rank.rank == 1 else lambda items: None
    try:
        save_ranks(rank, {"w": torch.ones(64, 64)}, Path(path), planner=planner, block_bytes=64)
    except BaseException as error:
        return [f"{type(each).__name__}: {each}" for each in errors_inside(error)]
    return []


@requirement(
    "CKPT-815",
    "Where a rank no longer has a replica that it is to write, it MUST be a named error of the tensor, told to all "
    "ranks, and nothing be left.",
    needs=("balanced_writes",),
)
def test_lost_replicas(checkpoint: Any, rank_pool: Any, tmp_path: Path) -> None:
    for rank, texts in enumerate(rank_pool.run(_lose_replicas, 2, str(tmp_path / "ck"))):
        wanted = "PlanError: this rank lacks a replica" if rank == 1 else "DistributedError: another rank failed"
        is_told = any(text.startswith(wanted) and ("where: w" in text or rank == 0) for text in texts)
        assert_equal(is_told, True, where=f"rank {rank} is told {wanted}, of {[text[:200] for text in texts]}")
    assert_equal(list(tmp_path.iterdir()), [], where="what is left")
