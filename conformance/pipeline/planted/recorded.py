"""Faults that ``test_recorded`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched

priorities_forgotten = patched(
    "A recorder asks for streams without priority.",
    mutated(
        "fastimpl.pipeline.recording:Recorder.stream",
        "self._engine.stream(name, priority) if priority else self._engine.stream(name)",
        "self._engine.stream(name)",
    ),
    kills="PIPE-598",
    of="fastimpl",
)
streams_of_one_name = patched(
    "Streams of one name are one.",
    mutated("fastimpl.pipeline.recording:Recorder.stream", " if taken else name", " if False else name"),
    kills="PIPE-598",
    of="fastimpl",
)
reads_of_the_host = patched(
    "A read of the host's own memory is a wait.",
    mutated("fastimpl.pipeline.recording:_Reads.__torch_function__", " and self.recorder.holds(args[0])", ""),
    kills="PIPE-598",
    of="fastimpl",
)
all_work_at_the_left = patched(
    "All work of the steps stands at the left.",
    mutated("fastimpl.pipeline.overlap_views:_earlier", " and span.end_s <= begin_s", ""),
    kills="PIPE-599",
    of="fastimpl",
)
letters_without_room = patched(
    "A letter stands where there is no room.",
    mutated("fastimpl.pipeline.overlap_views:_box", ' if width > 8 else ""', ""),
    kills="PIPE-599",
    of="fastimpl",
)
begun_at_zero = patched(
    "The host's time is counted from the clock's zero.",
    mutated(
        "fastimpl.pipeline.recording:Recorder.__init__",
        "self._begun_s, self._blocked_s = clock.host_s(), 0.0",
        "self._begun_s = self._blocked_s = 0.0",
    ),
    kills="PIPE-622",
    of="fastimpl",
)
waits_are_not_forgotten = patched(
    "What the host waited before it forgot is taken from its time.",
    mutated(
        "fastimpl.pipeline.recording:Recorder.forget",
        "self._step, self._begun_s, self._blocked_s = 0, self._clock.host_s(), 0.0",
        "self._step, self._begun_s = 0, self._clock.host_s()",
    ),
    kills="PIPE-622",
    of="fastimpl",
)
failed_steps_take_time = patched(
    "The host's time in a step that raised counts.",
    mutated("fastimpl.pipeline.recording:Recorder.step", "self._blocked_s += self._own_s() - begun_s", "pass"),
    kills="PIPE-622",
    of="fastimpl",
)
engines_unasked = patched(
    "A recorder takes anything for an engine.",
    mutated("fastimpl.pipeline.recording:Recorder.__init__", "check_engine(engine)", "engine"),
    kills="PIPE-671",
    of="fastimpl",
)
clocks_unasked = patched(
    "A recorder takes anything for a clock.",
    mutated("fastimpl.pipeline.recording:Recorder.__init__", "_check_clock(clock)", "clock"),
    kills="PIPE-671",
    of="fastimpl",
)
