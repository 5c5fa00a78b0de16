"""What a watch has found: hazards with both program points, what is not covered, and the verdict."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from conformance.harness.compare import Mismatch
from conformance.provers.race.memory import KINDS, Hazard, Use
from conformance.provers.race.points import Site
from conformance.provers.race.trace import Trace
from conformance.provers.race.watcher import Gap

__all__ = ["GAPS", "Report"]

# Kinds of points that are not covered; all but the last can be accepted by who knows the program.
GAPS = {
    "value": "the host looks at values of the device: the proof is of the branch that was taken",
    "time": "the host asks how far a stream is, or for times: another run may be told otherwise",
    "address": "an address leaves torch: who uses it is not seen",
    "place": "an operand lies in host memory where a GPU wants its own",
    "bypass": "a call that is not modelled",
}


@dataclass
class Report:
    """The result of a watch.

    Attributes:
        hazards: each pair of program points once, in order of discovery.
        not_covered: points that the proof says nothing about.
        failure: what the program itself raised, when a script was run; None when it ended well.
        launch_count: ops and copies that were given to streams.
        stream_count: streams of the program, without the default one.
    """

    label: Callable[[str], str]
    trace: Trace
    hazards: list[Hazard] = field(default_factory=list)
    not_covered: list[Gap] = field(default_factory=list)
    failure: str | None = None
    launch_count: int = 0
    stream_count: int = 0

    def status(self, accept: Iterable[str] = ()) -> int:
        """1 when there are hazards, 2 when it cannot be judged, else 0.

        Args:
            accept: kinds of points that are known and do not matter: "value", "time", "address", "place".
        """
        if self.hazards:
            return 1
        open_points = [gap for gap in self.not_covered if gap.kind not in accept or gap.kind == "bypass"]
        return 2 if open_points or self.failure is not None or self.launch_count == 0 else 0

    def check(self, accept: Iterable[str] = ()) -> None:
        """Raise Mismatch unless the status is 0."""
        if self.status(accept):
            raise Mismatch("the program is not proven free of races", got=self.text(accept), expected="status 0")

    def text(self, accept: Iterable[str] = ()) -> str:
        """For people."""
        accepted = list(accept)
        lines: list[str] = []
        for number, hazard in enumerate(self.hazards, start=1):
            times = f", {hazard.count} times" if hazard.count > 1 else ""
            lines += [
                f"hazard {number}: {hazard.kind}{times}",
                f"  {KINDS[hazard.kind]}",
                f"  first   {self._use(hazard.first)}",
                f"  second  {self._use(hazard.second)}",
                f"  on      {hazard.memory}",
            ]
            if hazard.is_pageable:
                lines.append("  note    the host memory is pageable: CUDA says only that such a copy might wait")
        if self.not_covered:
            lines.append("not covered:")
        for gap in self.not_covered:
            note = " (accepted)" if gap.kind in accepted and gap.kind != "bypass" else ""
            times = f", {gap.count} times" if gap.count > 1 else ""
            lines.append(f"  {gap.kind}: {gap.site}{times}: {gap.why}{note}")
        if self.failure is not None:
            lines.append(f"the program failed: {self.failure}")
        return "\n".join([*lines, self._summary(accepted)]) + "\n"

    def _use(self, use: Use) -> str:
        verb = "writes" if use.writes else "reads"
        site: Site | str = use.site if use.site is not None else use.what
        verb = f" {verb}" if isinstance(site, Site) and not site.op.startswith(("given", "elapsed", "Event")) else ""
        return f"{site}, {self.label(use.stream)}{verb}"

    def _summary(self, accepted: list[str]) -> str:
        counts = f"{self.launch_count} launches on {self.stream_count + 1} streams"
        if self.launch_count == 0:
            return "not judged: the program gave no work to a device"
        found = f"{len(self.hazards)} hazard{'s' * (len(self.hazards) > 1)}"
        verdict = {0: "no hazard", 1: found, 2: "not judged"}[self.status(accepted)]
        open_count = len([gap for gap in self.not_covered if gap.kind not in accepted or gap.kind == "bypass"])
        return f"{verdict}: {counts}" + (f", {open_count} points not covered" if open_count else "")

    def to_json(self, accept: Iterable[str] = ()) -> dict[str, Any]:
        """Plain values."""
        accepted = list(accept)
        return {
            "status": self.status(accepted),
            "launches": self.launch_count,
            "streams": self.stream_count + 1,
            "hazards": [
                {
                    "kind": hazard.kind,
                    "first": self._json(hazard.first),
                    "second": self._json(hazard.second),
                    "memory": hazard.memory,
                    "pageable": hazard.is_pageable,
                    "count": hazard.count,
                }
                for hazard in self.hazards
            ],
            "not_covered": [
                {"kind": gap.kind, **gap.site.to_json(), "why": gap.why, "count": gap.count} for gap in self.not_covered
            ],
            "accepted": accepted,
            "failure": self.failure,
        }

    def _json(self, use: Use) -> dict[str, Any]:
        site = use.site.to_json() if use.site is not None else {}
        return {"stream": self.label(use.stream), "writes": use.writes, **site}
