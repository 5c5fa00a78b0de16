"""A checksum for every tensor: on any layout, through consolidation, compared on demand. The oracle is zlib."""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Placement, Replicate, Shard

from conformance.checkpoint.cases import (
    CHECKSUMS_KEY,
    DTYPES,
    FILE,
    INDEX,
    State,
    assert_folder,
    cut,
    load,
    load_with,
    mesh_of,
    oracle,
    own_count,
    peak_from_here,
    random_bits,
    save,
    save_ranks,
    sharded,
    sums_of,
    tiled,
    zeros_like,
)
from conformance.checkpoint.trainer import Trainer, alone
from conformance.checkpoint.trainer import load as load_managed
from conformance.harness import (
    Rank,
    assert_equal,
    assert_le,
    assert_same_bytes,
    assert_same_tensors,
    examples,
    raises,
    requirement,
    succeeds,
)
from twinproof.checkpoint.catalog import combine, verify
from twinproof.errors import ConfigError, CorruptionError, FormatError

STRUCTURE = "only the structure was verified"


def _stated(folder: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads((folder / INDEX).read_text())["metadata"].get(CHECKSUMS_KEY, {})
    return found


def save_with(writer: Any, state: State, folder: Path) -> None:
    """One of several saves with a writer."""
    with alone():
        dcp.save(dict(state), checkpoint_id=folder, storage_writer=writer)


def _flip(file: Path, at: int = -1) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


def _varied() -> State:
    state = {str(dtype): random_bits(dtype, (3, 5, 2), seed) for seed, dtype in enumerate(DTYPES)}
    strided = {
        "transposed": random_bits(torch.float32, (6, 9), 1).t(),
        "part": random_bits(torch.int16, (40,), 2)[3:30],
    }
    return {**state, **strided, "empty": torch.empty(0, 3), "scalar": torch.tensor(3.0)}


@requirement(
    "CKPT-520",
    "With checksums=True the index MUST state zlib's CRC-32 of every tensor's bytes, whatever its dtype and strides; "
    "the files MUST be the same bytes, and without it the index MUST be torch's.",
)
@pytest.mark.parametrize("block_bytes", [64, 8 << 20])
def test_sums_are_zlibs(checkpoint: Any, tmp_path: Path, block_bytes: int) -> None:
    state = _varied()
    save(checkpoint, state, tmp_path / "ck", checksums=True, max_shard_size=500, block_bytes=block_bytes)
    assert_equal(_stated(tmp_path / "ck"), sums_of(state), where="index")
    save(checkpoint, state, tmp_path / "plain", max_shard_size=500)
    files: dict[str, list[str]] = {}
    for name, file in json.loads((tmp_path / "ck" / INDEX).read_text())["weight_map"].items():
        files.setdefault(file, []).append(name)
    assert_folder(tmp_path / "plain", files, state)
    for file in files:
        assert_same_bytes(tmp_path / "ck" / file, (tmp_path / "plain" / file).read_bytes(), where=file)
    assert_equal(len(verify(tmp_path / "ck").checked), len(state), where="tensors verified")


PLACEMENTS: dict[str, list[Placement]] = {"rows": [Shard(0)], "columns": [Shard(1)], "replicas": [Replicate()]}


def _save_sharded(rank: Rank, path: str, placements: list[Placement], options: dict[str, Any]) -> None:
    mesh = mesh_of(rank)
    whole = {"w": random_bits(torch.float32, (9, 37), 1), "v": random_bits(torch.bfloat16, (7, 12), 2)}
    state: dict[str, Any] = {name: sharded(tensor, mesh, placements) for name, tensor in whole.items()}
    boxes = cut((6, 10), [[2, 5], [1, 4]])
    state["tiles"] = tiled(random_bits(torch.int64, (6, 10), 3), boxes, rank.rank, rank.world_size)
    save_ranks(rank, state, Path(path), checksums=True, **options)


def _sharded_state() -> State:
    return {
        "w": random_bits(torch.float32, (9, 37), 1),
        "v": random_bits(torch.bfloat16, (7, 12), 2),
        "tiles": random_bits(torch.int64, (6, 10), 3),
    }


@requirement(
    "CKPT-521",
    "The checksums of a save MUST be those of the whole tensors, however ranks share them: rows, columns, exchanged "
    "runs, tiles, replicas, any block size and number of threads.",
)
@pytest.mark.parametrize("kind", sorted(PLACEMENTS))
@pytest.mark.parametrize("block_bytes", [64, 256, 8 << 20])
def test_sums_over_ranks(rank_pool: Any, tmp_path: Path, kind: str, block_bytes: int) -> None:
    options = {"block_bytes": block_bytes, "thread_count": 2, "max_shard_size": 1400}
    rank_pool.run(_save_sharded, 3, str(tmp_path / "ck"), PLACEMENTS[kind], options)
    assert_equal(_stated(tmp_path / "ck"), sums_of(_sharded_state()), where=f"{kind}, blocks of {block_bytes}")


def _load_sharded(rank: Rank, path: str) -> tuple[str, ...]:
    mesh = mesh_of(rank)
    targets = {
        "w": sharded(zeros_like(_sharded_state()["w"]), mesh, [Shard(0)]),
        "v": sharded(zeros_like(_sharded_state()["v"]), mesh, [Replicate()]),
    }
    reader = rank.component("checkpoint").HuggingFaceStorageReader(Path(path), verify_checksums=True)
    dcp.load(dict(targets), storage_reader=reader)
    unverified: tuple[str, ...] = reader.unverified
    return unverified


@requirement(
    "CKPT-522",
    "verify_checksums MUST compare every tensor that is read whole, and name those that are read in part.",
)
def test_loads_compare(checkpoint: Any, rank_pool: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = _varied()
    save(checkpoint, state, tmp_path / "ck", checksums=True)
    targets = {name: zeros_like(tensor) for name, tensor in state.items()}
    reader = load(checkpoint, targets, tmp_path / "ck", verify_checksums=True)
    assert_equal(reader.unverified, (), where="all read whole")
    assert_same_tensors(targets, state, where="values")
    boxes = cut((3, 5, 2), [[1], [], []])
    part = {"torch.float32": tiled(state["torch.float32"], boxes, 0, 2, fill=False)}
    reader = load(checkpoint, part, tmp_path / "ck", verify_checksums=True)
    assert_equal(reader.unverified, ("torch.float32",), where="read in part")
    if "torch.float32" not in caplog.text:
        assert_equal(caplog.text, "a warning that names torch.float32", where="log")
    rank_pool.run(_save_sharded, 2, str(tmp_path / "ranks"), [Shard(0)], {})
    assert_equal(rank_pool.run(_load_sharded, 2, str(tmp_path / "ranks")), [("w",), ("w",)], where="resharded load")


@requirement(
    "CKPT-523",
    "verify and verify_checksums MUST name every tensor whose bytes do not agree, with both sums and the file, also "
    "where the target is converted or strided.",
)
@pytest.mark.parametrize("kind", ["plain", "cast", "strided"])
def test_flipped_bits_are_named(checkpoint: Any, tmp_path: Path, kind: str) -> None:
    state = {name: random_bits(torch.float32, (4, 6), seed) for seed, name in enumerate("abc")}
    save(checkpoint, state, tmp_path / "ck", checksums=True, fqn_to_index_mapping={"a": 1, "b": 2, "c": 3})
    for number in (1, 3):
        _flip(tmp_path / "ck" / f"model-{number:05d}-of-00003.safetensors", -7)
    wrong = [sums_of(state)[name] for name in ("a", "c")]
    mentions = ("'a'", "'c'", *wrong, "model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors")
    with raises(CorruptionError, mentions=mentions, where="verify"):
        verify(tmp_path / "ck", thread_count=2)
    dtype = torch.float64 if kind == "cast" else torch.float32
    targets = {name: torch.zeros(6, 4, dtype=dtype).t() if kind == "strided" else torch.zeros(4, 6, dtype=dtype)
               for name in state}  # fmt: skip
    with raises(CorruptionError, mentions=mentions, where="load"):
        load(checkpoint, targets, tmp_path / "ck", verify_checksums=True, cast=kind == "cast")


def _targets_of(stored: torch.Tensor) -> dict[str, torch.Tensor]:
    """Places for a matrix: dtypes of every width, its own among them, other strides, and a view that negates."""
    shape = tuple(stored.shape)
    dtypes = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int16, torch.int32, torch.complex64)
    return {
        **{f"{dtype}": torch.zeros(shape, dtype=dtype) for dtype in dtypes},
        **{f"{dtype} turned": torch.zeros(shape[::-1], dtype=dtype).t() for dtype in dtypes},
        "columns": torch.zeros(shape[0], 2 * shape[1])[:, ::2],
        "negated": torch.zeros(shape, dtype=torch.complex64).conj().imag,
    }


@requirement(
    "CKPT-645",
    "A load that compares MUST give what one gives that does not, and name nothing, whatever dtype, strides or view "
    "its targets have.",
)
def test_compared_whatever_the_targets(checkpoint: Any, tmp_path: Path) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.int32):
        whole = torch.arange(35).reshape(5, 7).to(dtype)
        names = list(_targets_of(whole))
        save(checkpoint, dict.fromkeys(names, whole), tmp_path / f"{dtype}", checksums=True)
        compared, expected = _targets_of(whole), _targets_of(whole)
        load(checkpoint, expected, tmp_path / f"{dtype}", cast=True)
        with succeeds("a load that compares", where=f"of {dtype}"):
            reader = load(checkpoint, compared, tmp_path / f"{dtype}", cast=True, verify_checksums=True)
        assert_equal(reader.unverified, (), where=f"{dtype}: what was not compared")
        assert_same_tensors(compared, expected, where=f"of {dtype}")
        for name, target in expected.items():
            assert_equal(bool((target == torch.arange(35).reshape(5, 7)).all()), True, where=f"{dtype} into {name}")


