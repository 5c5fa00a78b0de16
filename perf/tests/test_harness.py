"""The measuring itself: order, verdicts, counters, and a GPU that is not there."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from perf.harness import cli
from perf.harness.counters import Counters, peak_is_resettable
from perf.harness.figures import _short_line, figure_lines
from perf.harness.gates import read_gates
from perf.harness.judge import Machine, Outcome, Result, Ruling, judge
from perf.harness.nvml import Gpu, GpuSample, Unavailable, counts_between, open_gpu, throttled, used_bytes
from perf.harness.paired import Sample, interleave, merge_ranks, ratios
from perf.harness.results import Evidence, commit_of, read_evidence, write_evidence
from perf.harness.roofline import measure_roofline
from perf.harness.table import workload_lines
from perf.harness.verdicts import Verdict, compare, digits, interval_of
from perf.harness.workloads import read_workloads
from twinproof.errors import ConfigError, FormatError


def test_rounds_are_interleaved_and_the_first_is_thrown_away() -> None:
    calls: list[str] = []

    def contender(name: str) -> Sample:
        calls.append(name)
        return {"seconds": float(len(calls))}

    rounds = interleave({n: lambda n=n: contender(n) for n in "abc"}, round_count=8, seed=1)  # type: ignore[misc]
    assert len(rounds) == 8
    assert len(calls) == 27
    orders = {tuple(calls[i : i + 3]) for i in range(0, 27, 3)}
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)
    assert len(orders) > 3


def test_nothing_to_measure_is_refused() -> None:
    with pytest.raises(ConfigError):
        interleave({}, round_count=1, seed=0)


def test_ranks_merge_to_the_slowest_and_the_sum() -> None:
    merged = merge_ranks(
        [[{"a": {"seconds": 1.0, "written_bytes": 5.0}}], [{"a": {"seconds": 3.0, "written_bytes": 7.0}}]]
    )
    assert merged == [{"a": {"seconds": 3.0, "written_bytes": 12.0}}]


def test_the_same_against_itself_is_never_faster() -> None:
    noise = random.Random(5)
    for _ in range(200):
        rounds = [{"a": {"seconds": 1 + noise.gauss(0, 0.02)}} for _ in range(9)]
        assert compare(ratios(rounds, "a", "a")).verdict not in (Verdict.FASTER, Verdict.SLOWER)


def test_verdicts() -> None:
    assert compare([2.0, 2.1, 1.9, 2.0, 2.05, 2.2]).verdict is Verdict.FASTER
    assert compare([0.5, 0.52, 0.49, 0.5, 0.51, 0.5]).verdict is Verdict.SLOWER
    assert compare([1.0, 1.005, 0.995, 1.0, 1.001, 0.999]).verdict is Verdict.SAME
    assert compare([0.5, 2.0, 1.0, 0.7, 1.5, 1.1]).verdict is Verdict.UNDECIDED
    assert compare([2.0]).verdict is Verdict.UNDECIDED
    with pytest.raises(ValueError, match="finite"):
        interval_of([1.0, float("nan"), 2.0])


def test_counters_see_bytes_calls_and_memory(tmp_path: Path) -> None:
    counters = Counters()
    counters.start()
    kept = bytearray(32 << 20)
    kept[::4096] = b"x" * len(kept[::4096])
    with (tmp_path / "f").open("wb", buffering=0) as file:
        file.write(b"y" * 100_000)
    found = counters.stop()
    assert found["written_bytes"] >= 100_000
    assert found["write_calls"] >= 1
    if peak_is_resettable():
        assert 30 << 20 <= found["rss_growth_bytes"] <= 48 << 20
    with pytest.raises(RuntimeError):
        counters.stop()


def test_a_missing_gpu_is_said_in_words() -> None:
    class Broken:
        NVMLError = RuntimeError

        def nvmlInit(self) -> None:
            raise RuntimeError("no driver")

    found = open_gpu(library=Broken())
    assert isinstance(found, Unavailable)
    assert "no driver" in str(found)


class _FakeNvml:
    """One device of 80 GB that is held down by heat."""

    NVMLError = RuntimeError
    NVML_PCIE_UTIL_TX_BYTES, NVML_PCIE_UTIL_RX_BYTES = 0, 1
    NVML_CLOCK_SM, NVML_CLOCK_MEM = 1, 2
    NVML_FI_DEV_PCIE_COUNT_TX_BYTES, NVML_FI_DEV_PCIE_COUNT_RX_BYTES = 197, 198

    def __init__(self) -> None:
        self.open_count = 0
        self.used = 3 << 30
        self.pcie_bytes = {197: 7, 198: 8}
        self.field_result = 0

    def nvmlInit(self) -> None:
        self.open_count += 1

    def nvmlShutdown(self) -> None:
        self.open_count -= 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        if index:
            raise RuntimeError("no such device")
        return "handle"

    def nvmlDeviceGetName(self, _: str) -> str:
        return "Fake"

    def nvmlDeviceGetMemoryInfo(self, _: str) -> Any:
        return SimpleNamespace(used=self.used, total=80 << 30)

    def nvmlDeviceGetCurrentClocksEventReasons(self, _: str) -> int:
        return 0x1 | 0x40

    def nvmlDeviceGetPcieThroughput(self, _: str, counter: int) -> int:
        return 5 + counter

    def nvmlDeviceGetClockInfo(self, _: str, kind: int) -> int:
        return 1000 * kind

    def nvmlDeviceGetFieldValues(self, _: str, fields: list[int]) -> list[Any]:
        values = [SimpleNamespace(uiVal=0, ullVal=self.pcie_bytes[field]) for field in fields]
        return [SimpleNamespace(nvmlReturn=self.field_result, valueType=3, value=value) for value in values]

    def moves(self, tx_bytes: int, rx_bytes: int, used_bytes: int = 0) -> Sample:
        """A contender's run."""
        self.pcie_bytes[197] += tx_bytes
        self.pcie_bytes[198] += rx_bytes
        self.used += used_bytes
        return {"seconds": 1.0}


