"""C, continued. Shard files, stale files, replicas."""

from __future__ import annotations

import json
import unittest.mock
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Replicate, Shard

from conformance.checkpoint.cases import (
    FILE,
    INDEX,
    assert_loads,
    mesh_of,
    own_count,
    random_bits,
    save,
    save_ranks,
    sharded,
)
from conformance.checkpoint.hostile import pack
from conformance.harness import (
    Rank,
    assert_equal,
    assert_le,
    raises,
    requirement,
    succeeds,
)
from twinproof.checkpoint import plan
from twinproof.checkpoint.catalog import Catalog
from twinproof.errors import CorruptionError, DistributedError, TwinproofError


def _save_shards(rank: Rank, path: str) -> None:
    mesh = mesh_of(rank)
    state = {"w": sharded(random_bits(torch.float32, [7, 4], 3), mesh, [Shard(0)]), "n": torch.tensor(5)}
    save_ranks(rank, state, Path(path), enable_consolidation=False)


@requirement(
    "CKPT-031", "Shard files MUST say the global shape, so that a missing last shard is an error and no shorter tensor."
)
def test_global_shape(checkpoint: Any, rank_pool: Any, tmp_path: Path) -> None:
    rank_pool.run(_save_shards, 3, str(tmp_path / "ck"))
    names = sorted(path.name for path in (tmp_path / "ck").iterdir())
    assert_equal(names, [f"shard-{r:05d}-model-00001-of-00001.safetensors" for r in (1, 2, 3)], where="files")
    assert_loads(checkpoint, tmp_path / "ck", {"w": random_bits(torch.float32, [7, 4], 3), "n": torch.tensor(5)})
    (tmp_path / "ck" / names[-1]).unlink()
    with raises(CorruptionError, mentions=("w", "gap")):
        checkpoint.HuggingFaceStorageReader(tmp_path / "ck").read_metadata()


def _shard_file(path: Path, name: str, dtype: str, shape: list[int], offsets: list[int], data: bytes) -> None:
    info = json.dumps({name: {"saved_offsets": offsets}})
    header = json.dumps(
        {
            "__metadata__": {"DCP_SHARDING_INFO": info},
            name: {"dtype": dtype, "shape": shape, "data_offsets": [0, len(data)]},
        }
    )
    path.write_bytes(pack(header, data))


def _torch_shards(folder: Path, rows: list[tuple[int, int]], dtypes: list[str]) -> None:
    folder.mkdir()
    for i, ((first, count), dtype) in enumerate(zip(rows, dtypes, strict=True)):
        _shard_file(
            folder / f"shard-{i + 1:05d}-model-00001-of-00001.safetensors",
            "w",
            dtype,
            [count, 2],
            [first, 0],
            bytes(8 * count),
        )


@requirement(
    "CKPT-032",
    "A middle shard file that is missing MUST be an error that names the tensor, at load and at consolidation.",
)
def test_missing_shard(checkpoint: Any, tmp_path: Path) -> None:
    _torch_shards(tmp_path / "in", [(0, 2), (4, 2)], ["F32", "F32"])
    with raises(CorruptionError, mentions=("'w'", "gap")):
        checkpoint.HuggingFaceStorageReader(tmp_path / "in").read_metadata()
    with raises(CorruptionError, mentions=("'w'", "gap")):
        checkpoint.consolidate_safetensors_files(tmp_path / "in", tmp_path / "out")
    assert_equal((tmp_path / "out").exists(), False, where="output")


@requirement("CKPT-033", "Shards that disagree about dtype or rank MUST be an error, never reinterpreted bytes.")
def test_disagreeing_shards(checkpoint: Any, tmp_path: Path) -> None:
    _torch_shards(tmp_path / "in", [(0, 2), (2, 2)], ["F32", "I32"])
    with raises(CorruptionError, mentions=("'w'", "I32")):
        checkpoint.HuggingFaceStorageReader(tmp_path / "in").read_metadata()
    with raises(CorruptionError, mentions=("'w'", "I32")):
        checkpoint.consolidate_safetensors_files(tmp_path / "in", tmp_path / "out")