@requirement(
    "CKPT-524",
    "A checkpoint without checksums MUST verify as its structure alone, and verify_checksums MUST then refuse to load; "
    "tensors without one among others MUST be named.",
)
def test_withoutsums_of(checkpoint: Any, tmp_path: Path) -> None:
    state = {"a": torch.randn(3), "b": torch.randn(4)}
    save(checkpoint, state, tmp_path / "ck")
    found = verify(tmp_path / "ck")
    assert_equal((found.checked, found.unchecked, STRUCTURE in str(found)), ((), ("a", "b"), True), where="verify")
    with raises(ConfigError, mentions=("checksums=True",)):
        load(checkpoint, {"a": torch.zeros(3)}, tmp_path / "ck", verify_checksums=True)
    save(checkpoint, state, tmp_path / "ck", checksums=True)
    index = json.loads((tmp_path / "ck" / INDEX).read_text())
    del index["metadata"][CHECKSUMS_KEY]["a"]
    (tmp_path / "ck" / INDEX).write_text(json.dumps(index))
    found = verify(tmp_path / "ck")
    assert_equal((found.checked, found.unchecked), (("b",), ("a",)), where="one without")
    assert_equal("a" in str(found).split(": ")[-1], True, where="its name is in the sentence")
    reader = load(checkpoint, {"a": torch.zeros(3), "b": torch.zeros(4)}, tmp_path / "ck", verify_checksums=True)
    assert_equal(reader.unverified, ("a",), where="load")


