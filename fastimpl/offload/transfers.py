"""Chunks through staging slots: copy in of the next, update of this, copy out of the last, all at once.

Edges, each an event: a slot is written after it was allocated and after the copy out of the chunk that last used it;
host memory is read after the copy out that wrote it; an update runs behind the copy in of its chunk, a copy out behind
the update. State is bound to host memory except while its own chunk is being updated.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch

from fastimpl.offload.chunks import Chunk, cut
from fastimpl.offload.cpu_step import HostStep
from fastimpl.offload.layout import BoundTensors
from fastimpl.offload.packing import Item, receive, send
from fastimpl.offload.positions import GroupPositions
from fastimpl.offload.slot_step import SlotUpdates
from fastimpl.streams import Engine, engine_for, placement_of
from twinproof.engine import weakly
from twinproof.offload.driver import Arithmetic, MovePlan, Wanted
from twinproof.offload.states import MASTER, Bundle, bindings, holder_of, rebind, version_of, view_of

__all__ = ["StreamedTransfers"]


class StreamedTransfers:
    """Copies on streams of their own, a chunk at a time, and as few of them as the places of tensors allow."""

    def __init__(self, plan: MovePlan) -> None:
        self.plan, self.engine = plan, plan.engine
        self._chunks: list[Chunk] = []
        self._in, self._out = self.engine.stream("offload-h2d"), self.engine.stream("offload-d2h")
        self._edge = self.engine.event()
        self._slots: list[torch.Tensor] = []
        self._slots_home: Any = None
        self._fetched = 0
        self._last_uses: dict[int, Any] = {}
        self._draining: list[Any] = []
        self._positions = GroupPositions()
        self._hosts: set[int] = set()
        self._strangers: set[tuple[int, str]] = set()
        self._slot_updates = SlotUpdates(plan)
        self._host_step = HostStep(plan, self._in, self._out, weakly(self.settle))

    @staticmethod
    def default_engine(device: torch.device) -> Engine:
        """CUDA streams, or everything at once on the CPU."""
        return engine_for(device)

    def place(self, bundles: list[Bundle]) -> None:
        """One block of host memory of exactly their size, made once."""
        if bundles:
            self._drop_fetched()  # Slots are as large as the largest chunk was.
            memory = self.plan.host_empty(sum(bundle.span_bytes for bundle in bundles))
            self._chunks += cut(memory, bundles, self.plan.options.chunk_bytes, self.engine)
            if memory.numel():
                self._hosts.add(memory.untyped_storage().data_ptr())
            self.plan.counts.host_bytes += memory.numel()
            self.plan.counts.host_placement = placement_of(memory)
            self.plan.counts.chunk_count = len(self._chunks)

    def unplace(self, bundles: list[Bundle]) -> None:
        """Forget bundles, all at once; a block of memory goes when nothing of it is left."""
        self.settle_for_writing()
        # What lies there and fits, a master for instance, has to leave the block with the rest.
        self.to_device(bundles, for_good=True)
        left = set(map(id, bundles))
        for chunk in self._chunks:
            chunk.drop_layout()
            chunk.bundles = [other for other in chunk.bundles if id(other) not in left]
        blocks = {chunk.memory.untyped_storage().data_ptr(): chunk.memory for chunk in self._chunks}
        self._chunks = [chunk for chunk in self._chunks if chunk.bundles]
        self._hosts = {chunk.memory.untyped_storage().data_ptr() for chunk in self._chunks}
        gone = [memory.numel() for at, memory in blocks.items() if at not in self._hosts]
        self.plan.counts.host_bytes -= sum(gone)
        self.plan.counts.chunk_count = len(self._chunks)

    # The step.

    def step(self, arithmetic: Arithmetic, step_whole: Callable[[Arithmetic], None]) -> bool:
        """Chunk by chunk; what was not selected is stepped while the first chunks arrive."""
        self._positions.refresh(self.plan.optimizer.param_groups, [chunk.layout.params for chunk in self._chunks])
        resident = self._positions.resident
        if self.plan.options.step_device == "cpu":
            self._host_step.run(self._chunks, lambda: self._update(resident, arithmetic))
            return False
        self._fetch_first()
        self._slot_updates.begin()
        try:
            self._update(resident, arithmetic)
            for number, chunk in enumerate(self._chunks):
                self._update_chunk(number, chunk, arithmetic)
                if number + len(self._slots) < len(self._chunks):
                    self._fetch(number + len(self._slots))
        finally:
            self._slot_updates.end()
            self._drop_fetched()
            for chunk in self._chunks:
                chunk.forget_here()
        has_strangers = bool(self._strangers)
        self._strangers.clear()
        return has_strangers

    def release(self) -> None:
        """Let all host memory go."""
        self._host_step.release()
        self._chunks, self._hosts = [], set()

    def _update(self, params: Collection[torch.Tensor], arithmetic: Arithmetic) -> None:
        """The optimizer's arithmetic on some whole parameters, whose groups keep every option of the full groups.

        One kernel may do it for a chunk, which is in its slot.
        """
        if not params:
            return
        groups = self.plan.optimizer.param_groups
        masters = [] if self.plan.masters is None else [param for param in params if self.plan.is_master(param)]
        if self.plan.masters is not None:
            self.plan.masters.begin(masters)
        places = self._positions.places(params)
        is_resident = params is self._positions.resident
        if is_resident or not self._slot_updates.run(places):
            some = [
                {**groups[number], "params": [groups[number]["params"][i] for i in positions]}
                for number, positions in places
            ]
            arithmetic(self.plan.part(some))
        if self.plan.masters is not None:
            self.plan.masters.end(masters)

    def _update_chunk(self, number: int, chunk: Chunk, arithmetic: Arithmetic) -> None:
        engine, slot = self.engine, self._slots[number % len(self._slots)]
        compute = engine.current()
        engine.wait(compute, chunk.arrived)
        if compute != self._slots_home:
            # Prefetched on one stream, stepped on another: the slots go back to the first one.
            engine.keep(slot, compute)
        if not self._show_as_planned(chunk, slot):
            for bundle in chunk.bundles:
                for name, tensor in list(bindings(self.plan.optimizer, bundle)):
                    if self.is_on_host(tensor):
                        self._bind(bundle, name, slot, -chunk.begin)
        try:
            self._update(chunk.layout.params, arithmetic)
        finally:
            # Bound to where it goes once it is on its way: what an interrupt keeps from leaving is still in the slot.
            bound = self._in_slot(chunk, slot)
            if bound is None:
                self._gather(chunk, slot)
            self._send(chunk, slot, compute)
            if bound is None:
                self._settle_down(chunk)
            else:
                chunk.layout.bind(self.plan.optimizer, bound)
            self._last_uses[number % len(self._slots)] = chunk.home

    def _gather(self, chunk: Chunk, slot: torch.Tensor) -> None:
        """Copy states that a step made, or replaced, to their places in the slot, in one call."""
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for bundle in chunk.bundles:
            for name, tensor in bindings(self.plan.optimizer, bundle):
                if tensor.untyped_storage().data_ptr() != slot.untyped_storage().data_ptr():
                    place = bundle.places[name]
                    if not place.fits(tensor):
                        # Of another dtype or shape than was foreseen: it stays until it has a place.
                        self._strangers.add((id(bundle), name))
                        continue
                    targets.append(view_of(slot, place, bundle.offset_bytes - chunk.begin))
                    sources.append(tensor)
        if targets:
            self.engine.copy_many(targets, sources)

    def _send(self, chunk: Chunk, slot: torch.Tensor, compute: Any) -> None:
        """Copy a chunk out."""
        engine, host = self.engine, chunk.host
        engine.record(self._edge, compute)
        engine.wait(self._out, self._edge)
        chunk.is_leaving = True
        with engine.on(self._out):
            engine.copy(host, slot[: chunk.size_bytes])
            engine.record(chunk.home, self._out)
        self.plan.counts.d2h_bytes += chunk.size_bytes

    def _settle_down(self, chunk: Chunk) -> None:
        """Bind everything that has a place to host memory."""
        for bundle in chunk.bundles:
            for name, _ in list(bindings(self.plan.optimizer, bundle)):
                if (id(bundle), name) not in self._strangers:
                    self._bind(bundle, name, chunk.memory, 0)

    def _bind(self, bundle: Bundle, name: str, memory: torch.Tensor, shift: int) -> None:
        rebind(self.plan.optimizer, bundle, name, view_of(memory, bundle.places[name], bundle.offset_bytes + shift))

    # Fetching.

    def fetch(self) -> None:
        """Start to copy the first chunks in, as many as there are slots; they hold device memory until the step."""
        self._fetch_first()

    def _fetch_first(self) -> None:
        if self._fetched and any(self._version_of(chunk) != chunk.version for chunk in self._chunks[: self._fetched]):
            self._drop_fetched()
        if self._slots or not self._chunks or self.plan.options.step_device == "cpu":
            return
        engine, compute = self.engine, self.engine.current()
        # The allocator hands slots out again once the copies from them are over. A host that is a step ahead waits for
        # that here, or it would get new memory step after step.
        for event in self._draining:
            engine.synchronize(event)
        self._draining = []
        try:
            self._fill_slots(compute)
        except BaseException:
            # Whatever interrupts this, a user at a terminal perhaps: no step takes for filled what was not.
            self._drop_fetched()
            raise

    def _fill_slots(self, compute: Any) -> None:
        engine, count = self.engine, min(self.plan.options.slots, len(self._chunks))
        # Each as large as the largest of its own chunks, so that one huge parameter counts once.
        sizes = [max(chunk.size_bytes for chunk in self._chunks[first::count]) for first in range(count)]
        self._slots = [engine.device_empty(size_bytes) for size_bytes in sizes]
        self._slots_home = compute
        for slot in self._slots:
            engine.keep(slot, self._in)
            engine.keep(slot, self._out)
        # The slots may be memory that the compute stream has only just given up.
        engine.record(self._edge, compute)
        engine.wait(self._in, self._edge)
        for number in range(len(self._slots)):
            self._fetch(number)
            self._chunks[number].version = self._version_of(self._chunks[number])
        self._fetched = len(self._slots)

    def _version_of(self, chunk: Chunk) -> Any:
        """What a write to a chunk's host memory changes.

        Plain states are views of it. A master, and what a DTensor wraps, only lie there: their writes are their own.
        """
        optimizer = self.plan.optimizer
        apart = [
            version_of(holder)
            for bundle in chunk.bundles
            for name, tensor in bindings(optimizer, bundle)
            if (holder := holder_of(optimizer, bundle, name)) is not tensor or name == MASTER
        ]
        return chunk.memory._version, apart

    def _fetch(self, number: int) -> None:
        engine, chunk = self.engine, self._chunks[number]
        last = self._chunks[number - len(self._slots)] if number >= len(self._slots) else None
        for event in [chunk.home, *([last.home] if last is not None else [])]:
            engine.wait(self._in, event)
        with engine.on(self._in):
            if self._has_values(chunk):
                engine.copy(self._slots[number % len(self._slots)][: chunk.size_bytes], chunk.host)
                self.plan.counts.h2d_bytes += chunk.size_bytes
            engine.record(chunk.arrived, self._in)
        self._last_uses[number % len(self._slots)] = chunk.arrived
        chunk.is_arriving = True

    def _has_values(self, chunk: Chunk) -> bool:
        # Before the first step there is nothing to bring.
        return any(True for bundle in chunk.bundles for _ in bindings(self.plan.optimizer, bundle))

    def _drop_fetched(self) -> None:
        self._draining += self._last_uses.values()
        self._slots, self._fetched, self._last_uses = [], 0, {}

    # Moves outside of a step.

    def to_host(
        self, bundles: Iterable[Bundle], *, only: Wanted | None = None, copies: bool = True, binds: bool = True
    ) -> None:
        """Copy out what the user, a load or attachment left on the device."""
        engine, wanted = self.engine, {id(bundle) for bundle in bundles}
        self._drop_fetched()
        engine.record(self._edge, engine.current())
        engine.wait(self._out, self._edge)
        for chunk in self._chunks:
            moving = [
                (bundle, name, tensor)
                for bundle in chunk.bundles
                if id(bundle) in wanted
                for name, tensor in bindings(self.plan.optimizer, bundle)
                if not self.is_on_host(tensor) and (only is None or only(bundle, name))
            ]
            if not moving:
                continue
            if copies:
                self._copy_out(chunk, moving)
            if not binds:
                continue
            for bundle, name, _ in moving:
                self._bind(bundle, name, chunk.memory, 0)
            # What stays on the device holds its block by itself; of a chunk that left, nothing else may.
            chunk.forget_here()

    def _copy_out(self, chunk: Chunk, moving: list[tuple[Bundle, str, torch.Tensor]]) -> None:
        engine = self.engine
        with engine.on(self._out):
            engine.wait(self._out, chunk.arrived)
            send(engine, chunk.memory, [(b.places[name], b.offset_bytes, tensor) for b, name, tensor in moving])
            for _, _, tensor in moving:
                engine.keep(tensor, self._out)
        engine.record(chunk.home, self._out)
        chunk.is_leaving = True
        self.plan.counts.d2h_bytes += sum(bundle.places[name].size_bytes for bundle, name, _ in moving)

    def to_device(self, bundles: Iterable[Bundle], *, for_good: bool = False) -> None:
        """Copy in on the current stream: nothing is left to overlap with."""
        self._drop_fetched()
        is_all = bundles is self.plan.bundles
        wanted = set() if is_all else {id(bundle) for bundle in bundles}
        for chunk in self._chunks:
            self.engine.wait(self.engine.current(), chunk.home)
            is_whole = is_all or all(id(bundle) in wanted for bundle in chunk.bundles)
            if is_whole and not for_good and self._bring_as_planned(chunk):
                continue
            items: list[Item] = []
            names: list[tuple[Bundle, str]] = []
            for bundle in chunk.bundles:
                if not (is_all or id(bundle) in wanted):
                    continue
                for name, tensor in list(bindings(self.plan.optimizer, bundle)):
                    if self.is_on_host(tensor):
                        place = bundle.places[name]
                        here = torch.empty_strided(
                            place.shape, place.strides, dtype=place.dtype, device=self.engine.device
                        )
                        items.append((place, bundle.offset_bytes, here))
                        names.append((bundle, name))
            # It needs memory of the device: where there is none, everything stays what it is, and where.
            receive(self.engine, chunk.memory, items)
            for (bundle, name), (place, _, here) in zip(names, items, strict=True):
                rebind(self.plan.optimizer, bundle, name, here)
                self.plan.counts.h2d_bytes += place.size_bytes
        # The host memory goes with this offloader, so its copies have to be over.
        self.engine.record(self._edge, self.engine.current())
        self.engine.synchronize(self._edge)

    def settle(self) -> None:
        """Wait for the copies out, each for its own event only."""
        for chunk in self._chunks:
            if chunk.is_leaving:
                self.engine.synchronize(chunk.home)
                chunk.is_leaving = False

    def settle_for_writing(self) -> None:
        """Wait for the copies in as well, which read what is about to be written, and forget what they brought."""
        self.settle()
        for chunk in self._chunks:
            if chunk.is_arriving:
                self.engine.synchronize(chunk.arrived)
                chunk.is_arriving = False
        self._drop_fetched()

    def leaving_bytes(self) -> int:
        """Of chunks that are still copied out."""
        leaving = [bundle for chunk in self._chunks if chunk.is_leaving for bundle in chunk.bundles]
        return sum(
            bundle.places[name].size_bytes
            for bundle in leaving
            for name, tensor in bindings(self.plan.optimizer, bundle)
            if self.is_on_host(tensor)
        )

    def is_on_host(self, tensor: torch.Tensor) -> bool:
        """By the memory it lies in."""
        return tensor.untyped_storage().data_ptr() in self._hosts

    def home(self, bundle: Bundle, name: str) -> torch.Tensor:
        """In the block of the bundle's chunk."""
        chunk = next(chunk for chunk in self._chunks if any(each is bundle for each in chunk.bundles))
        return view_of(chunk.memory, bundle.places[name], bundle.offset_bytes)

    def untidy(self) -> list[Bundle]:
        """Of chunks that do not lie as they were planned, whatever the reason; views that were spoilt are made anew."""
        found: list[Bundle] = []
        for chunk in self._chunks:
            bound = chunk.layout.look(self.plan.optimizer)
            if bound is not None and chunk.layout.is_tidy(bound):
                continue
            found += chunk.bundles
            # Nothing of it goes as planned, even where it begins at its place on the device.
            chunk.forget_here()
            if not chunk.layout.is_intact():
                chunk.drop_layout()
        return found

    # Chunks of small states that lie on the device as they lie in host memory: each goes in one copy.

    def send_planned(self) -> bool:
        """One copy for each chunk that lies on the device as it lies in host memory; the others are home."""
        moving: list[tuple[Chunk, BoundTensors]] = []
        for chunk in self._chunks:
            bound = chunk.layout.look(self.plan.optimizer)
            if bound is None or chunk.layout.has_others(bound):
                return False
            if chunk.layout.is_here(bound):
                moving.append((chunk, bound))
            elif not chunk.layout.is_home(bound):
                return False
        engine = self.engine
        self._drop_fetched()
        engine.record(self._edge, engine.current())
        engine.wait(self._out, self._edge)
        for chunk, bound in moving:
            layout, block = chunk.layout, chunk.layout.here
            assert block is not None
            with engine.on(self._out):
                engine.wait(self._out, chunk.arrived)
                engine.copy(chunk.host, block)
                engine.keep(block, self._out)
            engine.record(chunk.home, self._out)
            # Before it is bound: who looks behind an interrupt has to wait.
            chunk.is_leaving = True
            layout.bind(self.plan.optimizer, bound)
            layout.here = None
            self.plan.counts.d2h_bytes += layout.payload_bytes
        return True

    def _show_as_planned(self, chunk: Chunk, slot: torch.Tensor) -> bool:
        """Bind a chunk to the slot that it was copied to; False, and nothing done, if not everything is home."""
        bound = chunk.layout.look(self.plan.optimizer) if chunk.layout.is_small else None
        if bound is None or not chunk.layout.is_home(bound):
            return False
        chunk.layout.bind(self.plan.optimizer, bound, chunk.layout.views(slot[: chunk.size_bytes]))
        return True

    def _in_slot(self, chunk: Chunk, slot: torch.Tensor) -> BoundTensors | None:
        """What is bound, if all of it lies at its place in the slot; else None."""
        bound = chunk.layout.look(self.plan.optimizer) if chunk.layout.is_small else None
        return bound if bound is not None and chunk.layout.is_in(bound, slot) else None

    def _bring_as_planned(self, chunk: Chunk) -> bool:
        """The inverse, on the current stream; False, and nothing done, if not everything is home."""
        layout = chunk.layout
        bound = layout.look(self.plan.optimizer) if layout.is_small else None
        if bound is None or not layout.is_home(bound):
            return False
        block = self.engine.device_empty(chunk.size_bytes)
        self.engine.copy(block, chunk.host)
        layout.bind(self.plan.optimizer, bound, layout.views(block))
        layout.here = block
        self.plan.counts.h2d_bytes += layout.payload_bytes
        return True
