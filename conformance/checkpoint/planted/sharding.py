"""Faults that ``test_sharding`` must notice."""

from __future__ import annotations

from typing import Any

import torch

from conformance.checkpoint.planted.planting import bytes_where, nothing, parts_changed, values_changed, zero
from conformance.harness import fault, mutated, patched, swap


@fault(kills=("CKPT-021", "CKPT-022", "CKPT-096"), at="fastimpl.checkpoint.exchange:_frame")
def message_loses_a_byte(original: Any, parts: Any, *, failed: bool) -> torch.Tensor:
    """The last byte of each exchanged message is wrong."""
    message: torch.Tensor = original(parts, failed=failed)
    words = int(message[8:16].view(torch.int64))
    data_bytes = sum(part.count for part in parts)
    message[16 + 8 * words + data_bytes - 1] ^= 0x5A
    return message


inner_shards_reversed = patched(
    "Shards of tensors with three and more dimensions are stored in reverse.",
    values_changed(lambda v: v.flip(0) if v.dim() > 2 else v),
    kills="CKPT-023",
)


@fault(kills="CKPT-024", at="fastimpl.checkpoint.writer:_parts")
def shared_replica_is_blank(original: Any, plan: Any, items: Any, sources: Any, job: Any) -> Any:
    """What a rank supplies in place of another replica is zeros."""
    blank = {k: type(s)(torch.zeros_like(s.value), s.dtype) if k < 0 else s for k, s in sources.items()}
    return original(plan, items, blank, job)


vectors_lost = patched(
    "Replicated vectors are stored as zeros.",
    bytes_where(lambda s: s.value.dim() == 1, zero),
    kills=("CKPT-028", "CKPT-090"),
)


@fault(kills=("CKPT-027", "CKPT-086"), at="twinproof.checkpoint.dcp:build_index")
def index_lacks_a_name(original: Any, weight_map: Any, total: int) -> bytes:
    """The last name is missing from the index."""
    names = sorted(weight_map)[:-1]
    return bytes(original({name: weight_map[name] for name in names}, total))


tiling_unchecked = patched(
    "Gaps between chunks are not looked for at save.",
    swap("twinproof.checkpoint.plan:check_tiling", nothing),
    kills="CKPT-030",
)


@fault(kills="CKPT-025", at="twinproof.checkpoint.planners:_PackedShards.part")
def packed_blocks_confused(original: Any, shards: Any, fqn: str, value: Any, offset: Any) -> Any:
    """Every block of a packed shard holds the first one's values."""
    return original(shards, fqn, value, next(iter(shards.blocks(fqn, value)), offset))


@fault(kills="CKPT-026", at="fastimpl.checkpoint.reader:geometry")
def reshard_offset_ignored(original: Any, shape: Any, offsets: Any, sizes: Any, itemsize: int) -> Any:
    """A load always reads a chunk from its start."""
    return original(shape, (0,) * len(shape), sizes, itemsize)


@fault(kills=("CKPT-026", "CKPT-057"), at="fastimpl.checkpoint.reader:geometry")
def column_offset_ignored(original: Any, shape: Any, offsets: Any, sizes: Any, itemsize: int) -> Any:
    """A load reads the right rows, but always from the first column."""
    inner = (0,) * len(offsets[1:])
    return original(shape, (*offsets[:1], *inner), sizes, itemsize)


reference_reverses_inner_shards = patched(
    "Shards of tensors with three and more dimensions are stored in reverse.",
    parts_changed(lambda bits: bits.flip(0) if bits.dim() > 2 else bits),
    kills="CKPT-023",
)


@fault(kills=("CKPT-021", "CKPT-024"), at="refimpl.checkpoint:assemble")
def reference_stacks_shards(original: Any, shape: Any, dtype: Any, parts: Any) -> Any:
    """Every chunk is placed at the start of its tensor."""
    return original(shape, dtype, [(name, (0,) * len(offsets), bits) for name, offsets, bits in parts])


# torch itself refuses it; an implementation that brings planning of its own has to, too.
partial_taken_as_whole = patched(
    "A partial sum is stored as if it were the value.",
    swap("torch.distributed.tensor:DTensor._raise_if_contains_partial_placements", nothing),
    kills="CKPT-029",
)


def _without_last_row(value: torch.Tensor) -> torch.Tensor:
    if value.dim() != 2 or value.shape[0] % 2 == 0:
        return value
    changed = value.clone()
    changed[-1] = 0
    return changed


last_row_lost = patched(
    "The last row of a shard with an odd number of rows is not stored.",
    values_changed(_without_last_row),
    kills="CKPT-022",
)

dtype_of_the_first_rank = patched(
    "The first rank's dtype is taken for that of all parts of a tensor.",
    mutated(
        "twinproof.checkpoint.planners:check_agreed", "form != expected", "(form or ())[1:] != (expected or ())[1:]"
    ),
    kills="CKPT-613",
)


place_not_said = patched(
    "A planner that is asked for a block without a place fails before it can say so.",
    mutated("twinproof.checkpoint.planners:_PackedShards.part", "tuple(offset or ())", "tuple(offset)"),
    kills="CKPT-025",
)

packed_blocks_are_even = patched(
    "A packed dimension is cut into blocks as even as can be, not as DTensor cuts it.",
    mutated("twinproof.checkpoint.planners:_runs", "part = -(-count //", "part = max(1, count //"),
    kills="CKPT-025",
)

packed_beside_its_mesh = patched(
    "Ranks outside of a tensor's mesh look for its blocks in what they have.",
    mutated(
        "twinproof.checkpoint.planners:_PackedShards.blocks",
        "if value.device_mesh.get_coordinate() is not None",
        "if True",
    ),
    kills="CKPT-712",
)

packed_shards_by_rank = patched(
    "Which rows of a packed dimension a rank holds is counted by its number, not by its place in the mesh.",
    mutated(
        "twinproof.checkpoint.planners:_runs",
        "get_coordinate() or ()",
        "get_coordinate() and [tensor.device_mesh.get_rank()]",
    ),
    kills="CKPT-851",
)
