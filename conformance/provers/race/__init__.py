"""Races of programs that use torch's own streams, found on a CPU, from one run, over all orders that a device allows.

Nobody has to write a program for it: within ``watch()`` there is one CUDA device, whose streams, events and copies are
those of ``torch.cuda``, ``torch.accelerator`` and ``torch.Stream``. Every op is carried out at once, on host memory.
Vector clocks follow the order that a device would keep; each pair of accesses that nothing orders is a hazard, with
both program points:

    ::

        with watch() as report:
            side = torch.cuda.Stream()
            x = torch.ones(4, device="cuda")
            with torch.cuda.stream(side):
                x.add_(1)                    # side does not wait for the default stream
        print(report.text())

The proof is of the program as traced. Where the host looks at values of the device, or asks how far a stream is,
another run may go another way: such points are listed as not covered, as are calls that are not modelled.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from conformance.provers.race.draw import to_html, to_svg
from conformance.provers.race.memory import KINDS, Hazard, Use
from conformance.provers.race.patches import in_place
from conformance.provers.race.points import Point, Site
from conformance.provers.race.report import GAPS, Report
from conformance.provers.race.trace import Box, Edge, Trace
from conformance.provers.race.watcher import Gap, Watcher

__all__ = [
    "GAPS", "KINDS", "Box", "Edge", "Gap", "Hazard", "Point", "Report", "Site", "Trace", "Use",
    "to_html", "to_svg", "watch",
]  # fmt: skip


@contextmanager
def watch() -> Iterator[Report]:
    """Torch's stream API is that of a device which exists only as a proof, until the end of the context.

    Yields:
        the report, which is filled when the context ends, by an exception too.

    Raises:
        UnsupportedError: CUDA is in use in this process, or a watch is.
    """
    watcher = Watcher()
    report = Report(watcher.engine.label, watcher.trace)
    try:
        with in_place(watcher):
            yield report
    finally:
        watcher.memories.judge_all_gone()
        report.hazards, report.not_covered = list(watcher.memories.found.values()), list(watcher.gaps.values())
        report.launch_count, report.stream_count = watcher.launch_count, watcher.engine.stream_count
