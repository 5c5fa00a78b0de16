"""Faults that ``test_late_writers`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched

_TREES = "twinproof.checkpoint.trees"

removed_files_are_looked_for = patched(
    "A file that was removed from both folders is an error.",
    mutated(f"{_TREES}:_is_still", "except FileNotFoundError:", "except ():"),
    kills="CKPT-936",
)
passing_files_are_kept_ones = patched(
    "A file that was there for a moment counts as one that was given a second name.",
    mutated(f"{_TREES}:Others._forget", "kept is None or ", ""),
    kills="CKPT-936",
)
used_folders_are_told = patched(
    "That a folder is in use again is told as an error.",
    mutated(f"{_TREES}:Others._forget", "if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):", "if True:"),
    kills="CKPT-937",
)
kept_folders_without_a_word = patched(
    "Why a folder that others removed is still there is not told.",
    mutated(f"{_TREES}:Others._forget", "if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):", "if False:"),
    kills="CKPT-937",
)
refusals_are_tried_once = patched(
    "What the system refuses right behind the exchange is not known any more when it could be told.",
    mutated(
        f"{_TREES}:Others._settle",
        "    self._forget(new, path, kept)\n        self._note_deleted(path)",
        "    self._note_deleted(path)\n        self._forget(new, path, kept)",
    ),
    kills="CKPT-937",
)
full_folders_without_a_word = patched(
    "A folder into which somebody writes again and again is left without a word.",
    mutated(
        f"{_TREES}:Others.settle",
        "raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), os.fspath(old))",
        "pass",
    ),
    kills="CKPT-938",
)
unlisted_folders_without_a_reason = patched(
    "Why a folder could not be cleared is not told.",
    mutated(
        f"{_TREES}:Others._settle_folder",
        "except OSError as error:\n        failures.append(error)\n        return",
        "except OSError as error:\n        return",
    ),
    kills="CKPT-938",
)
unlisted_folders_are_deleted = patched(
    "A folder that cannot be listed is deleted unseen.",
    mutated(
        f"{_TREES}:Others._settle_folder",
        "except OSError as error:\n        failures.append(error)\n        return",
        "except OSError as error:\n        shutil.rmtree(old / path)\n        return",
    ),
    kills="CKPT-938",
)
