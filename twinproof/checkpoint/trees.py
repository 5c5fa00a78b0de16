"""Folders that a save replaces or deletes: who may use them, what others keep there, and what is mounted inside.

Prevents the loss of what is not the checkpoint's: access of a group, files that another program writes meanwhile, and
the content of other file systems.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import stat
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from twinproof.checkpoint.format import StrPath, is_checkpoint_name

__all__ = ["Others", "check_listable", "check_unmounted", "mounts_in", "remove_tree", "take_after", "take_file_modes"]

logger = logging.getLogger("twinproof.checkpoint")

_MOUNTS = "/proc/self/mountinfo"
_NO_MODES = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS}
_NO_LINK = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EMLINK, errno.EXDEV, errno.ENOSYS}
# How often a folder is looked at again into which somebody writes while it is cleared.
_LOOKS = 3


# What is mounted.


def mounts_in(path: StrPath) -> list[str]:
    """Mount points at a path and below it, sorted; none where the system does not list them.

    ``os.path.ismount`` does not see a bind mount of the same file system. Source: proc(5), ``mountinfo``, field 5.
    """
    try:
        lines = Path(_MOUNTS).read_bytes().splitlines()
    except OSError:
        return []
    # A link itself is no mount, wherever it leads.
    folder, name = os.path.split(path)
    top = os.path.join(os.path.realpath(folder), name)
    points = {os.fsdecode(re.sub(rb"\\([0-7]{3})", _unescaped, line.split(b" ")[4])) for line in lines}
    return sorted(point for point in points if point == top or point.startswith(os.path.join(top, "")))


def _unescaped(match: re.Match[bytes]) -> bytes:
    return bytes([int(match[1], 8)])


def check_unmounted(path: StrPath) -> None:
    """Demand that nothing is mounted at a path or below it. Raises OSError, EBUSY, with the first mount point."""
    mounted = mounts_in(path)
    if mounted:
        raise OSError(errno.EBUSY, "something is mounted there", mounted[0])


def remove_tree(path: StrPath) -> None:
    """Delete a folder of ours with everything in it, also where folders in it are read-only.

    Raises:
        OSError: the system refused; EBUSY where something is mounted inside, and nothing is deleted then.
    """
    check_unmounted(path)
    try:
        shutil.rmtree(path)
    except PermissionError:
        _open_up(path)
        shutil.rmtree(path)


def _open_up(path: StrPath) -> None:
    # Each folder before it is listed, so that the next ones are found.
    _let_in(path)
    for folder, folders, _ in os.walk(path):
        for name in folders:
            _let_in(os.path.join(folder, name))


def _let_in(folder: StrPath) -> None:
    """Let the owner of a folder list and change it; where it is somebody else's, the next call says so."""
    status = os.lstat(folder)
    if stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_IRWXU != stat.S_IRWXU:
        try:
            os.chmod(folder, stat.S_IMODE(status.st_mode) | stat.S_IRWXU)
        except PermissionError:
            return


# Who may use what is new.


def _mode_after(status: os.stat_result, gid: int) -> int:
    # Nobody gets more access than before. Members of another group were among the others.
    mode = stat.S_IMODE(status.st_mode)
    if gid == status.st_gid:
        return mode
    return mode & ~(stat.S_ISGID | stat.S_IRWXG) | mode & (mode & stat.S_IRWXO) << 3


def _give_mode(path: StrPath, mode: int) -> None:
    if stat.S_IMODE(os.stat(path).st_mode) == mode:
        return
    try:
        os.chmod(path, mode)
    except OSError as error:
        # On a file system without modes all have one.
        if error.errno not in _NO_MODES:
            raise


def take_after(new: StrPath, old: StrPath, *, is_private: bool = False) -> list[str]:
    """Give a file or folder of ours group, owner, extended attributes (with ACLs) and mode of the one it replaces.

    Args:
        new: what takes the place.
        old: what it replaces.
        is_private: nobody but the owner is let in for now; what is made inside takes the group all the same.

    Returns:
        What it could not be given, in words.

    Raises:
        OSError: one of the two cannot be looked at, or the mode not be changed where there are modes.
    """
    status = os.stat(old)
    lacking = _take_owners(new, status) + _take_attributes(new, old)
    mode = _mode_after(status, os.stat(new).st_gid)
    mode = mode & stat.S_ISGID | stat.S_IRWXU if is_private else mode
    _give_mode(new, mode)
    found = stat.S_IMODE(os.stat(new).st_mode)
    # The system drops the bit of the group in silence for who is not in it.
    is_lacking = mode & ~found if is_private else mode != found
    return [*lacking, f"mode {mode:04o}"] if is_lacking else lacking


