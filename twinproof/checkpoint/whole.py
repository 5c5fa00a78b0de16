"""Whether a checkpoint has all its files, and each as long as it is said to be: no tensor data is read.

Prevents that what a copy has brought in part, or a crash cut short, counts as a checkpoint: retention would delete
whole ones for it. What was found out is kept, so that the metadata of many steps is not read after each save.
"""

from __future__ import annotations

import errno
import os
import pickle
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from twinproof import regime
from twinproof.checkpoint import catalog
from twinproof.checkpoint.catalog import CHUNKS_LEAVE_A_GAP, Catalog, list_files, read_index
from twinproof.checkpoint.format import (
    HEADER_BYTES_MAX,
    INDEX_NAME,
    LENGTH_BYTES,
    METADATA_KEY,
    NATIVE_METADATA_NAME,
    SUFFIX,
    parse_json_object,
)
from twinproof.checkpoint.publish import storage_error
from twinproof.errors import CorruptionError, FormatError, TwinproofError, UnsupportedError

__all__ = ["Known", "check_reaches", "check_whole", "ends_of", "read_catalog", "reading_metadata", "refusals"]

# None: what Python said, and not the system.
_NO_PATH = (None, errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)
_Status = tuple[int, int, int]  # Time of change in ns, bytes, inode.

# A few hundred bytes for each file of a checkpoint; of more checkpoints the oldest are read again.
_KNOWN_MAX = regime(4096, 2)


class Known:
    """What was found out of checkpoints that have not changed since: the files of each, and how far each reaches.

    Whoever looks again and again keeps one; several threads may ask. A copy knows nothing yet.
    """

    def __reduce__(self) -> Any:
        return Known, ()

    def __init__(self) -> None:
        self._found: OrderedDict[str, tuple[Any, Mapping[str, int]]] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, folder: Path, status: Any) -> Mapping[str, int] | None:
        """None of a checkpoint whose files have another status by now."""
        with self._lock:
            found = self._found.get(os.path.abspath(folder))
        return found[1] if found is not None and found[0] == status else None

    def keep(self, folder: Path, status: Any, ends: Mapping[str, int]) -> None:
        """What was found out, and of which status."""
        with self._lock:
            self._found[os.path.abspath(folder)] = status, ends
            self._found.move_to_end(os.path.abspath(folder))
            while len(self._found) > _KNOWN_MAX:
                self._found.popitem(last=False)

    def remember(self, folder: Path, metadata: Metadata) -> None:
        """What was just saved there, so that nobody has to read it again."""
        with suppress(OSError):
            self.keep(folder, _status(folder / NATIVE_METADATA_NAME), ends_of(metadata))


@contextmanager
def refusals(doing: str, path: str | os.PathLike[str]) -> Iterator[None]:
    """What the system refuses inside, as StorageError of the file; a path to nothing stays the error that it is."""
    try:
        yield
    except TwinproofError:
        raise
    except OSError as error:
        if error.errno in _NO_PATH:
            raise
        raise storage_error(error, doing, error.filename or path) from error


def read_catalog(path: str | os.PathLike[str]) -> Catalog:
    """As ``catalog.read_catalog``. Raises StorageError for what may not be read, too."""
    with refusals("reading", path):
        return catalog.read_catalog(path)


def check_whole(folder: Path, *, is_native: bool, known: Known) -> None:
    """Demand all files of a checkpoint of torch's format, or of an HF one, each as long as it is said to be.

    What else is wrong with them is for a load to say.

    Raises:
        CorruptionError: metadata or a file that is missing or cut short, shards with a gap. FormatError: a malformed
            index. OSError: what cannot be read; FileNotFoundError where the folder has gone.
    """
    if is_native:
        with suppress(UnsupportedError):
            for name, end in sorted(_native_ends(folder, known).items()):
                check_reaches(os.path.join(folder, name), end)
    else:
        _check_hf(folder, known)


