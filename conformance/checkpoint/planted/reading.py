"""More faults in reading: targets, malformed files, consolidation."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from conformance.checkpoint.planted.making import both, broken_taken_as_empty, fast, nothing
from conformance.harness import swap, wrap

PLANNER = "twinproof.checkpoint.planners"
READER = "twinproof.checkpoint.dcp"
PLAN = f"{PLANNER}:HuggingFaceLoadPlanner.create_local_plan"
PARSE = "twinproof.checkpoint.format"
CONSOLIDATE = "fastimpl.checkpoint.consolidate"


def _from_the_first_column(original: Any, shape: Any, offsets: Any, sizes: Any, itemsize: int) -> Any:
    inner = (0,) * len(offsets[1:])
    return original(shape, (*offsets[:1], *inner), sizes, itemsize)


def _without_last(original: Any, jobs: Any) -> Any:
    for part in original(jobs):
        if not part.skip or part.skip + part.count < part.job.geometry.total_bytes:
            yield part


def _missing_zeroed(original: Any, planner: Any) -> Any:
    plan = original(planner)
    for name in planner.missing_keys:
        planner.state_dict[name].zero_()
    return plan


def _checked_one_by_one(original: Any, reader: Any, plan: Any, planner: Any) -> Any:
    found = []
    for item in plan.items:
        found += original(reader, dataclasses.replace(plan, items=[item]), planner)
    return found


def _sizes(change: Any) -> Any:
    """Change the dimensions before they are checked."""

    def around(original: Any, name: str, fields: Any, where: str) -> Any:
        shape = fields.get("shape") if isinstance(fields, dict) else None
        if isinstance(shape, list):
            fields = {**fields, "shape": [change(size) for size in shape]}
        return original(name, fields, where)

    return wrap(f"{PARSE}:_parse_entry", around)


def _whole(size: Any) -> Any:
    return int(size) if isinstance(size, float) and size.is_integer() else size


def _wrapped(size: Any) -> Any:
    return size % 2**64 if type(size) is int else size


def _end_believed(original: Any, entries: Any, data_bytes: int, where: str) -> None:
    original(entries, max((entry.end for entry in entries.values()), default=data_bytes), where)


def _keeping_everything(original: Any, catalog: Any) -> dict[str, str]:
    return {**original(catalog), "DCP_VERSION": "1.0"}


def _inputs_deleted(original: Any, job: Any, folder: Any, *rest: Any) -> None:
    # When all threads are done: one that still reads would end in an error, which is no kill.
    original(job, folder, *rest)
    for record in job.catalog.tensors.values():
        for chunk in record.chunks:
            Path(chunk.file).unlink(missing_ok=True)


PLANTED = (
    fast(
        "column_offset_ignored",
        "A load reads the right rows, but always from the first column.",
        ("CKPT-026", "CKPT-057"),
        wrap("fastimpl.checkpoint.reader:geometry", _from_the_first_column),
    ),
    fast(
        "last_slice_skipped",
        "The last piece of a tensor that is read in several is left out.",
        ("CKPT-102",),
        wrap("fastimpl.checkpoint.readio:_slices", _without_last),
    ),
    both(
        "missing_targets_zeroed",
        "strict=False clears the targets that the checkpoint lacks.",
        ("CKPT-053",),
        wrap(PLAN, _missing_zeroed),
    ),
    both(
        "dtypes_checked_one_by_one",
        "The first wrong dtype ends the check, and the others are not shown.",
        ("CKPT-056",),
        wrap(f"{READER}:HuggingFaceStorageReader.targets", _checked_one_by_one),
    ),
    both("floats_are_sizes", "A dimension of 2.0 is taken for 2.", ("CKPT-400", "CKPT-401"), _sizes(_whole)),
    both("sizes_wrap_around", "Dimensions are taken modulo 2**64.", ("CKPT-400", "CKPT-401"), _sizes(_wrapped)),
    both(
        "file_length_believed",
        "A header is believed about the length of its file.",
        ("CKPT-405", "CKPT-406"),
        wrap(f"{PARSE}:_check_cover", _end_believed),
    ),
    both(
        "links_lead_anywhere",
        "A link may lead out of the folder.",
        ("CKPT-402", "CKPT-404"),
        swap("twinproof.checkpoint.catalog:_link_stays_near", lambda folder, name: True),
    ),
    both(
        "surrogates_pass",
        "Half a character passes.",
        ("CKPT-408",),
        swap(f"{PARSE}:_check_unicode", nothing),
    ),
    both("any_depth_passes", "Nesting of any depth passes.", ("CKPT-408",), swap(f"{PARSE}:_DEPTH_MAX", 1 << 20)),
    fast(
        "shard_metadata_kept",
        "Final files keep metadata that only shards should have.",
        ("CKPT-091",),
        wrap("twinproof.checkpoint.shards:output_metadata", _keeping_everything),
    ),
    fast(
        "final_folder_not_verified",
        "A final folder that is broken is called consolidated.",
        ("CKPT-092",),
        wrap("twinproof.checkpoint.shards:read_catalog", broken_taken_as_empty),
    ),
    fast(
        "shards_deleted_early",
        "Consolidation deletes shard files once they are read, before its result is in force.",
        ("CKPT-304",),
        wrap(f"{CONSOLIDATE}:merge", _inputs_deleted),
    ),
)
