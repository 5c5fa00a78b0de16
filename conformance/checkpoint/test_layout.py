"""File layout: canonical bytes, the same whoever writes them and however."""

from __future__ import annotations

import errno
import json
import logging
import os
import struct
from collections.abc import Callable
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import safetensors
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Shard

from conformance.checkpoint.cases import (
    DTYPES,
    FILE,
    INDEX,
    PT,
    Tiled,
    assert_folder,
    assert_loads,
    mesh_of,
    oracle,
    random_bits,
    save,
    save_ranks,
    sharded,
)
from conformance.harness import Rank, assert_equal, assert_same_bytes, examples, raises, requirement, succeeds
from twinproof.checkpoint.format import layout_of, with_options
from twinproof.errors import ConfigError, UnsupportedError


def _header(path: Path) -> tuple[int, dict[str, Any]]:
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    return length, json.loads(raw[8 : 8 + length])


@requirement(
    "CKPT-011", "A written file MUST open in the safetensors library with exactly the saved names, dtypes and shapes."
)
def test_safetensors_opens_it(checkpoint: Any, tmp_path: Path) -> None:
    state = {str(dtype): random_bits(dtype, (3, 4), 1) for dtype in DTYPES}
    save(checkpoint, state, tmp_path / "ck")
    with safetensors.safe_open(tmp_path / "ck" / FILE, framework="pt") as file:
        assert_equal(sorted(file.keys()), sorted(state), where="names")
        got = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for name, value in state.items():
        assert_equal((got[name].dtype, got[name].shape), (value.dtype, value.shape), where=name)


@requirement(
    "CKPT-012", "A file MUST be byte-identical to the safetensors library's own for the same tensors and metadata."
)
@examples(40)
@given(
    st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), min_size=1, max_size=3)), min_size=1, max_size=8
    ),
    st.randoms(),
)
def test_canonical_bytes(
    checkpoint: Any, tmp_path_factory: Any, specs: list[tuple[torch.dtype, list[int]]], random: Any
) -> None:
    folder = tmp_path_factory.mktemp("canonical")
    state = {
        f"layer.{i}.{random.choice('abé')}": random_bits(dtype, shape, i) for i, (dtype, shape) in enumerate(specs)
    }
    save(checkpoint, state, folder / "ck")
    assert_same_bytes(folder / "ck" / FILE, oracle(state, PT), where="file")


@requirement(
    "CKPT-013",
    "With page_align a file MUST start its data at a multiple of 4096 and differ in header padding only.",
)
def test_page_align(checkpoint: Any, tmp_path: Path) -> None:
    state = {"a": torch.randn(7, 3), "b": torch.arange(5)}
    save(checkpoint, state, tmp_path / "ck", page_align=True)
    raw = (tmp_path / "ck" / FILE).read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    assert_equal((8 + length) % 4096, 0, where="data start")
    plain = oracle(state, PT)
    plain_length = struct.unpack("<Q", plain[:8])[0]
    assert_same_bytes(raw[8 : 8 + length].rstrip(b" "), plain[8 : 8 + plain_length].rstrip(b" "), where="header")
    assert_same_bytes(raw[8 + length :], plain[8 + plain_length :], where="data")
    assert_loads(checkpoint, tmp_path / "ck", state)
    # What the library writes is brought into the same form, whatever its order of keys.
    for metadata, page_align in product((None, {}, PT, {"z": "1", **PT, "a": "é"}), (False, True)):
        where = f"{metadata}, page_align {page_align}"
        layout = layout_of(state, metadata, page_align=page_align)
        content = oracle(state, metadata) if metadata or metadata is None else _with_empty_metadata(state)
        with succeeds("a change of form", where=where):
            made = with_options(content, layout)
        assert_same_bytes(made, layout.header + plain[8 + plain_length :], where=where)


def _with_empty_metadata(state: dict[str, torch.Tensor]) -> bytes:
    content = oracle(state, None)
    text = content[8:].replace(b"{", b'{"__metadata__":{},', 1)
    length = struct.unpack("<Q", content[:8])[0]
    data, head = content[8 + length :], text[: len(text) - len(content) + 8 + length].rstrip(b" ")
    head += b" " * (-len(head) % 8)
    return struct.pack("<Q", len(head)) + head + data


