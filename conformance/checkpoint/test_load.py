"""Loading: in place, only what is needed, and nothing touched before everything was checked."""

from __future__ import annotations

import itertools
import json
import os
import struct
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan

from conformance.checkpoint.cases import (
    DTYPES,
    FILE,
    PT,
    Tiled,
    bits,
    load,
    load_with,
    oracle,
    own_count,
    random_bits,
    save,
    zeros_like,
)
from conformance.checkpoint.hostile import pack
from conformance.harness import (
    assert_equal,
    assert_le,
    assert_same_bytes,
    assert_same_tensor,
    assert_same_tensors,
    raises,
    requirement,
    succeeds,
)
from twinproof.errors import CorruptionError, MissingKeyError, PlanError, TwinproofError, UnsupportedError


@requirement(
    "CKPT-052",
    "A load MUST fill the caller's memory: same data_ptr, through views, Parameters, strides, conjugates, negations.",
)
def test_in_place(checkpoint: Any, tmp_path: Path) -> None:
    state = {
        "plain": torch.randn(4, 6),
        "view": torch.randn(3, 4),
        "param": torch.randn(5),
        "strided": torch.randn(6, 4),
    }
    state["conj"], state["negated"] = torch.randn(3, dtype=torch.complex64), torch.randn(3)
    save(checkpoint, state, tmp_path / "ck")
    base = torch.zeros(10, 10)
    targets = {
        "plain": torch.zeros(4, 6),
        "view": base[2:5, 1:5],
        "param": torch.nn.Parameter(torch.zeros(5)),
        "strided": torch.zeros(4, 6).t(),
        "conj": torch.zeros(3, dtype=torch.complex64).conj(),
        "negated": torch.zeros(3, dtype=torch.complex64).conj().imag,
    }
    before = {name: value.data_ptr() for name, value in targets.items()}
    load(checkpoint, targets, tmp_path / "ck")
    assert_equal({name: value.data_ptr() for name, value in targets.items()}, before, where="data_ptr")
    got = {name: value.detach().resolve_conj().resolve_neg().contiguous() for name, value in targets.items()}
    assert_same_tensors(got, state)
    expected = torch.zeros(10, 10)
    expected[2:5, 1:5] = state["view"]
    assert_same_tensor(base, expected, where="memory around a view")


@requirement(
    "CKPT-053",
    "A strict load MUST list every missing name at once; strict=False MUST leave those targets untouched and report.",
)
def test_strict(checkpoint: Any, tmp_path: Path) -> None:
    save(checkpoint, {"a": torch.ones(2)}, tmp_path / "ck")
    targets = {"a": torch.zeros(2), "m1": torch.full((3,), 7.0), "m2": torch.zeros(1)}
    with raises(MissingKeyError, mentions=("m1", "m2")):
        load(checkpoint, targets, tmp_path / "ck", planner=checkpoint.HuggingFaceLoadPlanner())
    assert_equal(float(targets["a"].sum()), 0.0, where="target of a refused load")
    planner = checkpoint.HuggingFaceLoadPlanner(strict=False)
    load(checkpoint, targets, tmp_path / "ck", planner=planner)
    assert_equal(planner.missing_keys, ["m1", "m2"], where="missing_keys")
    assert_same_tensors(targets, {"a": torch.ones(2), "m1": torch.full((3,), 7.0), "m2": torch.zeros(1)})


@requirement("CKPT-054", "Names that the target lacks MUST be reported by the planner.")
def test_unexpected(checkpoint: Any, tmp_path: Path) -> None:
    save(checkpoint, {"a": torch.ones(2), "x": torch.ones(1), "y": torch.ones(1)}, tmp_path / "ck")
    planner = checkpoint.HuggingFaceLoadPlanner()
    load(checkpoint, {"a": torch.zeros(2)}, tmp_path / "ck", planner=planner)
    assert_equal(planner.unexpected_keys, ["x", "y"], where="unexpected_keys")


