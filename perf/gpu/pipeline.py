"""Steps of the pipeline: what its schedules hide, and last the table of torchrec PR 2916, which takes 82 GB."""

from perf.gpu.table import python
from perf.harness.steps import Step

__all__ = ["STEPS"]

_BENCH = ("conformance.harness.cli", "bench", "pipeline", "--fs", "{out}")

STEPS = (
    Step("overlap", python(*_BENCH, "--overlap", "{out}/overlap"), 180, 3, needs=("library",)),
    Step("table", python(*_BENCH, "--table", "--json", "{out}/table.json"), 480, 3, needs=("library",)),
)
