"""Faults that ``test_conditions`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched

_CATALOG = "twinproof.checkpoint.catalog"
_DCP = "twinproof.checkpoint.dcp"
_QUANTIZED = f"{_DCP}:QuantizedHuggingFaceStorageReader"
_MAIN = "fastimpl.checkpoint.__main__"

text_left_out = patched(
    "inspect says nothing as text.",
    mutated(f"{_MAIN}:_inspect", "if not options.json:", "if False:"),
    kills="CKPT-750",
    of="fastimpl",
)
other_total_passes = patched(
    "verify does not warn of another total in the index.",
    mutated(f"{_MAIN}:_verify", 'declared in (None, facts["payload_bytes"])', "True"),
    kills="CKPT-750",
    of="fastimpl",
)
true_is_a_total = patched(
    "A total that is true counts as one byte.",
    mutated("twinproof.checkpoint.catalog:read_index", " and not isinstance(total, bool)", ""),
    kills="CKPT-750",
    of="fastimpl",
)
reason_is_age = patched(
    "clean says of the only copy of a checkpoint that it is too young.",
    mutated(f"{_MAIN}:_why_kept", "if leftover.is_needed", "if False"),
    kills="CKPT-751",
    of="fastimpl",
)
files_put_aside = patched(
    "A plain file passes for a folder that was put aside.",
    mutated("twinproof.checkpoint.publish:find_leftovers", 'entry.is_file() and match[2] != "saving"', "False"),
    kills="CKPT-751",
    of="fastimpl",
)
no_folder_to_clean = patched(
    "What is no folder is cleaned as if it were one.",
    mutated(f"{_MAIN}:_clean", "not options.path.is_dir()", "False"),
    kills="CKPT-751",
    of="fastimpl",
)
only_copy_removed = patched(
    "The only copy of a checkpoint is removed.",
    mutated("twinproof.checkpoint.publish:remove_leftover", "if leftover.is_needed:", "if False:"),
    kills="CKPT-752",
)
bare_error_of_removal = patched(
    "A removal that fails is an error without a place.",
    mutated("twinproof.checkpoint.publish:remove_leftover", "except OSError as error:", "except () as error:"),
    kills="CKPT-752",
)
foreign_dtypes_compared = patched(
    "diff compares what no torch dtype holds.",
    mutated(f"{_MAIN}:_difference", "if dtype is None:", "if False:"),
    kills="CKPT-753",
    of="fastimpl",
)
interrupt_is_a_failure = patched(
    "A command that is interrupted ends with 1.",
    mutated(f"{_MAIN}:_run", "return 130", "return 1"),
    kills="CKPT-754",
    of="fastimpl",
)
leading_zeros_pass = patched(
    "Offsets with leading zeros pass in torch's spelling.",
    mutated(f"{_CATALOG}:_as_torch_writes_it", 'number != "0" and number.startswith("0")', "False"),
    kills="CKPT-755",
)
last_offsets_count = patched(
    "Of a name that stands twice in torch's spelling the last offsets count.",
    mutated(f"{_CATALOG}:_as_torch_writes_it", "if len(result) == len(found) else None", ""),
    kills="CKPT-755",
)
whole_beside_shard = patched(
    "A tensor that is whole in one file passes for a shard beside another.",
    mutated(f"{_CATALOG}:_Builder.add_file", " or name not in self.sharded", ""),
    kills="CKPT-755",
)
hidden_files_count = patched(
    "Hidden files are read.",
    mutated(f"{_CATALOG}:list_files", ' and not name.startswith(".")', ""),
    kills="CKPT-756",
)
every_file_counts = patched(
    "Files of every suffix are read.",
    mutated(f"{_CATALOG}:list_files", "name.endswith(SUFFIX) and ", ""),
    kills="CKPT-756",
)
large_indices_read = patched(
    "An index of any size is read.",
    mutated(f"{_CATALOG}:read_index", " or status.st_size > INDEX_BYTES_MAX", ""),
    kills="CKPT-756",
)
meta_targets_filled = patched(
    "A target without memory counts as loaded.",
    mutated(f"{_DCP}:HuggingFaceStorageReader.targets", "if stored is None or target.is_meta:", "if stored is None:"),
    kills="CKPT-757",
)
quantized_meta_targets = patched(
    "A quantized tensor's target without memory counts as loaded.",
    mutated(f"{_QUANTIZED}._target", "target.is_meta or not", "not"),
    kills="CKPT-757",
)
other_ranks_found = patched(
    "An item of another rank than the chunk's passes.",
    mutated(f"{_DCP}:_holding", "len(begin) == len(lengths) == len(at) and ", ""),
    kills="CKPT-757",
)
vectors_of_groups = patched(
    "A vector passes for groups of MXFP4.",
    mutated(f"{_DCP}:_mxfp4", " or len(record.shape) < 2", ""),
    kills="CKPT-758",
)
cut_groups_pass = patched(
    "Groups of MXFP4 that are cut between shards pass.",
    mutated(f"{_DCP}:_mxfp4", "if any(chunk.sizes[-1] != group for chunk in record.chunks):", "if False:"),
    kills="CKPT-758",
)
missing_form_taken = patched(
    "A subclass of a manager that names no reader has none.",
    mutated("twinproof.checkpoint.manager:CheckpointManager.__init_subclass__", "if given is not None:", "if True:"),
    kills="CKPT-758",
)
short_files_verified = patched(
    "A file that ends early while it is verified passes for one that was damaged.",
    mutated(
        f"{_CATALOG}:_fill",
        "if not got:",
        "if not got:\n            break\n        if False:",
    ),
    kills="CKPT-759",
)
gone_is_a_bare_error = patched(
    "A file that goes while it is loaded is an error that is not ours.",
    mutated("twinproof.checkpoint.format:check_unchanged", "except FileNotFoundError:", "except ():"),
    kills="CKPT-759",
)
names_that_are_numbers = patched(
    "Names of tensors that are no text are stored as text.",
    mutated(
        "twinproof.checkpoint.format:check_name",
        "if not isinstance(name, str):",
        "if not isinstance(name, str):\n        name = str(name)\n    if False:",
    ),
    kills="CKPT-760",
)
keys_that_are_numbers = patched(
    "Keys of metadata that are no text are stored as text.",
    mutated("twinproof.checkpoint.format:check_metadata", "not isinstance(key, str) or ", ""),
    kills="CKPT-760",
)
headers_of_any_length = patched(
    "Headers of any length are written.",
    mutated("twinproof.checkpoint.format:lay_out", "if len(text) > HEADER_BYTES_MAX:", "if False:"),
    kills="CKPT-761",
)
long_headers_unsaid = patched(
    "Nothing is said of headers that remote readers do not read.",
    mutated("twinproof.checkpoint.format:lay_out", "if len(text) > HEADER_BYTES_REMOTE:", "if False:"),
    kills="CKPT-761",
)
ends_of_any_type = patched(
    "An end of data that is a number of another type passes.",
    mutated("twinproof.checkpoint.format:_parse_entry", " or type(end) is not int", ""),
    kills="CKPT-762",
)
shapes_of_any_type = patched(
    "A shape that is no list and has no entries passes for that of a scalar.",
    mutated("twinproof.checkpoint.format:_parse_entry", "type(shape) is not list or ", ""),
    kills="CKPT-762",
)
other_shapes_stored = patched(
    "Data of another shape than was planned is stored.",
    mutated("twinproof.checkpoint.planners:check_planned", "tuple(value.shape) != tuple(data.chunk.sizes) or ", ""),
    kills="CKPT-763",
)
other_dtypes_stored = patched(
    "Data of another dtype than was planned is stored.",
    mutated("twinproof.checkpoint.planners:check_planned", " or value.dtype != dtype", ""),
    kills="CKPT-763",
)
small_blocks_pass = patched(
    "Blocks smaller than the least are written.",
    mutated("twinproof.checkpoint.plan:WriterOptions.make", " < BLOCK_BYTES_MIN or", " < 1 or"),
    kills="CKPT-764",
)
saves_without_collectives = patched(
    "A save without collectives begins.",
    mutated(
        f"{_DCP}:HuggingFaceStorageWriter.set_up_storage_writer",
        'if kwargs.get("use_collectives") is False:',
        "if False:",
    ),
    kills="CKPT-764",
)
unwritten_saves_end = patched(
    "A save that has written nothing is ended as any other.",
    mutated(f"{_DCP}:HuggingFaceStorageWriter.finish", " or self.staging is None", ""),
    kills="CKPT-764",
)

_REMOVE = "twinproof.checkpoint.publish:remove_leftover"

folders_that_stay_are_deleted = patched(
    "A leftover folder that cannot be deleted is told as deleted.",
    mutated(
        _REMOVE, "remove_tree(leftover.path) if", "__import__('shutil').rmtree(leftover.path, ignore_errors=True) if"
    ),
    kills="CKPT-804",
)
files_that_stay_are_deleted = patched(
    "A leftover of a file system that is read-only is told as deleted.",
    mutated(
        _REMOVE,
        'raise storage_error(error, "deleting", leftover.path) from error',
        'if error.errno != 30:\n            raise storage_error(error, "deleting", leftover.path) from error',
    ),
    kills="CKPT-804",
)