@requirement("CKPT-055", "Shapes that differ MUST be one error with names and both shapes, and no target changed.")
def test_shapes(checkpoint: Any, tmp_path: Path) -> None:
    save(checkpoint, {"a": torch.ones(2), "b": torch.ones(3, 4), "c": torch.ones(5)}, tmp_path / "ck")
    targets = {"a": torch.zeros(2), "b": torch.zeros(4, 3), "c": torch.zeros(6)}
    with raises(PlanError, mentions=("'b': ((4, 3), (3, 4))", "'c': ((6,), (5,))")):
        load(checkpoint, targets, tmp_path / "ck", planner=checkpoint.HuggingFaceLoadPlanner())
    assert_same_tensor(targets["a"], torch.zeros(2), where="target of a refused load")


@requirement(
    "CKPT-056",
    "Dtypes that differ MUST be an error before any target changes; cast=True MUST convert as Tensor.to does.",
)
def test_dtypes(checkpoint: Any, tmp_path: Path) -> None:
    state = {"a": torch.randn(50), "ok": torch.ones(2), "i": torch.arange(9, dtype=torch.int32)}
    save(checkpoint, state, tmp_path / "ck")
    targets = {"ok": torch.zeros(2), "a": torch.zeros(50, dtype=torch.bfloat16), "i": torch.zeros(9, dtype=torch.int64)}
    with raises(PlanError, mentions=("'a'", "bfloat16", "float32", "'i'")):
        load(checkpoint, targets, tmp_path / "ck")
    assert_same_tensor(targets["ok"], torch.zeros(2), where="target of a refused load")
    load(checkpoint, targets, tmp_path / "ck", cast=True)
    assert_same_tensors(targets, {"a": state["a"].bfloat16(), "ok": state["ok"], "i": state["i"].long()})
    strided = torch.zeros(5, 10, dtype=torch.float64).t()
    save(checkpoint, {"s": torch.arange(50.0).reshape(10, 5)}, tmp_path / "s")
    load(checkpoint, {"s": strided}, tmp_path / "s", cast=True)
    assert_same_tensor(strided.contiguous(), torch.arange(50.0).reshape(10, 5).double(), where="strided cast")


@requirement(
    "CKPT-985",
    "cast=True MUST refuse floats of 4 bits by name, stored ones and targets, which torch cannot convert, before any "
    "target changes.",
)
def test_floats_of_four_bits(checkpoint: Any, tmp_path: Path) -> None:
    packed = torch.arange(6, dtype=torch.uint8)
    checkpoint.save_file(
        {"four": packed.view(torch.float4_e2m1fn_x2), "plain": torch.ones(6), "ok": torch.ones(2)}, tmp_path / FILE
    )
    for name, dtype in (("four", torch.float32), ("four", torch.uint8), ("plain", torch.float4_e2m1fn_x2)):
        targets = {"ok": torch.zeros(2), name: torch.zeros(6 * dtype.itemsize, dtype=torch.uint8).view(dtype)}
        with raises(UnsupportedError, mentions=("4 bits", name, str(dtype)), where=f"{name} as {dtype}"):
            load(checkpoint, targets, tmp_path / FILE, cast=True)
        assert_same_tensor(targets["ok"], torch.zeros(2), where=f"another target beside {name} as {dtype}")
    same = {"four": torch.zeros(6, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)}
    with succeeds("a load", where="into a target of the stored dtype"):
        load(checkpoint, same, tmp_path / FILE, cast=True)
    assert_same_tensor(same["four"].view(torch.uint8), packed, where="the stored bytes")


