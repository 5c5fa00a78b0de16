"""Faults of optimizers of shards among the states, in a process that is new."""

from __future__ import annotations

from conformance.harness import mutated, patched

_MANAGER, _NATIVE = "twinproof.checkpoint.manager", "twinproof.checkpoint.native"

states_of_shards_come_whole = patched(
    "States that a fresh optimizer of shards does not have come back whole, on every rank.",
    mutated(f"{_NATIVE}:_memory_for", "isinstance(param, DTensor)", "False"),
    kills="CKPT-890",
)
states_of_another_parameter = patched(
    "A state is read into memory as the first parameter has it.",
    mutated(f"{_NATIVE}:with_places", "get(tuple(map(str, path[1:3])))", 'get(("state", "0"))'),
    kills="CKPT-890",
)
shards_of_another_shape = patched(
    "A state of shards that has another shape than its parameter comes back whole.",
    mutated(f"{_NATIVE}:_memory_for", "len(saved.chunks) > 1", "False"),
    kills="CKPT-891",
)
tensors_beside_states_have_no_memory = patched(
    "A tensor that an optimizer has beside the states of its parameters is read into nothing.",
    mutated(
        f"{_NATIVE}:with_places",
        "if isinstance(saved, TensorStorageMetadata):",
        'if isinstance(saved, TensorStorageMetadata) and path[1] == "state":',
    ),
    kills="CKPT-899",
)

parameters_asked_for_by_a_save = patched(
    "Whose parameters an optimizer has is asked by the first save.",
    mutated(f"{_MANAGER}:_named_states", "result[_OPTIMIZER].check_params()", "pass"),
    kills="CKPT-980",
)
_OWN = "twinproof.checkpoint.optimizer_states"

parameters_of_the_first_part_asked_for = patched(
    "Whose parameters an optimizer has is asked of that of the first part.",
    mutated(f"{_OWN}:OptimizerStates.check_params", "in self.pairs", "in self.pairs[:1]"),
    kills="CKPT-980",
)
optimizers_of_their_own_judged = patched(
    "An optimizer that says its states itself is refused for the parameters that it has.",
    mutated(
        f"{_OWN}:OptimizerStates.check_params",
        " if type(each).state_dict is torch.optim.Optimizer.state_dict",
        "",
    ),
    kills="CKPT-980",
)

masters_train_no_model = patched(
    "Whose masters an optimizer steps is not asked.",
    mutated(f"{_NATIVE}:_is_trained_by", "for param in trained_params(each)", "for param in params_of([each])"),
    kills="CKPT-981",
)
masters_loaded_apart = patched(
    "Masters that are loaded leave their parameters as changed behind their backs.",
    mutated("twinproof.offload.states:MasterWeights.load_state_dict", "self.load(state_dict[_MASTERS])", "pass"),
    kills="CKPT-981",
)
