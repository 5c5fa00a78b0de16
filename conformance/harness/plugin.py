"""The pytest plugin: loaded where it is asked for (``-p conformance.harness.plugin``), strict in our suite, inert else.

A test suite that merely has twinproof installed does not load it. One that does must not notice either: no torch
import, no option without our name, no change of Hypothesis settings, no fixture that runs by itself. Whatever this
module does, it does to tests that carry a requirement or ask for one of its fixtures.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import random
import shlex
from collections.abc import Generator, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from conformance.harness import implementation as implementations
from conformance.harness.collection import select, tolerance_of
from conformance.harness.devices import absent_capabilities, place_of, prepare_device
from conformance.harness.endings import check_writable
from conformance.harness.environment import environment_line
from conformance.harness.failures import describe, failure_of, passed_by_now
from conformance.harness.planted_run import Group, budget, bug_of, groups_of, judge, kills, parametrize, planted
from conformance.harness.profiles import using_profile
from conformance.harness.report import write_json
from conformance.harness.suite import OPTIONS, SUITE, Suite, requirement_of_item
from conformance.provers.ranks.pool import RankPool

_PACKAGE = Path(__file__).resolve().parent.parent
CLUSTERS_SHOWN = 12  # Of the differences at the end of a run; the report has every failure.
_GROUPS = pytest.StashKey[dict[str, Group]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("twinproof", "twinproof: conformance of an implementation")
    for name, attributes in OPTIONS.items():
        group.addoption(f"--twinproof-{name}", dest=f"twinproof_{name}", **attributes)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "night: costs much and shows little at each change; ci/nightly runs it")
    suite = config.stash[SUITE] = Suite(config)
    suite.check_seconds()
    if suite.option("report") is not None:
        try:
            check_writable(Path(suite.option("report")))
        except OSError as error:
            raise pytest.UsageError(f"--twinproof-report: got {error}, expected a file that can be written") from error
    if suite.option("profile") == "nightly" and config.getoption("hypothesis_seed", None) is None:
        # A chosen seed is printed and reproduces; Hypothesis' own choice could not be repeated.
        config.option.hypothesis_seed = str(random.SystemRandom().randrange(1 << 32))
    if config.getoption("log_level") is None and not config.getini("log_level"):
        # torch's distributed checkpoint logs several lines of DEBUG a save: a failure would stand under thousands.
        config.option.log_level = "WARNING"


def _ours(path: Path, suite: Suite) -> bool:
    return suite.option("profile") is not None or _PACKAGE in path.resolve().parents


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    # Hypothesis reads its default settings when a test is decorated, which is while its module is imported.
    suite = collector.config.stash[SUITE]
    with contextlib.ExitStack() as stack:
        if isinstance(collector, pytest.Module) and _ours(collector.path, suite):
            stack.enter_context(using_profile(suite.profile, suite.seconds))
        return (yield)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    parametrize(metafunc, metafunc.config.stash[SUITE])


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    select(config.stash[SUITE], items)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    session.config.stash[_GROUPS] = groups_of(session.items)
    suite = session.config.stash[SUITE]
    for item in session.items:
        requirement = requirement_of_item(item)
        if requirement is not None:
            suite.recorder.case(item.nodeid, requirement, bug_of(item))
    if suite.recorder.cases:
        # Modules and tests live to the end; to look at them is what most of a collection costs.
        gc.freeze()


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    suite = config.stash[SUITE]
    if not suite.recorder.cases:
        return []
    facts = suite.facts
    ledger = f"of {len(suite.deviations)} entries" if suite.deviations else "empty"
    stems = dict.fromkeys(case.requirement.stem for case in suite.recorder.cases.values())
    return [
        *implementations.provided(suite.implementation, stems),
        f"twinproof: {facts['name']} {facts['version']} from {facts['file']}",
        f"twinproof: profile {suite.profile}, seed {suite.seed}, planted {suite.planted_mode}, ledger {ledger}",
        f"twinproof: {environment_line(suite.environment)}",
    ]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    requirement = requirement_of_item(item)
    if requirement is None or not requirement.needs:
        return
    name = item.config.stash[SUITE].implementation
    declared = implementations.capabilities(name, requirement.stem)
    declared -= absent_capabilities(item.config.stash[SUITE].device, name)
    absent = [need for need in requirement.needs if need not in declared]
    if absent:
        pytest.skip(f"implementation {name} lacks {', '.join(absent)}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    with contextlib.ExitStack() as stack:
        if requirement_of_item(item) is not None:
            stack.enter_context(using_profile(item.config.stash[SUITE].profile, item.config.stash[SUITE].seconds))
            stack.enter_context(budget(item))
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    # A bug that an earlier case killed is dead; running the other cases would only cost time.
    group = pyfuncitem.config.stash[_GROUPS].get(pyfuncitem.nodeid)
    return True if group is not None and group.killed else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    with planted(item), _watched(item):
        return (yield)


def _watched(item: pytest.Item) -> contextlib.AbstractContextManager[None]:
    """What a test leaves behind in the process is wrong, whatever the test is about."""
    if requirement_of_item(item) is None:
        return contextlib.nullcontext()
    # It knows torch, which nobody else's tests are to wait for.
    from conformance.harness.surroundings import process_left_as_it_was

    return process_left_as_it_was()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    group = item.config.stash[_GROUPS].get(item.nodeid)
    error = call.excinfo.value if call.excinfo is not None else None
    killed = group is not None and kills(group, call)
    if killed:
        # Nobody reads the failure that was hoped for: writing it down took a tenth of a run, and --pdb stopped at each.
        call.excinfo = None
    report = yield
    requirement = requirement_of_item(item)
    if requirement is None:
        return report
    suite = item.config.stash[SUITE]
    case = suite.recorder.case(item.nodeid, requirement, bug_of(item))
    if group is not None:
        judge(group, case, call.when, error, report, killed)
    case.duration_s += report.duration
    if report.failed:
        error = passed_by_now(item, report) if error is None else error
        text = describe(suite, item, case, error)
        report.sections.append(("twinproof", text))
        case.outcome, case.message = "failed" if call.when == "call" else "error", text
        case.failure = failure_of(suite, item, error)
    elif report.skipped:
        case.outcome = "xfailed" if hasattr(report, "wasxfail") else "skipped"
        case.message = getattr(report, "wasxfail", "") or str(call.excinfo.value if call.excinfo is not None else "")
    elif call.when == "call":
        case.outcome = "passed"
    return report


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    suite = session.config.stash[SUITE]
    for path in filter(None, (suite.option("report"), suite.option("verdict"))):
        write_json(suite, Path(path), exit_status=int(exitstatus))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    suite = config.stash[SUITE]
    clusters = suite.recorder.clusters()
    if clusters:
        terminalreporter.write_line("twinproof: failures by their first difference")
    for text, requirements, count in clusters[:CLUSTERS_SHOWN]:
        named = ", ".join(requirements[:3]) + (", ..." if len(requirements) > 3 else "")
        terminalreporter.write_line(f"  requirements {len(requirements)}, tests {count}: {text}  [{named}]")
    if len(clusters) > CLUSTERS_SHOWN:
        terminalreporter.write_line(f"  and {len(clusters) - CLUSTERS_SHOWN} more differences")
    if any(case.bug is not None for case in suite.recorder.cases.values()):
        counts = ", ".join(f"{count} {verdict}" for verdict, count in suite.recorder.verdicts().items() if count)
        terminalreporter.write_line(f"twinproof: planted bugs, by requirement: {counts}")
    if suite.option("report") is not None:
        path = Path(suite.option("report"))
        page = shlex.join(["twinproof", "report", str(path), "--html", str(path.with_suffix(".html"))])
        terminalreporter.write_line(f"twinproof: report written to {path}; as a page: {page}")


@pytest.fixture(scope="session")
def impl(request: pytest.FixtureRequest) -> ModuleType:
    """The implementation under test."""
    return importlib.import_module(request.config.stash[SUITE].implementation)


def _component(request: pytest.FixtureRequest, stem: str) -> implementations.Component:
    suite = request.config.stash[SUITE]
    return implementations.component(suite.implementation, stem, place_of(_prepared(request), stem))


@pytest.fixture(scope="session")
def kvstore(request: pytest.FixtureRequest) -> implementations.Component:
    """The implementation's ``kvstore``; skips by name when it, or a name in it, is absent."""
    return _component(request, "kvstore")


