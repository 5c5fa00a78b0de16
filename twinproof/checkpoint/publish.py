"""Make a finished checkpoint visible at one instant, on all ranks or on none.

Prevents a destroyed old checkpoint and a half-visible new one. Everything is written to a hidden folder beside the
target, the index last; then one rename (or one exchange of two folders) shows it.
"""

from __future__ import annotations

import ctypes
import errno
import json
import logging
import os
import re
import stat
import sys
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from twinproof.checkpoint.catalog import CHECKSUMS_KEY, read_index
from twinproof.checkpoint.format import INDEX_NAME, NATIVE_METADATA_NAME, SUFFIX, StrPath, is_checkpoint_name
from twinproof.checkpoint.trees import (
    Others,
    check_listable,
    check_unmounted,
    mounts_in,
    remove_tree,
    take_after,
    take_file_modes,
)
from twinproof.errors import (
    CheckpointExistsError,
    ConfigError,
    DistributedError,
    StorageError,
    TwinproofError,
    sendable,
)

__all__ = [
    "Leftover",
    "StagedFolder",
    "Staging",
    "all_or_none",
    "build_index",
    "changed_s",
    "find_leftovers",
    "from_first",
    "fsync_path",
    "gather",
    "gather_first",
    "raise_first",
    "rank_count_of",
    "reading",
    "remove_leftover",
    "scatter",
    "several_ranks",
    "storage_error",
    "together",
    "warn_of_leftovers",
    "write_file",
]

logger = logging.getLogger("twinproof.checkpoint")

T = TypeVar("T")

# A save's hidden names; what is deleted in the background (``manager``) is renamed in the same way.
_LEFTOVER = re.compile(r"\.(.*)\.(saving|previous|deleting)-[0-9a-f]{12}", re.DOTALL)
_RENAME_EXCHANGE = 2
# What says that a checkpoint is complete appears after everything else.
_LAST_NAMES = (INDEX_NAME, NATIVE_METADATA_NAME)
_AT_FDCWD = -100
_NO_FOLDER_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}
_NO_EXCHANGE = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP}


def storage_error(error: OSError, doing: str, path: StrPath) -> StorageError:
    """The named form of an OSError; keeps ``errno``."""
    expected = "no error of the system"
    if error.errno == errno.EMFILE and hasattr(os, "sysconf"):
        expected = f"a descriptor below the limit of {os.sysconf('SC_OPEN_MAX')} (ulimit -n), all of which are in use"
    elif error.errno == errno.ENAMETOOLONG:
        # As NAME.previous-<12 digits> behind a dot.
        expected = "a name shorter than the file system's limit by 23 bytes (232 of 255): a save hides others beside it"
    result = StorageError(
        f"{doing} failed: {error.strerror}",
        got=errno.errorcode.get(error.errno or 0, error.errno),
        expected=expected,
        where=os.fspath(path),
    )
    result.errno, result.strerror, result.filename = error.errno, error.strerror, os.fspath(path)
    return result


@contextmanager
def named_errors(doing: str, path: StrPath) -> Iterator[None]:
    """What the file system refuses inside, as StorageError.

    Torch's writer in C++ says behind such an error that a position is wrong: what came before that is told.
    """
    # What a caller is handling stands behind whatever is raised here, and has nothing to do with it.
    outside = sys.exc_info()[1]
    try:
        yield
    except TwinproofError:
        raise
    except (OSError, RuntimeError) as error:
        seen: BaseException | None = error
        while seen is not outside and seen is not None and not isinstance(seen, OSError):
            seen = seen.__cause__ or seen.__context__
        if seen is outside or not isinstance(seen, OSError):
            raise
        raise storage_error(seen, doing, path) from error


