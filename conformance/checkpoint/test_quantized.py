"""L. Block-quantized checkpoints: 8-bit floats with a scale for each block, and MXFP4."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.tensor import Shard

from conformance.checkpoint.cases import (
    CHECKSUMS_KEY,
    INDEX,
    Tiled,
    assert_parts,
    cut,
    load_with,
    mesh_of,
    random_bits,
    save,
    sharded,
    sums_of,
    tiled,
)
from conformance.checkpoint.trainer import alone
from conformance.harness import Rank, assert_equal, assert_same_tensor, raises, requirement, succeeds
from twinproof.checkpoint import dcp as storage
from twinproof.engine import InlineEngine
from twinproof.errors import ConfigError, CorruptionError, FormatError, UnsupportedError

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
TARGETS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Two sign bits and three of magnitude are read off the table of the OCP MX specification.
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def fp8_oracle(values: torch.Tensor, scales: torch.Tensor, block: int) -> torch.Tensor:
    """One number at a time, in float64, rounded to float32."""
    result = torch.empty(values.shape, dtype=torch.float64)
    wide, factors = values.to(torch.float64).tolist(), scales.to(torch.float64).tolist()
    for row, numbers in enumerate(wide):
        for column, number in enumerate(numbers):
            result[row, column] = number * factors[row // block][column // block]
    return result.to(torch.float32)


def mxfp4_oracle(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """One number at a time, in float64, rounded to float32."""
    groups, group = blocks.shape[-2:]
    rows = []
    flat = blocks.reshape(-1, groups, group).tolist(), scales.reshape(-1, groups).tolist()
    for row, exponents in zip(*flat, strict=True):
        numbers = []
        for stored, exponent in zip(row, exponents, strict=True):
            factor = float("nan") if exponent == 255 else 2.0 ** (exponent - 127)
            for byte in stored:
                for half in (byte % 16, byte // 16):
                    magnitude = E2M1[half % 8]
                    numbers.append((-magnitude if half >= 8 else magnitude) * factor)
        rows.append(numbers)
    return torch.tensor(rows, dtype=torch.float64).to(torch.float32).reshape(*blocks.shape[:-2], 2 * groups * group)


def _scales(shape: list[int], seed: int) -> torch.Tensor:
    """Powers and other numbers, subnormal and huge products among them."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-140, 120, shape, generator=generator)
    return torch.ldexp(1 + torch.rand(shape, generator=generator), exponents).to(torch.float32)