def _take_owners(new: StrPath, status: os.stat_result) -> list[str]:
    lacking = []
    if os.stat(new).st_gid != status.st_gid:
        try:
            os.chown(new, -1, status.st_gid)
        except OSError:
            lacking.append(f"group {status.st_gid}")
    if os.stat(new).st_uid != status.st_uid:
        try:
            os.chown(new, status.st_uid, -1)
        except OSError:
            lacking.append(f"owner {status.st_uid}")
    return lacking


def _take_attributes(new: StrPath, old: StrPath) -> list[str]:
    wanted, found, lacking = _attributes(old), _attributes(new), []
    if not os.path.isdir(old):
        # What users note of a file they note of its content.
        wanted = {name: value for name, value in wanted.items() if not name.startswith("user.")}
    for name, value in wanted.items():
        if found.get(name) != value:
            try:
                os.setxattr(new, name, value)
            except OSError:
                lacking.append(name)
    for name in found.keys() - wanted.keys():
        # The folder above gives what is made in it an ACL.
        if name.startswith("system.posix_acl_"):
            os.removexattr(new, name)
    # The rest is the system's own, as SELinux's labels.
    return [name for name in lacking if name.startswith(("user.", "system."))]


def _attributes(path: StrPath) -> dict[str, bytes]:
    try:
        return {name: os.getxattr(path, name) for name in os.listxattr(path)}
    except (AttributeError, OSError):
        return {}  # Neither every system nor every file system has them.


def take_file_modes(new: StrPath, old: StrPath, names: Collection[str]) -> None:
    """Let nobody read files in the folder ``new`` who could not read those that they replace.

    A file takes after the one of the same name in ``old``; another one has no bit that one of ``names`` lacks there.

    Raises:
        OSError: the system refused.
    """
    limit = stat.S_IRWXU | stat.S_IRWXG | stat.S_IRWXO
    replaced = {name for name in names if os.path.isfile(os.path.join(old, name))}
    for name in replaced:
        limit &= stat.S_IMODE(os.stat(os.path.join(old, name)).st_mode) | stat.S_IRWXU
    for name in os.listdir(new):
        path = os.path.join(new, name)
        if name in replaced:
            take_after(path, os.path.join(old, name))
        else:
            _give_mode(path, stat.S_IMODE(os.stat(path).st_mode) & limit)


# What others keep in a folder.

_Identity = tuple[int, ...]


@dataclass(frozen=True)
class _Kept:
    """One file or folder of others: what it was in the old folder, and what stands for it in the new one."""

    source: _Identity
    target: _Identity


def _identity(status: os.stat_result) -> _Identity:
    # Of a folder that it is one: the new one is never the old one itself.
    return () if stat.S_ISDIR(status.st_mode) else (status.st_dev, status.st_ino)


def _version(status: os.stat_result) -> _Identity:
    return (*_identity(status), status.st_mtime_ns, status.st_size)


