"""Cases of the checkpoint requirements: tensors by seed, oracle bytes, saving and loading on one or many ranks.

The oracle is the safetensors library's own writer on the unsharded state; nothing here packs bytes with our code.
"""

from __future__ import annotations

import ctypes
import gc
import json
import math
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import safetensors
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor

from conformance.harness import Rank, assert_equal, assert_same_bytes, assert_same_tensor, assert_same_tensors
from conformance.provers.pretend_device import on_host
from twinproof.checkpoint.groups import end_group, own_group

DTYPES: tuple[torch.dtype, ...] = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64,
    torch.uint64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
    torch.float4_e2m1fn_x2,
)  # fmt: skip
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
FILE = "model-00001-of-00001.safetensors"
INDEX = "model.safetensors.index.json"
CHECKSUMS_KEY = "twinproof.crc32"
PT = {"format": "pt"}

State = dict[str, torch.Tensor]


def random_bits(dtype: torch.dtype, shape: Sequence[int], seed: int) -> torch.Tensor:
    """A tensor of random bits, every NaN payload included; bools stay 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype is torch.bool else 256
    size = (math.prod(shape) * dtype.itemsize,)
    raw = torch.randint(0, high, size, generator=generator, dtype=torch.uint8)
    return raw.view(_BITS[dtype.itemsize]).view(dtype).reshape(tuple(shape))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as integers of their width, which torch can copy whatever the dtype."""
    return tensor.view(_BITS[tensor.dtype.itemsize])


def zeros_like(tensor: torch.Tensor) -> torch.Tensor:
    """A target of the same shape and dtype whose bits differ from nearly everything."""
    return bits(torch.empty(tensor.shape, dtype=tensor.dtype)).fill_(0x55).view(tensor.dtype)


def make_groups_to_keep() -> None:
    """Make what a process keeps of groups for all its saves: one group, and one by which ranks agree."""
    for _ in range(2 if dist.is_initialized() and dist.get_world_size() > 1 else 0):
        end_group(own_group())


def oracle(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None) -> bytes:
    """What ``safetensors`` writes for these tensors, without its numpy path and its refusal of odd dtypes."""
    kept, specs = [], {}
    for name, tensor in tensors.items():
        dense = bits(tensor.detach().resolve_conj().resolve_neg()).contiguous()
        kept.append(dense)
        specs[name] = safetensors.TensorSpec(
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=list(tensor.shape),
            data_ptr=dense.data_ptr(),
            data_len=dense.numel() * dense.element_size(),
        )
    # The library reads the memory while it serialises, so the dense copies live until here.
    result = bytes(safetensors.serialize(specs, metadata=dict(metadata) if metadata else None))
    del kept
    return result


def sums_of(state: State) -> dict[str, str]:
    """Zlib's sums of the bytes of each tensor, as an index states them."""
    dense = {name: bits(tensor.detach()).contiguous().reshape(-1) for name, tensor in state.items()}
    return {name: f"{zlib.crc32(bytes(value.view(torch.uint8).tolist())):08x}" for name, value in dense.items()}


def assert_folder(
    folder: Path,
    files: Mapping[str, Sequence[str]],
    state: State,
    metadata: Mapping[str, str] | None = None,
    *,
    has_sums: bool = False,
) -> None:
    """Every file is byte-identical to the oracle's, the index is exact, and nothing else is there."""
    total = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    weight_map = {name: file for file, names in files.items() for name in names}
    assert_equal(sorted(path.name for path in folder.glob("model*.safetensors")), sorted(files), where="files")
    for file, names in files.items():
        expected = oracle({name: state[name] for name in names}, {**PT, **(metadata or {})})
        assert_same_bytes(folder / file, expected, where=file)
    found = json.loads((folder / INDEX).read_text())
    sums = {CHECKSUMS_KEY: sums_of(state)} if has_sums else {}
    assert_same_json(found, {"metadata": {"total_size": total, **sums}, "weight_map": weight_map})


def assert_same_json(got: Any, expected: Any) -> None:
    """Equal as JSON, keys in any order."""
    dump = [json.dumps(value, sort_keys=True).encode() for value in (got, expected)]
    assert_same_bytes(dump[0], dump[1], where="JSON")


