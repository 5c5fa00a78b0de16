"""Vector clocks: what a stream, an event or the host knows to have happened."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["HOST", "Clock", "Clocks"]

HOST = "host"


class Clock(dict[str, int]):
    """Stream -> number of its last op that is known to be over. Absent: none."""

    def join(self, other: Clock) -> None:
        """Know what ``other`` knows as well."""
        for name, tick in other.items():
            if tick > self.get(name, 0):
                self[name] = tick

    def covers(self, name: str, tick: int) -> bool:
        """Whether op ``tick`` of a stream is known to be over."""
        return self.get(name, 0) >= tick


@dataclass
class Clocks:
    """The clocks of the host and of every stream."""

    of: dict[str, Clock] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Clock:
        return self.of.setdefault(name, Clock())

    def advance(self, name: str) -> int:
        """Begin the next op of a stream; a launch comes after all that the host knows. Returns its number."""
        clock = self[name]
        if name != HOST:
            clock.join(self[HOST])
        clock[name] = clock.get(name, 0) + 1
        return clock[name]
