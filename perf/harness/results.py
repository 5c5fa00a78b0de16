"""Evidence: every sample with the machine, the versions and the shapes, so that a figure can be disputed later."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from conformance.harness.environment import environment, implementation_facts
from perf.harness.judge import Machine, Outcome
from perf.harness.nvml import GpuSample, Unavailable, open_gpu
from perf.harness.paired import Round
from perf.harness.workloads import Workload
from twinproof.errors import ConfigError, FormatError

__all__ = [
    "Evidence",
    "collect",
    "commit_of",
    "differences",
    "facts_of",
    "hardware_of",
    "hardware_said",
    "machine_of",
    "read_evidence",
    "read_side",
    "title_of",
    "write_evidence",
]

_VERSION = 1
# What each field is in a file, for whoever wrote one by hand.
_KINDS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("environment", "workloads", "rounds"), dict),
    **dict.fromkeys(("implementation", "form", "created"), str),
    "outcomes": list,
    "details": (dict, type(None)),
}
# What each outcome has; a value that is absent is null.
_OUTCOME: dict[str, type | tuple[type, ...]] = {
    "gate": str,
    "kind": str,
    "workload": str,
    "result": str,
    "reason": str,
    "bound": (int, float),
}
_MEASURED = ("value", "low", "high")
# Of two machines with as much memory, kernels leave programs a little less or more.
_MEMORY_WITHIN = 1.1
# Two ranks on one processor take turns, and every ratio between paths changes.
_CPU_COUNT_MIN = 2


@dataclass(frozen=True)
class Evidence:
    """One run of the bench, as it is stored."""

    implementation: str
    form: str
    seed: int
    machine: Machine
    environment: dict[str, Any]
    workloads: dict[str, dict[str, Any]]
    rounds: dict[str, list[Round]]
    outcomes: list[dict[str, Any]]
    created: str = ""
    details: dict[str, Any] | None = None


def machine_of(facts: dict[str, Any]) -> Machine:
    """The classes of what ``environment()`` describes: ``cpu`` or ``cpu-1``, ``cuda`` and the name of each GPU."""
    count = facts["cpu"]["count"] or 0
    classes = ["cpu" if count >= _CPU_COUNT_MIN else "cpu-1"]
    if isinstance(facts["gpus"], list) and facts["gpus"]:
        classes += ["cuda"]
        classes += [re.sub(r"[^a-z0-9]+", "-", gpu["name"].lower()) for gpu in facts["gpus"]]
    return Machine(tuple(dict.fromkeys(classes)), facts["file_system"]["type"])


def hardware_of(evidence: Evidence) -> str:
    """What a ratio of two programs depends on, in words: processor, cores, torch's threads, GPUs, file system."""
    facts = evidence.environment
    cpu = facts.get("cpu", {})
    words = [f"{cpu.get('count', '?')} x {cpu.get('model', 'unknown processor')}"]
    threads = facts.get("torch", {}).get("threads")
    if threads is not None and threads != cpu.get("count"):
        words.append(f"{threads} threads")
    words += [name for name in evidence.machine.classes if name != "cpu"]
    return ", ".join([*words, evidence.machine.filesystem])


def hardware_said(evidence: Evidence) -> dict[str, Any]:
    """Facts that times depend on and that the evidence states: what an older one does not state is absent.

    A hypervisor gives several generations of processors one name, so that their flags say more than it does.
    """
    facts = evidence.environment
    variables = facts.get("variables")
    said = {
        "machine": hardware_of(evidence),
        "cpu flags": facts.get("cpu", {}).get("flags"),
        "torch's vectors": facts.get("torch", {}).get("capability"),
        "memory_bytes": facts.get("memory_bytes"),
        # Of what is set for this process, what is the library's own.
        "variables": variables and {name: value for name, value in variables.items() if name.startswith("FASTIMPL_")},
    }
    return {name: value for name, value in said.items() if value not in (None, "unavailable")}


def differences(one: Evidence, other: Evidence) -> dict[str, tuple[str, str]]:
    """What makes times of two runs incomparable, in words: by name, what each says; empty where nothing does.

    A fact that one of them does not state is no difference. Memory may differ by a tenth.
    """
    old, new = hardware_said(one), hardware_said(other)
    return {
        name: (_in_words(old[name]), _in_words(new[name]))
        for name in old
        if name in new and old[name] != new[name] and not (name == "memory_bytes" and _is_near(old[name], new[name]))
    }


def _is_near(one: float, other: float) -> bool:
    return max(one, other) <= _MEMORY_WITHIN * min(one, other)