def check_reaches(file: str, end_bytes: int) -> None:
    """Demand a file of at least so many bytes. Raises CorruptionError."""
    try:
        size_bytes = os.stat(file).st_size
    except FileNotFoundError:
        raise CorruptionError(
            "the metadata names a file that is missing", got="no file", expected=f">= {end_bytes} bytes", where=file
        ) from None
    if size_bytes < end_bytes:
        raise CorruptionError(
            "the file is too short for what the metadata says of it",
            got=f"{size_bytes} bytes",
            expected=f">= {end_bytes} bytes",
            where=file,
        )


def _status(path: str | os.PathLike[str]) -> _Status:
    status = os.stat(path)
    return status.st_mtime_ns, status.st_size, status.st_ino


# Torch's format.


@contextmanager
def reading_metadata(where: str) -> Iterator[None]:
    """What a pickle of the metadata that is none says, by name.

    Raises:
        CorruptionError: bytes that are no pickle, or not all of one. UnsupportedError: one of what this torch lacks.
    """
    try:
        yield
    except (OSError, MemoryError, TwinproofError):
        raise
    except (ImportError, AttributeError) as error:
        raise UnsupportedError(
            "the metadata has what this version of torch does not know",
            got=str(error)[:200],
            expected="the version that saved it, or a later one",
            where=where,
        ) from error
    except Exception as error:
        raise CorruptionError(
            "the metadata is cut short, or none",
            got=f"{type(error).__name__}: {str(error)[:200]}",
            expected="torch's metadata, whole",
            where=where,
        ) from error


def ends_of(metadata: Metadata) -> dict[str, int]:
    """The bytes that each file of a checkpoint has at least, by its path inside. Storage of another kind says none."""
    ends: dict[str, int] = {}
    for info in (metadata.storage_data or {}).values():
        if hasattr(info, "relative_path"):
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    return ends


def _native_ends(folder: Path, known: Known) -> Mapping[str, int]:
    path = folder / NATIVE_METADATA_NAME
    status = _status(path)
    found = known.of(folder, status)
    if found is None:
        where = os.fspath(path)
        with open(path, "rb") as file, reading_metadata(where):
            metadata = pickle.load(file)
            if not isinstance(metadata, Metadata):
                got = type(metadata).__name__
                raise CorruptionError("no metadata of torch's", got=got, expected="Metadata", where=where)
            found = ends_of(metadata)
        known.keep(folder, status, found)
    return found


# HF's.


def _check_hf(folder: Path, known: Known) -> None:
    status = {name: _status_of(folder / name) for name in sorted(os.listdir(folder)) if _is_of_hf(name)}
    if known.of(folder, status) is not None:
        return
    index = read_index(folder)
    files = list_files(folder) if index is None else [folder / name for name in sorted(set(index.weight_map.values()))]
    for file in files:
        check_reaches(os.fspath(file), _end_of_safetensors(file))
    try:
        read_catalog(folder)
    except CorruptionError as error:
        # Of files that contradict each other a human has to say what they are.
        if error.message != CHUNKS_LEAVE_A_GAP:
            return
        raise
    except (FormatError, UnsupportedError):
        return
    known.keep(folder, status, {})


def _status_of(path: Path) -> _Status | None:
    # Of a link to nothing, which the index need not name.
    with suppress(FileNotFoundError):
        return _status(path)
    return None


def _is_of_hf(name: str) -> bool:
    return name == INDEX_NAME or (name.endswith(SUFFIX) and not name.startswith("."))


def _end_of_safetensors(file: Path) -> int:
    """The bytes that a header says its file has; of a malformed one, those of the header."""
    with open(file, "rb") as stream:
        length = int.from_bytes(stream.read(LENGTH_BYTES), "little")
        raw = stream.read(min(length, HEADER_BYTES_MAX))
    end = LENGTH_BYTES + length
    if len(raw) < length:
        return end
    try:
        entries = parse_json_object(raw, os.fspath(file))
        ends = [entry["data_offsets"][1] for name, entry in entries.items() if name != METADATA_KEY]
        return int(end + max(ends, default=0))
    except (FormatError, TypeError, KeyError, IndexError, ValueError):
        return end
