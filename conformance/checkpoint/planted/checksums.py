"""Faults that ``test_checksums`` must notice."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from conformance.checkpoint.planted.planting import nothing
from conformance.harness import fault, mutated, patched, swap
from twinproof.checkpoint.catalog import Verified


@fault(kills="CKPT-520", at="twinproof.checkpoint.dcp:to_text")
def leading_zeros_lost(original: Any, sums: Any) -> dict[str, str]:
    """A checksum is written without its leading zeros."""
    return {name: f"{crc:x}" for name, crc in sorted(sums.items())}


@fault(kills="CKPT-520", at="twinproof.checkpoint.dcp:sums_of")
def empty_tensors_skipped(original: Any, chunks: Any, parts: Any) -> dict[str, int]:
    """Tensors without bytes get no checksum."""
    return {name: crc for name, crc in original(chunks, parts).items() if chunks[name][2]}


@fault(kills="CKPT-521", at="fastimpl.checkpoint.run:block_sums")
def exchanged_bytes_left_out(
    original: Any, file: Any, block: Any, header_bytes: int, parts: Any, messages: Any, pieces: Any
) -> Any:
    """The sums of a block that other ranks' bytes are in are 0."""
    found = original(file, block, header_bytes, parts, messages, pieces)
    return [part._replace(crc=0) for part in found] if messages else found


@fault(kills="CKPT-521", at="fastimpl.checkpoint.writer:joined")
def first_neighbour_counts(original: Any, parts: Any) -> Any:
    """Of pieces that lie one after the other, the first one's sum stands for all."""
    firsts = {part[:3]: part.crc for part in parts}
    return [part._replace(crc=firsts[part[:3]]) for part in original(parts)]


@fault(kills="CKPT-522", at="twinproof.checkpoint.dcp:check_loaded")
def partial_reads_not_named(original: Any, *arguments: Any) -> tuple[str, ...]:
    """What is read in part passes for compared."""
    original(*arguments)
    return ()


quantized_not_compared = patched(
    "Values that are converted from blocks are not compared.",
    swap("twinproof.checkpoint.dcp:check_loaded", lambda *arguments: ()),
    kills="CKPT-527",
)


@fault(kills="CKPT-523", at="twinproof.checkpoint.catalog:_compare")
def first_fault_only(original: Any, found: Any, expected: Any, path: Any) -> None:
    """Of several tensors that do not agree, the first is named."""
    wrong = [key for key, crc in found.items() if crc != expected[key]]
    original({key: found[key] for key in wrong[:1]}, expected, path)


@fault(kills="CKPT-523", at="twinproof.checkpoint.catalog:_summed")
def converted_targets_pass(original: Any, catalog: Any, chunks: Any, crc: Any, *rest: Any) -> Any:
    """What has to be read once more is taken for right: targets that are converted or strided, and verify."""
    from twinproof.checkpoint.catalog import expected_sums

    expected = expected_sums(catalog)
    return {key: expected[key] for key in chunks}


@fault(kills="CKPT-524", at="twinproof.checkpoint.catalog:verify_catalog")
def structure_passes_for_bytes(original: Any, catalog: Any, *arguments: Any) -> Verified:
    """A tensor without a checksum counts as verified."""
    original(catalog, *arguments)
    return Verified(tuple(sorted(catalog.tensors)), ())


absent_sums_pass = patched(
    "verify_checksums on a checkpoint without checksums loads in silence.",
    swap("twinproof.checkpoint.dcp:check_present", nothing),
    kills="CKPT-524",
)
shards_not_compared = patched(
    "A consolidation does not compare what it reads.",
    swap("twinproof.checkpoint.shards:check_parts", nothing),
    kills="CKPT-525",
)
final_folder_not_compared = patched(
    "The bytes of a folder that is already final are not compared.",
    swap("twinproof.checkpoint.shards:verify_catalog", nothing),
    kills="CKPT-525",
)


@fault(kills="CKPT-526", at="twinproof.checkpoint.shards:metadata_of")
def sums_of_values_as_they_lie(original: Any, tensors: Any, crc: Any) -> Any:
    """save_file sums the memory of a strided tensor, not its bytes in the file."""
    return original({name: t.t() if t.dim() == 2 and not t.is_contiguous() else t for name, t in tensors.items()}, crc)


own_key_passes = patched(
    "Metadata may bring checksums of other bytes.",
    swap("twinproof.checkpoint.shards:check_key", nothing),
    kills="CKPT-526",
)


@fault(kills="CKPT-528", at="twinproof.checkpoint.catalog:_parsed")
def any_text_is_a_sum(original: Any, value: Any, where: str) -> dict[str, int]:
    """What is no checksum is passed over."""
    return dict.fromkeys(value, 0) if isinstance(value, dict) else {}


@fault(kills="CKPT-529", at="twinproof.checkpoint.catalog:_power")
def powers_of_one_byte(original: Any, size_bytes: int) -> int:
    """Lengths are taken modulo 64."""
    return int(original(size_bytes % 64))


