"""Faults that ``test_packed`` must notice."""

from __future__ import annotations

from conformance.harness import mutated, patched

_PLANNERS = "twinproof.checkpoint.planners"
_NATIVE, _MANAGER, _DCP = ("twinproof.checkpoint." + name for name in ("native", "manager", "dcp"))

loads_as_one_block = patched(
    "A load of all states takes a packed shard for one block, as torch does.",
    mutated(f"{_PLANNERS}:FillingPlanner.create_local_plan", "self._with_blocks(plan, self.state_dict)", "{}"),
    kills="CKPT-940",
)
initial_by_torchs_planner = patched(
    "An initial load of HF files is planned by torch.",
    mutated(f"{_MANAGER}:CheckpointManager._load_hf", "planner=planner, ", ""),
    kills="CKPT-940",
)
training_saved_by_torchs_planner = patched(
    "A save of all states is planned by torch.",
    mutated(f"{_NATIVE}:save_training", "planner=planner, ", ""),
    kills="CKPT-941",
)
manager_saves_by_torchs_planner = patched(
    "A manager's save that waits is planned by torch.",
    mutated(f"{_MANAGER}:CheckpointManager._save", "planner=planner, process", "process"),
    kills="CKPT-941",
)
async_saves_by_torchs_planner = patched(
    "A manager's save in the background is planned by torch.",
    mutated(f"{_MANAGER}:CheckpointManager._save", "planner=planner,\n", "\n"),
    kills="CKPT-941",
)
readers_fill_one_block = patched(
    "The reader fills what torch's planner takes for one block.",
    mutated(f"{_DCP}:HuggingFaceStorageReader.read_data", "check_blocks(plan, planner)", "pass"),
    kills="CKPT-942",
)
quantized_fill_one_block = patched(
    "The reader of quantized weights fills what torch's planner takes for one block.",
    mutated(f"{_DCP}:QuantizedHuggingFaceStorageReader.read_data", "check_blocks(plan, planner)", "pass"),
    kills="CKPT-942",
)
ends_of_blocks_pass = patched(
    "What begins where a block does is taken to lie in it.",
    mutated(f"{_PLANNERS}:check_blocks", "if box is None or any(", "if box is None or all("),
    kills="CKPT-942",
)
any_place_is_a_block = patched(
    "What begins where no block does is taken to lie in the first one.",
    mutated(f"{_PLANNERS}:check_blocks", "blocks.get(at, (None, None))", "blocks.get(at, next(iter(blocks.values())))"),
    kills="CKPT-954",
)
places_without_blocks_pass = patched(
    "What begins where no block does is not looked at.",
    mutated(f"{_PLANNERS}:check_blocks", "if box is None or any(", "if box is not None and any("),
    kills="CKPT-954",
)
packed_beside_rows = patched(
    "Packed shards that are loaded beside rows are taken for one block.",
    mutated("twinproof.kvstore.statedict:KVLoadPlanner.create_local_plan", "self._with_blocks(plan, rest)", "{}"),
    kills="CKPT-943",
)
packed_by_a_planner_of_rows = patched(
    "A planner of rows that is asked for none takes packed shards for one block.",
    mutated(
        "twinproof.kvstore.statedict:KVLoadPlanner.create_local_plan",
        "return super().create",
        "return super(FillingPlanner, self).create",
    ),
    kills="CKPT-943",
)
