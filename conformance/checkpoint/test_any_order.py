"""The order of names in what a checkpoint says of itself: headers, sharding information, checksums, the index."""

from __future__ import annotations

import importlib
import json
import random
import shutil
from collections.abc import Callable
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Replicate, Shard

from conformance.checkpoint.cases import (
    FILE,
    INDEX,
    assert_loads,
    mesh_of,
    part_of,
    random_bits,
    save,
    save_ranks,
    sharded,
)
from conformance.harness import Rank, assert_equal, assert_same_tensor, requirement, succeeds
from twinproof.checkpoint.catalog import read_catalog, stored_ranges, verify

_SHAPES: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
    "w": (torch.float32, (9, 6)),
    "a": (torch.bfloat16, (5,)),
    "none": (torch.float32, (0, 3)),
    "b": (torch.int64, (4, 2)),
    "flag": (torch.bool, ()),
}


def _state() -> dict[str, torch.Tensor]:
    return {name: random_bits(dtype, shape, 1) for name, (dtype, shape) in _SHAPES.items()}


def _save_on(rank: Rank, path: str, in_shards: bool) -> None:
    mesh = mesh_of(rank)
    parts = {name: sharded(value, mesh, [Shard(0) if value.dim() else Replicate()]) for name, value in _state().items()}
    options = {"enable_consolidation": False} if in_shards else {"max_shard_size": 100}
    save_ranks(rank, parts, Path(path), checksums=True, **options)


Order = Callable[[list[str]], list[str]]


def _ordered(value: Any, order: Order) -> Any:
    """The same JSON with the members of every object in another order; text that is JSON itself likewise."""
    if isinstance(value, dict):
        return {name: _ordered(value[name], order) for name in order(list(value))}
    if isinstance(value, str) and value.startswith("{"):
        return json.dumps(_ordered(json.loads(value), order))
    return value


def _reorder(folder: Path, order: Order) -> None:
    for path in folder.iterdir():
        content = path.read_bytes()
        if path.name == INDEX:
            path.write_text(json.dumps(_ordered(json.loads(content), order)))
            continue
        start = 8 + int.from_bytes(content[:8], "little")
        text = json.dumps(_ordered(json.loads(content[8:start]), order)).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + content[start:])


@requirement(
    "CKPT-630",
    "Values, checksums and merged files MUST NOT depend on the order of names in headers, sharding information, "
    "checksums or the index.",
)
@pytest.mark.parametrize("in_shards", [False, True], ids=["files", "shards"])
def test_orders(checkpoint: Any, rank_pool: Any, tmp_path: Path, in_shards: bool) -> None:
    rank_pool.run(_save_on, 2, str(tmp_path / "ck"), in_shards)
    choose = random.Random(3)
    orders: list[Order] = [sorted, lambda names: sorted(names, reverse=True)]
    orders += [lambda names: choose.sample(names, len(names))] * 3
    merged: dict[str, bytes] | None = None
    for number, order in enumerate(orders):
        folder, target = tmp_path / f"ck-{number}", tmp_path / f"merged-{number}"
        folder.mkdir()
        for path in (tmp_path / "ck").iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
        _reorder(folder, order)
        with succeeds("a load", where=f"order {number}"):
            assert_loads(checkpoint, folder, _state(), verify_checksums=True)
        with succeeds("a verification", where=f"order {number}"):
            assert_equal(len(verify(folder).checked), len(_SHAPES), where=f"tensors verified in order {number}")
        with succeeds("a merge", where=f"order {number}"):
            checkpoint.consolidate_safetensors_files(folder, target, dict(zip(_SHAPES, (1, 2, 1, 2, 1), strict=True)))
        found = {path.name: path.read_bytes() for path in target.iterdir()}
        merged = merged or found
        assert_equal([name for name in found if found[name] != merged.get(name)], [], where=f"merged from {number}")


