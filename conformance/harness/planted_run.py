"""Running a requirement against a planted bug and turning the outcome round.

A requirement may be parametrised: the bug is dead as soon as one case kills it, and the remaining cases are not run. It
survives when the last case ends without a kill. Anything but a comparison that spoke up is a failure of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest

from conformance.harness.outcomes import CaseResult
from conformance.harness.planted import PlantedBug, activate, bugs_beside, is_kill
from conformance.harness.profiles import expecting_failure, generate_only
from conformance.harness.requirements import requirement_of
from conformance.harness.suite import Suite, parameters_of

__all__ = ["PARAMETER", "Group", "budget", "bug_of", "groups_of", "judge", "kills", "parametrize", "planted"]

PARAMETER = "planted_bug"
# Where Hypothesis keeps the settings of a test; its own pytest plugin reads them there.
_SETTINGS = "_hypothesis_internal_use_settings"


@dataclass(frozen=True)
class _Planted:
    module: str
    bug: PlantedBug


@dataclass
class Group:
    """The cases of one requirement against one bug: how many are still to come, and whether it is dead yet."""

    remaining: int = 0
    killed: bool = False
    survived: int = 0


def parametrize(metafunc: pytest.Metafunc, suite: Suite) -> None:
    """Add one variant of a requirement test per bug that names it; without mode ``only``, beside the test itself.

    Mode ``own`` leaves out the bugs of shared code: a run on another implementation, with mode ``all``, plants them.
    """
    requirement = requirement_of(metafunc.function)
    if requirement is None or suite.planted_mode == "none":
        return
    module, bugs = bugs_beside(metafunc.module.__name__)
    fitting = [bug for bug in bugs if requirement.id in bug.requirements and suite.implementation in bug.targets]
    unresolved = [sentence for bug in fitting for sentence in bug.unresolved()]
    if unresolved:
        raise pytest.Collector.CollectError("\n".join(unresolved))
    if suite.planted_mode == "own":
        fitting = [bug for bug in fitting if not bug.shared]
    parameters = [pytest.param(_Planted(module, bug), id=f"planted:{bug.id}") for bug in fitting]
    if suite.planted_mode != "only":
        parameters.insert(0, pytest.param(None, id=pytest.HIDDEN_PARAM))
    if parameters:
        metafunc.fixturenames.append(PARAMETER)
        metafunc.parametrize(PARAMETER, parameters)


def _planted_of(item: pytest.Item) -> _Planted | None:
    value = parameters_of(item).get(PARAMETER)
    return value if isinstance(value, _Planted) else None


def bug_of(item: pytest.Item) -> PlantedBug | None:
    """The bug that a collected test runs against."""
    found = _planted_of(item)
    return found.bug if found is not None else None


def groups_of(items: list[pytest.Item]) -> dict[str, Group]:
    """The groups of all items that will run, by node id; cases of one requirement and bug share theirs."""
    shared: dict[tuple[str, str], Group] = {}
    groups: dict[str, Group] = {}
    for item in items:
        bug, requirement = bug_of(item), requirement_of(getattr(item, "obj", None))
        if bug is not None and requirement is not None:
            group = shared.setdefault((requirement.id, bug.id), Group())
            group.remaining += 1
            groups[item.nodeid] = group
    return groups


@contextmanager
def planted(item: pytest.Item) -> Iterator[None]:
    """Plant the item's bug for the call of the test function; fixtures see the implementation as it is."""
    found = _planted_of(item)
    with activate(found.module, found.bug) if found is not None else nullcontext():
        yield


@contextmanager
def budget(item: pytest.Item) -> Iterator[None]:
    """Where a failure is expected, let Hypothesis stop at the first one: shrinking it would be thrown away."""
    test = getattr(item, "obj", None)
    settings = getattr(test, _SETTINGS, None)
    if _planted_of(item) is None and item.get_closest_marker("xfail") is None:
        yield
        return
    with expecting_failure():
        if settings is not None:
            setattr(test, _SETTINGS, generate_only(settings))
        try:
            yield
        finally:
            if settings is not None:
                setattr(test, _SETTINGS, settings)


def kills(group: Group, call: pytest.CallInfo[Any]) -> bool:
    """Whether what ended this part of a planted case is the kill that the run hopes for, or comes behind one."""
    if call.excinfo is None or call.when == "teardown":
        return False
    return group.killed or (call.when == "call" and is_kill(call.excinfo.value))


def judge(
    group: Group, case: CaseResult, when: str, error: BaseException | None, report: pytest.TestReport, killed: bool
) -> None:
    """Turn the outcome of a planted case round, after its call or after a setup that did not pass.

    ``killed`` is what :func:`kills` said; of a kill, ``report`` tells nothing.
    """
    if when == "teardown" or (when == "setup" and report.passed and not killed):
        return
    group.remaining -= 1
    assert case.bug is not None
    if killed or group.killed:
        case.verdict, group.killed = "killed", True
    elif error is None:
        case.verdict = "survived"
        group.survived += 1
    elif report.skipped:
        case.verdict = "skipped"
    else:
        case.verdict = "no kill"
    if case.verdict == "killed":
        report.outcome, report.longrepr = "passed", None
    elif case.verdict == "no kill":
        text = f"no kill: {type(error).__name__} instead of a comparison, with planted bug {case.bug.id}"
        report.outcome, report.longrepr = "failed", f"{text}\n{case.bug.sentence}\n\n{report.longreprtext}"
    elif group.remaining == 0 and group.survived:
        text = f"survived: planted bug {case.bug.id} went unnoticed by {case.requirement.id}"
        report.outcome, report.longrepr = "failed", f"{text}\n{case.bug.sentence}"
