"""Faults that ``test_index`` must notice."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch

from conformance.checkpoint.planted.planting import first_only, nothing
from conformance.harness import fault, mutated, patched, swap
from twinproof.errors import PlanError, UnsupportedError


@fault(kills=("CKPT-047", "CKPT-048"), at="fastimpl.checkpoint.writer:_source")
def tied_stored_empty(original: Any, item: Any, job: Any) -> Any:
    """The second name of a storage is stored as zeros."""
    source = original(item, job)
    seen = job.__dict__.setdefault("_planted_seen", set())
    pointer = source.value.untyped_storage().data_ptr()
    if pointer in seen and pointer:
        return type(source)(torch.zeros_like(source.value), source.dtype)
    seen.add(pointer)
    return source


def _headers_counted(arrangement: Any) -> int:
    return sum(layout.file_bytes for layout in arrangement.files.values())


total_counts_headers = patched(
    "total_size counts the headers.",
    swap("twinproof.checkpoint.plan:Arrangement.total_size_bytes", property(_headers_counted)),
    kills="CKPT-037",
)


@fault(kills=("CKPT-038", "CKPT-042"), at="twinproof.checkpoint.dcp:build_index")
def ghost_in_the_index(original: Any, weight_map: Any, total: int) -> bytes:
    """The index names a tied head that is not stored (torchtitan #3764)."""
    return bytes(original({**weight_map, "lm_head.weight": next(iter(weight_map.values()), "none")}, total))


@fault(kills="CKPT-039", at="twinproof.checkpoint.plan:file_name")
def files_counted_from_zero(original: Any, index: Any, count: Any, shard: Any = None) -> Any:
    """Files are numbered from zero."""
    return original(index - 1, count, shard)


@fault(kills="CKPT-040", at="twinproof.checkpoint.plan:check_mapping")
def mapping_unchecked(original: Any, mapping: Any) -> Any:
    """Any mapping of names to files is accepted."""
    return dict(mapping) if mapping else None


@fault(kills="CKPT-041", at="twinproof.checkpoint.plan:assign_files")
def missing_names_to_first_file(original: Any, sizes: Any, mapping: Any, *rest: Any, **options: Any) -> Any:
    """Names that the mapping lacks go to the first file."""
    if mapping is not None:
        mapping = {**mapping, **{name: 1 for name in sizes if name not in mapping}}
    return original(sizes, mapping, *rest, **options)


@fault(kills="CKPT-043", at="twinproof.checkpoint.plan:_split_greedily")
def oversize_closes_a_file(original: Any, sizes: Any, limit: int) -> list[list[str]]:
    """A tensor above the limit closes the file being filled."""
    files: list[list[str]] = []
    filled = limit + 1
    for name, size in sizes.items():
        if filled + size > limit:
            files.append([])
            filled = 0
        files[-1].append(name)
        filled += size
    return files


binary_units = patched(
    "A size of 1 KB is 1024 bytes.",
    swap("twinproof.checkpoint.plan:_UNITS", {"KB": 2**10, "MB": 2**20, "GB": 2**30, "TB": 2**40}),
    kills="CKPT-097",
)


@fault(kills="CKPT-044", at="twinproof.checkpoint.dcp:build_index")
def index_without_newline(original: Any, names: Any, total: Any) -> Any:
    """The index ends without a newline."""
    return original(names, total).rstrip()


@fault(kills="CKPT-046", at="twinproof.checkpoint.publish:Staging.publish")
def index_beside_single_file(original: Any, staging: Any, index: Any) -> None:
    """single_file leaves an index."""
    original(staging, b"{}" if index is None else index)


leaves_pass = patched(
    "Leaves that are not tensors are not refused at once; torch pickles them.",
    swap("twinproof.checkpoint.dcp:check_local_plan", nothing),
    kills="CKPT-049",
)


@fault(kills="CKPT-050", at="twinproof.checkpoint.plan:lay_out", of="fastimpl")
def empty_state_without_format(original: Any, tensors: Any, metadata: Any = None, **options: Any) -> Any:
    """A file without tensors lacks its format metadata."""
    members = list(tensors)
    return original(members, metadata if members else None, **options)


@fault(kills="CKPT-051", at="twinproof.checkpoint.dcp:HuggingFaceStorageReader.read_metadata")
def dots_become_slashes(original: Any, reader: Any) -> Any:
    """Names of nested state are changed on the way."""
    metadata = original(reader)
    names = metadata.state_dict_metadata
    metadata.state_dict_metadata = {name.replace(".", "/"): value for name, value in names.items()}
    return metadata


def _existing_only(original: Any, folder: Any) -> Any:
    found = original(folder)
    if found is None:
        return None
    names = {name: file for name, file in found.weight_map.items() if (folder / file).exists()}
    return found._replace(weight_map=names)


@fault(kills="CKPT-045", at="twinproof.checkpoint.catalog:read_index")
def missing_files_passed_over(original: Any, folder: Any) -> Any:
    """Names whose file is missing are left out in silence; torch does not consult the index."""
    from twinproof.checkpoint import catalog

    check = catalog._check_member

    def lenient(folder: Path, name: str, where: str) -> None:
        if (folder / str(name)).exists():
            check(folder, name, where)

    catalog._check_member = lenient
    try:
        return _existing_only(original, folder)
    finally:
        catalog._check_member = check


def _elements_counted(arrangement: Any) -> int:
    return sum(math.prod(tensor.shape) for tensor in arrangement.tensors.values())


total_counts_elements = patched(
    "total_size counts elements, not bytes.",
    swap("twinproof.checkpoint.plan:Arrangement.total_size_bytes", property(_elements_counted)),
    kills="CKPT-037",
)


@fault(kills=("CKPT-038", "CKPT-040"), at="twinproof.checkpoint.dcp:build_index")
def index_points_elsewhere(original: Any, weight_map: Any, total: int) -> bytes:
    """The index names the file after the one that holds a tensor."""
    files = sorted(set(weight_map.values()))
    following = dict(zip(files, [*files[1:], *files[:1]], strict=True))
    return bytes(original({name: following[file] for name, file in weight_map.items()}, total))


sixth_digit_taken = patched(
    "More files than five digits can number are taken.",
    swap("twinproof.checkpoint.plan:FILE_COUNT_MAX", 1 << 40),
    kills="CKPT-039",
)
one_lacking_name_shown = patched(
    "Of the names that the mapping lacks only the first is shown.",
    swap("twinproof.checkpoint.plan:PlanError", first_only(PlanError)),
    kills="CKPT-041",
)


@fault(kills="CKPT-042", at="twinproof.checkpoint.plan:assign_files")
def highest_index_counted(original: Any, sizes: Any, mapping: Any, *rest: Any, **options: Any) -> Any:
    """Names say '-of-N' for the mapping's highest index, whatever is saved."""
    groups = original(sizes, mapping, *rest, **options)
    count = max(mapping.values()) if mapping else len(groups)
    return {f"model-{i:05d}-of-{count:05d}.safetensors": group for i, group in enumerate(groups.values(), start=1)}


@fault(kills="CKPT-043", at="twinproof.checkpoint.plan:_split_greedily")
def full_file_is_too_full(original: Any, sizes: Any, limit: Any) -> Any:
    """A tensor that just fits into a file goes to the next one."""
    return original(sizes, limit - 1)


@fault(kills="CKPT-044", at="twinproof.checkpoint.dcp:build_index")
def index_as_given(original: Any, weight_map: Any, total: int) -> bytes:
    """The index names tensors in the state dict's order."""
    content = {"metadata": {"total_size": total}, "weight_map": dict(weight_map)}
    return json.dumps(content, indent=2, ensure_ascii=False).encode() + b"\n"


one_leaf_shown = patched(
    "Of the leaves that are no tensors only the first is shown.",
    swap("twinproof.checkpoint.plan:UnsupportedError", first_only(UnsupportedError)),
    kills="CKPT-049",
)


files_of_other_names_kept = patched(
    "Of a checkpoint that is replaced only files with names of a save's own count as its files.",
    mutated("twinproof.checkpoint.publish:Staging._old_checkpoint", "or name in listed", "or False"),
    kills="CKPT-555",
)

links_to_folders_become_folders = patched(
    "A link to a folder becomes a folder.",
    mutated("twinproof.checkpoint.trees:Others.carry", "if stat.S_ISDIR(status.st_mode):", "if (old / path).is_dir():"),
    kills="CKPT-612",
)
modes_of_folders_lost = patched(
    "A folder of others is given the mode of a new one.",
    mutated("twinproof.checkpoint.trees:Others.carry", "take_after(new / path, old / path)", "pass"),
    kills="CKPT-612",
)
