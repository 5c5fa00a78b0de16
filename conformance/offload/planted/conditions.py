"""Faults that ``test_conditions`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched

fraction_of_any_kind = patched(
    "What is no number is compared with zero and one.",
    mutated(
        "twinproof.offload.offloader:_check_options",
        "isinstance(fraction, (int, float)) and 0 <= fraction",
        "0 <= fraction",
    ),
    kills="OPT-464",
)

choice_that_is_a_tensor = patched(
    "A tensor of a flag is taken for the flag.",
    mutated(
        "twinproof.offload.offloader:_check_fused_update",
        "isinstance(fused_update, torch.Tensor) or fused_update not in",
        "fused_update not in",
    ),
    kills="OPT-464",
)

flags_that_agree_refused = patched(
    "A flag that is false by both of its names is refused.",
    mutated("twinproof.offload.offloader:_either", "if not value and other:", "if not value:"),
    kills="OPT-465",
)

derived_class_unbound = patched(
    "A class that is derived from the offloader's has no transfers.",
    mutated(
        "twinproof.offload.offloader:OptimizerStateOffloader.__init_subclass__", "if transfers is not None:", "if True:"
    ),
    kills="OPT-466",
)

groups_that_are_no_mappings = patched(
    "Groups of a state dict are taken for mappings.",
    mutated("twinproof.offload.driver:_check_form", "isinstance(group, Mapping) and isinstance(", "isinstance("),
    kills="OPT-467",
)

keys_that_are_no_text = patched(
    "A key that is no number is taken for text.",
    mutated("twinproof.offload.driver:_is_own", "isinstance(key, str) and key.isdecimal()", "key.isdecimal()"),
    kills="OPT-467",
)

own_states_of_others = patched(
    "A state of no parameter is the optimizer's own, if it has it or not.",
    mutated("twinproof.offload.driver:_is_own", "not plan.is_separable or key in plan.optimizer.state", "True"),
    kills="OPT-467",
)

first_number_counts = patched(
    "Of a parameter that was saved under two numbers, the first one's states are loaded.",
    mutated(
        "twinproof.offload.driver:check_states", "if param in found and number not in states:", "if param in found:"
    ),
    kills="OPT-468",
)

states_are_tensors = patched(
    "Each entry of a state that does not move is taken for a scalar on some device.",
    mutated(
        "twinproof.offload.driver:place_scalars",
        "isinstance(value, torch.Tensor) and not is_movable(value)",
        "not is_movable(value)",
    ),
    kills="OPT-469",
)

gradients_of_every_dtype = patched(
    "The CPU steps with gradients of any dtype.",
    mutated("twinproof.offload.driver:updates_of", "if grad.dtype not in GRADIENTS:", "if False:"),
    kills="OPT-470",
)

states_that_are_missing = patched(
    "The CPU takes for granted that each state is there.",
    mutated(
        "twinproof.offload.driver:updates_of",
        "(n not in state or state[n].dtype is not torch.float32)",
        "(n in state and state[n].dtype is not torch.float32)",
    ),
    kills="OPT-470",
)

strides_of_the_sparse = patched(
    "Every parameter is asked for its strides, which a sparse one does not have.",
    mutated(
        "twinproof.offload.driver:expected_states", "local.layout is torch.strided and local.stride()", "local.stride()"
    ),
    kills="OPT-471",
)

unforeseen_as_it_comes = patched(
    "What an optimizer says to a parameter that it cannot step goes through as it is.",
    mutated("twinproof.offload.driver:expected_states", "except Exception as error:", "except KeyError as error:"),
    kills="OPT-471",
)

groups_gathered_by_chunks = patched(
    "Parameters that an optimizer gathers in a way of its own are stepped chunk by chunk.",
    mutated(
        "twinproof.offload.driver:known_kind",
        "return base if steps and starts else None",
        "return base if steps else None",
    ),
    kills="OPT-472",
)

masters_that_are_none = patched(
    "None among the masters of a wrapper is a master that it keeps.",
    mutated("twinproof.offload.driver:unwrapped", "for master in group if master is not None", "for master in group"),
    kills="OPT-473",
)

graph_of_no_gradient = patched(
    "Each parameter of a differentiable step has a gradient.",
    mutated(
        "twinproof.offload.driver:check_gradients",
        "has_graph and grad is not None and grad.requires_grad",
        "has_graph and grad.requires_grad",
    ),
    kills="OPT-474",
)

closures_by_place_alone = patched(
    "A closure with masters is given on by its place, and by its name too.",
    mutated(
        "twinproof.offload.states:MasterWeights.with_closure",
        'if arguments else (arguments, {**options, "closure": evaluate})',
        "",
    ),
    kills="OPT-475",
)

closures_of_a_closed_step = patched(
    "In a step whose hook closes the offloader, a closure gives the masters no gradients.",
    mutated("twinproof.offload.driver:StepDriver._step_closed", "if given is None else given", ""),
    kills="OPT-475",
)

own_masters_rounded = patched(
    "Float32 parameters are written with themselves between two evaluations of a closure.",
    mutated("twinproof.offload.states:MasterWeights._round_all", "if self.pairs[master] is not master", "if True"),
    kills="OPT-476",
)

own_masters_refreshed = patched(
    "Float32 parameters are written with themselves by a refresh.",
    mutated("twinproof.offload.states:MasterWeights.refresh", "if param is not master:", "if True:"),
    kills="OPT-476",
)

kin_noted_together = patched(
    "What was written in one piece of memory counts as known when any of it is stepped.",
    mutated(
        "twinproof.offload.states:MasterWeights._note_now",
        "if each in noted or self._versions[each] in before:",
        "if True:",
    ),
    kills="OPT-477",
)

hooks_changed_inside = patched(
    "Hooks are taken away behind a step inside of another, while those of that one run.",
    mutated(
        "twinproof.offload.driver:StepDriver._make",
        "if not drove and self._later is not None:",
        "if self._later is not None:",
    ),
    kills="OPT-478",
)

betas_taken_for_numbers = patched(
    "Betas that are tensors are taken for numbers.",
    mutated(
        "fastimpl.offload.slot_step:_why_not_group",
        'if any(isinstance(beta, torch.Tensor) for beta in group.get("betas", ())):',
        "if False:",
    ),
    kills="OPT-479",
    of="fastimpl",
)

twice_in_a_call = patched(
    "A parameter that is listed twice is given to the kernel twice.",
    mutated("fastimpl.offload.slot_step:SlotUpdates._plan_calls", "if param in listed:", "if False:"),
    kills="OPT-479",
    of="fastimpl",
)

classes_of_gradients_not_looked_at = patched(
    "A gradient of a class of its own is given to the kernel.",
    mutated(
        "fastimpl.offload.slot_step:_why_not_param",
        "if not (_is_plain(param) and _is_plain(grad)):",
        "if not _is_plain(param):",
    ),
    kills="OPT-479",
    of="fastimpl",
)

pretended_memory_left = patched(
    "Tensors of a device that is written in Python are left to torch.",
    mutated("fastimpl.offload.slot_step:_is_plain", ' or getattr(kind, "is_plain_memory", False) is True', ""),
    kills="OPT-480",
    of="fastimpl",
)

counters_read_from_the_device = patched(
    "A counter is read wherever it lies.",
    mutated("fastimpl.offload.slot_step:_add", "or not step.is_cpu:", "or False:"),
    kills="OPT-480",
    of="fastimpl",
)

packs_without_a_library = patched(
    "Tensors are packed by the library, if there is one or not.",
    mutated("fastimpl.offload.packing:pack", "if ops.available():", "if True:"),
    kills="OPT-481",
    of="fastimpl",
)

slots_without_a_library = patched(
    "A chunk is updated by the library's kernel, if there is one or not.",
    mutated("fastimpl.offload.slot_step:SlotUpdates._why_nowhere", "if not ops.available():", "if False:"),
    kills="OPT-481",
    of="fastimpl",
)

rows_of_one_order_forgotten = patched(
    "Without a library, the CPU steps what has no order of its own alone.",
    mutated(
        "fastimpl.offload.cpu_step:HostStep._update",
        "alone = None if is_native and _have_one_order(row) else number",
        "alone = None if _have_one_order(row) else number",
    ),
    kills="OPT-481",
    of="fastimpl",
)

every_release_is_read = patched(
    "The kernel updates under every release of torch.",
    mutated(
        "fastimpl.offload.slot_step:SlotUpdates._why_nowhere",
        "wanted is None and not order_is_read(torch.__version__)",
        "False",
    ),
    kills="OPT-482",
    of="fastimpl",
)

sparse_states_move = patched(
    "A sparse state is taken for dense memory.",
    mutated(
        "twinproof.offload.states:is_movable",
        "isinstance(value, torch.Tensor) and value.layout is torch.strided",
        "isinstance(value, torch.Tensor)",
    ),
    kills="OPT-483",
)

sparse_states_copied_as_bytes = patched(
    "A load copies a sparse state as if it were dense memory.",
    mutated("twinproof.offload.driver:_settled", "if found.layout is not torch.strided:", "if False:"),
    kills="OPT-483",
)

own_states_that_are_there = patched(
    "An optimizer that is none of torch's has no states of its own but those that are there already.",
    mutated(
        "twinproof.offload.driver:_is_own",
        "not plan.is_separable or key in plan.optimizer.state",
        "key in plan.optimizer.state",
    ),
    kills="OPT-485",
)

own_states_of_torch_refused = patched(
    "One of torch's optimizers has no states of its own.",
    mutated(
        "twinproof.offload.driver:_is_own",
        "not plan.is_separable or key in plan.optimizer.state",
        "not plan.is_separable",
    ),
    kills="OPT-485",
)
