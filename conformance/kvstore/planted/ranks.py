"""Faults that ``test_ranks`` must notice."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from conformance.harness import fault, mutated, patched, swap
from twinproof.kvstore.statedict import rank_and_world

rows_of_any_layout_saved = patched(
    "Ranks save rows of any layout as the first rank's.",
    mutated("twinproof.kvstore.disk:_parts", "store.options.rows,", "[*store.options.rows],"),
    kills="KV-350",
)
tracked_by_some = patched(
    "A save names contents of which some ranks know no changes.",
    mutated("twinproof.kvstore.disk:_parts", "store.options.track_changes}", "None}"),
    kills="KV-350",
)
views_of_any_layout = patched(
    "Ranks make views of rows of any layout.",
    mutated("twinproof.kvstore.statedict:state_dict", "[source.layout(table) for table in names]", "[]"),
    kills="KV-350",
)
rank_outside_of_all = patched(
    "A process that is not of the group is a rank of it.",
    mutated("twinproof.kvstore.statedict:rank_and_world", "if rank < 0:", "if False:"),
    kills="KV-360",
)
any_group_asked = patched(
    "What is no group is asked for its ranks.",
    mutated("twinproof.kvstore.statedict:rank_and_world", "if _is_group(process_group)", "if True"),
    kills="KV-360",
)


_ASKED = tuple(f"{name}:rank_and_world" for name in ("twinproof.kvstore.statedict", "twinproof.kvstore.disk"))


@fault(kills="KV-414")
def ranks_remembered() -> Iterator[None]:
    """Whether a process is alone, and of how many ranks, is asked for once in its life."""
    with swap(_ASKED, functools.cache(rank_and_world))():
        yield


group_of_a_module_found_early = patched(
    "A module without a group has the one that is the default when it is made.",
    mutated(
        "twinproof.kvstore.modules:_StoreRows.__init__",
        "= buckets, process_group",
        "= buckets, process_group or torch.distributed.group.WORLD",
    ),
    kills="KV-414",
)

_MODULE = "twinproof.kvstore.modules:_StoreRows"
full_states_of_one_rank = patched(
    "Torch's full_state_dict gets the rows of one rank.",
    mutated(f"{_MODULE}._check_rows_of_all", '"full_state_dict", False) is True', '"full_state_dict", False) is None'),
    kills="KV-458",
)
full_states_of_nobody = patched(
    "Torch's full_state_dict is refused where the first rank has all rows, too.",
    mutated(f"{_MODULE}._check_rows_of_all", "== (0, total_count)", "is None"),
    kills="KV-458",
)
rows_of_a_rank_for_all = patched(
    "One process takes the rows of one rank of several for all.",
    mutated(f"{_MODULE}._check_all_rows", "count is not None", "False"),
    kills="KV-458",
)

_PLAN, _DEALT = "twinproof.checkpoint.plan", "twinproof.kvstore.views:Dealt"
rows_of_the_first_rank = patched(
    "Each rank gets rows from the first on, as many as are in its buckets.",
    mutated(f"{_PLAN}:with_memory", "*sizes[1:]))), begin)", "*sizes[1:]))), 0)"),
    kills="KV-494",
)
parts_handed_on = patched(
    "The owner of rows is given what the planner had in their place.",
    mutated(f"{_PLAN}:without_parts", "isinstance(value, PartOfRows)", "False"),
    kills="KV-494",
)
buckets_of_one_rank_counted = patched(
    "The first bucket of a rank counts as that of the rank before.",
    mutated(f"{_DEALT}.rows", "ends[bucket - 1]", "ends[max(0, bucket - 2)]"),
    kills="KV-494",
)
any_count_of_buckets = patched(
    "Rows are dealt by the first of as many buckets as there are.",
    mutated(f"{_DEALT}.check_count", "count != self.buckets.total_count", "False"),
    kills="KV-495",
)
any_hash = patched(
    "Rows that were saved by another hash go to ranks that do not look them up.",
    mutated(f"{_DEALT}.check_ids", "if wrong.numel():", "if False:"),
    kills="KV-495",
)
any_row_count = patched(
    "Counts of more rows than there are deal out what there is.",
    mutated(f"{_DEALT}.rows", " or total != row_count", ""),
    kills="KV-495",
)
buckets_on_the_default_device = patched(
    "The buckets of rows that are loaded are counted on torch's default device.",
    mutated("twinproof.kvstore.views:Dealt.check_ids", ', device="cpu"', ""),
    kills="KV-511",
)