def _consolidate(rank: Rank, source: str, target: str) -> None:
    rank.component("checkpoint").consolidate_safetensors_files_on_every_rank(source, target, num_threads=2)


def _tiles_apart(rank: Rank, path: str) -> None:
    # The shard layout holds one chunk of a tensor per rank.
    mesh = mesh_of(rank)
    state = {name: sharded(t, mesh, [Shard(1)]) for name, t in _sharded_state().items()}
    save_ranks(rank, state, Path(path), enable_consolidation=False, checksums=True)


@requirement(
    "CKPT-525",
    "Consolidation MUST compare every shard with its checksums while it reads, MUST state those of the result, and on "
    "a disagreement MUST name the tensor and publish nothing; a final folder's bytes MUST be compared too.",
)
@pytest.mark.parametrize("on_every_rank", [False, True])
def test_consolidation_carriessums_of(checkpoint: Any, rank_pool: Any, tmp_path: Path, on_every_rank: bool) -> None:
    rank_pool.run(_tiles_apart, 2, str(tmp_path / "shards"))
    assert_equal(len(verify(tmp_path / "shards").checked), 3, where="shards verified")

    def consolidate(source: Path, target: Path) -> None:
        if on_every_rank:
            rank_pool.run(_consolidate, 2, str(source), str(target))
        else:
            checkpoint.consolidate_safetensors_files(source, target)

    consolidate(tmp_path / "shards", tmp_path / "whole")
    assert_equal(_stated(tmp_path / "whole"), sums_of(_sharded_state()), where="sums of the result")
    assert_folder_values(tmp_path / "whole", _sharded_state())
    _flip(tmp_path / "shards" / "shard-00002-model-00001-of-00001.safetensors")
    with raises((CorruptionError, RuntimeError), mentions=("do not agree with their checksums",)):
        consolidate(tmp_path / "shards", tmp_path / "again")
    assert_equal((tmp_path / "again").exists(), False, where="nothing is published")
    _flip(tmp_path / "whole" / FILE)
    with raises((CorruptionError, RuntimeError), mentions=("do not agree with their checksums",)):
        consolidate(tmp_path / "whole", tmp_path / "whole")


