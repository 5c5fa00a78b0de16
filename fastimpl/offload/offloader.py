"""Chunks through staging slots: copy in of the next, update of this, copy out of the last, all at once.

Edges, each an event (facts/offload.md 7.73): a slot is written after it was allocated and after the copy out of the
chunk that last used it; host memory is read after the copy out that wrote it; an update runs behind the copy in of its
chunk, a copy out behind the update. State is bound to host memory except while its own chunk is being updated.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch

from fastimpl.offload.chunks import Chunk, cut
from fastimpl.offload.cpu_step import HostStep
from fastimpl.offload.listing import Listing
from fastimpl.offload.moves import Item, receive, send
from fastimpl.offload.planned import PlannedMoves
from fastimpl.streams import engine_for
from twinproof.offload.base import OffloaderBase
from twinproof.offload.bookkeeping import Wanted
from twinproof.offload.rebind import rebind
from twinproof.offload.reports import Residency
from twinproof.offload.states import Bundle, bindings, view_of

__all__ = ["OptimizerStateOffloader"]


class OptimizerStateOffloader(PlannedMoves):
    __doc__ = OffloaderBase.__doc__

    def default_engine(self, device: torch.device) -> Any:
        """CUDA streams."""
        return engine_for(device)

    def place(self, bundles: list[Bundle]) -> list[Bundle]:
        """One block of host memory of exactly their size, made once."""
        if "_chunks" not in self.__dict__:
            self._chunks: list[Chunk] = []
            self._in, self._out = self.engine.stream("offload-h2d"), self.engine.stream("offload-d2h")
            self._edge = self.engine.event()
            self._slots: list[torch.Tensor] = []
            self._slots_home: Any = None
            self._fetched = 0
            self._last_uses: dict[int, Any] = {}
            self._draining: list[Any] = []
            self._listing = Listing()
            self._hosts: set[int] = set()
            self._strangers: set[tuple[int, str]] = set()
            self._host_step = HostStep(self)
        if bundles:
            self._drop_fetched()  # Slots are as large as the largest chunk was.
            memory = self.host_empty(sum(bundle.span_bytes for bundle in bundles))
            self._chunks += cut(memory, bundles, self.chunk_bytes, self.engine)
            if memory.numel():
                self._hosts.add(memory.untyped_storage().data_ptr())
            self.counts.host_bytes += memory.numel()
            self.counts.chunk_count = len(self._chunks)
        return bundles

    def unplace(self, bundle: Bundle) -> None:
        """Forget a bundle; a block of memory goes when nothing of it is left."""
        self.settle_for_writing()
        # What lies there and fits, a master for instance, has to leave the block with the rest.
        self.to_device([bundle], for_good=True)
        for chunk in self._chunks:
            chunk.drop_roster()
            chunk.bundles = [other for other in chunk.bundles if other is not bundle]
        blocks = {chunk.memory.untyped_storage().data_ptr(): chunk.memory for chunk in self._chunks}
        self._chunks = [chunk for chunk in self._chunks if chunk.bundles]
        self._hosts = {chunk.memory.untyped_storage().data_ptr() for chunk in self._chunks}
        gone = [memory.numel() for at, memory in blocks.items() if at not in self._hosts]
        self.counts.host_bytes -= sum(gone)
        self.counts.chunk_count = len(self._chunks)

    # The step.

    def step(self, arithmetic: Callable[[], None]) -> None:
        """Chunk by chunk; what was not selected is stepped while the first chunks arrive."""
        self._listing.refresh(self.optimizer.param_groups, [chunk.roster.params for chunk in self._chunks])
        resident = self._listing.resident
        if self.step_device == "cpu":
            self._host_step.run(self._chunks, lambda: self._update(resident, arithmetic))
            return
        self._fetch_first()
        try:
            self._update(resident, arithmetic)
            for number, chunk in enumerate(self._chunks):
                self._update_chunk(number, chunk, arithmetic)
                if number + len(self._slots) < len(self._chunks):
                    self._fetch(number + len(self._slots))
        finally:
            self._drop_fetched()
            for chunk in self._chunks:
                chunk.forget_here()
        if self._strangers:
            self._strangers.clear()
            self.offload()

    def release(self) -> None:
        """Let all host memory go."""
        self._chunks, self._hosts = [], set()

    def _update(self, params: Collection[torch.Tensor], arithmetic: Callable[[], None]) -> None:
        """The optimizer's arithmetic on some whole parameters, whose groups keep every option of the full groups."""
        if not params:
            return
        groups = self.optimizer.param_groups
        masters = [] if self.masters is None else [param for param in params if self._is_master(param)]
        if self.masters is not None:
            self.masters.begin(masters)
        try:
            self.optimizer.param_groups = [
                {**groups[number], "params": [groups[number]["params"][i] for i in positions]}
                for number, positions in self._listing.places(params)
            ]
            arithmetic()
        finally:
            self.optimizer.param_groups = groups
        if self.masters is not None:
            self.masters.end(masters)

    def _update_chunk(self, number: int, chunk: Chunk, arithmetic: Callable[[], None]) -> None:
        engine, slot = self.engine, self._slots[number % len(self._slots)]
        compute = engine.current()
        engine.wait(compute, chunk.arrived)
        if compute != self._slots_home:
            # Prefetched on one stream, stepped on another: the slots go back to the first one.
            engine.keep(slot, compute)
        if not self._show_as_planned(chunk, slot):
            for bundle in chunk.bundles:
                for name, tensor in list(bindings(self.optimizer, bundle)):
                    if self.is_on_host(tensor):
                        self._bind(bundle, name, slot, -chunk.begin)
        try:
            self._update(chunk.roster.params, arithmetic)
        finally:
            # Nobody looks before the copy out is queued: what lies at its place can be bound to where it goes.
            is_bound = self._hide_as_planned(chunk, slot)
            if not is_bound:
                self._gather(chunk, slot)
            self._send(chunk, slot, compute)
            if not is_bound:
                self._settle_down(chunk)
            self._last_uses[number % len(self._slots)] = chunk.home

    def _gather(self, chunk: Chunk, slot: torch.Tensor) -> None:
        """Copy states that a step made, or replaced, to their places in the slot."""
        for bundle in chunk.bundles:
            for name, tensor in list(bindings(self.optimizer, bundle)):
                if tensor.untyped_storage().data_ptr() != slot.untyped_storage().data_ptr():
                    if not bundle.places[name].fits(tensor):
                        # Of another dtype or shape than was foreseen: it stays until it has a place.
                        self._strangers.add((id(bundle), name))
                        continue
                    self.engine.copy(view_of(slot, bundle.places[name], bundle.offset_bytes - chunk.begin), tensor)

    def _send(self, chunk: Chunk, slot: torch.Tensor, compute: Any) -> None:
        """Copy a chunk out."""
        engine, host = self.engine, chunk.host
        engine.record(self._edge, compute)
        engine.wait(self._out, self._edge)
        with engine.on(self._out):
            engine.copy(host, slot[: chunk.size_bytes])
            engine.record(chunk.home, self._out)
        chunk.is_leaving = True
        self.counts.d2h_bytes += chunk.size_bytes

    def _settle_down(self, chunk: Chunk) -> None:
        """Bind everything that has a place to host memory."""
        for bundle in chunk.bundles:
            for name, _ in list(bindings(self.optimizer, bundle)):
                if (id(bundle), name) not in self._strangers:
                    self._bind(bundle, name, chunk.memory, 0)

    def _bind(self, bundle: Bundle, name: str, memory: torch.Tensor, shift: int) -> None:
        rebind(self.optimizer, bundle, name, view_of(memory, bundle.places[name], bundle.offset_bytes + shift))

    # Fetching.

    def prefetch(self) -> None:
        """Start to copy the first chunks in, as many as there are slots; they hold device memory until the step."""
        super().prefetch()
        if self.is_separable and self.release_stage == "at_offload":
            self._fetch_first()

    def _fetch_first(self) -> None:
        if self._fetched and any(c.version != c.memory._version for c in self._chunks[: self._fetched]):
            self._drop_fetched()
        if self._slots or not self._chunks or self.step_device == "cpu":
            return
        engine, compute = self.engine, self.engine.current()
        # The allocator hands slots out again once the copies from them are over. A host that is a step ahead waits for
        # that here, or it would get new memory step after step.
        for event in self._draining:
            engine.synchronize(event)
        self._draining = []
        count = min(self.slots, len(self._chunks))
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
        self._fetched = len(self._slots)

    def _fetch(self, number: int) -> None:
        engine, chunk = self.engine, self._chunks[number]
        last = self._chunks[number - len(self._slots)] if number >= len(self._slots) else None
        for event in [chunk.home, *([last.home] if last is not None else [])]:
            engine.wait(self._in, event)
        with engine.on(self._in):
            if self._has_values(chunk):
                engine.copy(self._slots[number % len(self._slots)][: chunk.size_bytes], chunk.host)
                self.counts.h2d_bytes += chunk.size_bytes
            engine.record(chunk.arrived, self._in)
        self._last_uses[number % len(self._slots)] = chunk.arrived
        chunk.is_arriving = True
        chunk.version = chunk.memory._version

    def _has_values(self, chunk: Chunk) -> bool:
        # Before the first step there is nothing to bring.
        return any(True for bundle in chunk.bundles for _ in bindings(self.optimizer, bundle))

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
                for name, tensor in bindings(self.optimizer, bundle)
                if not self.is_on_host(tensor) and (only is None or only(bundle, name))
            ]
            if not moving:
                continue
            if copies:
                self._copy_out(chunk, moving)
            for bundle, name, _ in moving if binds else ():
                self._bind(bundle, name, chunk.memory, 0)

    def _copy_out(self, chunk: Chunk, moving: list[tuple[Bundle, str, torch.Tensor]]) -> None:
        engine = self.engine
        with engine.on(self._out):
            engine.wait(self._out, chunk.arrived)
            send(engine, chunk.memory, [(b.places[name], b.offset_bytes, tensor) for b, name, tensor in moving])
            for _, _, tensor in moving:
                engine.keep(tensor, self._out)
        engine.record(chunk.home, self._out)
        chunk.is_leaving = True
        self.counts.d2h_bytes += sum(bundle.places[name].size_bytes for bundle, name, _ in moving)

    def to_device(self, bundles: Iterable[Bundle], *, for_good: bool = False) -> None:
        """Copy in on the current stream: nothing is left to overlap with."""
        self._drop_fetched()
        is_all = bundles is self.bundles
        wanted = set() if is_all else {id(bundle) for bundle in bundles}
        for chunk in self._chunks:
            self.engine.wait(self.engine.current(), chunk.home)
            is_whole = is_all or all(id(bundle) in wanted for bundle in chunk.bundles)
            if is_whole and not for_good and self._bring_as_planned(chunk):
                continue
            items: list[Item] = []
            for bundle in chunk.bundles:
                for name, tensor in list(bindings(self.optimizer, bundle)) if is_all or id(bundle) in wanted else []:
                    if self.is_on_host(tensor):
                        place = bundle.places[name]
                        here = torch.empty_strided(
                            place.shape, place.strides, dtype=place.dtype, device=self.engine.device
                        )
                        items.append((place, bundle.offset_bytes, here))
                        rebind(self.optimizer, bundle, name, here)
                        self.counts.h2d_bytes += place.size_bytes
            receive(self.engine, chunk.memory, items)
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

    def residency(self) -> Residency:
        """Where the selected bytes are; in flight is what the host has not yet waited for."""
        found = super().residency()
        leaving = [bundle for chunk in self._chunks if chunk.is_leaving for bundle in chunk.bundles]
        size = sum(
            bundle.places[name].size_bytes
            for bundle in leaving
            for name, tensor in bindings(self.optimizer, bundle)
            if self.is_on_host(tensor)
        )
        return Residency(found.device_bytes, found.host_bytes - size, size)

    def is_on_host(self, tensor: torch.Tensor) -> bool:
        """By the memory it lies in."""
        return tensor.untyped_storage().data_ptr() in self._hosts
