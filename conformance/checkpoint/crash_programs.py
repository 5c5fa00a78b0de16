"""What the processes of the crash tests run: saves of a small state, named by its seed, into two files."""

from __future__ import annotations

import os
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict_saver import async_save

from conformance.checkpoint.cases import (
    State,
    assert_parts,
    cut,
    load,
    random_bits,
    save,
    save_ranks,
    tiled,
    zeros_like,
)
from conformance.harness import Rank, assert_same_tensor, assert_same_tensors
from conformance.harness.implementation import component
from conformance.provers.faults import letting_go

__all__ = [
    "FILES",
    "MAPPING",
    "consolidate",
    "consolidate_large",
    "consolidate_together",
    "load_letting_go",
    "make_state",
    "model_of",
    "read_back",
    "read_one_file",
    "save_alone",
    "save_at_slow_rank",
    "save_in_background",
    "save_letting_go",
    "save_mapped",
    "save_natively",
    "save_one_file",
    "save_together",
    "save_with_umask",
    "share_of",
]

MAPPING = {"one": 1, "rows": 2, "wide": 1, "double": 2, "half": 1}
LARGE = ("a", "b", "c", "d")
FILES = tuple(f"model-{index:05d}-of-00002.safetensors" for index in (1, 2))


def make_state(seed: int) -> State:
    """Five tensors of random bits, different for every seed.

    All are floats with elements: what a peer does wrong with integers or scalars must not hide how it crashes.
    """
    return {
        "one": random_bits(torch.float32, (1,), seed),
        "rows": random_bits(torch.float32, (37, 5), seed + 1),
        "wide": random_bits(torch.float16, (3, 1001), seed + 2),
        "double": random_bits(torch.float64, (2, 2, 3), seed + 3),
        "half": random_bits(torch.bfloat16, (63,), seed + 4),
    }


def save_alone(implementation: str, path: str, seed: int, options: dict[str, Any]) -> None:
    """One process saves the state of that seed."""
    checkpoint = component(implementation, "checkpoint")
    save(checkpoint, make_state(seed), Path(path), **{"fqn_to_index_mapping": MAPPING, **options})


def save_letting_go(implementation: str, path: str, seed: int, thread_count: int) -> int:
    """As ``save_alone``, beside a thread that lets held calls go; returns the bytes of the state."""
    with letting_go():
        save_alone(implementation, path, seed, {"thread_count": thread_count})
    return sum(tensor.nbytes for tensor in make_state(seed).values())


def load_letting_go(implementation: str, path: str, seed: int, thread_count: int) -> int:
    """A load of whole tensors, of rows and of columns, beside a thread that lets held calls go; returns their bytes."""
    targets = share_of(0, 2, seed)
    with letting_go():
        load(component(implementation, "checkpoint"), targets, Path(path), thread_count=thread_count)
    parts = [part for value in targets.values() for part in getattr(value, "parts", {0: value}).values()]
    return sum(part.nbytes for part in parts)


def read_back(implementation: str, path: str, seed: int) -> None:
    """Load what ``save_alone`` saved, by one thread and by several: whole tensors, rows and columns of matrices."""
    state = make_state(seed)
    for thread_count in (1, 3):
        for part in range(2):
            targets = share_of(part, 2, seed, fill=False)
            load(component(implementation, "checkpoint"), targets, Path(path), thread_count=thread_count)
            for name, value in state.items():
                where = f"{name}, {thread_count} threads"
                if hasattr(targets[name], "parts"):
                    assert_parts(targets[name], value, where=where)
                else:
                    assert_same_tensor(targets[name], value, where=where)


def read_one_file(implementation: str, path: str, seed: int) -> None:
    """Load what ``save_one_file`` saved."""
    assert_same_tensors(component(implementation, "checkpoint").load_file(path), make_state(seed))


def share_of(rank: int, world_size: int, seed: int, *, fill: bool = True) -> dict[str, Any]:
    """One rank's part: the two matrices cut by rows and by columns, the rest replicated; or targets for it."""
    state: dict[str, Any] = dict(make_state(seed))
    if not fill:
        state = {name: value if value.dim() == 2 else zeros_like(value) for name, value in state.items()}
    cuts = {"rows": [[11, 12], []], "wide": [[], [2, 500]]}
    for name, inner in cuts.items():
        boxes = cut(tuple(state[name].shape), inner)
        state[name] = tiled(state[name], boxes, rank, world_size, fill=fill)
    return state


