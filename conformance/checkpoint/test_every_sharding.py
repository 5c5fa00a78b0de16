"""C, continued. Every way to cut a small tensor over four files, empty parts among them, in every order of the files.

Nothing is drawn: all of them are tensors of one folder of shards, which is loaded and merged as a whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import permutations, product
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch.distributed.tensor import Shard

from conformance.checkpoint.cases import (
    CHECKSUMS_KEY,
    INDEX,
    State,
    Tiled,
    bits,
    load,
    mesh_of,
    random_bits,
    save,
    save_ranks,
    sharded,
    sums_of,
)
from conformance.harness import Rank, assert_equal, requirement, succeeds

_FILES = 4
# (offsets, sizes) of the part that each file holds.
Parts = list[tuple[tuple[int, ...], tuple[int, ...]]]


def _sizes(total: int, count: int) -> list[tuple[int, ...]]:
    """Every way to write a size as a sum of ``count``, zeros among them."""
    return [sizes for sizes in product(range(total + 1), repeat=count) if sum(sizes) == total]


def _spans(sizes: tuple[int, ...]) -> list[tuple[int, int]]:
    return [(sum(sizes[:place]), size) for place, size in enumerate(sizes)]


def _cuts() -> Iterator[tuple[tuple[int, ...], Parts]]:
    """Shapes and the part of each file: lines of three in any order, matrices of up to two by two forth and back."""
    for sizes, order in product(_sizes(3, _FILES), permutations(range(_FILES))):
        yield (3,), [((_spans(sizes)[place][0],), (sizes[place],)) for place in order]
    for height, width in product(range(3), range(3)):
        for rows, columns in product(_sizes(height, 2), _sizes(width, 2)):
            parts: Parts = [((top, left), (m, n)) for (top, m), (left, n) in product(_spans(rows), _spans(columns))]
            yield (height, width), parts
            yield (height, width), parts[::-1]


def _write(folder: Path) -> State:
    """The shards; returns the whole tensors, of which no two elements are equal."""
    folder.mkdir()
    whole, held = State(), [State() for _ in range(_FILES)]
    infos: list[dict[str, Any]] = [{} for _ in range(_FILES)]
    begin = 0
    for number, (shape, parts) in enumerate(_cuts()):
        name, count = f"t{number}", torch.Size(shape).numel()
        whole[name] = torch.arange(begin, begin + count, dtype=torch.int32).reshape(shape)
        begin += count
        for file, (offsets, sizes) in enumerate(parts):
            box = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
            held[file][name] = whole[name][box].contiguous()
            infos[file][name] = {"saved_offsets": list(offsets)}
    for file, (tensors, info) in enumerate(zip(held, infos, strict=True), 1):
        path = folder / f"shard-{file:05d}-model-00001-of-00001.safetensors"
        safetensors.torch.save_file(tensors, path, {"DCP_SHARDING_INFO": json.dumps(info), "format": "pt"})
    return whole


def _wrong(found: dict[str, torch.Tensor], whole: State) -> list[str]:
    return [f"{name}: {value.tolist()}" for name, value in whole.items() if not torch.equal(found[name], value)]


def _read(folder: Path) -> dict[str, torch.Tensor]:
    found = dict[str, torch.Tensor]()
    for file in sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values())):
        found |= safetensors.torch.load_file(folder / file)
    return found


def _merge_on_ranks(rank: Rank, folder: str, target: str, mapping: dict[str, int]) -> None:
    merge = rank.component("checkpoint").consolidate_safetensors_files_on_every_rank
    merge(folder, target, mapping, num_threads=2)


@requirement(
    "CKPT-737",
    "However four files share a small tensor, empty parts among them and in any order of the files, every element MUST "
    "be loaded and merged at its place, by one process or by ranks, into one file or several.",
)
def test_every_cut(checkpoint: Any, rank_pool: Any, tmp_path: Path) -> None:
    whole = _write(tmp_path / "shards")
    targets = {name: torch.full_like(value, -1) for name, value in whole.items()}
    load(checkpoint, targets, tmp_path / "shards")
    assert_equal(_wrong(targets, whole), [], where="loaded")
    mapping = {name: 1 + place % 3 for place, name in enumerate(whole)}
    with succeeds("a merge", where="every cut"):
        checkpoint.consolidate_safetensors_files(tmp_path / "shards", tmp_path / "one")
        checkpoint.consolidate_safetensors_files(tmp_path / "shards", tmp_path / "three", mapping, 2)
    rank_pool.run(_merge_on_ranks, 2, str(tmp_path / "shards"), str(tmp_path / "ranks"), mapping)
    for folder in ("one", "three", "ranks"):
        assert_equal(_wrong(_read(tmp_path / folder), whole), [], where=f"merged into {folder}")


def _save_large(rank: Rank, path: str) -> None:
    mesh = mesh_of(rank)
    state = {name: sharded(value, mesh, [Shard(int(name[0]))]) for name, value in _large().items()}
    save_ranks(rank, state, Path(path), checksums=True)


def _large() -> State:
    """By the dimension that they are cut in, unevenly; parts are over 256 KiB, and so not copied before a write."""
    shapes = {"0 of three": (3, 1 << 18), "0 of five": (5, 70_000), "1 of nine": (9, 33_333)}
    return {name: random_bits(torch.float32, shape, seed) for seed, (name, shape) in enumerate(shapes.items())}


@requirement(
    "CKPT-746",
    "Parts that are large enough to be written from where they lie MUST be saved and summed as small ones are, beside "
    "others of the same tensor that came from another rank.",
)
def test_large_parts(checkpoint: Any, rank_pool: Any, tmp_path: Path) -> None:
    with succeeds("a save", where="parts of over 256 KiB"):
        rank_pool.run(_save_large, 2, str(tmp_path / "ck"))
    stated = json.loads((tmp_path / "ck" / INDEX).read_text())["metadata"][CHECKSUMS_KEY]
    assert_equal(stated, sums_of(_large()), where="checksums")
    found = _read(tmp_path / "ck")
    wrong = [name for name, value in _large().items() if not torch.equal(bits(found[name]), bits(value))]
    assert_equal(wrong, [], where="tensors")


@requirement(
    "CKPT-858",
    "In whatever order a rank lists its parts of a tensor, parts large enough to be written from where they lie among "
    "them, each MUST be saved and summed at its place.",
)
def test_parts_in_any_order(checkpoint: Any, tmp_path: Path) -> None:
    # Parts of rows: one of 4 KB, the others of over 256 KiB.
    spans = [(0, 70), (70, 1), (71, 66), (137, 93)]
    whole = random_bits(torch.float32, (230, 1024), 1)
    before, behind = (random_bits(torch.int16, (7,), seed) for seed in (2, 3))
    for order in permutations(spans):
        parts: dict[tuple[int, ...], torch.Tensor] = {
            (first, 0): whole[first : first + count].clone() for first, count in order
        }
        state = {"a": before, "b": Tiled.of(whole.shape, parts, whole.dtype), "c": behind}
        folder = tmp_path / "-".join(str(first) for first, _ in order)
        with succeeds("a save", where=f"parts from {order}"):
            save(checkpoint, state, folder, checksums=True, durable=False)
        stored = {"a": before, "b": whole, "c": behind}
        found = _read(folder)
        wrong = [name for name, value in stored.items() if not torch.equal(bits(found[name]), bits(value))]
        stated = json.loads((folder / INDEX).read_text())["metadata"][CHECKSUMS_KEY]
        assert_equal((wrong, stated), ([], sums_of(State(stored))), where=f"parts from {order}")
