"""What happened when, on a virtual clock: the ops of every stream as boxes, the waits between streams as edges."""

from __future__ import annotations

from dataclasses import dataclass, field

from conformance.provers.race.points import Site
from conformance.provers.virtual_device.clocks import HOST

__all__ = ["Box", "Edge", "Trace", "op_seconds"]

# The clock of the picture: one machine's round figures. Hazards do not depend on them.
LAUNCH_S = 4e-6
_OP_S, _BYTES_PER_S = 5e-6, 2e12
LINK_BYTES_PER_S = 25e9
LINK_S = 8e-6


def op_seconds(name: str, size_bytes: int) -> float:
    """How long an op takes on the virtual clock."""
    return _OP_S + size_bytes / _BYTES_PER_S


@dataclass(frozen=True)
class Box:
    """One op of one lane, from ``begin_s`` to ``end_s``."""

    lane: str
    begin_s: float
    end_s: float
    site: Site


@dataclass(frozen=True)
class Edge:
    """``to`` goes on after what ``of`` had been given at ``of_s``."""

    of: str
    of_s: float
    to: str
    to_s: float
    what: str


@dataclass
class Trace:
    """Boxes and edges in the order in which the host asked for them.

    Attributes:
        boxes_max: later boxes are counted in ``left_out_count`` and not kept.
    """

    boxes_max: int = 20_000
    boxes: list[Box] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    box_of: dict[tuple[str, int], Box] = field(default_factory=dict)
    left_out_count: int = 0

    def add(self, box: Box, tick: int) -> None:
        """One more; ``tick`` is the number of the op in its stream's clock."""
        if len(self.boxes) >= self.boxes_max:
            self.left_out_count += 1
            return
        self.boxes.append(box)
        self.box_of[box.lane, tick] = box

    def lanes(self) -> list[str]:
        """The host first, then streams in order of their first op or edge."""
        seen = [HOST, *(box.lane for box in self.boxes)]
        for edge in self.edges:
            seen += [edge.of, edge.to]
        return list(dict.fromkeys(seen))
