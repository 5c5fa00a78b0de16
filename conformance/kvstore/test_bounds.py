"""Bounds: adversarial ids, batches past 4 GiB, and no more rows in memory at once than were asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.harness import assert_equal, assert_le, assert_same_bytes, requirement
from conformance.kvstore.cases import (
    assert_bits,
    assert_contents,
    contents,
    filled,
    fresh,
    ids_of,
    random_bits,
    save,
    store_of,
)
from conformance.kvstore.huge import repeated

COUNT, MIB = 3000, 1 << 20
# Rows of 1 MiB, so that 4096 of them are 2**32 bytes; 12 of them are no divisor of it: a place that wraps around at
# 2**31 or 2**32 bytes shows another row.
PERIOD, BATCH = 12, 4104


def wrapped(value: int) -> int:
    """The int64 of these 64 bits."""
    return (value + 2**63) % 2**64 - 2**63


def reversed_bits(value: int) -> int:
    """All 64 bits of a number, in reverse."""
    return wrapped(int(f"{value:064b}"[::-1], 2))


FAMILIES = {
    "sequential": range(COUNT),
    "downwards from the last": [2**63 - 1 - n for n in range(COUNT)],
    **{f"stride 2**{k}": [wrapped(n << k) for n in range(COUNT)] for k in (1, 6, 12, 16, 24, 31, 32, 40, 52)},
    "same low 32 bits": [wrapped((n << 32) | 0xDEADBEEF) for n in range(COUNT)],
    "same high 32 bits": [wrapped((0xDEADBEEF << 32) | n) for n in range(COUNT)],
    "reversed bits": [reversed_bits(n) for n in range(COUNT)],
    "halves equal": [wrapped((n << 32) | n) for n in range(COUNT)],
    "multiples of 4096 shards": [n * 4096 for n in range(COUNT)],
}


@requirement(
    "KV-117",
    "Ids that follow a pattern (sequences, powers of two, equal halves, reversed bits) MUST be stored as any others "
    "are, and MUST NOT take more than twice the memory for finding them that random ids take.",
)
@pytest.mark.parametrize("family", list(FAMILIES))
def test_adversarial_ids(kvstore: Any, family: str) -> None:
    keys, generator = list(FAMILIES[family]), torch.Generator().manual_seed(1)
    assert len(set(keys)) == COUNT
    layout = kvstore.RowLayout(4)
    store, plain = (store_of(kvstore, layout, num_shards=16) for _ in range(2))
    weights = random_bits(torch.float32, (COUNT, 4), 3)
    for begin in range(0, COUNT, 500):
        part = slice(begin, begin + 500)
        store.set("t", ids_of(keys[part]), weights[part].contiguous())
    assert_bits(store.get("t", ids_of(keys)), weights, where=f"{family}: weights")
    assert_equal(store.ids("t").tolist(), sorted(keys), where=f"{family}: ids")
    around = sorted({wrapped(key + d) for key in keys[:50] for d in (-1, 1, 2**32)} - set(keys))
    assert_equal(int(store.contains("t", ids_of(around)).sum()), 0, where=f"{family}: ids that are not there")
    plain.set("t", torch.randint(-(2**63), 2**63 - 1, (COUNT,), generator=generator), weights)
    assert_le(store.stats().map_bytes, 2 * plain.stats().map_bytes, where=f"{family}: bytes of the maps")
    assert_equal(store.delete("t", ids_of(keys[::2])), COUNT // 2, where=f"{family}: deleted")
    assert_bits(store.get("t", ids_of(keys[1::2])), weights[1::2].contiguous(), where=f"{family}: the others")


@requirement(
    "KV-118", "A batch of more than 2**32 bytes MUST be written as small ones are: no byte position is cut to 32 bits."
)
def test_writes_past_four_gib(kvstore: Any) -> None:
    layout = kvstore.RowLayout(MIB // 4)
    store, ids = store_of(kvstore, layout), torch.arange(BATCH) % PERIOD
    # The last ids of the batch are their own, so that rows from past 2**32 bytes are seen one by one.
    ids[-8:] = torch.arange(100, 108)
    memory, once = repeated(PERIOD * MIB, BATCH * MIB), random_bits(torch.float32, (PERIOD, MIB // 4), 2)
    memory[: PERIOD * MIB] = once.view(torch.uint8).reshape(-1)
    store.set("t", ids, memory.view(torch.float32).reshape(BATCH, MIB // 4))
    for key in range(PERIOD):
        assert_bits(store.get("t", ids_of([key]))[0], once[key], where=f"id {key}")
    for key, position in zip(range(100, 108), range(BATCH - 8, BATCH), strict=True):
        assert_bits(store.get("t", ids_of([key]))[0], once[position % PERIOD], where=f"position {position}")


@pytest.mark.night
@requirement(
    "KV-119",
    "A batch of more than 2**32 bytes MUST be read, and whole rows written, as small ones are.",
    needs=("large_batches",),
)
def test_reads_past_four_gib(kvstore: Any) -> None:
    layout = kvstore.RowLayout((MIB - 16) // 4)
    store, other = store_of(kvstore, layout), store_of(kvstore, layout)
    rows = torch.randint(0, 256, (PERIOD, MIB), dtype=torch.uint8, generator=torch.Generator().manual_seed(4))
    rows[:, :8] = torch.arange(PERIOD).reshape(-1, 1).view(torch.uint8)
    rows[:, 15] |= 0x80
    store.set_rows("t", rows)
    ids = torch.arange(BATCH) % PERIOD
    many = repeated(PERIOD * MIB, BATCH * MIB).reshape(BATCH, MIB)
    store.get_rows("t", ids, out=many)
    assert_bits(many[:PERIOD].clone(), rows, where="read")
    other.set_rows("t", many)
    assert_bits(other.get_rows("t", ids[:PERIOD].contiguous()), rows, where="written")


@requirement(
    "KV-120",
    "A save and a load MUST NOT have more rows of a table in hand at once than chunk_rows, in either form.",
)
@pytest.mark.parametrize("form", ["rows", "separate"])
def test_chunks_are_bounded(kvstore: Any, tmp_path: Path, monkeypatch: Any, form: str) -> None:
    # Not empty: rows come with ``set_rows``.
    store, other = filled(kvstore, range(-50, 51)), filled(kvstore, range(2))
    largest = {"read": 0, "written": 0}

    def watch(owner: type, name: str, kind: str) -> None:
        original = getattr(owner, name)

        def around(source: Any, table: str, ids: torch.Tensor, *rest: Any, **options: Any) -> Any:
            largest[kind] = max(largest[kind], ids.shape[0])
            return original(source, table, ids, *rest, **options)

        monkeypatch.setattr(owner, name, around)

    with store.snapshot() as taken:
        watch(type(taken), "get_rows", "read")
    watch(type(other), "set_rows", "written")
    for chunk in (1, 7, 100, 101, 500):
        largest |= {"read": 0, "written": 0}
        save(kvstore, store, tmp_path / f"{chunk}", form=form, chunk_rows=chunk, buckets=kvstore.Buckets(3))
        kvstore.load(other, tmp_path / f"{chunk}", chunk_rows=chunk)
        for kind, count in largest.items():
            assert_le(count, chunk, where=f"rows {kind} at once in chunks of {chunk}")
            assert_equal(
                count, min(chunk, 101), where=f"rows {kind} at once in chunks of {chunk}, as many as there are"
            )
        assert_contents(other, contents(store), where=f"chunks of {chunk}")


@requirement(
    "KV-131",
    "A save MUST NOT hold more than 16 MiB of rows that it has read and not yet written.",
    needs=("streamed_saves",),
)
@pytest.mark.parametrize("form", ["rows", "separate"])
def test_rows_are_written_as_they_are_read(kvstore: Any, tmp_path: Path, monkeypatch: Any, form: str) -> None:
    layout = kvstore.RowLayout(1 << 14, optimizer="sgd")
    read_bytes, held = 0, [0]

    def written_bytes() -> int:
        return sum(file.stat().st_blocks * 512 for file in tmp_path.rglob("*") if file.is_file())

    with kvstore.KVStore({"t": layout}, optimizer_in_row=True) as store:
        store.set("t", torch.arange(768), torch.rand(768, 1 << 14))
        with store.snapshot() as taken:
            original = type(taken).get_rows

        def watched(source: Any, *arguments: Any, **options: Any) -> Any:
            nonlocal read_bytes
            held.append(read_bytes - written_bytes())
            rows = original(source, *arguments, **options)
            read_bytes += rows.numel()
            return rows

        monkeypatch.setattr(type(taken), "get_rows", watched)
        kvstore.save(store, tmp_path / "saved", form=form, save_distributed=False, thread_count=1)
    assert_le(40 * MIB, read_bytes, where="bytes read")
    assert_le(max(held), 16 * MIB, where="bytes read and not yet written")


@requirement(
    "KV-136",
    "The bytes of a save MUST NOT depend on the size of the blocks that are written, wherever those cut rows.",
    needs=("streamed_saves",),
)
@pytest.mark.parametrize("form", ["rows", "separate"])
def test_blocks_cut_rows(kvstore: Any, tmp_path: Path, form: str) -> None:
    store, saved = filled(kvstore, range(-900, 900)), {}
    for block_bytes in (4096, 1 << 14, 1 << 22):
        folder = tmp_path / f"{block_bytes}"
        save(kvstore, store, folder, form=form, block_bytes=block_bytes, chunk_rows=700, buckets=kvstore.Buckets(5))
        saved[block_bytes] = b"".join(path.read_bytes() for path in sorted(folder.glob("*.safetensors")))
    for block_bytes, found in saved.items():
        assert_same_bytes(found, saved[1 << 22], where=f"blocks of {block_bytes} bytes")
    other = fresh(kvstore)
    kvstore.load(other, tmp_path / "4096")
    assert_contents(other, contents(store), where="loaded again")


@requirement(
    "KV-281",
    "The bytes that a store counts for rows and for finding them MUST be those of all its rows and of what it "
    "reserved, whichever way rows came, and those of an emptied store MUST NOT be fewer than a new one's.",
)
def test_counted_bytes(kvstore: Any, tmp_path: Path) -> None:
    count, shards = 3000, 3
    ids = torch.arange(count)

    def made(*, reserved: int = 0) -> Any:
        store = store_of(kvstore, kvstore.RowLayout(4), num_shards=shards)
        if reserved:
            store.reserve("t", reserved)
        return store

    def written(store: Any) -> Any:
        for begin in range(0, count, 300):
            store.set("t", ids[begin : begin + 300], torch.ones(300, 4))
        return store

    def loaded(store: Any) -> Any:
        kvstore.load(store, tmp_path / "ck")
        return store

    new, grown = made().stats(), written(made())
    save(kvstore, grown, tmp_path / "ck")
    least = grown.stats()
    assert_le(least.map_bytes // 2, made(reserved=count).stats().map_bytes, where="bytes of reserved maps")
    ways = {
        "grown": grown,
        "reserved and written": written(made(reserved=count)),
        "reserved late": written(written(made())),
        "loaded": loaded(made()),
        "reserved and loaded": loaded(made(reserved=count)),
        "loaded twice": loaded(loaded(made())),
    }
    ways["reserved late"].reserve("t", 2 * count)
    for name, store in ways.items():
        for turn in range(2):
            stats, where = store.stats(), f"{name}, turn {turn}"
            assert_equal(stats.row_bytes, count * store.layout("t").row_bytes, where=f"{where}: bytes of rows")
            assert_le(stats.row_bytes, stats.allocated_bytes, where=f"{where}: bytes held for rows")
            assert_le(least.map_bytes // 2, stats.map_bytes, where=f"{where}: bytes for finding them")
            store.clear("t")
            left = store.stats()
            assert_le(new.map_bytes, left.map_bytes, where=f"{where}: bytes for finding no row")
            assert_le(new.allocated_bytes, left.allocated_bytes, where=f"{where}: bytes of no row")
            assert_le(left.allocated_bytes, stats.allocated_bytes, where=f"{where}: bytes that are given back")
            assert_le(left.map_bytes, stats.map_bytes, where=f"{where}: bytes of maps that are given back")
            written(store)