@requirement(
    "CKPT-057",
    "A load MUST read only the ranges it needs: at most 1.05 times for rows, twice for columns.",
    needs=("ranged_reads",),
)
def test_ranges(checkpoint: Any, tmp_path: Path) -> None:
    big = torch.randn(2048, 512)
    save(checkpoint, {"big": big, "other": torch.randn(1024, 1024)}, tmp_path / "ck")
    for name, offsets, sizes, factor in (
        ("rows", (512, 0), (512, 512), 1.05),
        ("columns", (0, 256), (2048, 256), 2.05),
    ):
        target = Tiled.of(big.shape, {offsets: torch.zeros(sizes)}, torch.float32)
        before = own_count("io", "rchar")
        reader = load(checkpoint, {"big": target}, tmp_path / "ck")
        assert_le(own_count("io", "rchar") - before, factor * sizes[0] * sizes[1] * 4 + 65536, where=f"{name}: rchar")
        assert_le(reader.stats.read_bytes, factor * sizes[0] * sizes[1] * 4, where=f"{name}: counted")
        expected = big[offsets[0] : offsets[0] + sizes[0], offsets[1] : offsets[1] + sizes[1]].contiguous()
        assert_same_tensor(target.parts[offsets], expected, where=name)


@requirement(
    "CKPT-058",
    "Tensors that were not asked for MUST not matter: a dtype that torch lacks elsewhere in a file is no obstacle.",
)
def test_unrequested(checkpoint: Any, tmp_path: Path) -> None:
    six = b'"six":{"dtype":"F6_E2M3","shape":[4],"data_offsets":[8,11]}'
    text = b"{" + six + b',"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    path = tmp_path / "model.safetensors"
    path.write_bytes(pack(text, struct.pack("<2f", 1, 2) + b"abc"))
    target = torch.zeros(2)
    load(checkpoint, {"w": target}, path)
    assert_same_tensor(target, torch.tensor([1.0, 2.0]), where="w")
    with raises(UnsupportedError, mentions=("F6_E2M3", "six")):
        load(checkpoint, {"six": torch.zeros(4, dtype=torch.uint8)}, path)


@requirement(
    "CKPT-060",
    "An export cast MUST convert floats only, to nearest even, and leave keep-list, integers, bools and float8 alone.",
)
def test_export_cast(checkpoint: Any, tmp_path: Path) -> None:
    state: dict[str, torch.Tensor] = {
        "f32": random_bits(torch.float32, (300,), 1),
        "f64": torch.randn(40, dtype=torch.float64),
        "strided": torch.randn(8, 5).t(),
        "router.bias": torch.randn(6),
        "i": torch.arange(3),
        "b": torch.tensor([True]),
        "f8": random_bits(torch.float8_e4m3fn, (4,), 2),
    }
    save(checkpoint, state, tmp_path / "ck", export_dtype=torch.bfloat16, export_keep=("*.bias",))
    cast = {n: v.to(torch.bfloat16) if n in ("f32", "f64", "strided") else v for n, v in state.items()}
    assert_same_bytes(tmp_path / "ck" / FILE, oracle(cast, PT), where="exported file")


@requirement("CKPT-061", "Loading from read-only files and folders MUST work and emit no warning.")
def test_read_only(checkpoint: Any, tmp_path: Path) -> None:
    state = {str(dtype): random_bits(dtype, (4, 2), 0) for dtype in DTYPES}
    save(checkpoint, state, tmp_path / "ck")
    for file in (tmp_path / "ck").iterdir():
        file.chmod(0o444)
    (tmp_path / "ck").chmod(0o555)
    targets = {name: zeros_like(value) for name, value in state.items()}
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            load(checkpoint, targets, tmp_path / "ck")
            checkpoint.load_file(tmp_path / "ck" / FILE)
        relevant = [str(w.message) for w in caught if "torch.distributed is disabled" not in str(w.message)]
        assert_equal(relevant, [], where="warnings")
    finally:
        (tmp_path / "ck").chmod(0o755)
    assert_same_tensors({n: bits(v) for n, v in targets.items()}, {n: bits(v) for n, v in state.items()})
    assert_equal(os.access(tmp_path / "ck" / FILE, os.R_OK), True, where="file")


