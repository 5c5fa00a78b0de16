"""Loading through ``torch.distributed.checkpoint.load``: rows that were read are written to the store, chunk by chunk.

Torch's planner fills tensors in place and calls that the end; a view of a store has no memory to fill.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, create_default_local_load_plan
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from twinproof.errors import MissingKeyError, PlanError
from twinproof.kvstore.lazy import LazyRows
from twinproof.kvstore.views import KVTensor

__all__ = ["KVLoadPlanner"]


class KVLoadPlanner(DefaultLoadPlanner):
    """``DefaultLoadPlanner`` that also loads into ``KVTensor``s of a store.

    Load ``{table}.weight_id`` first, as a plain tensor; views of these ids are then the targets for all else. Where the
    store has the very rows of the checkpoint, ``store.state_dict(snapshot=False)`` is the target as it is: its ids and
    bucket counts are compared. Timestamps and counts are set last, on the rows that are there by then. Memory is that
    of all rows, once more: readers resolve every target before they read. ``load`` is bounded by a chunk.

    Raises:
        UnsupportedError: views of a moment, which nothing can be loaded into. PlanError: other numbers of rows or
            widths than the checkpoint's. MissingKeyError: names that the checkpoint lacks.
    """

    def create_local_plan(self) -> LoadPlan:
        """Read items for this rank's rows, and for everything else as torch plans it."""
        lazy = {fqn: value for fqn, value in self.state_dict.items() if isinstance(value, LazyRows)}
        if not lazy:
            return super().create_local_plan()
        for value in lazy.values():
            value.check_target()
        assert self.metadata is not None
        saved: dict[str, Any] = self.metadata.state_dict_metadata
        missing = sorted(lazy.keys() - saved.keys())
        if missing and not self.allow_partial_load:
            raise MissingKeyError("names are not in the checkpoint", got=missing, where="state_dict")
        rest = {fqn: value for fqn, value in self.state_dict.items() if fqn not in lazy}
        plan = create_default_local_load_plan(rest, self.metadata, not self.allow_partial_load)
        for fqn, value in lazy.items():
            if fqn in saved:
                plan.items += _read_items(fqn, value, saved[fqn])
        return plan

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """Note what is to come."""
        self._left = sum(item.type is LoadItemType.TENSOR for item in new_plan.items)
        self._waiting: list[tuple[KVTensor, int, torch.Tensor]] = []
        return super().finish_plan(new_plan)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Write rows that were read to the store.

        Raises:
            PlanError: a checkpoint that cut rows apart. CorruptionError: whole rows whose keys are not the view's ids,
                or other ids than the views'.
        """
        view = self.state_dict[read_item.dest_index.fqn]
        self._left -= 1
        if isinstance(view, LazyRows):
            if tensor.shape[1:] != view.shape[1:]:
                raise PlanError("rows that were cut apart", got=tuple(tensor.shape), expected=tuple(view.shape[1:]))
            first = int((read_item.dest_index.offset or (0,))[0]) - view.row_offset + int(read_item.dest_offsets[0])
            if isinstance(view, KVTensor) and view.view_name == "metadata":
                self._waiting.append((view, first, tensor))
            else:
                view.accept(first, tensor.contiguous())
        if self._left == 0:
            for waiting, first, words in self._waiting:
                waiting.accept(first, words.contiguous())


def _read_items(fqn: str, value: LazyRows, saved: Any) -> list[ReadItem]:
    size = (value.global_row_count, *value.shape[1:])
    if not isinstance(saved, TensorStorageMetadata) or tuple(saved.size) != size:
        got = tuple(saved.size) if isinstance(saved, TensorStorageMetadata) else type(saved).__name__
        raise PlanError("other rows than the checkpoint's", got=size, expected=got, where=fqn)
    return create_read_items_for_chunk_list(fqn, saved, value.global_chunks())