def _matrix(shape: list[int], block: int, dtype: torch.dtype, seed: int) -> dict[str, torch.Tensor]:
    grid = [-(-size // block) for size in shape]
    return {"w.weight": random_bits(dtype, shape, seed), "w.weight_scale_inv": _scales(grid, seed + 1)}


def _groups(shape: list[int], seed: int) -> dict[str, torch.Tensor]:
    blocks, scales = random_bits(torch.uint8, shape, seed), random_bits(torch.uint8, shape[:-1], seed + 1)
    return {"w_blocks": blocks, "w_scales": scales}


def _rounded(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # The bits of a NaN are nobody's promise: which of them an arithmetic keeps differs by processor.
    return torch.where(value.isnan(), torch.tensor(torch.nan, dtype=dtype), value.to(dtype))


def _save(checkpoint: Any, state: dict[str, torch.Tensor], path: Path) -> None:
    """One file and an index, without which torch's reader pairs nothing."""
    checkpoint.save_file(state, path / "model.safetensors")
    (path / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(state, "model.safetensors")}))


def _empty_part(shape: Sequence[int], part: Sequence[slice], dtype: torch.dtype, *, is_strided: bool) -> Tiled:
    """A target of one rectangle; strided: its last dimension is not dense."""
    sizes = [each.stop - each.start for each in part]
    memory = torch.empty([*sizes, 2], dtype=dtype)[..., 0] if is_strided else torch.empty(sizes, dtype=dtype)
    return Tiled.of(shape, {tuple(each.start for each in part): memory}, dtype)


def _canonical(target: Tiled) -> Tiled:
    return Tiled.of(target.whole, {o: _rounded(part, part.dtype) for o, part in target.parts.items()}, target.dtype)


def _load(checkpoint: Any, path: Path, name: str, target: Any, **options: Any) -> Any:
    load_with(checkpoint.QuantizedHuggingFaceStorageReader(path, **options), {name: target})
    return target


@st.composite
def _slices(draw: st.DrawFn, shape: list[int]) -> tuple[slice, ...]:
    result = []
    for size in shape:
        begin = draw(st.integers(0, size - 1))
        result.append(slice(begin, draw(st.integers(begin + 1, size))))
    return tuple(result)


@requirement(
    "CKPT-450",
    "A matrix of 8-bit floats with a scale for each block MUST be read, whole or any slice of it, as the float64 "
    "oracle has it: each number times its scale, rounded to float32 once, then to the target's dtype; NaN is NaN.",
)
@given(data=st.data())
def test_fp8(checkpoint: Any, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    block = data.draw(st.sampled_from([1, 3, 16, 40]), label="block")
    shape = [data.draw(st.integers(1, 2 * block + 3), label="size") for _ in range(2)]
    dtype, target = data.draw(st.sampled_from(FP8)), data.draw(st.sampled_from(TARGETS))
    state = _matrix(shape, block, dtype, data.draw(st.integers(0, 99)))
    path = tmp_path_factory.mktemp("fp8")
    _save(checkpoint, state, path)
    options = {"block_size": block, "target_dtype": target, "thread_count": data.draw(st.integers(1, 3))}
    expected = _rounded(fp8_oracle(state["w.weight"], state["w.weight_scale_inv"], block), target)
    whole = _load(checkpoint, path, "w.weight", torch.empty(shape, dtype=target), **options)
    assert_same_tensor(_rounded(whole, target), expected, where=f"{dtype} {shape} by {block}")
    part = data.draw(_slices(shape), label="slice")
    piece = _empty_part(shape, part, target, is_strided=data.draw(st.booleans()))
    _load(checkpoint, path, "w.weight", piece, **options)
    assert_parts(_canonical(piece), expected, where=f"{dtype} {part}")


@requirement(
    "CKPT-451",
    "MXFP4 blocks MUST be read, whole or any slice of them, as the float64 oracle has them: the low half of a byte "
    "first, times two to the scale less 127; a scale of 255 makes NaN.",
)
@given(data=st.data())
def test_mxfp4(checkpoint: Any, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 3), max_size=2)) + [data.draw(st.integers(1, 5)) for _ in range(2)]
    target = data.draw(st.sampled_from(TARGETS))
    state = _groups(shape, data.draw(st.integers(0, 99)))
    path = tmp_path_factory.mktemp("mxfp4")
    _save(checkpoint, state, path)
    expected = _rounded(mxfp4_oracle(*state.values()), target)
    options = {"target_dtype": target, "thread_count": data.draw(st.integers(1, 3))}
    whole = _load(checkpoint, path, "w_blocks", torch.empty(expected.shape, dtype=target), **options)
    assert_same_tensor(_rounded(whole, target), expected, where=f"{shape}")
    part = data.draw(_slices(list(expected.shape)), label="slice")
    piece = _empty_part(expected.shape, part, target, is_strided=data.draw(st.booleans()))
    _load(checkpoint, path, "w_blocks", piece, **options)
    assert_parts(_canonical(piece), expected, where=f"{shape} {part}")


@requirement(
    "CKPT-549",
    "Any run of values of MXFP4 in groups of 16 bytes MUST be read with the scale of each value's own group, wherever "
    "in a group it begins and ends, into every dtype.",
)
def test_runs_of_groups(checkpoint: Any, tmp_path: Path) -> None:
    state = _groups([2, 5, 16], 7)
    _save(checkpoint, state, tmp_path)
    whole = mxfp4_oracle(*state.values())
    # Groups hold 32 values: runs inside one, to its end, over one border, and with whole groups behind a part of one.
    runs = [(0, 32), (1, 30), (31, 2), (5, 64), (1, 95), (31, 129), (33, 127), (32, 96), (159, 1)]
    for target in TARGETS:
        expected = _rounded(whole, target)
        for begin, count in runs:
            part = (slice(0, 2), slice(begin, begin + count))
            piece = _empty_part(whole.shape, part, target, is_strided=False)
            _load(checkpoint, tmp_path, "w_blocks", piece, target_dtype=target)
            assert_parts(_canonical(piece), expected, where=f"{target}, {count} from {begin}")


def _save_shards(rank: Rank, path: str) -> None:
    state = {**_matrix([37, 29], 4, torch.float8_e4m3fn, 1), **_groups([10, 3, 4], 2)}
    mesh = mesh_of(rank)
    given = {name: sharded(value, mesh, [Shard(0)]) for name, value in state.items()}
    # Scales are cut at other rows than the values that they belong to.
    given["w.weight_scale_inv"] = sharded(state["w.weight_scale_inv"], mesh, [Shard(1)])
    with rank.component("checkpoint").HuggingFaceStorageWriter(path, enable_consolidation=False) as writer:
        dcp.save(given, storage_writer=writer)