@requirement(
    "CKPT-457",
    "What keeps any thread of a load from reading MUST be raised with its cause and its file, with one thread and with "
    "several.",
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_cause(checkpoint: Any, tmp_path: Path) -> None:
    for thread_count in (1, 2, 3):
        path = tmp_path / f"{thread_count}"
        state = {f"{index}": random_bits(torch.float32, (40,), index) for index in range(4)}
        save(checkpoint, state, path, fqn_to_index_mapping={name: int(name) + 1 for name in state})
        reader = checkpoint.HuggingFaceStorageReader(path, thread_count=thread_count)
        victim, read = "model-00003-of-00004.safetensors", reader.read_data

        def read_too_late(*arguments: Any, read: Any = read, path: Path = path, name: str = victim) -> Any:
            (path / name).unlink()
            return read(*arguments)

        reader.read_data = read_too_late
        with raises(OSError, mentions=[victim], where=f"{thread_count} threads"):
            load_with(reader, {name: zeros_like(value) for name, value in state.items()})


@requirement(
    "CKPT-459",
    "Any subset of many small tensors of several files MUST load right, with any number of threads, into targets of "
    "any strides.",
)
@pytest.mark.parametrize("count", [1, 5, 255, 256, 257, 512, pytest.param(600, marks=pytest.mark.night)])
def test_small_neighbours(checkpoint: Any, tmp_path: Path, count: int) -> None:
    state = {f"t{n:03}": random_bits(torch.int16, (n % 5, 3) if n % 11 else (7,), n + 1) for n in range(count + 3)}
    if count == 5:
        # Together just at, and just over, what is read at once; one that is read in parts.
        halves = {0: 1 << 18, 1: 1 << 18, 2: 1 << 18, 3: (1 << 18) + 1, 4: 3 << 19}
        state |= {f"t{n:03}": random_bits(torch.int16, (size,), n + 1) for n, size in halves.items()}
    save(checkpoint, state, tmp_path, fqn_to_index_mapping={name: 2 - int(int(name[1:]) < count) for name in state})
    subsets = {
        "all": list(state),
        "gaps": [name for name in state if int(name[1:]) % 5 != 3],
        "no first": list(state)[1:],
        "no last": list(state)[:-1],
    }
    for threads in (1, 2, 3):
        for which, names in subsets.items():
            for stride in (1, 2):
                targets = {name: torch.zeros(*state[name].shape, stride, dtype=torch.int16)[..., 0] for name in names}
                load(checkpoint, targets, tmp_path, thread_count=threads)
                expected = {name: state[name] for name in names}
                assert_same_tensors(targets, expected, where=f"{which}, {threads} threads, stride {stride}")


@requirement(
    "CKPT-640",
    "More small tensors side by side than one call of the system takes MUST be saved, loaded and read from one file as "
    "few are.",
)
def test_beyond_one_call(checkpoint: Any, tmp_path: Path) -> None:
    # Linux takes 1024 pieces of memory at a time.
    values = torch.arange(2100, dtype=torch.int16)
    state = {f"t{n:04}": values[n : n + 1] for n in range(len(values))}
    with succeeds("a save", where="of 2100 tensors"):
        save(checkpoint, state, tmp_path / "ck")
    targets = {name: torch.zeros(1, dtype=torch.int16) for name in state}
    with succeeds("a load", where="of 2100 tensors"):
        load(checkpoint, targets, tmp_path / "ck")
    assert_same_tensor(torch.cat(list(targets.values())), values, where="loaded")
    with succeeds("load_file", where="of 2100 tensors"):
        found = checkpoint.load_file(tmp_path / "ck" / FILE)
    assert_same_tensor(torch.cat([found[name] for name in state]), values, where="load_file")


class _Hinting(DefaultLoadPlanner):
    """Says of each chunk that it is the one with this number among those of its tensor."""

    def __init__(self, number: int | None, offset: int = 0) -> None:
        super().__init__()
        self.number, self.offset = number, offset

    def create_local_plan(self) -> LoadPlan:
        plan = super().create_local_plan()
        items = []
        for item in plan.items:
            place = torch.Size([(item.storage_index.offset or [0])[0] + self.offset])
            items.append(replace(item, storage_index=MetadataIndex(item.storage_index.fqn, place, self.number)))
        return LoadPlan(items)


@requirement(
    "CKPT-545",
    "A chunk MUST be found by its offset, whatever number its index has: the right one, another's, none, one beyond "
    "the last; an offset without a chunk MUST be refused.",
)
def test_numbers_of_chunks(checkpoint: Any, tmp_path: Path) -> None:
    whole = random_bits(torch.float32, (9,), 1)
    (tmp_path / "ck").mkdir()
    for rank, begin in enumerate((0, 3, 6), start=1):
        metadata = {"format": "pt", "DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": [begin]}})}
        name = f"shard-{rank:05d}-model-00001-of-00001.safetensors"
        save_file({"w": whole[begin : begin + 3].clone()}, tmp_path / "ck" / name, metadata)
    for number in (None, 0, 1, 2, 3, 4, 1000, -1, -3):
        target, where = torch.zeros(9), f"number {number}"
        with succeeds("a load", where=where):
            load(checkpoint, {"w": target}, tmp_path / "ck", planner=_Hinting(number))
        assert_same_tensor(target, whole, where=where)
        with raises(PlanError, mentions=("no chunk", "w"), where=where):
            load(checkpoint, {"w": target}, tmp_path / "ck", planner=_Hinting(number, 1))


