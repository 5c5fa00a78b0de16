"""Steps of offload: bits under delays on every stream, memory, and torch's stream sanitizer."""

from perf.gpu.table import suite

__all__ = ["STEPS"]

_MODULE = "conformance.offload.test_cuda"

STEPS = (
    suite("offload", _MODULE, "OPT-110", "OPT-111", "OPT-283", "OPT-291", limit_s=90),
    suite(
        "offload-sanitizer",
        _MODULE,
        "OPT-110",
        "OPT-111",
        "OPT-283",
        limit_s=90,
        environment=[("TORCH_CUDA_SANITIZER", "1")],
    ),
)
