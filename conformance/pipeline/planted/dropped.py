"""Faults that ``test_dropped`` must notice."""

from __future__ import annotations

from typing import Any

from conformance.harness import fault


@fault(kills="PIPE-672", at="twinproof.pipeline.driver:Pipeline.__reduce_ex__")
def pipelines_copied(original: Any, pipeline: Any, protocol: Any) -> Any:
    """A copy of a pipeline shares what is in flight, or drives a model whose modules know nothing of it."""
    return object.__reduce_ex__(pipeline, 4)