def assert_folder_values(folder: Path, state: State) -> None:
    """The one file of the folder is the oracle's: checksums of shards do not stay in it."""
    assert_same_bytes(folder / FILE, oracle(state, {"format": "pt"}), where="file")


@requirement(
    "CKPT-526",
    "save_file with checksums=True MUST state them in the file's metadata, verify MUST compare them, and without them "
    "the bytes MUST be the library's; their key MUST be refused as the user's own.",
)
def test_single_files(checkpoint: Any, tmp_path: Path) -> None:
    state, file = _varied(), tmp_path / "x.safetensors"
    checkpoint.save_file(state, file, {"step": "7"})
    assert_same_bytes(file, oracle(state, {"step": "7"}), where="without")
    checkpoint.save_file(state, file, {"step": "7"}, checksums=True)
    content = file.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
    assert_equal((json.loads(header[CHECKSUMS_KEY]), header["step"]), (sums_of(state), "7"), where="metadata")
    assert_equal(len(verify(file).checked), len(state), where="verified")
    targets = {"part": zeros_like(state["part"])}
    assert_equal(load(checkpoint, targets, file, verify_checksums=True).unverified, (), where="load")
    _flip(file)
    with raises(CorruptionError, mentions=("do not agree with their checksums",)):
        verify(file)
    with raises(ConfigError, mentions=(CHECKSUMS_KEY,)):
        checkpoint.save_file({}, file, {CHECKSUMS_KEY: "{}"})
    with raises(ConfigError, mentions=(CHECKSUMS_KEY,)):
        checkpoint.HuggingFaceStorageWriter(tmp_path / "ck", metadata={CHECKSUMS_KEY: "{}"})
    with raises(ConfigError, mentions=("single_file", "checksums")):
        checkpoint.HuggingFaceStorageWriter(tmp_path / "ck", single_file=True, checksums=True)


@requirement(
    "CKPT-527",
    "The reader of block-quantized weights MUST compare the stored bytes of values and scales that are read whole, and "
    "name what is read in part.",
)
def test_quantizedsums_of(checkpoint: Any, tmp_path: Path) -> None:
    state = {
        "l.weight": random_bits(torch.uint8, (6, 10), 1).clamp(max=120).view(torch.float8_e4m3fn),
        "l.weight_scale_inv": torch.rand(2, 3),
        "plain": torch.randn(5),
    }
    save(
        checkpoint,
        state,
        tmp_path / "ck",
        checksums=True,
        fqn_to_index_mapping=dict(zip(state, (1, 2, 3), strict=True)),
    )

    def read(targets: State) -> Any:
        made = checkpoint.QuantizedHuggingFaceStorageReader(tmp_path / "ck", block_size=4, verify_checksums=True)
        load_with(made, targets)
        return made.unverified

    targets = {"l.weight": torch.zeros(6, 10), "plain": torch.zeros(5)}
    assert_equal(read(targets), (), where="read whole")
    part: Any = {"l.weight": tiled(targets["l.weight"], cut((6, 10), [[3], []]), 0, 2, fill=False)}
    assert_equal(read(part), ("l.weight", "l.weight_scale_inv"), where="read in part")
    for number, name in ((1, "l.weight"), (2, "l.weight_scale_inv")):
        file = tmp_path / "ck" / f"model-{number:05d}-of-00003.safetensors"
        _flip(file)
        with raises(CorruptionError, mentions=(f"'{name}'",), where=name):
            read(targets)
        _flip(file)


@requirement(
    "CKPT-558",
    "The reader of block-quantized weights MUST refuse to compare where there are no checksums, whatever is asked for, "
    "and before any target is written.",
)
def test_quantized_withoutsums_of(checkpoint: Any, tmp_path: Path) -> None:
    state = {
        "l.weight": torch.ones(6, 10).to(torch.float8_e4m3fn),
        "l.weight_scale_inv": torch.ones(2, 3),
        "plain": torch.ones(5),
    }
    save(checkpoint, state, tmp_path / "ck")
    for names in (["l.weight"], ["plain"], ["l.weight", "plain"]):
        targets = {name: torch.zeros(state[name].shape) for name in names}
        reader = checkpoint.QuantizedHuggingFaceStorageReader(tmp_path / "ck", block_size=4, verify_checksums=True)
        with raises(ConfigError, mentions=("verify_checksums",), where=f"{names}"):
            load_with(reader, targets)
        assert_equal([name for name in names if targets[name].any()], [], where=f"{names}: targets that changed")


