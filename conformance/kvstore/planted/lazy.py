"""Faults that ``test_lazy`` must notice."""

from __future__ import annotations

from typing import Any

import torch

from conformance.harness import fault, mutated, patched, swap


@fault(kills=("KV-150", "CKPT-420"), at="twinproof.kvstore.views:_check_operation")
def lazy_rows_take_any_operation(original: Any, *_: Any) -> None:
    """Lazy rows, which have no memory, accept allocation and writes in place."""


@fault(kills=("KV-151", "CKPT-421"), at="twinproof.kvstore.views:KVTensor.in_memory")
def copy_is_the_store(original: Any, view: Any, dtype: Any = None) -> Any:
    """A copy of a view still reads the store."""
    return original(view, dtype) if view.source.read_only else view._moved_to(view.source)


@fault(kills="KV-151", at="twinproof.kvstore.rows:Snapshot.__reduce_ex__")
def moments_are_copied(original: Any, moment: Any, protocol: Any) -> Any:
    """A snapshot is copied, and its rows are not."""
    return object.__reduce_ex__(moment, protocol)


@fault(kills="KV-152", at="twinproof.kvstore.views:KVTensor.accept")
def metadata_not_loaded(original: Any, view: Any, start: int, rows: Any) -> None:
    """dcp.load passes over timestamps and counts, whose view is read-only."""
    if view.view_name != "metadata":
        original(view, start, rows)


@fault(kills="KV-143", at="twinproof.kvstore.views:KVTensor.staged")
def snapshot_for_each_view(original: Any, view: Any, memo: Any) -> Any:
    """Each view of a state dict is staged at a moment of its own."""
    return original(view, {})


words_of_the_last_load = patched(
    "A planner that loads again writes the rows of the load before once more.",
    mutated(
        "twinproof.kvstore.statedict:KVLoadPlanner.finish_plan",
        "self._waiting: list[tuple[LazyRows, int, torch.Tensor]] = []",
        "self._waiting = self.__dict__.get('_waiting', [])",
    ),
    mutated("twinproof.kvstore.statedict:KVLoadPlanner._write", "self._waiting = []", "pass"),
    kills="KV-249",
)
objects_are_waited_for = patched(
    "What was read waits for as many tensors as there are tensors and objects.",
    mutated(
        "twinproof.kvstore.statedict:KVLoadPlanner.finish_plan",
        "sum(item.type is LoadItemType.TENSOR for item in new_plan.items)",
        "len(new_plan.items)",
    ),
    kills="KV-276",
)
words_of_rows_to_come = patched(
    "Timestamps and counts are set in the order in which they are read, also of rows that are not there yet.",
    mutated("twinproof.kvstore.statedict:_turn", 'int(view.view_name == "metadata")', "0"),
    kills="KV-276",
)
objects_left_out = patched(
    "What is no tensor is left out of a plan that has views.",
    mutated(
        "twinproof.kvstore.statedict:KVLoadPlanner.create_local_plan",
        "plan = create_default_local_load_plan(rest, self.metadata, not self.allow_partial_load)",
        "plan = create_default_local_load_plan(rest, self.metadata, not self.allow_partial_load)\n"
        "    plan.items = [item for item in plan.items if item.type is LoadItemType.TENSOR]",
    ),
    kills="KV-276",
)
copies_in_chunks_of_their_own = patched(
    "A view that is copied or staged forgets how many rows a chunk of it has.",
    mutated("twinproof.kvstore.views:KVTensor._moved_to", ", chunk_rows=self.chunk_rows", ""),
    kills="KV-293",
)
wider_rows_in_chunks_of_their_own = patched(
    "A view that is copied to another dtype forgets how many rows a chunk of it has.",
    mutated("twinproof.kvstore.views:LazyRows.in_memory", ", self.chunk_rows)", ")"),
    kills="KV-293",
)
plain_copies_begin_anew = patched(
    "Ids and bucket counts that are sent stand at the beginning of the rows of all ranks.",
    mutated("twinproof.kvstore.views:_rebuild_dense", "made.place(global_row_count, row_offset)", "pass"),
    kills="KV-293",
)
rows_of_other_ids_written = patched(
    "A load through views writes each tensor when it is read, whatever the next one turns out to be.",
    mutated("twinproof.kvstore.statedict:KVLoadPlanner.commit_tensor", "is_last = self._left == 0", "is_last = True"),
    kills="KV-342",
)
lists_are_not_looked_into = patched(
    "Writes to lazy rows in a list are lost.",
    mutated(
        "twinproof.kvstore.views:_check_operation", "value if isinstance(value, list | tuple) else (value,)", "(value,)"
    ),
    kills="KV-345",
)
indexed_writes_lost = patched(
    "What is written to lazy rows by an index is lost.",
    mutated("twinproof.kvstore.views:LazyRows.__setitem__", 'raise _unwritable("rows[...] =")', "return None"),
    kills="KV-345",
)
_OUT = "twinproof.kvstore.rows:check_out"
read_into_a_copy = patched(
    "Rows that are read into lazy rows are lost.",
    mutated(_OUT, "if type(out).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:", "if False:"),
    kills="KV-354",
)
parameters_are_not_read_into = patched(
    "Rows are read into what is a tensor and nothing more.",
    mutated(_OUT, "(out).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__", "(out) is not torch.Tensor"),
    kills="KV-354",
)