def _cut_up(value: torch.Tensor, rows: list[int], columns: list[int]) -> list[tuple[tuple[int, int], torch.Tensor]]:
    """The tiles of a matrix by their place, in order of rows."""
    edges = [[0, *cuts, size] for cuts, size in zip((rows, columns), value.shape, strict=True)]
    return [
        ((top, left), value[top:bottom, left:right].contiguous())
        for top, bottom in pairwise(edges[0])
        for left, right in pairwise(edges[1])
    ]


def _shards(folder: Path, tiles: dict[str, list[tuple[tuple[int, int], torch.Tensor]]], order: list[int]) -> None:
    """A shard file for each tile, in the order given: the n-th file has the tile number ``order[n]`` of each matrix."""
    folder.mkdir()
    for number, which in enumerate(order, start=1):
        mine = {name: found[which] for name, found in tiles.items()}
        info = {name: {"saved_offsets": list(place)} for name, (place, _) in mine.items()}
        metadata = {"format": "pt", "DCP_SHARDING_INFO": json.dumps(info), "DCP_VERSION": "1.0"}
        file = folder / f"shard-{number:05d}-model-00001-of-00001.safetensors"
        safetensors.torch.save_file({name: tile for name, (_, tile) in mine.items()}, file, metadata)


@requirement(
    "CKPT-732",
    "Values MUST NOT depend on which file has which part of a tensor: loads of all and of rectangles, quantized loads "
    "and merged files, whether parts come in order of rows, of columns, backwards or in no order.",
)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_orders_of_parts(checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As if the matrices were as large as those that are read in pieces and copied by the system.
    monkeypatch.setattr("twinproof.checkpoint.dcp.PIECE_BYTES", 64)
    monkeypatch.setattr("fastimpl.checkpoint.consolidate._COPIED_BYTES", 16)
    wide, scales = random_bits(torch.float32, (12, 8), 1), torch.arange(1, 7).reshape(3, 2) / 4
    small = (torch.arange(96).reshape(12, 8) % 13 - 6).to(torch.float8_e4m3fn)
    cuts = ([4, 8], [4])
    tiles = {"wide": _cut_up(wide, *cuts), "x.weight": _cut_up(small, *cuts)}
    tall = random_bits(torch.float32, (12, 8), 2)
    tiles["tall"] = _cut_up(tall, [2, 4, 6, 8, 10], [])
    tiles["x.weight_scale_inv"] = _cut_up(scales, [1, 2], [1])
    expected = small.float() * scales.repeat_interleave(4, 0).repeat_interleave(4, 1)
    choose = random.Random(5)
    orders = [[0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [0, 2, 4, 1, 3, 5], [4, 2, 0, 5, 3, 1]]
    orders += [choose.sample(range(6), 6) for _ in range(4)]
    merged: dict[str, bytes] | None = None
    for number, order in enumerate(orders):
        folder, where = tmp_path / f"ck-{number}", f"order {order}"
        _shards(folder, tiles, order)
        with succeeds("a load", where=where):
            assert_loads(checkpoint, folder, {"wide": wide, "tall": tall, "x.weight": small})
        found = torch.full((12, 8), -7.0)
        reader = checkpoint.QuantizedHuggingFaceStorageReader(folder, block_size=4)
        with succeeds("a quantized load", where=where):
            dcp.load({"x.weight": found}, storage_reader=reader)
        assert_same_tensor(found, expected, where=f"quantized, {where}")
        with succeeds("a merge", where=where):
            checkpoint.consolidate_safetensors_files(folder, tmp_path / f"merged-{number}")
        files = {path.name: path.read_bytes() for path in (tmp_path / f"merged-{number}").iterdir()}
        merged = merged or files
        assert_equal([name for name in files if files[name] != merged.get(name)], [], where=f"merged, {where}")


@requirement(
    "CKPT-805",
    "A rectangle of a tensor MUST be filled from all parts that meet it, whatever their order and whatever parts "
    "beside it come between them.",
)
def test_parts_of_rectangles(checkpoint: Any, tmp_path: Path) -> None:
    whole, choose = random_bits(torch.int32, (12, 9), 1), random.Random(7)
    tiles = _cut_up(whole, [4, 8], [3, 6])
    by_place: dict[tuple[int, ...], torch.Tensor] = {**dict(tiles)}
    orders = [list(range(9)), list(range(9))[::-1], [0, 3, 6, 1, 4, 7, 2, 5, 8], [8, 5, 2, 7, 4, 1, 6, 3, 0]]
    orders += [choose.sample(range(9), 9) for _ in range(4)]
    for number, order in enumerate(orders):
        _shards(tmp_path / f"{number}", {"w": tiles}, order)
        record = read_catalog(tmp_path / f"{number}").tensors["w"]
        for offsets, sizes in product(product((0, 2, 4, 7), (0, 1, 3, 5)), product((1, 4, 5), (1, 3, 4))):
            where = f"{sizes} at {offsets}, order {order}"
            memory, ranges = stored_ranges("w", record, offsets, sizes)
            memory.fill_(-7)
            for part in ranges:
                part.target.copy_(part_of(by_place[part.chunk.offsets], part.offsets, part.sizes))
            assert_same_tensor(memory, part_of(whole, offsets, sizes), where=where)


@requirement(
    "CKPT-806",
    "diff MUST find two checkpoints equal, or name the values that differ, whatever the order of their parts and "
    "whatever it compares at once.",
    needs=("staged_copies",),
)
def test_diff_of_orders(
    impl: Any, checkpoint: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    main = importlib.import_module(f"{impl.__name__}.checkpoint.__main__")
    whole = random_bits(torch.int32, (12, 9), 1)
    other = whole.clone()
    other[5, 7] ^= 1
    for name, value in (("same", whole), ("other", other)):
        checkpoint.save_file({"w": value}, tmp_path / f"{name}.safetensors")
    for number, order in enumerate(
        ([0, 3, 6, 1, 4, 7, 2, 5, 8], [8, 7, 6, 5, 4, 3, 2, 1, 0], [4, 0, 8, 1, 7, 2, 6, 3, 5])
    ):
        _shards(tmp_path / f"{number}", {"w": _cut_up(whole, [4, 8], [3, 6])}, order)
        for name, expected in (("same", {}), ("other", {"w": "1 of 108 values, the first at [5, 7]"})):
            for piece_bytes in (4, 20, 36, 108, 144, 1000):
                monkeypatch.setattr(main, "PIECE_BYTES", piece_bytes)
                words = [str(tmp_path / f"{number}"), str(tmp_path / f"{name}.safetensors")]
                for pair in (words, words[::-1]):
                    status = main.main(["diff", *pair, "--json"])
                    found = status, json.loads(capsys.readouterr().out)["differences"]
                    where = f"{name}, {piece_bytes} bytes at once, order {order}"
                    assert_equal(found, (int(bool(expected)), expected), where=where)


@requirement(
    "CKPT-849",
    "diff MUST compare what the files hold, and not what they say of it: a bit that has flipped in a copy is found, "
    "though both state the same checksums, on either side.",
    needs=("staged_copies",),
)
def test_diff_reads_what_it_compares(
    impl: Any, checkpoint: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main = importlib.import_module(f"{impl.__name__}.checkpoint.__main__")
    save(checkpoint, {"w": torch.arange(16.0), "b": torch.ones(3)}, tmp_path / "a", checksums=True)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    data = bytearray((tmp_path / "b" / FILE).read_bytes())
    at = data.index(torch.arange(16.0).numpy().tobytes())
    data[at + 5] ^= 0x20
    (tmp_path / "b" / FILE).write_bytes(data)
    for pair in ("ab", "ba"):
        status = main.main(["diff", *(str(tmp_path / name) for name in pair), "--json"])
        found = status, json.loads(capsys.readouterr().out)["differences"]
        assert_equal(found, (1, {"w": "1 of 16 values, the first at [1]"}), where=pair)
