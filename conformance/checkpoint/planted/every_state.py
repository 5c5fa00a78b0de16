"""Faults that ``test_every_state`` must notice."""

from __future__ import annotations

from typing import Any

from conformance.harness import fault


@fault(kills="CKPT-424", at="twinproof.checkpoint.dcp:HuggingFaceStorageReader.targets")
def optimizer_not_loaded(original: Any, reader: Any, plan: Any, planner: Any) -> Any:
    """Tensors of an optimizer are read into memory that nobody looks at."""
    return [
        (item, target.clone() if "exp_avg" in item.dest_index.fqn else target)
        for item, target in original(reader, plan, planner)
    ]


@fault(kills=("CKPT-420", "CKPT-422", "CKPT-083"), at="twinproof.checkpoint.dcp:staged")
def staged_by_reference(original: Any, state: Any) -> Any:
    """An asynchronous save reads the training's own tensors."""
    return state
