"""State machines: how often they run, and whether what a failure prints can be pasted and run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, _settings, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import refimpl.kvstore
import refimpl.offload
import refimpl.pipeline
from conformance.checkpoint.machine import CheckpointMachine
from conformance.checkpoint.sequences import SequenceMachine
from conformance.harness import Mismatch, assert_equal, run_machine
from conformance.harness.profiles import DERANDOMISED, PROFILES, using_profile
from conformance.kvstore import machine as kvstore_machine
from conformance.kvstore import orders as kvstore_orders
from conformance.offload import machine as offload_machine
from conformance.offload import orders as offload_orders
from conformance.pipeline.machine import ScheduleMachine


class Counting(RuleBasedStateMachine):
    """A machine that notes each of its programs."""

    begun = 0

    @initialize()
    def start(self) -> None:
        type(self).begun += 1

    @rule(value=st.integers(0, 3))
    def step(self, value: int) -> None:
        self.last = value


def test_a_thousand_times_the_examples_within_a_time(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = settings(max_examples=3, stateful_step_count=2, database=None, deadline=None)
    # A clock on which every look takes a second: one look before the first round, one after each.
    ticks = count()
    monkeypatch.setattr("conformance.harness.profiles.time.monotonic", lambda: float(next(ticks)))
    begun: dict[tuple[str, float], int] = {}
    for name, seconds in (("ci", 0.0), ("thousand", 0.0), ("thousand", 7.0)):

        class Machine(Counting):
            pass

        with using_profile(name, seconds):
            run_machine(Machine, settings=settings(few, max_examples=1))
        begun[name, seconds] = Machine.begun
    assert list(begun.values()) == [1, 1, 7]
    # A thousand programs that really run would take a while and show no more.
    ran: list[type[Counting]] = []
    monkeypatch.setattr("hypothesis.stateful.run_state_machine_as_test", lambda machine, settings: ran.append(machine))
    with using_profile("thousand", 5000.0):
        run_machine(Machine, settings=settings(few, max_examples=1))
    assert ran == [Machine] * 1000
    said = capsys.readouterr().out.splitlines()
    assert said == [f"Counting: {rounds} of 1000 times 1 programs" for rounds in (1, 7, 1000)]


def test_the_command_to_repeat_names_the_time(toy: Callable[..., pytest.RunResult]) -> None:
    tests = "@requirement('CKPT-001', 'MUST hold')\ndef test_it(impl): assert_equal(1, 2)"
    result = toy(tests, "--twinproof-profile", "thousand", "--twinproof-seconds", "0.5")
    result.stdout.fnmatch_lines(["*--twinproof-profile thousand --twinproof-seconds 0.5*"])


@pytest.mark.parametrize("profile", PROFILES)
def test_a_profile_is_the_same_where_ci_is_set(profile: str) -> None:
    """Hypothesis begins with other settings where CI is set in the environment, as hosted runners do."""
    names = ("derandomize", "print_blob", "max_examples", "deadline", "database", "phases", "stateful_step_count")
    lines = [
        "from hypothesis import settings",
        "from conformance.harness.profiles import DERANDOMISED, PROFILES, using_profile",
        f"with using_profile({profile!r}): print([getattr(settings.default, name) for name in {names}])",
    ]
    bare = {name: value for name, value in os.environ.items() if name not in _settings._CI_VARS}
    said = [
        subprocess.run(
            [sys.executable, "-P", "-c", "\n".join(lines)], env=bare | more, capture_output=True, text=True, check=True
        ).stdout
        for more in ({}, {"CI": "true"})
    ]
    assert said[0] == said[1]
    assert said[0].startswith(f"[{profile in DERANDOMISED}, ")


def program_in(error: BaseException) -> str:
    """The program that Hypothesis prints beside a failure, as it stands in a report."""
    notes = "\n".join(getattr(error, "__notes__", ()))
    found = re.search(r"^state = \w+\(\)$(?:\n.*)+", notes, flags=re.MULTILINE)
    assert found is not None, notes
    return found[0]


def failing(machine: type[RuleBasedStateMachine]) -> BaseException:
    """What a machine raises that is known to fail."""
    try:
        chosen = settings(max_examples=100, stateful_step_count=8, database=None, deadline=None, derandomize=True)
        # Where CI is set in the environment, Hypothesis would add a line for itself after the program.
        chosen = settings(chosen, phases=(Phase.generate,), print_blob=False)
        run_machine(machine, settings=settings(chosen, suppress_health_check=list(HealthCheck)))
    except BaseException as error:
        return error
    pytest.fail("the machine found nothing")


def test_a_failure_is_a_program_that_can_be_pasted() -> None:
    class Machine(RuleBasedStateMachine):
        @initialize(form=st.fixed_dictionaries({"slots": st.integers(1, 3), "part": st.sampled_from([1.0, 0.5])}))
        def start(self, form: dict[str, float]) -> None:
            self.form, self.seen = form, set[int]()

        @rule(keys=st.sets(st.integers(0, 9)), name=st.sampled_from(["é", "w"]), shape=st.tuples(st.integers(0, 3)))
        def add(self, keys: set[int], name: str, shape: tuple[int, ...]) -> None:
            self.seen |= keys
            if name == "é" and shape == (2,):
                assert_equal(5 in self.seen, False, where="five")

    program = program_in(failing(Machine))
    with pytest.raises(Mismatch, match="five"):
        exec(program, {"Machine": Machine})


class NoRanks:
    """Stands in for a pool of ranks that finds something wrong with every job."""

    def run(self, *_: object) -> None:
        raise Mismatch("planted", got="a job", expected="none", where="here")


MACHINES: list[tuple[type[RuleBasedStateMachine], dict[str, object]]] = [
    (CheckpointMachine, {"pool": NoRanks()}),
    (SequenceMachine, {"pool": NoRanks()}),
    (kvstore_machine.StoreMachine, {"kvstore": refimpl.kvstore}),
    (kvstore_orders.OrdersMachine, {"kvstore": refimpl.kvstore}),
    (offload_machine.OffloadMachine, {"offload": refimpl.offload}),
    (offload_machine.ReleasingMachine, {"offload": refimpl.offload}),
    (offload_orders.OrdersMachine, {"offload": refimpl.offload}),
    (ScheduleMachine, {"pipeline": refimpl.pipeline}),
]


@pytest.mark.parametrize(("machine", "attributes"), MACHINES)
def test_programs_of_the_components_can_be_pasted(
    machine: type[RuleBasedStateMachine], attributes: dict[str, object], tmp_path: Path
) -> None:
    class Machine(machine):  # type: ignore[misc, valid-type]
        looks = 0

        @invariant()
        def breaks(self) -> None:
            self.looks += 1
            if self.looks > 3:
                raise Mismatch("planted", got=self.looks, expected="<= 3", where="here")

    for name, value in {"root": tmp_path, **attributes}.items():
        setattr(Machine, name, value)
    program = program_in(failing(Machine)).replace("state.teardown()", "")
    names: dict[str, object] = {"Machine": Machine}
    with pytest.raises(Mismatch, match="planted"):
        exec(program, names)
    state = names["state"]
    assert isinstance(state, Machine)
    state.teardown()
