"""Faults that ``test_lacking_systems`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched

_TREES, _PUBLISH = "twinproof.checkpoint.trees", "twinproof.checkpoint.publish"

modes_are_demanded = patched(
    "A save fails on a file system that has no modes.",
    mutated(f"{_TREES}:_give_mode", "if error.errno not in _NO_MODES:", "if True:"),
    kills="CKPT-917",
)
no_mode_is_demanded = patched(
    "Whatever keeps a new folder from its mode, it takes the place of the old one.",
    mutated(f"{_TREES}:_give_mode", "if error.errno not in _NO_MODES:", "if False:"),
    kills="CKPT-917",
)
other_modes_without_a_word = patched(
    "That a folder has another mode than the one that it replaced is not told.",
    mutated(f"{_TREES}:take_after", '[*lacking, f"mode {mode:04o}"] if is_lacking else lacking', "lacking"),
    kills="CKPT-917",
)
owners_are_demanded = patched(
    "A save fails where the system refuses to give a folder away.",
    mutated(
        f"{_TREES}:_take_owners",
        'except OSError:\n            lacking.append(f"owner',
        'except ():\n            lacking.append(f"owner',
    ),
    kills="CKPT-918",
)
other_owners_without_a_word = patched(
    "That a folder has another owner than the one that it replaced is not told.",
    mutated(f"{_TREES}:_take_owners", 'lacking.append(f"owner {status.st_uid}")', "pass"),
    kills="CKPT-918",
)
closed_folders_are_filled = patched(
    "An empty folder that lacks nothing is filled as it is, also where the process may not write in it.",
    mutated(f"{_PUBLISH}:Staging.__init__", "os.access(self.target, os.W_OK | os.X_OK)", "True"),
    kills="CKPT-918",
)
attributes_are_demanded = patched(
    "A save fails where the system refuses an attribute.",
    mutated(f"{_TREES}:_take_attributes", "except OSError:", "except ():"),
    kills="CKPT-919",
)
labels_are_taken_away = patched(
    "What the old folder did not have is taken from the new one, labels of the system too.",
    mutated(f"{_TREES}:_take_attributes", 'if name.startswith("system.posix_acl_"):', "if True:"),
    kills="CKPT-919",
)
labels_are_told = patched(
    "A label that the system gives itself is told as one that is lacking.",
    mutated(f"{_TREES}:_take_attributes", 'if name.startswith(("user.", "system."))', ""),
    kills="CKPT-919",
)
notes_of_old_contents = patched(
    "What a user noted of the content of a file stands on the one that replaces it.",
    mutated(f"{_TREES}:_take_attributes", 'if not name.startswith("user.")', ""),
    kills="CKPT-934",
)
files_lose_their_lists = patched(
    "A file that replaces another has no ACL.",
    mutated(f"{_TREES}:_take_attributes", 'if not name.startswith("user.")', "if False"),
    kills="CKPT-934",
)
mounts_are_demanded = patched(
    "A save fails where the system lists no mounts.",
    mutated(f"{_TREES}:mounts_in", "except OSError:", "except ():"),
    kills="CKPT-935",
)
old_names_are_files = patched(
    "Whatever has the name of a file of the old checkpoint counts as a file.",
    mutated(f"{_TREES}:take_file_modes", "if os.path.isfile(os.path.join(old, name))", ""),
    kills="CKPT-935",
)
deletions_are_demanded = patched(
    "That what a save has written cannot be deleted is told, and not what ended the save.",
    mutated(f"{_PUBLISH}:Staging.discard", "except OSError:", "except ():"),
    kills="CKPT-949",
)