def _in_words(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{name}={inner}" for name, inner in sorted(value.items())) or "none"
    return (" ".join(map(str, value)) or "none") if isinstance(value, list) else str(value)


def title_of(evidence: Evidence) -> str:
    """A run in a line: implementation, commit, time, form, machine."""
    commit = evidence.environment.get("commit") or "unknown commit"
    made = evidence.created[:16] or "unknown time"
    return f"{evidence.implementation} at {commit}, {made}, {evidence.form} form, {hardware_of(evidence)}"


def commit_of(implementation: str) -> str | None:
    """The commit of the tree that the implementation lies in, ``+`` after it for changes; None outside of any."""
    try:
        spec = importlib.util.find_spec(implementation)
    except ModuleNotFoundError:  # Of a parent.
        return None
    if spec is None or spec.origin is None:
        return None
    place = Path(spec.origin).parent

    def git(*words: str) -> str | None:
        command = ["git", "-C", str(place), *words]
        try:
            found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return found.stdout if found.returncode == 0 else None

    # An installed package may lie inside some tree that does not hold it.
    if not git("ls-files", "--", Path(spec.origin).name):
        return None
    commit = git("rev-parse", "--short=10", "HEAD")
    return None if commit is None else commit.strip() + ("+" if git("status", "--porcelain", "-uno") else "")


def facts_of(folder: Path, implementation: str) -> dict[str, Any]:
    """Versions, hardware, the file system of ``folder``, the implementation's build, and the GPU's present state."""
    facts = environment(folder)
    # A folder's name is of one machine; its file system is what matters.
    facts["file_system"].pop("folder", None)
    facts["implementation"] = {**implementation_facts(implementation), "file": None}
    facts["commit"] = commit_of(implementation)
    gpu = open_gpu()
    if isinstance(gpu, Unavailable):
        facts["gpu_state"] = f"unavailable: {gpu.reason}"
    else:
        with gpu:
            facts["gpu_state"] = _as_dict(gpu.sample())
    return facts


def _as_dict(sample: GpuSample) -> dict[str, Any]:
    return {**vars(sample), "throttle_reasons": list(sample.throttle_reasons)}


def collect(
    *,
    implementation: str,
    form: str,
    seed: int,
    facts: dict[str, Any],
    workloads: dict[str, Workload],
    rounds: dict[str, list[Round]],
    outcomes: list[Outcome],
    details: dict[str, Any],
) -> Evidence:
    """Evidence of a run that has just ended."""
    return Evidence(
        implementation=implementation,
        form=form,
        seed=seed,
        machine=machine_of(facts),
        environment=facts,
        workloads={name: workloads[name].as_dict() for name in rounds},
        rounds=rounds,
        outcomes=[outcome.as_dict() for outcome in outcomes],
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        details=details,
    )


def write_evidence(evidence: Evidence, path: Path) -> None:
    """Store it as JSON, folders made as needed."""
    document = {"version": _VERSION, **vars(evidence), "machine": vars(evidence.machine)}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def read_evidence(path: Path) -> Evidence:
    """Read it back.

    Raises:
        FormatError: no JSON, another version, or fields that evidence does not have.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        version = document.pop("version")
        if version != _VERSION:
            raise FormatError("unknown version of evidence", got=version, expected=_VERSION, where=path)
        machine = document.pop("machine")
        for name, kind in _KINDS.items():
            if name in document and not isinstance(document[name], kind):
                got = type(document[name]).__name__
                raise FormatError(f"{name} of evidence is of another type", got=got, expected=kind, where=path)
        _check_measured(document.get("rounds", {}), document.get("outcomes", []), path)
        return Evidence(**document, machine=Machine(tuple(machine["classes"]), machine["filesystem"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, FormatError):
            raise
        # What a KeyError says of itself is the key alone.
        got = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise FormatError("not the evidence of a bench", got=got, expected="JSON of a run", where=path) from error


def _check_measured(rounds: dict[str, Any], outcomes: list[Any], path: Path) -> None:
    """Raises FormatError where an outcome or a round is not what others read in it."""
    for number, outcome in enumerate(outcomes):
        fields = outcome if isinstance(outcome, dict) else {}
        wrong = [name for name, kind in _OUTCOME.items() if not isinstance(fields.get(name), kind)]
        for side in ("subject", "control"):
            found = fields.get(side)
            measured = found if isinstance(found, dict) else {}
            is_read = all(isinstance(measured.get(name, ""), (int, float, type(None))) for name in _MEASURED)
            wrong += [] if is_read else [side]
        if wrong:
            got, expected = {name: fields.get(name) for name in wrong}, [*_OUTCOME, "subject", "control"]
            raise FormatError(
                "not the outcome of a gate", got=got, expected=expected, where=f"{path}: outcome {number}"
            )
    for name, found in rounds.items():
        if not isinstance(found, list) or not all(map(_is_round, found)):
            said = "for each round and contender, numbers by name"
            raise FormatError("not the rounds of a workload", got=found, expected=said, where=f"{path}: {name}")


def _is_round(one: Any) -> bool:
    return isinstance(one, dict) and all(
        isinstance(found, dict) and all(isinstance(value, (int, float)) for value in found.values())
        for found in one.values()
    )


def read_side(path: Path) -> list[Evidence]:
    """The run of a file, or the runs below a folder, in the order in which they were made.

    Raises:
        FormatError: see :func:`read_evidence`.
        ConfigError: a folder without any.
    """
    if not path.is_dir():
        return [read_evidence(path)]
    found = [read_evidence(each) for each in sorted(path.rglob("*.json"))]
    if not found:
        raise ConfigError("no evidence", got=0, expected="results of a bench, as JSON", where=path)
    return sorted(found, key=lambda run: run.created)
