"""Batches on the virtual device, which sees every access to them."""

from __future__ import annotations

from typing import Any

import torch

from conformance.pipeline.jobs import Batch
from conformance.provers.virtual_device import VirtualDevice

# Of tables whose exchanges and lookups the virtual device sees.
KINDS = ("table_wise", "row_wise", "data_parallel")


def on_host(device: VirtualDevice, batches: list[Batch]) -> list[Batch]:
    """Batches in the virtual device's host memory, as a loader gives them."""
    for batch in batches:
        parts = [batch.dense, batch.target]
        for ids in batch.ids:
            parts += [ids.values(), ids.lengths(), ids.offsets()]
        for part in parts:
            device.tracker.memory_of(part, stream="host", on_host=True)
    return batches


def move(device: VirtualDevice, batch: Batch) -> Batch:
    """What a batch's own ``to`` would do, over the engine."""

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        memory = device.engine.device_empty(tensor.numel() * tensor.element_size())
        target = memory.view(tensor.dtype).view(tensor.shape)
        device.engine.copy(target, tensor)
        return target

    return Batch(moved(batch.dense), [ids._map(moved) for ids in batch.ids], moved(batch.target))


class VirtualBatch(Batch):
    """A batch that goes to the virtual device when it is asked to."""

    device: VirtualDevice

    def to(self, device: Any, non_blocking: bool = False) -> Batch:
        """Copies on the current stream."""
        return move(self.device, self)


def virtual(device: VirtualDevice, batch: Batch) -> VirtualBatch:
    """The batch, bound to the device."""
    made = VirtualBatch(batch.dense, batch.ids, batch.target)
    made.device = device
    return made
