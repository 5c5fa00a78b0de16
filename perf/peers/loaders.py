"""Libraries that load safetensors files, each as its documentation says for the CPU; where one is not installed, none.

All give tensors in memory of the process: nothing of a file is left to be read when they return, but for ``map_files``.
"""

from __future__ import annotations

import importlib
import importlib.util
import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from twinproof.checkpoint.format import buffer_of

__all__ = ["LOADERS", "Tensors", "installed", "map_files", "read_whole"]

Tensors = dict[str, torch.Tensor]

# The streamer reads its options from the environment.
_STREAMER_THREADS = "RUNAI_STREAMER_CONCURRENCY"
_BLOCK_BYTES = 8 << 20


def _load_safetensors(files: Sequence[Path], thread_count: int) -> Tensors:
    del thread_count  # It has no threads.
    return {name: tensor for file in files for name, tensor in _load_file(file, "pread").items()}


def _load_file(file: Path, backend: str) -> Tensors:
    tensors: Tensors = safetensors.torch.load_file(file, backend=backend)
    return tensors


def _load_fastsafetensors(files: Sequence[Path], thread_count: int) -> Tensors:
    # Tensors share the memory of their file, which lives as long as they do.
    module: Any = importlib.import_module("fastsafetensors")
    group = module.SingleGroup()
    loader = module.SafeTensorsFileLoader(group, "cpu", max_threads=thread_count, nogds=True, set_numa=False)
    try:
        loader.add_filenames({0: [os.fspath(file) for file in files]})
        buffers = loader.copy_files_to_device()
        try:
            return {name: buffers.get_tensor(name) for name in loader.get_keys()}
        finally:
            buffers.close()
    finally:
        loader.close()


def _load_runai(files: Sequence[Path], thread_count: int) -> Tensors:
    os.environ[_STREAMER_THREADS] = str(thread_count)
    module: Any = importlib.import_module("runai_model_streamer")
    with module.SafetensorsStreamer() as streamer:
        streamer.stream_files([os.fspath(file) for file in files])
        return dict(streamer.get_tensors())


# Contender -> (module that must be installed; all tensors of some files, read with so many threads).
LOADERS: dict[str, tuple[str, Callable[[Sequence[Path], int], Tensors]]] = {
    "safetensors": ("safetensors", _load_safetensors),
    "fastsafetensors": ("fastsafetensors", _load_fastsafetensors),
    "runai": ("runai_model_streamer", _load_runai),
}


def installed(name: str) -> bool:
    """Whether it is one of the loaders, and what it needs is there."""
    needed = ("humanize", "numpy") if name == "runai" else ()
    return name in LOADERS and all(importlib.util.find_spec(each) is not None for each in (LOADERS[name][0], *needed))


def map_files(files: Sequence[Path]) -> Tensors:
    """The safetensors library's default: tensors lie in a map of the file, here with every page touched once.

    Nothing is copied while the file lies in the page cache; a page is copied when somebody first writes to it.
    """
    tensors = {name: tensor for file in files for name, tensor in _load_file(file, "mmap").items()}
    for tensor in tensors.values():
        tensor.view(-1).view(torch.uint8)[:: mmap.PAGESIZE].max()
    return tensors


def read_whole(files: Sequence[Path], *, call_bytes: int = _BLOCK_BYTES) -> None:
    """Read the bytes of files into fresh memory in one thread, ``call_bytes`` at a time, and understand none."""
    for file in files:
        tensor = torch.empty(file.stat().st_size, dtype=torch.uint8)  # The buffer does not keep it alive.
        memory = buffer_of(tensor)
        with file.open("rb", buffering=0) as opened:
            for done in range(0, len(memory), call_bytes):
                opened.readinto(memory[done : done + call_bytes])