names_of_the_first_load = patched(
    "A planner asks each load for the rows that it was first asked for.",
    mutated(
        "twinproof.kvstore.statedict:KVLoadPlanner.create_local_plan",
        "found = {fqn: value for fqn, value in lazy.items() if fqn in saved}",
        "names = self.__dict__.setdefault('names', set(lazy)); found = {n: v for n, v in lazy.items() if n in names}",
    ),
    kills="KV-440",
)
items_of_the_first_load = patched(
    "What was read waits for as many tensors as the first load had.",
    mutated(
        "twinproof.kvstore.statedict:KVLoadPlanner.finish_plan",
        "self._left = sum(item.type is LoadItemType.TENSOR for item in new_plan.items)",
        "count = sum(item.type is LoadItemType.TENSOR for item in new_plan.items); "
        "self._left = self.__dict__.setdefault('_first', count)",
    ),
    kills="KV-440",
)


@fault(kills="KV-369", at="twinproof.kvstore.statedict:KVLoadPlanner.finish_plan")
def rows_wait_for_the_next_load(original: Any, planner: Any, plan: Any) -> Any:
    """Rows of a load that was refused wait, and are written with the next."""
    waiting = getattr(planner, "_waiting", [])
    found = original(planner, plan)
    planner._waiting = waiting
    return found


_COMMIT = "twinproof.kvstore.statedict:KVLoadPlanner.commit_tensor"


@fault(kills="KV-380", at=_COMMIT)
def refused_tensors_count(original: Any, planner: Any, item: Any, tensor: Any) -> None:
    """A tensor that is refused is one that has arrived: the last of the others writes all that fits."""
    before = planner._left
    try:
        original(planner, item, tensor)
    except BaseException:
        planner._left = before - 1
        raise


plain_tensors_write = patched(
    "Rows are written when a plain tensor was read, whatever is still to come.",
    mutated(_COMMIT, "if is_last:", "if is_last or not isinstance(view, LazyRows):"),
    kills="KV-380",
)

all_rows_are_their_own_alias = patched(
    "An alias of lazy rows is the rows themselves, which torch refuses as a view of them.",
    swap("twinproof.kvstore.views:_SAME", (torch.ops.aten.detach.default, torch.ops.aten.alias.default)),
    kills="KV-426",
)
moments_by_names_of_tables = patched(
    "Moments of a state dict are told apart by the names of the stores' tables.",
    mutated(
        "twinproof.kvstore.views:KVTensor.staged",
        "    if id(source) not in memo:\n        memo[id(source)] =",
        "    memo.setdefault(id(source), memo.get(source.tables))\n"
        "    if memo[id(source)] is None:\n        memo[id(source)] = memo[source.tables] =",
    ),
    kills="KV-449",
)

arrays_are_torchs = patched(
    "Lazy rows leave it to torch to say that there is no array of them.",
    swap("twinproof.kvstore.views:LazyRows.numpy", torch.Tensor.numpy),
    kills="KV-470",
)
lists_are_torchs = patched(
    "Lazy rows leave it to torch to say that there is no list of them.",
    swap("twinproof.kvstore.views:LazyRows.tolist", torch.Tensor.tolist),
    kills="KV-470",
)
locals_of_everybody = patched(
    "Calls that are none of torch's are looked at for what torch has by a name.",
    mutated(
        "twinproof.engine:locals_of_callers",
        'frame.f_globals.get("__name__", "").partition(".")[0] == "torch"',
        "True",
    ),
    kills="KV-493",
)