def _save_in_group(rank: Rank, path: str) -> None:
    """Two ranks of three, without the first, save and merge; rank 0 has other things to do."""
    group = dist.new_group([1, 2], backend="gloo")
    if rank.rank == 0:
        return
    checkpoint, rows = rank.component("checkpoint"), [((0, 0), (4, 37)), ((4, 0), (5, 37))]
    value = random_bits(torch.float32, (9, 37), 1)
    for folder, whole in (("ck", True), ("shards", False)):
        state = {"w": tiled(value, rows, rank.rank - 1, 2)}
        options = {"checksums": True, "check_replicas": whole, "enable_consolidation": whole, "process_group": group}
        with checkpoint.HuggingFaceStorageWriter(Path(path) / folder, **options) as writer:
            dcp.save(state, storage_writer=writer, process_group=group)
    merge = checkpoint.consolidate_safetensors_files_on_every_rank
    merge(Path(path) / "shards", Path(path) / "merged", process_group=group)


@requirement(
    "CKPT-556",
    "Ranks of a group without rank 0 MUST save, compare replicas, sum and merge among themselves.",
)
def test_group_without_rank_0(checkpoint: Any, rank_pool: Any, tmp_path: Path) -> None:
    with succeeds("saving and merging", where="two ranks of three"):
        rank_pool.run(_save_in_group, 3, str(tmp_path))
    state = {"w": random_bits(torch.float32, (9, 37), 1)}
    for folder in ("ck", "merged"):
        assert_equal(_stated(tmp_path / folder), sums_of(state), where=folder)
        assert_same_bytes(tmp_path / folder / FILE, oracle(state, {"format": "pt"}), where=folder)


@requirement(
    "CKPT-528",
    "Checksums that are malformed, of tensors that are not there, or contradictory MUST be refused by name; they MUST "
    "stop no load that does not ask for them.",
)
@pytest.mark.parametrize(
    ("stated", "error"),
    [
        ("text", FormatError),
        ({"a": 7}, FormatError),
        ({"a": "123"}, FormatError),
        ({"a": "0123456G"}, FormatError),
        ({"ghost": "01234567"}, CorruptionError),
    ],
)
def test_hostilesums_of(checkpoint: Any, tmp_path: Path, stated: Any, error: type[Exception]) -> None:
    state = {"a": torch.randn(3)}
    save(checkpoint, state, tmp_path / "ck")
    index = json.loads((tmp_path / "ck" / INDEX).read_text())
    index["metadata"][CHECKSUMS_KEY] = stated
    (tmp_path / "ck" / INDEX).write_text(json.dumps(index))
    with raises(error, mentions=(CHECKSUMS_KEY,)):
        verify(tmp_path / "ck")
    targets = {"a": torch.zeros(3)}
    load(checkpoint, targets, tmp_path / "ck")
    assert_same_tensors(targets, state, where="an ordinary load")


