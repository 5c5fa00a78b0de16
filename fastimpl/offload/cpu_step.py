"""Steps on the CPU: gradients of the next chunk come down and weights of the last go up while this one is stepped.

Edges, each an event: a chunk's gradients leave when the compute stream has packed them; the host steps when they are
home; weights go up when the host has stepped; the compute stream unpacks them when they have arrived, and with that
the chunk's slot, on both sides, is free for another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch

from fastimpl import ops
from fastimpl.offload.chunks import Chunk
from fastimpl.offload.packing import SlabLayout, pack, unpack, view_like
from refimpl.optimizers import adam_step
from twinproof.offload.driver import GRADIENTS, MovePlan, Update, prepare_states, updates_of
from twinproof.offload.states import local_of, view_of
from twinproof.optimizers import AdamHyper

__all__ = ["HostStep"]

# Gradient, float32 weight, moments (the last may be None), and the weight that it is rounded into, or None.
Row = tuple[Any, ...]


@dataclass
class _Work:
    """One chunk of a step: what moves, and where it lies in a slot.

    The slot holds gradients, then weights. ``down_bytes`` of it come down: the weights without a master are first.
    ``stepped`` are the numbers of the updates whose arithmetic is done.
    """

    chunk: Chunk
    updates: list[Update]
    layout: SlabLayout = field(default_factory=SlabLayout)
    up_begin: int = 0
    down_bytes: int = 0
    stepped: list[int] = field(default_factory=list)

    def lay_out(self) -> None:
        """Give everything that moves its place in a slot."""
        self.updates = sorted(self.updates, key=lambda update: update.has_master)
        for update in self.updates:
            self.layout.add(update.grad)
        self.up_begin = self.down_bytes = self.layout.size_bytes
        for update in self.updates:
            self.layout.add(update.weight)
            if not update.has_master:
                self.down_bytes = self.layout.size_bytes

    @property
    def weight_offsets(self) -> list[int]:
        return self.layout.offsets[len(self.updates) :]

    def views(self, slab: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Gradient and weight of each update in a slab."""
        pairs = zip(self.updates, self.layout.offsets, self.weight_offsets, strict=False)
        return [
            (view_like(slab, update.grad, at), view_like(slab, update.weight, there)) for update, at, there in pairs
        ]