def fsync_path(path: StrPath) -> None:
    """Fsync a file or a folder by name. A folder that its file system cannot sync, as of some mounts, is logged."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC or not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise
        logger.warning("%s cannot be synced by its file system: a power cut may undo what was shown there", path)
    finally:
        os.close(descriptor)


def _sync_shown(shown: StrPath, folders: Iterable[StrPath]) -> None:
    """Fsync the folders that list what was just shown. Raises StorageError, which says that it is there."""
    try:
        for folder in folders:
            fsync_path(folder)
    except OSError as error:
        named = storage_error(error, "it is shown, and a power cut may undo that: syncing the folder above it", shown)
        raise named from error


def _write_all(descriptor: int, content: memoryview) -> None:
    # Short writes are continued.
    while content:
        content = content[os.write(descriptor, content) :]


def _create(path: StrPath, pieces: Iterable[bytes | memoryview], *, durable: bool, mode: int = 0o666) -> None:
    """Create a file with this content. Raises OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        for piece in pieces:
            _write_all(descriptor, memoryview(piece))
        if durable:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(path: str, pieces: Iterable[bytes | memoryview], *, durable: bool) -> None:
    """Write one file under a temporary name and rename it into place.

    Raises:
        StorageError: ``path`` is unchanged, unless it says that the file is shown.
    """
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, f".{name}.saving-{_hex()}")
    try:
        is_there = os.path.isfile(path)
        _create(temporary, pieces, durable=durable, mode=0o600 if is_there else 0o666)
        if is_there:
            # Whoever could not read the old file cannot read the new one, nor while it is written.
            take_after(temporary, path)
        os.rename(temporary, path)
        if durable:
            _sync_shown(path, [os.path.dirname(path) or "."])
    except BaseException as error:
        if os.path.exists(temporary):
            os.unlink(temporary)
        if isinstance(error, OSError) and not isinstance(error, TwinproofError):
            raise storage_error(error, "writing", path) from error
        raise


