"""The handle of a store on a CUDA device: arguments are copied there where they are not, answers to where the ids are.

A batch whose tensors lie on the device is not copied. What the host decides about (ids in order, changes, rounds of
eviction, counters) is read back, and waits.
"""

from __future__ import annotations

import torch

from fastimpl.ops import KVFilling, KVHandle

__all__ = ["DeviceHandle"]


class DeviceHandle(KVHandle):
    """See ``KVHandle``; the handle's tensor lies on the device, and so operators run there."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor)
        # Of prefetches; made by the first.
        self._stream: torch.cuda.Stream | None = None

    def _there(self, value: torch.Tensor) -> torch.Tensor:
        return value.to(self.tensor.device)

    def read(self, table: int, ids: torch.Tensor, begin: int, end: int, out: torch.Tensor) -> None:
        if out.device == self.tensor.device:
            return super().read(table, self._there(ids), begin, end, out)
        made = torch.empty(ids.numel(), end - begin, dtype=torch.uint8, device=self.tensor.device)
        super().read(table, self._there(ids), begin, end, made)
        out.view(torch.uint8).view(-1).copy_(made.view(-1))
        return None

    def contains(self, table: int, ids: torch.Tensor) -> torch.Tensor:
        return super().contains(table, self._there(ids)).to(ids.device)

    def ids(self, table: int, first: int, last: int) -> torch.Tensor:
        return super().ids(table, first, last).cpu()

    def changes(self, table: int, since: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        changed, removed, first_mark = super().changes(table, since)
        return changed.cpu(), removed.cpu(), first_mark

    def write(self, table: int, ids: torch.Tensor, values: torch.Tensor, begin: int, now: int, visit: bool) -> int:
        return super().write(table, self._there(ids), self._there(values), begin, now, visit)

    def write_rows(self, table: int, ids: torch.Tensor, rows: torch.Tensor) -> int:
        return super().write_rows(table, self._there(ids), self._there(rows))

    def write_metadata(self, table: int, ids: torch.Tensor, words: torch.Tensor, mask: int) -> int:
        return super().write_metadata(table, self._there(ids), self._there(words), mask)

    def update(
        self, table: int, ids: torch.Tensor, grads: torch.Tensor, hyper: torch.Tensor, now: int, step: int
    ) -> int:
        return super().update(table, self._there(ids), self._there(grads), hyper, now, step)

    def delete(self, table: int, ids: torch.Tensor) -> tuple[int, int]:
        return super().delete(table, self._there(ids))

    def begin_round(self, table: int, keep_count: int) -> tuple[torch.Tensor, list[int]]:
        ids, facts = super().begin_round(table, keep_count)
        return ids.cpu(), facts

    def evict(self, table: int, ids: torch.Tensor, plan: torch.Tensor) -> tuple[int, int]:
        return super().evict(table, self._there(ids), plan)

    def prefetch(self, table: int, ids: torch.Tensor) -> int:
        there = self._there(ids)
        if there.device.type != "cuda":
            return super().prefetch(table, there)
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.tensor.device)  # type: ignore[no-untyped-call]
        # Scratch memory of the call is of the current stream too.
        self._stream.wait_stream(torch.cuda.current_stream(self.tensor.device))
        with torch.cuda.stream(self._stream):
            status = super().prefetch(table, there)
        there.record_stream(self._stream)
        return status

    def fill(self, table: int, row_count: int, ahead: int) -> KVFilling | None:
        raise NotImplementedError("a table on a device is not filled beside itself")
