"""Faults of what the file system refuses."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

from conformance.harness import fault, mutated, patched


@fault(kills="CKPT-892", at="twinproof.checkpoint.native:named_errors")
@contextmanager
def native_errors_are_torchs(original: Any, doing: str, path: Any) -> Any:
    """Errors of a native save are as torch raises them."""
    yield


positions_in_place_of_errors = patched(
    "What torch's writer says behind an error of the file is told in its place.",
    mutated("twinproof.checkpoint.publish:named_errors", "(OSError, RuntimeError)", "OSError"),
    kills="CKPT-892",
)
folders_are_looked_at_unnamed = patched(
    "Where a save begins, what the system refuses has no name.",
    mutated(
        "twinproof.checkpoint.publish:Staging.__init__",
        'with named_errors("looking at the folder", target):',
        "if True:",
    ),
    kills="CKPT-893",
)
steps_are_looked_for_unnamed = patched(
    "Where a manager looks for steps, what the system refuses has no name.",
    mutated(
        "twinproof.checkpoint.manager:complete_steps", 'with named_errors("looking for steps", folder):', "if True:"
    ),
    mutated(
        "twinproof.checkpoint.manager:_steps_put_aside", 'with named_errors("looking for steps", folder):', "if True:"
    ),
    kills="CKPT-893",
)
parents_of_nothing = patched(
    "A path through '..' of what is not there is shortened by its text.",
    mutated("twinproof.checkpoint.publish:_resolved", 'part == ".."', "False"),
    kills="CKPT-894",
)
short_files_have_lengths = patched(
    "The length of a header is made of as many bytes as there are.",
    mutated("twinproof.checkpoint.format:read_header", "len(prefix) < LENGTH_BYTES", "not prefix"),
    kills="CKPT-895",
)
causes_are_not_looked_at = patched(
    "An error of the file system is looked for among causes alone.",
    mutated("twinproof.checkpoint.publish:named_errors", "seen.__cause__ or seen.__context__", "seen.__cause__"),
    kills="CKPT-869",
)
errors_of_callers_are_told = patched(
    "What the caller was handling is told in the place of what is raised.",
    mutated("twinproof.checkpoint.publish:named_errors", "sys.exc_info()[1]", "None"),
    kills="CKPT-869",
)
causes_lead_to_the_caller = patched(
    "Of an error with a cause it is taken for granted that what the caller was handling stands behind it.",
    mutated("twinproof.checkpoint.publish:named_errors", " and seen is not None and ", " and "),
    kills="CKPT-869",
)
names_may_be_any = patched(
    "Of a name that is too long the system's word is all that is said.",
    mutated("twinproof.checkpoint.publish:storage_error", "error.errno == errno.ENAMETOOLONG", "False"),
    kills="CKPT-966",
)
