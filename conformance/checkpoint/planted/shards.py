"""Faults that ``test_shards`` must notice."""

from __future__ import annotations

import json
import re
from typing import Any

from conformance.checkpoint.planted.planting import nothing
from conformance.harness import fault, mutated, patched, swap


@fault(kills="CKPT-035", at="fastimpl.checkpoint.writer:find_holders")
def replicas_written_by_one(original: Any, arrangement: Any, held: Any) -> Any:
    """One rank writes all of a replicated tensor."""
    return {}


@fault(kills="CKPT-031", at="twinproof.checkpoint.shards:_metadata")
def global_shape_not_stored(original: Any, shards: Any, options: Any) -> Any:
    """Shard files do not say the global shape; torch's do not."""
    metadata = original(shards, options)
    info = {
        name: {"saved_offsets": value["saved_offsets"]}
        for name, value in json.loads(metadata["DCP_SHARDING_INFO"]).items()
    }
    return {**metadata, "DCP_SHARDING_INFO": json.dumps(info)}


@fault(kills=("CKPT-032", "CKPT-403"), at="twinproof.checkpoint.catalog:is_simple_tiling")
def missing_shard_is_zeros(original: Any, shape: Any, boxes: Any) -> Any:
    """A missing middle shard is not noticed; in torch it gives zeros."""
    return True


dtypes_reinterpreted = patched(
    "Shards that disagree about their dtype are taken together; in torch they are.",
    swap("twinproof.checkpoint.catalog:_Builder._disagree", staticmethod(nothing)),
    kills="CKPT-033",
)


@fault(kills=("CKPT-034", "CKPT-325"), at="twinproof.checkpoint.publish:Staging._old_checkpoint")
def stale_files_stay(original: Any, staging: Any) -> Any:
    """Files of an earlier save stay; in torch they do."""
    known = {"model-00001-of-00001.safetensors", "model.safetensors.index.json"}
    return [name for name in original(staging) if name in known]


replicas_not_compared = patched(
    "check_replicas compares nothing; torch keeps one rank's values.",
    swap("twinproof.checkpoint.plan:compare_checksums", nothing),
    kills="CKPT-036",
)


@fault(kills=("CKPT-035", "CKPT-089"), at="fastimpl.checkpoint.run:Runner._write")
def blocks_written_twice(original: Any, *arguments: Any) -> None:
    """Every block is written twice, as by two holders of one replica."""
    original(*arguments)
    original(*arguments)


ranks_alone_together = patched(
    "Ranks that merge go on whatever happened to others.",
    mutated("twinproof.checkpoint.publish:together", "if group is None:", "if not group is None:"),
    kills="CKPT-514",
)

replicas_of_two_ranks_compared = patched(
    "Only the replicas of the first two ranks are compared.",
    mutated("twinproof.checkpoint.plan:compare_checksums", "enumerate(everyone)", "enumerate(everyone[:2])"),
    kills="CKPT-036",
)

differences_taken_for_failures = patched(
    "That replicas differ is told as a failure of the rank that compared them.",
    mutated(
        "twinproof.checkpoint.plan:check_sums",
        "(difference,) = from_first(lambda: [(_difference(everyone),)]",
        "difference = from_first(lambda: [_difference(everyone)]",
    ),
    kills="CKPT-848",
)

failures_of_the_first_rank_untold = patched(
    "What fails on the first rank is raised there, and the others are given nothing.",
    mutated("twinproof.checkpoint.publish:from_first", "[sendable(error)] * rank_count_of", "[None] * rank_count_of"),
    kills="CKPT-848",
)

files_counted_by_each_rank = patched(
    "The names of a rank's shard files say how many files it has tensors of.",
    mutated("twinproof.checkpoint.shards:write_shards", "max(mapping.values(), default=1)", "max(groups, default=1)"),
    kills="CKPT-638",
)


@fault(kills="CKPT-682", at="twinproof.checkpoint.plan:compare_checksums")
def replicas_of_rank_0_alone(original: Any, everyone: Any) -> None:
    """What rank 0 does not hold is not compared."""
    original([{chunk: value for chunk, value in sums.items() if chunk in everyone[0]} for sums in everyone])


names_run_into_places = patched(
    "A name and the place of a shard are told apart by nothing.",
    mutated("fastimpl.checkpoint.replicas:chunk_key", "\\0", ""),
    kills="CKPT-709",
    of="fastimpl",
)


escapes_taken_literally = patched(
    "Names in torch's sharding information that JSON escapes are taken as they are written.",
    swap(
        "twinproof.checkpoint.catalog:_TORCH_ENTRY",
        re.compile(r'"([^"]*)": \{"saved_offsets": \[([0-9]{1,18}(?:, [0-9]{1,18})*)\]\}'),
    ),
    kills="CKPT-733",
)
