"""Which collected tests run, and how the ledger changes that; a waiver that waives nothing is an error."""

from __future__ import annotations

import pytest

from conformance.harness.capabilities import check_words
from conformance.harness.devices import fixtures_on, is_kept_from, stems_on
from conformance.harness.ledger import Deviation
from conformance.harness.planted_run import bug_of
from conformance.harness.requirements import Requirement, RequirementError, check_unique, collect_requirements
from conformance.harness.suite import Suite, parameters_of, requirement_of_item

__all__ = ["WAIVED", "select", "tolerance_of"]

_DEFAULT_FACTOR = 2.0
_FACTOR = pytest.StashKey[float]()
# Of a test: the entry of a ledger that covers it.
WAIVED = pytest.StashKey[Deviation]()


def tolerance_of(item: pytest.Item) -> float:
    """The factor for derived tolerances of a test."""
    return item.stash.get(_FACTOR, _DEFAULT_FACTOR)


def select(suite: Suite, items: list[pytest.Item]) -> None:
    """Check what was collected, apply the ledger, and keep only planted variants in that mode. Changes ``items``.

    Raises:
        pytest.UsageError: two tests with one id; no such implementation, or one that cannot be imported; capabilities
            that the suite does not know; a ledger entry that matches nothing.
    """
    proofs = [(item, found) for item in items if (found := requirement_of_item(item)) is not None]
    if not proofs:
        return
    try:
        check_unique(found for _, found in proofs)
    except RequirementError as error:
        raise pytest.UsageError(str(error)) from error
    asked = {need for _, found in proofs for need in found.needs}
    for stem in {found.stem: None for _, found in proofs}:
        check_words(suite.implementation, stem, asked)
    if suite.device in ("simt", "simt-host") and suite.implementation != "fastimpl":
        raise pytest.UsageError(
            f"--twinproof-device {suite.device}: the kernels are fastimpl's, not {suite.implementation}'s"
        )
    _apply_ledger(suite, [item for item, _ in proofs])
    waived = {item.nodeid for item in items if WAIVED in item.stash and bug_of(item) is not None}
    dropped = [
        item
        for item in items
        if item.nodeid in waived or (suite.planted_mode == "only" and bug_of(item) is None) or not _runs_on(suite, item)
    ]
    if dropped:
        suite.config.hook.pytest_deselected(items=dropped)
        gone = set(map(id, dropped))
        items[:] = [item for item in items if id(item) not in gone]


def _nothing() -> None:
    """What an item without a function does."""


def _runs_on(suite: Suite, item: pytest.Item) -> bool:
    if suite.device == "cpu":
        return True
    if is_kept_from(suite.device, getattr(item, "function", _nothing)):
        return False
    requirement = requirement_of_item(item)
    if requirement is not None and requirement.stem in stems_on(suite.device):
        return True
    return not fixtures_on(suite.device, suite.implementation).isdisjoint(getattr(item, "fixturenames", ()))


def _apply_ledger(suite: Suite, items: list[pytest.Item]) -> None:
    collected = [found for item in items if (found := requirement_of_item(item)) is not None]
    for deviation in suite.deviations:
        covered = [item for item in items if _covers(deviation, item)]
        if deviation.kind == "tolerance" and covered and not any(map(_has_tolerance, covered)):
            raise pytest.UsageError(f"{deviation.place}: widens nothing; its requirement has no derived tolerance")
        for item in covered:
            # A requirement that is known not to hold cannot tell a planted bug from its own deviation.
            item.stash[WAIVED] = deviation
            if bug_of(item) is None:
                _waive(deviation, item)
        if not covered and _should_match(suite, deviation, collected):
            raise pytest.UsageError(
                f"{deviation.place}: matches no test; remove it or correct its requirement and scope"
            )


def _has_tolerance(item: pytest.Item) -> bool:
    return "tolerance_factor" in getattr(item, "fixturenames", ())


def _covers(deviation: Deviation, item: pytest.Item) -> bool:
    found = requirement_of_item(item)
    return found is not None and found.id == deviation.requirement and deviation.covers(parameters_of(item))


def _should_match(suite: Suite, deviation: Deviation, collected: list[Requirement]) -> bool:
    """Whether an entry without a match is wrong: its requirement was collected whole, or no module has it."""
    if any("::" in argument for argument in suite.config.args):
        return False
    if any(found.id == deviation.requirement for found in collected):
        return True
    owner = next((found for found in collect_requirements() if found.id == deviation.requirement), None)
    return owner is None or owner.module in {found.module for found in collected}


def _waive(deviation: Deviation, item: pytest.Item) -> None:
    reason = f"{deviation.kind}: {deviation.reason} ({deviation.tracker}, since {deviation.since})"
    if deviation.kind == "xfail":
        item.add_marker(pytest.mark.xfail(strict=True, reason=reason))
    elif deviation.kind == "tolerance":
        item.stash[_FACTOR] = deviation.factor
    else:
        item.add_marker(pytest.mark.skip(reason=reason))
