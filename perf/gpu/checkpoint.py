"""Steps of checkpoints: device tensors saved and loaded, with torch's stream sanitizer as well."""

from perf.gpu.table import suite

__all__ = ["STEPS"]

_MODULE = "conformance.checkpoint.test_staging"

STEPS = (
    suite("staging", _MODULE, "CKPT-110", limit_s=90),
    suite("staging-sanitizer", _MODULE, "CKPT-110", limit_s=90, environment=[("TORCH_CUDA_SANITIZER", "1")]),
    suite("checkpoint-values", "conformance.checkpoint.test_values", "CKPT-001", "CKPT-010", limit_s=90, device="cuda"),
)
