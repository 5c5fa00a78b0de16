"""The process groups that saves make for themselves: as many as are in use at once, and not one for each save.

A group of gloo is a connection to every rank, and two keys of each rank in the job's store, which are never taken back.
So a group that is given back is kept for the next save, once all ranks have given it back and no message is on its way.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from twinproof.checkpoint.publish import on_any_rank, several_ranks
from twinproof.errors import ConfigError, DistributedError

__all__ = [
    "begin_exchange",
    "end_exchange",
    "end_group",
    "exchanging",
    "group_to_save_in",
    "idle_count",
    "is_gone",
    "own_group",
]


class _Made:
    """A group that was made here, and who has it on this rank."""

    def __init__(self, group: dist.ProcessGroup, patience: timedelta) -> None:
        self.group, self.patience = group, patience
        # Who took it, by an object that nobody else has; None where it waits for the next.
        self.taken: object | None = None
        self.is_broken = False
        self._exchange_count, self._lock = 0, threading.Lock()

    def is_idle(self, patience: timedelta) -> bool:
        return self.taken is None and not self.is_broken and self.patience == patience

    def begin(self) -> None:
        with self._lock:
            self._exchange_count += 1

    def end(self, is_broken: bool) -> None:
        with self._lock:
            self._exchange_count -= 1
            self.is_broken |= is_broken

    def give_back(self) -> None:
        """Of an exchange that ended early messages may be on their way: such a group is ended, on this rank."""
        self.taken = None
        if self._exchange_count or self.is_broken:
            self.is_broken = True
            self.destroy()

    def let_go(self, taken: object) -> None:
        """What an object that is gone had taken waits for the next, but for a save that is still on its way.

        The collector may call this anywhere: nothing is ended here.
        """
        if self.taken is taken and not self._exchange_count:
            self.taken = None

    def destroy(self) -> None:
        if not is_gone(self.group):
            dist.destroy_process_group(self.group)


class _Pool:
    """The groups that were made beside one default group. Every rank has the same, in the order of their making."""

    def __init__(self) -> None:
        self.made: list[_Made] = []
        self._agreement: dist.ProcessGroup | None = None
        self._asked_count = 0

    def take(self) -> _Made:
        """One that is idle on all ranks, or a new one. All ranks call it, in the same order as ``dist.new_group``."""
        patience = _patience()
        self._asked_count += 1
        # Who saves over one group for ever needs no other.
        if self._agreement is None and self._asked_count >= 2:
            self._agreement = _connected(patience)
        for made in tuple(self.made):
            if not on_any_rank(not made.is_idle(patience), self._agreement):
                return made
            if not on_any_rank(made.taken is not None, self._agreement):
                # Some rank cannot use it again, and no rank does now.
                self.made.remove(made)
                made.destroy()
        self.made.append(_Made(_connected(patience), patience))
        return self.made[-1]


# By default group: all of it goes with that.
_pools: weakref.WeakKeyDictionary[Any, _Pool] = weakref.WeakKeyDictionary()


def _connected(patience: timedelta) -> dist.ProcessGroup:
    _meet(_limit())
    # ``dist.new_group`` returns on a rank while others still connect: they would fail if it ended the group first.
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=patience)
    dist.barrier(group)
    return group


def own_group(holder: object | None = None) -> dist.ProcessGroup:
    """A group of all ranks for messages of the CPU, connected on every rank when it is returned on any.

    It waits as long as the default group, and at least as long as any group of torch's: ranks may write for hours.
    A rank that has no connection yet is waited for as long as the default group does: nobody hears of its death.
    One that was given back on all ranks is used again, so that a job has as many as are taken at once, and one more
    by which ranks agree. All ranks call this, in the same order as each other's calls and those of ``dist.new_group``.

    Args:
        holder: the group is given back when this object is gone, if it was not before, and no save uses it.

    Raises:
        DistributedError: ranks did not come in the time that the default group gives them, or one is gone.
    """
    try:
        made = _pools.setdefault(dist.group.WORLD, _Pool()).take()
    except DistributedError:
        raise
    except RuntimeError as error:
        raise DistributedError(
            "a rank is gone", got=str(error), expected="every rank", where="the process group of a save"
        ) from error
    made.taken = object()
    if holder is not None:
        weakref.finalize(holder, made.let_go, made.taken).atexit = False
    return made.group


def _meet(limit: timedelta) -> None:
    """Wait until every rank is about to connect: gloo waits for one with the group's own limit, and names none."""
    store, own, count = dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    # A number that all ranks have: they make their groups in the same order.
    meeting = f"twinproof/{store.add(f'twinproof/meetings/{own}', 1)}"
    names = [f"{meeting}/{rank}" for rank in range(count)]
    store.set(names[own], "")
    try:
        store.wait(names, limit)
    except RuntimeError as error:
        # The store itself may be gone, with its rank.
        missing: object = "no answer from the job's store"
        with suppress(RuntimeError):
            missing = f"no ranks {[rank for rank, name in enumerate(names) if not store.check([name])]}"
            # Who comes later is not to take this rank for one that connects.
            store.delete_key(names[own])
        raise DistributedError(
            "ranks did not come to make the process group of a save",
            got=missing,
            expected=f"{count} ranks within {limit}, the default group's timeout",
            where=f"rank {own}",
        ) from error


