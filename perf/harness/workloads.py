"""Shapes as data, so that every figure names one and nobody tunes a shape in code until the figure pleases."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import KW_ONLY, asdict, dataclass
from typing import Any

from perf.harness.declarations import modules, read_declarations
from twinproof.errors import ConfigError, FormatError

__all__ = ["FORMS", "SIZES", "Workload", "read_workloads"]

# full is the published table, short fits in a minute, test is what CI counts with.
FORMS = ("full", "short", "test")
# What the formulas of gates may refer to.
SIZES = ("payload_bytes", "tensor_bytes", "tensor_count", "file_count", "rank_count")
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

    Raises:
        FormatError: a value of the wrong type or a count below one.
        ConfigError: a contender twice.
    """

    name: str
    _: KW_ONLY
    component: str
    job: str
    shape: tuple[int, ...]
    tensor_count: int = 1
    file_count: int = 1
    rank_count: int = 1
    shard_dim: int = 0
    round_count: int
    contenders: tuple[str, ...]

    def __post_init__(self) -> None:
        """Refuse what types alone do not: mypy has not seen every caller, and counts have a range."""
        right = {
            **{name: _is_text(getattr(self, name)) for name in ("name", "component", "job")},
            **{
                f"{name}_count": _is_count(getattr(self, f"{name}_count"))
                for name in ("tensor", "file", "rank", "round")
            },
            "shape": isinstance(self.shape, tuple) and all(_is_count(size) for size in self.shape),
            "shard_dim": type(self.shard_dim) is int and 0 <= self.shard_dim < len(self.shape),
            "contenders": _are_texts(self.contenders),
        }
        for name, is_right in right.items():
            if not is_right:
                got, expected = getattr(self, name), f"{type(self).__annotations__[name]}, see {type(self).__name__}"
                raise FormatError(f"{name} is not of the right kind", got=got, expected=expected, where=self.name)
        if len(set(self.contenders)) < len(self.contenders):
            raise ConfigError("a contender twice", got=self.contenders, expected="distinct names", where=self.name)

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
        return {name: float(getattr(self, name)) for name in SIZES}

    def as_dict(self) -> dict[str, Any]:
        """For the evidence file."""
        return asdict(self)

    def __str__(self) -> str:
        size = f"{self.payload_bytes / 2**20:.4g} MiB"
        what = f"{self.job}, {self.tensor_count} x {list(self.shape)} fp32 = {size}, {self.file_count} files"
        return f"{self.name}: {what}, {self.rank_count} ranks, dim {self.shard_dim}"


def read_workloads(names: Iterable[str] = modules("workloads")) -> dict[str, Workload]:
    """All workloads by name, from the tuple ``WORKLOADS`` of each module.

    Raises:
        FormatError: an unknown or missing argument, a value of the wrong type, a name twice.
    """
    found: dict[str, Workload] = {}
    for module in names:
        for workload in read_declarations(module, "WORKLOADS", Workload):
            if workload.name in found:
                raise FormatError("a name twice", got=workload.name, expected="distinct names", where=module)
            found[workload.name] = workload
    return found


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _are_texts(value: Any) -> bool:
    return isinstance(value, tuple) and bool(value) and all(_is_text(item) for item in value)


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 0
