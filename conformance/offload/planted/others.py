"""Faults that ``test_others`` must notice."""

from __future__ import annotations

from typing import Any

import torch

from conformance.harness import fault, mutated, patched

load_hooks_of_the_user_skipped = patched(
    "The offloader's load runs none of the hooks that the user has registered before a load.",
    mutated(
        "twinproof.offload.driver:load_states",
        "optimizer._optimizer_load_state_dict_pre_hooks.values()",
        "()",
    ),
    kills="OPT-437",
)

hooks_behind_a_load_skipped = patched(
    "The offloader's load runs its own hook behind a load alone.",
    mutated(
        "twinproof.offload.driver:load_states",
        "optimizer._optimizer_load_state_dict_post_hooks.values()",
        "list(optimizer._optimizer_load_state_dict_post_hooks.values())[-1:]",
    ),
    kills="OPT-437",
)

own_form_demanded_before_hooks = patched(
    "The offloader's look at what is loaded demands states, which hooks of the user's are yet to bring.",
    mutated("twinproof.offload.driver:check_saved", "if isinstance(states, Mapping) else ()", ""),
    kills="OPT-437",
)

waits_behind_hooks_of_the_user = patched(
    "The offloader waits for copies behind the hooks that the user had before.",
    mutated(
        "twinproof.offload.offloader:OptimizerStateOffloader.__init__",
        "optimizer.register_state_dict_pre_hook(lambda _: held.settle(), prepend=True)",
        "optimizer.register_state_dict_pre_hook(lambda _: held.settle())",
    ),
    kills="OPT-438",
    of="fastimpl",
)

loads_still_on_their_way = patched(
    "Hooks behind a load find states whose copies are on their way.",
    mutated("twinproof.offload.offloader:OptimizerStateOffloader._take_home", "self.settle()", "pass"),
    kills="OPT-438",
    of="fastimpl",
)

steps_of_others_not_run = patched(
    "A step that somebody put in the optimizer's place is not run while an offloader is attached.",
    mutated(
        "twinproof.offload.driver:has_step_of_others",
        "return found is not arithmetic_of(type(optimizer))",
        "return False",
    ),
    kills="OPT-439",
)

kept_steps_run_on_host_memory = patched(
    "A step that was kept runs while the states are on the host.",
    mutated("twinproof.offload.offloader:OptimizerStateOffloader._before_step_of_others", "self._bring_all()", "pass"),
    kills="OPT-439",
)

kept_steps_leave_masters_alone = patched(
    "A step that was kept gives the masters no gradients.",
    mutated(
        "twinproof.offload.offloader:OptimizerStateOffloader._before_step_of_others",
        "None if self.masters is None",
        "None if True",
    ),
    kills="OPT-439",
)

kept_steps_beside_the_cpu = patched(
    "A step that was kept is run by torch, on the device, where the CPU is to step.",
    mutated(
        "twinproof.offload.offloader:OptimizerStateOffloader._before_step_of_others",
        'self.options.step_device == "cpu"',
        "False",
    ),
    kills="OPT-448",
)


compilers_look_inside = patched(
    "A compiler traces moves and bindings as if they were arithmetic.",
    mutated("twinproof.offload.driver:StepDriver._make", "outside_of_graphs(", "("),
    kills="OPT-440",
)

devices_of_later_groups_unseen = patched(
    "Parameters of a later group may be on any device.",
    mutated("twinproof.offload.driver:MovePlan._check_place", "local_of(param).device != self.engine.device", "False"),
    kills="OPT-444",
)


@fault(kills="OPT-444", at="twinproof.offload.offloader:check_devices")
def no_device_is_any_device(original: Any, devices: set[torch.device], step_device: str) -> None:
    """An optimizer without parameters is attached to the CPU."""
    if not devices:
        devices.add(torch.device("cpu"))
    original(devices, step_device)


hooks_changed_while_they_run = patched(
    "close() takes its hooks away at once, also where a hook of the step has called it.",
    mutated("twinproof.offload.driver:StepDriver.detach", "if self._drives:", "if False:"),
    kills="OPT-451",
)

closed_steps_leave_masters_alone = patched(
    "A step whose hook closes the offloader gives the masters no gradients.",
    mutated(
        "twinproof.offload.driver:StepDriver._step_closed",
        "if self._later is None or self._masters is None:",
        "if True:",
    ),
    kills="OPT-451",
)


closure_of_derived_for_each_chunk = patched(
    "The closure of a derived class is evaluated by its arithmetic, once for each chunk.",
    mutated(
        "twinproof.offload.driver:StepDriver.__init__",
        "known_kind(type(optimizer)) is not None",
        "known_kind(type(optimizer)) is type(optimizer)",
    ),
    kills="OPT-458",
    of="fastimpl",
)


stopped_steps_go_on = patched(
    "A step that was kept and that an error stopped goes on for ever: the next ones are made inside of it.",
    mutated(
        "twinproof.offload.offloader:OptimizerStateOffloader._before_step_of_others",
        "if depth and steps_that_run(self.optimizer) == 1:",
        "if False:",
    ),
    kills="OPT-463",
)
steps_inside_begin_anew = patched(
    "A step that is called by another one of the optimizer begins as if that were over.",
    mutated(
        "twinproof.offload.offloader:OptimizerStateOffloader._before_step_of_others",
        "steps_that_run(self.optimizer) == 1",
        "steps_that_run(self.optimizer)",
    ),
    kills="OPT-463",
)
