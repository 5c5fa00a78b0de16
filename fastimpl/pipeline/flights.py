"""The streams of a pipeline, the events of a batch, and tensors that cross from one stream to another."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from fastimpl.streams import Engine
from twinproof.pipeline.data import KeyedJaggedTensor
from twinproof.pipeline.schedules_flights import Flight

__all__ = ["StreamedFlight", "tensors_in", "versions_of"]


class StreamedFlight(Flight):
    """One batch on its way over streams.

    Attributes:
        host_batch: what the loader gave, held while it is copied.
        moved, sent, looked_up: events: on the device, ids exchanged, looked up.
        given: what each module's exchange gave.
        seen: versions of the tables that were looked up.
    """

    def __init__(self, batch: Any, host_batch: Any, engine: Engine) -> None:
        super().__init__(batch)
        self.host_batch = host_batch
        self.moved, self.sent, self.looked_up = engine.event(), engine.event(), engine.event()
        self.given: dict[str, Any] = {}
        self.seen: dict[str, Any] = {}

    def forget(self) -> None:
        """Nothing was sent or looked up."""
        super().forget()
        self.given.clear()
        self.seen.clear()


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor of a batch, a message or a result."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from tensors_in(part)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, KeyedJaggedTensor) or type(value).__module__.startswith(("refimpl.", "torchrec.")):
        yield from tensors_in([part for part in vars(value).values() if not isinstance(part, torch.nn.Module)])
    elif dataclasses.is_dataclass(value):
        yield from tensors_in([getattr(value, field.name) for field in dataclasses.fields(value)])


def versions_of(module: Any) -> tuple[tuple[int, int], ...]:
    """Which tensors a lookup of the module reads, and how often each was written."""
    tensors = [*module.buffers(), *module.parameters()]
    if hasattr(module, "local_shards"):
        tensors += [weight for _, weight, _ in module.local_shards().values()]
    return tuple((id(tensor), tensor._version) for tensor in tensors)
