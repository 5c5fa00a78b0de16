"""Known deviations as strict data: against waivers without a tracker, typos that waive nothing, and lucky passes.

A ledger is TOML::

    version = 1

    [[deviation]]
    requirement = "CKPT-012"
    kind = "xfail"                    # xfail | quarantine | skip | tolerance
    scope = { dtype = "int8" }        # optional: parameters of the test, each one value or a list of values
    reason = "what happens instead"
    tracker = "pytorch/pytorch#192485"
    since = 2026-11-21

An ``xfail`` that passes fails the run; ``quarantine`` (it would take the process down) and ``skip`` do not run;
``tolerance`` needs ``factor`` and widens the derived tolerance. The reference and fastimpl have no ledger.
"""

from __future__ import annotations

import datetime
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    # pytest itself depends on the backport there.
    import tomli as tomllib

__all__ = ["KINDS", "Deviation", "LedgerError", "builtin_ledger", "read_ledger", "read_ledgers"]

KINDS = ("xfail", "quarantine", "skip", "tolerance")
_VERSION = 1
_TYPES: dict[str, tuple[type, ...]] = {
    "requirement": (str,),
    "kind": (str,),
    "reason": (str,),
    "tracker": (str,),
    "since": (datetime.date,),
    "scope": (dict,),
    "factor": (int, float),
}
_OPTIONAL = ("scope", "factor")
_SCOPE_VALUES = (str, int, float, bool)


class LedgerError(ValueError):
    """A ledger that cannot be taken at its word; says which file and which entry."""


@dataclass(frozen=True)
class Deviation:
    """One entry: what is known to be wrong, since when, and who tracks it. ``place`` is its file and position."""

    requirement: str
    kind: str
    reason: str
    tracker: str
    since: datetime.date
    place: str
    scope: Mapping[str, Any] = field(default_factory=dict, hash=False)
    factor: float = 1.0

    def covers(self, parameters: Mapping[str, Any]) -> bool:
        """Whether a test with these parameters falls within the scope; dtypes and the like match by their name."""
        return all(
            name in parameters and any(_matches(parameters[name], value) for value in _values(allowed))
            for name, allowed in self.scope.items()
        )


def _values(allowed: Any) -> list[Any]:
    return allowed if isinstance(allowed, list) else [allowed]


def _matches(parameter: Any, value: Any) -> bool:
    # torch.int8 is written "int8" in a ledger, as everywhere else that people read.
    return bool(parameter == value) or (isinstance(value, str) and str(parameter).removeprefix("torch.") == value)


def read_ledger(path: Path) -> tuple[Deviation, ...]:
    """The entries of one file.

    Raises:
        LedgerError: unreadable, not TOML, an unknown or missing key, a value of the wrong type or kind, a duplicate.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise LedgerError(f"{path}: {error}") from error
    unknown = sorted(content.keys() - {"version", "deviation"})
    if unknown:
        raise LedgerError(f"{path}: unknown keys {unknown}; expected version and deviation")
    version = content.get("version")
    if type(version) is not int or version != _VERSION:
        raise LedgerError(f"{path}: version is {version!r}; expected {_VERSION}")
    entries = content.get("deviation", [])
    if not isinstance(entries, list):
        raise LedgerError(f"{path}: deviation is a {type(entries).__name__}; expected [[deviation]] tables")
    return _without_duplicates([_deviation(entry, f"{path}: deviation {n}") for n, entry in enumerate(entries, 1)])


def read_ledgers(paths: list[Path]) -> tuple[Deviation, ...]:
    """The entries of all files together; an entry may stand in one of them only."""
    return _without_duplicates([deviation for path in paths for deviation in read_ledger(path)])


def _without_duplicates(deviations: list[Deviation]) -> tuple[Deviation, ...]:
    seen: dict[tuple[str, str], str] = {}
    for deviation in deviations:
        key = deviation.requirement, repr(sorted(deviation.scope.items()))
        if key in seen:
            raise LedgerError(f"{deviation.place}: repeats {deviation.requirement} of {seen[key]}")
        seen[key] = deviation.place
    return tuple(deviations)


def _deviation(entry: Any, place: str) -> Deviation:
    if not isinstance(entry, dict):
        raise LedgerError(f"{place}: is a {type(entry).__name__}; expected a table")
    place = f"{place} ({entry.get('requirement', 'no requirement')})"
    unknown = sorted(entry.keys() - _TYPES.keys())
    missing = sorted(_TYPES.keys() - entry.keys() - set(_OPTIONAL))
    if unknown or missing:
        raise LedgerError(f"{place}: unknown keys {unknown}, missing keys {missing}")
    for name, value in entry.items():
        # A bool is an int and a datetime is a date; neither is what was asked for.
        if not isinstance(value, _TYPES[name]) or isinstance(value, bool | datetime.datetime):
            wanted = " or ".join(kind.__name__ for kind in _TYPES[name])
            raise LedgerError(f"{place}: {name} is {value!r}; expected {wanted}")
        if value == "":
            raise LedgerError(f"{place}: {name} is empty")
    if entry["kind"] not in KINDS:
        raise LedgerError(f"{place}: kind is {entry['kind']!r}; expected one of {', '.join(KINDS)}")
    # Of nan no comparison is true, and inf would waive whatever comes.
    if ("factor" in entry) != (entry["kind"] == "tolerance") or not 1 < entry.get("factor", 2) < math.inf:
        raise LedgerError(f"{place}: a finite factor > 1 belongs to kind tolerance, and only there")
    for name, value in entry.get("scope", {}).items():
        if not _values(value) or not all(isinstance(item, _SCOPE_VALUES) for item in _values(value)):
            raise LedgerError(f"{place}: scope.{name} is {value!r}; expected a value or a list of values")
    return Deviation(place=place, **{**entry, "factor": float(entry.get("factor", 1.0))})


def builtin_ledger(implementation: str) -> tuple[Path, ...]:
    """The ledger that ships for an adapter in ``conformance.peers``, by the adapter's name; at most one.

    A package of one's own that has an adapter's last name has not its deviations.
    """
    package, _, name = implementation.rpartition(".")
    if package != "conformance.peers":
        return ()
    path = Path(__file__).parent.parent / "peers" / f"{name}.toml"
    return (path,) if path.is_file() else ()
