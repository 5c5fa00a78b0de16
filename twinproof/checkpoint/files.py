"""Names of files, which tensor goes to which file, and the index: policy that both implementations share.

Prevents an index that promises what no file holds, and names that lead a reader out of its folder.
Conventions: torch ``_hf_utils`` for names, huggingface_hub for sizes; facts/checkpoint.md 1.6 and 3.2.
"""

from __future__ import annotations

import json
import logging
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path

from twinproof.checkpoint.parse import parse_json_object
from twinproof.errors import ConfigError, CorruptionError, FormatError, PlanError

__all__ = [
    "INDEX_NAME",
    "SINGLE_NAME",
    "assign_files",
    "build_index",
    "file_name",
    "is_checkpoint_name",
    "local_path",
    "read_index",
]

logger = logging.getLogger("twinproof.checkpoint")

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
SUFFIX = ".safetensors"
FILE_COUNT_MAX = 99_999  # The pattern has five digits.
INDEX_BYTES_MAX = 1 << 30
_OWN_NAMES = re.compile(r"(shard-\d{5}-)?model-\d{5}-of-\d{5}\.safetensors")
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def file_name(index: int, count: int, shard: int | None = None) -> str:
    """``model-00001-of-00002.safetensors``; with ``shard``, torch's name for one rank's part. Both count from 1."""
    name = f"model-{index:05d}-of-{count:05d}{SUFFIX}"
    return name if shard is None else f"shard-{shard:05d}-{name}"


def is_checkpoint_name(name: str) -> bool:
    """Whether a save replaces a file of this name: torch's numbered names, the single file, the index."""
    return name in (INDEX_NAME, SINGLE_NAME) or _OWN_NAMES.fullmatch(name) is not None


def local_path(path: str | os.PathLike[str], where: str = "path") -> Path:
    """A local path; a URL is refused rather than made into a folder called ``s3:``. Raises ConfigError."""
    text = os.fspath(path)
    if not isinstance(text, str) or not text:
        raise ConfigError("not a path", got=path, where=where)
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text):
        raise ConfigError(
            "only local paths are supported", got=text, expected="a folder of a mounted file system", where=where
        )
    return Path(text)


def parse_size(size: int | str, where: str = "max_shard_size") -> int:
    """Bytes, or a decimal size such as ``"5GB"`` as huggingface_hub reads it. Raises ConfigError."""
    given = size
    if isinstance(size, str):
        number, unit = size.strip()[:-2], size.strip()[-2:].upper()
        try:
            size = int(float(number) * _UNITS[unit])
        except (KeyError, ValueError, OverflowError):
            raise ConfigError(
                "not a size", got=size, expected="bytes, or a number with KB, MB, GB or TB", where=where
            ) from None
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ConfigError("not a size", got=given, expected=">= 1", where=where)
    return size


def check_mapping(mapping: Mapping[str, int] | None) -> dict[str, int] | None:
    """``fqn_to_index_mapping`` with indices 1..N, none left out; else ConfigError."""
    if mapping is None:
        return None
    for name, index in mapping.items():
        if type(index) is not int or index < 1:
            raise ConfigError("a file index is an int from 1", got=index, where=f"fqn_to_index_mapping[{name!r}]")
    used = set(mapping.values())
    if len(used) > FILE_COUNT_MAX:
        raise ConfigError(
            "too many files", got=len(used), expected=f"<= {FILE_COUNT_MAX}", where="fqn_to_index_mapping"
        )
    if used != set(range(1, len(used) + 1)):
        raise ConfigError(
            "file indices leave gaps", got=sorted(used)[:20], expected=f"1..{len(used)}", where="fqn_to_index_mapping"
        )
    return dict(mapping)


def _split_greedily(sizes_bytes: Mapping[str, int], limit_bytes: int) -> list[list[str]]:
    # This is huggingface_hub's split: an oversize tensor gets its own file and does not close the file being filled.
    files: list[list[str]] = []
    current: list[str] = []
    filled = 0
    for name, size in sizes_bytes.items():
        if size > limit_bytes:
            files.append([name])
            continue
        if filled + size > limit_bytes:
            files.append(current)
            current, filled = [], 0
        current.append(name)
        filled += size
    return [*files, current] if current else files