def _limit() -> timedelta:
    """The limit of the default group, which torch tells of its backends alone; torch's own where none tells."""
    world: Any = dist.group.WORLD
    found = []
    for device in world._device_types:
        # Not every backend has options.
        with suppress(AttributeError, RuntimeError):
            found.append(world._get_backend(device).options._timeout)
    return max(found, default=default_pg_timeout)


def _patience() -> timedelta:
    return max(_limit(), default_pg_timeout)


def is_gone(group: dist.ProcessGroup | None) -> bool:
    """Whether a group went with the default group, which was destroyed since, whether or not it was made anew."""
    try:
        if group is not None:
            dist.get_rank(group)
    except ValueError:
        return True
    return False


def end_group(group: dist.ProcessGroup | None) -> None:
    """Give a group of ``own_group`` back that is not gone yet. After an exchange that ended early it is destroyed."""
    made = _made(group)
    if made is not None:
        made.give_back()


def _made(group: dist.ProcessGroup | None) -> _Made | None:
    # A group of the caller's, or of no ranks, was not made here.
    pool = _pools.get(dist.group.WORLD) if group is not None and dist.is_initialized() else None
    return next((made for made in pool.made if made.group is group), None) if pool is not None else None


def idle_count() -> int:
    """How many groups of this process wait for the next save."""
    pool = _pools.get(dist.group.WORLD) if dist.is_initialized() else None
    return 0 if pool is None else sum(made.taken is None and not made.is_broken for made in pool.made)


def begin_exchange(group: dist.ProcessGroup | None) -> None:
    """From here on ranks send each other messages over the group. Nothing is noted of a group of the caller's."""
    made = _made(group)
    if made is not None:
        made.begin()


def end_exchange(group: dist.ProcessGroup | None, *, is_broken: bool) -> None:
    """All messages have arrived, or some may not have: ``is_broken``. Then the group is not used for another save."""
    made = _made(group)
    if made is not None:
        made.end(is_broken)


@contextmanager
def exchanging(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Around what sends messages over a group. One that ends by an error may have left some on their way."""
    begin_exchange(group)
    is_broken = True
    try:
        yield
        is_broken = False
    finally:
        end_exchange(group, is_broken=is_broken)


@contextmanager
def group_to_save_in(group: dist.ProcessGroup | None) -> Iterator[dist.ProcessGroup | None]:
    """The group for a save by the ranks of a group: for all ranks one of their own, for some of them theirs.

    None is the default group. A process alone has none. Only all ranks together can make a group that they may end.

    Raises:
        ConfigError: a group of some ranks that has no backend for the CPU.
    """
    everyone = several_ranks(None)
    if everyone is None:
        yield None
    elif group is None or dist.get_world_size(group) == dist.get_world_size(everyone):
        made = own_group()
        try:
            with exchanging(made):
                yield made
        finally:
            end_group(made)
    else:
        backends = dist.get_backend_config(group)
        if "cpu:" not in backends:
            raise ConfigError(
                "a group that cannot carry what the CPU has", got=backends, expected="gloo", where="process_group"
            )
        yield group