@pytest.fixture(scope="session")
def pipeline(request: pytest.FixtureRequest) -> implementations.Component:
    """The implementation's ``pipeline``; skips by name when it, or a name in it, is absent."""
    return _component(request, "pipeline")


@pytest.fixture(scope="session")
def offload(request: pytest.FixtureRequest) -> implementations.Component:
    """The implementation's ``offload``; skips by name when it, or a name in it, is absent."""
    return _component(request, "offload")


@pytest.fixture(scope="session")
def checkpoint(request: pytest.FixtureRequest) -> implementations.Component:
    """The implementation's ``checkpoint``; skips by name when it, or a name in it, is absent."""
    return _component(request, "checkpoint")


@pytest.fixture(scope="session")
def rank_pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    """Gloo processes for multi-rank requirements, started at first use and ended with the session."""
    suite = request.config.stash[SUITE]
    with RankPool(suite.implementation, device=suite.device) as pool:
        yield pool


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """Where objects that take a device are sent, ``--twinproof-device``; on ranks it is ``rank.device``.

    A test that asks for it is one that runs on every device; where another than the CPU is asked for, only these run.
    """
    return _prepared(request)


def _prepared(request: pytest.FixtureRequest) -> str:
    suite = request.config.stash[SUITE]
    prepare_device(suite.device, suite.implementation)
    return suite.device


@pytest.fixture
def tolerance_factor(request: pytest.FixtureRequest) -> float:
    """The factor for ``assert_within_derived``: 2, or what a ``tolerance`` entry of the ledger widens it to."""
    return tolerance_of(request.node)