@requirement(
    "CKPT-034", "Files of an earlier save, with other ranks or another mapping, MUST never affect what is loaded."
)
def test_stale_files(checkpoint: Any, rank_pool: Any, tmp_path: Path) -> None:
    old = {f"w{i}": random_bits(torch.float32, [4], i) for i in range(3)}
    save(checkpoint, old, tmp_path / "ck", fqn_to_index_mapping={"w0": 1, "w1": 2, "w2": 3})
    new = {"w1": random_bits(torch.float32, [4], 50), "x": torch.ones(2)}
    save(checkpoint, new, tmp_path / "ck")
    assert_equal(sorted(p.name for p in (tmp_path / "ck").iterdir()), [FILE, INDEX], where="folder")
    assert_loads(checkpoint, tmp_path / "ck", new)


def _count_writes(rank: Rank, path: str, replicated_rows: int, tensor_count: int) -> tuple[int, int]:
    mesh = mesh_of(rank)
    state = {
        **{
            f"emb{i}": sharded(random_bits(torch.float32, [replicated_rows, 64], i), mesh, [Replicate()])
            for i in range(tensor_count)
        },
        **{f"norm{i}": random_bits(torch.float32, [8], i) for i in range(40)},
    }
    checkpoint = rank.component("checkpoint")
    before = own_count("io", "wchar")
    with checkpoint.HuggingFaceStorageWriter(Path(path), block_bytes=4096) as writer:
        dcp.save(state, storage_writer=writer)
    dist.barrier()
    stats = getattr(writer, "stats", None)
    return own_count("io", "wchar") - before, stats.written_bytes if stats is not None else 0


@requirement(
    "CKPT-035",
    "Replicated tensors MUST be written once, and a large one by all its holders: max/mean of bytes per rank <= 1.2.",
    needs=("balanced_writes",),
)
@pytest.mark.parametrize(
    ("rows", "tensor_count"), [(4096, 1), (32, 40)], ids=["one large tensor", "tensors of two blocks"]
)
def test_replicas_are_shared_out(checkpoint: Any, rank_pool: Any, tmp_path: Path, rows: int, tensor_count: int) -> None:
    results = rank_pool.run(_count_writes, 4, str(tmp_path / "ck"), rows, tensor_count)
    written = [stats for _, stats in results]
    size = (tmp_path / "ck" / FILE).stat().st_size
    assert_equal(sum(written), size, where="bytes written by all ranks")
    assert_le(max(written) / (sum(written) / len(written)), 1.2, where=f"bytes by rank {written}")


def _save_divergent(rank: Rank, path: str, check: bool, other: int) -> None:
    state = {"same": torch.ones(4), "drift": torch.full((4,), float(rank.rank == other))}
    save_ranks(rank, state, Path(path), check_replicas=check)


@requirement(
    "CKPT-036",
    "With check_replicas, a replica that differs, whichever rank's it is, MUST raise on every rank by name, before "
    "anything is visible.",
)
def test_divergent_replicas(checkpoint: Any, rank_pool: Any, tmp_path: Path) -> None:
    for other, said in ((0, "rank 1"), (1, "rank 1"), (2, "rank 2")):
        with raises(DistributedError, mentions=("drift", said), where=f"rank {other} differs"):
            rank_pool.run(_save_divergent, 3, str(tmp_path / "ck"), True, other)
        assert_equal(list(tmp_path.iterdir()), [], where=f"rank {other} differs: folder after the refused save")


