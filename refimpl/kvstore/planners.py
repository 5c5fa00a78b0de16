"""Loading through ``torch.distributed.checkpoint.load``: rows that were read are written to the store, chunk by chunk.

Torch's planner fills tensors in place and calls that the end; a view of a store has no memory to fill.
"""

from __future__ import annotations

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem

from refimpl.errors import PlanError
from refimpl.kvstore.views import KVTensor

__all__ = ["KVLoadPlanner"]


class KVLoadPlanner(DefaultLoadPlanner):
    """``DefaultLoadPlanner`` that also loads into ``KVTensor``s.

    Load ``{table}.weight_id`` first, as a plain tensor; views of these ids are then the targets for all else. Memory is
    that of all rows, once more: readers resolve every target before they read. ``load`` is bounded by a chunk.
    """

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Write rows that were read to the store.

        Raises:
            PlanError: a checkpoint that cut rows apart. CorruptionError: whole rows whose keys are not the view's ids.
        """
        view = self.original_state_dict[read_item.dest_index.fqn]
        if not isinstance(view, KVTensor):
            return
        if tensor.shape[1:] != view.shape[1:]:
            raise PlanError("rows that were cut apart", got=tuple(tensor.shape), expected=tuple(view.shape[1:]))
        first = int((read_item.dest_index.offset or (0,))[0]) - view.row_offset + int(read_item.dest_offsets[0])
        view.set_range(0, first, tensor.shape[0], tensor.contiguous())
