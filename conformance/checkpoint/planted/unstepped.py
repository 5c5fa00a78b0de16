"""Faults that ``test_unstepped`` must notice."""

from __future__ import annotations

from contextlib import nullcontext

from conformance.harness import mutated, patched, swap

_NATIVE = "twinproof.checkpoint.native"
_OWN = "twinproof.checkpoint.optimizer_states"
_STATES = f"{_OWN}:OptimizerStates"

stepped_by_a_save = patched(
    "A save of an optimizer that has not stepped steps it once, at a rate of 0.",
    swap(f"{_OWN}:_unstepped", lambda optimizers: nullcontext()),
    kills=("CKPT-692", "CKPT-696", "CKPT-697"),
)
gradients_of_saves_stay = patched(
    "The gradient that keeps torch from stepping stays.",
    mutated(f"{_OWN}:_unstepped", "param.grad = None", "pass"),
    kills="CKPT-692",
)
states_of_all_asked_for = patched(
    "States of all parameters are asked for, whether the checkpoint has some or not.",
    mutated(f"{_STATES}.targets", "name not in with_states", "False"),
    kills="CKPT-693",
)
older_states_stay = patched(
    "What had no states when it was saved keeps those that it had before the load.",
    mutated(
        f"{_STATES}.load_state_dict",
        "optimizer.state.pop(param, None)",
        "state_dict |= dict.fromkeys(keys, torch.zeros(()))",
    ),
    kills="CKPT-693",
)
empty_states_counted = patched(
    "A parameter with an empty state, as a load leaves it, counts as one with states.",
    mutated(f"{_OWN}:_has_states", "not isinstance(state, dict) or state", "True"),
    kills="CKPT-693",
)
gradients_in_the_way = patched(
    "States of an optimizer that has gradients are not made before a load, and so not loaded.",
    mutated(
        f"{_STATES}.targets",
        "if has_states and not _has_states(optimizer):",
        "if has_states and not _has_states(optimizer) and params_of([optimizer])[0].grad is None:",
    ),
    kills="CKPT-701",
)
states_without_a_place_lost = patched(
    "States for which the optimizer has none are left in the checkpoint, without a word.",
    mutated(f"{_STATES}.targets", "elif not keys and", "elif False and"),
    kills="CKPT-694",
)
frozen_parameters_refused = patched(
    "States of parameters that are not trained are refused.",
    mutated(f"{_STATES}.targets", "(param is None or param.requires_grad)", "True"),
    kills="CKPT-694",
)
states_of_failed_loads_stay = patched(
    "What a load made for an optimizer without states stays where the load fails.",
    mutated(f"{_NATIVE}:load_native", "each.undo()", "pass"),
    kills="CKPT-695",
)
states_of_unread_loads_stay = patched(
    "Who was given states is noted only behind a look at all objects, of which one may fail.",
    mutated(
        f"{_NATIVE}:load_native",
        "state.update(found)\n        told = told_by(state, reader.names())",
        "told = told_by(found, reader.names())\n        state.update(found)",
    ),
    kills="CKPT-725",
)
states_of_broken_steps_stay = patched(
    "An optimizer whose step fails keeps the states that it has made by then.",
    mutated(
        f"{_STATES}.targets",
        "self._filled.append(optimizer)\n                _fill(optimizer)",
        "_fill(optimizer)\n                self._filled.append(optimizer)",
    ),
    kills="CKPT-725",
)
states_of_torchs_errors_stay = patched(
    "What a load made is left where the error is no Exception, as torch's is.",
    mutated(f"{_NATIVE}:load_native", "except BaseException:", "except Exception:"),
    kills="CKPT-725",
)
rate_stays_0 = patched(
    "The learning rate at which states are made stays.",
    mutated(f"{_OWN}:_fill", 'group["lr"] = rate', "pass"),
    kills="CKPT-695",
)
rate_in_a_tensor_is_lost = patched(
    "Where the rate is a tensor, it is set to 0 in place.",
    mutated(
        f"{_OWN}:_fill",
        "torch.tensor(0.0) if isinstance(rate, torch.Tensor)",
        "rate.zero_() if torch.is_tensor(rate)",
    ),
    kills="CKPT-695",
)
gradients_of_some_taken = patched(
    "An optimizer is kept from stepping where any of its parameters has no gradient.",
    mutated(f"{_OWN}:_unstepped", "and all(param.grad is None", "and any(param.grad is None"),
    kills="CKPT-720",
)
states_of_earlier_loads_taken = patched(
    "A load that fails takes the states from all whom a load of the manager has ever given some.",
    mutated(f"{_STATES}.targets", "self._filled = []", "pass"),
    kills="CKPT-704",
)
one_optimizer_is_held_back = patched(
    "Of several optimizers without states one alone is kept from stepping.",
    mutated(f"{_OWN}:_unstepped", "for optimizer in optimizers:", "for optimizer in optimizers[:1]:"),
    kills="CKPT-711",
)
empty_groups_named = patched(
    "Groups without parameters are handed to torch, which finds no name for them.",
    swap(f"{_OWN}:_without_empty_groups", lambda optimizers: nullcontext()),
    kills="CKPT-835",
)
empty_groups_go_last = patched(
    "Groups without parameters come back behind the others.",
    mutated(f"{_OWN}:_without_empty_groups", "insert(place, group)", "append(group)"),
    kills="CKPT-835",
)
empty_groups_change_places = patched(
    "Groups without parameters come back from the last to the first: two in front of the others change places.",
    mutated(
        f"{_OWN}:_without_empty_groups",
        "in aside:\n            each.param_groups.insert",
        "in reversed(aside):\n            each.param_groups.insert",
    ),
    kills="CKPT-835",
)
gradients_of_all_rows = patched(
    "SparseAdam is stepped with gradients that it does not take.",
    mutated(f"{_OWN}:_no_change", "isinstance(optimizer, torch.optim.SparseAdam)", "False"),
    kills="CKPT-836",
)
steps_fail_by_themselves = patched(
    "What the step of an optimizer without states raises is handed on, without what to do.",
    mutated(f"{_OWN}:_fill", "except TwinproofError:", "except Exception:"),
    kills="CKPT-836",
)
named_errors_of_steps_wrapped = patched(
    "A named error of an optimizer's own step is told as one of an optimizer that needs a closure.",
    mutated(f"{_OWN}:_fill", "    except TwinproofError:\n        raise\n", ""),
    kills="CKPT-826",
)
states_in_lists_are_torchs = patched(
    "States that torch cannot name are its error.",
    mutated(f"{_OWN}:_flat", "except NotImplementedError as error:", "except LookupError as error:"),
    kills="CKPT-836",
)
parameters_of_others_unnamed = patched(
    "Of parameters that are none of the model's torch says the number in its own list.",
    mutated(f"{_OWN}:_flat", "if not foreign:", "if True:"),
    kills="CKPT-843",
)
keys_lacking_are_parameters_of_others = patched(
    "Whatever key an optimizer lacks is told as a parameter that is none of the model's.",
    mutated(f"{_OWN}:_flat", "if not foreign:\n                raise\n", "if False:\n                raise\n"),
    kills="CKPT-826",
)
numbers_of_parameters_not_said = patched(
    "That an optimizer's own keys are numbers is not saved.",
    swap(f"{_NATIVE}:_with_literals", lambda value, path: ()),
    kills="CKPT-843",
)

entries_without_states = patched(
    "A load leaves an entry for each parameter, of which one says nothing.",
    mutated(f"{_OWN}:OptimizerStates.load_state_dict", "del optimizer.state[param]", "pass"),
    kills="CKPT-902",
)
states_of_frozen_ones_dropped = patched(
    "A load takes the states that an optimizer has of frozen parameters, and gives none back.",
    mutated(f"{_STATES}._take_later", "not param.requires_grad", "False"),
    kills="CKPT-977",
)
last_of_two_optimizers = patched(
    "Of the states that two optimizers have of one parameter those of the last are saved.",
    swap(f"{_OWN}:_check_apart", lambda optimizers: None),
    kills="CKPT-978",
)
shared_parameters_seen_late = patched(
    "That two optimizers have one parameter is seen by the first save of a manager.",
    mutated(f"{_STATES}.check_params", "_check_apart(plain)", "pass"),
    kills="CKPT-978",
)