def test_a_gpu_is_read_and_closed() -> None:
    library = _FakeNvml()
    gpu = open_gpu(library=library)
    assert isinstance(gpu, Gpu)
    with gpu:
        sample = gpu.sample()
    assert (gpu.name, library.open_count) == ("Fake", 0)
    # Idling, the lowest bit, is no reason to distrust a time; NVML counts PCIe in thousands of bytes.
    assert sample == GpuSample(3 << 30, 80 << 30, 1000, 2000, ("thermal (hardware)",), 5000, 6000, 7, 8)
    assert throttled([sample, sample]) == ("thermal (hardware)",)
    missing = open_gpu(1, library=library)
    assert missing == Unavailable("no device 1: no such device")
    assert library.open_count == 0
    assert (used_bytes(library=library), library.open_count) == (3 << 30, 0)


def test_counts_that_a_device_does_not_have_are_absent() -> None:
    library = _FakeNvml()
    with open_gpu(library=library) as gpu:
        assert isinstance(gpu, Gpu)
        before = gpu.sample()
        library.moves(100, 200, used_bytes=1 << 20)
        after = gpu.sample()
        found = counts_between(before, after)
        assert (found["pcie_tx_bytes"], found["pcie_rx_bytes"], found["nvml_growth_bytes"]) == (100, 200, 1 << 20)
        # A count that started again at 2**32 is one all the same; one that the device refuses to read says nothing.
        library.pcie_bytes[197] = 50
        wrapped = counts_between(after, gpu.sample())
        assert wrapped["pcie_tx_bytes"] == (1 << 32) - 107 + 50
        assert counts_between(after, before)["nvml_growth_bytes"] == -(1 << 20)
        library.pcie_bytes[197] = (1 << 32) + 107
        assert counts_between(after, gpu.sample())["pcie_tx_bytes"] == 1 << 32
        library.field_result = 3
        assert (gpu.sample().pcie_tx_bytes, gpu.sample().pcie_rx_bytes) == (None, None)
        assert "pcie_rx_bytes" not in counts_between(after, gpu.sample())


@pytest.mark.parametrize(
    ("name", "moved", "result"),
    [
        ("offload-gpu-pcie-out", (102, 150), Result.PASS),
        ("offload-gpu-pcie-out", (106, 100), Result.FAIL),
        ("offload-gpu-pcie-out", (50, 100), Result.IMPLAUSIBLE),
        ("offload-gpu-pcie-in", (150, 102), Result.PASS),
        ("offload-gpu-pcie-in", (100, 106), Result.FAIL),
        ("offload-gpu-pcie-in", (100, 0), Result.IMPLAUSIBLE),
    ],
)
def test_a_gate_is_judged_by_the_counts_of_the_link(name: str, moved: tuple[int, int], result: Result) -> None:
    library, workloads = _FakeNvml(), read_workloads()
    library.nvmlDeviceGetCurrentClocksEventReasons = lambda _: 0  # type: ignore[method-assign]
    gate = next(gate for gate in read_gates(workloads) if gate.id == name)
    runs = {
        "ours": lambda: library.moves(*moved),
        "copy": lambda: library.moves(100, 100),
        "twice": lambda: library.moves(200, 200),
    }
    machine, shape = Machine(("cpu", "cuda"), "ext4"), gate.workloads["full"]
    with open_gpu(library=library) as gpu:
        rounds = interleave(runs, round_count=3, seed=0, gpu=gpu)
    outcome = judge(gate, "full", workloads, {shape: rounds}, machine)
    assert (outcome.result, outcome.control.result) == (result, Result.FAIL)
    library.field_result = 3
    with open_gpu(library=library) as gpu:
        rounds = interleave(runs, round_count=3, seed=0, gpu=gpu)
    assert judge(gate, "full", workloads, {shape: rounds}, machine).result is Result.UNDECIDED