def _is_still(kept: _Identity, path: Path) -> bool:
    """Whether a path is what it was when it was kept; False where nothing is there."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return False
    return kept == (_version(status) if len(kept) > len(_identity(status)) else _identity(status))


@contextmanager
def _unless_gone(source: Path, target: Path) -> Iterator[None]:
    """What the system refuses inside, with ``source`` as its file; nothing where somebody removed ``source``.

    Programs that replace a file by a rename remove another one thereby.
    """
    try:
        yield
    except OSError as error:
        if os.path.lexists(source):
            raise OSError(error.errno, error.strerror, os.fspath(source)) from error
        if os.path.lexists(target) and not target.is_dir():
            target.unlink()


def check_listable(folder: StrPath) -> None:
    """Demand that every folder in one may be listed. Raises OSError with the first that may not be."""

    def refuse(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise error

    for _ in os.walk(folder, onerror=refuse):
        pass


class Others:
    """What others keep in a folder that a save replaces, while they go on writing.

    ``carry`` gives each file a second name in the new folder. Behind the exchange of the two, ``settle`` brings over
    what came, went or was replaced since, and deletes the old folder. It deletes nothing that it does not know.

    Args:
        own: names in the folder that belong to the checkpoint that is replaced.
        sync: called for each file that is copied, and each folder that is made or into which something is moved.
    """

    def __init__(self, own: Collection[str], sync: Callable[[Path], None]) -> None:
        self._own, self._sync = frozenset(own), sync
        # By the folder in which they lie, then by name.
        self._kept: dict[str, dict[str, _Kept]] = {}

    def carry(self, old: Path, new: Path) -> None:
        """Give everything of others a place in the new folder. Raises OSError with the file that is at fault."""
        waiting, folders = sorted(set(os.listdir(old)) - self._own), list[str]()
        while waiting:
            path = waiting.pop()
            with _unless_gone(old / path, new / path):
                status = os.lstat(old / path)
                if stat.S_ISDIR(status.st_mode):
                    (new / path).mkdir()
                    self._note(path, _Kept((), ()))
                    folders.append(path)
                    waiting += [os.path.join(path, name) for name in sorted(os.listdir(old / path))]
                else:
                    self._note(path, self._second(old / path, new / path, status))
        # Behind what is in them, the innermost first: a folder that is read-only takes nothing more.
        for path in reversed(folders):
            with _unless_gone(old / path, new / path):
                status = os.stat(old / path)
                take_after(new / path, old / path)
                os.utime(new / path, ns=(status.st_atime_ns, status.st_mtime_ns))
                self._sync(new / path)

    def _second(self, source: Path, target: Path, status: os.stat_result) -> _Kept:
        try:
            os.link(source, target, follow_symlinks=False)
        except OSError as error:
            if error.errno not in _NO_LINK:
                raise
            shutil.copy2(source, target, follow_symlinks=False)
            if stat.S_ISREG(status.st_mode):
                self._sync(target)
            return _Kept(_version(status), _version(os.lstat(target)))
        # Of the new name: somebody may have replaced what has the old one.
        return _Kept(_identity(os.lstat(target)), _identity(os.lstat(target)))

    def _note(self, path: str, kept: _Kept) -> None:
        folder, name = os.path.split(path)
        self._kept.setdefault(folder, {})[name] = kept

    def bring_over(self, old: Path, new: Path) -> None:
        """Bring over what others did since ``carry``, and delete nothing of the old folder: at once when both changed.

        A failure is told by ``settle``, which tries again.
        """
        self._settle_folder(old, new, "", [], is_clearing=False)

    def settle(self, old: Path, new: Path) -> None:
        """Bring over the rest, and delete the old folder; may be called again where it failed.

        What a program does in the new folder meanwhile stands above what was done in the old one.

        Raises:
            OSError: the first of what the system refused; the rest is done, and what could not be stays in ``old``.
        """
        check_unmounted(old)
        failures = list[OSError]()
        for _ in range(_LOOKS):
            if os.path.lexists(old) and not failures:
                self._settle_folder(old, new, "", failures, is_clearing=True)
        if failures:
            raise failures[0]
        if os.path.lexists(old):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), os.fspath(old))

    def _settle_folder(self, old: Path, new: Path, path: str, failures: list[OSError], *, is_clearing: bool) -> None:
        is_moved = False
        try:
            _let_in(old / path)
            # Also what others removed.
            names = sorted({*self._kept.get(path, {}), *os.listdir(old / path)})
        except OSError as error:
            failures.append(error)
            return
        for name in names:
            try:
                is_moved |= self._settle(old, new, path, name, failures, is_clearing=is_clearing)
            except OSError as error:
                failures.append(error)
        try:
            if is_moved:
                self._sync(new / path)
            if is_clearing:
                self._note_deleted(path)
                (old / path).rmdir()
        except OSError as error:
            # Somebody wrote into it meanwhile, or what could not be moved is there.
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                failures.append(error)

    def _settle(
        self, old: Path, new: Path, folder: str, name: str, failures: list[OSError], *, is_clearing: bool
    ) -> bool:
        """Settle one name of a folder; True where something was moved into the new one."""
        path = os.path.join(folder, name)
        source, target, kept = old / path, new / path, self._kept.get(folder, {}).get(name)
        is_own = not folder and (name in self._own or is_checkpoint_name(name))
        is_folder = source.is_dir() and not source.is_symlink()
        if not is_own and not os.path.lexists(source):
            # What the system refuses here is known until the next look, which tries it again and tells it.
            self._forget(new, path, kept)
            self._note_deleted(path)
            return False
        if not is_own and is_folder and target.is_dir():
            self._settle_folder(old, new, path, failures, is_clearing=is_clearing)
            return False
        is_late = not is_own and (kept is None or not _is_still(kept.source, source))
        if is_late and (not os.path.lexists(target) if kept is None else _is_still(kept.target, target)):
            os.replace(source, target)
            return True
        if is_clearing:
            if is_late:
                # Both came while the folders were exchanged: a program has used the name twice.
                logger.warning("%s was written twice while its folder was replaced: the later one stays", target)
            self._note_deleted(path)
            remove_tree(source) if is_folder else source.unlink()
        return False

    def _note_deleted(self, path: str) -> None:
        # Before it is: behind a failure, what is not there must not pass for removed by others.
        folder, name = os.path.split(path)
        self._kept.get(folder, {}).pop(name, None)

    def _forget(self, new: Path, path: str, kept: _Kept | None) -> None:
        """Remove from the new folder what others removed from the old one, unless it is another by now."""
        for name, below in self._kept.get(path, {}).items():
            self._forget(new, os.path.join(path, name), below)
        self._kept.pop(path, None)
        if kept is None or not _is_still(kept.target, new / path):
            return
        if kept.target:
            (new / path).unlink()
            return
        try:
            (new / path).rmdir()
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
