"""Faults that ``test_uncovered`` must notice."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

from conformance.harness import mutated, patched, swap

_PLANNERS, _NATIVE = "twinproof.checkpoint.planners", "twinproof.checkpoint.native"


def _by_volume(sizes: Sequence[int], boxes: Collection[Any]) -> int:
    return sum(math.prod(box.sizes) for box in boxes)


gaps_are_left = patched(
    "What the chunks of a checkpoint leave out stays in the targets as it was.",
    mutated(f"{_PLANNERS}:check_covered", "if found < wanted:", "if False:"),
    kills=("CKPT-877", "CKPT-881"),
)
gaps_by_volume = patched(
    "Elements are counted as often as chunks have them.",
    swap(f"{_PLANNERS}:_filled_count", _by_volume),
    kills="CKPT-877",
)
gaps_by_parts_of_torch = patched(
    "A native load plans as torch does.",
    mutated(f"{_NATIVE}:load_native", "planner=planner, ", ""),
    kills=("CKPT-877", "CKPT-880", "CKPT-881"),
)
overlaps_are_gaps = patched(
    "Chunks that overlap count as none.",
    mutated(f"{_PLANNERS}:_filled_count", "return _union(list(boxes), 0)", "return 0"),
    kills="CKPT-878",
)
all_is_asked = patched(
    "A tensor must be whole in the checkpoint, whatever part of it is asked for.",
    mutated(
        f"{_PLANNERS}:check_covered",
        "wanted = sum(math.prod(chunk.sizes) for chunk in chunks)",
        "wanted = math.prod(saved[fqn].size)",
    ),
    kills="CKPT-878",
)
lost_places_pass = patched(
    "Chunks that have no place in the files are found out by a bare error.",
    mutated(f"{_NATIVE}:NativeStorageReader.prepare_local_plan", "if lost:", "if False:"),
    kills="CKPT-879",
)
the_last_that_is_asked_for_decides = patched(
    "How long a file has to be is said by what is asked for last.",
    mutated(
        f"{_NATIVE}:NativeStorageReader.prepare_local_plan",
        "max(ends.get(info.relative_path, 0), info.offset + info.length)",
        "info.offset + info.length",
    ),
    kills="CKPT-879",
)
other_bytes_are_bare = patched(
    "What torch says of other bytes stays without a name.",
    swap(f"{_NATIVE}:_OTHER_BYTES", ()),
    kills="CKPT-879",
)
rows_left_out_pass = patched(
    "A planner of rows does not look whether the checkpoint has all of them.",
    mutated("twinproof.kvstore.statedict:KVLoadPlanner.create_local_plan", "{**rest, **chunks, **{fqn", "{**{fqn"),
    kills="CKPT-880",
)
plain_ids_left_out_pass = patched(
    "A planner of rows that is asked for their ids alone does not look whether the checkpoint has all of them.",
    mutated(
        "twinproof.kvstore.statedict:KVLoadPlanner.create_local_plan",
        "return super().create",
        "return super(FillingPlanner, self).create",
    ),
    kills="CKPT-880",
)
ranks_outside_ask_for_all = patched(
    "A rank outside of a tensor's mesh is held to ask for all of it.",
    mutated(
        "twinproof.checkpoint.planners:_asked_chunks",
        "is None:\n        return ()",
        "is None:\n        return [ChunkStorageMetadata(torch.Size([0] * target.dim()), target.shape)]",
    ),
    kills="CKPT-896",
)
errors_of_planners_are_damage = patched(
    "Whatever is raised while files are read is told as damage.",
    mutated(
        "twinproof.checkpoint.native:NativeStorageReader.read_data", "type(error) is RuntimeError and", "False and"
    ),
    kills="CKPT-897",
)