def _exchange(a: Path, b: Path) -> bool:
    """Swap two folders atomically; False where kernel or file system cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _NO_EXCHANGE:
        return False
    raise OSError(code, os.strerror(code), os.fspath(b))


# What interrupted saves leave beside their targets.


@dataclass(frozen=True)
class Leftover:
    """A hidden file or folder that a save made and did not live to remove.

    Attributes:
        path: where it is.
        target: what the save was to make, or replace.
        kind: ``saving``, ``previous`` or ``deleting``.
        age_s: seconds since something in it was last changed.
        is_needed: it is the only copy of a checkpoint: its target is gone. Renaming it brings the checkpoint back.
    """

    path: Path
    target: Path
    kind: str
    age_s: float
    is_needed: bool


def find_leftovers(folder: Path, name: str | None = None) -> list[Leftover]:
    """What interrupted saves left in a folder; with ``name``, of saves of that name. Links are never ours."""
    found = []
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        match = _LEFTOVER.fullmatch(entry.name)
        if match is None or (name is not None and match[1] != name) or entry.is_symlink():
            continue
        if entry.is_file() and match[2] != "saving":
            continue
        path = Path(entry.path)
        target = path.with_name(match[1]) if match[1] else path.parent
        is_needed = match[2] == "previous" and not target.exists()
        found.append(Leftover(path, target, match[2], time.time() - changed_s(path), is_needed))
    return found


def changed_s(path: Path) -> float:
    """When something in a folder was last changed, or the file was."""
    return max(map(_changed_s, _below(path)))


def _below(path: Path) -> Iterator[StrPath]:
    """The path and everything in it; a folder that vanishes meanwhile is passed over, as its save is at work."""
    yield path
    for folder, folders, files in os.walk(path):
        yield from (os.path.join(folder, name) for name in (*folders, *files))


def _changed_s(path: StrPath) -> float:
    try:
        return os.lstat(path).st_mtime
    except FileNotFoundError:
        return time.time()  # It vanished a moment ago: a save is still at work.


def remove_leftover(leftover: Leftover) -> None:
    """Delete it. Raises StorageError, also where something is mounted inside; ConfigError for the only copy."""
    if leftover.is_needed:
        raise ConfigError(
            "this is the only copy of a checkpoint: rename it back",
            got="nothing at the target",
            expected=leftover.target,
            where=leftover.path,
        )
    try:
        remove_tree(leftover.path) if leftover.path.is_dir() else leftover.path.unlink()
    except OSError as error:
        raise storage_error(error, "deleting", leftover.path) from error


def warn_of_leftovers(folder: Path, name: str) -> None:
    """Log what earlier saves of this name left."""
    found = find_leftovers(folder, name)
    spare = [str(each.path) for each in found if not each.is_needed]
    if spare:
        logger.warning("left over from interrupted saves, safe to delete where none is running: %s", ", ".join(spare))
    for each in found:
        if each.is_needed:
            logger.warning("%s is the only copy of the checkpoint %s: rename it back", each.path, each.target)


def _missing_parents(target: Path) -> list[Path]:
    """Folders above the target that do not exist yet, the innermost first: their names must become durable too."""
    return [parent for parent in target.parents if not parent.exists()]


def _works_in(folder: Path) -> bool:
    """Whether the working folder of this process is the folder, or lies in it."""
    try:
        return Path(os.path.realpath(os.getcwd())).is_relative_to(folder)
    except FileNotFoundError:
        return False  # It was removed, and is nowhere.


def _inode(path: Path) -> int | None:
    """What tells a file or folder from others whatever its name is; None where there is none."""
    try:
        return os.lstat(path).st_ino
    except FileNotFoundError:
        return None


def _hex() -> str:
    return uuid.uuid4().hex[:12]


def _resolved(path: Path) -> Path:
    """The path without links. Raises OSError for one through ``..`` of what is not there, which no reader finds."""
    for place, part in enumerate(path.parts):
        if part == "..":
            os.stat(Path(*path.parts[:place]))
    return Path(os.path.realpath(path))


class Staging:
    """A hidden folder that becomes ``target``.

    Args:
        target: folder of the checkpoint; parents are made.
        durable: fsync folders and the index, so that a power cut keeps either the old or the new checkpoint.
        overwrite: whether a checkpoint that is already there is replaced.
        is_indexed: whether an index says which safetensors files are the checkpoint's. Without one all are.

    Raises:
        CheckpointExistsError: something is there and may not, or cannot atomically, be replaced; or files of others
            that would count as the checkpoint's. Nothing was touched.
        StorageError: the folder cannot be looked at, or made.
    """

    def __init__(self, target: Path, *, durable: bool = True, overwrite: bool = True, is_indexed: bool = True) -> None:
        self.durable = durable
        with named_errors("looking at the folder", target):
            self.target = _resolved(target)
            self.old_names = self._old_checkpoint()
            if not is_indexed:
                self._check_others()
        if self.old_names and not overwrite:
            raise CheckpointExistsError(
                "a checkpoint is already there",
                got=self.old_names[:5],
                expected="overwrite=True",
                where=str(self.target),
            )
        self._others: Others | None = None
        # Where the folder that was replaced lies until it is deleted.
        self._replaced: Path | None = None
        self._is_unsynced = False
        try:
            self.new_parents = _missing_parents(self.target)
            self.target.parent.mkdir(parents=True, exist_ok=True)
            self.in_place = self._is_pinned()
            if self.in_place and self.old_names:
                raise CheckpointExistsError(
                    "a checkpoint in a folder that cannot be renamed cannot be replaced atomically",
                    got=[*self.old_names[:5], *mounts_in(self.target)[:5]],
                    expected="no checkpoint there and nothing mounted, or another folder",
                    where=str(self.target),
                )
            if not self.in_place:
                self._check_kept()
            lacking = self._make_folder()
            if lacking and not self.old_names and os.access(self.target, os.W_OK | os.X_OK):
                # The folder that was prepared has what a new one cannot be given: nothing is there to be replaced.
                os.rmdir(self.folder)
                self.in_place = True
                lacking = self._make_folder()
        except OSError as error:
            # No call comes behind the one that makes the folder: one that failed would leave it.
            raise (
                error
                if isinstance(error, TwinproofError)
                else storage_error(error, "making the staging folder", self.target)
            ) from error

    def _make_folder(self) -> list[str]:
        """Make the hidden folder; what it could not be given of the one that it replaces, in words."""
        parent, name = (self.target, "") if self.in_place else (self.target.parent, self.target.name)
        warn_of_leftovers(parent, name)
        self.folder = parent / f".{name}.saving-{_hex()}"
        if self.in_place or not self.target.exists():
            self.folder.mkdir()
            return []
        # Files take the group from the start. Whoever may not look into the old folder may not look into this one.
        self.folder.mkdir(0o700)
        try:
            return take_after(self.folder, self.target, is_private=True)
        except BaseException:
            self.discard()
            raise

    def _old_checkpoint(self) -> list[str]:
        if not self.target.exists():
            return []
        if not self.target.is_dir():
            raise CheckpointExistsError(
                "the target is not a folder", got="a file", expected="a folder, or nothing", where=str(self.target)
            )
        try:
            index = read_index(self.target)
        except TwinproofError:
            index = None  # A broken index is replaced with the rest.
        listed = set(index[0].values()) if index else set()
        return sorted(name for name in os.listdir(self.target) if is_checkpoint_name(name) or name in listed)

    def _check_others(self) -> None:
        names = os.listdir(self.target) if self.target.is_dir() else []
        others = {name for name in names if name.endswith(SUFFIX) and not name.startswith(".")} - set(self.old_names)
        if others:
            raise CheckpointExistsError(
                "files that a save keeps would be read as parts of a checkpoint without an index",
                got=sorted(others)[:5],
                expected="a folder without other safetensors files",
                where=str(self.target),
            )

    def _check_kept(self) -> None:
        # What cannot be kept is told before anything is written, not behind it.
        try:
            check_listable(self.target)
        except OSError as error:
            doing = "looking into a folder of others, which a save keeps,"
            raise storage_error(error, doing, error.filename or self.target) from error

    def _is_pinned(self) -> bool:
        # A mount point, or a folder in a parent that we may not write, cannot be renamed. Nor may one with a mount
        # inside, which would move along and be deleted at its source, or one in which this process works: it would go
        # on working in the old one, which is removed.
        if not self.target.exists():
            return False
        parent = self.target.parent
        is_mounted = os.path.ismount(self.target) or bool(mounts_in(self.target))
        is_fixed = is_mounted or not os.access(parent, os.W_OK | os.X_OK)
        return is_fixed or _works_in(self.target)

    def publish(self, index: bytes | None) -> None:
        """Write the index, then show everything at once.

        Raises:
            StorageError: the old checkpoint is intact, unless it says that the new one is shown.
        """
        try:
            if index is not None:
                _create(self.folder / INDEX_NAME, [index], durable=self.durable)
            self._publish_in_place() if self.in_place else self._publish_folder()
        except OSError as error:
            if isinstance(error, TwinproofError):
                raise
            raise storage_error(error, "publishing the checkpoint", self.target) from error

    def _sync(self, path: Path) -> None:
        if self.durable:
            fsync_path(path)

    def _publish_folder(self) -> None:
        others = self._take_over() if self.target.exists() else None
        self._sync(self.folder)
        if others is None:
            os.rename(self.folder, self.target)
            self._sync_above()
            return
        replaced = self._replace()
        others.bring_over(replaced, self.target)
        self._sync_above()
        self._drop(replaced)

    def _replace(self) -> Path:
        """Show the new folder in the place of the old one, and say where that lies now.

        An interrupt may come behind a call that has done its work, so what lies where says what was done.
        """
        own, previous = _inode(self.folder), self.target.with_name(f".{self.target.name}.previous-{_hex()}")
        try:
            if _exchange(self.folder, self.target):
                self._replaced = self.folder
            else:
                # The target is absent for an instant; a crash then leaves the old one under this name.
                os.rename(self.target, previous)
                os.rename(self.folder, self.target)
                self._replaced = previous
        except BaseException:
            found = _inode(self.folder)
            if found is None:
                self._replaced = previous
            elif found != own:
                self._replaced = self.folder
            elif _inode(previous) is not None and _inode(self.target) is None:
                os.rename(previous, self.target)
            raise
        return self._replaced

    def _sync_above(self) -> None:
        if not self.durable:
            return
        try:
            _sync_shown(self.target, [self.target.parent, *(parent.parent for parent in self.new_parents)])
        except OSError:
            # A power cut may bring back what was replaced.
            self._is_unsynced = True
            raise

    def _take_over(self) -> Others:
        """Give the new folder what it takes over from the one that it replaces; what others keep there."""
        # It may have been mounted since the save began.
        check_unmounted(self.target)
        take_file_modes(self.folder, self.target, self.old_names)
        self._others = others = Others(self.old_names, self._sync)
        try:
            others.carry(self.target, self.folder)
        except OSError as error:
            doing = "publishing the checkpoint beside a file of others"
            raise storage_error(error, doing, error.filename or self.target) from error
        lacking = take_after(self.folder, self.target)
        if lacking:
            logger.warning("%s is replaced by a folder that cannot be given its %s", self.target, ", ".join(lacking))
        return others

    def _publish_in_place(self) -> None:
        names = sorted(os.listdir(self.folder), key=lambda name: (name in _LAST_NAMES, name))
        self._sync(self.folder)
        shown: list[str] = []
        try:
            for name in names:
                if name in _LAST_NAMES:
                    self._sync(self.target)
                # Noted first: an interrupt may come behind the call.
                shown.append(name)
                os.rename(self.folder / name, self.target / name)
            self._sync(self.target)
        except BaseException:  # An interrupt, too.
            # Files of a save that failed would keep the next one out. The index goes first.
            for name in reversed(shown):
                if _inode(self.folder / name) is None:
                    os.rename(self.target / name, self.folder / name)
            raise
        self._drop(self.folder)

    def _drop(self, folder: Path) -> None:
        # The new checkpoint is already in force; failing to clear what it leaves must not make the save fail.
        try:
            remove_tree(folder) if self._others is None else self._others.settle(folder, self.target)
        except OSError as error:
            logger.warning("the replaced checkpoint could not be deleted: %s: %s", folder, error)

    def discard(self) -> None:
        """Remove the staging folder after a failed save; where the new one was shown already, what it replaced.

        Where the folder above could not be synced, what was replaced stays under its hidden name.
        """
        if self._is_unsynced:
            return
        if self._replaced is not None:
            self._drop(self._replaced)
            return
        try:
            remove_tree(self.folder)
        except OSError:
            return  # The error that ended the save is told.


@dataclass(frozen=True)
class StagedFolder:
    """The hidden folder as an engine sees it: where it is, and whether files must be synced."""

    path: Path
    durable: bool

    def put(self, name: str, pieces: Iterable[bytes | memoryview]) -> None:
        """Write one whole file of the folder. Raises StorageError."""
        write_file(os.fspath(self.path / name), pieces, durable=self.durable)


def build_index(
    weight_map: Mapping[str, str], total_size_bytes: int, checksums: Mapping[str, str] | None = None
) -> bytes:
    """``model.safetensors.index.json``: names sorted, two spaces of indentation, one newline at the end.

    Without checksums it is torch's index, byte for byte.
    """
    metadata: dict[str, Any] = {"total_size": total_size_bytes}
    if checksums is not None:
        metadata[CHECKSUMS_KEY] = dict(checksums)
    content = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
    return json.dumps(content, indent=2, ensure_ascii=False).encode() + b"\n"


# Agreement between ranks. A group of None is this process alone.


def rank_count_of(group: dist.ProcessGroup | None) -> int:
    """Ranks of a group."""
    return 1 if group is None else dist.get_world_size(group)


def several_ranks(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The group, or the default one where there are several ranks; None for a process alone."""
    if group is not None or not (dist.is_available() and dist.is_initialized()):
        return group
    return dist.group.WORLD if dist.get_world_size() > 1 else None