@requirement(
    "CKPT-967",
    "Of several tensors with one fault, global shapes that files disagree about or gaps between shards, an error MUST "
    "name the first in the order of the files: the same one in every process.",
)
@pytest.mark.parametrize("is_gap", [False, True])
def test_first_of_several_faults(checkpoint: Any, tmp_path: Path, is_gap: bool) -> None:
    # In an order that a set would hardly give: as they are hashed with a seed of each process.
    names = [f"t{number:02d}" for number in range(24)]
    for row in (0, 1):
        said: dict[str, Any] = {name: {"saved_offsets": [2 * row if is_gap else row]} for name in names}
        if not is_gap:
            # The first two files agree about the first five.
            said = {n: {**info, "global_shape": [2 + row * (n > "t04")]} for n, info in said.items()}
        metadata = {"format": "pt", "DCP_SHARDING_INFO": json.dumps(said)}
        name = f"shard-{row + 1:05d}-model-00001-of-00001.safetensors"
        save_file({name: torch.zeros(1) for name in names}, tmp_path / name, metadata)
    first = "'t00'" if is_gap else "'t05'"
    with raises(CorruptionError, mentions=(first,), where="a load of what is faulty throughout"):
        load(checkpoint, {"t09": torch.zeros(3 if is_gap else 2)}, tmp_path)


class _Reaching(DefaultLoadPlanner):
    """Asks for a range of the chunk at an offset, where the plan asks for it in place of its own."""

    def __init__(self, *asked: tuple[int, ...]) -> None:
        super().__init__()
        self.asked = [torch.Size(each) for each in asked]

    def create_local_plan(self) -> LoadPlan:
        item = super().create_local_plan().items[0]
        offset, begin, lengths = self.asked
        index = MetadataIndex(item.storage_index.fqn, offset)
        asked = replace(item, storage_index=index, storage_offsets=begin, lengths=lengths)
        return LoadPlan([replace(asked, dest_offsets=torch.Size([0] * len(lengths)))])


