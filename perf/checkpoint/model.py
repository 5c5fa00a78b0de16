"""The state that is saved: values by formula, so that any byte of any file can be checked without keeping a copy."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from conformance.harness import Mismatch
from perf.harness.workloads import Workload
from perf.peers.plain_checkpoint import Layout

__all__ = ["Model", "remove_folder"]

# Odd, so that every element of a tensor differs from every other; -(2**32 / golden ratio) as int32.
_SPREAD = -1640531535


def remove_folder(path: Path) -> None:
    """Gone afterwards, also when it was not there."""
    shutil.rmtree(path, ignore_errors=True)


class Model:
    """The tensors of a workload, sharded evenly over the ranks of the default group on its ``shard_dim``."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.rank, self.rank_count = dist.get_rank(), dist.get_world_size()
        self.names = [f"layers.{number}.weight" for number in range(workload.tensor_count)]
        share = workload.file_count / workload.tensor_count
        self.mapping = {name: 1 + int(number * share) for number, name in enumerate(self.names)}
        self.mesh = init_device_mesh("cpu", (self.rank_count,))

    @property
    def files(self) -> dict[str, list[int]]:
        """File name -> numbers of its tensors, in order, named as transformers and torch name them."""
        count = self.workload.file_count
        files: dict[str, list[int]] = {f"model-{i:05d}-of-{count:05d}.safetensors": [] for i in range(1, count + 1)}
        for number, name in enumerate(self.names):
            files[f"model-{self.mapping[name]:05d}-of-{count:05d}.safetensors"].append(number)
        return files

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this rank's part of each tensor."""
        shape = list(self.workload.shape)
        shape[self.workload.shard_dim] //= self.rank_count
        return tuple(shape)

    def values(self, number: int, *, whole: bool = False) -> torch.Tensor:
        """Tensor ``number`` as int32 bits: this rank's part, or all of it."""
        rows, columns = self.workload.shape
        starts, sizes = [0, 0], list(self.workload.shape)
        if not whole:
            sizes = list(self.local_shape)
            starts[self.workload.shard_dim] = self.rank * sizes[self.workload.shard_dim]
        row = torch.arange(starts[0], starts[0] + sizes[0], dtype=torch.int32).unsqueeze(1)
        column = torch.arange(starts[1], starts[1] + sizes[1], dtype=torch.int32)
        return (row * columns + column).add_(number * rows).mul_(_SPREAD)

    def state(self, *, fill: bool = True) -> dict[str, DTensor]:
        """The sharded state; without ``fill``, targets of zeros."""
        state = {}
        for number, name in enumerate(self.names):
            part = self.values(number).view(torch.float32) if fill else torch.zeros(self.local_shape)
            state[name] = DTensor.from_local(part, self.mesh, [Shard(self.workload.shard_dim)], run_check=False)
        return state

    def plain_layout(self, state: Mapping[str, DTensor], folder: Path | None = None) -> Layout:
        """Where a process that only moves bytes finds this rank's parts: in files to write, or in those of a folder."""
        parts = [state[name].to_local() for name in self.names]
        files = list(self.headers() if folder is None else self.headers_in(folder))
        return Layout(parts, files, self.workload.shard_dim, self.rank, self.rank_count)

    def headers_in(self, folder: Path) -> Iterator[tuple[str, bytes, list[int]]]:
        """As ``headers``, of files that somebody wrote: other headers, and tensors in another order."""
        for file in self.files:
            with (folder / file).open("rb") as opened:
                length = opened.read(8)
                text = opened.read(int.from_bytes(length, "little"))
            entries = {name: entry["data_offsets"] for name, entry in json.loads(text).items() if name in self.mapping}
            yield file, length + text, [self.names.index(name) for name in sorted(entries, key=lambda n: entries[n])]

    def check_state(self, state: dict[str, DTensor], who: str) -> None:
        """Every bit of this rank's parts is right. Raises Mismatch."""
        for number, name in enumerate(self.names):
            if not torch.equal(state[name].to_local().view(torch.int32), self.values(number)):
                raise Mismatch(f"{who} loaded other values than were saved", where=name)

    def check_folder(self, folder: Path, who: str) -> None:
        """Every bit of the files is right, read by the safetensors library; each rank checks its share of the files.

        Raises:
            Mismatch: a tensor is absent, or differs.
        """
        for position, (file, numbers) in enumerate(self.files.items()):
            if position % self.rank_count != self.rank:
                continue
            with safe_open(os.fspath(folder / file), framework="pt") as opened:
                if set(opened.keys()) != {self.names[number] for number in numbers}:
                    raise Mismatch(f"{who} wrote other names than were saved", where=file)
                for number in numbers:
                    got = opened.get_tensor(self.names[number]).view(torch.int32)
                    if not torch.equal(got, self.values(number, whole=True)):
                        raise Mismatch(f"{who} wrote other values than were saved", where=f"{file}: tensor {number}")

    def headers(self) -> Iterator[tuple[str, bytes, list[int]]]:
        """(file, safetensors header, numbers), for writers that have none of their own."""
        for file, numbers in self.files.items():
            size = self.workload.tensor_bytes
            entries = {
                self.names[number]: {
                    "dtype": "F32",
                    "shape": list(self.workload.shape),
                    "data_offsets": [i * size, (i + 1) * size],
                }
                for i, number in enumerate(numbers)
            }
            text = json.dumps({"__metadata__": {"format": "pt"}, **entries}, separators=(",", ":")).encode()
            text += b" " * (-len(text) % 8)
            yield file, len(text).to_bytes(8, "little") + text, numbers