@contextmanager
def reading(files: Collection[str], check: Callable[[], object]) -> Iterator[None]:
    """Around what reads files whose headers are known: an error that comes of other files there is told as that.

    Args:
        files: paths as they are opened.
        check: raises where the files are no longer those whose headers were read.

    Raises:
        StorageError: the system refused one of the files. CorruptionError: ``check``'s.
    """
    try:
        yield
    except TwinproofError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.filename in files:
            raise storage_error(error, "reading", error.filename) from error
        check()
        raise


def gather(mine: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """This rank's object and every other's, in rank order."""
    if group is None:
        return [mine]
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    return everyone


def on_any_rank(is_so: bool, group: dist.ProcessGroup | None) -> bool:
    """Whether something is so on any rank. One number travels, where a gathered object passes every rank."""
    if group is None:
        return is_so
    found = torch.tensor([is_so], dtype=torch.int32, device="cpu")
    dist.all_reduce(found, dist.ReduceOp.MAX, group)
    return bool(found.item())


def gather_first(mine: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """On rank 0 every rank's object, in rank order; nothing on the others."""
    if group is None:
        return [mine]
    everyone: list[Any] | None = [None] * dist.get_world_size(group) if dist.get_rank(group) == 0 else None
    dist.gather_object(mine, everyone, group=group, group_dst=0)
    return everyone or []


def scatter(messages: Sequence[Any], group: dist.ProcessGroup | None) -> Any:
    """Rank 0 of the group gives each rank its message; the messages of other ranks are not looked at."""
    if group is None:
        return messages[0]
    received: list[Any] = [None]
    dist.scatter_object_list(received, list(messages) or None, group_src=0, group=group)
    return received[0]


def from_first(make: Callable[[], Sequence[Any]], group: dist.ProcessGroup | None) -> Any:
    """What rank 0 makes for this rank; an error of ``make`` is raised there, and told to every other rank."""
    messages: Sequence[Any] = ()
    failure: BaseException | None = None
    if group is None or dist.get_rank(group) == 0:
        try:
            messages = make()
        except BaseException as error:  # Also what ends a program: the others would wait for this rank.
            failure, messages = error, [sendable(error)] * rank_count_of(group)
    received = scatter(messages, group)
    if failure is not None:
        raise failure
    raise_first([received] if isinstance(received, BaseException) else [])
    return received


def raise_first(failures: Sequence[BaseException | None]) -> None:
    """Raise DistributedError for the first rank that failed, with its error as the cause."""
    for rank, failure in enumerate(failures):
        if failure is not None:
            raise DistributedError(
                "another rank failed",
                got=f"{type(failure).__name__}: {failure}",
                expected="no failure on any rank",
                where=f"rank {rank}",
            ) from failure


def together(step: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """Run a step on every rank and learn of every rank's failure, so that all go on or all stop.

    Raises:
        DistributedError: another rank failed; the rank at fault raises its own error.
    """
    if group is None:
        return step()
    failure: BaseException | None = None
    try:
        result = step()
    except BaseException as error:  # Also what ends a program: the others would wait for this rank.
        failure = error
    if on_any_rank(failure is not None, group):
        failures = gather(sendable(failure), group)
        if failure is not None:
            raise failure
        raise_first(failures)
    return result


@contextmanager
def all_or_none(group: dist.ProcessGroup | None, undo: Callable[[], object]) -> Iterator[None]:
    """``together`` for the block inside; ``undo`` on every rank where it fails on any."""
    failure: BaseException | None = None
    try:
        yield
    except BaseException as error:
        failure = error

    def told() -> None:
        if failure is not None:
            raise failure

    try:
        together(told, group)
    except BaseException:
        undo()
        raise