def _load_shards(rank: Rank, path: str) -> list[torch.Tensor]:
    reader = rank.component("checkpoint").QuantizedHuggingFaceStorageReader(path, block_size=4)
    mesh = mesh_of(rank)
    targets = {"w.weight": torch.empty(37, 29), "w_blocks": torch.empty(10, 24)}
    given = {name: sharded(value, mesh, [Shard(1)]) for name, value in targets.items()}
    dcp.load(given, storage_reader=reader)
    return [value.to_local() for value in given.values()]


@requirement(
    "CKPT-452",
    "Quantized tensors MUST be read rightly where values and scales are cut into shards at other places, and into "
    "targets that are sharded otherwise.",
)
def test_sharded(checkpoint: Any, rank_pool: Any, tmp_path: Path) -> None:
    rank_pool.run(_save_shards, 2, str(tmp_path / "shards"))
    matrix, groups = _matrix([37, 29], 4, torch.float8_e4m3fn, 1), _groups([10, 3, 4], 2)
    expected = [fp8_oracle(matrix["w.weight"], matrix["w.weight_scale_inv"], 4), mxfp4_oracle(*groups.values())]
    for rank_count in (1, 2):
        loaded = rank_pool.run(_load_shards, rank_count, str(tmp_path / "shards"))
        for number, whole in enumerate(expected):
            parts = torch.cat([each[number] for each in loaded], dim=1)
            assert_same_tensor(_rounded(parts, torch.float32), _rounded(whole, torch.float32), where=f"{rank_count}")


class _Noting(DefaultLoadPlanner):
    """Notes what is committed, as it is then."""

    def __init__(self) -> None:
        super().__init__()
        self.committed: list[tuple[str, torch.Tensor]] = []

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        self.committed.append((read_item.dest_index.fqn, tensor.clone()))


@requirement(
    "CKPT-632",
    "Each tensor that is loaded MUST be committed to the planner, once, when it holds its values: by the plain reader, "
    "and by that of quantized tensors, of those with scales and those without.",
)
def test_commits(checkpoint: Any, tmp_path: Path) -> None:
    scaled = _matrix([20, 10], 8, torch.float8_e4m3fn, 1)
    plain = {"a": random_bits(torch.int32, (5, 3), 3), "b": random_bits(torch.int16, (7,), 4)}
    _save(checkpoint, {**scaled, **plain}, tmp_path)
    whole = fp8_oracle(scaled["w.weight"], scaled["w.weight_scale_inv"], 8)
    for is_quantized in (False, True):
        expected = {**plain, "w.weight": whole if is_quantized else scaled["w.weight"]}
        if is_quantized:
            reader = checkpoint.QuantizedHuggingFaceStorageReader(tmp_path, block_size=8)
        else:
            reader = checkpoint.HuggingFaceStorageReader(tmp_path)
        planner = _Noting()
        load_with(reader, {name: torch.zeros_like(value) for name, value in expected.items()}, planner)
        where = f"quantized {is_quantized}"
        assert_equal(sorted(name for name, _ in planner.committed), sorted(expected), where=f"committed, {where}")
        for name, value in planner.committed:
            same = (
                _rounded(each, each.dtype) if each.is_floating_point() else each for each in (value, expected[name])
            )
            assert_same_tensor(*same, where=f"{name} when it was committed, {where}")


