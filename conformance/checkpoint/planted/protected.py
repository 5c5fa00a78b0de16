"""Faults that ``test_protected`` must notice."""

from __future__ import annotations

from conformance.checkpoint.planted.planting import nothing
from conformance.harness import mutated, patched, swap

_TREES, _PUBLISH = "twinproof.checkpoint.trees", "twinproof.checkpoint.publish"

closed_before_it_is_filled = patched(
    "A folder of others has its mode before its files.",
    mutated(
        f"{_TREES}:Others.carry",
        "(new / path).mkdir()",
        "(new / path).mkdir(mode=stat.S_IMODE(status.st_mode))",
    ),
    kills="CKPT-925",
)
closed_folders_found_at_the_end = patched(
    "A folder that may not be listed is found when everything is written, and has the checkpoint's name.",
    mutated(f"{_PUBLISH}:Staging.__init__", "self._check_kept()", "pass"),
    mutated(f"{_PUBLISH}:Staging._take_over", "error.filename or self.target", "self.target"),
    kills="CKPT-925",
)
read_only_folders_stay = patched(
    "A folder that is read-only is not deleted.",
    swap(f"{_TREES}:_open_up", nothing),
    kills="CKPT-926",
)
read_only_checkpoints_stay = patched(
    "What a save has replaced stays where it is read-only.",
    swap(f"{_TREES}:_let_in", nothing),
    kills="CKPT-926",
)
links_are_followed = patched(
    "A folder outside that a link in a leftover leads to is opened to its owner.",
    mutated(f"{_TREES}:_let_in", "os.lstat(folder)", "os.stat(folder)"),
    kills="CKPT-939",
)
vain_attempts_are_told = patched(
    "That a folder could not be opened is told, and not what could not be deleted.",
    mutated(f"{_TREES}:_let_in", "except PermissionError:", "except ():"),
    kills="CKPT-939",
)
