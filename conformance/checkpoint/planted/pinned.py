"""Faults that ``test_pinned`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched

_PUBLISH = "twinproof.checkpoint.publish:Staging._publish_in_place"

index_beside_unsynced_names = patched(
    "The index appears in a folder whose other new names are not on disk.",
    mutated(_PUBLISH, "if name in _LAST_NAMES:", "if False:"),
    kills="CKPT-603",
)
index_among_the_files = patched(
    "The index appears in the order of names.",
    mutated(_PUBLISH, "key=lambda name: (name in _LAST_NAMES, name)", "key=lambda name: name"),
    kills="CKPT-603",
)
first_files_stay = patched(
    "What had appeared before a failure stays.",
    mutated(_PUBLISH, "in reversed(shown)", "in ()"),
    kills="CKPT-604",
)
_WORKS_IN = "twinproof.checkpoint.publish:_works_in"

working_folder_taken_away = patched(
    "The folder in which the process works is exchanged, and the old one removed.",
    mutated("twinproof.checkpoint.publish:Staging._is_pinned", "is_fixed or _works_in(self.target)", "is_fixed"),
    kills="CKPT-688",
)
working_folder_below_taken_away = patched(
    "A folder is exchanged that holds the one in which the process works.",
    mutated(_WORKS_IN, ".is_relative_to(folder)", " == folder"),
    kills="CKPT-688",
)
names_that_begin_alike = patched(
    "A folder whose name begins as that of the working folder does is taken for it.",
    mutated(
        _WORKS_IN, "Path(os.path.realpath(os.getcwd())).is_relative_to(folder)", "str(folder).startswith(os.getcwd())"
    ),
    kills="CKPT-690",
)
removed_working_folder_is_an_error = patched(
    "A process whose working folder was removed cannot save.",
    mutated(_WORKS_IN, "except FileNotFoundError:", "except NotADirectoryError:"),
    kills="CKPT-690",
)
files_of_others_counted = patched(
    "A checkpoint without an index is saved beside files that count as its own.",
    mutated("twinproof.checkpoint.publish:Staging.__init__", "if not is_indexed:", "if False:"),
    kills="CKPT-702",
)
files_of_others_refused = patched(
    "A checkpoint with an index is refused beside files of others.",
    mutated("twinproof.checkpoint.publish:Staging.__init__", "if not is_indexed:", "if True:"),
    kills="CKPT-702",
)
own_files_refused = patched(
    "The files of the checkpoint that is replaced count as those of others.",
    mutated("twinproof.checkpoint.publish:Staging._check_others", " - set(self.old_names)", ""),
    kills="CKPT-702",
)
files_of_an_interrupted_save_stay = patched(
    "What is no error of the system leaves the files that have appeared.",
    mutated(_PUBLISH, "except BaseException:", "except OSError:"),
    kills="CKPT-604",
)
files_noted_behind_their_call = patched(
    "A file that appeared counts from the call's return on, behind which an interrupt may come.",
    mutated(
        _PUBLISH,
        "shown.append(name)\n            os.rename(self.folder / name, self.target / name)",
        "os.rename(self.folder / name, self.target / name)\n            shown.append(name)",
    ),
    kills="CKPT-604",
)
