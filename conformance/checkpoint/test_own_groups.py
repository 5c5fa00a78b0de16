"""N. The process groups that saves make for themselves: as many as are in use at once, however many saves there are."""

from __future__ import annotations

import gc
import os
import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.constants import default_pg_timeout

import twinproof.checkpoint.groups as groups
from conformance.checkpoint.cases import FILE, PT, oracle
from conformance.checkpoint.trainer import Trainer
from conformance.harness import Rank, assert_equal, assert_le, assert_same_bytes, raises, requirement, succeeds
from conformance.provers.ranks import RankPool
from twinproof.checkpoint.native import NativeStorageWriter
from twinproof.errors import DistributedError, MissingCheckpointError

_STATE = {"w": torch.ones(2)}


def _held() -> dict[str, int]:
    """Groups of torch, keys of the job's store, and descriptors of this rank, when all ranks have come here."""
    gc.collect()
    # The retention of a manager that was dropped may still have its folder open.
    for thread in threading.enumerate():
        if thread.name == "twinproof-retention":
            thread.join(timeout=60)
    dist.barrier()
    store = dist.distributed_c10d._get_default_store()
    counts = {
        "groups": len(dist.distributed_c10d._world.pg_map),
        "keys": store.num_keys(),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }
    dist.barrier()
    return counts


def _saves(rank: Rank, path: str) -> dict[str, Callable[[int], None]]:
    checkpoint, kvstore, trainer = rank.component("checkpoint"), rank.component("kvstore"), Trainer(1)
    store = kvstore.KVStore({"t": kvstore.RowLayout(2)})

    def with_writers_of_their_own(nth: int) -> None:
        dcp.save(_STATE, storage_writer=checkpoint.HuggingFaceStorageWriter(f"{path}/writers/{nth}"))

    def with_writers_that_are_closed(nth: int) -> None:
        with checkpoint.HuggingFaceStorageWriter(f"{path}/closed/{nth}") as writer:
            dcp.save(_STATE, storage_writer=writer)

    def with_managers_that_are_dropped(nth: int) -> None:
        trainer.manager(checkpoint, f"{path}/managers/{nth}", interval=1).save(1)

    def of_rows(nth: int) -> None:
        kvstore.save(store, f"{path}/rows/{nth}", buckets=kvstore.Buckets(2))

    named = (with_writers_of_their_own, with_writers_that_are_closed, with_managers_that_are_dropped, of_rows)
    return {act.__name__.replace("_", " "): act for act in named}


def _save_again_and_again(rank: Rank, path: str) -> list[tuple[str, dict[str, int], dict[str, int]]]:
    counts = []
    for name, act in _saves(rank, path).items():
        for nth in range(2):
            act(nth)
        before = _held()
        for nth in range(2, 6):
            act(nth)
        counts.append((name, before, _held()))
    return counts


@requirement(
    "CKPT-866",
    "Saves one after another, of writers and managers that are closed or dropped, and of rows, MUST leave as many "
    "process groups, keys in the job's store and descriptors behind the sixth as behind the second.",
)
def test_saves_one_after_another(impl: ModuleType, tmp_path: Path) -> None:
    # Of its own: the store of these ranks has no keys of other tests.
    with RankPool(impl.__name__) as pool:
        for rank_number, counts in enumerate(pool.run(_save_again_and_again, 2, str(tmp_path))):
            for name, before, after in counts:
                where = f"saves {name}, rank {rank_number}"
                assert_equal(after["groups"], before["groups"], where=f"groups of {where}")
                assert_le(after["keys"], before["keys"], where=f"keys in the store of {where}")
                assert_le(after["descriptors"], before["descriptors"], where=f"descriptors of {where}")
    for kind in ("writers", "closed"):
        assert_same_bytes(tmp_path / kind / "5" / FILE, oracle(_STATE, PT), where=kind)


class _Holder:
    """Somebody who holds a group."""


def _sum_over(group: Any, rank: Rank) -> int:
    found = torch.tensor([rank.rank + 1])
    dist.all_reduce(found, group=group)
    return int(found)


def _same_on_all(group: Any) -> bool:
    names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names, group.group_name)
    return len(set(names)) == 1


def _take_in_any_order(rank: Rank) -> None:
    first, second, third = (groups.own_group() for _ in range(3))
    assert_equal(len({id(each) for each in (first, second, third)}), 3, where="groups that are taken at once")
    # Rank 0 has given back the first alone: rank 1 may be sending over it.
    for group in (first, second) if rank.rank == 0 else (second,):
        groups.end_group(group)
    found = groups.own_group()
    assert_equal(_same_on_all(found), True, where="ranks that gave back in part")
    assert_equal(found is second, True, where="the group that all ranks gave back")
    assert_equal(_sum_over(found, rank), 3, where="a sum over it")
    if rank.rank == 1:
        groups.end_group(first)
    for group in (third, found):
        groups.end_group(group)
    assert_equal(groups.own_group() is first, True, where="the first, which all ranks gave back now")
    groups.end_group(first)