@requirement("CKPT-014", "The header length MUST be a multiple of 8 and every tensor naturally aligned.")
def test_alignment(checkpoint: Any, tmp_path: Path) -> None:
    for count in range(1, 9):
        state = {"n" * count: torch.randn(3), "i": torch.arange(count), "b": torch.ones(count, dtype=torch.uint8)}
        save(checkpoint, state, tmp_path / str(count))
        length, header = _header(tmp_path / str(count) / FILE)
        assert_equal(length % 8, 0, where=f"header length {length}")
        for name, value in state.items():
            begin = 8 + length + header[name]["data_offsets"][0]
            assert_equal(begin % value.element_size(), 0, where=f"{name} at {begin}")


@requirement(
    "CKPT-015", "Tensors MUST lie by dtype rank, then by UTF-8 name, from 0 without gaps to the end of the file."
)
def test_order(checkpoint: Any, tmp_path: Path) -> None:
    names = ["b", "a.10", "a.2", "Z", "￿", "é", "\U0001f600"]
    state = {
        name: random_bits(dtype, (3,), 0) for name, dtype in zip(names, [torch.uint8, torch.float32] * 4, strict=False)
    }
    save(checkpoint, state, tmp_path / "ck")
    path = tmp_path / "ck" / FILE
    length, header = _header(path)
    rank = {"F32": 0, "U8": 1}
    expected = sorted(state, key=lambda n: (rank["F32" if state[n].dtype is torch.float32 else "U8"], n.encode()))
    assert_equal([name for name in header if name != "__metadata__"], expected, where="order")
    position = 0
    for name in expected:
        assert_equal(header[name]["data_offsets"][0], position, where=name)
        position = header[name]["data_offsets"][1]
    assert_equal(path.stat().st_size, 8 + length + position, where="file length")


@requirement(
    "CKPT-016",
    "Odd names (Unicode, quotes, controls, slashes, empty, very long) MUST survive; __metadata__ MUST be refused.",
)
def test_names(checkpoint: Any, tmp_path: Path) -> None:
    names = ["ünïcode", 'q"uote\\', "new\nline\t\x01\x7f", "a/b", "", "x" * 10_000, "\U0001f600"]
    state = {name: torch.tensor([float(i)]) for i, name in enumerate(names)}
    save(checkpoint, state, tmp_path / "ck")
    assert_same_bytes(tmp_path / "ck" / FILE, oracle(state, PT), where="names")
    assert_loads(checkpoint, tmp_path / "ck", state)
    with raises(UnsupportedError, mentions=("__metadata__",)):
        save(checkpoint, {"__metadata__": torch.ones(1)}, tmp_path / "no")


@requirement(
    "CKPT-017",
    "User metadata MUST stand in every file beside format, keys sorted; values that are not strings MUST be refused.",
)
def test_metadata(checkpoint: Any, tmp_path: Path) -> None:
    state = {"a": torch.ones(2), "b": torch.ones(3)}
    extra = {"step": "7", "author": "né"}
    save(checkpoint, state, tmp_path / "ck", fqn_to_index_mapping={"a": 1, "b": 2}, metadata=extra)
    for file in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"):
        _, header = _header(tmp_path / "ck" / file)
        assert_equal(
            list(header["__metadata__"].items()), [("author", "né"), ("format", "pt"), ("step", "7")], where=file
        )
    with raises(ConfigError, mentions=("step",)):
        save(checkpoint, state, tmp_path / "no", metadata={"step": 7})


