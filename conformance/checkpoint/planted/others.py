"""Faults that ``test_others`` must notice."""

from __future__ import annotations

import shutil

from conformance.checkpoint.planted.planting import nothing
from conformance.harness import mutated, patched, swap

_OTHERS = "twinproof.checkpoint.trees:Others"

what_came_meanwhile_is_deleted = patched(
    "Behind the exchange of the folders the old one is deleted with everything that came into it since.",
    swap(f"{_OTHERS}.bring_over", nothing),
    swap(f"{_OTHERS}.settle", lambda _, old, new: shutil.rmtree(old)),
    kills="CKPT-920",
)
what_went_meanwhile_comes_back = patched(
    "What others removed from the old folder is there again.",
    mutated(f"{_OTHERS}._settle", "self._forget(new, path, kept)", "pass"),
    kills="CKPT-920",
)
what_vanishes_fails_the_save = patched(
    "A file that somebody removes while it is given a second name fails the save.",
    mutated("twinproof.checkpoint.trees:_unless_gone", "if os.path.lexists(source):", "if True:"),
    kills="CKPT-920",
)
files_by_a_handle_are_left = patched(
    "What is made by a handle while the old folder is cleared is left in it.",
    mutated(f"{_OTHERS}.settle", "range(_LOOKS)", "range(1)"),
    kills="CKPT-921",
)
brought_over_at_the_end = patched(
    "What came meanwhile is not there until the old folder is deleted.",
    swap(f"{_OTHERS}.bring_over", nothing),
    kills="CKPT-931",
)
older_files_win = patched(
    "What was in the old folder replaces what a program has written since.",
    mutated(f"{_OTHERS}._settle", "if kept is None else _is_still(kept.target, target)", "or True"),
    kills="CKPT-931",
)
dropped_without_a_word = patched(
    "A file that gives way to a later one is not told.",
    mutated(f"{_OTHERS}._settle", "if is_late:", "if False:"),
    kills="CKPT-931",
)
