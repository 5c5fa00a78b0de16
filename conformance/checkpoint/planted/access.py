"""Faults that ``test_access`` must notice."""

from __future__ import annotations

from typing import Any

from conformance.harness import fault, mutated, patched, swap
from twinproof.checkpoint.trees import take_after

_TREES, _PUBLISH = "twinproof.checkpoint.trees", "twinproof.checkpoint.publish"


@fault(kills=("CKPT-922", "CKPT-930"), at=f"{_PUBLISH}:take_after")
def mode_alone_is_kept(original: Any, new: Any, old: Any, *, is_private: bool = False) -> list[str]:
    """A folder that takes another's place has its mode, and the group and owner of whoever saves."""
    if not is_private:
        new.chmod(old.stat().st_mode & 0o7777)
    return []


files_of_another_group = patched(
    "The folder gets its group when it is shown, and its files never do.",
    mutated(
        f"{_PUBLISH}:Staging._make_folder", "return take_after(self.folder, self.target, is_private=True)", "return []"
    ),
    kills="CKPT-930",
)
times_of_folders_lost = patched(
    "A folder of others was changed when the save was.",
    mutated(f"{_TREES}:Others.carry", "os.utime(new / path, ns=(status.st_atime_ns, status.st_mtime_ns))", "pass"),
    kills="CKPT-922",
)
prepared_folder_replaced = patched(
    "A folder that was prepared is replaced by one of another group.",
    mutated(
        f"{_PUBLISH}:Staging.__init__", "if lacking and not self.old_names", "if not lacking and self.old_names is None"
    ),
    kills="CKPT-923",
)
opened_to_another_group = patched(
    "What the group of the old folder might, the group of whoever saves may.",
    mutated(f"{_TREES}:_mode_after", "if gid == status.st_gid:", "if True:"),
    kills="CKPT-923",
)
replaced_without_a_word = patched(
    "That a group lost its access is not told.",
    mutated(f"{_PUBLISH}:Staging._take_over", "if lacking:", "if False:"),
    kills="CKPT-923",
)
modes_of_the_umask = patched(
    "Files that take the place of others have the modes of new files.",
    swap(f"{_PUBLISH}:take_file_modes", lambda new, old, names: None),
    kills="CKPT-924",
)
shown_while_written = patched(
    "The hidden folder is as open as any new one.",
    swap(f"{_PUBLISH}:take_after", lambda new, old, is_private=False: take_after(new, old)),
    kills="CKPT-924",
)
temporary_file_is_open = patched(
    "A file is as open as any new one until it is shown.",
    mutated(f"{_PUBLISH}:write_file", "0o600 if is_there else 0o666", "0o666"),
    kills="CKPT-924",
)