def _failures_of_divergent(rank: Rank, path: str, is_short_of_memory: bool) -> list[tuple[str, str]]:
    compare = _without_memory if is_short_of_memory else plan.compare_checksums
    with unittest.mock.patch.object(plan, "compare_checksums", compare):
        try:
            _save_divergent(rank, path, True, 1)
        except dcp.api.CheckpointException as error:
            return [(type(each).__name__, str(each)) for _, (each, _) in sorted(error.failures.items())]
    return []


def _without_memory(everyone: Any) -> None:
    raise MemoryError("no memory to compare")


@requirement(
    "CKPT-848",
    "Replicas that differ MUST be told of on every rank in the words of the comparison, which is no failure of a rank; "
    "a failure of the rank that compares MUST be its own error there, and another rank's failure on the others.",
)
def test_words_of_a_comparison(checkpoint: Any, rank_pool: Any, tmp_path: Path) -> None:
    for said in rank_pool.run(_failures_of_divergent, 3, str(tmp_path / "ck"), False):
        assert_equal([text.split(";")[0] for _, text in said], ["replicas differ"] * 3, where="replicas that differ")
    for said in rank_pool.run(_failures_of_divergent, 3, str(tmp_path / "ck"), True):
        names = [name for name, _ in said]
        assert_equal(names, ["MemoryError", "DistributedError", "DistributedError"], where="a failing comparison")
    assert_equal(list(tmp_path.iterdir()), [], where="folder after the refused saves")


def _save_divergent_shards(rank: Rank, path: str) -> None:
    """The two halves of a tensor, each on two ranks; of the second half the two differ."""
    mesh = mesh_of(rank, (2, 2))
    value = torch.zeros(4, 2)
    value[2:] = float(rank.rank == 3)
    save_ranks(rank, {"drift": sharded(value, mesh, [Replicate(), Shard(0)])}, Path(path), check_replicas=True)


@requirement(
    "CKPT-682",
    "With check_replicas, replicas of a shard that rank 0 does not hold MUST be compared too, as those of ranks that "
    "shard in groups and replicate between them.",
)
def test_divergent_shards(checkpoint: Any, rank_pool: Any, tmp_path: Path) -> None:
    with raises(DistributedError, mentions=("drift", "rank 3", "rank 1"), where="halves on ranks 1 and 3 differ"):
        rank_pool.run(_save_divergent_shards, 4, str(tmp_path / "ck"))
    assert_equal(list(tmp_path.iterdir()), [], where="folder after the refused save")


def _save_like_names(rank: Rank, path: str) -> None:
    state = {"w": sharded(torch.arange(20.0), mesh_of(rank), [Shard(0)]), "w1": torch.ones(10)}
    with succeeds("a save", where="names that go on as another's place does"):
        save_ranks(rank, state, Path(path))


@requirement(
    "CKPT-709",
    "A tensor whose name goes on as the place of another's shard does, as w1 beside w at row 10, MUST NOT be taken for "
    "a replica of it.",
)
def test_names_like_places(checkpoint: Any, rank_pool: Any, tmp_path: Path) -> None:
    rank_pool.run(_save_like_names, 2, str(tmp_path / "ck"))
    assert_loads(checkpoint, tmp_path / "ck", {"w": torch.arange(20.0), "w1": torch.ones(10)})


def _merge_where_one_fails(rank: Rank, source: str, target: str, failing: int) -> str:
    checkpoint = rank.component("checkpoint")
    right = Catalog.check_unchanged

    def check(catalog: Catalog, *files: Any) -> None:
        if rank.rank == failing:
            raise CorruptionError("made to fail", got=None, expected="no failure", where=f"rank {failing}")
        right(catalog, *files)

    with unittest.mock.patch.object(Catalog, "check_unchanged", check):
        try:
            checkpoint.consolidate_safetensors_files_on_every_rank(source, target, {"w": 1, "n": 1}, 1)
        except TwinproofError as error:
            return f"{type(error).__name__}: {error}"
    return "no error"


