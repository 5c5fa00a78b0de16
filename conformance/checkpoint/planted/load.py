"""Faults that ``test_load`` must notice."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import torch

from conformance.checkpoint.planted.planting import first_only
from conformance.harness import fault, mutated, patched, swap, wrap
from twinproof.errors import MissingKeyError, PlanError


@fault(kills="CKPT-060", at="twinproof.checkpoint.plan:fnmatchcase", of="fastimpl")
def export_keep_ignored(original: Any, name: Any, pattern: Any) -> Any:
    """The keep-list of an export is not looked at."""
    return False


_CASTABLE = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64}

integers_cast_on_export = patched(
    "An export casts integers too.", swap("twinproof.checkpoint.plan:_CASTABLE", _CASTABLE), kills="CKPT-060"
)


@fault(kills="CKPT-052", at="twinproof.checkpoint.dcp:HuggingFaceStorageReader.targets")
def loaded_into_copies(original: Any, reader: Any, plan: Any, planner: Any) -> Any:
    """A load fills copies of the targets."""
    return [(item, target.clone()) for item, target in original(reader, plan, planner)]


one_missing_name_shown = patched(
    "Of several missing names only the first is shown.",
    swap("twinproof.checkpoint.planners:MissingKeyError", first_only(MissingKeyError)),
    kills="CKPT-053",
)


@fault(kills="CKPT-054", at="twinproof.checkpoint.planners:HuggingFaceLoadPlanner.create_local_plan")
def unexpected_names_hidden(original: Any, planner: Any) -> Any:
    """Names that the target lacks are not reported."""
    plan = original(planner)
    planner.unexpected_keys = []
    return plan


one_wrong_shape_shown = patched(
    "Of several wrong shapes only the first is shown.",
    swap("twinproof.checkpoint.planners:PlanError", first_only(PlanError)),
    kills="CKPT-055",
)


@fault(kills="CKPT-056", at="twinproof.checkpoint.dcp:HuggingFaceStorageReader.targets")
def cast_in_silence(original: Any, reader: Any, plan: Any, planner: Any) -> Any:
    """A dtype mismatch is converted without being asked."""
    reader.cast = True
    return original(reader, plan, planner)


@fault(kills="CKPT-057", at="fastimpl.checkpoint.reader:run_jobs")
def whole_files_read(original: Any, jobs: Any, *rest: Any) -> Any:
    """A load reads whole files."""
    for file in {job.file for job in jobs}:
        with open(file, "rb") as stream:
            stream.read()
    return original(jobs, *rest)


def _any_as_bytes(original: Any, kind: str) -> torch.dtype:
    return original(kind) or torch.uint8


def _as_bytes(original: Any, stored: Any, where: str) -> torch.Tensor:
    if stored["dtype"].startswith("F6"):
        stored = {**stored, "dtype": "U8", "shape": [4], "data": bytearray(4)}
    found: torch.Tensor = original(stored, where)
    return found


unknown_dtypes_as_bytes = patched(
    "A dtype that torch lacks is loaded as bytes.",
    wrap("twinproof.checkpoint.dcp:torch_dtype", _any_as_bytes),
    wrap("refimpl.checkpoint:_tensor_of", _as_bytes),
    kills="CKPT-058",
)


@fault(kills="CKPT-061", at="twinproof.checkpoint.dcp:HuggingFaceStorageReader.read_metadata")
def warns_on_every_load(original: Any, reader: Any) -> Any:
    """A load warns of a buffer that is not writable, as torch does."""
    warnings.warn("The given buffer is not writable", stacklevel=2)
    return original(reader)


@fault(kills="CKPT-053", at="twinproof.checkpoint.planners:HuggingFaceLoadPlanner.create_local_plan")
def missing_targets_zeroed(original: Any, planner: Any) -> Any:
    """strict=False clears the targets that the checkpoint lacks."""
    plan = original(planner)
    for name in planner.missing_keys:
        planner.state_dict[name].zero_()
    return plan


@fault(kills="CKPT-056", at="twinproof.checkpoint.dcp:HuggingFaceStorageReader.targets")
def dtypes_checked_one_by_one(original: Any, reader: Any, plan: Any, planner: Any) -> Any:
    """The first wrong dtype ends the check, and the others are not shown."""
    found = []
    for item in plan.items:
        found += original(reader, dataclasses.replace(plan, items=[item]), planner)
    return found


@fault(kills="CKPT-060", at="fastimpl.checkpoint.source:Source.__init__")
def export_truncates(original: Any, source: Any, value: torch.Tensor, dtype: torch.dtype) -> None:
    """An export cuts the low bits off instead of rounding to nearest even."""
    if dtype is torch.bfloat16 and value.dtype is torch.float32:
        value = (value.view(torch.int32) & -65536).view(torch.float32)
    original(source, value, dtype)


@fault(kills="CKPT-457", at="twinproof.checkpoint.dcp:HuggingFaceStorageReader.read_data")
def cause_of_a_thread_lost(original: Any, reader: Any, plan: Any, planner: Any) -> Any:
    """Of an error in a thread only the number of files that were not read is told, as in torch 2.13."""
    try:
        return original(reader, plan, planner)
    except OSError:
        raise OSError("Not all files were processed") from None


@fault(kills="CKPT-459", at="fastimpl.checkpoint.readio:_bundles")
def gaps_not_seen(original: Any, slices: Any, limit_bytes: int, starts: Any) -> Any:
    """Tensors are read with one call although others lie between them."""
    bundle: list[Any] = []
    for part in slices:
        if part.job.target.is_contiguous() and part.count == part.job.geometry.total_bytes and len(bundle) < 256:
            bundle.append(part)
        else:
            yield [part]
    if bundle:
        yield bundle


@fault(kills="CKPT-459", at="fastimpl.checkpoint.readio:_Reading.read")
def last_of_many_left(original: Any, reading: Any, descriptor: int, bundle: Any) -> None:
    """Of as many tensors as one call takes, the last is not read."""
    original(reading, descriptor, bundle[:-1] if len(bundle) == 256 else bundle)


@fault(kills="CKPT-459", at="refimpl.checkpoint:ReadWholeFiles.read")
def reference_leaves_the_last(original: Any, engine: Any, job: Any) -> None:
    """Of more than 400 ranges the last is not read."""
    original(engine, dataclasses.replace(job, ranges=job.ranges[:-1]) if len(job.ranges) > 400 else job)


chunks_by_number_alone = patched(
    "A chunk is the one that its number says, wherever it lies.",
    mutated(
        "twinproof.checkpoint.dcp:_holding",
        "if chunk.offsets == at",
        "if index.index is not None or chunk.offsets == at",
    ),
    kills="CKPT-545",
)

empty_chunks_read = patched(
    "An item is read from the first chunk at its offset, which may have no values.",
    mutated("twinproof.checkpoint.dcp:_holding", "size for b, length, size in", "0 or True for b, length, size in"),
    kills="CKPT-715",
)
chunks_read_past_their_end = patched(
    "A range is checked where it begins and not where it ends.",
    mutated("twinproof.checkpoint.dcp:_holding", "<= b + length <= size", "<= size"),
    kills="CKPT-715",
)

negated_target_not_filled = patched(
    "What is read for a negated view goes to memory that is forgotten.",
    mutated("fastimpl.checkpoint.reader:ReadRanges.read", "target.is_conj() or target.is_neg()", "target.is_conj()"),
    kills="CKPT-052",
)
reference_negated_target_not_filled = patched(
    "The same in the reference.",
    mutated("refimpl.checkpoint:ReadWholeFiles.read", " and not target.is_neg()", ""),
    kills="CKPT-052",
)

files_left_open = patched(
    "A load leaves the files open that it has read.",
    mutated("fastimpl.checkpoint.readio:_File.close", "os.close(self._descriptor)", "pass"),
    kills="CKPT-611",
)

any_number_of_pieces = patched(
    "All neighbours of a file are read by one call, however many they are.",
    mutated("fastimpl.checkpoint.readio:_bundles", "is_next and len(bundle) < _BUFFERS_MAX", "is_next"),
    kills="CKPT-640",
)

shared_places_filled = patched(
    "A target that holds several values in one place is filled with whatever comes last.",
    mutated("twinproof.checkpoint.format:check_fillable", "overlaps_itself(target)", "False"),
    kills="CKPT-684",
)

zero_strides_alone = patched(
    "Places are taken for shared where a stride is zero, and only there.",
    mutated(
        "twinproof.checkpoint.format:overlaps_itself",
        "return bool((places.sort().values.diff() == 0).any())",
        "return False",
    ),
    kills="CKPT-684",
)

rows_between_rows_refused = patched(
    "Rows that lie between each other are taken for rows that meet.",
    mutated(
        "twinproof.checkpoint.format:overlaps_itself",
        "return bool((places.sort().values.diff() == 0).any())",
        "return True",
    ),
    kills="CKPT-689",
)

touching_rows_filled = patched(
    "Rows whose last value is the next one's first are taken for places of their own.",
    mutated(
        "twinproof.checkpoint.format:overlaps_itself", "is_nested &= stride > reach", "is_nested &= stride >= reach"
    ),
    kills="CKPT-716",
)

shared_places_filled_with_quantized_values = patched(
    "A target that holds several values in one place is filled where the values were quantized.",
    mutated(
        "twinproof.checkpoint.dcp:QuantizedHuggingFaceStorageReader._target", "check_fillable(target, name)", "pass"
    ),
    kills="CKPT-684",
)

loads_past_autograd = patched(
    "A load fills memory that autograd has kept, and autograd is not told.",
    mutated(
        "fastimpl.checkpoint.reader:ReadRanges.read",
        "torch.autograd.graph.increment_version([wanted.target for wanted in job.ranges])",
        "pass",
    ),
    kills="CKPT-685",
    of="fastimpl",
)

autograd_told_of_loads_that_end = patched(
    "Autograd is told of a load when all of it has come, and so not where it fails.",
    mutated(
        "fastimpl.checkpoint.reader:ReadRanges.read",
        "    torch.autograd.graph.increment_version([wanted.target for wanted in job.ranges])\n"
        "    planned_s = time.perf_counter()\n"
        "    self.stats = run_jobs(jobs, job.thread_count, self.choose_copies, job.meter)\n",
        "    planned_s = time.perf_counter()\n"
        "    self.stats = run_jobs(jobs, job.thread_count, self.choose_copies, job.meter)\n"
        "    torch.autograd.graph.increment_version([wanted.target for wanted in job.ranges])\n",
    ),
    kills="CKPT-685",
    of="fastimpl",
)

_BUILDER = "twinproof.checkpoint.catalog:_Builder"

shapes_from_the_last = patched(
    "Of tensors about whose shapes files disagree the error names the last one.",
    mutated(f"{_BUILDER}.add_file", "__contains__, header.entries)", "__contains__, reversed(header.entries))"),
    kills="CKPT-967",
)

gaps_from_the_last = patched(
    "Of tensors with gaps the error names the last one.",
    mutated(
        f"{_BUILDER}.finish",
        "__contains__, self.catalog.tensors)",
        "__contains__, reversed(self.catalog.tensors))",
    ),
    kills="CKPT-967",
)

four_bits_are_tried = patched(
    "Conversions of floats of 4 bits are left to torch, which refuses them in the middle of a load.",
    mutated(
        "twinproof.checkpoint.scales:check_plain", "torch.float4_e2m1fn_x2 in (dtype, torch_dtype(stored))", "False"
    ),
    kills="CKPT-985",
)
targets_of_four_bits_are_tried = patched(
    "Of floats of 4 bits stored ones are refused alone.",
    mutated("twinproof.checkpoint.scales:check_plain", "in (dtype, torch_dtype(stored))", "is torch_dtype(stored)"),
    kills="CKPT-985",
)
