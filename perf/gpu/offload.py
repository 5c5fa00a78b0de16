"""Steps of offload: bits under delays on every stream, memory, torch's stream sanitizer, the suite on CUDA tensors."""

from perf.gpu.table import suite

__all__ = ["STEPS"]

_SUITE = "conformance.offload"
_MODULE = f"{_SUITE}.test_cuda"

STEPS = (
    suite("offload", _MODULE, "OPT-110", "OPT-111", "OPT-283", "OPT-291", limit_s=90),
    suite(
        "offload-sanitizer",
        _MODULE,
        "OPT-110",
        "OPT-111",
        "OPT-283",
        limit_s=150,
        environment=[("TORCH_CUDA_SANITIZER", "1")],
    ),
    suite("offload-values", f"{_SUITE}.test_values", "OPT-001", "OPT-007", "OPT-020", limit_s=120, device="cuda"),
    suite("offload-lifecycle", f"{_SUITE}.test_lifecycle", "OPT-034", "OPT-039", limit_s=90, device="cuda"),
)
