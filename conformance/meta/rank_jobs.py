"""What the meta tests run on ranks; a worker imports this module by name."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception

from conformance.harness import Rank, assert_equal
from twinproof.errors import StorageError


class Stubborn(Exception):
    """Cannot be pickled."""

    def __init__(self) -> None:
        super().__init__("stubborn")
        self.lock = threading.Lock()


def places(*_: Rank) -> list[str | None]:
    """Files of packages as this process has imported them."""
    return [importlib.import_module(name).__file__ for name in ("conformance", "refimpl", "twinproof")]


def who(rank: Rank, text: str, *, twice: bool = False) -> tuple[int, int, int, str, int]:
    """Prints, and proves that the default group has exactly this world."""
    total = torch.tensor([rank.rank + 1])
    dist.all_reduce(total)
    sys.stdout.write(text + "\n")
    os.write(2, b"from below\n")
    threads = torch.get_num_threads()
    return rank.rank, dist.get_world_size(), int(total) * (2 if twice else 1), rank.implementation, threads


def give(rank: Rank, value: object) -> object:
    """Returns what it was given."""
    return value


def compare(rank: Rank) -> None:
    """Rank 1 finds a mismatch while the others wait for it in a collective."""
    if rank.rank == 1:
        assert_equal(rank.rank, 0, where="table")
    dist.barrier()


def fail(rank: Rank) -> None:
    """Rank 1 fails while the others wait for it in a collective."""
    if rank.rank == 1:
        raise StorageError("disk is full", got=28, expected="room", where="disk") from ValueError("cause")
    dist.barrier()


def fail_in_checkpoint(rank: Rank) -> None:
    """Every rank raises what torch gathers."""
    raise CheckpointException(
        "save", {0: _wrap_exception(StorageError("disk is full", got=28, expected="room", where="disk"))}
    )


def fail_stubbornly(rank: Rank) -> None:
    """Raises what does not pickle."""
    raise Stubborn


def die(rank: Rank, code: int) -> None:
    """Rank 1 ends, by exit or by signal, while the others wait for it."""
    if rank.rank == 1:
        if code < 0:
            os.kill(os.getpid(), -code)
        os._exit(code)
    dist.barrier()


def hang(rank: Rank) -> None:
    """Rank 0 never answers, and rank 1 waits for it; rank 2 is done."""
    if rank.rank == 0:
        threading.Event().wait()
    if rank.rank == 1:
        dist.recv(torch.zeros(1), src=0)


def stop(rank: Rank) -> None:
    """Cannot even end itself at its timeout."""
    os.kill(os.getpid(), signal.SIGSTOP)


def touch_absent(rank: Rank) -> None:
    """Skips by name."""
    rank.component("no_such_component")
