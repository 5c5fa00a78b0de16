"""The model and its placements that planning at scale is measured on, and the formula of ``docs/checkpoint.md``."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path

import pytest

from perf.checkpoint.placements import PLACEMENTS, Placement, Transformer
from perf.checkpoint.scale import costs_by_formula, costs_of_plan, make_plans, options_of
from perf.checkpoint.scale_table import table_lines
from twinproof.checkpoint.catalog import Box, check_tiling
from twinproof.errors import PlanError

TINY = Transformer(layer_count=3, dense_layer_count=1, hidden=64, expert_count=6, head_count=6, vocabulary=100)
SMALL = ("pp2-ep4-fsdp8", "pp2-fsdp8-tp4", "fsdp4-tp2")


def test_the_model_has_671_billion_parameters() -> None:
    tensors = list(Transformer().tensors())
    assert sum(math.prod(tensor.shape) for tensor in tensors) == 671_026_419_200
    assert len({tensor.name for tensor in tensors}) == len(tensors) == 45_395
    assert {PLACEMENTS[name].rank_count for name in ("pp8-ep8-fsdp8", "pp4-fsdp16-tp8")} == {512}


@pytest.mark.parametrize(
    "placement",
    [
        Placement(TINY, pipeline=2, data=5, expert=3),
        Placement(TINY, pipeline=3, data=2, tensor=4, whole_experts=True),
        Placement(TINY, pipeline=1, data=1),
    ],
)
def test_a_placement_covers_every_tensor_and_uses_every_rank(placement: Placement) -> None:
    used: set[int] = set()
    for tensor in placement.model.tensors():
        held = list(placement.holders(tensor))
        boxes = {Box(offsets, sizes) for _, offsets, sizes in held}
        check_tiling(tensor.shape, sorted(boxes), PlanError, tensor.name)
        used |= {rank for rank, _, _ in held}
    assert used == set(range(placement.rank_count))


def test_replicas_are_what_an_axis_does_not_cut() -> None:
    placement = Placement(TINY, pipeline=1, data=2, expert=3, tensor=2)
    copies: dict[str, int] = defaultdict(int)
    for tensor in placement.model.tensors():
        held = list(placement.holders(tensor))
        copies[tensor.name.rpartition("layers.1.")[2]] = len(held) // len(
            {(offsets, sizes) for _, offsets, sizes in held}
        )
    assert copies["mlp.experts.0.up_proj.weight"] == 2
    assert copies["self_attn.o_proj.weight"] == 3
    assert copies["input_layernorm.weight"] == 6


@pytest.mark.parametrize("name", SMALL)
def test_a_plan_costs_at_most_what_the_formula_says(name: str) -> None:
    placement = PLACEMENTS[name]
    counted = costs_of_plan(make_plans(placement), options_of("unused"))
    bound = costs_by_formula(placement)
    for key in ("exchanged_bytes", "message_count", "file_count", "plan_bytes"):
        assert 0 < counted[key] <= bound[key], key
    assert bound["payload_bytes"] <= counted["saved_bytes"] <= 1.001 * bound["payload_bytes"]
    assert counted["max_over_mean"] <= 1.2


def test_the_table(tmp_path: Path) -> None:
    lines = list(table_lines(["fsdp4-tp2"], str(tmp_path)))
    assert lines[0] == "|  | `fsdp4-tp2` |"
    assert "| ranks | 8 |" in lines
    assert any(line.startswith("| exchanged, GB |") and "at most" in line for line in lines)
