"""Saves and loads on all ranks, ours and torch's in turn."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from conformance.harness import Rank
from perf.checkpoint.model import Model, remove_folder
from perf.checkpoint.runs import Run, measure, run_in, thread_count_of
from perf.harness.paired import Round
from perf.harness.workloads import Workload
from perf.peers import plain_checkpoint as plain
from perf.peers import torch_checkpoint as peer

__all__ = ["measure_loads", "measure_saves", "save_ours", "save_work"]


def save_ours(
    checkpoint: Any, state: dict[str, Any], folder: Path, mapping: dict[str, int], thread_count: int, **options: Any
) -> None:
    """What a user calls, with nothing set but files and threads."""
    with checkpoint.HuggingFaceStorageWriter(folder, mapping, thread_count=thread_count, **options) as writer:
        save(dict(state), storage_writer=writer)


def save_work(rank: Rank, model: Model, state: dict[str, Any], who: str, path: Path) -> Callable[[], None]:
    """One save by ``who``: ``ours`` or ``torch``, both also ``-best``, ``ours-64k``, or one of ``PLAIN_SAVES``."""
    if who in plain.PLAIN_SAVES:
        layout = model.plain_layout(state)
        return lambda: plain.PLAIN_SAVES[who](layout, path)
    threads = thread_count_of(who)
    if who.startswith("torch"):
        return lambda: peer.save_state(state, path, model.mapping, thread_count=threads)
    checkpoint = rank.component("checkpoint")
    # The control of the gate on write calls: the same program with blocks too small for any disk.
    options = {"block_bytes": 65536} if who == "ours-64k" else {}
    return lambda: save_ours(checkpoint, state, path, model.mapping, threads, **options)


def measure_saves(rank: Rank, workload: Workload, folder: str, round_count: int, seed: int) -> list[Round]:
    """Save the same state with every contender, each to a folder of its own."""
    model = Model(workload)
    state: dict[str, Any] = dict(model.state())
    runs = {}
    for who in workload.contenders:
        path = Path(folder) / who
        runs[who] = run_in(
            path,
            rank.rank,
            work=save_work(rank, model, state, who, path),
            check=partial(model.check_folder, path, who),
            last=round_count,
        )
    return measure(runs, round_count, seed)


def measure_loads(rank: Rank, workload: Workload, folder: str, round_count: int, seed: int) -> list[Round]:
    """Load the same files into the same preallocated tensors with every contender.

    These are ``ours`` and ``torch``, both also ``-best``, ``plain``, which only reads the ranges, ``by-page`` and
    ``by-512``; ``plain-dcp`` does so where DCP has planned a load.
    """
    model = Model(workload)
    path = Path(folder) / "saved"
    # The peer's files: a reader that only understood its own writer would otherwise pass.
    peer.save_state(model.state(), path, model.mapping, thread_count=4)
    if rank.rank == 0:
        remove_folder(path / "sharded")
    targets = model.state(fill=False)
    metadata = peer.open_folder(path)

    def read_plainly(call_bytes: int) -> None:
        plain.load(model.plain_layout(targets, path), path, call_bytes=call_bytes)

    def work_of(who: str) -> Callable[[], None]:
        threads = thread_count_of(who)
        whole = partial(read_plainly, workload.tensor_bytes)
        plainly = {
            "plain": whole,
            "by-page": partial(read_plainly, mmap.PAGESIZE),
            "by-512": partial(read_plainly, 512),
        }
        if who in plainly:
            return plainly[who]
        if who == "plain-dcp":
            return lambda: load(dict(targets), storage_reader=plain.PlainReader(metadata, whole))
        if who.startswith("torch"):
            return lambda: peer.load_state(targets, path, thread_count=threads)
        reader = rank.component("checkpoint").HuggingFaceStorageReader
        return lambda: load(dict(targets), storage_reader=reader(path, thread_count=threads))

    def blank() -> None:
        for target in targets.values():
            target.to_local().zero_()

    runs = {
        who: Run(
            work=work_of(who),
            check=lambda who=who: model.check_state(targets, who),  # type: ignore[misc]
            prepare=blank,
            finish=lambda: None,
            last=round_count,
        )
        for who in workload.contenders
    }
    rounds = measure(runs, round_count, seed)
    if rank.rank == 0:
        remove_folder(path)
    return rounds