def _break_on_one_rank(rank: Rank) -> None:
    group = groups.own_group()
    with suppress(KeyError), groups.exchanging(group):
        if rank.rank == 0:
            raise KeyError("an exchange that ends early here")
    with groups.exchanging(group):
        # One that succeeds afterwards does not take back what the other has left on its way.
        pass
    groups.end_group(group)
    assert_equal(groups.is_gone(group), rank.rank == 0, where="a group with messages on their way")
    found = groups.own_group()
    assert_equal(found is group, False, where="a group that is broken on one rank")
    assert_equal(groups.is_gone(group), True, where="what no rank uses again")
    assert_equal((_same_on_all(found), _sum_over(found, rank)), (True, 3), where="the group after it")
    groups.end_group(found)


def _drop_amid(rank: Rank) -> None:
    holder = _Holder()
    group = groups.own_group(holder)
    groups.begin_exchange(group)
    del holder
    gc.collect()
    other = groups.own_group()
    assert_equal(other is group, False, where="a group that a save uses whose manager is gone")
    groups.end_exchange(group, is_broken=False)
    groups.end_group(other)
    holder = _Holder()
    found = groups.own_group(holder)
    groups.end_group(found)
    again = groups.own_group()
    assert_equal(again is found, True, where="a group that was given back")
    del holder
    gc.collect()
    newest = groups.own_group()
    assert_equal(newest is again, False, where="a group that was given back before its first holder went")
    for each in (again, newest):
        groups.end_group(each)


def _wait_longer(rank: Rank) -> None:
    group, longer = groups.own_group(), timedelta(hours=7)
    groups.end_group(group)
    with mock.patch.object(groups, "default_pg_timeout", longer):
        found = groups.own_group()
        assert_equal(found is group, False, where="a group that waits less")
        waits = found._get_backend(torch.device("cpu")).options._timeout
        assert_equal(waits, longer, where="how long the next one waits")
        groups.end_group(found)


@requirement(
    "CKPT-867",
    "A group that a save made MUST be used again where all ranks have given it back, by all ranks the same, and never "
    "where one holds it still, ended an exchange over it early, or is to wait for longer.",
)
def test_groups_that_are_given_back(impl: ModuleType) -> None:
    with RankPool(impl.__name__) as pool:
        for work in (_take_in_any_order, _break_on_one_rank, _drop_amid, _wait_longer):
            pool.run(work, 2)


def _fails(*_: Any, **__: Any) -> Any:
    raise OSError(5, "an error of the disk")


def _groups() -> set[Any]:
    return set(dist.distributed_c10d._world.pg_map)


def _fail_in_saves(rank: Rank, path: str) -> None:
    checkpoint, trainer = rank.component("checkpoint"), Trainer(1)

    def save_in_hf() -> None:
        with checkpoint.HuggingFaceStorageWriter(f"{path}/hf") as writer:
            dcp.save(_STATE, storage_writer=writer)

    def save(mode: str) -> None:
        with trainer.manager(checkpoint, f"{path}/{mode}", interval=1, async_mode=mode) as manager:
            manager.save(1)
            manager.maybe_wait_for_saving()

    def load_nothing() -> None:
        with trainer.manager(checkpoint, f"{path}/disabled", interval=1) as manager:
            manager.load(99)

    saves: dict[str, Callable[[], None]] = {
        "a writer": save_in_hf,
        "a manager": partial(save, "disabled"),
        "a manager beside": partial(save, "async"),
    }
    groups.end_group(groups.own_group())
    groups.end_group(groups.own_group())
    before = _groups()
    for name, act in saves.items():
        act()
        assert_equal(_groups(), before, where=f"groups behind a save of {name}")
    with raises(MissingCheckpointError, where="no such step"):
        load_nothing()
    assert_equal(len(before - _groups()), 1, where="groups that are ended behind a load that fails")
    for name, act in saves.items():
        groups.end_group(groups.own_group())
        before = _groups()
        shutil.rmtree(path, ignore_errors=True)
        dist.barrier()
        with (
            mock.patch.object(dcp.FileSystemWriter, "write_data", _fails),
            mock.patch.object(os, "pwritev", _fails),
            mock.patch.object(os, "pwrite", _fails),
            mock.patch.object(os, "write", _fails),
            raises(Exception, where=f"a save of {name} that fails"),
        ):
            act()
        assert_equal(len(before - _groups()), 1, where=f"groups that are ended behind {name} that fails")