def save_together(rank: Rank, path: str, seed: int, options: dict[str, Any]) -> None:
    """All ranks save the state of that seed."""
    save_ranks(
        rank, share_of(rank.rank, rank.world_size, seed), Path(path), **{"fqn_to_index_mapping": MAPPING, **options}
    )


def save_in_background(rank: Rank, path: str, seeds: list[int], wait: bool) -> list[BaseException | None]:
    """One asynchronous save per seed, all to one folder, each awaited before the next if ``wait``; their errors."""
    checkpoint = rank.component("checkpoint")
    futures: list[Any] = []
    errors: list[BaseException | None] = []
    for seed in seeds:
        writer = checkpoint.HuggingFaceStorageWriter(path, fqn_to_index_mapping=MAPPING)
        futures.append(async_save(share_of(rank.rank, rank.world_size, seed), storage_writer=writer))
        if wait:
            errors.append(_error_of(futures.pop()))
    return errors + [_error_of(future) for future in futures]


def _error_of(future: Any) -> BaseException | None:
    error: BaseException | None = future.exception()
    return error


def save_at_slow_rank(rank: Rank, path: str, seed: int, store: str, limit_s: float) -> None:
    """As ``save_together``, in a default group whose collectives wait no longer than ``limit_s``."""
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank.rank,
        world_size=rank.world_size,
        timeout=timedelta(seconds=limit_s),
    )
    save_together(rank, path, seed, {})


def save_with_umask(implementation: str, path: str, seed: int, umask: int) -> None:
    """As ``save_alone`` and ``save_one_file``, beside each other, under an umask."""
    os.umask(umask)
    save_alone(implementation, path, seed, {})
    save_one_file(implementation, f"{path}.safetensors", seed)


def save_one_file(implementation: str, path: str, seed: int) -> None:
    """``save_file`` of the state."""
    component(implementation, "checkpoint").save_file(make_state(seed), path, {"format": "pt"})


def model_of(seed: int) -> torch.nn.Module:
    """A model whose parameters are the state of a seed; ``p_`` stands before their names, of which modules have one."""
    model = torch.nn.Module()
    for name, value in make_state(seed).items():
        model.register_parameter(f"p_{name}", torch.nn.Parameter(value, requires_grad=False))
    return model


def save_natively(implementation: str, path: str, seed: int) -> None:
    """A manager's intermediate save, in torch's own format, as ``step-1`` of the folder."""
    checkpoint = component(implementation, "checkpoint")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        with checkpoint.CheckpointManager(path, model=model_of(seed), interval=1, keep_latest_k=0) as manager:
            manager.save(1)


def consolidate(implementation: str, source: str, target: str) -> None:
    """Merge shard files."""
    component(implementation, "checkpoint").consolidate_safetensors_files(source, target, MAPPING, 2)


def consolidate_large(implementation: str, source: str, target: str) -> None:
    """Merge shard files of a state with these names, with one thread, into one file."""
    component(implementation, "checkpoint").consolidate_safetensors_files(source, target, dict.fromkeys(LARGE, 1))


def consolidate_together(rank: Rank, source: str, target: str) -> None:
    """All ranks merge shard files, into a file for each tensor."""
    mapping = {name: index for index, name in enumerate(MAPPING, start=1)}
    rank.component("checkpoint").consolidate_safetensors_files_on_every_rank(source, target, mapping, 2)


def save_mapped(implementation: str, path: str, alone: bool) -> None:
    """Save a folder, or one file, from tensors that are mapped from its own files: no byte of them is a copy."""
    files = [Path(path)] if alone else [Path(path, name) for name in FILES]
    mapped: State = {}
    for file in files:
        mapped |= load_file(file)
    checkpoint = component(implementation, "checkpoint")
    if alone:
        checkpoint.save_file(mapped, path, {"format": "pt"})
    else:
        save(checkpoint, mapped, Path(path), fqn_to_index_mapping=MAPPING)
