"""Asynchronous saves, caching planners, and runs of the wrong shape."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.tensor import Shard

from conformance.checkpoint.cases import (
    FILE,
    INDEX,
    assert_folder,
    assert_loads,
    mesh_of,
    random_bits,
    save,
    save_ranks,
    sharded,
)
from conformance.checkpoint.trainer import Trainer
from conformance.harness import (
    Rank,
    assert_equal,
    raises,
    requirement,
    succeeds,
)
from twinproof.errors import ConfigError, DistributedError, TwinproofError


def _result(response: Any) -> None:
    """Wait for the upload; the response differs by stager."""
    getattr(response, "upload_completion", response).result()


def _async_save(rank: Rank, path: str, kind: str) -> None:
    checkpoint = rank.component("checkpoint")
    # DCP's own collectives need a group of theirs as well, or they would meet the training loop's.
    group = dist.new_group(backend="gloo")
    # Workers of the pool are daemons, which may not have the child that an async save in a process needs.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    state: dict[str, Any] = {
        "w": sharded(random_bits(torch.float32, [9, 40], 1), mesh_of(rank), [Shard(1)]),
        "n": torch.ones(3),
    }
    with checkpoint.HuggingFaceStorageWriter(path, block_bytes=64, fqn_to_index_mapping={"w": 1, "n": 2}) as writer:
        future = dcp.async_save(
            state, storage_writer=writer, async_checkpointer_type=AsyncCheckpointerType[kind], process_group=group
        )
        # What the training loop does meanwhile: it changes the state and runs collectives of its own.
        state["w"].to_local().fill_(-1.0)
        state["n"].fill_(-1.0)
        total = torch.ones(1)
        dist.all_reduce(total)
        assert_equal(float(total), float(rank.world_size), where="the caller's own collective")
        _result(future)
        if rank.rank == 0:
            assert_equal((Path(path) / INDEX).exists(), True, where="files at the future's end")


def _expected() -> dict[str, torch.Tensor]:
    return {"w": random_bits(torch.float32, [9, 40], 1), "n": torch.ones(3)}


@pytest.mark.night
@requirement(
    "CKPT-083", "What changes after async_save returned MUST never be visible in the files, with a thread or a process."
)
def test_snapshot_isolation(checkpoint: Any, rank_pool: Any, tmp_path: Path) -> None:
    for kind in ("THREAD", "PROCESS"):
        rank_pool.run(_async_save, 2, str(tmp_path / kind), kind, timeout_s=110)
        assert_loads(checkpoint, tmp_path / kind, _expected())


def _back_to_back(rank: Rank, path: str) -> None:
    checkpoint = rank.component("checkpoint")
    writer = checkpoint.HuggingFaceStorageWriter(path, block_bytes=64)
    for step in range(3):
        state = {"w": sharded(torch.full((6, 8), float(step)), mesh_of(rank), [Shard(0)])}
        _result(dcp.async_save(state, storage_writer=writer))
    blocked = checkpoint.HuggingFaceStorageWriter(f"{path}/{FILE}/below-a-file")
    future = dcp.async_save({"w": torch.ones(2)}, storage_writer=blocked)
    with raises((TwinproofError, OSError), where="a failed async save"):
        _result(future)
    writer.close()
    blocked.close()


@requirement(
    "CKPT-084",
    "Async saves one after the other MUST be ordered, the last one winning; a failure MUST surface at result().",
)
def test_back_to_back(checkpoint: Any, rank_pool: Any, tmp_path: Path) -> None:
    rank_pool.run(_back_to_back, 2, str(tmp_path / "ck"))
    assert_loads(checkpoint, tmp_path / "ck", {"w": torch.full((6, 8), 2.0)})


@requirement("CKPT-086", "All files, of all ranks, MUST be complete when the upload future resolves.")
def test_complete_at_result(checkpoint: Any, rank_pool: Any, tmp_path: Path) -> None:
    rank_pool.run(_async_save, 3, str(tmp_path / "ck"), "THREAD")
    files = {"model-00001-of-00002.safetensors": ["w"], "model-00002-of-00002.safetensors": ["n"]}
    assert_folder(tmp_path / "ck", files, _expected())


@contextmanager
def _caching() -> Iterator[type[DefaultSavePlanner]]:
    """A planner that caches plans, of a class of its own, so that nothing is shared with other tests."""

    class CachingPlanner(DefaultSavePlanner):
        pass

    try:
        yield CachingPlanner
    finally:
        for table in (
            SavePlanner._cached_save_plan,
            SavePlanner._cached_all_plans,
            SavePlanner._cached_global_plan,
            SavePlanner._cached_metadata,
            SavePlanner._cached_final_save_plan,
        ):
            table.pop("CachingPlanner", None)


def _save_cached(rank: Rank, path: str) -> None:
    with _caching() as planner_class:
        for step, mapping in enumerate(({"w": 1, "n": 1}, {"w": 2, "n": 1}, {"w": 1, "n": 2})):
            value = random_bits(torch.float32, [9, 8], step)
            state: dict[str, Any] = {"w": sharded(value, mesh_of(rank), [Shard(1)]), "n": torch.full((3,), float(step))}
            planner = planner_class(enable_plan_caching=True)
            save_ranks(
                rank, state, Path(f"{path}-{step}"), planner=planner, fqn_to_index_mapping=mapping, block_bytes=64
            )


@requirement(
    "CKPT-094",
    "With a planner that caches plans, every save MUST follow its own path and mapping, never a cached layout.",
)
def test_plan_caching(checkpoint: Any, rank_pool: Any, tmp_path: Path) -> None:
    rank_pool.run(_save_cached, 2, str(tmp_path / "ck"))
    two = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for step, files in enumerate(({FILE: ["w", "n"]}, {two[0]: ["n"], two[1]: ["w"]}, {two[0]: ["w"], two[1]: ["n"]})):
        state = {"w": random_bits(torch.float32, [9, 8], step), "n": torch.full((3,), float(step))}
        assert_folder(tmp_path / f"ck-{step}", files, state)


def _replicas(step: int) -> dict[str, torch.Tensor]:
    """Tensors that all ranks hold: of some blocks, of less than one, and of none."""
    sizes = {"r0": [40, 8], "r1": [64, 8], "r2": [40, 8], "small": [3], "scalar": []}
    return {name: random_bits(torch.float32, size, 10 * step + i) for i, (name, size) in enumerate(sizes.items())}


def _save_replicas(rank: Rank, path: str, block_bytes: int, keep_lowest: bool) -> None:
    checkpoint = rank.component("checkpoint")
    with _caching() as planner_class, checkpoint.HuggingFaceStorageWriter(path, block_bytes=block_bytes) as writer:
        for step in range(4):
            w = random_bits(torch.float32, [9, 8], step)
            state: dict[str, Any] = {"w": sharded(w, mesh_of(rank), [Shard(0)]), **_replicas(step)}
            # The third save asks a planner that caches nothing, the one behind it the cache of the first.
            planner = planner_class(dedup_save_to_lowest_rank=keep_lowest, enable_plan_caching=step != 2)
            with succeeds("a save", where=f"save {step} of one writer, blocks of {block_bytes} bytes"):
                dcp.save(state, checkpoint_id=f"{path}-{step}", storage_writer=writer, planner=planner)


@requirement(
    "CKPT-646",
    "A writer that saves several times with plans from a cache MUST save each as it is, replicas that several ranks "
    "write among them.",
)
@pytest.mark.parametrize("keep_lowest", [False, True])
def test_replicas_with_plan_caching(checkpoint: Any, rank_pool: Any, tmp_path: Path, keep_lowest: bool) -> None:
    for block_bytes in (64, 4 << 20):
        path = tmp_path / f"{block_bytes}"
        rank_pool.run(_save_replicas, 2, str(path), block_bytes, keep_lowest)
        for step in range(4):
            state = {"w": random_bits(torch.float32, [9, 8], step), **_replicas(step)}
            assert_folder(Path(f"{path}-{step}"), {FILE: list(state)}, state)


def _save_differing(rank: Rank, path: str, keep_lowest: bool) -> None:
    with _caching() as planner_class:
        for step, differs in enumerate((False, False, True, False)):
            planner = planner_class(dedup_save_to_lowest_rank=keep_lowest, enable_plan_caching=True)
            state = {"a": torch.full((4,), float(rank.rank * differs)), "b": torch.full((9,), 2.0)}
            expected = (
                raises(BaseException, mentions=("replicas differ",))
                if differs
                else succeeds("a save", where=f"save {step}")
            )
            with expected:
                save_ranks(rank, state, Path(f"{path}-{step}"), planner=planner, check_replicas=True)


@requirement(
    "CKPT-708",
    "check_replicas MUST find a replica that differs in any save, those of them whose plan comes from a cache, on "
    "whatever rank the plan has it written.",
)
@pytest.mark.parametrize("keep_lowest", [False, True])
def test_differing_replicas_with_plan_caching(rank_pool: Any, tmp_path: Path, keep_lowest: bool) -> None:
    rank_pool.run(_save_differing, 2, str(tmp_path / "ck"), keep_lowest)
    for step in (0, 1, 3):
        state = {"a": torch.zeros(4), "b": torch.full((9,), 2.0)}
        assert_folder(tmp_path / f"ck-{step}", {FILE: ["a", "b"]}, state)


# The ranks of three that hold tensors, save by save; in the saves named below the replicas of one of them differ.
_HOLDERS = ((0, 1, 2), (0, 1, 2), (1, 2), (1, 2), (2,), (2,), (), (), (0, 2), (0, 2), (0, 1), (1,), (0, 1, 2))
_DIFFERING = (3, 8)


def _held_in(step: int, rank: int, has_own: bool) -> dict[str, torch.Tensor]:
    """What a rank holds in a save: replicas, one of them without values, and maybe a tensor that is its own."""
    if rank not in _HOLDERS[step]:
        return {}
    own = {f"own{rank}": random_bits(torch.float32, [3, 5], 10 * step + rank)} if has_own else {}
    return {"a": torch.full((40,), float(step)), "none": torch.empty(0, 2), **own}


def _save_where_some_hold(rank: Rank, path: str, caches: tuple[bool, ...], keep_lowest: bool, has_own: bool) -> None:
    checkpoint, options = (
        rank.component("checkpoint"),
        {"check_replicas": True, "checksums": has_own, "block_bytes": 64},
    )
    with _caching() as planner_class, checkpoint.HuggingFaceStorageWriter(path, **options) as writer:
        for step, holders in enumerate(_HOLDERS):
            state, where = _held_in(step, rank.rank, has_own), f"save {step}, by rank {rank.rank}, held by {holders}"
            if step in _DIFFERING and rank.rank == holders[-1]:
                state["a"][7] += 1
            cached = caches[step % len(caches)]
            planner = planner_class(dedup_save_to_lowest_rank=keep_lowest, enable_plan_caching=cached)
            differs = raises(BaseException, mentions=("replicas differ",), where=where)
            with differs if step in _DIFFERING else succeeds("a save", where=where):
                dcp.save(dict(state), checkpoint_id=f"{path}-{step}", storage_writer=writer, planner=planner)


@requirement(
    "CKPT-729",
    "With check_replicas a rank that holds nothing, the first one or all included, MUST save as the others do, and "
    "they be compared: whether its plan is new or from a cache, and whatever it held in its writer's saves before.",
)
@pytest.mark.parametrize(("keep_lowest", "has_own"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("caches", [(False,), (True,), (True, True, False)], ids=["new", "cached", "by turns"])
def test_replicas_of_some_ranks(
    rank_pool: Any, tmp_path: Path, caches: tuple[bool, ...], keep_lowest: bool, has_own: bool
) -> None:
    rank_pool.run(_save_where_some_hold, 3, str(tmp_path / "ck"), caches, keep_lowest, has_own)
    for step in range(len(_HOLDERS)):
        if step in _DIFFERING:
            assert_equal((tmp_path / f"ck-{step}").exists(), False, where=f"save {step}, which is refused")
            continue
        state = {name: value for rank in range(3) for name, value in _held_in(step, rank, has_own).items()}
        assert_folder(tmp_path / f"ck-{step}", {FILE: list(state)}, state, has_sums=has_own)


def _wrong_worlds(rank: Rank, path: str) -> None:
    checkpoint = rank.component("checkpoint")
    writer = checkpoint.HuggingFaceStorageWriter(path, save_distributed=False)
    with raises(ConfigError, mentions=("save_distributed",)):
        dcp.save({"a": torch.ones(2)}, storage_writer=writer)
    assert_equal(Path(path).exists(), False, where="folder")


@requirement("CKPT-095", "save_distributed=False with more than one rank MUST raise on every rank and write nothing.")
def test_not_distributed(checkpoint: Any, rank_pool: Any, tmp_path: Path) -> None:
    rank_pool.run(_wrong_worlds, 2, str(tmp_path / "ck"))
    save(checkpoint, {"a": torch.ones(2)}, tmp_path / "one", save_distributed=False, enable_consolidation=False)
    assert_folder(tmp_path / "one", {FILE: ["a"]}, {"a": torch.ones(2)})


class _NoMemory(BlockingAsyncStager):
    """A stager that finds no memory for its copies the first time, on one rank."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.fails = fails

    def stage(self, state_dict: Any) -> Any:
        """Copies, or MemoryError."""
        if self.fails:
            self.fails = False
            raise MemoryError("no memory for the copies")
        return super().stage(state_dict)


def _save_without_memory(rank: Rank, folder: str) -> None:
    trainer = Trainer(1, mesh_of(rank))
    options = {"async_mode": "async", "stager": _NoMemory(rank.rank == 1), "interval": 1}
    # Closed where all is well alone: a rank that is in a save by itself would wait in it.
    manager = trainer.manager(rank.component("checkpoint"), folder, **options)
    trainer.step()
    with raises(MemoryError if rank.rank == 1 else DistributedError, mentions=["no memory for the copies"]):
        manager.save(1)
    assert_equal(manager._pending, None, where="a save on its way")
    trainer.step()
    with succeeds("the next save", where=f"rank {rank.rank}"):
        manager.save(2)
        manager.close()


@requirement(
    "CKPT-700",
    "An asynchronous save of a manager whose copies fail on one rank MUST be raised on every rank at the call, before "
    "any rank writes and waits for it; the next save MUST succeed.",
)
def test_copies_fail_on_one_rank(rank_pool: Any, tmp_path: Path) -> None:
    rank_pool.run(_save_without_memory, 2, str(tmp_path), timeout_s=60)
    assert_equal(sorted(path.name for path in tmp_path.iterdir()), ["step-2"], where="the folder")