@contextmanager
def _alone() -> Iterator[None]:
    """Without torch's warning that one process saves or loads, which is what is meant here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def save_with(writer: Any, state: Mapping[str, Any], planner: Any = None) -> None:
    """Save through a writer, from this process alone."""
    with _alone():
        dcp.save(dict(state), storage_writer=writer, planner=planner, no_dist=True)
    writer.close()


def load_with(reader: Any, targets: Mapping[str, Any], planner: Any = None) -> None:
    """Load through a reader, into this process alone."""
    with _alone():
        dcp.load(dict(targets), storage_reader=reader, planner=planner, no_dist=True)


def save(
    checkpoint: Any, state: Mapping[str, Any], path: Path, *, planner: Any = None, on: Any = "cpu", **options: Any
) -> Any:
    """Save from this process alone, tensors from the device ``on``; returns the writer."""
    writer = checkpoint.HuggingFaceStorageWriter(path, **options)
    save_with(writer, state if on == "cpu" else placed(state, on), planner)
    return writer


def placed(state: Mapping[str, Any], device: str) -> dict[str, Any]:
    """The tensors of a state on a device: parameters stay parameters, values without gaps keep their strides."""
    found = {}
    for name, value in state.items():
        there = value.detach().to(device).requires_grad_(value.requires_grad)
        found[name] = torch.nn.Parameter(there) if isinstance(value, torch.nn.Parameter) else there
    return found


def load(checkpoint: Any, targets: Mapping[str, Any], path: Path, *, planner: Any = None, **options: Any) -> Any:
    """Load into the targets, from this process alone; returns the reader."""
    reader = checkpoint.HuggingFaceStorageReader(path, **options)
    load_with(reader, targets, planner)
    return reader


def assert_loads(checkpoint: Any, path: Path, state: State, *, on: str = "cpu", **options: Any) -> None:
    """A load into fresh targets on the device ``on`` gives the state, bit for bit."""
    targets = placed({name: zeros_like(tensor) for name, tensor in state.items()}, on)
    load(checkpoint, targets, path, **options)
    assert_same_tensors({name: on_host(value).cpu() for name, value in targets.items()}, state, where=str(path.name))


class Tiled(torch.Tensor):
    """Several rectangles of one global tensor, held by one rank: any dense tiling, without a device mesh."""

    parts: dict[tuple[int, ...], torch.Tensor]
    whole: torch.Size

    @staticmethod
    def of(whole: Sequence[int], parts: Mapping[tuple[int, ...], torch.Tensor], dtype: torch.dtype) -> Tiled:
        """Rectangles by their offsets."""
        made: Tiled = torch.Tensor._make_subclass(Tiled, torch.empty(0, dtype=dtype))
        made.parts, made.whole = dict(parts), torch.Size(whole)
        return made

    def size(self, dim: int | None = None) -> Any:
        """The global size, which is what planners compare."""
        return self.whole if dim is None else self.whole[dim]

    def _chunk(self, offsets: tuple[int, ...]) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(offsets), self.parts[offsets].shape)

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                MetadataIndex(fqn, offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=self._chunk(offsets), properties=properties, size=self.whole),
            )
            for offsets in self.parts
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._chunk(offsets) for offsets in self.parts]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self.parts[tuple(index.offset or ())]


def cut(shape: Sequence[int], cuts: Sequence[Sequence[int]]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The grid that cuts in each dimension make, as (offsets, sizes); empty cells included."""
    boxes: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((), ())]
    for size, inner in zip(shape, cuts, strict=True):
        edges = [0, *sorted(inner), size]
        spans = [(a, b - a) for a, b in pairwise(edges)]
        boxes = [((*o, first), (*s, length)) for o, s in boxes for first, length in spans]
    # torch tells chunks apart by name and offset alone, so an empty cell may not share its offset with a filled one.
    filled = {offsets for offsets, sizes in boxes if 0 not in sizes}
    unique = [box for box in boxes if 0 not in box[1]]
    return unique + [(o, s) for o, s in dict(boxes).items() if 0 in s and o not in filled]


def part_of(tensor: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """The rectangle of a tensor, as a view."""
    return tensor[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]


def tiled(
    tensor: torch.Tensor,
    boxes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]],
    rank: int,
    world_size: int,
    *,
    fill: bool = True,
) -> Tiled:
    """The boxes that round-robin gives this rank, with the tensor's values or as empty targets."""
    parts = {}
    for offsets, sizes in boxes[rank::world_size]:
        dense = bits(part_of(tensor, offsets, sizes)).clone(memory_format=torch.contiguous_format).view(tensor.dtype)
        parts[offsets] = dense if fill else zeros_like(dense)
    return Tiled.of(tensor.shape, parts, tensor.dtype)


def own_count(table: str, key: str) -> int:
    """A number that the kernel keeps of this process: ``rchar`` of ``io`` in bytes, ``VmHWM`` of ``status`` in KiB."""
    lines = Path(f"/proc/self/{table}").read_text().split("\n")
    return int(next(line for line in lines if line.startswith(f"{key}:")).split()[1])


def peak_from_here() -> int:
    """``VmHWM`` of this process in KiB, which counts from now on.

    What earlier tests have left goes first: freed later, it would hide as much of what is measured.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return own_count("status", "VmHWM")


def assert_parts(target: Tiled, value: torch.Tensor, *, where: str) -> None:
    """Every rectangle of the target holds what the tensor has there."""
    for offsets, part in target.parts.items():
        assert_same_tensor(part, part_of(value, offsets, part.shape), where=f"{where} at {offsets}")


def mesh_of(rank: Rank, shape: Sequence[int] | None = None) -> DeviceMesh:
    """A CPU mesh over all ranks."""
    return init_device_mesh("cpu", tuple(shape or (rank.world_size,)))


def sharded(tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """Distribute without communication, so that every dtype works."""
    result: DTensor = distribute_tensor(tensor, mesh, placements, src_data_rank=None)
    return result


def save_ranks(rank: Rank, state: Mapping[str, Any], path: Path, *, planner: Any = None, **options: Any) -> None:
    """Save from all ranks of the pool's crew."""
    checkpoint = rank.component("checkpoint")
    with checkpoint.HuggingFaceStorageWriter(path, **options) as writer:
        dcp.save(dict(state), storage_writer=writer, planner=planner)


def load_ranks(rank: Rank, targets: Mapping[str, Any], path: Path, *, planner: Any = None, **options: Any) -> None:
    """Load on all ranks of the pool's crew."""
    reader = rank.component("checkpoint").HuggingFaceStorageReader(path, **options)
    dcp.load(dict(targets), storage_reader=reader, planner=planner)
