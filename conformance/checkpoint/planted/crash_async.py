"""Faults that ``test_crash_async`` must notice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from conformance.harness import fault


@fault(kills="CKPT-319", at="twinproof.checkpoint.dcp:HuggingFaceStorageWriter.write_data")
def background_cause_replaced(original: Callable[..., Any], writer: Any, plan: Any, planner: Any) -> Any:
    """The future of a save says that it failed, but not of which error."""
    try:
        return original(writer, plan, planner)
    except Exception:
        raise RuntimeError("the save failed") from None
