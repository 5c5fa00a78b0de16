"""What one process does with folders that many ranks wrote: merge them, and open them."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch.distributed as dist

from conformance.harness import Mismatch, Rank
from perf.checkpoint.model import Model, remove_folder
from perf.checkpoint.runs import Run, measure, run_in, thread_count_of
from perf.harness.paired import Round
from perf.harness.workloads import Workload
from perf.peers import plain_checkpoint as plain
from perf.peers import torch_checkpoint as peer

__all__ = ["measure_consolidations", "measure_openings"]


# Bytes per call: what a merge cannot undercut, and what its gate must refuse.
_PLAIN_COPIES = {"plain": 8 << 20, "by-page": 4096}


def measure_consolidations(rank: Rank, workload: Workload, folder: str, round_count: int, seed: int) -> list[Round]:
    """Merge a shard folder that torch wrote from all ranks, on rank 0 alone, while the others wait."""
    model = Model(workload)
    source = Path(folder) / "sharded"
    peer.save_shards(model.state(), source, model.mapping)
    dist.barrier()

    def work_of(who: str, path: Path) -> Callable[[], None]:
        threads = thread_count_of(who)
        if rank.rank > 0:
            return lambda: None
        if who in _PLAIN_COPIES:
            return lambda: plain.copy(source, path, call_bytes=_PLAIN_COPIES[who])
        if who.startswith("torch"):
            return lambda: peer.consolidate(source, path, model.mapping, thread_count=threads)
        ours = rank.component("checkpoint").consolidate_safetensors_files
        return lambda: ours(source, path, model.mapping, num_threads=threads)

    def check(who: str, path: Path) -> None:
        if who not in _PLAIN_COPIES:
            model.check_folder(path, who)

    runs = {}
    for who in workload.contenders:
        path = Path(folder) / who
        runs[who] = run_in(path, rank.rank, work=work_of(who, path), check=partial(check, who, path), last=round_count)
    rounds = measure(runs, round_count, seed)
    if rank.rank == 0:
        remove_folder(source)
    return rounds


def measure_openings(rank: Rank, workload: Workload, folder: str, round_count: int, seed: int) -> list[Round]:
    """Read the metadata of a shard folder with ``file_count`` shards of every tensor."""
    path = Path(folder) / "shards"
    _write_shards(workload, path)
    found: dict[str, object] = {}

    def work_of(who: str) -> Callable[[], None]:
        if who == "torch":
            return lambda: found.update(got=peer.open_folder(path))
        reader = rank.component("checkpoint").HuggingFaceStorageReader
        return lambda: found.update(got=reader(path).read_metadata())

    def check(who: str) -> None:
        tensors = found.pop("got").state_dict_metadata  # type: ignore[attr-defined]
        chunk_count = sum(len(tensor.chunks) for tensor in tensors.values())
        if chunk_count != workload.tensor_count * workload.file_count:
            raise Mismatch(f"{who} did not find every chunk", got=chunk_count)
        wrong = [name for name, tensor in tensors.items() if tuple(tensor.size) != workload.shape]
        if wrong or len(tensors) != workload.tensor_count:
            raise Mismatch(f"{who} found other tensors than there are", got=wrong[:3] or len(tensors))

    runs = {
        who: Run(
            work=work_of(who),
            check=lambda who=who: check(who),  # type: ignore[misc]
            prepare=lambda: None,
            finish=found.clear,
            last=round_count,
        )
        for who in workload.contenders
    }
    rounds = measure(runs, round_count, seed)
    remove_folder(path)
    return rounds


def _write_shards(workload: Workload, path: Path) -> None:
    """Headers by hand, since saving from 64 ranks would need 64 ranks; the data is a hole of the right length."""
    path.mkdir()
    rows, columns = workload.shape
    share = rows // workload.file_count
    size_bytes = workload.tensor_bytes // workload.file_count
    names = [f"layers.{number}.weight" for number in range(workload.tensor_count)]
    entries = {
        name: {"dtype": "F32", "shape": [share, columns], "data_offsets": [i * size_bytes, (i + 1) * size_bytes]}
        for i, name in enumerate(names)
    }
    for shard in range(workload.file_count):
        offsets = json.dumps({name: {"saved_offsets": [shard * share, 0]} for name in names})
        metadata = {"DCP_SHARDING_INFO": offsets, "DCP_VERSION": "1.0", "format": "pt"}
        text = json.dumps({"__metadata__": metadata, **entries}).encode()
        text += b" " * (-len(text) % 8)
        with (path / f"shard-{shard + 1:05d}-model-00001-of-00001.safetensors").open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + size_bytes * workload.tensor_count)
