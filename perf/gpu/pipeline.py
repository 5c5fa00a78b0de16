"""Steps of the pipeline: lookups in a graph, what its schedules hide, last the table of torchrec PR 2916: 82 GB."""

from perf.gpu.table import python
from perf.harness.steps import Step

__all__ = ["STEPS"]

_BENCH = ("conformance.harness.cli", "bench", "pipeline", "--fs", "{out}")

STEPS = (
    Step("graph", python("perf.gpu.graph"), 60, needs=("library", "launch")),
    Step("overlap", python(*_BENCH, "--overlap", "{out}/overlap"), 180, 3, needs=("library",)),
    Step("table", python(*_BENCH, "--table", "--json", "{out}/table.json"), 480, 3, needs=("library",)),
)
