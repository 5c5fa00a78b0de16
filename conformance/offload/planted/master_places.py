"""Faults that ``test_master_places`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched

_STATES = "twinproof.offload.states"

gradients_left_beside_masters = patched(
    "A gradient that is made like a master stays in host memory.",
    mutated(f"{_STATES}:_for_the_model", "param.device if is_like_master else grad.device", "grad.device"),
    kills="OPT-583",
)

gradients_brought_from_anywhere = patched(
    "A gradient of any place is brought to the model's.",
    mutated(f"{_STATES}:_for_the_model", "param.device if is_like_master else grad.device", "param.device"),
    kills="OPT-583",
)

masters_copied_where_they_lie = patched(
    "A copy of masters is made in host memory.",
    mutated(f"{_STATES}:MasterWeights.__getstate__", "if mover is not None:", "if False:"),
    kills="OPT-584",
)

cast_models_refused = patched(
    "A parameter that is no half any more is refused.",
    mutated(f"{_STATES}:MasterWeights.check", "if master.dtype is not torch.float32:", "if param.dtype.itemsize > 2:"),
    kills="OPT-585",
)

cast_models_rounded_as_before = patched(
    "A parameter that was cast gets its master as the dtype of before has it.",
    mutated(f"{_STATES}:MasterWeights.end", "param.copy_(master)", "param.copy_(master.bfloat16())"),
    kills="OPT-585",
)

masters_stay_where_they_were_left = patched(
    "Another optimizer finds masters where a dropped offloader left them.",
    mutated(f"{_STATES}:MasterWeights.attach", "self.come_home()", "pass"),
    kills="OPT-563",
)
offloaders_refuse_masters_of_others = patched(
    "An offloader refuses masters that a dropped one left in host memory.",
    mutated(
        "twinproof.offload.offloader:OptimizerStateOffloader.__init__", "master_weights.come_home()", "master_weights"
    ),
    kills="OPT-563",
)
copies_lie_where_masters_were_left = patched(
    "A copy has its masters where a dropped offloader left them.",
    mutated(f"{_STATES}:MasterWeights.__getstate__", "self.come_home()", "pass"),
    kills="OPT-563",
)
