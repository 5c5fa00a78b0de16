"""What a run did not measure, by name and with the reason: nobody should take a gate that was left out for a pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from perf.harness.gates import Gate
from perf.harness.judge import Machine
from perf.harness.paired import Round
from perf.harness.workloads import Workload
from perf.peers.packages import PACKAGES, missing_packages

__all__ = ["left_out_lines"]


def left_out_lines(
    form: str,
    gates: Sequence[Gate],
    workloads: Mapping[str, Workload],
    rounds: Mapping[str, Sequence[Round]],
    machine: Machine,
    lacking: Mapping[str, str],
) -> Iterator[str]:
    """A line for each contender that no round has: why, and which gates are undecided without it.

    ``lacking`` says of workloads what the implementation does not have.
    """
    found: dict[tuple[str, str], list[Gate]] = {}
    for name, measured in rounds.items():
        on_it = [gate for gate in gates if gate.workloads[form] == name]
        present = {who for each in measured for who in each}
        if not present:
            reason = lacking.get(name) or _why_nothing(on_it, machine)
            found.setdefault((name, reason), []).extend(on_it)
            continue
        for who in workloads[name].contenders:
            if who not in present:
                without = [gate for gate in on_it if who in _needed(gate)]
                found.setdefault((who, _why_absent(who)), []).extend(without)
    if found:
        yield "left out"
    for (who, reason), without in found.items():
        undecided = ", ".join(dict.fromkeys(gate.id for gate in without))
        yield f"  {who}: {reason}; " + (f"undecided: {undecided}" if undecided else "no gate needs it")


def _needed(gate: Gate) -> set[str | None]:
    return {gate.subject, gate.peer, gate.control.subject, gate.control.peer}


def _why_absent(who: str) -> str:
    missing = missing_packages(who)
    if missing:
        are = "is" if len(missing) == 1 else "are"
        return f"{' and '.join(missing)} {are} not installed ({PACKAGES[who.split('-')[0]].install})"
    return "it was not measured on this machine"


def _why_nothing(on_it: Sequence[Gate], machine: Machine) -> str:
    wanted = {name for gate in on_it for name in gate.hardware}
    if on_it and not wanted & set(machine.classes):
        return (
            f"nothing was measured: it is for {' or '.join(sorted(wanted))}, and this is {', '.join(machine.classes)}"
        )
    return "nothing was measured on this machine"
