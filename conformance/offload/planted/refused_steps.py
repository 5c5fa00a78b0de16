"""Faults that ``test_refused_steps`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched, swap

_OFFLOADER = "twinproof.offload.offloader:OptimizerStateOffloader"

refused_once_all_is_there = patched(
    "A step that was kept is refused where the CPU steps once everything was brought to the device.",
    mutated(
        f"{_OFFLOADER}._before_step_of_others",
        'if self.options.step_device == "cpu":\n',
        'if self.options.step_device == "cpu":\n        self._bring_all()\n',
    ),
    kills="OPT-459",
)
refused_steps_are_open = patched(
    "A step that was kept counts as begun before its masters are looked at.",
    mutated(
        f"{_OFFLOADER}._before_step_of_others",
        "depth = self._others_depth\n",
        "depth = self._others_depth; self._others_depth += 1\n",
    ),
    mutated(f"{_OFFLOADER}._begin", "self._others_depth = 0", "pass"),
    swap("twinproof.offload.offloader:steps_that_run", lambda optimizer: 0),
    kills="OPT-459",
)
brought_states_leave_before_the_refusal = patched(
    "States that were brought leave for a step on the CPU that is refused then.",
    mutated(f"{_OFFLOADER}._run", "updates_of(self.optimizer, self.bundles, self.masters)", "pass"),
    kills="OPT-459",
)
