"""The states that a power cut may leave on disk, generated from the recorded calls of a program that ran to its end.

The model is that of a file system that keeps the order of its names, as ext4, XFS and btrfs do with their journals:
changes of names survive as a prefix of the order in which they were made, and a sync of a folder forces the prefix up
to its own last change. Data has no order: of the writes, truncations and allocations of a file that no sync of the file
covers, any may be lost, whole or in half, before or after the file got its name.

A call that had not returned counts as made or not made. Known limits, beside those of :mod:`.order`: a write at the
file position counts as an append; the bytes of a file are those that it has at the end of the run, so a byte that is
written twice has its last value.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from conformance.provers.faults.model import WRITE_CALLS, Event, Trace

__all__ = ["DiskState", "Snapshot", "power_cut_states"]

_RENAME_EXCHANGE = 2
_DATA = {*WRITE_CALLS, "ftruncate", "truncate", "fallocate"}
_NAMES = {"rename", "link", "unlink", "mkdir", "rmdir", "symlink"}
_FILE_SYNCS = {"fsync", "fdatasync", "msync"}

# A file's identity: its inode, and how often that number had been given out before.
Identity = tuple[int, int]


@dataclass(frozen=True)
class Snapshot:
    """What lies below a root: contents by path and by inode, and the folders."""

    files: Mapping[str, tuple[int, bytes]]
    folders: frozenset[str]

    @staticmethod
    def of(root: Path) -> Snapshot:
        """Take one; paths are absolute."""
        files, folders = {}, {str(root)}
        for path in root.rglob("*"):
            if path.is_dir() and not path.is_symlink():
                folders.add(str(path))
            elif path.is_file():
                files[str(path)] = path.stat().st_ino, path.read_bytes()
        return Snapshot(files, frozenset(folders))


@dataclass(frozen=True)
class DiskState:
    """What may be there after a power cut.

    Attributes:
        files: path -> content.
        folders: paths.
        returned: whether every call of the program had returned: what it promised must hold.
        is_whole: whether all data of the files is there, whatever became of their names.
        where: the instant, and what was lost, in words.
        below: the file or folder that the state is about.
    """

    files: Mapping[str, bytes]
    folders: frozenset[str]
    returned: bool
    is_whole: bool
    where: str
    below: str

    def put(self, target: Path) -> None:
        """Make it at ``target``, where nothing is; the parent is there."""
        for folder in sorted(self.folders):
            Path(os.path.normpath(target / os.path.relpath(folder, self.below))).mkdir()
        for path, content in self.files.items():
            Path(os.path.normpath(target / os.path.relpath(path, self.below))).write_bytes(content)


@dataclass
class _Tree:
    """Names: path -> identity of a file, or None for a folder."""

    entries: dict[str, Identity | None]

    def apply(self, event: Event, made: Mapping[int, Identity]) -> None:
        """One change of names; ``made`` says which file an event created or linked."""
        if event.call == "mkdir":
            self.entries[event.path] = None
        elif event.call in ("unlink", "rmdir"):
            self.entries.pop(event.path, None)
        elif event.call == "link":
            self.entries[event.path2] = made[event.begin]
        elif event.call == "rename":
            self._rename(event)
        elif event.call != "symlink":
            self.entries[event.path] = made[event.begin]

    def _rename(self, event: Event) -> None:
        moves = {event.path: event.path2}
        if event.flags & _RENAME_EXCHANGE:
            moves[event.path2] = event.path
        else:
            self.entries = {path: node for path, node in self.entries.items() if not _is_below(path, event.path2)}
        self.entries = {_moved(path, moves): node for path, node in self.entries.items()}


@dataclass
class _File:
    """Data changes and opens of one file in order, the syncs that cover them, and its content before and after."""

    before: bytes
    after: bytes | None
    changes: list[Event] = field(default_factory=list)
    syncs: list[Event] = field(default_factory=list)

    def unsynced(self, instant: int) -> list[Event]:
        """Changes begun by then that no sync, ended by then, covers."""
        covers = max((sync.begin for sync in self.syncs if sync.end <= instant), default=-1)
        changes = (change for change in self.changes if change.call != "open" or change.flags & os.O_TRUNC)
        return [change for change in changes if change.begin <= instant and change.end > covers]

    def content(self, instant: int, lost: set[int], torn: int | None) -> bytes:
        """The bytes without the changes that are lost; of a torn one its first half is there."""
        data, position = bytearray(self.before), len(self.before)
        for change in (change for change in self.changes if change.begin <= instant):
            if change.call == "open":
                position = len(data) if change.flags & os.O_APPEND else 0
                if change.flags & os.O_TRUNC and change.begin not in lost:
                    data.clear()
                continue
            if change.call in WRITE_CALLS:
                begin = position if change.offset < 0 else change.offset
                position = begin + change.result
            if change.begin in lost:
                continue
            if change.call in WRITE_CALLS:
                count = change.result // 2 if change.begin == torn else change.result
                written = (self.after or b"")[begin : begin + count].ljust(count, b"\0")
                data.extend(bytes(max(0, begin + count - len(data))))
                data[begin : begin + count] = written
            elif change.call == "fallocate":
                data.extend(bytes(max(0, change.offset + change.size - len(data))))
            else:
                del data[change.size :]
                data.extend(bytes(change.size - len(data)))
        return bytes(data)


class _Run:
    """A trace, sorted into changes of names and of data."""

    def __init__(self, trace: Trace, before: Snapshot, after: Snapshot) -> None:
        self.events = [event for event in sorted(trace, key=lambda event: event.end) if event.succeeded]
        self.names: list[Event] = []
        self.made: dict[int, Identity] = {}
        self.files: dict[Identity, _File] = {}
        self.tree: dict[str, Identity | None] = dict.fromkeys(before.folders)
        current: dict[int, int] = {}
        for path, (inode, content) in before.files.items():
            self.tree[path] = (inode, 0)
            self.files[inode, 0] = _File(content, content)
        for event in self.events:
            if event.created and event.call == "open":
                current[event.inode] = current.get(event.inode, 0) + 1
                self.files[event.inode, current[event.inode]] = _File(b"", None)
            identity = event.inode, current.get(event.inode, 0)
            if event.call in _NAMES or event.created:
                self.names.append(event)
                self.made[event.begin] = identity
            if event.call in (*_DATA, "open") and identity in self.files:
                self.files[identity].changes.append(event)
            elif event.call in _FILE_SYNCS and identity in self.files:
                self.files[identity].syncs.append(event)
        for inode, content in after.files.values():
            if (inode, current.get(inode, 0)) in self.files:
                self.files[inode, current.get(inode, 0)].after = content

    def forced(self, instant: int) -> int:
        """How many changes of names must have survived: a sync of a folder, ended by then, covers its own last one."""
        forced = 0
        for sync in (e for e in self.events if e.call in ("fsync", "fdatasync", "syncfs") and e.end <= instant):
            for number, change in enumerate(self.names, 1):
                folders = {os.path.dirname(path) for path in (change.path, change.path2) if path}
                if change.end <= sync.begin and (sync.call == "syncfs" or sync.path in folders):
                    forced = max(forced, number)
        return forced


def power_cut_states(trace: Trace, before: Snapshot, after: Snapshot, *, below: str) -> Iterator[DiskState]:
    """Every distinct state of the files at and below a path, at every instant of a run.

    Of the unsynced changes of the files that are visible there, none is lost, all are, each one alone, all but each
    one, and each one is torn.

    Args:
        trace: of a run that was not cut short, rooted at or above the parent of ``below``.
        before: the root before the run.
        after: the root after it.
        below: the file or folder that a reader will open.
    """
    run = _Run(trace, before, after)
    instants = [0, *(event.end for event in run.events)]
    seen: set[object] = set()
    for number, instant in enumerate(instants):
        possible = sum(change.begin <= instant for change in run.names)
        tree = _Tree(dict(run.tree))
        for count in range(possible + 1):
            if count:
                tree.apply(run.names[count - 1], run.made)
            if count < run.forced(instant):
                continue
            visible = {path: node for path, node in tree.entries.items() if _is_below(path, below)}
            for lost, torn, words in _losses(run, visible, instant):
                files = {
                    path: run.files[node].content(instant, lost, torn)
                    for path, node in visible.items()
                    if node is not None
                }
                folders = frozenset(path for path, node in visible.items() if node is None)
                returned = number == len(instants) - 1
                key = (tuple(sorted(files.items())), folders, returned, not lost and torn is None)
                if key not in seen:
                    seen.add(key)
                    last = run.names[count - 1] if count else None
                    kept = "no change of names" if last is None else f"names up to {last.call} {_base(last)}"
                    where = f"cut after call {number}: {kept} kept, {words}"
                    yield DiskState(files, folders, returned, not lost and torn is None, where, below)


def _losses(
    run: _Run, visible: Mapping[str, Identity | None], instant: int
) -> Iterator[tuple[set[int], int | None, str]]:
    files = {node for node in visible.values() if node is not None}
    unsynced = [change for node in files for change in run.files[node].unsynced(instant)]
    everything = {change.begin for change in unsynced}
    yield set(), None, "no data lost"
    if everything:
        yield everything, None, "all unsynced data lost"
    for change in unsynced:
        name = f"{change.call} to {_base(change)}"
        yield {change.begin}, None, f"{name} lost"
        yield everything - {change.begin}, None, f"all unsynced data lost but a {name}"
        if change.call in WRITE_CALLS:
            yield set(), change.begin, f"{name} torn"


def _base(event: Event) -> str:
    return os.path.basename(event.path2 or event.path)


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder + "/")


def _moved(path: str, moves: Mapping[str, str]) -> str:
    for source, target in moves.items():
        if _is_below(path, source):
            return target + path[len(source) :]
    return path