@requirement(
    "CKPT-715",
    "A range MUST be read from the chunk at its offset that has it, also where one without values lies at the same "
    "offset, whichever file comes first; a range that no chunk at that offset has MUST be refused.",
)
def test_ranges_of_chunks(checkpoint: Any, tmp_path: Path) -> None:
    whole, other = random_bits(torch.float32, (6,), 1), random_bits(torch.float32, (9,), 2)
    for empty in (0, 1, 2):
        folder = tmp_path / f"empty {empty}"
        folder.mkdir()
        parts = [(0, whole[:4]), (4, whole[4:])]
        parts.insert(empty, (0 if empty == 0 else 4, whole[:0]))
        for rank, (begin, part) in enumerate(parts, start=1):
            info = {"w": {"saved_offsets": [begin]}, f"other {rank}": {"saved_offsets": [0]}}
            state = {"w": part.clone(), f"other {rank}": other}
            metadata = {"format": "pt", "DCP_SHARDING_INFO": json.dumps(info)}
            save_file(state, folder / f"shard-{rank:05d}-model-00001-of-00001.safetensors", metadata)
        target, where = torch.zeros(6), f"{empty} before the empty one"
        with succeeds("a load", where=where):
            load(checkpoint, {"w": target}, folder)
        assert_same_tensor(target, whole, where=where)
        for offset, begin, count in ((0, 0, 4), (0, 1, 2), (4, 0, 2), (4, 1, 1), (0, 4, 0)):
            target = torch.zeros(6)
            with succeeds("a load", where=f"{where}: {count} from {begin} of the chunk at {offset}"):
                load(checkpoint, {"w": target}, folder, planner=_Reaching((offset,), (begin,), (count,)))
            assert_same_tensor(target[:count], whole[offset + begin :][:count], where=where)
        for offset, begin, count in ((0, 0, 5), (0, 3, 2), (4, 0, 3), (4, 2, 1), (0, 5, 0), (4, -1, 2)):
            with raises(PlanError, mentions=("beyond the chunk", "w"), where=where):
                load(checkpoint, {"w": torch.zeros(6)}, folder, planner=_Reaching((offset,), (begin,), (count,)))
    # Of a tensor that was quantized, as of any other.
    quantized = {"w.weight": torch.ones(4, 2).to(torch.float8_e4m3fn), "w.weight_scale_inv": torch.ones(1, 1)}
    save(checkpoint, quantized, tmp_path / "fp8")
    reader = checkpoint.QuantizedHuggingFaceStorageReader(tmp_path / "fp8")
    target = torch.zeros(4, 2)
    load_with(reader, {"w.weight": target}, planner=_Reaching((0, 0), (1, 0), (3, 2)))
    assert_same_tensor(target[:3], torch.ones(3, 2), where="three rows of four")
    with raises(PlanError, mentions=("beyond the chunk", "w.weight"), where="four rows from the second"):
        load_with(reader, {"w.weight": target}, planner=_Reaching((0, 0), (1, 0), (4, 2)))


@requirement(
    "CKPT-611",
    "After a load that failed, by one thread or by several, no file of the checkpoint MUST be open.",
)
def test_files_are_closed(checkpoint: Any, tmp_path: Path) -> None:
    state = {f"{index}": random_bits(torch.float32, (3 << 18,), index) for index in range(4)}
    save(checkpoint, state, tmp_path / "ck", fqn_to_index_mapping={name: int(name) + 1 for name in state})
    for thread_count in (1, 3):
        reader = checkpoint.HuggingFaceStorageReader(tmp_path / "ck", thread_count=thread_count)
        read, cut = reader.read_data, tmp_path / "ck/model-00002-of-00004.safetensors"
        kept = cut.read_bytes()

        def read_too_late(*arguments: Any, read: Any = read, cut: Path = cut) -> Any:
            os.truncate(cut, 1 << 20)
            return read(*arguments)

        reader.read_data = read_too_late
        with raises((OSError, TwinproofError), mentions=[cut.name], where=f"{thread_count} threads"):
            load_with(reader, {name: zeros_like(value) for name, value in state.items()})
        cut.write_bytes(kept)
        opened = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
        left = [name for name in opened if name.startswith(str(tmp_path.resolve()))]
        assert_equal(left, [], where=f"{thread_count} threads: files left open")


