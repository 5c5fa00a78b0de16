"""Gates as data, read so strictly that a misspelt bound cannot switch one off.

A gate names its shapes, what is compared with what, its bound, and a control: a measurement that violates the bound
and that the gate must refuse. A gate whose control passes proves nothing and fails.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path
from typing import Any

from perf.harness.formulas import names_used
from perf.harness.workloads import FORMS, Workload, check_keys, read_toml
from twinproof.errors import FormatError

__all__ = ["GATES", "Control", "Gate", "Kind", "read_gates"]

GATES = Path(__file__).parent.parent / "gates.toml"
_SECONDS = "seconds"


class Kind(str, Enum):
    """What a gate is about: counters and memory are exact, the others are ratios of paired samples."""

    COUNTER = "counter"
    CLAIM = "claim"
    LIMIT = "limit"
    MEMORY = "memory"
    REGRESSION = "regression"

    @property
    def is_paired(self) -> bool:
        """Whether its value is a ratio of paired samples, which has an interval, or a worst case, which has none."""
        return self in (Kind.CLAIM, Kind.LIMIT, Kind.REGRESSION)


_REQUIRED = {"id", "kind", "sentence", "workloads", "subject", "control", "hardware", "evidence"}
_BY_KIND: dict[Kind, tuple[set[str], set[str]]] = {
    Kind.CLAIM: ({"peer", "floor", "ceiling"}, {"metric", "filesystem"}),
    Kind.LIMIT: ({"peer", "floor", "ceiling"}, {"metric", "filesystem"}),
    Kind.REGRESSION: ({"peer", "floor"}, {"metric", "filesystem"}),
    Kind.COUNTER: ({"metric", "ceiling"}, {"peer", "floor"}),
    Kind.MEMORY: ({"metric", "ceiling"}, {"against"}),
}


@dataclass(frozen=True)
class Control:
    """The contender that takes the subject's place and must be refused; ``peer`` where the gate has one."""

    subject: str
    peer: str | None = None


@dataclass(frozen=True)
class Gate:
    """One promise.

    Attributes:
        id: its name, unique.
        kind: see Kind.
        sentence: the promise in words.
        workloads: form -> workload; the gate is judged in these forms only.
        subject: contender that the promise is about.
        peer: contender it is compared with: time of the peer / time of the subject, or, for counters, count of the
            subject / count of the peer.
        metric: of the samples.
        against: form -> workload whose value is subtracted, for growth from one shape to another.
        floor, ceiling: numbers or formulas of the workload's sizes. One is the bound; the other, the ceiling of a ratio
            and the floor of a counter, is plausibility.
        control: see Control.
        hardware: classes of machines on which the bound is known to mean something; elsewhere undecided.
        filesystem: the only type of file system on which it does.
        evidence: where the bound comes from.
    """

    id: str
    kind: Kind
    sentence: str
    workloads: Mapping[str, str]
    subject: str
    control: Control
    hardware: tuple[str, ...]
    evidence: str
    peer: str | None = None
    metric: str = _SECONDS
    against: Mapping[str, str] | None = None
    floor: float | str | None = None
    ceiling: float | str | None = None
    filesystem: str | None = None


def read_gates(workloads: Mapping[str, Workload], path: Path = GATES) -> list[Gate]:
    """All gates.

    Raises:
        FormatError: an unknown key, kind, form, workload, contender or name in a formula; a value of the wrong type;
            a gate without a control, or an id twice.
    """
    gates: list[Gate] = []
    for number, entry in enumerate(read_toml(path, "gate"), 1):
        where = f"{path}: gate {number} ({entry.get('id')})"
        gate = _gate(entry, where)
        _check_references(gate, workloads, where)
        if any(gate.id == other.id for other in gates):
            raise FormatError("an id twice", got=gate.id, where=where)
        gates.append(gate)
    return gates


def _gate(entry: dict[str, Any], where: str) -> Gate:
    kinds = {kind.value: kind for kind in Kind}
    if entry.get("kind") not in kinds:
        raise FormatError("unknown kind", got=entry.get("kind"), expected=", ".join(kinds), where=where)
    kind = kinds[entry["kind"]]
    required, optional = _BY_KIND[kind]
    check_keys(entry, _REQUIRED | required, optional, where)
    for name, value in entry.items():
        if not _is_right(name, value):
            raise FormatError(f"{name} is not of the right kind", got=value, where=where)
    control = entry["control"]
    check_keys(control, {"subject", "peer"} if "peer" in entry else {"subject"}, set(), f"{where}: control")
    values = {**entry, "kind": kind, "control": Control(**control), "hardware": tuple(entry["hardware"])}
    assert values.keys() <= {field.name for field in fields(Gate)}
    return Gate(**values)


def _is_right(name: str, value: Any) -> bool:
    if name in ("floor", "ceiling"):
        return _is_text(value) or (type(value) in (int, float) and value >= 0)
    if name in ("workloads", "against"):
        return isinstance(value, dict) and bool(value) and value.keys() <= set(FORMS) and _all_texts(value.values())
    if name == "control":
        return isinstance(value, dict) and _all_texts(value.values())
    if name == "hardware":
        return isinstance(value, list) and bool(value) and _all_texts(value)
    return _is_text(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _all_texts(values: Any) -> bool:
    return all(_is_text(value) for value in values)


def _check_references(gate: Gate, workloads: Mapping[str, Workload], where: str) -> None:
    if gate.against is not None and gate.against.keys() != gate.workloads.keys():
        raise FormatError(
            "against and workloads name different forms", got=[*gate.against], expected=[*gate.workloads], where=where
        )
    who = {gate.subject, gate.peer, gate.control.subject, gate.control.peer} - {None}
    for name in [*gate.workloads.values(), *(gate.against or {}).values()]:
        if name not in workloads:
            raise FormatError("unknown workload", got=name, where=where)
        unknown = sorted(map(str, who - set(workloads[name].contenders)))
        if unknown:
            raise FormatError(f"workload {name} does not measure a contender", got=unknown, where=where)
    known = set(next(iter(workloads.values())).sizes())
    for bound in (gate.floor, gate.ceiling):
        unknown = sorted(names_used(bound, where) - known)
        if unknown:
            raise FormatError("unknown name in a formula", got=unknown, expected=sorted(known), where=where)
