"""Gates as typed data, checked so strictly that a misspelt bound cannot switch one off.

A gate names its shapes, what is compared with what, its bound, and a control: a measurement that violates the bound
and that the gate must refuse. A gate whose control passes proves nothing and fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, ParamSpec

from perf.harness.declarations import modules, read_declarations
from perf.harness.formulas import names_used
from perf.harness.workloads import FORMS, SIZES, Workload
from twinproof.errors import FormatError

__all__ = ["Control", "Gate", "Kind", "claim", "counter", "limit", "memory", "read_gates", "regression"]

_SECONDS = "seconds"
_CPU = ("cpu",)
_Parameters = ParamSpec("_Parameters")


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

    Raises:
        FormatError: a value of the wrong type, an unknown form or name in a formula, a bound that the kind needs and
            that is missing.
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

    def __post_init__(self) -> None:
        """Refuse what types alone do not."""
        for name, is_right in self._checks().items():
            if not is_right:
                got, expected = getattr(self, name), f"{type(self).__annotations__[name]}, see {type(self).__name__}"
                raise FormatError(f"{name} is not of the right kind", got=got, expected=expected, where=self.id)
        for bound in (self.floor, self.ceiling):
            unknown = sorted(names_used(bound, self.id) - set(SIZES))
            if unknown:
                raise FormatError("unknown name in a formula", got=unknown, expected=sorted(SIZES), where=self.id)
        if self.against is not None and self.against.keys() != self.workloads.keys():
            message = "against and workloads name different forms"
            raise FormatError(message, got=[*self.against], expected=[*self.workloads], where=self.id)

    def _checks(self) -> dict[str, bool]:
        kind: Any = self.kind
        is_paired = isinstance(kind, Kind) and kind.is_paired
        return {
            "kind": isinstance(kind, Kind),
            **{name: _is_text(getattr(self, name)) for name in ("id", "sentence", "subject", "metric", "evidence")},
            "workloads": _is_by_form(self.workloads),
            "against": self.against is None or _is_by_form(self.against),
            "peer": _is_text(self.peer) or (self.peer is None and not is_paired),
            "floor": _is_bound(self.floor) or (self.floor is None and not is_paired),
            "ceiling": _is_bound(self.ceiling) or (self.ceiling is None and kind is Kind.REGRESSION),
            "filesystem": self.filesystem is None or _is_text(self.filesystem),
            "hardware": isinstance(self.hardware, tuple) and bool(self.hardware) and all(map(_is_text, self.hardware)),
            "control": _is_control(self.control, has_peer=self.peer is not None),
        }


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _is_bound(value: Any) -> bool:
    return _is_text(value) or (type(value) in (int, float) and value >= 0)


def _is_by_form(value: Any) -> bool:
    return isinstance(value, dict) and bool(value) and value.keys() <= set(FORMS) and all(map(_is_text, value.values()))


def _is_control(value: Any, *, has_peer: bool) -> bool:
    right = isinstance(value, Control) and _is_text(value.subject)
    return right and (_is_text(value.peer) if has_peer else value.peer is None)


def claim(
    id: str,
    sentence: str,
    *,
    subject: str = "ours",
    peer: str,
    floor: float | str,
    ceiling: float | str,
    control: str,
    control_peer: str | None = None,
    evidence: str,
    full: str | None = None,
    short: str | None = None,
    test: str | None = None,
    metric: str = _SECONDS,
    hardware: tuple[str, ...] = _CPU,
    filesystem: str | None = None,
) -> Gate:
    """A gate on time of the peer / time of the subject, which must reach ``floor``: the peer is what others offer.

    ``control`` takes the subject's place, against the same peer unless ``control_peer`` is another. ``full``,
    ``short`` and ``test`` are the workloads of the forms in which it is judged.
    """
    return Gate(
        id=id,
        kind=Kind.CLAIM,
        sentence=sentence,
        workloads=_by_form(full, short, test),
        subject=subject,
        peer=peer,
        floor=floor,
        ceiling=ceiling,
        control=Control(control, control_peer or peer),
        evidence=evidence,
        metric=metric,
        hardware=hardware,
        filesystem=filesystem,
    )


def _of_kind(kind: Kind, declare: Callable[_Parameters, Gate]) -> Callable[_Parameters, Gate]:
    """``declare`` with the same parameters, for another kind."""

    def declare_other(*args: _Parameters.args, **options: _Parameters.kwargs) -> Gate:
        return replace(declare(*args, **options), kind=kind)

    return declare_other


# Like a claim, but the peer is what the machine can do.
limit = _of_kind(Kind.LIMIT, claim)


def regression(
    id: str,
    sentence: str,
    *,
    subject: str = "ours",
    peer: str,
    floor: float | str,
    control: str,
    evidence: str,
    full: str | None = None,
    short: str | None = None,
    test: str | None = None,
    metric: str = _SECONDS,
    hardware: tuple[str, ...] = _CPU,
    filesystem: str | None = None,
) -> Gate:
    """A gate of ``bench compare``: the ratio to the peer in the later run / the same ratio in the earlier one."""
    return Gate(
        id=id,
        kind=Kind.REGRESSION,
        sentence=sentence,
        workloads=_by_form(full, short, test),
        subject=subject,
        peer=peer,
        floor=floor,
        control=Control(control, peer),
        evidence=evidence,
        metric=metric,
        hardware=hardware,
        filesystem=filesystem,
    )


def counter(
    id: str,
    sentence: str,
    *,
    subject: str = "ours",
    peer: str | None = None,
    metric: str,
    floor: float | str | None = None,
    ceiling: float | str,
    control: str,
    evidence: str,
    full: str | None = None,
    short: str | None = None,
    test: str | None = None,
    hardware: tuple[str, ...] = _CPU,
) -> Gate:
    """A gate on a count over all ranks, or on its share of the peer's, that no round may bring above ``ceiling``."""
    return Gate(
        id=id,
        kind=Kind.COUNTER,
        sentence=sentence,
        workloads=_by_form(full, short, test),
        subject=subject,
        peer=peer,
        metric=metric,
        floor=floor,
        ceiling=ceiling,
        control=Control(control, peer),
        evidence=evidence,
        hardware=hardware,
    )


