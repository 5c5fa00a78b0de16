"""What one run of the suite was asked to do, so that hooks, header, report and reproduction say the same thing."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from conformance.harness.devices import DEVICES
from conformance.harness.environment import environment, implementation_facts
from conformance.harness.implementation import resolve_name, unimportable
from conformance.harness.ledger import Deviation, LedgerError, builtin_ledger, read_ledgers
from conformance.harness.outcomes import Recorder
from conformance.harness.profiles import DERANDOMISED, PROFILES
from conformance.harness.requirements import Requirement, requirement_of

__all__ = ["OPTIONS", "PLANTED_MODES", "SUITE", "Suite", "parameters_of", "requirement_of_item"]

PLANTED_MODES = ("none", "only", "own", "all")
OPTIONS: dict[str, dict[str, Any]] = {
    "impl": {
        "metavar": "NAME",
        "help": "implementation under test: a module, or a registered name (default: fastimpl)",
    },
    "device": {"choices": DEVICES, "help": "where objects that take a device are sent (default: cpu)"},
    "profile": {"choices": PROFILES, "help": "how many examples, and whether they are random (default: ci)"},
    "seconds": {
        "metavar": "N",
        "type": float,
        "help": "for how long each state machine runs with the profile thousand (default: 60)",
    },
    "ledger": {"action": "append", "metavar": "FILE", "help": "known deviations, strict TOML; may be repeated"},
    "report": {"metavar": "FILE", "help": "write the outcome of every requirement as JSON"},
    "verdict": {"metavar": "FILE", "help": "the same for a caller that reads it at once; nothing is said of it"},
    "planted": {
        "choices": PLANTED_MODES,
        "help": "run requirements against planted bugs instead (only) or as well (all, or own: none of shared code)",
    },
}


@dataclass
class Suite:
    """The options of a run and what was learned since. Resolved lazily: a run without requirements resolves nothing."""

    config: pytest.Config
    recorder: Recorder = field(default_factory=Recorder)

    def option(self, name: str) -> Any:
        """An option as given, or None."""
        return self.config.getoption(f"twinproof_{name}", None)

    @property
    def profile(self) -> str:
        """The Hypothesis profile of requirement tests."""
        return self.option("profile") or "ci"

    @property
    def seconds(self) -> float:
        """For how long a state machine runs with the profile ``thousand``."""
        given = self.option("seconds")
        return 60.0 if given is None else float(given)

    def check_seconds(self) -> None:
        """Demand a time that can pass, and that something runs for so long; ``pytest.UsageError`` otherwise."""
        given = self.option("seconds")
        if given is None:
            return
        if not 0 < given < math.inf:
            raise pytest.UsageError(f"--twinproof-seconds: got {given:g}, expected a number above 0")
        if self.profile != "thousand":
            raise pytest.UsageError(
                f"--twinproof-seconds: got the profile {self.profile}, expected thousand: elsewhere it has no effect"
            )

    @property
    def planted_mode(self) -> str:
        """``none``, ``only``, ``own`` or ``all``."""
        return self.option("planted") or "none"

    @property
    def implementation_name(self) -> str:
        """What was asked for. A name without a letter, as of a variable that is not set, is one that no module has."""
        given = self.option("impl")
        return "fastimpl" if given is None else str(given)

    @cached_property
    def implementation(self) -> str:
        """The module under test; ``pytest.UsageError`` when there is no such module."""
        return resolve_name(self.implementation_name)

    @property
    def device(self) -> str:
        """The device that objects are sent to."""
        return self.option("device") or "cpu"

    @cached_property
    def deviations(self) -> tuple[Deviation, ...]:
        """The entries of ``--twinproof-ledger`` and of the adapter's own; ``pytest.UsageError`` for a malformed one."""
        paths = [Path(name) for name in self.option("ledger") or []]
        try:
            return read_ledgers([*builtin_ledger(self.implementation), *paths])
        except LedgerError as error:
            raise pytest.UsageError(f"ledger: {error}") from error

    @cached_property
    def environment(self) -> dict[str, Any]:
        """Facts about machine and versions."""
        return environment(Path(self.config.rootpath))

    @cached_property
    def facts(self) -> dict[str, Any]:
        """Facts about the implementation; ``pytest.UsageError`` when it cannot be imported."""
        try:
            return implementation_facts(self.implementation)
        except Exception as error:
            raise unimportable(self.implementation, error) from error

    @property
    def seed(self) -> str:
        """Hypothesis' seed, or why there is none."""
        seed = self.config.getoption("hypothesis_seed", None)
        if seed is not None:
            return str(seed)
        return "derandomised" if self.profile in DERANDOMISED else "random"

    def command(self, item: pytest.Item) -> str:
        """One command that runs ``item`` again in the same way."""
        module = getattr(item, "module", None)
        name = getattr(module, "__name__", "")
        # As a module it finds packages of the current folder, as ``twinproof verify`` does.
        words = ["python", "-m", "pytest", "-p", "conformance.harness.plugin"]
        words += ["--pyargs", "::".join([name, *item.nodeid.split("::")[1:]])] if "." in name else [item.nodeid]
        words += ["--twinproof-impl", self.implementation_name, "--twinproof-profile", self.profile]
        if self.option("seconds") is not None:
            words += ["--twinproof-seconds", f"{self.seconds:g}"]
        if self.planted_mode != "none":
            words += ["--twinproof-planted", self.planted_mode]
        if self.device != "cpu":
            words += ["--twinproof-device", self.device]
        for path in self.option("ledger") or []:
            words += ["--twinproof-ledger", path]
        if self.config.getoption("hypothesis_seed", None) is not None:
            words.append(f"--hypothesis-seed={self.seed}")
        return shlex.join(words)


SUITE = pytest.StashKey[Suite]()


def requirement_of_item(item: pytest.Item) -> Requirement | None:
    """The requirement that a collected test proves; None for everybody else's tests."""
    return requirement_of(getattr(item, "obj", None)) if isinstance(item, pytest.Function) else None


def parameters_of(item: pytest.Item) -> Mapping[str, Any]:
    """The parameters of a parametrised test."""
    callspec = getattr(item, "callspec", None)
    return callspec.params if callspec is not None else {}
