"""Steps of the row store: the suite with stores on the GPU, whose rows, ids and counters must be those of the CPU."""

from perf.gpu.table import suite
from perf.harness.steps import Step

__all__ = ["STEPS"]

# The module of the suite, and a requirement of it that may not be skipped.
_MODULES = {
    "values": "KV-008",
    "machine": "KV-028",
    "steps": "KV-140",
    "eviction": "KV-056",
    "snapshot": "KV-064",
    "layout": "KV-001",
    "deltas": "KV-125",
    "checkpoint": "KV-042",
}

# Modules that run with rows in host memory too, behind a cache that is always in use.
_ON_HOST = ("values", "machine", "steps", "snapshot")


def _step(prefix: str, name: str, device: str) -> Step:
    module = f"conformance.kvstore.test_{name}"
    return suite(f"{prefix}-{name}", module, _MODULES[name], limit_s=90, device=device, keeps_operators=True)


STEPS = (
    *(_step("kvstore", name, "cuda") for name in _MODULES),
    *(_step("kvstore-host", name, "cuda-host") for name in _ON_HOST),
)
