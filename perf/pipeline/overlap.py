"""``twinproof bench pipeline --overlap STEM``: what each schedule hides, as a table, JSON, a trace and a picture.

On a GPU stages are timed where they run. Elsewhere the schedules run on the virtual device, with durations that are
given: what is shown is the order that they leave to the device, not the speed of anything.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from itertools import repeat
from pathlib import Path
from typing import Any

import torch

from conformance.provers.virtual_device import Costs, VirtualClock, VirtualDevice
from fastimpl import pipeline
from fastimpl.pipeline.overlap import Instruction, OverlapReport, Timeline, overlap_report, replay
from fastimpl.pipeline.overlap_views import to_document, to_svg, to_trace
from fastimpl.pipeline.recording import CudaClock, Recorder
from fastimpl.pipeline.stages import tensors_in
from perf.pipeline.devices import reason_against_gpu
from perf.pipeline.pr2916_model import Batch, Sizes, loader_of, make_model
from twinproof.engine import CudaEngine
from twinproof.errors import ConfigError

__all__ = ["STAGE_MS", "measure_overlap", "stage_durations", "write_overlap"]

# Milliseconds: one example of proportions, with a dense optimizer that is worth hiding. The lookup includes the
# exchange of what was looked up, the backward that of gradients and the update of the tables.
STAGE_MS = {
    "batch_copy": 3.0,
    "input_dist": 5.0,
    "lookup": 13.0,
    "forward": 30.0,
    "backward": 87.0,
    "dense_optimizer": 15.0,
}
_PLACE = {stage: place for place, stage in enumerate(STAGE_MS)}
_FUSED = "TrainPipelineFusedSparseDist"
_SCHEDULES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("Base", "TrainPipelineBase", {}),
    ("SparseDist", "TrainPipelineSparseDist", {}),
    ("Fused", _FUSED, {}),
    ("Fused, lookup stream new", _FUSED, {"emb_lookup_stream": "new"}),
    ("Fused, after data dist", _FUSED, {"embedding_lookup_after_data_dist": True}),
    ("Fused, before optimizer", _FUSED, {"embedding_lookup_before_optimizer": True}),
    ("SemiSync", "TrainPipelineSemiSync", {"start_batch": 0}),
)
_STEPS, _MARGIN, _WARM_UP = 10, 3, 5
_TINY = Sizes(table_count=2, rows=16, dim=4, batch=4, pooling=2, width=4)
_ON_GPU = Sizes(table_count=100, rows=100_000, dim=128, batch=8192, pooling=10, width=1000)

Run = tuple[OverlapReport, Timeline]


def stage_durations(words: list[str]) -> dict[str, float]:
    """``STAGE_MS`` with some changed, from words like ``lookup=13``. Raises ConfigError."""
    found = dict(STAGE_MS)
    for word in words:
        stage, _, text = word.partition("=")
        if stage not in found or not text.replace(".", "", 1).isdigit():
            raise ConfigError(
                "not a duration of a stage", got=word, expected=[f"{name}=MS" for name in STAGE_MS], where="--stage-ms"
            )
        found[stage] = float(text)
    return found


def measure_overlap(stage_ms: Mapping[str, float]) -> list[Run]:
    """Every schedule, on the GPU if there is one."""
    measured = reason_against_gpu() is None
    device = torch.cuda.get_device_name() if measured else "the virtual device, with given durations"
    runs = []
    for title, name, options in _SCHEDULES:
        program = _on_gpu(name, options) if measured else _on_virtual_device(name, options, stage_ms)
        runs.append((overlap_report(program, schedule=title, device=device, margin_count=_MARGIN), replay(program)))
    return runs


def _on_virtual_device(name: str, options: Mapping[str, Any], stage_ms: Mapping[str, float]) -> list[Instruction]:
    """The first op of a stage takes the stage's time, once a step; a copy takes it by bytes."""
    batch = next(loader_of(_TINY, 0))
    size_bytes = sum(tensor.nbytes for tensor in tensors_in(batch))
    spent: set[tuple[int, str]] = set()

    def op_s(op: str, touched_bytes: int) -> float:
        key = (recorder.step_count, recorder.label)
        if key in spent or recorder.label == "batch_copy":
            return 0.0
        spent.add(key)
        return stage_ms.get(recorder.label, 0.0) / 1000

    costs = Costs(h2d_s_per_byte=stage_ms["batch_copy"] / 1000 / size_bytes, op_s=op_s)
    device = VirtualDevice(costs=costs)
    recorder = Recorder(device.engine, VirtualClock(device.engine))
    device.engine = recorder  # type: ignore[assignment]  # The device's own waits go through it too.
    for tensor in tensors_in(batch):
        device.tracker.memory_of(tensor, stream="host", on_host=True)
    model, optimizer = make_model(_TINY)
    with device:
        schedule = getattr(pipeline, name)(model, optimizer, engine=recorder, **options)
        _run(schedule, recorder, repeat(batch), _STEPS)
    return recorder.program()


def _on_gpu(name: str, options: Mapping[str, Any]) -> list[Instruction]:
    """Timing events on the streams. Unproven: no GPU has run it."""
    recorder = Recorder(CudaEngine(), CudaClock(), sees_reads=True)
    model, optimizer = make_model(_ON_GPU, device="cuda")
    schedule = getattr(pipeline, name)(model, optimizer, torch.device("cuda"), engine=recorder, **options)
    loader = loader_of(_ON_GPU, 0, is_pinned=True)
    for _ in range(_WARM_UP):
        schedule.progress(loader)
    recorder.forget()
    _run(schedule, recorder, loader, _STEPS)
    return recorder.program()


def _run(schedule: Any, recorder: Recorder, batches: Iterator[Batch], count: int) -> None:
    for _ in range(count):
        with recorder.step():
            schedule.progress(batches)


def lines_of(runs: list[Run]) -> list[str]:
    """The figures as text."""
    lines = [f"on {runs[0][0].device}; milliseconds a step", ""]
    for report, _ in runs:
        total = f"step {_ms(report.step_s)}, one after the other {_ms(report.serial_s)}"
        lines.append(f"{report.schedule}: {total}, host blocked {_ms(report.host_blocked_s)}")
        for stage in sorted(report.stages, key=lambda stage: _PLACE.get(stage.stage, len(_PLACE))):
            figures = f"{_ms(stage.duration_s):>9}  hidden {stage.hidden_fraction:6.1%}  exposed {_ms(stage.exposed_s)}"
            lines.append(f"  {stage.stage:16}{figures}")
    return lines


def _ms(seconds: float) -> str:
    return f"{round(1000 * seconds, 2) + 0.0:.2f}"


def write_overlap(stem: Path, stage_ms: Mapping[str, float], say: Callable[[str], None]) -> None:
    """Measure, say the figures, and write ``STEM.json``, ``STEM.trace.json`` and ``STEM.svg``."""
    runs = measure_overlap(stage_ms)
    say("\n".join(lines_of(runs)))
    stem.parent.mkdir(parents=True, exist_ok=True)
    trace = to_trace([(report.schedule, timeline) for report, timeline in runs])
    files = {
        ".json": json.dumps(to_document([report for report, _ in runs]), indent=1) + "\n",
        ".trace.json": json.dumps(trace) + "\n",
        ".svg": to_svg(runs),
    }
    for suffix, text in files.items():
        path = stem.with_name(stem.name + suffix)
        path.write_text(text, encoding="utf-8")
        say(f"written: {path}")
