"""Faults in index, planning and sharding policy."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from conformance.checkpoint.planted.making import both, nothing
from conformance.harness import swap, wrap

INDEX = "twinproof.checkpoint.dcp:build_index"


def _without_last(original: Any, weight_map: Any, total: int) -> bytes:
    names = sorted(weight_map)[:-1]
    return bytes(original({name: weight_map[name] for name in names}, total))


def _ghost(original: Any, weight_map: Any, total: int) -> bytes:
    return bytes(original({**weight_map, "lm_head.weight": next(iter(weight_map.values()), "none")}, total))


def _headers_counted(arrangement: Any) -> int:
    return sum(layout.file_bytes for layout in arrangement.files.values())


def _missing_to_first(original: Any, sizes: Any, mapping: Any, *rest: Any, **options: Any) -> Any:
    if mapping is not None:
        mapping = {**mapping, **{name: 1 for name in sizes if name not in mapping}}
    return original(sizes, mapping, *rest, **options)


def _closing_split(sizes: Any, limit: int) -> list[list[str]]:
    files: list[list[str]] = []
    filled = limit + 1
    for name, size in sizes.items():
        if filled + size > limit:
            files.append([])
            filled = 0
        files[-1].append(name)
        filled += size
    return files


def _index_always(original: Any, staging: Any, index: Any) -> None:
    original(staging, b"{}" if index is None else index)


def _shard_metadata(original: Any, shards: Any, options: Any) -> Any:
    metadata = original(shards, options)
    info = {
        name: {"saved_offsets": value["saved_offsets"]}
        for name, value in json.loads(metadata["DCP_SHARDING_INFO"]).items()
    }
    return {**metadata, "DCP_SHARDING_INFO": json.dumps(info)}


def _only_expected(original: Any, staging: Any) -> Any:
    known = {"model-00001-of-00001.safetensors", "model.safetensors.index.json"}
    return [name for name in original(staging) if name in known]


def _distributed_anyway(original: Any, writer: Any, plans: Any) -> Any:
    writer.options = dataclasses.replace(writer.options, save_distributed=True)
    return original(writer, plans)


def _first_arrangement(original: Any, writer: Any, planner: Any) -> Any:
    found = getattr(type(planner), "_planted_first", None)
    if found is None:
        found = type(planner)._planted_first = original(writer, planner)
    writer.arrangement = found
    return found


PLANTED = (
    both(
        "index_lacks_a_name",
        "The last name is missing from the index.",
        ("CKPT-027", "CKPT-086"),
        wrap(INDEX, _without_last),
    ),
    both(
        "tiling_unchecked",
        "Gaps between chunks are not looked for at save.",
        ("CKPT-030",),
        swap("twinproof.checkpoint.plan:check_tiling", nothing),
    ),
    both(
        "global_shape_not_stored",
        "Shard files do not say the global shape; torch's do not.",
        ("CKPT-031",),
        wrap("twinproof.checkpoint.shards:_metadata", _shard_metadata),
    ),
    both(
        "missing_shard_is_zeros",
        "A missing middle shard is not noticed; in torch it gives zeros.",
        ("CKPT-032", "CKPT-403"),
        swap("twinproof.checkpoint.catalog:is_simple_tiling", lambda shape, boxes: True),
    ),
    both(
        "dtypes_reinterpreted",
        "Shards that disagree about their dtype are taken together; in torch they are.",
        ("CKPT-033",),
        swap("twinproof.checkpoint.catalog:_Builder._disagree", staticmethod(nothing)),
    ),
    both(
        "stale_files_stay",
        "Files of an earlier save stay; in torch they do.",
        ("CKPT-034", "CKPT-325"),
        wrap("twinproof.checkpoint.publish:Staging._old_checkpoint", _only_expected),
    ),
    both(
        "replicas_not_compared",
        "check_replicas compares nothing; torch keeps one rank's values.",
        ("CKPT-036",),
        swap("twinproof.checkpoint.dcp:compare_checksums", nothing),
    ),
    both(
        "total_counts_headers",
        "total_size counts the headers.",
        ("CKPT-037",),
        swap("twinproof.checkpoint.plan:Arrangement.total_size_bytes", property(_headers_counted)),
    ),
    both(
        "ghost_in_the_index",
        "The index names a tied head that is not stored (torchtitan #3764).",
        ("CKPT-038", "CKPT-042"),
        wrap(INDEX, _ghost),
    ),
    both(
        "files_counted_from_zero",
        "Files are numbered from zero.",
        ("CKPT-039",),
        wrap(
            "twinproof.checkpoint.plan:file_name",
            lambda original, index, count, shard=None: original(index - 1, count, shard),
        ),
    ),
    both(
        "mapping_unchecked",
        "Any mapping is taken.",
        ("CKPT-040",),
        swap("twinproof.checkpoint.plan:check_mapping", lambda mapping: dict(mapping) if mapping else None),
    ),
    both(
        "missing_names_to_first_file",
        "Names that the mapping lacks go to the first file.",
        ("CKPT-041",),
        wrap("twinproof.checkpoint.plan:assign_files", _missing_to_first),
    ),
    both(
        "oversize_closes_a_file",
        "A tensor above the limit closes the file being filled.",
        ("CKPT-043",),
        swap("twinproof.checkpoint.plan:_split_greedily", _closing_split),
    ),
    both(
        "binary_units",
        "A size of 1 KB is 1024 bytes.",
        ("CKPT-097",),
        swap("twinproof.checkpoint.plan:_UNITS", {"KB": 2**10, "MB": 2**20, "GB": 2**30, "TB": 2**40}),
    ),
    both(
        "index_without_newline",
        "The index ends without a newline.",
        ("CKPT-044",),
        wrap(INDEX, lambda original, names, total: original(names, total).rstrip()),
    ),
    both(
        "index_beside_single_file",
        "single_file leaves an index.",
        ("CKPT-046",),
        wrap("twinproof.checkpoint.publish:Staging.publish", _index_always),
    ),
    both(
        "leaves_pass",
        "Leaves that are not tensors are not refused at once; torch pickles them.",
        ("CKPT-049",),
        swap("twinproof.checkpoint.dcp:check_local_plan", nothing),
    ),
    both(
        "cached_layout_reused",
        "A save takes the layout of an earlier one from a cached plan.",
        ("CKPT-094",),
        wrap("twinproof.checkpoint.dcp:HuggingFaceStorageWriter.arranged", _first_arrangement),
    ),
    both(
        "several_ranks_unchecked",
        "save_distributed=False is not refused with several ranks; torch writes a corrupt file.",
        ("CKPT-095",),
        wrap("twinproof.checkpoint.dcp:HuggingFaceStorageWriter.prepare_global_plan", _distributed_anyway),
    ),
    both(
        "urls_become_folders",
        "A URL is taken for a local path; in torch it is.",
        ("CKPT-087",),
        swap("twinproof.checkpoint.plan:local_path", lambda path, where="path": Path(path)),
    ),
)
