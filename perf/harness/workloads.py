"""Shapes as data, so that every figure names one and nobody tunes a shape in code until the figure pleases."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from twinproof.errors import ConfigError, FormatError

if sys.version_info >= (3, 11):
    import tomllib
else:
    # pytest itself depends on the backport there.
    import tomli as tomllib

__all__ = ["FORMS", "WORKLOADS", "Workload", "check_keys", "read_toml", "read_workloads"]

WORKLOADS = Path(__file__).parent.parent / "workloads.toml"
# full is the published table, short fits in a minute, test is what CI counts with.
FORMS = ("full", "short", "test")
_VERSION = 1
_ITEM_BYTES = 4


@dataclass(frozen=True)
class Workload:
    """One shape and who is measured on it.

    Attributes:
        name: what figures call it.
        component: a stem; the job is one of ``perf.<component>.JOBS``.
        job: the kind of work.
        shape: of each tensor, fp32.
        tensor_count, file_count: how many of them, over how many files.
        rank_count: processes that take part.
        shard_dim: the dimension that ranks divide evenly.
        round_count: rounds that count; one more is thrown away.
        contenders: names that the job knows.
    """

    name: str
    component: str
    job: str
    shape: tuple[int, ...]
    tensor_count: int
    file_count: int
    rank_count: int
    shard_dim: int
    round_count: int
    contenders: tuple[str, ...]

    @property
    def tensor_bytes(self) -> int:
        """Bytes of one tensor."""
        return math.prod(self.shape) * _ITEM_BYTES

    @property
    def payload_bytes(self) -> int:
        """Bytes of all tensors."""
        return self.tensor_bytes * self.tensor_count

    def sizes(self) -> dict[str, float]:
        """What the formulas of gates may refer to."""
        names = ("payload_bytes", "tensor_bytes", "tensor_count", "file_count", "rank_count")
        return {name: float(getattr(self, name)) for name in names}

    def as_dict(self) -> dict[str, Any]:
        """For the evidence file."""
        return asdict(self)

    def __str__(self) -> str:
        size = f"{self.payload_bytes / 2**20:.4g} MiB"
        what = f"{self.job}, {self.tensor_count} x {list(self.shape)} fp32 = {size}, {self.file_count} files"
        return f"{self.name}: {what}, {self.rank_count} ranks, dim {self.shard_dim}"


def read_toml(path: Path, table: str) -> list[dict[str, Any]]:
    """The ``[[table]]`` entries of a file with ``version = 1`` and nothing else. Raises FormatError."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise FormatError("not readable as TOML", got=error, where=path) from error
    check_keys(content, {"version", table}, set(), path)
    if type(content["version"]) is not int or content["version"] != _VERSION:
        raise FormatError("unknown version", got=content["version"], expected=_VERSION, where=path)
    entries = content[table]
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise FormatError("not a list of tables", got=type(entries).__name__, expected=f"[[{table}]]", where=path)
    return entries


def check_keys(entry: Mapping[str, Any], required: set[str], optional: set[str], where: Any) -> None:
    """Refuse unknown and missing keys, all at once. Raises FormatError."""
    unknown, missing = sorted(entry.keys() - required - optional), sorted(required - entry.keys())
    if unknown or missing:
        raise FormatError(f"unknown keys {unknown}, missing keys {missing}", where=where)


def read_workloads(path: Path = WORKLOADS) -> dict[str, Workload]:
    """All workloads by name.

    Raises:
        FormatError: an unknown or missing key, a value of the wrong type, a name twice.
    """
    found: dict[str, Workload] = {}
    for number, entry in enumerate(read_toml(path, "workload"), 1):
        workload = _workload(entry, f"{path}: workload {number} ({entry.get('name')})")
        if workload.name in found:
            raise FormatError("a name twice", got=workload.name, where=path)
        found[workload.name] = workload
    return found


def _workload(entry: dict[str, Any], where: str) -> Workload:
    check_keys(entry, {field.name for field in fields(Workload)}, set(), where)
    for name, value in entry.items():
        right = {
            "shape": isinstance(value, list) and all(_is_count(size) for size in value),
            "contenders": isinstance(value, list) and value and all(isinstance(item, str) for item in value),
            "shard_dim": type(value) is int and 0 <= value < len(entry["shape"]),
            **dict.fromkeys(("name", "component", "job"), isinstance(value, str) and value),
        }.get(name, _is_count(value))
        if not right:
            raise FormatError(f"{name} is not of the right kind", got=value, where=where)
    if len(set(entry["contenders"])) < len(entry["contenders"]):
        raise ConfigError("a contender twice", got=entry["contenders"], where=where)
    return Workload(**{**entry, "shape": tuple(entry["shape"]), "contenders": tuple(entry["contenders"])})


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 0