_SHARED_PLACES = {
    "expanded": (1, (3, 4), (0, 0)),
    "one row for all": (4, (3, 4), (0, 1)),
    "unfolded": (6, (3, 4), (1, 1)),
    "rows that meet": (9, (3, 4), (2, 1)),
    "rows between rows that meet": (13, (3, 4), (2, 2)),
}
_OWN_PLACES = {
    "dense": (12, (3, 4), (4, 1)),
    "transposed": (12, (3, 4), (1, 3)),
    "with gaps": (24, (3, 4), (8, 2)),
    "transposed with gaps": (18, (3, 4), (1, 5)),
    "odd and even": (14, (2, 4), (3, 2)),
}


@requirement(
    "CKPT-684",
    "A load into a target that holds several values in one place of memory MUST be refused by name before any target "
    "changes, also where the values were quantized.",
)
def test_shared_places(checkpoint: Any, tmp_path: Path) -> None:
    state = {"w": torch.arange(12.0).reshape(3, 4), "ok": torch.ones(2)}
    save(checkpoint, state, tmp_path / "ck")
    for where, (size, shape, strides) in _SHARED_PLACES.items():
        memory, other = torch.zeros(size), torch.zeros(2)
        for cast in (False, True):
            with raises(UnsupportedError, mentions=["where: w", "several values"], where=where):
                targets = {"ok": other, "w": memory.as_strided(shape, strides)}
                load(checkpoint, targets, tmp_path / "ck", cast=cast)
        assert_equal(float(memory.sum() + other.sum()), 0.0, where=f"{where}: targets of a refused load")
    save(checkpoint, {"w": torch.arange(2.0)}, tmp_path / "two")
    with raises(UnsupportedError, mentions=["where: w", "several values"], where="two values in one place"):
        load(checkpoint, {"w": torch.zeros(1).expand(2)}, tmp_path / "two")
    quantized = {"w.weight": torch.ones(2, 2).to(torch.float8_e4m3fn), "w.weight_scale_inv": torch.ones(1, 1)}
    save(checkpoint, quantized, tmp_path / "fp8")
    with raises(UnsupportedError, mentions=["where: w.weight", "several values"], where="quantized"):
        reader = checkpoint.QuantizedHuggingFaceStorageReader(tmp_path / "fp8")
        load_with(reader, {"w.weight": torch.zeros(2).expand(2, 2)})


@requirement(
    "CKPT-716",
    "A target MUST be refused where two of its values have one place, and filled otherwise, for any two small strides.",
)
def test_strides(checkpoint: Any, tmp_path: Path) -> None:
    saved = torch.arange(1.0, 7.0).reshape(2, 3)
    save(checkpoint, {"w": saved}, tmp_path / "ck")
    for strides in itertools.product(range(6), range(6)):
        target = torch.zeros(1 + strides[0] + 2 * strides[1]).as_strided((2, 3), strides)
        places = {row * strides[0] + column * strides[1] for row in range(2) for column in range(3)}
        if len(places) == saved.numel():
            with succeeds("a load", where=f"strides {strides}"):
                load(checkpoint, {"w": target}, tmp_path / "ck")
            assert_same_tensor(target.contiguous(), saved, where=f"strides {strides}")
        else:
            with raises(UnsupportedError, mentions=["several values"], where=f"strides {strides}"):
                load(checkpoint, {"w": target}, tmp_path / "ck")


