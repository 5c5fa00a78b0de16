"""The table of torchrec PR 2916, tiny: every schedule takes its turn, and its figures are what was sampled."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastimpl import ops
from perf.harness.paired import Round
from perf.harness.workloads import read_workloads
from perf.pipeline import JOBS, pr2916_report, pr2916_table
from perf.pipeline.meters import LiveBytes
from perf.pipeline.pr2916_lines import table_lines
from perf.pipeline.pr2916_table import CONTENDERS, measure_table

pytestmark = pytest.mark.skipif(not ops.available(), reason="no library was built")

SMALL = replace(read_workloads()["seed-table-20x20k"], shape=(16, 4), tensor_count=2, rank_count=1, round_count=1)
ALONE: Any = SimpleNamespace(rank=0, world_size=1)


@pytest.fixture(autouse=True)
def _few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pr2916_table, "_STEPS", 3)


def test_every_schedule_has_a_row_of_its_samples() -> None:
    for name in ("seed-table-20x20k", "seed-table-gpu-200x100k"):
        assert set(read_workloads()[name].contenders) >= set(CONTENDERS)
    some = ("semi-sync", "fused-before-optimizer:new", "base")
    workload = replace(SMALL, contenders=some)
    rounds = measure_table("cpu", 4, 4, ALONE, workload, "", 1, 0)
    assert [set(found) for found in rounds] == [set(some)] * 3
    for name in some:
        assert all(found[name]["seconds"] > 0 for found in rounds)
        # Tables, their states and the dense part are there in everybody's turn.
        assert rounds[0][name]["peak_allocated_bytes"] > 2 * SMALL.payload_bytes
    assert rounds[0]["semi-sync"]["peak_allocated_bytes"] > rounds[0]["base"]["peak_allocated_bytes"]


def test_quantiles_speed_and_peaks_are_shown() -> None:
    def sample(milliseconds: float, mib: int) -> dict[str, float]:
        return {"seconds": milliseconds / 1000, "peak_allocated_bytes": mib * 2.0**20}

    workload = replace(SMALL, contenders=("base", "sparse-dist"))
    rounds: list[Round] = [{"base": sample(20 + i, 5), "sparse-dist": sample(10 + i / 2, 3)} for i in range(10)]
    base, sparse_dist = (line.split() for line in table_lines(workload, rounds)[-2:])
    assert base == ["base", "24.00", "28.00", "0.500", "[0.500,", "0.500]", "5.0", "MiB", "-"]
    assert sparse_dist == ["sparse-dist", "12.00", "14.00", "-", "3.0", "MiB", "-"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here, which would be measured")
def test_the_seeds_own_size_needs_a_gpu() -> None:
    workload = read_workloads()["seed-table-gpu-200x100k"]
    assert workload.payload_bytes == 200 * 100_000 * 512 * 4
    assert JOBS[workload.job](ALONE, workload, "", 1, 0) == []
    assert table_lines(workload, [])[1:] == ["  was not measured: no GPU here"]


def test_evidence_keeps_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Here:
        """A pool of this process."""

        def __init__(self, implementation: str) -> None:
            pass

        def __enter__(self) -> Here:
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def run(self, job: Any, world_size: int, *arguments: Any, timeout_s: float) -> Any:
            return [job(ALONE, *arguments)]

    workload = replace(SMALL, contenders=("base", "sparse-dist"))
    monkeypatch.setattr(pr2916_report, "RankPool", Here)
    monkeypatch.setattr(pr2916_report, "read_workloads", lambda: {"seed-table-20x20k": workload})
    monkeypatch.setitem(JOBS, "seed-table", partial(measure_table, "cpu", 4, 4))
    said: list[str] = []
    pr2916_report.print_table(folder=tmp_path, seed=0, evidence=tmp_path / "out" / "table.json", say=said.append)
    kept = json.loads((tmp_path / "out" / "table.json").read_text())
    assert len(kept["rounds"][workload.name]) == 3
    assert "evidence:" in said[-1]


def test_live_bytes_are_those_of_storages() -> None:
    mode = LiveBytes()
    with mode:
        kept = torch.empty(100, dtype=torch.uint8)
        view = kept[10:]
        gone = torch.empty(1000, dtype=torch.uint8)
        del gone
        other = torch.empty(50, dtype=torch.uint8)
    assert (mode.live_bytes, mode.peak_bytes) == (150, 1100)
    del kept, other
    assert mode.live_bytes == 100, "a view holds its storage"
    del view
    assert mode.live_bytes == 0