@pytest.mark.parametrize(("grown", "result"), [(16 << 20, Result.PASS), ((16 << 20) + 1, Result.FAIL)])
def test_a_gate_is_judged_by_the_memory_of_the_device(grown: int, result: Result) -> None:
    library, workloads = _FakeNvml(), read_workloads()
    library.nvmlDeviceGetCurrentClocksEventReasons = lambda _: 0  # type: ignore[method-assign]
    gate = next(gate for gate in read_gates(workloads) if gate.id == "offload-gpu-device-growth")
    runs = {"ours": lambda: library.moves(0, 0, grown), "careless": lambda: library.moves(0, 0, 64 << 20)}
    with open_gpu(library=library) as gpu:
        rounds = interleave(runs, round_count=3, seed=0, gpu=gpu)
    outcome = judge(gate, "full", workloads, {gate.workloads["full"]: rounds}, Machine(("cpu", "cuda"), "ext4"))
    assert (outcome.result, outcome.control.result) == (result, Result.FAIL)
    assert outcome.subject.value == grown


def _outcome(result: Result) -> Outcome:
    ruling = Ruling(result, "measured")
    return Outcome("gate", "claim", "is faster", "shape", 1.0, result, "measured", ruling, ruling)


@pytest.mark.parametrize(
    ("results", "code"),
    [
        ([Result.PASS], 0),
        ([Result.PASS, Result.UNDECIDED], 0),
        ([Result.UNDECIDED, Result.UNDECIDED], 1),
        ([Result.PASS, Result.FAIL], 1),
        ([Result.IMPLAUSIBLE, Result.UNDECIDED], 1),
    ],
)
def test_a_run_that_decided_nothing_is_not_green(results: list[Result], code: int) -> None:
    assert cli._verdict([_outcome(result) for result in results]) == code


def _evidence(value: float, result: Result, form: str = "full") -> Evidence:
    ruling = Ruling(result, "measured", value=value)
    outcome = Outcome("gate", "claim", "is faster", "shape", 1.5, result, "measured", ruling, ruling)
    facts = {"cpu": {"count": 2, "model": "Some"}}
    return Evidence("fastimpl", form, 0, Machine(("cpu",), "tmpfs"), facts, {}, {}, [outcome.as_dict()])


def test_a_figure_is_the_median_of_three_runs_and_names_its_machine() -> None:
    runs = [
        ("a", _evidence(1.0, Result.UNDECIDED)),
        ("b", _evidence(2.0, Result.PASS)),
        ("c", _evidence(9.0, Result.PASS)),
    ]
    lines = list(figure_lines([*runs, ("short", _evidence(100.0, Result.PASS, "short"))]))
    assert lines[0] == "### 2 cores of Some, tmpfs"
    assert lines[4] == "| `gate` | is faster | 2 [1, 9] | 1.5 | 3 | 2 pass, 1 undecided |"
    assert "too few for a claim" in list(figure_lines(runs[:2]))[4]


def test_throttled_rounds_are_dropped_and_measured_again() -> None:
    library = _FakeNvml()
    reasons = iter([0, 0, 0, 0, 0x4, 0, 0, 0, 0, 0, 0, 0])
    library.nvmlDeviceGetCurrentClocksEventReasons = lambda _: next(reasons, 0)  # type: ignore[method-assign]
    calls: list[int] = []

    def run() -> Sample:
        calls.append(len(calls))
        return {"seconds": float(len(calls))}

    with open_gpu(library=library) as gpu:
        assert isinstance(gpu, Gpu)
        rounds = interleave({"ours": run}, round_count=3, seed=0, gpu=gpu)
    # The warm-up, one round that counts, one that is dropped, two that count.
    assert [found["ours"]["seconds"] for found in rounds] == [2.0, 4.0, 5.0]
    assert rounds[0]["ours"]["nvml_used_bytes"] == 3 << 30
    assert rounds[0]["ours"].keys() >= {"pcie_tx_bytes_per_s", "pcie_rx_bytes_per_s", "pcie_tx_bytes"}
    library.nvmlDeviceGetCurrentClocksEventReasons = lambda _: 0x40  # type: ignore[method-assign]
    with open_gpu(library=library) as gpu:
        assert interleave({"ours": run}, round_count=3, seed=0, gpu=gpu) == []


