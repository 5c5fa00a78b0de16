"""Storages that the program saves, loads, moves and resizes, which torch does beside its operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.serialization

from conformance.provers.race.watcher import DEVICE, Watcher, is_device

__all__ = ["replaced"]


def replaced(watcher: Watcher) -> Iterator[tuple[Any, str, Any]]:
    """(place, name, what stands there during a watch)."""
    storage, saving = torch.UntypedStorage, torch.serialization
    yield storage, "resize_", _resize(watcher, storage.resize_)
    yield storage, "_write_file", _write_file(watcher, storage._write_file)
    yield storage, "to", _to(watcher, storage.to)
    yield storage, "cpu", _cpu(watcher, storage.cpu)
    yield saving, "_save", _save(watcher, saving._save)
    yield saving, "location_tag", _location_tag(watcher, saving.location_tag)
    yield saving, "default_restore_location", _restore(saving.default_restore_location)


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """The whole storage as a tensor, (size,), uint8."""
    with torch.utils._python_dispatch._disable_current_modes(), torch._C.DisableTorchFunction():
        return torch.empty(0, dtype=torch.uint8).set_(storage)


def _is_on_device(watcher: Watcher, storage: torch.UntypedStorage) -> bool:
    memory = watcher.memories.of_storage(storage)
    return memory is not None and not memory.on_host


def _read(watcher: Watcher, storage: Any, what: str) -> None:
    # A whole storage is written out, of a view too. Of the device it is ``storage.cpu()`` first, a copy that waits
    # (torch/serialization.py, _save); no branch of the program hangs on the values.
    if isinstance(storage, torch.UntypedStorage) and storage.device.type == "cpu":
        # The program's mode would say that the tensor lies on the device.
        with torch._C.DisableTorchFunction():
            watcher.host_reads(_bytes_of(storage), what, decides=False)


class _Records:
    """A writer of records that tells which storages it is given."""

    def __init__(self, watcher: Watcher, writer: Any) -> None:
        self._watcher, self._writer = watcher, writer

    def write_record(self, name: str, record: Any, size_bytes: int, *others: Any) -> Any:
        """As the writer's."""
        _read(self._watcher, record, "save")
        return self._writer.write_record(name, record, size_bytes, *others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)


def _save(watcher: Watcher, original: Callable[..., Any]) -> Callable[..., Any]:
    def save(obj: Any, zip_file: Any, *args: Any, **options: Any) -> Any:
        return original(obj, _Records(watcher, zip_file), *args, **options)

    return save


def _write_file(watcher: Watcher, original: Callable[..., Any]) -> Callable[..., Any]:
    # ``pickle`` of a tensor, and ``torch.save`` in its older format.
    def write_file(storage: torch.UntypedStorage, *args: Any, **options: Any) -> Any:
        _read(watcher, storage, "save")
        return original(storage, *args, **options)

    return write_file


def _location_tag(watcher: Watcher, original: Callable[..., Any]) -> Callable[..., Any]:
    def location_tag(storage: Any) -> Any:
        untyped = getattr(storage, "_untyped_storage", storage)
        return f"{DEVICE}:0" if _is_on_device(watcher, untyped) else original(storage)

    return location_tag


def _restore(original: Callable[..., Any]) -> Callable[..., Any]:
    def restore(storage: Any, location: str) -> Any:
        if location == DEVICE or location.startswith(f"{DEVICE}:"):
            return storage.to(device=torch.device(location))
        return original(storage, location)

    return restore


def _to(watcher: Watcher, original: Callable[..., Any]) -> Callable[..., Any]:
    def to(storage: torch.UntypedStorage, *, device: Any, non_blocking: bool = False) -> Any:
        wants = is_device(device)
        if storage.device.type != "cpu" or (not wants and torch.device(device).type != "cpu"):
            return original(storage, device=device, non_blocking=non_blocking)
        if _is_on_device(watcher, storage) == wants:
            return storage
        return _bytes_of(storage).to(DEVICE if wants else "cpu", non_blocking=non_blocking).untyped_storage()

    return to


def _cpu(watcher: Watcher, original: Callable[..., Any]) -> Callable[..., Any]:
    def cpu(storage: torch.UntypedStorage) -> Any:
        return storage.to(device="cpu") if _is_on_device(watcher, storage) else original(storage)

    return cpu


def _resize(watcher: Watcher, original: Callable[..., Any]) -> Callable[..., Any]:
    def resize_(storage: torch.UntypedStorage, size_bytes: int) -> Any:
        watcher.resized(storage, size_bytes)
        return original(storage, size_bytes)

    return resize_
