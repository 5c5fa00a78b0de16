"""Faults that ``test_conditions`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched

_MAIN = "fastimpl.checkpoint.__main__"

text_left_out = patched(
    "inspect says nothing as text.",
    mutated(f"{_MAIN}:_inspect", "if not options.json:", "if False:"),
    kills="CKPT-750",
    of="fastimpl",
)
no_index_is_an_index = patched(
    "verify takes every checkpoint for one with an index.",
    mutated(f"{_MAIN}:_verify", "index.total_size if index is not None else None", "index.total_size"),
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
lines_of_progress_run_on = patched(
    "The last line of progress is not ended.",
    mutated(f"{_MAIN}:_progress", '"\\n" if done_bytes == total_bytes else "\\r"', '"\\r"'),
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
    mutated(f"{_MAIN}:main", "return 130", "return 1"),
    kills="CKPT-754",
    of="fastimpl",
)
