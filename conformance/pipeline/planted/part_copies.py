"""Faults that ``test_part_copies`` must notice."""

from __future__ import annotations

from typing import Any

import torch

from conformance.harness import fault, mutated, patched, swap


@fault(kills="PIPE-666", at="torch:load")
def parts_are_no_data(original: Any, file: Any, **options: Any) -> Any:
    """Nobody has said that parts of tables are data."""
    known = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        return original(file, **options)
    finally:
        torch.serialization.add_safe_globals(known)


clones_share_memory = patched(
    "A copy of a part is the part itself.",
    mutated(
        "twinproof.pipeline.sharded:TableShard.__torch_dispatch__",
        "return args[0].__deepcopy__({})",
        "return args[0]",
    ),
    kills="PIPE-667",
)

parts_are_not_copied_into = patched(
    "A stager copies nothing into the part that it has made.",
    mutated(
        "twinproof.pipeline.sharded:TableShard.__torch_dispatch__",
        "copy_into(args[0], args[1])",
        "pass",
    ),
    kills="PIPE-667",
)

staged_parts_begin_at_zero = patched(
    "A stager that makes a part first takes any sizes.",
    mutated(
        "twinproof.pipeline.sharded:TableShard.__torch_dispatch__",
        "aten.new_empty.default and list(args[1]) == list(args[0].shape)",
        "aten.new_empty.default",
    ),
    kills="PIPE-667",
)

dtypes_passed_over = patched(
    "Memory for a part is of the part's dtype, whatever was asked for.",
    mutated(
        "twinproof.pipeline.sharded:TableShard.__torch_dispatch__",
        'options.get("dtype") in (None, getattr(args[0], "dtype", None))',
        "True",
    ),
    kills="PIPE-646",
)

_SHARD = "twinproof.pipeline.sharded:TableShard"
as_torch_pickles = patched(
    "A part is pickled as torch pickles every class of this kind.",
    mutated(
        f"{_SHARD}.__reduce_ex__",
        "return _made_anew, (tuple(self.shape), self.dtype, self._local, self._origin)",
        "return torch.Tensor.__reduce_ex__(self, protocol)",
    ),
    kills="PIPE-744",
)
read_at_the_beginning = patched(
    "A part that was read stands at the beginning of its table.",
    mutated("twinproof.pipeline.sharded:_made_anew", "local, origin)", "local)"),
    kills="PIPE-744",
)
storage_of_its_shape = patched(
    "A part hands out a storage as torch makes it, which has no memory.",
    mutated(f"{_SHARD}.untyped_storage", "expected = ", "return torch.Tensor.untyped_storage(self)\n    expected = "),
    kills="PIPE-745",
)
values_beside_the_part = patched(
    "Values in a part's place are kept beside it.",
    swap(f"{_SHARD}.data", torch.Tensor.data),
    kills="PIPE-745",
)
