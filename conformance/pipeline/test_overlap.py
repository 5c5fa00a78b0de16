"""The overlap report on the virtual device, whose clock knows every duration, held against closed forms."""

from __future__ import annotations

from typing import Any

from conformance.harness import assert_equal, requirement
from conformance.harness.virtual_device import Costs, VirtualClock, VirtualDevice
from conformance.pipeline.models import EXACT, Job
from conformance.pipeline.test_schedules import FUSED, PLACEMENTS
from conformance.pipeline.test_streams import on_host, virtual

SPARSE_DIST = "TrainPipelineSparseDist"
SCHEDULES: tuple[tuple[str, dict[str, Any]], ...] = (
    *((name, {}) for name in EXACT),
    *((FUSED, options) for options in PLACEMENTS[1:]),
    ("TrainPipelineSemiSync", {"start_batch": 1}),
)
# Seconds of some ops: two lookups and four parameters of the dense optimizer make a step's.
LOOKUP, UPDATE, DENSE = "twinproof::pool_bags", "twinproof::step_bags", "aten::mul_"


def recorded(
    pipeline: Any, name: str, options: dict[str, Any], seconds: dict[str, float], count: int = 6
) -> tuple[list[Any], float]:
    """The program of some steps, and the virtual clock's makespan; ``seconds`` are those of ops by name."""
    from fastimpl.pipeline.recording import Recorder

    costs = Costs(h2d_s_per_byte=seconds.get("byte", 0.0), op_s=lambda op, size_bytes: seconds.get(op, 0.0))
    device, job = VirtualDevice(costs=costs), Job(pipeline, 5, kinds=("table_wise",))
    recorder = Recorder(device.engine, VirtualClock(device.engine))
    device.engine = recorder  # type: ignore[assignment]  # The device's own waits go through it too.
    batches = [virtual(device, batch) for batch in on_host(device, job.batches(count))]
    with device:
        schedule, loader = job.schedule(name, engine=recorder, **options), iter(batches)
        for _ in range(count):
            with recorder.step():
                schedule.progress(loader)
        makespan: float = recorder.makespan_s
    return recorder.program(), makespan


def report_of(pipeline: Any, name: str, options: dict[str, Any], seconds: dict[str, float]) -> Any:
    """The figures of a schedule."""
    from fastimpl.pipeline.overlap import overlap_report

    return overlap_report(recorded(pipeline, name, options, seconds)[0], schedule=name, device="virtual")


@requirement(
    "PIPE-140",
    "A replay of what was recorded MUST take what the virtual clock took, for every schedule and placement.",
    needs=("streams",),
)
def test_replay_is_exact(pipeline: Any) -> None:
    from fastimpl.pipeline.overlap import replay

    seconds = {LOOKUP: 3.0, UPDATE: 5.0, DENSE: 2.0, "aten::addmm": 4.0, "byte": 0.25, "aten::cumsum": 1.0}
    for name, options in SCHEDULES:
        program, makespan = recorded(pipeline, name, options, seconds)
        assert_equal(replay(program).ends_s[-1], makespan, where=f"{name} {options}")