@requirement(
    "CKPT-453",
    "Beside quantized tensors, tensors without scales MUST be converted to their targets' dtypes, scales be readable "
    "as they are, and an empty target be made in the target dtype and the shape of the values.",
)
def test_others(checkpoint: Any, tmp_path: Path) -> None:
    state = {
        **_matrix([20, 10], 8, torch.float8_e4m3fn, 1),
        **_groups([3, 2, 4], 5),
        "norm.weight": random_bits(torch.bfloat16, [7], 3).nan_to_num(),
        "alone.weight": random_bits(torch.float8_e4m3fn, [2, 3], 4)
        .to(torch.float32)
        .nan_to_num()
        .to(torch.float8_e4m3fn),
        "count": torch.tensor([3]),
    }
    checkpoint.save_file(state, tmp_path / "model.safetensors")
    targets = {
        "norm.weight": torch.empty(7),
        "alone.weight": torch.empty(2, 3),
        "count": torch.empty(1, dtype=torch.int64),
        "w.weight_scale_inv": torch.empty(3, 2),
        "w_scales": torch.empty(3, 2, dtype=torch.uint8),
    }
    reader = checkpoint.QuantizedHuggingFaceStorageReader(tmp_path, block_size=8, target_dtype=torch.bfloat16)
    load_with(reader, targets)
    for name, value in targets.items():
        assert_same_tensor(value, state[name].to(value.dtype), where=name)
    reader = checkpoint.QuantizedHuggingFaceStorageReader(tmp_path, block_size=8, target_dtype=torch.bfloat16)
    found = reader.read_metadata().state_dict_metadata
    seen = {name: (tuple(entry.size), entry.properties.dtype) for name, entry in found.items()}
    assert_equal(seen["w.weight"], ((20, 10), torch.bfloat16), where="a matrix")
    assert_equal(seen["w_blocks"], ((3, 16), torch.bfloat16), where="MXFP4")
    assert_equal(seen["norm.weight"], ((7,), torch.bfloat16), where="another tensor")


class _NotedEngine(InlineEngine):
    """Notes on which stream work was done; each thread has a current stream of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.used: list[str] = []

    def current(self) -> str:
        """The thread's."""
        return f"current stream of {threading.current_thread().name}"

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        """Note it."""
        self.used.append(stream)
        yield


@requirement(
    "CKPT-476",
    "A quantized load MUST write memory of a device on its caller's current stream, whatever thread converts.",
)
def test_targets_are_written_on_the_callers_stream(
    checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "PIECE_BYTES", 64)
    state = _matrix([20, 10], 8, torch.float8_e4m3fn, 1)
    _save(checkpoint, state, tmp_path)
    for threads in (1, 2, 3):
        engine = _NotedEngine()
        monkeypatch.setattr(storage, "engine_for", lambda device, engine=engine: engine)
        # A target of another dtype is copied to, as one on a device is.
        options = {"block_size": 8, "target_dtype": torch.bfloat16, "thread_count": threads}
        _load(checkpoint, tmp_path, "w.weight", torch.empty(20, 10), **options)
        assert_equal(set(engine.used), {engine.current()}, where=f"{threads} threads")


