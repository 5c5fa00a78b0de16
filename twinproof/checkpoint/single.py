"""One file from one process: ``save_file`` and ``load_file``, drop-ins for ``safetensors.torch``."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping

import torch

from twinproof.checkpoint.files import local_path
from twinproof.checkpoint.layout import FileLayout, lay_out
from twinproof.checkpoint.memory import as_bits, buffer_of, check_storable
from twinproof.checkpoint.parse import read_header
from twinproof.checkpoint.publish import fsync_path, storage_error
from twinproof.errors import ConfigError, UnstorableError

__all__ = ["check_backend", "layout_of", "load_file", "save_file", "write_tensors"]


BACKENDS = ("mmap", "pread")


def _write_all(descriptor: int, content: memoryview) -> None:
    while content:
        content = content[os.write(descriptor, content) :]


def layout_of(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None) -> FileLayout:
    """The layout of a file with these tensors. Raises UnsupportedError, ConfigError."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise UnstorableError("safetensors holds tensors only", got=type(tensor).__name__, where=repr(name))
        check_storable(tensor, name)
    return lay_out([(name, t.dtype, t.shape) for name, t in tensors.items()], metadata)


def write_tensors(path: str, tensors: Mapping[str, torch.Tensor], layout: FileLayout, *, durable: bool) -> None:
    """Write one file under a temporary name and rename it into place. Raises StorageError, ``path`` unchanged."""
    temporary = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.saving-{uuid.uuid4().hex[:12]}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            _write_all(descriptor, memoryview(layout.header))
            for name in layout.begins:
                bits = as_bits(tensors[name]).cpu().contiguous()
                _write_all(descriptor, buffer_of(bits))
            if durable:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.rename(temporary, path)
        if durable:
            fsync_path(os.path.dirname(path) or ".")
    except OSError as error:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise storage_error(error, "writing", path) from error


def save_file(
    tensors: Mapping[str, torch.Tensor], filename: str | os.PathLike[str], metadata: Mapping[str, str] | None = None
) -> None:
    """Write the same bytes as ``safetensors.torch.save_file``, atomically and durably.

    Unlike there, views and tensors that share memory are saved as their values, and metadata keys are sorted.

    Args:
        tensors: name -> tensor of any storable dtype, shape and stride, on any device.
        filename: replaced at one instant.
        metadata: str -> str; nothing is added.

    Raises:
        UnsupportedError, ConfigError, StorageError.
    """
    path = os.fspath(local_path(filename, "filename"))
    write_tensors(path, tensors, layout_of(tensors, metadata), durable=True)


def check_backend(backend: str) -> None:
    """Demand a way of reading that the safetensors library knows. Raises ConfigError."""
    if backend not in BACKENDS:
        raise ConfigError("not a backend", got=backend, expected=BACKENDS, where="backend")


def load_file(
    filename: str | os.PathLike[str], device: str | int | torch.device = "cpu", *, backend: str = "mmap"
) -> dict[str, torch.Tensor]:
    """Read every tensor of one file, in the order of the data.

    Args:
        filename: the file.
        device: where the tensors are to be.
        backend: "mmap" or "pread", as that library takes them. Bytes are read into memory of the tensors' own either
            way: no tensor depends on a file that somebody may cut short.

    Raises:
        FormatError: a malformed file. UnsupportedError: F6. ConfigError: another backend. FileNotFoundError.
    """
    check_backend(backend)
    path = os.fspath(local_path(filename, "filename"))
    header = read_header(path)
    result: dict[str, torch.Tensor] = {}
    with open(path, "rb") as file:
        for name, entry in sorted(header.entries.items(), key=lambda item: item[1].begin):
            tensor = torch.empty(entry.torch_shape(), dtype=entry.torch_dtype(f"{path}: tensor {name!r}"))
            file.seek(header.data_start + entry.begin)
            file.readinto(buffer_of(tensor))
            result[name] = tensor.to(device)
    return result