@requirement(
    "CKPT-687",
    "User metadata with the key that says where shards lie MUST be refused by every writer before anything is made: "
    "it would make whole tensors parts of others. save_file, which may make a shard, MUST write it.",
)
def test_sharding_key(checkpoint: Any, tmp_path: Path) -> None:
    info = {"DCP_SHARDING_INFO": json.dumps({"a": {"saved_offsets": [2], "global_shape": [5]}})}
    for options in ({}, {"single_file": True}, {"enable_consolidation": False}):
        with raises(ConfigError, mentions=("DCP_SHARDING_INFO", "metadata"), where=str(options)):
            save(checkpoint, {"a": torch.ones(3)}, tmp_path / "no", metadata=info, **options)
    assert_equal(list(tmp_path.iterdir()), [], where="what is made")
    for number, value in enumerate((torch.zeros(2), torch.ones(3)), start=1):
        said = {"DCP_SHARDING_INFO": json.dumps({"a": {"saved_offsets": [2 * (number - 1)], "global_shape": [5]}})}
        checkpoint.save_file({"a": value}, tmp_path / f"shard-{number:05d}-model-00001-of-00001.safetensors", said)
    assert_loads(checkpoint, tmp_path, {"a": torch.tensor([0.0, 0, 1, 1, 1])})


