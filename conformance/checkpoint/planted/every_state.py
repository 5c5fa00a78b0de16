"""Faults that ``test_every_state`` must notice."""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint import FileSystemWriter

from conformance.harness import fault, mutated, patched, swap

_STAGE = "twinproof.checkpoint.native:NativeStorageWriter.stage"


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


manager_stages_as_torch_does = patched(
    "A manager's asynchronous save has torch make the copies, which has no memory for rows and parts of tables.",
    swap(_STAGE, FileSystemWriter.stage),
    kills="CKPT-844",
)
manager_stages_by_reference = patched(
    "A manager's asynchronous save reads the training's own tensors.",
    mutated(_STAGE, "staged(state_dict, any_layout=True)", "state_dict"),
    kills="CKPT-844",
)