def _drop_beside_a_save(rank: Rank, path: str) -> None:
    trainer, goes_on = Trainer(1), threading.Event()
    write_data = NativeStorageWriter.write_data

    def waits(*arguments: Any) -> Any:
        goes_on.wait()
        return write_data(*arguments)

    groups.end_group(groups.own_group())
    with mock.patch.object(NativeStorageWriter, "write_data", waits):
        manager = trainer.manager(rank.component("checkpoint"), f"{path}/run", interval=1, async_mode="async")
        manager.save(1)
        pending, before = manager._pending.upload, _groups()
        del manager
        gc.collect()
        found = groups.own_group()
        assert_equal(found in before, False, where="a group that the save of a dropped manager uses")
        groups.end_group(found)
        goes_on.set()
        pending.result()


@requirement(
    "CKPT-868",
    "The group of a save or load that fails MUST be ended with its writer or manager, and the group of a manager that "
    "is dropped beside its asynchronous save be used by no other save.",
)
def test_groups_behind_failures(impl: ModuleType, tmp_path: Path) -> None:
    with RankPool(impl.__name__) as pool:
        pool.run(_fail_in_saves, 2, str(tmp_path))
        pool.run(_drop_beside_a_save, 2, str(tmp_path))


def _ended_with_all(rank: Rank) -> None:
    """A group that is given back when the default group is gone."""
    found = groups.own_group()
    assert_equal(groups.idle_count(), 0, where=f"rank {rank.rank}: groups that wait, while one is taken")
    dist.destroy_process_group()
    with succeeds("end_group", where="behind the default group"):
        groups.end_group(found)
        groups.begin_exchange(found)
        groups.end_exchange(found, is_broken=True)
    assert_equal(groups.idle_count(), 0, where=f"rank {rank.rank}: groups that wait")


@requirement(
    "CKPT-898",
    "A save's own group that is given back, or told of its messages, behind the end of the default group MUST be let "
    "go without an error.",
)
def test_groups_behind_the_default_group(impl: ModuleType) -> None:
    with RankPool(impl.__name__) as pool:
        pool.run(_ended_with_all, 2)


def _meet_late(rank: Rank, path: str) -> None:
    """Rank 1 does not come until rank 0 has given up; then both do. The store's own limit is not the group's."""
    dist.destroy_process_group()
    limit, patient = timedelta(seconds=1), timedelta(seconds=50)
    dist.init_process_group("gloo", f"file://{path}/store", limit, rank.world_size, rank.rank)
    store = dist.distributed_c10d._get_default_store()
    if rank.rank == 1:
        store.wait(["given up"], patient)
    missing = (f"no ranks [{1 - rank.rank}]", f"{limit}", "default group")
    with (
        mock.patch.object(groups, "default_pg_timeout", timedelta(seconds=2)),
        raises(DistributedError, mentions=missing, where=f"rank {rank.rank}"),
    ):
        groups.own_group()
    store.set("given up" if rank.rank == 0 else "told", "")
    store.wait(["told"], patient)
    with (
        mock.patch.object(groups, "_limit", return_value=patient),
        succeeds("a group behind it", where=f"rank {rank.rank}"),
    ):
        group = groups.own_group()
    waits = group._get_backend(torch.device("cpu")).options._timeout
    assert_equal(waits, default_pg_timeout, where="how long a rank that writes is waited for")
    assert_equal(_sum_over(group, rank), 3, where="a sum over it")


@requirement(
    "CKPT-961",
    "Where a rank does not come to make the process group of a save, the others MUST be told by a DistributedError of "
    "its number, as soon as the default group's own timeout is over, and one that comes later too; the next group MUST "
    "be made as ever.",
)
def test_ranks_that_do_not_come(impl: ModuleType, tmp_path: Path) -> None:
    with RankPool(impl.__name__) as pool:
        pool.run(_meet_late, 2, str(tmp_path))


def _killed(rank: Rank) -> None:
    for _ in range(2):
        groups.end_group(groups.own_group())
    dist.barrier()
    made = dist.distributed_c10d._world.pg_map
    with (
        mock.patch.object(groups, "on_any_rank", side_effect=RuntimeError("Connection closed by peer")),
        raises(DistributedError, mentions=("rank is gone", "closed by peer"), where="a group that ranks agree on"),
    ):
        groups.own_group()
    assert_equal(len(made), 3, where="groups behind it")


@requirement(
    "CKPT-962",
    "Where a connection of the groups that saves share breaks while ranks agree on the next, own_group MUST raise "
    "DistributedError, with what the connection said.",
)
def test_connections_that_break(impl: ModuleType) -> None:
    with RankPool(impl.__name__) as pool:
        pool.run(_killed, 2)