@requirement(
    "CKPT-513",
    "A quantized tensor MUST be read alike whatever is converted at once: less than a row, rows and one byte less or "
    "more, all of it.",
)
def test_pieces(checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = _matrix([7, 12], 4, FP8[0], 1) | _groups([3, 5, 2, 16], 2)
    _save(checkpoint, state, tmp_path)
    shapes = {"w.weight": [7, 12], "w_blocks": [3, 5, 64]}
    for name, shape in shapes.items():
        row_bytes = 12 if name == "w.weight" else 32
        expected: torch.Tensor | None = None
        for rows in (1000, 0, 1, 2, 3, 5, 6, 7, 15):
            for more in (-1, 0, 1):
                monkeypatch.setattr("twinproof.checkpoint.dcp.PIECE_BYTES", max(1, rows * row_bytes + more))
                found = torch.full(shape, -7.0)
                found = _rounded(_load(checkpoint, tmp_path, name, found, block_size=4), torch.float32)
                expected = found if expected is None else expected
                assert_same_tensor(found, expected, where=f"{name} by {rows} rows and {more} bytes")


@requirement(
    "CKPT-454",
    "Scales that do not fit, values of another kind, a path that leaves the folder, and a target that is no floating "
    "point MUST be errors that name the tensor, before any target is written.",
)
def test_refusals(checkpoint: Any, tmp_path: Path) -> None:
    good = _matrix([20, 10], 8, torch.float8_e4m3fn, 1)
    cases: list[tuple[str, dict[str, torch.Tensor], type[Exception], str]] = [
        ("few", {**good, "w.weight_scale_inv": torch.ones(2, 2)}, CorruptionError, "w.weight_scale_inv"),
        ("cube", {**good, "w.weight": random_bits(FP8[0], [2, 10, 10], 1)}, UnsupportedError, "w.weight"),
        ("wide", {**good, "w.weight": torch.ones(20, 10)}, UnsupportedError, "w.weight"),
        ("groups", {"w_blocks": torch.ones(2, 3, 4), "w_scales": torch.ones(2, 3)}, UnsupportedError, "w_blocks"),
        (
            "short",
            {"w_blocks": torch.ones(2, 3, 4, dtype=torch.uint8), "w_scales": torch.ones(2, dtype=torch.uint8)},
            CorruptionError,
            "w_",
        ),
    ]
    for name, state, error, said in cases:
        checkpoint.save_file(state, tmp_path / f"{name}.safetensors")
        target = torch.zeros(20, 10)
        with raises(error, mentions=[said], where=name):
            _load(checkpoint, tmp_path / f"{name}.safetensors", "w.weight", target, block_size=8)
        assert_equal(bool(target.any()), False, where=f"{name}: the target")
    folder = tmp_path / "escape"
    folder.mkdir()
    checkpoint.save_file({"w.weight": good["w.weight"]}, folder / "a.safetensors")
    checkpoint.save_file({"w.weight_scale_inv": good["w.weight_scale_inv"]}, tmp_path / "b.safetensors")
    index = {"weight_map": {"w.weight": "a.safetensors", "w.weight_scale_inv": "../b.safetensors"}}
    (folder / INDEX).write_text(json.dumps(index))
    with raises(FormatError, mentions=["../b.safetensors"], where="a path that leaves the folder"):
        _load(checkpoint, folder, "w.weight", torch.empty(20, 10))
    checkpoint.save_file({**good, "x": torch.ones(3)}, tmp_path / "good.safetensors")
    untouched = torch.zeros(3)
    reader = checkpoint.QuantizedHuggingFaceStorageReader(tmp_path / "good.safetensors", block_size=8)
    with raises(UnsupportedError, mentions=["w.weight"], where="an integer target"):
        load_with(reader, {"x": untouched, "w.weight": torch.empty(20, 10, dtype=torch.int32)})
    assert_equal(bool(untouched.any()), False, where="other targets")
    for options, said in (({"target_dtype": torch.int8}, "target_dtype"), ({"block_size": 0}, "block_size")):
        with raises(ConfigError, mentions=[said], where=str(options)):
            checkpoint.QuantizedHuggingFaceStorageReader(tmp_path, **options)


@requirement(
    "CKPT-455",
    "A manager MUST start from a quantized HF checkpoint where told to, and refuse to where it is not one.",
)
def test_manager(checkpoint: Any, tmp_path: Path) -> None:
    state = {"weight": random_bits(FP8[0], [20, 10], 1), "weight_scale_inv": _scales([1, 1], 2), "bias": torch.ones(20)}
    named = {f"0.{name}": value for name, value in state.items()}
    checkpoint.save_file(named, tmp_path / "model.safetensors")
    model = torch.nn.Sequential(torch.nn.Linear(10, 20))
    options = {"initial_load_path": tmp_path, "initial_load_in_hf": True, "initial_load_in_hf_quantized": True}
    with checkpoint.CheckpointManager(tmp_path / "run", model=model, interval=1, **options) as manager, alone():
        assert_equal(manager.load(), True, where="loaded")
    weight = model.state_dict()["0.weight"]
    expected = fp8_oracle(state["weight"], state["weight_scale_inv"], 128)
    assert_same_tensor(_rounded(weight, torch.float32), _rounded(expected, torch.float32), where="the weight")


@requirement(
    "CKPT-559",
    "A manager that verifies MUST compare the checksums of a quantized HF checkpoint that it starts from.",
)
def test_manager_compares(checkpoint: Any, tmp_path: Path) -> None:
    state = {"weight": random_bits(FP8[0], [20, 10], 1), "weight_scale_inv": _scales([1, 1], 2), "bias": torch.ones(20)}
    checkpoint.save_file(
        {f"0.{name}": value for name, value in state.items()}, tmp_path / "model.safetensors", checksums=True
    )
    options = {"initial_load_path": tmp_path, "initial_load_in_hf": True, "initial_load_in_hf_quantized": True}
    for flipped in (False, True):
        content = bytearray((tmp_path / "model.safetensors").read_bytes())
        content[-1] ^= flipped
        (tmp_path / "model.safetensors").write_bytes(content)
        model = torch.nn.Sequential(torch.nn.Linear(10, 20))
        run = tmp_path / f"{flipped}"
        with (
            checkpoint.CheckpointManager(run, model=model, interval=1, verify_checksums=True, **options) as manager,
            alone(),
        ):
            if not flipped:
                assert_equal(manager.load(), True, where="loaded")
                continue
            with raises(CorruptionError, mentions=["0.weight"], where="a flipped bit"):
                manager.load()


@requirement(
    "CKPT-600",
    "A quantized tensor MUST be read into a target that is negated lazily, dense or not, as into any other.",
)
def test_negated_targets(checkpoint: Any, tmp_path: Path) -> None:
    state = _matrix([6, 10], 4, FP8[0], 1) | _groups([3, 2, 16], 2)
    _save(checkpoint, state, tmp_path)
    matrix = fp8_oracle(state["w.weight"], state["w.weight_scale_inv"], 4)
    for name, whole in (("w.weight", matrix), ("w_blocks", mxfp4_oracle(state["w_blocks"], state["w_scales"]))):
        dense, apart = torch.zeros(whole.shape), torch.zeros(whole.shape, dtype=torch.complex64).conj().imag
        for where, target in (("dense", torch._neg_view(dense)), ("of a conjugate", apart)):
            with succeeds("a load", where=f"{name}, {where}"):
                _load(checkpoint, tmp_path, name, target, block_size=4)
            got = _rounded(target.resolve_neg().contiguous(), torch.float32)
            assert_same_tensor(got, _rounded(whole, torch.float32), where=f"{name}, {where}")


def _views_of(shape: Sequence[int], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Zeros of a shape, of three dimensions or two, as they may lie in larger memory."""
    *rest, rows, columns = shape
    views = {
        "one of two side by side": torch.zeros(*rest, rows, 2 * columns, dtype=dtype)[..., columns:],
        "one of two below each other": torch.zeros(*rest, 2 * rows, columns, dtype=dtype).narrow(-2, 0, rows),
        "turned": torch.zeros(*rest, columns, rows, dtype=dtype).transpose(-1, -2),
        "every second column": torch.zeros(*rest, rows, 2 * columns, dtype=dtype)[..., ::2],
        "dimensions from the first to the last": torch.zeros(*reversed(shape), dtype=dtype).permute(
            *reversed(range(len(shape)))
        ),
    }
    if rest:
        views["every second matrix"] = torch.zeros(2 * rest[0], *rest[1:], rows, columns, dtype=dtype)[::2]
    return views


@requirement(
    "CKPT-656",
    "A quantized tensor MUST be read into a part of larger memory, such as an expert's half of a fused buffer, as into "
    "memory of its own, and nothing beside it be written.",
)
def test_parts_of_larger_memory(checkpoint: Any, tmp_path: Path) -> None:
    state = _matrix([6, 10], 4, FP8[0], 1) | _groups([2, 3, 2, 16], 2)
    _save(checkpoint, state, tmp_path)
    matrix = fp8_oracle(state["w.weight"], state["w.weight_scale_inv"], 4)
    for name, whole in (("w.weight", matrix), ("w_blocks", mxfp4_oracle(state["w_blocks"], state["w_scales"]))):
        for dtype in TARGETS:
            for view, target in _views_of(list(whole.shape), dtype).items():
                where = f"{name} as {dtype}, {view}"
                _load(checkpoint, tmp_path, name, target, block_size=4, target_dtype=dtype)
                assert_same_tensor(_rounded(target.contiguous(), dtype), _rounded(whole, dtype), where=where)
                target.zero_()
                memory = torch.tensor([], dtype=dtype).set_(target.untyped_storage())
                assert_equal(int(memory.count_nonzero()), 0, where=f"{where}: written beside it")


@requirement(
    "CKPT-681",
    "A quantized tensor MUST be rounded to the reader's target_dtype and then to its target's dtype, whichever of the "
    "two is the wider, and where they are of one width.",
)
def test_through_the_target_dtype(checkpoint: Any, tmp_path: Path) -> None:
    state = _matrix([9, 10], 4, FP8[0], 1) | _groups([2, 3, 2, 16], 2)
    _save(checkpoint, state, tmp_path)
    matrix = fp8_oracle(state["w.weight"], state["w.weight_scale_inv"], 4)
    for name, whole in (("w.weight", matrix), ("w_blocks", mxfp4_oracle(state["w_blocks"], state["w_scales"]))):
        for through in TARGETS:
            for dtype in TARGETS:
                target = torch.empty(whole.shape, dtype=dtype)
                _load(checkpoint, tmp_path, name, target, block_size=4, target_dtype=through)
                where = f"{name} through {through} as {dtype}"
                assert_same_tensor(_rounded(target, dtype), _rounded(whole.to(through), dtype), where=where)


class _Replacing(DefaultLoadPlanner):
    """Puts another file in the place of one when the first target is asked for: headers are read, values are not."""

    def __init__(self, new: Path, old: Path) -> None:
        super().__init__()
        self._new, self._old = new, old

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        if self._new.exists():
            self._new.replace(self._old)
        target: torch.Tensor = super().resolve_tensor(read_item)
        return target


@requirement(
    "CKPT-617",
    "A file of values and a file of scales MUST each be noticed, by its name, where it is replaced during a load.",
)
def test_files_replaced_while_read(checkpoint: Any, tmp_path: Path) -> None:
    forms = {"fp8": _matrix([20, 10], 8, torch.float8_e4m3fn, 1), "mxfp4": _groups([3, 2, 16], 1)}
    for form, state in forms.items():
        name, shape = ("w.weight", (20, 10)) if form == "fp8" else ("w_blocks", (3, 64))
        for replaced in (*state, None):
            folder = tmp_path / f"{form}-{replaced}"
            folder.mkdir()
            for tensor, value in state.items():
                checkpoint.save_file({tensor: value}, folder / f"{tensor}.safetensors")
            (folder / INDEX).write_text(json.dumps({"weight_map": {each: f"{each}.safetensors" for each in state}}))
            reader = checkpoint.QuantizedHuggingFaceStorageReader(folder, block_size=8)
            new, old = folder / ".new", folder / f"{replaced}.safetensors"
            if replaced is None:
                with succeeds("nothing is replaced", where=form):
                    load_with(reader, {name: torch.empty(shape)}, _Replacing(new, old))
                continue
            # Of another length, as a clock may give two files one time.
            checkpoint.save_file({replaced: state[replaced]}, new, {"saved": "later"})
            with raises(CorruptionError, mentions=[old.name], where=f"{form}: {replaced}"):
                load_with(reader, {name: torch.empty(shape)}, _Replacing(new, old))


@requirement(
    "CKPT-850",
    "A quantized reader that loads again MUST read values and scales as they lie there then: where other files have "
    "come to its path, and from another path.",
)
def test_loads_of_one_reader(checkpoint: Any, tmp_path: Path) -> None:
    for form, name, shape in (("fp8", "w.weight", (20, 10)), ("mxfp4", "w_blocks", (3, 64))):
        folders = [tmp_path / f"{form}-{number}" for number in range(2)]
        used = checkpoint.QuantizedHuggingFaceStorageReader(folders[0], block_size=8)
        for seed, folder in enumerate((*folders, folders[1], folders[0]), start=1):
            folder.mkdir(exist_ok=True)
            made = _matrix([20, 10], 8, torch.float8_e4m3fn, seed) if form == "fp8" else _groups([3, 2, 16], seed)
            _save(checkpoint, made, folder)
            used.reset(folder)
            found = torch.empty(shape)
            load_with(used, {name: found})
            values, scales = made.values()
            expected = fp8_oracle(values, scales, 8) if form == "fp8" else mxfp4_oracle(values, scales)
            assert_same_tensor(
                _rounded(found, torch.float32), _rounded(expected, torch.float32), where=f"{form}, load {seed}"
            )


@requirement(
    "CKPT-619",
    "Quantized values MUST be read into a target whose rows lie further apart in memory than 2**32 elements.",
)
def test_far_rows(checkpoint: Any, tmp_path: Path) -> None:
    forms = {"fp8": _matrix([3, 40], 8, torch.float8_e4m3fn, 1), "mxfp4": _groups([3, 2, 16], 1)}
    for form, state in forms.items():
        name, columns = ("w.weight", 40) if form == "fp8" else ("w_blocks", 64)
        _save(checkpoint, state, tmp_path)
        near = _load(checkpoint, tmp_path, name, torch.empty(3, columns, dtype=torch.float16), block_size=8)
        # A sparse file for memory, of which three pages are touched.
        stride = (2 << 30) + 8
        place = str(tmp_path / f"{form}.memory")
        memory = torch.from_file(place, shared=True, size=2 * stride + columns, dtype=torch.float16)
        far = _load(checkpoint, tmp_path, name, memory.as_strided((3, columns), (stride, 1)), block_size=8)
        assert_same_tensor(far.clone(memory_format=torch.contiguous_format), near, where=form)


@requirement(
    "CKPT-626",
    "A row of any length MUST be read right in every dtype: MXFP4 of whole groups and of parts, and blocks of 8-bit "
    "floats, of more numbers than are converted at a time.",
)
@pytest.mark.parametrize("target", TARGETS)
def test_long_rows(checkpoint: Any, tmp_path: Path, target: torch.dtype) -> None:
    state = (
        _matrix([2, 1300], 1200, FP8[0], 1)
        | _groups([2, 34, 16], 2)
        | {"v_blocks": random_bits(torch.uint8, [2, 1, 600], 3)}
    )
    state["v_scales"] = random_bits(torch.uint8, [2, 1], 4)
    _save(checkpoint, state, tmp_path)
    wholes = {
        "w.weight": fp8_oracle(state["w.weight"], state["w.weight_scale_inv"], 1200),
        "w_blocks": mxfp4_oracle(state["w_blocks"], state["w_scales"]),
        "v_blocks": mxfp4_oracle(state["v_blocks"], state["v_scales"]),
    }
    for name, whole in wholes.items():
        expected = _rounded(whole, target)
        # What is converted at a time are 512 numbers: one less and one more, twice as many, and all from other places.
        for begin, count in ((0, whole.size(1)), (0, 511), (0, 512), (0, 513), (32, 1024), (5, 1025), (31, 545)):
            piece = _empty_part(whole.shape, (slice(0, 2), slice(begin, begin + count)), target, is_strided=False)
            _load(checkpoint, tmp_path, name, piece, target_dtype=target, block_size=1200)
            assert_parts(_canonical(piece), expected, where=f"{name} into {target}, {count} from {begin}")


@requirement(
    "CKPT-627",
    "A scale that is no number MUST make NaN of its whole block, in every dtype, whatever bits the NaN has.",
)
@pytest.mark.parametrize("bits", [0x7F800001, 0x7FC00000, 0x7FFFFFFF, -1, -0x7FFFFF])
def test_scales_that_are_no_numbers(checkpoint: Any, tmp_path: Path, bits: int) -> None:
    state = _matrix([4, 48], 4, FP8[0], 1)
    state["w.weight_scale_inv"][0, :] = torch.full((12,), bits, dtype=torch.int32).view(torch.float32)
    _save(checkpoint, state, tmp_path)
    for target in TARGETS:
        got = _load(
            checkpoint, tmp_path, "w.weight", torch.zeros(4, 48, dtype=target), block_size=4, target_dtype=target
        )
        assert_equal(int(got.isnan().sum()), got.numel(), where=f"values of {target} that are NaN")


# What keeps a tensor, or the scales beside it, from being compared; and what of a matrix with scales is then named.
_SCALED = ("l.weight", "l.weight_scale_inv")
_NOT_COMPARED: dict[str, tuple[str, ...]] = {
    "compared": (),
    "not loaded": (),
    "in part": _SCALED,
    "no sum": _SCALED[:1],
    "no sum of scales": _SCALED[1:],
    "no sum of either": _SCALED,
}


def _asked_for(name: str, shape: tuple[int, int], how: str) -> dict[str, Any]:
    """The target of one tensor: whole, in part or none."""
    whole = torch.zeros(shape)
    part: Any = {name: tiled(whole, cut(shape, [[3], []]), 0, 2, fill=False)} if how == "in part" else {name: whole}
    return {} if how == "not loaded" else part


@requirement(
    "CKPT-724",
    "A load of block-quantized weights that compares checksums MUST name everything of it that could not be compared, "
    "with scales and without, as it has no checksum or is read in part, and nothing of another load.",
)
def test_all_that_is_not_compared(checkpoint: Any, tmp_path: Path) -> None:
    state = {
        "l.weight": torch.ones(6, 10).to(torch.float8_e4m3fn),
        "l.weight_scale_inv": torch.ones(2, 3),
        "plain": torch.ones(6, 10),
        "other": torch.ones(5),
    }
    save(checkpoint, state, tmp_path / "ck", checksums=True)
    index = json.loads((tmp_path / "ck" / INDEX).read_text())
    reader = checkpoint.QuantizedHuggingFaceStorageReader(tmp_path / "ck", block_size=4, verify_checksums=True)
    for scaled, named in _NOT_COMPARED.items():
        for plain in ("compared", "not loaded", "in part", "no sum"):
            absent = {*(named if scaled.startswith("no sum") else ()), *(("plain",) if plain == "no sum" else ())}
            stated = {name: crc for name, crc in sums_of(state).items() if name not in absent}
            index["metadata"][CHECKSUMS_KEY] = stated
            (tmp_path / "ck" / INDEX).write_text(json.dumps(index))
            targets = {**_asked_for("l.weight", (6, 10), scaled), **_asked_for("plain", (6, 10), plain)}
            load_with(reader, {**targets, "other": torch.zeros(5)})
            expected = {*named, *(("plain",) if plain in ("in part", "no sum") else ())}
            where = f"with scales: {scaled}, without: {plain}"
            assert_equal(reader.unverified, tuple(sorted(expected)), where=where)
