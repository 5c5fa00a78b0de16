"""One file into one process. Saving needs no second version: the reference writes each tensor's memory as it lies."""

from __future__ import annotations

import os

import torch

from fastimpl.checkpoint.geometry import geometry
from fastimpl.checkpoint.readio import ReadJob, run_jobs
from twinproof.checkpoint.files import local_path
from twinproof.checkpoint.parse import read_header
from twinproof.checkpoint.single import check_backend

__all__ = ["load_file"]


def load_file(
    filename: str | os.PathLike[str], device: str | int | torch.device = "cpu", *, backend: str = "mmap"
) -> dict[str, torch.Tensor]:
    """See ``refimpl.checkpoint.load_file``. Tensors of other devices are filled through pinned buffers."""
    check_backend(backend)
    path = os.fspath(local_path(filename, "filename"))
    header = read_header(path)
    result: dict[str, torch.Tensor] = {}
    jobs = []
    for name, entry in sorted(header.entries.items(), key=lambda item: item[1].begin):
        dtype, shape = entry.torch_dtype(f"{path}: tensor {name!r}"), entry.torch_shape()
        result[name] = torch.empty(shape, dtype=dtype, device=device)
        if 0 not in shape:
            geo = geometry(shape, (0,) * len(shape), shape, dtype.itemsize)
            jobs.append(ReadJob(path, header.data_start + entry.begin, geo, result[name], dtype))
    run_jobs(jobs, thread_count=min(4, torch.get_num_threads()))
    return result
