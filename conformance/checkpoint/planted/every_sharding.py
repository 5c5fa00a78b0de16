"""Faults that ``test_every_sharding`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched

empty_parts_are_numbered = patched(
    "Parts of a tensor are numbered with the empty ones, which have no source.",
    mutated(
        "fastimpl.checkpoint.consolidate:_MergePlan.__init__",
        "for chunk in record.chunks:\n                if 0 not in chunk.sizes:\n"
        "                    tensors[name].parts.append((0, len(self.sources), Box(",
        "for number, chunk in enumerate(record.chunks, len(self.sources)):\n                if 0 not in chunk.sizes:\n"
        "                    tensors[name].parts.append((0, number, Box(",
    ),
    kills="CKPT-737",
    of="fastimpl",
)

one_sum_of_each_tensor = patched(
    "Of several pieces of a tensor in a block the last one's sum is kept.",
    mutated(
        "fastimpl.checkpoint.blockio:piece_sums",
        "found.append(Part(file, base, low - base, high - low, crc))",
        "found = [*(one for one in found if one[1] != base), Part(file, base, low - base, high - low, crc)]",
    ),
    kills="CKPT-746",
    of="fastimpl",
)

long_runs_as_they_are_listed = patched(
    "Long runs are written in the order in which a rank lists them.",
    mutated(
        "fastimpl.checkpoint.blockio:_zero_copy", "return sorted(large, key=lambda p: p.file_offset)", "return large"
    ),
    kills="CKPT-858",
    of="fastimpl",
)
