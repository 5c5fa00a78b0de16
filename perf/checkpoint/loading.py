"""Loads into fresh memory, as a program without a training loop does: one file, or all files of a folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from conformance.harness import Mismatch, Rank
from perf.checkpoint.model import Model, remove_folder
from perf.checkpoint.runs import Run, measure
from perf.harness.paired import Round
from perf.harness.workloads import Workload
from perf.peers import loaders
from perf.peers.loaders import Tensors

__all__ = ["measure_fresh_loads"]

_THREADS = 2  # Of every contender that has threads.
_CALL_BYTES = 128  # What the gates must refuse.
_OTHERS = ("plain", "by-128", "mapped")


def _load_ours(checkpoint: Any, folder: Path, files: list[Path]) -> Tensors:
    """What a user calls: of one file its own function, of a folder ``dcp.load`` with the names that are there."""
    if len(files) == 1:
        tensors: Tensors = checkpoint.load_file(files[0])
        return tensors
    reader = checkpoint.HuggingFaceStorageReader(folder, thread_count=_THREADS)
    stored = reader.read_metadata().state_dict_metadata
    targets = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in stored.items()}
    load(dict(targets), storage_reader=reader)
    return targets


def measure_fresh_loads(rank: Rank, workload: Workload, folder: str, round_count: int, seed: int) -> list[Round]:
    """Every tensor of the folder into memory that the load itself makes.

    Contenders: ``ours``; those of ``loaders.LOADERS`` that are installed; ``plain``, which reads bytes in one thread;
    ``by-128``, which does so 128 bytes per call; ``mapped``, which copies nothing.
    """
    torch.set_num_threads(_THREADS)
    model = Model(workload)
    path = Path(folder) / "saved"
    checkpoint = rank.component("checkpoint")
    with checkpoint.HuggingFaceStorageWriter(path, model.mapping, durable=False) as writer:
        save(dict(model.state()), storage_writer=writer)
    files = [path / name for name in model.files]
    found: dict[str, Tensors | None] = {}

    def work_of(who: str) -> Callable[[], Tensors | None]:
        if who == "ours":
            return lambda: _load_ours(checkpoint, path, files)
        if who == "mapped":
            return lambda: loaders.map_files(files)
        if who == "plain":
            return lambda: loaders.read_whole(files)
        if who == "by-128":
            return lambda: loaders.read_whole(files, call_bytes=_CALL_BYTES)
        return lambda: loaders.LOADERS[who][1](files, _THREADS)

    def check(who: str) -> None:
        tensors = found["got"]
        if tensors is not None:
            _check(model, tensors, who)

    def run_of(who: str) -> Run:
        work = work_of(who)
        return Run(
            work=lambda: found.update(got=work()),
            check=lambda: check(who),
            prepare=lambda: None,
            finish=found.clear,
            last=round_count,
        )

    present = [who for who in workload.contenders if who in ("ours", *_OTHERS) or loaders.installed(who)]
    rounds = measure({who: run_of(who) for who in present}, round_count, seed)
    remove_folder(path)
    return rounds


def _check(model: Model, tensors: Tensors, who: str) -> None:
    """All names, and every bit. Raises Mismatch."""
    if tensors.keys() != set(model.names):
        raise Mismatch(f"{who} loaded other names than were saved", got=sorted(tensors)[:3])
    for number, name in enumerate(model.names):
        if not torch.equal(tensors[name].view(torch.int32), model.values(number, whole=True)):
            raise Mismatch(f"{who} loaded other values than were saved", where=name)
