"""Hypothesis budgets, so that CI never fails by luck and a nightly run never repeats yesterday's examples.

``ci`` is derandomised, without deadline or database; ``half`` and ``quick`` are half and a quarter of it. ``dev`` is a
quarter too, but random and with the database, so that a failure comes back at once; ``nightly`` is random with ten
times the examples. With ``thousand`` a state machine runs a thousand times the examples of ``ci``, or until its time is
over; all else as in ``ci``, but random. Planted bugs have ``ci``'s examples in every profile: a failure ends them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hypothesis import settings

__all__ = ["DERANDOMISED", "PROFILES", "examples", "expecting_failure", "generate_only", "run_machine", "using_profile"]

PROFILES = ("quick", "half", "dev", "ci", "nightly", "thousand")
# Those that draw the same examples in every run.
DERANDOMISED = ("quick", "half", "ci")
_CI_EXAMPLES = 100
_THOUSAND = 1000
# How often a state machine runs at most, and for how many seconds.
_ROUNDS: ContextVar[tuple[int, float]] = ContextVar("rounds of a machine", default=(1, 0.0))
_FAILURE_EXPECTED: ContextVar[bool] = ContextVar("failure expected", default=False)


def _register() -> None:
    from hypothesis import HealthCheck, settings

    # Fixtures such as tmp_path are shared by the examples of a test on purpose: tests make their own sub-folders.
    suppressed = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
    # Where CI is set in the environment, Hypothesis starts from other settings, derandomised ones among them. A profile
    # is the same wherever it runs.
    common = settings(settings.get_profile("default"), deadline=None, suppress_health_check=suppressed)
    for name, count in (("quick", _CI_EXAMPLES // 4), ("half", _CI_EXAMPLES // 2), ("ci", _CI_EXAMPLES)):
        settings.register_profile(
            f"twinproof-{name}", parent=common, derandomize=True, database=None, max_examples=count, print_blob=False
        )
    settings.register_profile("twinproof-dev", parent=common, max_examples=_CI_EXAMPLES // 4, print_blob=True)
    settings.register_profile(
        "twinproof-nightly", parent=common, database=None, max_examples=_CI_EXAMPLES * 10, print_blob=True
    )
    settings.register_profile(
        "twinproof-thousand", parent=common, database=None, max_examples=_CI_EXAMPLES, print_blob=True
    )


@contextmanager
def using_profile(profile: str, seconds: float = 60.0) -> Iterator[None]:
    """Make ``profile`` the default for what is imported or run inside, then restore the user's own.

    ``seconds`` bounds each state machine in the profile ``thousand``: no round of its examples begins later.
    """
    from hypothesis import settings

    _register()
    before = settings.get_current_profile_name()
    settings.load_profile(f"twinproof-{profile}")
    token = _ROUNDS.set((_THOUSAND, seconds) if profile == "thousand" else (1, 0.0))
    try:
        yield
    finally:
        _ROUNDS.reset(token)
        settings.load_profile(before)


def examples(ci_count: int) -> settings:
    """Hypothesis settings with ``ci_count`` examples in the ci profile, scaled like the profile in the others."""
    from hypothesis import settings

    return settings(max_examples=max(1, round(ci_count * _scale())))


def _scale() -> float:
    """How many examples the profile in use has for one of ``ci``."""
    from hypothesis import settings

    default = settings.default
    return (default.max_examples if default is not None else _CI_EXAMPLES) / _CI_EXAMPLES


def generate_only(parent: Any) -> Any:
    """``parent`` without replay, shrinking or explanation, on ``ci``'s examples: enough to see a planted bug die."""
    from hypothesis import HealthCheck, Phase, settings

    return settings(
        parent,
        phases=(Phase.explicit, Phase.generate),
        max_examples=min(max(1, round(parent.max_examples / _scale())), _CI_EXAMPLES),
        derandomize=True,
        database=None,
        print_blob=False,
        report_multiple_bugs=False,
        # A complaint about speed or fixtures would stand where a verdict is wanted.
        suppress_health_check=list(HealthCheck),
    )


@contextmanager
def expecting_failure() -> Iterator[None]:
    """While entered, the first failure of a state machine ends it."""
    token = _FAILURE_EXPECTED.set(True)
    try:
        yield
    finally:
        _FAILURE_EXPECTED.reset(token)


def run_machine(machine: Any, *, settings: Any = None) -> None:
    """Run a rule-based state machine inside a requirement test, on a short budget where a failure is expected.

    In the profile ``thousand`` it runs again and again, with other examples each time, and prints how often it did.
    """
    from hypothesis.stateful import run_state_machine_as_test

    chosen = settings if settings is not None else machine.TestCase.settings
    if _FAILURE_EXPECTED.get():
        run_state_machine_as_test(machine, settings=generate_only(chosen))
        return
    (round_count, seconds), begun_s = _ROUNDS.get(), time.monotonic()
    for number in range(1, round_count + 1):
        run_state_machine_as_test(machine, settings=chosen)
        if number == round_count or time.monotonic() - begun_s >= seconds:
            break
    if round_count > 1:
        name = machine.__mro__[1].__name__
        sys.stdout.write(f"{name}: {number} of {round_count} times {chosen.max_examples} programs\n")