class HostStep:
    """The steps of one offloader on the CPU; host slots and events are made once and kept.

    Args:
        plan: what moves.
        stream_in, stream_out: for copies to and from the device.
        settle: waits until host memory holds what it is to hold.
    """

    def __init__(self, plan: MovePlan, stream_in: Any, stream_out: Any, settle: Callable[[], None]) -> None:
        self.plan, self.engine, self._settle = plan, plan.engine, settle
        self._in, self._out = stream_in, stream_out
        self._host: list[torch.Tensor] = []
        self._sent = self.engine.event()
        self._packed: list[Any] = [self.engine.event() for _ in range(plan.options.slots)]
        self._home: list[Any] = [self.engine.event() for _ in range(plan.options.slots)]
        self._arrived: list[Any] = [self.engine.event() for _ in range(plan.options.slots)]

    def run(self, chunks: Sequence[Chunk], step_rest: Callable[[], None]) -> None:
        """One logical step; ``step_rest`` steps what was not selected, on the device.

        Raises:
            UnsupportedError: see ``updates_of``; nothing has changed then.
        """
        plan = self.plan
        chunk_of = {id(bundle): chunk for chunk in chunks for bundle in chunk.bundles}
        bundles = [bundle for chunk in chunks for bundle in chunk.bundles]
        # One look at the optimizer's groups for all chunks.
        updates = updates_of(plan.optimizer, bundles, plan.masters)
        works = [
            _Work(chunk_of[id(some[0].bundle)], some)
            for some in (list(found) for _, found in groupby(updates, lambda each: id(chunk_of[id(each.bundle)])))
        ]
        step_rest()
        # A load may still be on its way to the memory that is stepped now.
        self._settle()
        if not self.engine.stands_for_device:
            # Gradients and weights are in host memory as they are.
            for work in works:
                try:
                    self._update(work, [(update.grad, update.weight) for update in work.updates])
                finally:
                    self._took(work)
            return
        for work in works:
            work.lay_out()
        device = self._make_slots(works)
        count = len(device)
        for number in range(min(count, len(works))):
            self._send_down(works[number], number, device[number])
        for number, work in enumerate(works):
            slot = number % count
            self._await(slot)
            try:
                self._update(work, work.views(self._host[slot]))
                self._send_up(work, slot, device[slot])
            except BaseException:
                # An interrupt. Weights belong to their moments, which are those of after the step.
                self._send_up(work, slot, device[slot])
                raise
            if number + count < len(works):
                self._send_down(works[number + count], slot, device[slot])

    def release(self) -> None:
        """Let the host slots go."""
        # The last step's weights may still be leaving them.
        self.engine.synchronize(self._sent)
        self._host = []

    def _make_slots(self, works: Sequence[_Work]) -> list[torch.Tensor]:
        """Device slots of this step, and host slots that are large enough for it."""
        engine, counts = self.engine, self.plan.counts
        size_bytes = max((work.layout.size_bytes for work in works), default=0)
        count = min(self.plan.options.slots, len(works))
        if len(self._host) < count or any(slot.numel() < size_bytes for slot in self._host):
            # The last step's weights may still be leaving the memory that goes now.
            engine.synchronize(self._sent)
            counts.host_bytes -= sum(slot.numel() for slot in self._host)
            self._host = []
            self._host = [self.plan.host_empty(size_bytes) for _ in range(count)]
            counts.host_bytes += size_bytes * count
        slots = [engine.device_empty(size_bytes) for _ in range(count)]
        for slot in slots:
            engine.keep(slot, self._in)
            engine.keep(slot, self._out)
        return slots

    def _send_down(self, work: _Work, slot: int, device: torch.Tensor) -> None:
        engine, counts = self.engine, self.plan.counts
        sources = [update.grad for update in work.updates]
        sources += [update.weight for update in work.updates if not update.has_master]
        pack(sources, device, work.layout.offsets[: len(sources)])
        engine.record(self._packed[slot], engine.current())
        engine.wait(self._out, self._packed[slot])
        with engine.on(self._out):
            engine.copy(self._host[slot][: work.down_bytes], device[: work.down_bytes])
            engine.record(self._home[slot], self._out)
        counts.d2h_bytes += work.down_bytes

    def _await(self, slot: int) -> None:
        self.engine.synchronize(self._home[slot])

    def _send_up(self, work: _Work, slot: int, device: torch.Tensor) -> None:
        engine, counts = self.engine, self.plan.counts
        begin, end = work.up_begin, work.layout.size_bytes
        engine.wait(self._in, self._home[slot])
        with engine.on(self._in):
            engine.copy(device[begin:end], self._host[slot][begin:end])
            engine.record(self._arrived[slot], self._in)
            engine.record(self._sent, self._in)
        counts.h2d_bytes += end - begin
        engine.wait(engine.current(), self._arrived[slot])
        offsets, stepped = work.weight_offsets, sorted(work.stepped)
        unpack([work.updates[i].weight for i in stepped], device, [offsets[i] for i in stepped])
        self._took(work)

    def _took(self, work: _Work) -> None:
        if self.plan.masters is not None:
            for update in (work.updates[i] for i in work.stepped):
                if update.has_master:
                    self.plan.masters.took(update.bundle.param)

    def _update(self, work: _Work, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """The arithmetic of one chunk: one call for all parameters that share hyperparameters, states and dtypes.

        What the library cannot step is stepped by torch, each parameter by itself. Where it is interrupted,
        ``work.stepped`` says what is done, and counters are those of what is not.
        """
        optimizer, memory, is_native = self.plan.optimizer, work.chunk.memory, ops.available()
        calls: dict[Any, tuple[AdamHyper, list[Row], list[int]]] = {}
        counters: list[tuple[torch.Tensor, float]] = []
        try:
            for number, (update, (grad, weight)) in enumerate(zip(work.updates, pairs, strict=True)):
                bundle = update.bundle

                def home(name: str, bundle: Any = bundle) -> torch.Tensor:
                    return view_of(memory, bundle.places[name], bundle.offset_bytes)

                prepare_states(optimizer, update, home)
                counter = optimizer.state[bundle.param]["step"]
                counters.append((counter, float(counter)))
                master = local_of(bundle.param.detach()) if update.has_master else weight
                rounded = weight if update.has_master else None
                hyper = update.advance(optimizer)
                first, second, largest = update.states(optimizer)
                row = (grad, master, first, second, largest, rounded)
                alone = None if is_native and _have_one_order(row) else number
                # By identity, which is cheap: equal ones that are not the same only make another call.
                key = (id(hyper), grad.dtype, largest is None, None if rounded is None else rounded.dtype, alone)
                _, rows, numbers = calls.setdefault(key, (hyper, [], []))
                rows.append(row)
                numbers.append(number)
            for (*_, alone), (hyper, rows, numbers) in calls.items():
                if alone is None:
                    _step_rows(work, hyper, rows, numbers)
                else:
                    adam_step(hyper, *rows[0])
                    work.stepped.append(alone)
        except BaseException:
            for number in set(range(len(counters))).difference(work.stepped):
                counter, count = counters[number]
                counter.fill_(count)
            raise


def _step_rows(work: _Work, hyper: AdamHyper, rows: list[Row], numbers: list[int]) -> None:
    # An interrupt that comes while the library is at work is raised when it has returned, before anything is noted.
    # One element more, with a gradient of 1, tells whether that was done.
    moment = torch.zeros((), device="cpu", dtype=torch.float32)
    witness = [None if each is None else torch.zeros_like(moment, dtype=each.dtype) for each in rows[0]]
    witness[0], witness[2] = torch.ones_like(moment, dtype=rows[0][0].dtype), moment
    columns = [
        [tensor for tensor in column if tensor is not None] for column in zip(*rows, tuple(witness), strict=True)
    ]
    try:
        ops.adam_step(hyper, *columns)
    finally:
        if float(moment):
            work.stepped += numbers


def _have_one_order(row: Row) -> bool:
    # Weights of 8 bits are rounded by torch, which knows how.
    if row[-1] is not None and row[-1].dtype not in GRADIENTS:
        return False
    # Users may bind states of their own, in another memory format than the parameter's.
    tensors = [tensor for tensor in row if tensor is not None]
    return all(tensor.is_contiguous() for tensor in tensors) or len({tensor.stride() for tensor in tensors}) == 1