def test_rooflines_are_rates(tmp_path: Path) -> None:
    found = measure_roofline(tmp_path, size_bytes=1 << 20, round_count=1)
    assert all(rate > 0 for rate in found.as_dict().values())
    assert list(tmp_path.iterdir()) == []


_PAGE = """# Page

Words before.

<!-- figures here: gate -->
what somebody wrote by hand: 99
<!-- end of figures -->

Words after.
"""


def test_tables_in_pages_are_made_from_evidence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results, page, figures = tmp_path / "results", tmp_path / "page.md", tmp_path / "figures.md"
    for number, (value, result) in enumerate(((2.0, Result.FAIL), (3.0, Result.PASS), (2.5, Result.PASS))):
        write_evidence(_evidence(value, result), results / "here" / f"{number}.json")
    write_evidence(_evidence(77.0, Result.PASS, "short"), results / "here" / "short.json")
    write_evidence(_evidence(88.0, Result.PASS), results / "there" / "run.json")
    page.write_text(_PAGE)
    check = ["figures", str(results), "--check", str(figures), "--pages", str(page)]
    assert cli.main(["figures", str(results), "--into", str(figures)]) == 0
    assert cli.main(check) == 1
    assert f"{page}: not what the evidence says" in capsys.readouterr().out
    assert cli.main(["figures", str(results), "--into", str(figures), "--pages", str(page)]) == 0
    lines = page.read_text().splitlines()
    assert "| `gate`: is faster | 2.5 [2, 3] | at least 1.5 | 1 **not reached**, 2 pass |" in lines
    assert [line for line in lines if line.startswith("Words")] == ["Words before.", "Words after."]
    assert not any("99" in line for line in lines)
    assert cli.main(check) == 0
    # Somebody mends a figure by hand, in either page.
    for path in (page, figures):
        made = path.read_text()
        path.write_text(made.replace("| 1.5 |", "| 1.4 |").replace("at least 1.5", "at least 1.4"))
        assert cli.main(check) == 1
        path.write_text(made)


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("no table", "without a table"),
        (_PAGE.replace("here:", "nowhere:"), "no full run of this machine"),
        (_PAGE.replace(": gate", ": gate other"), "no full run has judged"),
        (_PAGE.replace("<!-- end of figures -->", ""), "without its end"),
        (_PAGE.replace("<!-- end of figures -->", "") + _PAGE, "without its end"),
        (_PAGE + "<!-- end of figures -->\n", "without a table"),
        (_PAGE.replace("here: gate", "here gate"), "without a table"),
    ],
)
def test_a_page_that_cannot_be_filled_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], page: str, message: str
) -> None:
    write_evidence(_evidence(2.0, Result.PASS), tmp_path / "here" / "run.json")
    path = tmp_path / "page.md"
    path.write_text(page)
    assert cli.main(["figures", str(tmp_path), "--check", str(path), "--pages", str(path)]) == 2
    assert message in capsys.readouterr().err
    assert path.read_text() == page


def test_checking_and_writing_figures_exclude_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_evidence(_evidence(2.0, Result.PASS), tmp_path / "here" / "run.json")
    page = tmp_path / "page.md"
    with pytest.raises(SystemExit) as ended:
        cli.main(["figures", str(tmp_path), "--check", str(page), "--into", str(page)])
    assert ended.value.code == 2
    assert "not allowed with" in capsys.readouterr().err
    assert not page.exists()


@pytest.mark.parametrize("field", ["environment", "workloads", "rounds", "outcomes", "details", "created", "form"])
def test_evidence_of_other_types_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], field: str) -> None:
    write_evidence(_evidence(2.0, Result.PASS), right := tmp_path / "right.json")
    (folder := tmp_path / "wrong").mkdir()
    (wrong := folder / "run.json").write_text(json.dumps({**json.loads(right.read_text()), field: 7}))
    for words in (
        ["compare", str(right), str(wrong)],
        ["history", str(folder)],
        ["plot", str(wrong), "--svg", str(tmp_path / "plot.svg")],
        ["figures", str(folder)],
    ):
        assert cli.main(words) == 2
        said = capsys.readouterr().err
        assert field in said
        assert str(wrong) in said


