"""What a power cut could destroy, derived from a recorded trace.

Killing a process keeps the page cache, so a missing fsync survives every crash test; only the order of the calls
shows it. The trace is replayed as a small model of the folder: which file lies where, which of its bytes no sync has
covered, and which folder entries no sync of the folder has covered.

Known limits: writes through a shared mapping are only known to come after the mmap; O_SYNC descriptors and sync(2) are
not credited.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from conformance.provers.faults.model import WRITE_CALLS, Event, Trace

__all__ = ["Violation", "order_violations"]

_CHANGES = {*WRITE_CALLS, "fflush", "ftruncate", "truncate", "fallocate", "mmap"}
_SYNCS = {"fsync", "fdatasync", "msync"}
_RENAME_EXCHANGE = 2

Kind = Literal["data_not_synced", "folder_not_synced", "index_before_data"]


@dataclass(frozen=True)
class Violation:
    """One way to lose data: ``path`` is what would be lost or damaged."""

    kind: Kind
    path: str
    detail: str


@dataclass
class _File:
    """A file that the trace changes: its names, changes that no sync covers yet, and its first change."""

    paths: set[str] = field(default_factory=set)
    dirty: list[Event] = field(default_factory=list)
    first: Event | None = None


@dataclass
class _Folder:
    """Entries that no sync of the folder covers yet, by path."""

    entries: dict[str, Event] = field(default_factory=dict)


class _Model:
    def __init__(self, index_suffix: str) -> None:
        self.index_suffix = index_suffix
        self.files: dict[int, _File] = {}
        self.folders: dict[str, _Folder] = {}
        self.shown_index: dict[str, Event] = {}
        self.found: dict[tuple[Kind, str], Violation] = {}

    def report(self, kind: Kind, path: str, detail: str) -> None:
        self.found.setdefault((kind, path), Violation(kind, path, detail))

    def is_index(self, path: str) -> bool:
        return path.endswith(self.index_suffix)

    def apply(self, event: Event) -> None:
        if event.created or event.call == "link":
            path = event.path2 if event.call == "link" else event.path
            self.add_entry(path, event)
        if event.call in _CHANGES:
            self.change(event)
        elif event.call in _SYNCS:
            self.sync(event)
        elif event.call == "syncfs":
            self.sync_everything(event)
        elif event.call == "rename":
            self.rename(event)
        elif event.call in ("unlink", "rmdir"):
            self.remove(event.path)

    def add_entry(self, path: str, event: Event) -> None:
        self.folders.setdefault(os.path.dirname(path), _Folder()).entries[path] = event
        if event.call == "open":
            # A number that a deleted file had may come back.
            self.files[event.inode] = _File({path})
        elif event.call == "link" and event.inode in self.files:
            self.files[event.inode].paths.add(path)

    def change(self, event: Event) -> None:
        file = self.files.setdefault(event.inode, _File({event.path}))
        file.dirty.append(event)
        file.first = file.first or event
        folder = os.path.dirname(event.path)
        if folder in self.shown_index and not self.is_index(event.path):
            self.report("index_before_data", event.path, "the file is written after its index is visible")

    def sync(self, event: Event) -> None:
        if event.inode in self.files:
            file = self.files[event.inode]
            file.dirty = [change for change in file.dirty if change.end > event.begin]
        if event.path in self.folders:
            folder = self.folders[event.path]
            folder.entries = {path: made for path, made in folder.entries.items() if made.end > event.begin}

    def sync_everything(self, event: Event) -> None:
        for file in self.files.values():
            file.dirty = [change for change in file.dirty if change.end > event.begin]
        for folder in self.folders.values():
            folder.entries = {path: made for path, made in folder.entries.items() if made.end > event.begin}

    def remove(self, path: str) -> None:
        self.folders.get(os.path.dirname(path), _Folder()).entries.pop(path, None)
        self.folders.pop(path, None)
        for inode, file in list(self.files.items()):
            file.paths.discard(path)
            if not file.paths:
                del self.files[inode]

    def rename(self, event: Event) -> None:
        exchange = bool(event.flags & _RENAME_EXCHANGE)
        self.check_shown(event, event.path, event.path2)
        if exchange:
            self.check_shown(event, event.path2, event.path)
        else:
            self.remove(event.path2)
        moves = {event.path: event.path2, **({event.path2: event.path} if exchange else {})}
        for file in self.files.values():
            file.paths = {_moved(path, moves) for path in file.paths}
        self.folders = {
            _moved(path, moves): _Folder({_moved(entry, moves): made for entry, made in folder.entries.items()})
            for path, folder in self.folders.items()
        }
        for source, target in moves.items():
            if not exchange:
                self.folders.get(os.path.dirname(source), _Folder()).entries.pop(source, None)
            self.folders.setdefault(os.path.dirname(target), _Folder()).entries[target] = event
        for path, _ in self.files_below(event.path2):
            if self.is_index(path):
                self.shown_index[os.path.dirname(path)] = event

    def check_shown(self, event: Event, source: str, target: str) -> None:
        """A rename makes everything below ``source`` visible under ``target``; all of it must be durable by then."""
        late = os.path.dirname(target) in self.shown_index and not self.is_index(target)
        for path, file in self.files_below(source):
            if file.dirty:
                shown = _moved(path, {source: target})
                self.report("data_not_synced", shown, "renamed before its last change was synced")
            if late and path == source and file.first:
                self.report("index_before_data", target, "renamed into place after its index")
        for path, folder in self.folders.items():
            if folder.entries and _is_below(path, source):
                detail = f"shown without a sync of the folder after {sorted(folder.entries)[0]}"
                self.report("folder_not_synced", _moved(path, {source: target}), detail)
        if self.is_index(target):
            self.check_index(event, os.path.dirname(target), source)

    def check_index(self, event: Event, folder: str, index: str) -> None:
        for path, file in self.files_below(folder):
            if path != index and not self.is_index(path) and file.dirty:
                self.report("index_before_data", path, "not synced when its index became visible")
        late = [path for path in self.folders.get(folder, _Folder()).entries if path != index and self.has_data(path)]
        if late:
            self.report("index_before_data", sorted(late)[0], "its folder was not synced when the index became visible")

    def files_below(self, folder: str) -> list[tuple[str, _File]]:
        return [(path, file) for file in self.files.values() for path in sorted(file.paths) if _is_below(path, folder)]

    def has_data(self, entry: str) -> bool:
        return any(file.first for _, file in self.files_below(entry))

    def finish(self) -> tuple[Violation, ...]:
        for file in self.files.values():
            if file.dirty:
                self.report("data_not_synced", min(file.paths), "no sync after its last change")
        for path, folder in self.folders.items():
            late = sorted(entry for entry in folder.entries if self.has_data(entry))
            if late:
                self.report("folder_not_synced", path, f"no sync of the folder after {late[0]} appeared in it")
        return tuple(self.found.values())


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder + "/")


def _moved(path: str, moves: dict[str, str]) -> str:
    for source, target in moves.items():
        if _is_below(path, source):
            return target + path[len(source) :]
    return path


def _index_in_place(events: Iterable[Event], index_suffix: str) -> dict[int, Event]:
    """The first change of every index that no rename moves: writing it is what makes it visible."""
    listed = list(events)
    renamed = [event.path for event in listed if event.call == "rename"]
    first: dict[int, Event] = {}
    for event in listed:
        written = event.call in _CHANGES and event.path.endswith(index_suffix)
        if written and not any(_is_below(event.path, source) for source in renamed):
            first.setdefault(event.inode, event)
    return first


def order_violations(trace: Trace, *, index_suffix: str = ".index.json") -> tuple[Violation, ...]:
    """Check that data is durable before it is visible, folders after, and an index after everything that it lists.

    Args:
        trace: of a run that was not cut short, rooted at or above the parent of what is published.
        index_suffix: the ending of file names that promise other files of the same folder.

    Returns:
        One violation per path and kind; empty for a sound order.
    """
    events = [event for event in trace if event.succeeded]
    in_place = _index_in_place(events, index_suffix)
    model = _Model(index_suffix)
    for event in events:
        if in_place.get(event.inode) is event:
            folder = os.path.dirname(event.path)
            model.check_index(event, folder, event.path)
            model.shown_index[folder] = event
        model.apply(event)
    return model.finish()
