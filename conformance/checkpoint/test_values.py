"""Values: what was saved is what is loaded, bit for bit, for everything that torch can store."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.checkpoint.cases import (
    DTYPES,
    FILE,
    PT,
    Tiled,
    assert_folder,
    assert_loads,
    bits,
    load,
    oracle,
    random_bits,
    save,
    zeros_like,
)
from conformance.checkpoint.hostile import pack
from conformance.harness import (
    assert_equal,
    assert_same_bytes,
    assert_same_tensor,
    assert_same_tensors,
    examples,
    raises,
    requirement,
    succeeds,
)
from twinproof.errors import UnsupportedError


@requirement(
    "CKPT-001", "A save followed by a load MUST give back every bit, for each of the 20 dtypes that torch can store."
)
def test_every_dtype(checkpoint: Any, device: str, tmp_path: Path) -> None:
    state = {str(dtype): random_bits(dtype, (5, 6), seed) for seed, dtype in enumerate(DTYPES)}
    save(checkpoint, state, tmp_path / "ck", on=device)
    assert_folder(tmp_path / "ck", {FILE: list(state)}, state)
    assert_loads(checkpoint, tmp_path / "ck", state, on=device)


@requirement("CKPT-002", "NaN payloads, signed zeros, infinities and subnormals MUST keep their bits.")
def test_special_floats(checkpoint: Any, device: str, tmp_path: Path) -> None:
    words = [0x7FC00001, 0x7F800001, 0xFFC12345, 0x80000000, 0x7F800000, 0xFF800000, 0x00000001, 0x807FFFFF]
    floats = torch.frombuffer(bytearray(struct.pack("<8I", *words)), dtype=torch.float32)
    halves = torch.arange(0, 65536, 7, dtype=torch.int32).to(torch.uint16)
    state = {"f32": floats, "f16": halves.view(torch.float16), "bf16": halves.view(torch.bfloat16)}
    save(checkpoint, state, tmp_path / "ck", on=device)
    assert_loads(checkpoint, tmp_path / "ck", state, on=device)


@requirement(
    "CKPT-003", "Bool bytes MUST stay 0 and 1, and complex64 MUST keep real before imaginary, lazy conjugates resolved."
)
def test_bool_and_complex(checkpoint: Any, device: str, tmp_path: Path) -> None:
    lazy = torch.tensor([1 + 2j, -3 - 4j], dtype=torch.complex64).conj()
    state = {"b": torch.tensor([True, False, True]), "c": torch.tensor([1 + 2j]).to(torch.complex64), "conj": lazy}
    save(checkpoint, state, tmp_path / "ck", on=device)
    data = (tmp_path / "ck" / FILE).read_bytes()
    expected = struct.pack("<6f", 1, 2, 1, -2, -3, 4) + b"\x01\x00\x01"
    assert_same_bytes(data[-27:], expected, where="data section")


@requirement("CKPT-004", "0-dim tensors MUST keep their value and the shape [].")
def test_scalars(checkpoint: Any, device: str, tmp_path: Path) -> None:
    state = {"f": torch.tensor(3.5), "i": torch.tensor(-7), "b": torch.tensor(True), "h": torch.tensor(2.0).bfloat16()}
    save(checkpoint, state, tmp_path / "ck", on=device)
    assert_folder(tmp_path / "ck", {FILE: list(state)}, state)
    assert_loads(checkpoint, tmp_path / "ck", state, on=device)


@requirement(
    "CKPT-005",
    "Zero-size tensors MUST keep shape and dtype, wherever the zero dimension stands and however many there are.",
)
def test_empty_tensors(checkpoint: Any, device: str, tmp_path: Path) -> None:
    shapes = [(0,), (0, 3), (3, 0), (2, 0, 5), (0, 0)]
    state = {f"e{i}": torch.empty(shape, dtype=DTYPES[i]) for i, shape in enumerate(shapes)} | {"full": torch.ones(3)}
    save(checkpoint, state, tmp_path / "ck", on=device)
    assert_folder(tmp_path / "ck", {FILE: list(state)}, state)
    assert_loads(checkpoint, tmp_path / "ck", state, on=device)


@requirement(
    "CKPT-006",
    "float4 MUST be stored with the header's last dimension doubled; a 0-dim float4 MUST be refused by name.",
)
def test_float4(checkpoint: Any, device: str, tmp_path: Path) -> None:
    value = random_bits(torch.float4_e2m1fn_x2, (2, 3), 1)
    save(checkpoint, {"q": value}, tmp_path / "ck", on=device)
    raw = (tmp_path / "ck" / FILE).read_bytes()
    assert_equal(b'"q":{"dtype":"F4","shape":[2,6],"data_offsets":[0,6]}' in raw, True, where="header")
    assert_loads(checkpoint, tmp_path / "ck", {"q": value}, on=device)
    with raises(UnsupportedError, mentions=("scalar4",)):
        save(
            checkpoint,
            {"scalar4": value.view(torch.uint8)[0, 0].view(torch.float4_e2m1fn_x2)},
            tmp_path / "no",
            on=device,
        )


@requirement("CKPT-007", "Transposed, expanded, sliced and permuted inputs MUST be saved as their logical values.")
@examples(30)
@given(st.integers(0, 2**31), st.sampled_from(DTYPES), st.permutations([0, 1, 2]), st.integers(1, 3), st.booleans())
def test_strided_inputs(
    checkpoint: Any, tmp_path_factory: Any, seed: int, dtype: torch.dtype, order: list[int], step: int, narrow: bool
) -> None:
    folder = tmp_path_factory.mktemp("strided")
    base = random_bits(dtype, (4, 6, 5), seed).permute(order)
    view = base[::step, 1:] if narrow else base[:, ::step]
    state = {"view": view, "row": base[1], "expanded": random_bits(dtype, (3, 1), seed).expand(3, 4)}
    save(checkpoint, state, folder / "ck")
    assert_same_bytes(folder / "ck" / FILE, oracle(state, PT), where="strided views")
    load(
        checkpoint,
        targets := {
            name: zeros_like(value.contiguous() if dtype not in DTYPES[-2:] else value) for name, value in state.items()
        },
        folder / "ck",
    )
    assert_same_tensors(targets, {name: _dense(value) for name, value in state.items()})


@requirement(
    "CKPT-482",
    "Tensors of up to 64 dimensions, in any order in memory, MUST be saved and loaded as their logical values.",
)
def test_many_dimensions(checkpoint: Any, tmp_path: Path) -> None:
    def turned(shape: tuple[int, ...]) -> torch.Tensor:
        # Neighbouring dimensions never lie in memory as one.
        return random_bits(torch.int32, shape, len(shape)).permute(*reversed(range(len(shape))))

    state = {f"of {n}": turned((2,) * n) for n in (15, 16, 17, 18)}
    state["of 64"] = turned((1, 2, 1, 1) * 16)
    state["expanded"] = state["of 17"][:1].expand(state["of 17"].shape)
    save(checkpoint, state, tmp_path / "ck")
    assert_same_bytes(tmp_path / "ck" / FILE, oracle(state, PT), where="many dimensions")
    targets = {name: torch.zeros_like(value, memory_format=torch.preserve_format) for name, value in state.items()}
    load(checkpoint, targets, tmp_path / "ck")
    assert_same_tensors(targets, {name: _dense(value) for name, value in state.items()})


def _dense(value: torch.Tensor) -> torch.Tensor:
    return bits(value).contiguous().view(value.dtype)


@requirement("CKPT-008", "A view with a storage offset or a larger storage MUST write only its own bytes.")
def test_views_of_larger_storage(checkpoint: Any, device: str, tmp_path: Path) -> None:
    storage = torch.arange(100_000, dtype=torch.float32)
    state = {"slice": storage[500:510], "tail": storage[-3:]}
    save(checkpoint, state, tmp_path / "ck", on=device)
    assert_same_bytes(tmp_path / "ck" / FILE, oracle(state, PT), where="slices")


@requirement("CKPT-009", "Tensors beyond 4 GiB MUST be laid out and read with 64-bit offsets.")
def test_beyond_4_gib(checkpoint: Any, tmp_path: Path) -> None:
    # A sparse file: the header says 5 GiB, the disk holds a page at each end.
    rows, columns = 5 * 1024, 1024 * 1024
    header = b'{"big":{"dtype":"U8","shape":[%d,%d],"data_offsets":[0,%d]}}' % (rows, columns, rows * columns)
    header += b" " * (-len(header) % 8)
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write(pack(header))
        file.seek(8 + len(header) + rows * columns - 5)
        file.write(b"\x01\x02\x03\x04\x05")
    target = Tiled.of((rows, columns), {(rows - 1, columns - 8): torch.zeros(1, 8, dtype=torch.uint8)}, torch.uint8)
    load(checkpoint, {"big": target}, path)
    got = bytes(target.parts[rows - 1, columns - 8].flatten().tolist())
    assert_same_bytes(got, b"\0\0\0\x01\x02\x03\x04\x05", where="last 8 bytes")


@requirement(
    "CKPT-010", "Parameters and tensors that require grad MUST be saved as data; meta tensors MUST be refused by name."
)
def test_parameters_and_meta(checkpoint: Any, device: str, tmp_path: Path) -> None:
    state = {"p": torch.nn.Parameter(torch.randn(3)), "g": torch.randn(2, requires_grad=True)}
    save(checkpoint, state, tmp_path / "ck", on=device)
    assert_loads(checkpoint, tmp_path / "ck", {name: value.detach() for name, value in state.items()}, on=device)
    with raises(UnsupportedError, mentions=("ghost",)):
        save(checkpoint, {"ghost": torch.empty(3, device="meta")}, tmp_path / "no")
    assert_equal((tmp_path / "no").exists(), False, where="a refused save")


@requirement(
    "CKPT-550",
    "Rows, and parts of rows with small and with large gaps, MUST be read right where they lie beyond 2 GiB and 4 GiB "
    "of their tensor.",
    needs=("ranged_reads",),
)
def test_rows_beyond_2_gib(checkpoint: Any, tmp_path: Path) -> None:
    rows, columns = (4 << 30) // 4200 + 9, 4200
    header = b'{"big":{"dtype":"U8","shape":[%d,%d],"data_offsets":[0,%d]}}' % (rows, columns, rows * columns)
    header += b" " * (-len(header) % 8)
    path, places = tmp_path / "model.safetensors", [(2 << 30) // columns - 2, rows - 5]
    written = random_bits(torch.uint8, (5, columns), 1)
    with path.open("wb") as file:
        file.write(pack(header))
        for row in places:
            file.seek(8 + len(header) + row * columns)
            file.write(written.numpy().tobytes())
    for first in places:
        # What is read at once, in windows with the gaps between, and run by run.
        for column, count in ((0, columns), (1, columns - 100), (7, 50)):
            offsets = (first, column)
            target = Tiled.of((rows, columns), {offsets: torch.zeros(5, count, dtype=torch.uint8)}, torch.uint8)
            with succeeds("a load", where=f"{count} columns at {offsets}"):
                load(checkpoint, {"big": target}, path)
            expected = {"big": written[:, column : column + count].contiguous()}
            assert_same_tensors({"big": target.parts[offsets]}, expected, where=f"{count} columns at {offsets}")


@requirement(
    "CKPT-618",
    "A tensor whose rows lie further apart in memory than 2**31 and 2**32 elements MUST be saved from there and loaded "
    "to there.",
)
def test_strides_beyond_4_gib(checkpoint: Any, tmp_path: Path) -> None:
    # A sparse file for memory, of which a few pages are touched.
    stride = (2 << 30) + 8
    memory = torch.from_file(str(tmp_path / "memory"), shared=True, size=2 * stride + 4096, dtype=torch.uint8)
    far = memory.as_strided((3, 4, 5), (stride, 64, 2))
    values = torch.arange(1, 61, dtype=torch.uint8).reshape(far.shape)
    far.copy_(values)
    save(checkpoint, {"far": far}, tmp_path / "ck")
    assert_loads(checkpoint, tmp_path / "ck", {"far": values})
    far.zero_()
    load(checkpoint, {"far": far}, tmp_path / "ck")
    assert_same_tensor(far.clone(memory_format=torch.contiguous_format), values, where="loaded into far rows")


def _of_one(value: float, dtype: torch.dtype, rank: int, stride: int) -> torch.Tensor:
    """One element, of which every dimension has this stride."""
    memory = torch.full((stride + 1,), -5.0).to(dtype)
    memory[0] = value
    return memory.as_strided((1,) * rank, (stride,) * rank)


@requirement(
    "CKPT-658",
    "What stride a dimension of one element has, where it means nothing, MUST NOT matter to a save or a load, with "
    "checksums and compared replicas or without.",
)
def test_strides_of_one(checkpoint: Any, tmp_path: Path) -> None:
    kinds = [(dtype, rank, stride) for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.complex64)
             for rank in (0, 1, 2) for stride in (1, 5)]  # fmt: skip
    state = {str(kind): _of_one(3.0, *kind) for kind in kinds}
    expected = {str(kind): torch.full((1,) * kind[1], 3.0).to(kind[0]) for kind in kinds}
    for number, options in enumerate(({}, {"checksums": True, "check_replicas": True})):
        path = tmp_path / f"{number}"
        with succeeds("a save and a load", where=f"{options}"):
            save(checkpoint, state, path, **options)
            targets = {str(kind): _of_one(0.0, *kind) for kind in kinds}
            load(checkpoint, targets, path, verify_checksums=bool(options))
        assert_same_tensors(targets, expected, where=f"{options}")
    with succeeds("save_file", where="strides of one"):
        checkpoint.save_file(state, tmp_path / "one.safetensors")
        assert_same_tensors(checkpoint.load_file(tmp_path / "one.safetensors"), expected, where="save_file")
