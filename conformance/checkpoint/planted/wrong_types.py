"""Faults that ``test_wrong_types`` must notice."""

from __future__ import annotations

import os
import threading
from typing import Any

from conformance.harness import fault, mutated, patched
from twinproof.errors import ConfigError


@fault(kills="CKPT-542", at="twinproof.checkpoint.dcp:local_path")
def paths_not_shown(original: Any, path: Any, *where: Any) -> Any:
    """A path that is none is refused without what it was."""
    try:
        return original(path, *where)
    except ConfigError as error:
        raise ConfigError(error.message, got=None, expected=None, where=error.where) from None


@fault(kills="CKPT-543", at="twinproof.checkpoint.dcp:HuggingFaceStorageWriter.set_up_storage_writer")
def thread_not_looked_at(original: Any, writer: Any, *arguments: Any, **options: Any) -> None:
    """A save in a thread of its own passes for one of the caller's."""
    writer._made_by = os.getpid(), threading.get_ident()
    original(writer, *arguments, **options)


two_ranks_are_few = patched(
    "Two ranks save without a group.",
    mutated(
        "twinproof.checkpoint.dcp:HuggingFaceStorageWriter.prepare_global_plan",
        "len(plans) != rank_count_of",
        "len(plans) > 2 and len(plans) != rank_count_of",
    ),
    kills="CKPT-546",
)

flags_of_saves_may_be_text = patched(
    "A flag that is text is taken: false is true.",
    mutated("twinproof.checkpoint.plan:WriterOptions.make", "check_flags(single_file=single_file, **flags)", "pass"),
    kills="CKPT-679",
)

progress_told_to_nobody = patched(
    "What is no function passes for one that is told of progress, until the load calls it.",
    mutated("twinproof.checkpoint.dcp:HuggingFaceStorageReader.__init__", "if progress is not None:", "if False:"),
    kills="CKPT-680",
)

numbers_name_files = patched(
    "Names of a file mapping may be anything, until they are sorted or joined.",
    mutated(
        "twinproof.checkpoint.plan:check_mapping", 'check_kind(name, str, "fqn_to', 'check_kind(name, object, "fqn_to'
    ),
    kills="CKPT-839",
)
anything_is_a_pattern = patched(
    "A pattern may be anything, until the last save matches names with it.",
    mutated("twinproof.checkpoint.plan:Export.make", "check_kind(pattern, str,", "check_kind(pattern, object,"),
    kills="CKPT-839",
)
classes_are_objects = patched(
    "A class passes for an object with states.",
    mutated("twinproof.checkpoint.native:check_stateful", "isinstance(value, type) or", "False or"),
    kills="CKPT-839",
)
any_path_is_a_name = patched(
    "A path with a NUL goes to the system.",
    mutated("twinproof.checkpoint.format:local_path", 'if "\\0" in text:', "if False:"),
    kills="CKPT-960",
)
names_without_a_path = patched(
    "A path with a NUL is refused without what it was.",
    mutated("twinproof.checkpoint.format:local_path", "got=repr(text)[:200], expected", 'got="a NUL", expected'),
    kills="CKPT-960",
)
