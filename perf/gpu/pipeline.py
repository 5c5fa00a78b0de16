"""Steps of the pipeline: lookups in a graph, the suite on CUDA tensors, what schedules hide, the table of PR 2916."""

from perf.gpu.table import python, suite
from perf.harness.steps import Step

__all__ = ["STEPS"]

_BENCH = ("conformance.harness.cli", "bench", "pipeline", "--fs", "{out}")

_SUITE = "conformance.pipeline"

STEPS = (
    Step("graph", python("perf.gpu.graph"), 60, needs=("library", "launch")),
    suite("pipeline-alone", f"{_SUITE}.test_schedules::test_equal_alone", "PIPE-120", limit_s=90, device="cuda"),
    # Ranks share the GPU and exchange through gloo, which takes CUDA tensors.
    suite("pipeline-tables", f"{_SUITE}.test_sharded", "PIPE-077", "PIPE-078", limit_s=120, device="cuda"),
    suite("pipeline-ranks", f"{_SUITE}.test_schedules::test_equal_on_ranks", "PIPE-121", limit_s=120, device="cuda"),
    Step("overlap", python(*_BENCH, "--overlap", "{out}/overlap"), 180, 3, needs=("library",)),
    Step("table", python(*_BENCH, "--table", "--json", "{out}/table.json"), 480, 3, needs=("library",)),
)
