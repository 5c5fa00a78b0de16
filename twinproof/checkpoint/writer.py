"""The reference writer: the coordinator gathers every chunk, puts the tensors together and writes the files."""

from __future__ import annotations

import torch
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from twinproof.checkpoint.arrange import Arrangement, exported_dtype
from twinproof.checkpoint.base import WriterBase
from twinproof.checkpoint.memory import as_bits, check_storable
from twinproof.checkpoint.outcome import raise_first, write_results
from twinproof.checkpoint.shards import save_shards
from twinproof.checkpoint.single import write_tensors

__all__ = ["HuggingFaceStorageWriter"]

Part = tuple[str, tuple[int, ...], torch.Tensor]


class HuggingFaceStorageWriter(WriterBase):
    __doc__ = WriterBase.__doc__

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Gather, assemble, write; every rank learns of every rank's failure."""
        if self.options.writes_shards:
            save_shards(self, plan, planner)
        else:
            self._save(plan, planner)
        future: Future[list[WriteResult]] = Future()
        future.set_result(write_results(plan.items, self.arrangement))
        return future

    def _save(self, plan: SavePlan, planner: SavePlanner) -> None:
        self.check_replicas(planner)
        parts: list[Part] = []
        failure: Exception | None = None
        try:
            arrangement = self.arranged(planner) if self.is_coordinator else None
            parts = self._local_parts(plan, planner)
        except Exception as error:
            failure = error
        gathered = self.gather((parts, failure))
        if failure is not None:
            raise failure
        raise_first([failed for _, failed in gathered])
        folder = self.begin_staging()
        if arrangement is not None:
            try:
                for file, layout in arrangement.files.items():
                    tensors = _assemble(file, arrangement, [part for some, _ in gathered for part in some])
                    write_tensors(str(folder / file), tensors, layout, durable=self.options.durable)
            except Exception as error:
                failure = error
        self.settle(failure)

    def _local_parts(self, plan: SavePlan, planner: SavePlanner) -> list[Part]:
        parts = []
        for item in plan.items:
            value = planner.resolve_data(item)
            assert isinstance(value, torch.Tensor)
            check_storable(value, item.index.fqn)
            value = value.detach().to("cpu", exported_dtype(item.index.fqn, value.dtype, self.options))
            parts.append((item.index.fqn, tuple(item.index.offset or ()), as_bits(value).contiguous()))
        return parts


def _assemble(file: str, arrangement: Arrangement, parts: list[Part]) -> dict[str, torch.Tensor]:
    wanted = {name: tensor for name, tensor in arrangement.tensors.items() if tensor.file == file}
    tensors = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in wanted.items()}
    for name, offsets, bits in parts:
        if name in tensors:
            slices = tuple(slice(o, o + s) for o, s in zip(offsets, bits.shape, strict=True))
            as_bits(tensors[name])[slices] = bits
    return tensors
