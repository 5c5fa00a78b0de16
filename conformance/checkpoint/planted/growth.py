"""Faults that ``test_growth`` must notice."""

from __future__ import annotations

from typing import Any

from conformance.harness import fault, mutated, patched, swap

sums_of_all_files = patched(
    "The sums of each shard file are looked for among those of all files.",
    mutated("twinproof.checkpoint.catalog:check_parts", "by_file.get(file, ())", "sum(by_file.values(), [])"),
    kills="CKPT-870",
)
opened_for_each_tensor = patched(
    "A verification opens its file for each tensor.",
    mutated("twinproof.checkpoint.catalog:_summed", "file is None or file.name != path", "True"),
    kills="CKPT-871",
)


@fault(kills="CKPT-872", at="twinproof.checkpoint.planners:_PackedShards.blocks")
def blocks_found_each_time(original: Any, shards: Any, fqn: str, value: Any) -> Any:
    """The blocks of a packed shard are found whenever one is asked for."""
    shards._known.pop(fqn, None)
    return original(shards, fqn, value)


cells_compared = patched(
    "Cells of a grid are compared with those beside them.",
    swap("twinproof.checkpoint.catalog:_is_grid", lambda *_: False),
    kills="CKPT-873",
)
own_chunks_summed = patched(
    "check_replicas sums what no other rank has.",
    mutated(
        "twinproof.checkpoint.dcp:HuggingFaceStorageWriter._check_replicas",
        "if key in several",
        "if True",
    ),
    kills="CKPT-874",
)