@requirement(
    "CKPT-606",
    "verify MUST name a tensor of which one shard has no checksum as not checked, compare its other shards all the "
    "same, and a load that compares MUST name it too.",
)
def test_shards_partly_summed(checkpoint: Any, tmp_path: Path) -> None:
    whole = {name: random_bits(torch.float32, (4, 3), number) for number, name in enumerate("ab")}
    for rank in (0, 1):
        part = {name: value[2 * rank : 2 * rank + 2].clone() for name, value in whole.items()}
        info = json.dumps({name: {"saved_offsets": [2 * rank, 0]} for name in part})
        summed = part if rank == 0 else {"a": part["a"]}
        metadata = {"DCP_SHARDING_INFO": info, CHECKSUMS_KEY: json.dumps(sums_of(summed))}
        # The library's writer takes that key, which a save keeps for itself.
        (tmp_path / f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors").write_bytes(oracle(part, metadata))
    found = verify(tmp_path)
    assert_equal((found.checked, found.unchecked), (("a",), ("b",)), where="verify")
    reader = checkpoint.HuggingFaceStorageReader(tmp_path, verify_checksums=True)
    targets = {name: torch.zeros(4, 3) for name in whole}
    load_with(reader, targets)
    assert_same_tensors(targets, whole)
    assert_equal(reader.unverified, ("b",), where="a load")
    _flip(tmp_path / "shard-00001-model-00001-of-00001.safetensors")
    with raises(CorruptionError, mentions=("'b'",), where="a flipped bit of the shard that has a sum"):
        verify(tmp_path)


@requirement(
    "CKPT-529",
    "The combined checksum of two pieces MUST be zlib's of both, one after the other, whatever their lengths.",
)
@examples(60)
@given(sizes=st.tuples(st.integers(0, 300), st.integers(0, 70_000)), seed=st.integers(0, 99))
def test_combination(sizes: tuple[int, int], seed: int) -> None:
    first, second = (bytes(random_bits(torch.uint8, (size,), seed).numpy()) for size in sizes)
    combined = combine(zlib.crc32(first), zlib.crc32(second), len(second))
    assert_equal(combined, zlib.crc32(first + second), where=f"{len(first)} and {len(second)} bytes")


@requirement(
    "CKPT-530",
    "The operator MUST give zlib's CRC-32 between all cuts, at every length and alignment, and refuse cuts that do not "
    "ascend or lie outside.",
    needs=("staged_copies",),
)
@examples(60)
@given(seed=st.integers(0, 999), size=st.integers(0, 700), data=st.data())
def test_operator(checkpoint: Any, seed: int, size: int, data: st.DataObject) -> None:
    values = random_bits(torch.uint8, (size + 3,), seed)[data.draw(st.integers(0, 3)) :]
    cuts = sorted(data.draw(st.lists(st.integers(0, values.numel()), min_size=1, max_size=6)))
    content = bytes(values.tolist())
    expected = [zlib.crc32(content[a:b]) for a, b in pairwise(cuts)]
    from fastimpl.ops import checkpoint as operators

    assert_equal(operators.crc32_between(values, cuts), expected, where=f"cuts {cuts}")
    for wrong in ([values.numel() + 1], [-1], [1, 0]):
        with raises(RuntimeError, mentions=("cuts",)):
            operators.crc32_between(values, wrong)


@pytest.mark.night
@requirement("CKPT-531", "verify MUST hold a piece for each thread, whatever the size of a tensor.")
def test_bounded_memory(checkpoint: Any, tmp_path: Path) -> None:
    save(checkpoint, {"a": torch.zeros(48 << 20, dtype=torch.uint8)}, tmp_path / "ck", checksums=True, durable=False)
    before = peak_from_here()
    assert_equal(verify(tmp_path / "ck", thread_count=2).checked, ("a",), where="verified")
    assert_le(own_count("status", "VmHWM") - before, 24 << 10, where="growth in KiB over 48 MiB of data")


@requirement(
    "CKPT-502",
    "verify MUST sum a tensor alike, and notice a change of any byte, whatever it reads at once: a byte, all of it, "
    "one less or more, parts that divide it and that do not, with 1, 2 and 3 threads.",
)
def test_pieces(checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = 12
    save(checkpoint, {"a": random_bits(torch.int32, (3,), 1), "b": torch.ones(1)}, tmp_path / "ck", checksums=True)
    (file,) = (tmp_path / "ck").glob("*.safetensors")
    good = file.read_bytes()
    begin = 8 + int.from_bytes(good[:8], "little")
    for at_once in (1, 2, 3, 4, 5, size - 1, size, size + 1, 1000):
        monkeypatch.setattr("twinproof.checkpoint.catalog.PIECE_BYTES", at_once)
        for thread_count in (1, 2, 3):
            where = f"{at_once} bytes at once, {thread_count} threads"
            with succeeds("verify of what is right", where=where):
                assert_equal(verify(tmp_path / "ck", thread_count=thread_count).checked, ("a", "b"), where=where)
            for place in range(begin, len(good)):
                file.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
                with raises(CorruptionError, where=f"byte {place - begin} changed, {where}"):
                    verify(tmp_path / "ck", thread_count=thread_count)
            file.write_bytes(good)


@requirement(
    "CKPT-532",
    "progress MUST be told this rank's bytes in ascending order up to its total; the totals of a save MUST be the "
    "bytes of all files, those of a load the bytes that were read, of a verification the bytes that have checksums.",
)
def test_progress(checkpoint: Any, rank_pool: Any, tmp_path: Path) -> None:
    heard: list[tuple[int, int]] = []

    def listen(done: int, total: int) -> None:
        heard.append((done, total))

    state = {"a": torch.randn(50, 7), "b": torch.randn(9)}
    save(checkpoint, state, tmp_path / "ck", checksums=True, max_shard_size=1400, block_bytes=256, progress=listen)
    _assert_heard(heard, sum(path.stat().st_size for path in (tmp_path / "ck").glob("*.safetensors")), "save")
    load(checkpoint, {name: zeros_like(t) for name, t in state.items()}, tmp_path / "ck", progress=listen)
    _assert_heard(heard, 4 * 359, "load")
    verify(tmp_path / "ck", progress=listen)
    _assert_heard(heard, 4 * 359, "verify")
    totals = rank_pool.run(_save_heard, 2, str(tmp_path / "ranks"))
    size = sum(path.stat().st_size for path in (tmp_path / "ranks").glob("*.safetensors"))
    assert_equal(sum(totals), size, where="totals of all ranks")
    with raises(ConfigError, mentions=("progress", "done_bytes")):
        checkpoint.HuggingFaceStorageWriter(tmp_path / "ck", progress="bar")


def _save_heard(rank: Rank, path: str) -> int:
    heard: list[tuple[int, int]] = []
    state = {"w": sharded(random_bits(torch.float32, (9, 37), 1), mesh_of(rank), [Shard(0)])}
    save_ranks(rank, state, Path(path), progress=lambda done, total: heard.append((done, total)), block_bytes=64)
    return _assert_heard(heard, None, f"rank {rank.rank}")


def _assert_heard(heard: list[tuple[int, int]], total: int | None, where: str) -> int:
    done = [pair[0] for pair in heard]
    totals = {pair[1] for pair in heard}
    assert_equal(done, sorted(done), where=f"{where}: ascending")
    assert_equal(done[-1:], sorted(totals), where=f"{where}: the last is the total")
    if total is not None:
        assert_equal(totals, {total}, where=f"{where}: total")
    heard.clear()
    return next(iter(totals), 0)


@requirement(
    "CKPT-538",
    "A manager whose hf_options say checksums MUST save HF checkpoints with them, and one that verifies MUST refuse a "
    "flipped bit when it starts from such a checkpoint.",
)
def test_manager_saves_and_compares(checkpoint: Any, tmp_path: Path) -> None:
    trainer = Trainer(1)
    options = {"last_save_in_hf": True, "hf_options": {"checksums": True}}
    with trainer.manager(checkpoint, tmp_path / "run", **options) as manager:
        trainer.train(manager, 1)
    folder = tmp_path / "run" / "step-1"
    assert_equal(len(verify(folder).checked), len(trainer.weights()), where="tensors verified")
    started = {"initial_load_path": folder, "initial_load_in_hf": True, "verify_checksums": True}
    with Trainer(2).manager(checkpoint, tmp_path / "next", **started) as manager:
        assert_equal(load_managed(manager), True, where="loads")
    _flip(folder / FILE)
    with Trainer(3).manager(checkpoint, tmp_path / "last", **started) as manager, raises(CorruptionError):
        load_managed(manager)


@requirement(
    "CKPT-614",
    "A checksum in the index that is not the one that the tensor's file states MUST be refused by name.",
)
def test_two_sums_of_one_tensor(checkpoint: Any, tmp_path: Path) -> None:
    state = {"a": torch.randn(3), "b": torch.randn(2)}
    checkpoint.save_file(state, tmp_path / "model.safetensors", checksums=True)
    for wrong in (None, "a", "b"):
        stated = {name: f"{int(crc, 16) ^ (name == wrong):08x}" for name, crc in sums_of(state).items()}
        index = {"metadata": {CHECKSUMS_KEY: stated}, "weight_map": dict.fromkeys(state, "model.safetensors")}
        (tmp_path / INDEX).write_text(json.dumps(index))
        if wrong is None:
            assert_equal(verify(tmp_path).checked, ("a", "b"), where="the same sums")
            continue
        with raises(CorruptionError, mentions=("different checksums", f"'{wrong}'"), where=f"of {wrong}"):
            verify(tmp_path)


_ONE, _TWO, _APART = "one.safetensors", "two.safetensors", "apart.safetensors"


def _with_unlisted(folder: Path, summed: dict[str, str]) -> State:
    """The x of one file and the y of another, which an index lists; their files hold and sum more than that.

    Each name stands in two files with other values. What is not listed ends the first file and begins the second.
    """
    x, y, other = (random_bits(torch.float32, (5,), seed) for seed in range(3))
    folder.mkdir()
    for file, state in ((_ONE, {"x": x, "y": other}), (_TWO, {"a": other, "y": y}), (_APART, {"x": y})):
        sums = {name: crc for name, crc in sums_of(state).items() if name in summed[file]}
        # The library's writer takes that key, which a save keeps for itself.
        (folder / file).write_bytes(oracle(state, {CHECKSUMS_KEY: json.dumps(sums)} if sums else None))
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 40}, "weight_map": {"x": _ONE, "y": _TWO}}))
    return {"x": x, "y": y}