def test_one_run_shows_its_interval_and_a_count_its_limit() -> None:
    claim = _evidence(2.0, Result.PASS)
    claim.outcomes[0]["subject"].update(low=1.9, high=2.1)
    assert "| 2 [1.9, 2.1] | at least 1.5 | pass |" in _short_line("gate", claim.outcomes)
    count = {**claim.outcomes[0], "kind": "memory", "bound": 3.0 * (1 << 20)}
    count["subject"] = {"value": 2.5 * (1 << 20), "low": None, "high": None}
    assert "| 2.5 Mi | at most 3 Mi | pass |" in _short_line("gate", [count])
    count["subject"] = {"value": None, "low": None, "high": None}
    assert "| not measured | at most 3 Mi |" in _short_line("gate", [count])


def test_evidence_names_the_commit_of_the_implementation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*words: str) -> str:
        options = ["-c", "user.name=n", "-c", "user.email=e@x"]
        found = subprocess.run(["git", *options, *words], cwd=tmp_path, check=True, capture_output=True, text=True)
        return found.stdout.strip()

    monkeypatch.syspath_prepend(tmp_path)
    module = tmp_path / "an_implementation.py"
    module.write_text("x = 1\n")
    assert commit_of("an_implementation") is None
    git("init", "-q")
    # In a tree that does not hold it, as an environment in the project's folder: the tree's commit is not its own.
    git("commit", "-q", "--allow-empty", "-m", "first")
    assert commit_of("an_implementation") is None
    git("add", module.name)
    git("commit", "-q", "-m", "second")
    assert commit_of("an_implementation") == git("rev-parse", "--short=10", "HEAD")
    module.write_text("x = 2\n")
    assert commit_of("an_implementation") == git("rev-parse", "--short=10", "HEAD") + "+"
    assert commit_of("no_such_implementation") is None
    assert commit_of("no_such.implementation") is None


def test_what_cannot_be_measured_is_told_before_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """1 would say that a gate failed; a measurement would be lost for its file."""
    monkeypatch.setattr(cli, "Bench", lambda **_: pytest.fail("it measured"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bench_of_a_test.py").write_text("raise RuntimeError('no gpu')\n", encoding="utf-8")
    for words, said in (
        (["--json", str(tmp_path)], f"a file cannot be used: got Is a directory, expected one .*where: {tmp_path}"),
        (["--fs", "/no/such/folder"], "no such folder.*got.*/no/such/folder.*where.*--fs"),
        (["--impl", "bench_of_a_test"], r"cannot be imported.*RuntimeError: no gpu.*bench_of_a_test\.py:1"),
    ):
        assert cli.main(["kvstore", "--form", "test", *words]) == 2
        err = capsys.readouterr().err
        assert re.search(said, err, re.DOTALL), err
        assert err.startswith("twinproof bench: ")
        assert "Traceback" not in err


def test_the_forms_of_a_component_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Not those of other components, of which the one that was asked for may be one."""
    assert cli.main(["kvstore", "--form", "test"]) == 2
    said = "none of the gates is judged in this form; got: test; expected: ['full', 'short']; where: --form"
    assert said in capsys.readouterr().err


def test_evidence_without_a_key_says_which(tmp_path: Path) -> None:
    path = tmp_path / "evidence.json"
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(FormatError, match="got: no 'version'; expected: JSON of a run"):
        read_evidence(path)


def test_a_slow_side_is_shown_with_its_digits() -> None:
    """Of what takes 200 times as long, two digits behind the point are "0.00"."""
    workload = read_workloads()["kv-get-288-1e5"]
    peer = next(name for name in workload.contenders if name not in ("ours", "control"))
    lines = workload_lines(workload, [{"ours": {"seconds": 0.8665}, peer: {"seconds": 0.0039214}}] * 7)
    assert any("0.8665 s" in line for line in lines)
    assert any("0.003921 s" in line and "ours 0.00453 [0.00453, 0.00453] times as fast" in line for line in lines)
    shown = [digits(value) for value in (0.0, 0.00452, 1.0, 9.999, 12.34, 99.96, 123.4, 1234.5, -0.5)]
    assert shown == ["0.00", "0.00452", "1.00", "10.0", "12.3", "100", "123", "1234", "-0.500"]
    assert digits(123.456, 4) == "123.5"
