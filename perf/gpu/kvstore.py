"""Steps of the row store: the suite with stores on the GPU, whose rows, ids and counters must be those of the CPU."""

from perf.gpu.table import suite

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

STEPS = tuple(
    suite(f"kvstore-{name}", f"conformance.kvstore.test_{name}", must, limit_s=90, device="cuda")
    for name, must in _MODULES.items()
)
