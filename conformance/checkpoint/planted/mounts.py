"""Faults that ``test_mounts`` must notice."""

from __future__ import annotations

from conformance.checkpoint.planted.planting import nothing
from conformance.harness import mutated, patched, swap

_TREES, _PUBLISH = "twinproof.checkpoint.trees", "twinproof.checkpoint.publish"

mounts_of_other_file_systems_alone = patched(
    "A bind mount of the same file system, and what is mounted below, is no mount.",
    mutated(f"{_PUBLISH}:Staging._is_pinned", " or bool(mounts_in(self.target))", ""),
    kills="CKPT-927",
)
mounts_inside_unseen = patched(
    "Of mounts the folder's own alone counts.",
    mutated(f"{_TREES}:mounts_in", ' or point.startswith(os.path.join(top, ""))', ""),
    kills="CKPT-927",
)
names_with_blanks_unseen = patched(
    "Mount points are compared as the system writes them.",
    mutated(f"{_TREES}:_unescaped", "bytes([int(match[1], 8)])", "match[0]"),
    kills="CKPT-927",
)
mounted_meanwhile_unseen = patched(
    "What is mounted while a save writes goes with the old folder.",
    swap(f"{_PUBLISH}:check_unmounted", nothing),
    kills="CKPT-928",
)
deleted_at_the_source = patched(
    "What is mounted in a folder that is deleted is deleted at its source.",
    swap(f"{_TREES}:check_unmounted", nothing),
    swap("twinproof.checkpoint.manager:check_unmounted", nothing),
    kills="CKPT-929",
)
hidden_with_its_mount = patched(
    "Retention gives a step in which something is mounted a hidden name.",
    swap("twinproof.checkpoint.manager:check_unmounted", nothing),
    kills="CKPT-929",
)
links_followed_to_mounts = patched(
    "A link to a mount counts as one.",
    mutated(f"{_TREES}:mounts_in", "os.path.join(os.path.realpath(folder), name)", "os.path.realpath(path)"),
    kills="CKPT-929",
)