def _comparing(checkpoint: Any, rank_pool: Any) -> dict[str, Callable[[Path, Path], Any]]:
    """What compares the sums of a folder, by name; each answers which tensors it could not compare."""

    def loaded(make: Any, folder: Path) -> Any:
        reader = make(folder, verify_checksums=True)
        load_with(reader, {"x": torch.zeros(5), "y": torch.zeros(5)})
        return reader.unverified

    merge = checkpoint.consolidate_safetensors_files
    return {
        "verify": lambda folder, _: verify(folder).unchecked,
        "a load": lambda folder, _: loaded(checkpoint.HuggingFaceStorageReader, folder),
        "a load of blocks": lambda folder, _: loaded(checkpoint.QuantizedHuggingFaceStorageReader, folder),
        "a merge": lambda folder, out: merge(folder, out) or (),
        "a merge into itself": lambda folder, _: merge(folder, folder) or (),
        "a merge by ranks": lambda folder, out: rank_pool.run(_consolidate, 2, str(folder), str(out)) and (),
    }


@requirement(
    "CKPT-727",
    "Sums of tensors that an index leaves out MUST count for nothing: verify, loads and merges compare what it lists, "
    "pass over a spoilt tensor that it does not list, and take no such sum for one of the checkpoint.",
)
def test_sums_of_unlisted_tensors(checkpoint: Any, rank_pool: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for way, compare in _comparing(checkpoint, rank_pool).items():
        for spoilt in (False, True):
            folder = tmp_path / f"{way}, {spoilt}"
            state = _with_unlisted(folder, {_ONE: "xy", _TWO: "ay", _APART: "x"})
            if spoilt:
                _flip(folder / _ONE)
            with succeeds(way, where=f"what is not listed is spoilt: {spoilt}"):
                assert_equal(compare(folder, out), (), where=f"{way}: not compared")
            if out.exists():
                assert_folder_values(out, state)
                assert_equal(_stated(out), sums_of(state), where=f"{way}: sums of the result")
                shutil.rmtree(out)
        _flip(folder / _TWO)
        with raises((CorruptionError, RuntimeError), mentions=("with their checksums", "'y'"), where=f"{way}: spoilt"):
            compare(folder, out)
        _with_unlisted(tmp_path / f"{way}, one", {_ONE: "xy", _TWO: "a", _APART: "x"})
        with succeeds(way, where="where the sum is of another file's y"):
            assert_equal(compare(tmp_path / f"{way}, one", out), () if "merge" in way else ("y",), where=way)
        shutil.rmtree(out, ignore_errors=True)
        _with_unlisted(tmp_path / f"{way}, none", {_ONE: "y", _TWO: "a", _APART: "x"})
        refused = raises(ConfigError, mentions=("checksums=True",), where=f"{way} where no sum is of what is listed")
        with refused if "load" in way else succeeds(way, where="where no sum is of what is listed"):
            compare(tmp_path / f"{way}, none", out)
        if out.exists():
            assert_equal(_stated(out), {}, where=f"{way}: sums of the result, where none is of what is listed")
            shutil.rmtree(out)


@requirement(
    "CKPT-637",
    "A writer that saves several times with checksums MUST state in each index the sums of that save alone, also after "
    "one that failed.",
)
def test_sums_of_several_saves(checkpoint: Any, tmp_path: Path) -> None:
    with checkpoint.HuggingFaceStorageWriter(tmp_path / "0", checksums=True, block_bytes=64) as writer:
        for number in range(8):
            state = {name: random_bits(torch.float32, (9, 5), 10 * number + i) for i, name in enumerate("ab")}
            folder = tmp_path / f"{number}"
            if number == 5:
                folder.write_text("a file is in the way")
                with raises(BaseException, mentions=("not a folder",), where="a save that fails"):
                    save_with(writer, state, folder)
                continue
            with succeeds("a save", where=f"number {number}"):
                save_with(writer, state, folder)
            assert_equal(_stated(folder), sums_of(state), where=f"sums of save {number}")