@requirement(
    "CKPT-689",
    "A load MUST fill a target of any strides that have a place for each value, and a state that was saved expanded "
    "MUST load into targets of its own.",
)
def test_own_places(checkpoint: Any, tmp_path: Path) -> None:
    state = {"w": torch.arange(12.0).reshape(3, 4), "pair": torch.arange(8.0).reshape(2, 4)}
    save(checkpoint, state, tmp_path / "ck")
    for where, (size, shape, strides) in _OWN_PLACES.items():
        name = "w" if shape == (3, 4) else "pair"
        target = torch.zeros(size).as_strided(shape, strides)
        with succeeds("a load", where=where):
            load(checkpoint, {name: target}, tmp_path / "ck")
        assert_same_tensor(target.contiguous(), state[name], where=where)
    expanded = {"e": torch.arange(3.0).expand(4, 3), "none": torch.ones(1).expand(0), "one": torch.ones(1).expand(1, 1)}
    save(checkpoint, expanded, tmp_path / "expanded")
    found = {"e": torch.zeros(4, 3), "none": torch.zeros(1).expand(0), "one": torch.zeros(1).expand(1, 1)}
    load(checkpoint, found, tmp_path / "expanded")
    assert_same_tensors(found, {name: value.contiguous() for name, value in expanded.items()}, where="saved expanded")


@requirement(
    "CKPT-685",
    "Autograd MUST notice that a load has changed a target that it needs, through views, strides, conjugates and "
    "casts, where values were quantized and where it failed in the middle; targets made for inference MUST load.",
)
def test_autograd_notices(checkpoint: Any, device: torch.device, tmp_path: Path) -> None:
    state = {"w": torch.arange(12.0).reshape(3, 4), "c": torch.randn(4, dtype=torch.complex64)}
    save(checkpoint, state, tmp_path / "ck")
    quantized = {"q.weight": torch.ones(2, 2).to(torch.float8_e4m3fn), "q.weight_scale_inv": torch.ones(1, 1)}
    save(checkpoint, quantized, tmp_path / "fp8")
    base = torch.zeros(5, 8, device=device)
    targets = {
        "dense": ("w", base[:3, :4].clone(), {}),
        "a view": ("w", base[1:4, 2:6], {}),
        "strided": ("w", torch.zeros(4, 3, device=device).t(), {}),
        "conjugated": ("c", torch.zeros(4, dtype=torch.complex64).conj(), {}),
        "converted": ("w", torch.zeros(3, 4, dtype=torch.float64, device=device), {"cast": True}),
    }
    for where, (name, target, options) in targets.items():
        factor = torch.ones((), dtype=target.dtype, device=target.device, requires_grad=True)
        product = (factor * target).sum().abs()
        load(checkpoint, {name: target}, tmp_path / "ck", **options)
        with raises(RuntimeError, mentions=["modified by an inplace operation"], where=where):
            torch.autograd.backward(product)
    factor, target = torch.ones((), device=device, requires_grad=True), torch.zeros(3, 4, device=device)
    product = (factor * target).sum()
    with raises(ZeroDivisionError, where="a load that fails"):
        load(checkpoint, {"w": target}, tmp_path / "ck", progress=lambda done, total: total / (done - total))
    with raises(RuntimeError, mentions=["modified by an inplace operation"], where="a load that failed"):
        torch.autograd.backward(product)
    factor, target = torch.ones((), device=device, requires_grad=True), torch.zeros(2, 2, device=device)
    product = (factor * target).sum()
    load_with(checkpoint.QuantizedHuggingFaceStorageReader(tmp_path / "fp8"), {"q.weight": target})
    with raises(RuntimeError, mentions=["modified by an inplace operation"], where="quantized"):
        torch.autograd.backward(product)
    plain = torch.zeros(3, 4)
    with torch.inference_mode():
        made = torch.zeros(3, 4)
        with succeeds("a load", where="of a tensor for inference, where nothing is recorded"):
            load(checkpoint, {"w": made}, tmp_path / "ck")
            load(checkpoint, {"w": plain}, tmp_path / "ck")
    assert_same_tensors({"w": made.clone(), "plain": plain}, {"w": state["w"], "plain": state["w"]}, where="loaded")
