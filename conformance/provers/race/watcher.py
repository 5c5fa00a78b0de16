"""The ops of a program as work on torch's streams: what each reads and writes, on which stream, in which place."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from conformance.provers.race.copies import uses_host_temporary
from conformance.provers.race.engine import RaceEngine
from conformance.provers.race.memory import Memories
from conformance.provers.race.points import Point, Site, site_here
from conformance.provers.race.trace import LINK_BYTES_PER_S, LINK_S, Trace, op_seconds
from conformance.provers.race.waits import host_operands, host_results, host_wait
from conformance.provers.virtual_device.clocks import HOST
from conformance.provers.virtual_device.device import ALLOCATIONS, is_view, operands_of, tensors_in
from twinproof.errors import UnsupportedError

__all__ = ["DEVICE", "Gap", "OpsMode", "Watcher", "is_device"]

DEVICE = "cuda"
_PLAIN = (torch.Tensor, torch.nn.Parameter)
# What touches no values.
_NO_WORK = {"aten::set_", "aten::resize_", "aten::_unsafe_view", "aten::lift_fresh", "aten::is_pinned"}


class Gap:
    """A point that the proof does not cover.

    Attributes:
        kind: "value" (the host looks at values of the device), "time" (it asks how far a stream is), "address" (an
            address leaves torch), "place" (an operand in host memory, which a device refuses) or "bypass" (a call
            that is not modelled).
        site: the program point.
        why: one sentence.
    """

    def __init__(self, kind: str, site: Site, why: str) -> None:
        self.kind, self.site, self.why, self.count = kind, site, why, 1


def is_device(place: Any) -> bool:
    """Whether a device argument names the accelerator."""
    if place is None:
        return False
    if isinstance(place, int):
        place = torch.device(DEVICE, place)
    found = torch.device(place)
    if found.type == DEVICE and found.index not in (None, 0):
        raise UnsupportedError(
            "a second device", got=str(found), expected=f"{DEVICE}:0", where=str(site_here(str(place)))
        )
    return found.type == DEVICE


class _Local(threading.local):
    """What the function call that is going on says of places: explicitly, or by its operands."""

    explicit: bool | None = None
    ambient: bool = False


class Watcher:
    """The state of one watch: memories, engine, trace, and what is not covered.

    Every tensor is one of the host's to torch itself. Which storages lie on the device is known by how they were made.
    """

    def __init__(self) -> None:
        self.memories = Memories(site_here, lambda stream: self.engine.label(stream))
        self.trace = Trace()
        self.engine = RaceEngine(self.memories, self.trace)
        self.gaps: dict[tuple[str, Site], Gap] = {}
        self.local = _Local()
        self.launch_count = 0

    def gap(self, kind: str, what: str, why: str) -> None:
        """Note a point that is not covered."""
        site = site_here(what)
        if (kind, site) in self.gaps:
            self.gaps[kind, site].count += 1
        else:
            self.gaps[kind, site] = Gap(kind, site, why)

    def on_device(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies on the device."""
        with torch._C.DisableTorchFunction():
            return self._lies_on_device(tensor)

    def _lies_on_device(self, tensor: torch.Tensor) -> bool:
        if tensor.layout is not torch.strided:
            return any(self.memories.is_on_device(part) for part in tensors_in(tensor))
        return tensor.device.type == "cpu" and self.memories.is_on_device(tensor)

    def note_known(self, tensor: torch.Tensor) -> None:
        """Count memory that was never seen as the host's."""
        with torch._C.DisableTorchFunction():
            if tensor.device.type == "cpu" and tensor.layout is torch.strided and type(tensor) in _PLAIN:
                self.memories.memory_of(tensor, stream=HOST)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Carry out one operator."""
        name, options = func._schema.name, dict(kwargs)
        self.memories.sweep()
        wants_device = is_device(options.get("device"))
        if wants_device:
            options["device"] = torch.device("cpu")
        pins = bool(options.pop("pin_memory", False)) or name == "aten::_pin_memory"
        if name == "aten::_pin_memory":
            func, args = torch.ops.aten.clone.default, args[:1]
        reads, writes = ([one for one in side if one.device.type == "cpu"] for side in operands_of(func, args, options))
        operands = [*reads, *writes]
        self.engine.backward.note_operands(name, operands)
        stream = self.engine.current()
        if torch.is_grad_enabled() or not self.engine.backward.in_node():
            self.engine.backward.note_forward(stream, lambda: site_here("").point)
        known = {id(one): self.memories.is_on_device(one) for one in operands}
        if name.endswith("_like") or name.startswith("aten::new_"):
            # Of the operand they take place and shape, and no byte.
            reads = operands = []
        to_device = self._place_of_result(known, wants_device)
        if name in ("aten::copy_", "aten::_foreach_copy_"):
            return self._copy_op(func, args, options, to_device)
        result = func(*args, **options)
        if name.startswith("aten::resize") or func._schema.overload_name.endswith("out"):
            for one in writes:
                self.resized(one.untyped_storage(), one.untyped_storage().nbytes(), op=name.removeprefix("aten::"))
        if is_view(func) or name in _NO_WORK:
            return result
        made = [one for one in tensors_in(result) if one.device.type == "cpu" and self.memories.knows(one) is None]
        site, here = self.site(name), {id(one) for one in host_results(name, result)}
        for one in made:
            memory = self.memories.memory_of(one, stream=stream, on_host=not to_device or id(one) in here)
            memory.made_at, memory.is_pinned = str(site), pins and not to_device
        if not operands and not made:
            return result
        if to_device if not operands else any(known.values()):
            self._waiting_op(func, args, options, site, stream, reads, [*writes, *made], here)
        else:
            self._host_op(site, reads, [*writes, *made])
        return result

    def _waiting_op(
        self,
        func: Any,
        args: tuple[Any, ...],
        options: dict[str, Any],
        site: Site,
        stream: str,
        reads: Sequence[torch.Tensor],
        writes: list[torch.Tensor],
        here: set[int],
    ) -> None:
        name, knows = func._schema.name, self.memories.knows
        before, decides = host_wait(
            func, args, options, is_on_device=self.memories.is_on_device, is_known=lambda one: knows(one) is not None
        )
        if before:
            self.engine.synchronize_stream(stream)
        free = here | {id(one) for one in host_operands(name, args, options)}
        self._device_op(name, site, stream, reads, writes, free)
        if decides and not before:
            self.engine.synchronize_stream(stream)
        if decides:
            self.gap("value", name.removeprefix("aten::"), "the host waits for values of the device")

    def site(self, op: str) -> Site:
        """The program point of an operator; of a backward one, with its forward."""
        forward: Point | None = self.engine.backward.forward_point() if self.engine.backward.in_node() else None
        return site_here(op.removeprefix("aten::"), forward=forward)

    def _place_of_result(self, known: dict[int, bool], wants_device: bool) -> bool:
        if wants_device or self.local.explicit is not None:
            return wants_device or bool(self.local.explicit)
        return any(known.values()) if known else self.local.ambient

    def _host_op(self, site: Site, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> None:
        tick = self.memories.clocks.advance(HOST)
        for side, is_write in ((reads, False), (writes, True)):
            for tensor in side:
                memory = self.memories.memory_of(tensor, stream=HOST)
                # A write into memory of the device by an op of the host cannot be: places are those of operands.
                self.memories.access(tensor, memory, stream=HOST, tick=tick, writes=is_write, what=site)  # type: ignore[arg-type]

    def _device_op(
        self,
        name: str,
        site: Site,
        stream: str,
        reads: Sequence[torch.Tensor],
        writes: list[torch.Tensor],
        free: set[int],
    ) -> None:
        self.memories.judge_gone(stream)
        tick = self.memories.clocks.advance(stream)
        for side, is_write in ((reads, False), (writes, True)):
            for tensor in side:
                self._operand(tensor, site, stream, tick, is_write, may_be_host=id(tensor) in free)
        if name not in ALLOCATIONS:
            self.launch_count += 1
            self.engine.add_op(stream, tick, site, op_seconds(name, sum(one.nbytes for one in (*reads, *writes))))

    def _operand(
        self, tensor: torch.Tensor, site: Site, stream: str, tick: int, is_write: bool, *, may_be_host: bool
    ) -> None:
        memory = self.memories.memory_of(tensor, stream=stream)
        actor = stream
        if memory.on_host and tensor.numel():
            if tensor.dim() > 0 and not may_be_host:
                self.gap("place", site.op, f"an operand of shape {tuple(tensor.shape)} in host memory")
            # By value, at the time of the call.
            actor, tick = HOST, self.memories.clocks.advance(HOST)
        self.memories.access(tensor, memory, stream=actor, tick=tick, writes=is_write, what=site)  # type: ignore[arg-type]

    def _copy_op(self, func: Any, args: tuple[Any, ...], options: dict[str, Any], to_device: bool) -> Any:
        targets, sources = ([one] if isinstance(one, torch.Tensor) else list(one) for one in args[:2])
        non_blocking = bool(args[2] if len(args) > 2 else options.get("non_blocking", False))
        result = func(*args, **options)
        for target, source in zip(targets, sources, strict=True):
            for side in (target, source):
                if self.memories.knows(side) is None:
                    # New memory within a call with operands of the device is of the device, as a deep copy is.
                    on_host = not (self.local.ambient or (to_device and self.local.explicit))
                    self.memories.memory_of(side, stream=self.engine.current(), on_host=on_host)
            self.copied(target, source, non_blocking=non_blocking)
        return result

    def copied(self, target: torch.Tensor, source: torch.Tensor, *, non_blocking: bool, op: str = "copy_") -> None:
        """Note a copy that has been carried out, by the rules of torch's copies on CUDA."""
        to, of = self.memories.memory_of(target, stream=HOST), self.memories.memory_of(source, stream=HOST)
        stream, site = self.engine.current(), self.site(op)
        if to.on_host and of.on_host:
            self._host_op(site, [source], [target])
            return
        crosses = to.on_host != of.on_host
        host_side = target if to.on_host else source
        # Pinned or not, the caller's memory is free when the call is over.
        at_once = crosses and uses_host_temporary(target, source, from_host=of.on_host, non_blocking=non_blocking)
        self.memories.judge_gone(stream)
        tick = self.memories.clocks.advance(stream)
        if at_once and to.on_host:
            self._one(source, stream, tick, site, writes=False)
            self.engine.synchronize_stream(stream)
            self._one(target, HOST, self.memories.clocks.advance(HOST), site, writes=True)
        elif at_once:
            self._one(source, HOST, self.memories.clocks.advance(HOST), site, writes=False)
            self._one(target, stream, tick, site, writes=True)
        else:
            self._one(source, stream, tick, site, writes=False)
            self._one(target, stream, tick, site, writes=True)
        if crosses:
            # The allocator of pinned memory keeps a freed block until copies from and to it are over.
            self.engine.keep(host_side, stream)
        cost = LINK_S + target.nbytes / LINK_BYTES_PER_S if crosses else op_seconds(op, 2 * target.nbytes)
        self.launch_count += 1
        self.engine.add_op(stream, tick, site, cost)
        if crosses and not non_blocking:
            self.engine.synchronize_stream(stream)

    def _one(self, tensor: torch.Tensor, stream: str, tick: int, site: Site, *, writes: bool) -> None:
        memory = self.memories.memory_of(tensor, stream=stream)
        self.memories.access(tensor, memory, stream=stream, tick=tick, writes=writes, what=site)  # type: ignore[arg-type]

    def adopt(self, tensor: torch.Tensor, *, to_device: bool, op: str) -> None:
        """New memory that an op which nobody saw has made; it is written on the current stream, or by the host."""
        stream = self.engine.current() if to_device else HOST
        memory, site = self.memories.memory_of(tensor, stream=stream, on_host=not to_device), self.site(op)
        memory.made_at = memory.made_at or str(site)
        self._one(tensor, stream, self.memories.clocks.advance(stream), site, writes=True)

    def host_reads(self, tensor: torch.Tensor, what: str, *, decides: bool = True) -> None:
        """The host looks at values: of device memory after waiting for the current stream, of its own at once.

        Args:
            tensor: whose values.
            what: the call.
            decides: whether the program may go another way for them.
        """
        if tensor.layout is not torch.strided or tensor.device.type != "cpu":
            return
        memory = self.memories.memory_of(tensor, stream=HOST)
        if not memory.on_host:
            self._one(tensor, *self._begun(), self.site(what), writes=False)
            self.engine.synchronize_stream(self.engine.current())
            if decides:
                self.gap("value", what, "the host waits for values of the device")
            return
        self._one(tensor, HOST, self.memories.clocks.advance(HOST), self.site(what), writes=False)

    def _begun(self) -> tuple[str, int]:
        stream = self.engine.current()
        return stream, self.memories.clocks.advance(stream)

    def resized(self, storage: torch.UntypedStorage, size_bytes: int, *, op: str = "storage.resize_") -> None:
        """A storage is given another size: its block goes back, and another takes its place, with its bytes.

        The current stream copies them (``resize_bytes_cuda``, aten/src/ATen/native/cuda/Resize.cpp).
        """
        memory = self.memories.of_storage(storage)
        if memory is None or memory.on_host or memory.size_bytes == size_bytes:
            return
        stream, site = self.engine.current(), self.site(op)
        self.memories.judge_gone(stream)
        if size_bytes:
            self.memories.read_bytes(memory, min(size_bytes, memory.size_bytes), stream=stream, site=site)
        self.memories.given_back(replace(memory, gone_at=site))
        self.memories.live_bytes += size_bytes - memory.size_bytes
        memory.size_bytes, memory.home = size_bytes, stream
        memory.accesses, memory.last, memory.kept_for = [], {}, set()
        if size_bytes:
            self.memories.access_bytes(memory, stream=stream, site=site)

    @contextmanager
    def calling(self, ambient: bool, explicit: bool | None) -> Iterator[None]:
        """Around one function call: where new tensors within it lie."""
        before = self.local.ambient, self.local.explicit
        self.local.ambient, self.local.explicit = ambient or before[0], explicit
        try:
            yield
        finally:
            self.local.ambient, self.local.explicit = before


class OpsMode(TorchDispatchMode):
    """Hands every operator of its thread to the watcher."""

    def __init__(self, watcher: Watcher) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.watcher = watcher

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(_unwraps(kind) for kind in types):
            return NotImplemented
        # Within ``backward`` the other mode is on, and answers for the device where torch's own places are meant.
        with torch._C.DisableTorchFunction():
            return self.watcher.run(func, args, kwargs or {})


def _unwraps(kind: type) -> bool:
    """Whether a subclass carries tensors of its own, whose operators come here one by one."""
    own = getattr(kind, "__torch_dispatch__", None)
    return own is not None and own is not torch._C._disabled_torch_dispatch_impl
