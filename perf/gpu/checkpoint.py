"""Steps of checkpoints: device tensors saved and loaded, with torch's stream sanitizer as well."""

from perf.gpu.table import suite

__all__ = ["STEPS"]

_MODULE = "conformance.checkpoint.test_staging"

STEPS = (
    suite("staging", _MODULE, "CKPT-110", limit_s=90),
    # Of the module only what is on CUDA: ranks are forked, and the sanitizer starts CUDA in what they are forked from.
    suite(
        "staging-sanitizer",
        f"{_MODULE}::test_cuda",
        "CKPT-110",
        limit_s=90,
        environment=[("TORCH_CUDA_SANITIZER", "1")],
    ),
    suite("checkpoint-values", "conformance.checkpoint.test_values", "CKPT-001", "CKPT-010", limit_s=90, device="cuda"),
)
