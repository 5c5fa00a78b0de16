"""Faults that ``test_part_copies`` must notice."""

from __future__ import annotations

from typing import Any

import torch

from conformance.harness import fault, mutated, patched


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
