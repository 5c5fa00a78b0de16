"""Collectives as NCCL orders them: on a stream of their own, after the caller's; ``wait`` orders the caller's after."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist

from conformance.provers.race.watcher import Watcher
from conformance.provers.virtual_device.device import tensors_in

__all__ = ["collectives"]

_METHODS = (
    "allreduce", "allreduce_coalesced", "allgather", "_allgather_base", "allgather_into_tensor_coalesced", "broadcast",
    "reduce", "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "alltoall",
    "alltoall_base", "gather", "scatter", "send", "recv",
)  # fmt: skip


class _Work:
    """A collective in flight: ``wait`` is the current stream's, as with NCCL, and not the host's."""

    def __init__(self, work: Any, watcher: Watcher, event: Any, held: list[Any]) -> None:
        self._work, self._watcher, self._event, self._held = work, watcher, event, held

    def wait(self, *args: Any) -> bool:
        self._work.wait(*args)
        self._watcher.engine.wait(self._watcher.engine.current(), self._event)
        self._held = []
        return True

    def is_completed(self) -> bool:
        self._watcher.gap("time", "Work.is_completed", "the host asks how far a collective is")
        self._watcher.engine.synchronize(self._event)
        return bool(self._work.is_completed())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


@contextmanager
def collectives(watcher: Watcher) -> Iterator[None]:
    """Process groups of the program: gloo carries what NCCL would, in NCCL's order of streams."""
    if not dist.is_available():
        yield
        return
    streams: dict[int, str] = {}
    with ExitStack() as stack:
        for name in _METHODS:
            original = getattr(dist.ProcessGroup, name, None)
            if original is not None:
                method = _method(watcher, streams, original)
                stack.enter_context(mock.patch.object(dist.ProcessGroup, name, method))
        made = dist.distributed_c10d.init_process_group
        for place in (dist, dist.distributed_c10d):
            stack.enter_context(mock.patch.object(place, "init_process_group", _on_gloo(made)))
        yield


def _on_gloo(original: Callable[..., Any]) -> Callable[..., Any]:
    def init_process_group(backend: str | None = None, *args: Any, **options: Any) -> Any:
        options.pop("device_id", None)
        return original("gloo", *args, **options)

    return init_process_group


def _method(watcher: Watcher, streams: dict[int, str], original: Callable[..., Any]) -> Callable[..., Any]:
    def method(group: Any, *args: Any, **options: Any) -> Any:
        tensors = list(tensors_in([*args, *options.values()]))
        if not watcher.engine.is_watched() or not any(map(watcher.on_device, tensors)):
            return original(group, *args, **options)
        engine = watcher.engine
        if id(group) not in streams:
            streams[id(group)] = engine.stream("nccl")
        stream = streams[id(group)]
        begin, end = engine.event(), engine.event()
        engine.record(begin, engine.current())
        engine.wait(stream, begin)
        engine.push(stream)
        try:
            work = original(group, *args, **options)
        finally:
            engine.pop()
        engine.record(end, stream)
        # NCCL's group holds the tensors until ``wait``; then the waiting stream is behind their use.
        return _Work(work, watcher, end, tensors)

    return method
