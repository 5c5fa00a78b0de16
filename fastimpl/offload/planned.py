"""Chunks of small states that lie on the device as they lie in host memory: each goes there and back in one copy."""

from __future__ import annotations

from typing import Any

import torch

from fastimpl.offload.chunks import Chunk
from fastimpl.offload.roster import Sight
from twinproof.offload.base import OffloaderBase
from twinproof.offload.states import options_on

__all__ = ["PlannedMoves"]


class PlannedMoves(OffloaderBase):
    """Moves outside of a step that were planned once; whatever was replaced since takes the other way."""

    _chunks: list[Chunk]
    _edge: Any
    _out: Any

    # Of each group: its parameters, by ids that those that are known keep, and which options are on.
    _listed: list[tuple[list[int], dict[str, bool]]] | None = None

    def _drop_fetched(self) -> None:
        raise NotImplementedError

    def _adopt_params(self) -> None:
        """Nothing, while the groups list what they listed, with the same options: no hash of every parameter."""
        groups = self.optimizer.param_groups
        listed = [(list(map(id, group["params"])), options_on(group)) for group in groups]
        if listed != self._listed:
            super()._adopt_params()
            self._listed = listed

    def send_as_planned(self) -> bool:
        """One copy for each chunk that lies on the device as it lies in host memory; the others are home."""
        moving: list[tuple[Chunk, Sight]] = []
        for chunk in self._chunks:
            sight = chunk.roster.look(self.optimizer)
            if sight is None or chunk.roster.has_others(sight):
                return False
            if chunk.roster.is_here(sight):
                moving.append((chunk, sight))
            elif not chunk.roster.is_home(sight):
                return False
        engine = self.engine
        self._drop_fetched()
        engine.record(self._edge, engine.current())
        engine.wait(self._out, self._edge)
        for chunk, sight in moving:
            roster, block = chunk.roster, chunk.roster.here
            assert block is not None
            with engine.on(self._out):
                engine.wait(self._out, chunk.arrived)
                engine.copy(chunk.host, block)
                engine.keep(block, self._out)
            engine.record(chunk.home, self._out)
            roster.bind(self.optimizer, sight)
            roster.here = None
            chunk.is_leaving = True
            self.counts.d2h_bytes += roster.payload_bytes
        return True

    def _show_as_planned(self, chunk: Chunk, slot: torch.Tensor) -> bool:
        """Bind a chunk to the slot that it was copied to; False, and nothing done, if not everything is home."""
        sight = chunk.roster.look(self.optimizer) if chunk.roster.is_small else None
        if sight is None or not chunk.roster.is_home(sight):
            return False
        chunk.roster.bind(self.optimizer, sight, chunk.roster.views(slot[: chunk.size_bytes]))
        return True

    def _hide_as_planned(self, chunk: Chunk, slot: torch.Tensor) -> bool:
        """Bind a chunk to host memory; False, and nothing done, if not everything lies at its place in the slot."""
        sight = chunk.roster.look(self.optimizer) if chunk.roster.is_small else None
        if sight is None or not chunk.roster.is_in(sight, slot):
            return False
        chunk.roster.bind(self.optimizer, sight)
        return True

    def _bring_as_planned(self, chunk: Chunk) -> bool:
        """The inverse, on the current stream; False, and nothing done, if not everything is home."""
        roster = chunk.roster
        sight = roster.look(self.optimizer) if roster.is_small else None
        if sight is None or not roster.is_home(sight):
            return False
        block = self.engine.device_empty(chunk.size_bytes)
        self.engine.copy(block, chunk.host)
        roster.bind(self.optimizer, sight, roster.views(block))
        roster.here = block
        self.counts.h2d_bytes += roster.payload_bytes
        return True