@fault(kills="CKPT-530", at="fastimpl.ops.checkpoint:crc32_between")
def sums_run_on(original: Any, data: torch.Tensor, cuts: Any) -> list[int]:
    """Every sum begins at the first cut."""
    return [original(data, (cuts[0], cut))[0] for cut in cuts[1:]]


@fault(kills="CKPT-531", at="twinproof.checkpoint.catalog:_summed")
def whole_tensors_read(original: Any, catalog: Any, chunks: Any, crc: Any, *rest: Any) -> Any:
    """Verify reads a tensor whole."""
    content = {chunk.file: Path(chunk.file).read_bytes() for chunk in chunks.values()}
    data = {key: content[chunk.file][chunk.begin :][: math.prod(chunk.sizes)] for key, chunk in chunks.items()}
    return {key: crc(torch.tensor(list(values), dtype=torch.uint8)) for key, values in data.items()}


@fault(kills="CKPT-532", at="twinproof.checkpoint.catalog:Meter.add")
def pieces_not_added(original: Any, meter: Any, size_bytes: int) -> None:
    """Progress tells the last piece, not all so far."""
    meter._done_bytes = 0
    original(meter, size_bytes)


@fault(kills="CKPT-538", at="twinproof.checkpoint.manager:CheckpointManager._hf_reader")
def manager_compares_nothing(original: Any, manager: Any, path: Any) -> Any:
    """A manager that is to verify reads without comparing."""
    manager._verifies = False
    return original(manager, path)


pieces_as_long_as_the_bound = patched(
    "Sums are put together as if the last piece were as long as the others.",
    mutated("twinproof.checkpoint.catalog:_summed", "found, min(PIECE_BYTES, sizes[key] - at)", "found, PIECE_BYTES"),
    kills="CKPT-502",
)

last_byte_alone_not_read = patched(
    "A last byte that would be a piece alone is not read.",
    mutated("twinproof.checkpoint.catalog:_summed", "range(0, sizes[key],", "range(0, sizes[key] - 1 or 1,"),
    kills="CKPT-502",
)


_QUANTIZED = "twinproof.checkpoint.dcp:QuantizedHuggingFaceStorageReader.read_data"

quantized_alone_not_asked = patched(
    "A load of quantized tensors alone does not ask whether there are checksums.",
    mutated(
        _QUANTIZED,
        "future = super().read_data(plain, planner)",
        "future = super().read_data(plain, planner) if plain.items else None",
    ),
    kills="CKPT-558",
)
first_of_all_ranks_gathers = patched(
    "What a group gathers goes to rank 0 of all ranks.",
    mutated("twinproof.checkpoint.publish:gather_first", "group_dst=0", "dst=0"),
    kills="CKPT-556",
)
first_of_all_ranks_scatters = patched(
    "What a group is told comes from rank 0 of all ranks.",
    mutated("twinproof.checkpoint.publish:scatter", "group_src=0", "src=0"),
    kills="CKPT-556",
)

one_sum_is_enough = patched(
    "A tensor counts as checked where any of its shards has a checksum.",
    mutated(
        "twinproof.checkpoint.catalog:verify_catalog",
        "{name for file, name in chunks if (file, name) not in expected}",
        "{name for _, name in chunks} - {name for _, name in expected}",
    ),
    kills="CKPT-606",
)

sums_of_the_index_ignored = patched(
    "Where file and index state different checksums the file's counts.",
    mutated(
        "twinproof.checkpoint.catalog:expected_sums",
        "found.setdefault(key, crc) != crc",
        "found.setdefault(key, crc) < 0",
    ),
    kills="CKPT-614",
)

unlisted_tensors_looked_up = patched(
    "verify looks for the tensor of each sum among those that the index lists.",
    mutated("twinproof.checkpoint.catalog:verify_catalog", " if key in chunks", ""),
    kills="CKPT-727",
)
sums_of_what_is_not_listed = patched(
    "A sum of a tensor that the index leaves out passes for a checkpoint with checksums.",
    mutated("twinproof.checkpoint.catalog:states_sums", "return any(", "return bool(expected) or any("),
    kills="CKPT-727",
)


@fault(kills="CKPT-727", at="twinproof.checkpoint.catalog:expected_sums")
def sums_of_any_file(original: Any, catalog: Any) -> dict[tuple[str, str], int]:
    """A tensor without a sum takes that of a tensor of its name in another file."""
    sums = original(catalog)
    of_name = {name: crc for (_, name), crc in sums.items()}
    keys = [(chunk.file, name) for name, record in catalog.tensors.items() for chunk in record.chunks]
    return {**{key: of_name[key[1]] for key in keys if key[1] in of_name}, **sums}


sums_of_the_save_before = patched(
    "A writer keeps the sums of the saves before.",
    mutated("twinproof.checkpoint.dcp:HuggingFaceStorageWriter.write_data", "self._parts = [", "self._parts += ["),
    kills="CKPT-637",
)

width_for_dtype = patched(
    "Values that were converted to another dtype of the same width are summed as if they lay there as stored.",
    mutated(
        "twinproof.checkpoint.catalog:check_loaded",
        "target.dtype == wanted.dtype",
        "target.element_size() == wanted.dtype.itemsize",
    ),
    kills="CKPT-645",
)