@requirement(
    "CKPT-514",
    "Where one rank finds its shards replaced while all ranks merge them, every rank MUST raise, the others with its "
    "number, and nothing MUST become visible.",
)
def test_failure_of_one_rank(checkpoint: Any, rank_pool: Any, tmp_path: Path) -> None:
    rank_pool.run(_save_shards, 2, str(tmp_path / "shards"))
    for failing in (0, 1):
        target = tmp_path / f"merged-{failing}"
        target.mkdir()
        found = rank_pool.run(_merge_where_one_fails, 2, str(tmp_path / "shards"), str(target), failing)
        for number, said in enumerate(found):
            expected = "CorruptionError: made to fail" if number == failing else "DistributedError: another rank failed"
            assert_equal(said[: len(expected)], expected, where=f"rank {number} where {failing} fails: {said}")
            assert_equal(f"rank {failing}" in said, True, where=f"rank {number} where {failing} fails: {said}")
        assert_equal(sorted(path.name for path in target.glob("*.safetensors*")), [], where="what became visible")


def _save_unevenly(rank: Rank, path: str) -> None:
    mesh = mesh_of(rank)
    state: dict[str, Any] = {"w": sharded(random_bits(torch.float32, [7, 4], 3), mesh, [Shard(0)])}
    if rank.rank == 1:
        state |= {f"n{i}": torch.full((2,), i) for i in (1, 2)}
    mapping = {"w": 1, "n1": 2, "n2": 3, "absent": 4}
    save_ranks(rank, state, Path(path), enable_consolidation=False, fqn_to_index_mapping=mapping)


@requirement(
    "CKPT-638",
    "The names of all shard files MUST say one number of files, that of the mapping, whichever of its files a rank has "
    "tensors of.",
)
def test_names_of_uneven_ranks(checkpoint: Any, rank_pool: Any, tmp_path: Path) -> None:
    rank_pool.run(_save_unevenly, 3, str(tmp_path / "ck"))
    names = sorted(path.name for path in (tmp_path / "ck").iterdir())
    expected = [(1, 1), (2, 1), (2, 2), (2, 3), (3, 1)]
    assert_equal(names, [f"shard-{r:05d}-model-{f:05d}-of-00004.safetensors" for r, f in expected], where="files")
    state = {"w": random_bits(torch.float32, [7, 4], 3), "n1": torch.full((2,), 1), "n2": torch.full((2,), 2)}
    assert_loads(checkpoint, tmp_path / "ck", state)


@requirement(
    "CKPT-733",
    "Shards with torch's own sharding information MUST load and merge for names of any characters: outside ASCII, with "
    "quotes, backslashes and control characters, escaped as JSON may escape them or not.",
)
def test_names_in_sharding_information(checkpoint: Any, tmp_path: Path) -> None:
    names = ["plain", "\u00e9t\u00e9", "a\\b", 'say "so"', "tab\tand\nline", "\U0001f600", "{}: [], \\u0041"]
    value = random_bits(torch.float32, (4, 3), 1)
    for number, (name, is_ascii) in enumerate(product(names, (True, False))):
        folder, where = tmp_path / str(number), f"{name!r}, escaped {is_ascii}"
        folder.mkdir()
        for part in (0, 1):
            info = json.dumps({name: {"saved_offsets": [2 * part, 0]}}, ensure_ascii=is_ascii)
            metadata = {"format": "pt", "DCP_SHARDING_INFO": info, "DCP_VERSION": "1.0"}
            file = folder / f"shard-{part + 1:05d}-model-00001-of-00001.safetensors"
            safetensors.torch.save_file({name: value[2 * part : 2 * part + 2].clone()}, file, metadata)
        with succeeds("a load", where=where):
            assert_loads(checkpoint, folder, {name: value})
        merged = tmp_path / f"merged-{number}"
        merged.mkdir()
        with succeeds("a merge", where=where):
            checkpoint.consolidate_safetensors_files(folder, merged, {name: 1})
            assert_loads(checkpoint, merged, {name: value})
