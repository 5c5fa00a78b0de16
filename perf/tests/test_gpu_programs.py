"""The programs that GPU steps run, rehearsed on the CPU: operators against themselves, one of them with a wrong bit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import fastimpl
from fastimpl import ops
from perf.gpu import bandwidth, capture, facts, graph, launch, library, operators, run, sanitizer
from perf.harness.steps import PASSED, read_outcomes

OPERATORS = operators.listed()
COUNT = ["--counts", "60"]
built = pytest.mark.skipif(not OPERATORS, reason="the library was built without CUDA")


@built
def test_every_cuda_operator_has_calls(capsys: pytest.CaptureFixture[str]) -> None:
    assert operators.main(["--list"]) == 0
    listed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert listed == OPERATORS
    assert [name for name in listed if operators.calls_of(name) is None] == []
    left = set(ops.cuda_operators()) - set(listed)
    assert "kvstore_write" in left
    assert {name.split("_")[0] for name in left} == {"kvstore"}


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_against_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert operators.main([name, "--device", "cpu", *COUNT]) == 0
    assert "0 differences (a rehearsal on cpu)" in capsys.readouterr().out


@pytest.mark.parametrize("name", OPERATORS)
def test_a_wrong_bit_is_found(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    real, call_count = operators.outputs, 0

    def wrong(operator: str, arguments: Sequence[Any]) -> list[torch.Tensor]:
        nonlocal call_count
        call_count += 1
        found = real(operator, arguments)
        if call_count == 4:  # Of the first call: the CPU, the default stream, another, and the first of two.
            at = max(number for number, tensor in enumerate(found) if tensor.numel())
            flipped = found[at].contiguous().clone()
            flipped.view(-1).view(torch.uint8)[-1] ^= 1
            found[at] = flipped
        return found

    monkeypatch.setattr(operators, "outputs", wrong)
    assert operators.main([name, "--device", "cpu", *COUNT]) == 1
    said = capsys.readouterr().out
    assert "two streams, 1 of 2: output" in said
    assert ", 1 differences (a rehearsal on cpu); the first: " in said


def test_shapes_dtypes_and_counts_are_compared() -> None:
    ones = torch.ones(3)
    for got in ([], [ones.view(1, 3)], [ones.to(torch.float64)], [torch.tensor([1.0, 1.0, -1.0])]):
        assert len(list(operators.differences(got, [ones]))) == 1
    nan = torch.tensor([0x7FC00001, 0x7FC00002], dtype=torch.int32).view(torch.float32)
    assert list(operators.differences([nan.clone()], [nan])) == []
    assert len(list(operators.differences([nan.flip(0)], [nan]))) == 1


@built
def test_an_operator_without_calls_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ops, "cuda_operators", lambda: ["pipeline_new", "kvstore_new"])
    for name in ("pipeline_new", "kvstore_new"):
        assert operators.main([name, "--device", "cpu"]) == 1
        assert f"operators.py has no calls of {name}" in capsys.readouterr().out


@built
def test_calls_that_are_none_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "calls_of", lambda name: lambda count, generator: iter(()))
    assert operators.main([OPERATORS[0], "--device", "cpu", *COUNT]) == 1


@built
def test_a_rehearsal_proves_no_operator(tmp_path: Path) -> None:
    path = tmp_path / "bytes.json"
    assert operators.main([OPERATORS[0], "--device", "cpu", *COUNT, "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert (found["cuda_operators_run"], found["differences"]) == ([], [])
    assert found["compared"] > 0
    assert "gpus" in found["environment"]


@pytest.mark.parametrize("name", OPERATORS)
def test_bandwidth_beside_a_copy(name: str, tmp_path: Path) -> None:
    path = tmp_path / "rate.json"
    options = ["--device", "cpu", *COUNT, "--rounds", "1", "--json", str(path), "--seconds", "0.3"]
    assert bandwidth.main([name, *options]) == 0
    found = json.loads(path.read_text())
    assert found["device"] == "rehearsal on cpu"
    for rate in found["rates"]:
        assert rate["moved_bytes"] > 0
        assert len(rate["seconds"]) == len(rate["copy_seconds"]) == 1
        assert rate["share"] == pytest.approx(rate["copy_seconds"][0] / rate["seconds"][0])


@built
def test_a_graph_is_rehearsed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert graph.main(["--device", "cpu"]) == 0
    assert "9 repetitions on cpu, a rehearsal, 0 differences" in capsys.readouterr().out
    real, call_count = graph.lookup_step, 0

    def stale(a: Any, optimizer: str) -> list[torch.Tensor]:
        nonlocal call_count
        call_count += 1
        found = real(a, optimizer)
        if call_count == 4:  # The second repetition in the place of a graph.
            found[3] += 1
        return found

    monkeypatch.setattr(graph, "lookup_step", stale)
    assert graph.main(["--device", "cpu"]) == 1
    assert "sgd, replay 1, results: output 3" in capsys.readouterr().out


@built
def test_bandwidth_that_measured_nothing_is_a_failure() -> None:
    assert bandwidth.main([OPERATORS[0], "--device", "cpu", "--seconds", "-1"]) == 1


@built
def test_one_launch(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(["--device", "cpu"]) == 0
    monkeypatch.setattr(ops, "strided_gather", lambda source, start, dense: None)
    assert launch.main(["--device", "cpu"]) == 1
    assert "checkpoint_gather: got [0.0" in capsys.readouterr().out


def test_no_gpu_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(facts, "_said", lambda command: "unavailable: no such program")
    assert facts.main() == 1
    assert capsys.readouterr().out.strip().endswith("no GPU here")
    monkeypatch.setattr(facts, "_said", lambda command: "NVIDIA H200, 580.1, 143771 MiB")
    assert facts.main() == 0


@built
def test_the_real_table_is_rehearsed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run.main(["--out", str(out), "--device", "cpu", "--phase", "1", "--only", "launch"]) == 0
    found = read_outcomes(out)
    assert {name: outcome.result for name, outcome in found.items()} == {"library": PASSED, "launch": PASSED}
    assert found["launch"].note == "one launch on cpu is right"


@built
def test_a_carried_library_of_other_sources_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert library.main([]) == 0
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc/a.cu").write_text("// other\n")
    (tmp_path / "libfastimpl_ops.so").write_bytes(b"")
    (tmp_path / "build_info.json").write_text('{"sources": "others", "cuda": "13.0"}')
    monkeypatch.setattr(fastimpl, "__path__", [str(tmp_path)])
    assert library.main([]) == 1
    assert "the carried library is refused: " in capsys.readouterr().out
    built_in: list[Path] = []

    def build(folder: Path) -> None:
        built_in.append(folder)
        digest = ops.sources_digest(tmp_path / "csrc")
        (tmp_path / "build_info.json").write_text(json.dumps({"sources": digest, "cuda": "13.0"}))

    monkeypatch.setattr(library, "build", build)
    assert library.main(["--build", str(tmp_path / "build")]) == 0
    assert built_in == [tmp_path / "build"]
    assert library.main(["--build", str(tmp_path / "build")]) == 0
    assert len(built_in) == 1
    (tmp_path / "build_info.json").write_text(
        json.dumps({"sources": ops.sources_digest(tmp_path / "csrc"), "cuda": ""})
    )
    assert library.reason_against_carried() == "it was built without CUDA"


_FAKE_SANITIZER = """#!/bin/sh
echo "$@" >> {folder}/said
echo "cache $PYTORCH_NO_CUDA_MEMORY_CACHING" >> {folder}/said
{summary}
exit {code}
"""


@pytest.mark.parametrize(
    ("tool", "summary", "code", "is_green"),
    [
        ("memcheck", "ERROR SUMMARY: 0 errors", 0, True),
        ("racecheck", "RACECHECK SUMMARY: 0 hazards displayed", 0, True),
        ("synccheck", "ERROR SUMMARY: 0 errors", 0, True),
        ("memcheck", "ERROR SUMMARY: 3 errors", 86, False),
        ("memcheck", "", 0, False),
        ("racecheck", "ERROR SUMMARY: 0 errors", 0, False),
    ],
)
def test_the_sanitizer_judges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: str, summary: str, code: int, is_green: bool
) -> None:
    path = tmp_path / "compute-sanitizer"
    said = f"echo '========= {summary}'" if summary else ":"
    path.write_text(_FAKE_SANITIZER.format(folder=tmp_path, summary=said, code=code))
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert sanitizer.main([tool]) == (0 if is_green else 1)
    called, cache = (tmp_path / "said").read_text().splitlines()
    assert f"--tool {tool} --error-exitcode 86" in called
    assert "-m perf.gpu.operators --every --device cuda" in called
    assert cache == "cache 1"


def test_a_sanitizer_that_is_not_here_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sanitizer, "find_sanitizer", lambda: None)
    assert sanitizer.main(["memcheck"]) == 1
    assert "compute-sanitizer is not here" in capsys.readouterr().out


_FAKE_NCU = """#!/bin/sh
echo "$@" > {folder}/said
cat {folder}/printed
exit {code}
"""
_HEAD = '"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"'


def _lines(number: int, metrics: Sequence[str]) -> list[str]:
    """As ncu prints them."""
    return [f'"{number}","7","void fastimpl::run<Pool>(Pool)","{name}","%","{number + 1}.5"' for name in metrics]


@pytest.mark.parametrize(
    ("lines", "code", "is_green", "launch_count"),
    [
        ([_HEAD, *_lines(0, capture._METRICS), *_lines(1, capture._METRICS)], 0, True, 2),
        ([_HEAD, *_lines(0, capture._METRICS)], 1, False, 1),
        ([_HEAD, *_lines(0, capture._METRICS[1:])], 0, False, 1),
        ([_HEAD], 0, False, 0),
        (["==ERROR== ERR_NVGPUCTRPERM"], 0, False, 0),
    ],
)
def test_a_capture_is_judged(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    lines: list[str],
    code: int,
    is_green: bool,
    launch_count: int,
) -> None:
    (tmp_path / "printed").write_text(
        "\n".join(["==PROF== Connected", *lines, "pipeline_pool: 4 runs compared"]) + "\n"
    )
    path = tmp_path / "ncu"
    path.write_text(_FAKE_NCU.format(folder=tmp_path, code=code))
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    kept = tmp_path / "capture.json"
    assert capture.main(["pipeline_pool", "--count", "10", "--json", str(kept)]) == (0 if is_green else 1)
    launches = json.loads(kept.read_text())["launches"]
    assert len(launches) == launch_count
    assert all(each["metrics"]["dram__bytes.sum"] == f"{each['number'] + 1}.5 %" for each in launches)
    assert "-m perf.gpu.operators pipeline_pool --device cuda --counts 10" in (tmp_path / "said").read_text()
    printed = capsys.readouterr().out
    assert is_green or lines[-1] in printed
    assert f"exit status {code}, {launch_count} launches" in printed


def test_a_capture_without_the_tool_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(capture, "find_tool", lambda name: None)
    assert capture.main(["pipeline_pool"]) == 1
    assert "ncu is not here" in capsys.readouterr().out


@built
def test_every_operator_in_one_process(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    few = OPERATORS[:2]
    monkeypatch.setattr(operators, "listed", lambda: few)
    assert operators.main(["--every", "--device", "cpu", *COUNT]) == 0
    assert "2 operators, 2 with the CPU's bytes" in capsys.readouterr().out
    calls_of = operators.calls_of
    monkeypatch.setattr(operators, "calls_of", lambda name: None if name == few[1] else calls_of(name))
    assert operators.main(["--every", "--device", "cpu", *COUNT]) == 1
    assert "2 operators, 1 with the CPU's bytes" in capsys.readouterr().out
    monkeypatch.setattr(operators, "listed", list)
    assert operators.main(["--every", "--device", "cpu", *COUNT]) == 1