def assign_files(
    sizes_bytes: Mapping[str, int],
    mapping: Mapping[str, int] | None,
    max_shard_size: int | str | None,
    *,
    single_file: bool = False,
) -> dict[str, list[str]]:
    """File name -> tensor names, for tensors in state-dict order.

    Raises:
        PlanError: names that ``mapping`` lacks, all of them at once.
        ConfigError: more files than five digits can number.
    """
    if single_file:
        return {SINGLE_NAME: list(sizes_bytes)}
    if mapping is not None:
        missing = sorted(sizes_bytes.keys() - mapping.keys())
        if missing:
            raise PlanError("names without a file index", got=missing, where="fqn_to_index_mapping")
        extra = sorted(mapping.keys() - sizes_bytes.keys())
        if extra:
            logger.warning(
                "fqn_to_index_mapping names %d tensors that are not saved: %s", len(extra), ", ".join(extra[:20])
            )
        groups: list[list[str]] = [[] for _ in range(max(mapping.values(), default=1))]
        for name in sizes_bytes:
            groups[mapping[name] - 1].append(name)
        # An index whose every name is absent (a tied head, say) yields no file; the others are numbered on.
        groups = [group for group in groups if group] or [[]]
    elif max_shard_size is not None:
        groups = _split_greedily(sizes_bytes, parse_size(max_shard_size)) or [[]]
    else:
        groups = [list(sizes_bytes)]
    if len(groups) > FILE_COUNT_MAX:
        raise ConfigError("too many files", got=len(groups), expected=f"<= {FILE_COUNT_MAX}", where="max_shard_size")
    return {file_name(i, len(groups)): group for i, group in enumerate(groups, start=1)}


def build_index(weight_map: Mapping[str, str], total_size_bytes: int) -> bytes:
    """``model.safetensors.index.json``: names sorted, two spaces of indentation, one newline at the end."""
    content = {"metadata": {"total_size": total_size_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    return json.dumps(content, indent=2, ensure_ascii=False).encode() + b"\n"


def _check_member(folder: Path, name: object, where: str) -> None:
    if not isinstance(name, str) or not name.endswith(SUFFIX):
        raise FormatError("the index names something that is not a safetensors file", got=name, where=where)
    if name != os.path.basename(name) or re.search(r"[\\:\0]", name) or name.startswith(".."):
        raise FormatError(
            "the index names a path outside its folder", got=name, expected="a plain file name", where=where
        )
    try:
        status = (folder / name).stat()
    except FileNotFoundError:
        raise CorruptionError("the index names a file that is missing", got=name, where=where) from None
    except (OSError, ValueError) as error:
        raise FormatError(
            "the index names a file that cannot be opened", got=f"{name!r}: {error}", where=where
        ) from None
    if not stat.S_ISREG(status.st_mode):
        raise FormatError("the index names something that is not a regular file", got=name, where=where)
    # Hub caches link every file to a blob store beside the snapshot; a link that leaves that tree is an escape.
    if (folder / name).is_symlink() and not _link_stays_near(folder, name):
        target = os.readlink(folder / name)
        raise FormatError("the index names a link that leaves its folder", got=f"{name} -> {target}", where=where)


def _link_stays_near(folder: Path, name: str) -> bool:
    target = (folder / name).resolve()
    home = folder.resolve()
    hub = home.parent.parent
    is_blob = home.parent.name == "snapshots" and target.parent == hub / "blobs"
    return target.parent == home or is_blob


def read_index(folder: Path) -> tuple[dict[str, str], int | None] | None:
    """(weight map, declared total size) of a folder, or None where it has no index.

    Raises:
        FormatError: malformed index, or a value that leads out of the folder.
        CorruptionError: a file that the index names is missing.
    """
    path = folder / INDEX_NAME
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    where = os.fspath(path)
    if not stat.S_ISREG(status.st_mode) or status.st_size > INDEX_BYTES_MAX:
        raise FormatError("the index is not a regular file of sensible size", got=status.st_size, where=where)
    content = parse_json_object(path.read_bytes(), where)
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict):
        raise FormatError("the index lacks a weight_map", got=type(weight_map).__name__, where=where)
    for name in weight_map.values():
        if not isinstance(name, str):
            raise FormatError("weight_map maps names to file names", got=name, where=where)
    for name in sorted(set(weight_map.values())):
        _check_member(folder, name, where)
    declared = content.get("metadata")
    total = declared.get("total_size") if isinstance(declared, dict) else None
    # Some writers record the total as a float; a value of another kind says nothing.
    return weight_map, int(total) if isinstance(total, (int, float)) and not isinstance(total, bool) else None
