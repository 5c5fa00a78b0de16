"""What the tables of ``test_pairs`` share: where a case runs, the library's files, and folders made of them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from conformance.checkpoint.cases import CHECKSUMS_KEY, INDEX, bits, cut, mesh_of, oracle, part_of, random_bits, sums_of
from conformance.harness import Rank, assert_equal, assert_same_bytes

Case = Mapping[str, Any]
State = dict[str, torch.Tensor]
SHARDING_KEY = "DCP_SHARDING_INFO"


@dataclass(frozen=True)
class Here:
    """This process or one of the pool: what a case asks of where it runs."""

    checkpoint: Any
    rank: int = 0
    world_size: int = 1
    mesh: DeviceMesh | None = None

    @staticmethod
    def of(rank: Rank) -> Here:
        """A process of the pool."""
        return Here(rank.component("checkpoint"), rank.rank, rank.world_size, mesh_of(rank))

    def everyone(self, mine: Any) -> list[Any]:
        """This rank's object and every other's, in rank order."""
        found: list[Any] = [None] * self.world_size
        if self.mesh is None:
            return [mine]
        dist.all_gather_object(found, mine)
        return found


@contextmanager
def quiet() -> Iterator[None]:
    """Without torch's warning that one process saves or loads."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def library_file(tensors: State, metadata: Mapping[str, str] | None, *, page_align: bool = False) -> bytes:
    """The library's file with these metadata, keys sorted, and its header padded."""
    plain = oracle(tensors, None)
    start = 8 + int.from_bytes(plain[:8], "little")
    header = json.loads(plain[8:start])
    if metadata is not None:
        header = {"__metadata__": dict(sorted(metadata.items())), **header}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % (4096 if page_align else 8))
    return len(text).to_bytes(8, "little") + text + plain[start:]


def header_of(content: bytes) -> tuple[dict[str, Any], dict[str, str], int]:
    """Entries, metadata, and where the data begins."""
    start = 8 + int.from_bytes(content[:8], "little")
    entries = json.loads(content[8:start])
    return entries, entries.pop("__metadata__", {}), start


def files_in(folder: Path) -> dict[str, bytes]:
    """Every file by name; nothing where there is no folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir()} if folder.exists() else {}


def assert_files(found: Mapping[str, bytes], expected: Mapping[str, bytes], *, where: str) -> None:
    """The same names, and the same bytes under each."""
    assert_equal(sorted(found), sorted(expected), where=f"{where}: files")
    for name, content in expected.items():
        assert_same_bytes(found[name], content, where=f"{where}: {name}")


def index_of(files: Mapping[str, Sequence[str]], state: State, *, has_sums: bool) -> dict[str, Any]:
    """What an index says of these files."""
    total = sum(value.numel() * value.element_size() for value in state.values())
    metadata: dict[str, Any] = {"total_size": total, **({CHECKSUMS_KEY: sums_of(state)} if has_sums else {})}
    return {"metadata": metadata, "weight_map": {name: file for file, names in files.items() for name in names}}


def grouped(state: State, mapping: Mapping[str, int]) -> dict[str, list[str]]:
    """Files of a mapping whose numbers are all used."""
    count = max(mapping[name] for name in state)
    groups = {f"model-{k:05d}-of-{count:05d}.safetensors": [n for n in state if mapping[n] == k] for k in range(1, 9)}
    return {file: names for file, names in groups.items() if names}


NOTES = "notes.txt"  # A file of the user, beside a checkpoint.
USER = {"step": "7", "a": "né"}
_SECOND = {"w": 4, "h": 2, "q.weight": 3, "g_blocks": 1}  # Where shards are cut, in rows.
BLOCK = 4  # Rows and columns that share a scale.


def content(seed: int) -> State:
    """Tensors of all kinds, and two that are quantized, one with scales whose products need rounding."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "w": torch.randn(9, 6, generator=generator),
        "h": torch.randn(6, 8, generator=generator).bfloat16(),
        "i": torch.randint(-99, 99, (7,), generator=generator, dtype=torch.int32),
        "z": torch.tensor(-seed),
        "n": torch.empty(0, 4),
        "c": torch.randn(3, 2, generator=generator, dtype=torch.complex64),
        "b": random_bits(torch.bool, (5,), seed),
        "f8": torch.randn(4, 4, generator=generator).to(torch.float8_e4m3fn),
        "q.weight": torch.randn(6, 10, generator=generator).to(torch.float8_e4m3fn),
        "q.weight_scale_inv": 1.1 * torch.exp2(torch.arange(6.0).reshape(2, 3) - seed),
        "g_blocks": random_bits(torch.uint8, (3, 2, 4), seed),
        "g_scales": torch.arange(120, 126, dtype=torch.uint8).reshape(3, 2),
    }


def damaged(state: State, name: str | None) -> State:
    """The state with another first element."""
    found = {key: value.clone() for key, value in state.items()}
    if name is not None:
        value = bits(found[name]).view(-1)[:1].view(found[name].dtype)
        value.copy_((value.float() + 1).to(value.dtype))
    return found


def chunks_of(form: str, name: str, state: State) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The rectangles of a tensor as they are stored."""
    shape = tuple(state[name].shape)
    cuts: list[list[int]] = [[] for _ in shape]
    if "shards" in form and name in _SECOND:
        cuts[0] = [_SECOND[name]]
    return cut(shape, cuts)


def make_folder(folder: Path, form: str, state: State, stated: State | None, user: Case | None, aligned: bool) -> Path:
    """A checkpoint; ``stated`` are the tensors whose sums it states. Returns what a reader is given."""
    folder.mkdir(parents=True)
    one = form == "one file"
    parts: list[dict[str, tuple[int, ...]]] = [{}, {}]
    for number, name in enumerate(state):
        chunks = chunks_of(form, name, state)
        for which, (offsets, _) in enumerate(chunks):
            parts[0 if one else which if len(chunks) > 1 else number % 2][name] = offsets
    for number, mine in enumerate(part for part in parts if part):
        metadata = {"format": "pt", **user} if user else None
        tiles = {n: part_of(state[n], o, dict(chunks_of(form, n, state))[o]).contiguous() for n, o in mine.items()}
        if "shards" in form:
            shapes = {n: {"global_shape": list(state[n].shape)} if form == "shards" else {} for n in mine}
            info = {name: {"saved_offsets": list(offsets), **shapes[name]} for name, offsets in mine.items()}
            metadata = {"format": "pt", **(user or {}), SHARDING_KEY: json.dumps(info), "DCP_VERSION": "1.0"}
        if stated is not None and form != "index":
            sums = {n: part_of(stated[n], o, tiles[n].shape) for n, o in mine.items()}
            metadata = {**(metadata or {}), CHECKSUMS_KEY: json.dumps(sums_of(sums))}
        name = "model.safetensors" if one else f"model-{number + 1:05d}-of-00002.safetensors"
        name = f"shard-{number + 1:05d}-model-00001-of-00001.safetensors" if "shards" in form else name
        (folder / name).write_bytes(library_file(tiles, metadata, page_align=aligned))
    if form == "index":
        files = {f"model-{k:05d}-of-00002.safetensors": list(parts[k - 1]) for k in (1, 2)}
        index = index_of(files, state, has_sums=False)
        index["metadata"] |= {} if stated is None else {CHECKSUMS_KEY: sums_of(stated)}
        (folder / INDEX).write_text(json.dumps(index))
    return folder / "model.safetensors" if one else folder
