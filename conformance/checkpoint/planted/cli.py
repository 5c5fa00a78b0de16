"""Faults that ``test_cli`` must notice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from conformance.harness import fault, mutated, patched


@fault(kills="CKPT-107", at="fastimpl.checkpoint.__main__:main")
def exit_status_always_zero(original: Callable[..., int], *arguments: Any) -> int:
    """The command line ends with 0 whatever it found."""
    original(*arguments)
    return 0


mapping_by_plain_json = patched(
    "The mapping is read by plain JSON: of a name that stands twice the last counts, and null is no mapping.",
    mutated(
        "fastimpl.checkpoint.__main__:_consolidate",
        "parse_json_object(options.mapping.read_bytes(), str(options.mapping))",
        "json.loads(options.mapping.read_bytes())",
    ),
    kills="CKPT-742",
)
errors_as_text_alone = patched(
    "An error is told as text, also where JSON was asked for.",
    mutated(
        "fastimpl.checkpoint.__main__:_run", "if options.json:\n            print(", "if False:\n            print("
    ),
    kills="CKPT-742",
)
index_by_plain_json = patched(
    "The index is read by plain JSON: of a name that stands twice the last counts.",
    mutated(
        "twinproof.checkpoint.catalog:read_index",
        "parse_json_object(path.read_bytes(), where)",
        "__import__('json').loads(path.read_bytes())",
    ),
    kills="CKPT-742",
)
missing_files_alone_are_named = patched(
    "Of what the system refuses only a missing file is told as an error, the rest ends in a traceback.",
    mutated("fastimpl.checkpoint.__main__:_run", "(TwinproofError, OSError)", "(TwinproofError, FileNotFoundError)"),
    kills="CKPT-800",
)
errors_of_diff_are_differences = patched(
    "A comparison that could not be made ends as one that found differences.",
    mutated("fastimpl.checkpoint.__main__:_run", '2 if options.command == "diff" else 1', "1"),
    kills="CKPT-800",
)
what_is_no_folder_is_cleaned = patched(
    "A clean-up does not say by name that it was given no folder.",
    mutated("fastimpl.checkpoint.__main__:_clean", "if not options.path.is_dir():", "if False:"),
    kills="CKPT-800",
)
names_fail_commands = patched(
    "A name that standard output cannot encode ends the command.",
    mutated("fastimpl.checkpoint.__main__:_say", 'text.encode(encoding, "backslashreplace").decode(encoding)', "text"),
    kills="CKPT-816",
    of="fastimpl",
)
names_are_ascii = patched(
    "Every name is shown as ASCII.",
    mutated("fastimpl.checkpoint.__main__:_say", 'getattr(sys.stdout, "encoding", None) or "utf-8"', '"ascii"'),
    kills="CKPT-816",
    of="fastimpl",
)
any_age_is_taken = patched(
    "A clean-up takes an age that is no number, or a negative one, with which a running save is deleted.",
    mutated("fastimpl.checkpoint.__main__:_hours", "not 0 <= hours < math.inf", "False"),
    kills="CKPT-853",
)
bytes_are_no_size = patched(
    "A shard size without a unit is refused.",
    mutated("fastimpl.checkpoint.__main__:_size", "int(text) if text.isdecimal() else text", "text"),
    kills="CKPT-853",
)
refused_without_a_reason = patched(
    "Of a value that is refused only the name of the function that did it is told.",
    mutated("fastimpl.checkpoint.__main__:_named", "except ConfigError as error:", "except KeyError as error:"),
    kills="CKPT-853",
)
pipes_that_broke_are_errors = patched(
    "A command whose reader has gone says that a pipe broke, with the status of a damaged checkpoint.",
    mutated("fastimpl.checkpoint.__main__:_run", "except BrokenPipeError:", "except InterruptedError:"),
    kills="CKPT-856",
)
small_output_is_left_to_the_end = patched(
    "Output that fits a buffer is written when Python ends, where the reader may have gone.",
    mutated("fastimpl.checkpoint.__main__:main", "sys.stdout.flush()", "pass"),
    kills="CKPT-856",
)
native_folders_are_folders_of_files = patched(
    "Of a folder in torch's format some files are named.",
    mutated("twinproof.checkpoint.format:no_files", "if NATIVE_METADATA_NAME in names:", "if False:"),
    kills=("CKPT-964", "CKPT-965"),
)
runs_are_folders_of_files = patched(
    "Of a run's folder the first steps by name are said, in the order of their letters.",
    mutated("twinproof.checkpoint.format:no_files", "int(name[5:])", "name"),
    kills="CKPT-964",
)
any_number_is_a_step = patched(
    "A folder whose number no manager writes so is said to be a step.",
    mutated("twinproof.checkpoint.format:no_files", "STEP_NAME.fullmatch", "lambda name: name[5:].isdigit()"),
    kills="CKPT-964",
)
what_is_no_checkpoint_is_right = patched(
    "A command that found no checkpoint ends as one that found a good one.",
    mutated(
        "fastimpl.checkpoint.__main__:_run", 'options.command == "diff" else 1', 'options.command == "diff" else 0'
    ),
    kills="CKPT-965",
)