def memory(
    id: str,
    sentence: str,
    *,
    subject: str = "ours",
    metric: str,
    ceiling: float | str,
    control: str,
    evidence: str,
    full: str | None = None,
    short: str | None = None,
    test: str | None = None,
    against: Mapping[str, str] | None = None,
    hardware: tuple[str, ...] = _CPU,
) -> Gate:
    """A gate on memory of the largest rank, less that of the workload ``against`` of the same form if it is given."""
    return Gate(
        id=id,
        kind=Kind.MEMORY,
        sentence=sentence,
        workloads=_by_form(full, short, test),
        against=against,
        subject=subject,
        metric=metric,
        ceiling=ceiling,
        control=Control(control),
        evidence=evidence,
        hardware=hardware,
    )


def _by_form(full: str | None, short: str | None, test: str | None) -> dict[str, str]:
    return {form: name for form, name in zip(FORMS, (full, short, test), strict=True) if name is not None}


def read_gates(workloads: Mapping[str, Workload], names: Iterable[str] = modules("gates")) -> list[Gate]:
    """All gates, from the tuple ``GATES`` of each module.

    Raises:
        FormatError: an unknown argument, kind, form, workload, contender or name in a formula; a value of the wrong
            type; a gate without a control, or an id twice.
    """
    gates: list[Gate] = []
    for module in names:
        for number, gate in enumerate(read_declarations(module, "GATES", Gate), 1):
            where = f"{module}: gate {number} ({gate.id})"
            _check_references(gate, workloads, where)
            if any(gate.id == other.id for other in gates):
                raise FormatError("an id twice", got=gate.id, expected="distinct ids", where=where)
            gates.append(gate)
    return gates


def _check_references(gate: Gate, workloads: Mapping[str, Workload], where: str) -> None:
    who = {gate.subject, gate.peer, gate.control.subject, gate.control.peer} - {None}
    for name in [*gate.workloads.values(), *(gate.against or {}).values()]:
        if name not in workloads:
            raise FormatError("unknown workload", got=name, expected=sorted(workloads), where=where)
        unknown = sorted(map(str, who - set(workloads[name].contenders)))
        if unknown:
            expected = workloads[name].contenders
            raise FormatError(
                f"workload {name} does not measure a contender", got=unknown, expected=expected, where=where
            )
