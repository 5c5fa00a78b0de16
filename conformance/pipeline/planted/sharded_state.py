"""Faults that ``test_sharded_state`` must notice."""

from __future__ import annotations

from typing import Any

import torch

from conformance.harness import fault, mutated, patched
from twinproof.pipeline.sharding import INIT_ROWS, Shard

_SHARDED = "twinproof.pipeline.sharded:ShardedEmbeddingBagCollection"


@fault(kills="PIPE-112", at="twinproof.pipeline.sharding:KeyValue.owners")
def owner_by_id(original: Any, kind: Any, ids: torch.Tensor, table: Any, sharding: Any, world: int) -> torch.Tensor:
    """The owner of a key is found without its bucket."""
    owners: torch.Tensor = (ids // 2).remainder(world)
    return owners


@fault(kills="PIPE-083", at="fastimpl.pipeline:fuse_input_dists")
def every_module_exchanges_sizes(original: Any, dists: Any) -> None:
    """Each module exchanges its own sizes."""


@fault(kills="PIPE-108", at="twinproof.pipeline.sharded:ShardedEmbeddingBagCollection._make_tables")
def seed_of_dense_tables_forgotten(original: Any, module: Any, collection: Any, seed: int) -> Any:
    """Data-parallel tables are made from another seed."""
    return original(module, collection, 0)


@fault(
    kills=("PIPE-060", "PIPE-146"),
    at="twinproof.pipeline.sharded:ShardedEmbeddingBagCollection.load_optimizer_state_dict",
)
def step_not_loaded(original: Any, module: Any, state: Any) -> None:
    """The step begins again after a load."""
    step = module.fused_optimizer.step_count
    original(module, state)
    module.fused_optimizer.step_count = step


@fault(kills="PIPE-059", at="twinproof.pipeline.sharded:copy_into")
def whole_tensor_cut_at_the_beginning(original: Any, target: Any, value: Any) -> None:
    """A whole tensor gives every rank its first rows."""
    local = target.to_local()
    if local is None or hasattr(value, "to_local"):
        original(target, value)
    else:
        local.copy_(value[: local.shape[0], : local.shape[1]])


@fault(kills="PIPE-059", at="twinproof.pipeline.sharded:copy_into")
def saved_parts_not_taken(original: Any, target: Any, value: Any) -> None:
    """Parts that were saved are not loaded."""
    if not hasattr(value, "to_local"):
        original(target, value)


states_of_other_blocks_taken = patched(
    "States of other column blocks are taken in silence.",
    mutated("twinproof.pipeline.sharded:check_part", "tuple(value.shape) != tuple(target.shape)", "False"),
    kills="PIPE-107",
)


@fault(kills="PIPE-108", at="twinproof.pipeline.sharded:initial_shard")
def first_weights_by_local_row(original: Any, table: Any, index: int, shard: Shard, seed: int) -> torch.Tensor:
    """First weights depend on the plan."""
    from twinproof.kvstore.options import Initializer, initial_weights

    bound = table.num_embeddings**-0.5
    ids = torch.arange(min(INIT_ROWS, shard.rows[1] - shard.rows[0]))
    made = initial_weights(Initializer.uniform(-bound, bound), seed, index, ids, shard.width, table.dtype)
    return made.contiguous()


checked_one_by_one = patched(
    "Parts are loaded one after the other until one does not fit.",
    mutated(
        "twinproof.pipeline.sharded:fill",
        "check_part(target, values[name], name)\n",
        "check_part(target, values[name], name)\n        copy_into(target, values[name])\n",
    ),
    kills=("PIPE-445", "PIPE-741"),
)


parameters_are_copied_too = patched(
    "A copy of a sharded collection copies the parameters that were listed beside its tables.",
    mutated(f"{_SHARDED}.__getstate__", ', "_cut_parameters": {}', ""),
    kills="PIPE-502",
)

listed_parameters_are_kept = patched(
    "A copy lists the parameters that the original made, which are apart from its tables.",
    mutated(f"{_SHARDED}.__getstate__", ', "_cut_parameters": {}', ""),
    mutated(f"{_SHARDED}.named_parameters", "or known.data_ptr() != weight.data_ptr()", ""),
    kills="PIPE-502",
)

loaded_with_its_graph = patched(
    "A load copies values into a table where gradients are recorded.",
    mutated("twinproof.pipeline.sharded:copy_into", "torch.no_grad()", "torch.enable_grad()"),
    kills="PIPE-504",
)

values_not_at_hand_are_tried = patched(
    "A load finds that a value cannot be copied when it comes to it.",
    mutated("twinproof.pipeline.sharded:check_part", "if held is not None and (", "if False and ("),
    kills="PIPE-505",
)

always_a_snapshot = patched(
    "Rows of key-value tables are those of the moment, whatever was asked for.",
    mutated("twinproof.pipeline.sharded:TableParts.key_value_state_dict", "snapshot=snapshot,", ""),
    kills="PIPE-539",
)

states_of_blocks_by_rank = patched(
    "The state of a column block stands at the place of its rank.",
    mutated(
        "twinproof.pipeline.sharded:TableParts.views",
        "shard.part if shard else 0",
        "self._layout.rank if parts > 1 and shard else 0",
    ),
    kills="PIPE-552",
)

parts_never_cast = patched(
    "A part of a table cannot be cast.",
    mutated(
        "twinproof.pipeline.sharded:TableShard.__torch_dispatch__",
        'func is aten._to_copy.default and options.keys() <= {"dtype", "device", "non_blocking"}',
        "False",
    ),
    kills="PIPE-690",
)
cast_parts_at_the_beginning = patched(
    "A part of a table that was cast stands at the table's beginning.",
    mutated("twinproof.pipeline.sharded:TableShard._with_local", "local, self._origin)", "local)"),
    kills="PIPE-690",
)
places_passed_over = patched(
    "A part that is asked elsewhere stays where it is, without a word.",
    mutated(
        "twinproof.pipeline.sharded:TableShard.__torch_dispatch__",
        "part.to(**options)",
        'part.to(options.get("dtype", part.dtype))',
    ),
    kills="PIPE-690",
)
first_step_remembered = patched(
    "The step that was asked for first is remembered.",
    mutated(
        "twinproof.pipeline.sharded:TableParts.optimizer_state_dict",
        'torch.tensor([self._optimizer.step_count], device="cpu")',
        'self.__dict__.setdefault("kept", torch.tensor([self._optimizer.step_count]))',
    ),
    kills="PIPE-686",
)