@pytest.mark.night
@requirement(
    "CKPT-018", "A header above 100 MB MUST be refused before anything is written; one above 25 MB MUST be warned of."
)
def test_header_limit(checkpoint: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = {f"{i}{'x' * 3_400_000}": torch.ones(1) for i in range(30)}
    with raises(ConfigError, mentions=("header",)):
        save(checkpoint, state, tmp_path / "ck")
    assert_equal(list(tmp_path.iterdir()), [], where="folder after a refused save")
    with caplog.at_level(logging.WARNING):
        save(checkpoint, dict(list(state.items())[:8]), tmp_path / "ck")
    assert_equal(
        ["25000000" in r.getMessage() for r in caplog.records if r.name == "twinproof.checkpoint"],
        [True],
        where="warning",
    )


def _save_shuffled(rank: Rank, path: str, order: list[int], threads: int, block_bytes: int, write_mode: str) -> None:
    full = {f"t{i}": random_bits(torch.float32, (11, 13), i) for i in range(6)}
    state: dict[str, Any] = {}
    parts: dict[tuple[int, ...], torch.Tensor]
    for i in order:
        rows = [((a, 0), (b - a, 13)) for a, b in ((0, 4), (4, 7), (7, 11), (11, 11))]
        mine = rows[rank.rank :: rank.world_size]
        parts = {o: full[f"t{i}"][o[0] : o[0] + s[0]].clone() for o, s in mine}
        state[f"t{i}"] = Tiled.of((11, 13), parts, torch.float32)
    save_ranks(rank, state, Path(path), thread_count=threads, block_bytes=block_bytes, write_mode=write_mode)


@requirement(
    "CKPT-019",
    "Files MUST NOT depend on rank count, thread count, block size, write mode or the order of the state dict.",
)
def test_same_bytes_however_written(checkpoint: Any, rank_pool: Any, tmp_path: Path) -> None:
    expected = oracle({f"t{i}": random_bits(torch.float32, (11, 13), i) for i in range(6)}, PT)
    order = [0, 1, 2, 3, 4, 5]
    for world, threads, block, mode in (
        (1, 4, 64, "random"),
        (2, 1, 128, "auto"),
        (3, 3, 512, "random"),
        (2, 1, 256, "sequential"),
        (4, 2, 8 << 20, "auto"),
    ):
        order = order[1:] + order[:1]
        path = tmp_path / f"{world}-{threads}-{block}-{mode}"
        rank_pool.run(_save_shuffled, world, str(path), order, threads, block, mode)
        assert_same_bytes(path / FILE, expected, where=path.name)


@requirement("CKPT-020", "Two saves of equal state MUST give identical folders.")
def test_deterministic(checkpoint: Any, tmp_path: Path) -> None:
    # Every dtype several times in every file, far apart and in several sizes: names decide within a dtype only.
    kinds = DTYPES * 6
    state = {f"w{i}": random_bits(dtype, (2 + i % 3, 4), i) for i, dtype in enumerate(kinds)}
    options = {
        "fqn_to_index_mapping": {f"w{i}": 1 + i // len(DTYPES) % 3 for i in range(len(kinds))},
        "metadata": {"z": "1", "k": "2", "m": "3"},
    }
    names = list(state)
    orders = {"as given": names, "again": names, "reversed": names[::-1], "mixed": sorted(names, key=lambda n: n[::-1])}
    for folder, order in orders.items():
        save(checkpoint, {name: state[name] for name in order}, tmp_path / folder, **options)
    first = {path.name: path.read_bytes() for path in (tmp_path / "as given").iterdir()}
    assert_equal(len(first), 4, where="files")
    for folder in orders:
        assert_equal(sorted(path.name for path in (tmp_path / folder).iterdir()), sorted(first), where=folder)
        for file, content in first.items():
            assert_same_bytes(tmp_path / folder / file, content, where=f"{folder}: {file}")


@requirement(
    "CKPT-458",
    "A save by one process with save_distributed=False MUST write final files at its path, and nothing else.",
)
def test_not_distributed(checkpoint: Any, tmp_path: Path) -> None:
    state = {"a": random_bits(torch.float32, (3, 5), 1), "b": random_bits(torch.float32, (7,), 2)}
    for number, options in enumerate(({}, {"enable_consolidation": False}, {"enable_consolidation": True})):
        path = tmp_path / f"{number}"
        save(checkpoint, state, path, save_distributed=False, **options)
        assert_folder(path, {FILE: ["a", "b"]}, state)
        assert_equal(sorted(child.name for child in path.iterdir()), [FILE, INDEX], where=f"{options}")


# Each write mode with what a folder allows, and what follows: whether a file has one writer, from front to back.
_MODES = {
    ("sequential", "anything"): True,
    ("random", "anything"): False,
    ("auto", "anything"): False,
    ("sequential", "no writes at places"): True,
    ("auto", "no writes at places"): True,
}


def _refuses(*_: Any) -> int:
    raise OSError(errno.ESPIPE, "Illegal seek")


def _save_watched(rank: Rank, path: str, mode: str, allowed: str) -> tuple[list[str], list[str]]:
    """Files that this rank wrote at places, and those that it wrote at their ends."""
    made: dict[str, list[str]] = {"pwritev": [], "writev": []}
    state = {f"t{i}": sharded(random_bits(torch.float32, (64, 32), i), mesh_of(rank), [Shard(0)]) for i in range(4)}
    mapping = {name: 1 + number % 2 for number, name in enumerate(state)}
    with ExitStack() as stack:
        for call in made:
            stack.enter_context(mock.patch.object(os, call, _watched(getattr(os, call), made[call])))
        if allowed == "no writes at places":
            stack.enter_context(mock.patch.object(os, "pwrite", _refuses))
        save_ranks(
            rank, state, Path(path), write_mode=mode, block_bytes=2048, fqn_to_index_mapping=mapping, thread_count=2
        )
    return sorted(set(made["pwritev"])), sorted(set(made["writev"]))


def _watched(call: Callable[..., int], files: list[str]) -> Callable[..., int]:
    def write(descriptor: int, *arguments: Any) -> int:
        files.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        return call(descriptor, *arguments)

    return write


@requirement(
    "CKPT-802",
    "With write_mode sequential one rank alone MUST write each file, from front to back, whatever the folder allows; "
    "with random every rank writes at places; auto is sequential just where the folder allows no other.",
    needs=("counted_io",),
)
@pytest.mark.parametrize(("mode", "allowed"), _MODES)
def test_write_modes(checkpoint: Any, rank_pool: Any, tmp_path: Path, mode: str, allowed: str) -> None:
    files = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for world in (2, 3):
        where = f"{mode}, {allowed}, {world} ranks"
        path = tmp_path / f"{world}"
        found = rank_pool.run(_save_watched, world, str(path), mode, allowed)
        at_places, at_ends = ([name for rank in found for name in rank[way]] for way in (0, 1))
        if _MODES[mode, allowed]:
            assert_equal((at_places, sorted(at_ends)), ([], files), where=f"{where}: files by writer")
        else:
            assert_equal((at_ends, sorted(set(at_places))), ([], files), where=f"{where}: files by writer")
            assert_equal([bool(rank[0]) for rank in found], [True] * world, where=f"{where}: each rank writes")
        for number, file in enumerate(files):
            state = {f"t{i}": random_bits(torch.float32, (64, 32), i) for i in (number, number + 2)}
            assert_same_bytes(path / file, oracle(state, PT), where=f"{where}: {file}")
