"""What the processes of the crash tests run: saves of a small state, named by its seed, into two files."""

from __future__ import annotations

import mmap
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from conformance.checkpoint.support import State, cut, random_bits, save, save_ranks, tiled
from conformance.harness import Rank
from conformance.harness.implementation import component

__all__ = [
    "FILES",
    "MAPPING",
    "consolidate",
    "make_state",
    "save_alone",
    "save_at_slow_rank",
    "save_mapped",
    "save_one_file",
    "save_together",
    "save_with_umask",
]

MAPPING = {"scalar": 1, "rows": 2, "wide": 1, "empty": 2, "half": 1}
FILES = tuple(f"model-{index:05d}-of-00002.safetensors" for index in (1, 2))


def make_state(seed: int) -> State:
    """Five tensors of random bits; states of different seeds differ in every tensor that has bytes."""
    return {
        "scalar": random_bits(torch.int64, (), seed),
        "rows": random_bits(torch.float32, (37, 5), seed + 1),
        "wide": random_bits(torch.uint8, (3, 1001), seed + 2),
        "empty": random_bits(torch.float64, (0, 4), seed + 3),
        "half": random_bits(torch.bfloat16, (63,), seed + 4),
    }


def save_alone(implementation: str, path: str, seed: int, options: dict[str, Any]) -> None:
    """One process saves the state of that seed."""
    checkpoint = component(implementation, "checkpoint")
    save(checkpoint, make_state(seed), Path(path), **{"fqn_to_index_mapping": MAPPING, **options})


def save_together(rank: Rank, path: str, seed: int, options: dict[str, Any]) -> None:
    """All ranks save: the two matrices cut by rows and by columns, the rest replicated."""
    state: dict[str, Any] = dict(make_state(seed))
    cuts = {"rows": [[11, 12], []], "wide": [[], [2, 500]]}
    for name, inner in cuts.items():
        boxes = cut(tuple(state[name].shape), inner)
        state[name] = tiled(state[name], boxes, rank.rank, rank.world_size)
    save_ranks(rank, state, Path(path), **{"fqn_to_index_mapping": MAPPING, **options})


def save_at_slow_rank(rank: Rank, path: str, seed: int, store: str, limit_s: float) -> None:
    """As ``save_together``, in a default group whose collectives wait no longer than ``limit_s``."""
    dist.destroy_process_group()
    limit = timedelta(seconds=limit_s)
    world = {"rank": rank.rank, "world_size": rank.world_size, "timeout": limit}
    dist.init_process_group("gloo", init_method=f"file://{store}", **world)
    save_together(rank, path, seed, {})


def save_with_umask(implementation: str, path: str, seed: int, umask: int) -> None:
    """As ``save_alone`` and ``save_one_file``, beside each other, under an umask."""
    os.umask(umask)
    save_alone(implementation, path, seed, {})
    save_one_file(implementation, f"{path}.safetensors", seed)


def save_one_file(implementation: str, path: str, seed: int) -> None:
    """``save_file`` of the state."""
    component(implementation, "checkpoint").save_file(make_state(seed), path, {"format": "pt"})


def consolidate(implementation: str, source: str, target: str) -> None:
    """Merge shard files."""
    component(implementation, "checkpoint").consolidate_safetensors_files(source, target, MAPPING, 2)


def _mapped(path: Path) -> State:
    """The tensors of a file as views of its mapped pages; no byte is copied."""
    with path.open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE) if False else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return {}


def save_mapped(implementation: str, path: str, names: dict[str, str]) -> None:
    """Save a folder from tensors that are mapped from that folder's own files."""
