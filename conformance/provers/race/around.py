"""What torch has around its streams and says through a device that is not there: random numbers, NVTX, modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.backends.cudnn
import torch.cuda.memory
import torch.cuda.nvtx
import torch.cuda.random

from conformance.provers.race.watcher import DEVICE, is_device

__all__ = ["around"]


class _AnyGenerator(type(torch.Generator)):  # type: ignore[misc]
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch._C.Generator)


class Generator(torch.Generator, metaclass=_AnyGenerator):
    """Stands for ``torch.Generator``: one of the device draws its numbers on the host."""

    _is_device: bool

    def __new__(cls, device: Any = "cpu") -> Generator:
        """A generator of either place."""
        made: Generator = super().__new__(cls, "cpu" if is_device(device) else device)  # type: ignore[call-arg]
        made._is_device = is_device(device)
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Where it was asked for."""
        return torch.device(DEVICE, 0) if self._is_device else super().device


def around(cuda: dict[str, Any]) -> Iterator[tuple[Any, str, Any]]:
    """(place, name, what stands there during a watch).

    Args:
        cuda: what stands in ``torch.cuda``; its modules have taken some of its names for their own.
    """
    for name in set(cuda) & set(vars(torch.cuda.memory)):
        yield torch.cuda.memory, name, cuda[name]
    yield torch, "Generator", Generator
    yield torch, "get_device_module", _get_device_module(torch.get_device_module)
    random, nothing = torch.cuda.random, (lambda *_, **__: 0)
    for name in ("_lazy_init", "current_device", "device_count", "is_initialized"):
        yield random, name, cuda[name]
    yield random, "_lazy_call", lambda call, **_: call()
    # A recurrent module of the device asks; its weights stay as they are.
    yield torch.backends.cudnn, "is_acceptable", lambda _: False
    yield torch.cuda, "default_generators", (torch.default_generator,)
    for name in ("_record_memory_history", "_dump_snapshot"):
        yield torch.cuda.memory, name, nothing
    names = ("rangePushA", "rangePop", "rangeStartA", "rangeEnd", "markA", "deviceRangeStart", "deviceRangeEnd")
    yield torch.cuda.nvtx, "_nvtx", SimpleNamespace(**dict.fromkeys(names, nothing))


def _get_device_module(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_device_module(device: Any = None) -> Any:
        return original(DEVICE if device is None else device)

    return get_device_module
