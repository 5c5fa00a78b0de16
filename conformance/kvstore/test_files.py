"""Files: the documented schema, the same bytes every time, old versions, and nothing from a torn one."""

from __future__ import annotations

import errno
import functools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import refimpl.kvstore as reference
from conformance.harness import assert_equal, assert_le, assert_same_bytes, examples, raises, requirement, succeeds
from conformance.harness.descriptors import descriptors_left
from conformance.kvstore import strategies
from conformance.kvstore.cases import (
    FILE,
    assert_bits,
    assert_contents,
    between_tables,
    contents,
    filled,
    fresh,
    ids_of,
    layouts_of,
    random_rows,
    save,
    store_of,
    weights_of,
)
from conformance.provers.faults import Interruption, each_moment, interrupted
from twinproof.checkpoint.publish import storage_error
from twinproof.errors import (
    ConfigError,
    CorruptionError,
    FormatError,
    MissingKeyError,
    ShapeError,
    StorageError,
    TwinproofError,
    VersionError,
)


def torn_files(path: Path) -> dict[str, Any]:
    """Ways to ruin a checkpoint, by name."""
    raw = (path / FILE).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])

    def rewritten(change: Any) -> bytes:
        copy = json.loads(json.dumps(header))
        change(copy)
        text = json.dumps(copy).encode()
        return len(text).to_bytes(8, "little") + text + raw[8 + length :]

    def content(name: str, value: Any) -> Any:
        def change(copy: Any) -> None:
            inner = json.loads(copy["__metadata__"]["kvstore.content"])
            inner[name] = value
            copy["__metadata__"]["kvstore.content"] = json.dumps(inner)

        return change

    rows_at = 8 + length + header["a.rows"]["data_offsets"][0]
    ids_at = 8 + length + header["a.ids"]["data_offsets"][0]
    counts_at = 8 + length + header["a.bucket_counts"]["data_offsets"][0]
    last = 8 + length + header["b.rows"]["data_offsets"][1] - header["b.rows"]["shape"][1]
    return {
        "truncated": raw[:-5],
        "truncated header": raw[:60],
        "empty": b"",
        "no metadata": rewritten(lambda copy: copy.pop("__metadata__")),
        "no version": rewritten(lambda copy: copy["__metadata__"].pop("kvstore.version")),
        "version zero": rewritten(lambda copy: copy["__metadata__"].update({"kvstore.version": "0"})),
        "newer version": rewritten(lambda copy: copy["__metadata__"].update({"kvstore.version": "5"})),
        "no JSON": rewritten(lambda copy: copy["__metadata__"].update({"kvstore.content": "{"})),
        "another kind": rewritten(content("kind", "half")),
        "another form": rewritten(content("form", "columns")),
        "moments that are no names": rewritten(content("moments", [1])),
        "steps that are no numbers": rewritten(content("steps", {"a": -1})),
        "bases that are no names": rewritten(content("bases", {"a": 5})),
        "no layouts": rewritten(content("layouts", {})),
        "too many buckets": rewritten(content("buckets", [7, "interleave", None])),
        "rows as floats": rewritten(lambda copy: copy["a.rows"].update({"dtype": "I8"})),
        "another id": raw[:ids_at] + b"\x55" + raw[ids_at + 1 :],
        "another key": raw[:rows_at] + b"\x55" + raw[rows_at + 1 :],
        "an unused last row": raw[: last + 15] + b"\x00" + raw[last + 16 :],
        "wrong counts": raw[:counts_at] + b"\x00" + raw[counts_at + 1 :],
    }


@requirement(
    "KV-048",
    "A torn, foreign, contradictory or newer file MUST be a named error, and leave the store as it was.",
)
def test_torn_files(kvstore: Any, tmp_path: Path) -> None:
    save(kvstore, filled(kvstore, range(20)), tmp_path / "ck", buckets=kvstore.Buckets(2))
    other = filled(kvstore, [1, 2, 3])
    before = contents(other)
    for name, raw in torn_files(tmp_path / "ck").items():
        (tmp_path / "ck" / FILE).write_bytes(raw)
        # A kind or a form that there is not is named, as is a store of nothing, whatever else would be found later.
        named = {"another kind": ["half"], "another form": ["columns"], "no layouts": ["and tables"]}
        with raises(TwinproofError, mentions=named.get(name, []), where=name):
            kvstore.load(other, tmp_path / "ck", chunk_rows=4)
        assert_contents(other, before, where=name)
    with raises(FileNotFoundError, where="nothing there"):
        kvstore.load(other, tmp_path / "none")
    assert_contents(other, before, where="nothing there")


@requirement("KV-429", "None in place of chunk_rows of a load MUST be the default: the same rows, in either form.")
@pytest.mark.parametrize("form", ["rows", "separate"])
def test_default_chunks(kvstore: Any, tmp_path: Path, form: str) -> None:
    store = filled(kvstore, range(20))
    save(kvstore, store, tmp_path / "ck", form=form)
    for options in ({}, {"chunk_rows": None}):
        other = filled(kvstore, [])
        with succeeds("a load", where=f"{form}, {options}"):
            kvstore.load(other, tmp_path / "ck", **options)
        assert_contents(other, contents(store), where=f"{form}, {options}")


@requirement(
    "KV-052", "Equal contents MUST be saved as equal bytes, whatever the order of insertion, shards and chunks were."
)
@examples(15)
@given(st.lists(strategies.ids, max_size=20, unique=True), st.randoms(use_true_random=False), st.integers(1, 9))
def test_deterministic(kvstore: Any, tmp_path_factory: Any, keys: list[int], random: Any, shards: int) -> None:
    folder, buckets = tmp_path_factory.mktemp("kv"), kvstore.Buckets(4)
    save(kvstore, filled(kvstore, keys), folder / "one", buckets=buckets)
    store, mixed = fresh(kvstore, num_shards=shards), list(keys)
    random.shuffle(mixed)
    source = filled(kvstore, keys)
    for key in [*mixed, *mixed[:3]]:
        for table in "ab":
            if key in source.ids(table).tolist():
                store.set_rows(table, source.get_rows(table, ids_of([key])))
    store.set("a", ids_of([77777]), weights_of(store, 1, 1, "a"))
    store.delete("a", ids_of([] if 77777 in keys else [77777]))
    save(kvstore, store, folder / "two", buckets=buckets, chunk_rows=3)
    assert_same_bytes(folder / "two" / FILE, folder / "one" / FILE, where="file")
    # The reference gathers plain tensors; they are the same bytes, in either form.
    for form in ("rows", "separate"):
        save(kvstore, source, folder / form, buckets=buckets, form=form)
        save(reference, filled(reference, keys), folder / f"{form} of the reference", buckets=buckets, form=form)
        where = f"file of the reference, {form}"
        assert_same_bytes(folder / form / FILE, folder / f"{form} of the reference" / FILE, where=where)


@requirement("KV-053", "An empty store, a single row, and a store that was evicted empty MUST save and load.")
def test_small_stores(kvstore: Any, tmp_path: Path) -> None:
    evicted = filled(kvstore)
    evicted.evict(policy=kvstore.EvictionPolicy.count(2**31 - 1))
    stores = {"empty": fresh(kvstore), "single": filled(kvstore, [-5]), "evicted": evicted}
    for name, store in stores.items():
        for form in ("rows", "separate"):
            for buckets in (1, 6):
                path = tmp_path / f"{name}-{form}-{buckets}"
                save(kvstore, store, path, form=form, buckets=kvstore.Buckets(buckets))
                other = fresh(kvstore)
                kvstore.load(other, path)
                assert_contents(other, contents(store), where=path.name)


@requirement(
    "KV-098",
    "A full save and the deltas after it, loaded in order, MUST give the store of the last one: changed rows, new rows "
    "and removed rows; a delta MUST hold nothing else.",
)
@examples(20)
@given(st.lists(st.tuples(strategies.close_batches, strategies.close_batches), min_size=1, max_size=3))
def test_deltas(kvstore: Any, tmp_path_factory: Any, steps: list[tuple[list[int], list[int]]]) -> None:
    folder = tmp_path_factory.mktemp("kv")
    store = filled(kvstore, range(-4, 5), track_changes=True)
    report = save(kvstore, store, folder / "full", buckets=kvstore.Buckets(3))
    other = fresh(kvstore)
    kvstore.load(other, folder / "full")
    for number, (written, gone) in enumerate(steps):
        store.set("a", ids_of(written), weights_of(store, len(written), number, "a"))
        store.delete("a", ids_of(gone))
        report = save(
            kvstore,
            store,
            folder / f"{number}",
            since=report.mark,
            buckets=kvstore.Buckets(3),
            form=["rows", "separate"][number % 2],
        )
        assert_equal(report.row_counts, {"a": len(set(written) - set(gone)), "b": 0}, where="rows of the delta")
        kvstore.load(other, folder / f"{number}")
        assert_contents(other, contents(store), where=f"after delta {number}")


@requirement(
    "KV-099",
    "Files of the previous format version MUST load: version 1, one bucket, assembled here byte by byte.",
)
def test_version_one(kvstore: Any, tmp_path: Path) -> None:
    rows = [
        bytes.fromhex("feffffffffffffff 05000000 02000080 0000803f 00000040 00004040 00008040"),
        bytes.fromhex("0700000000000000 06000000 01000080 000080bf 000000c0 000040c0 000080c0"),
    ]
    layout = '{\\"embedding_dim\\":4,\\"optimizer\\":\\"none\\",\\"state_dtypes\\":{},\\"weight_dtype\\":\\"float32\\"}'
    text = (
        '{"__metadata__":{"format":"pt","kvstore.content":"{\\"layouts\\":{\\"t\\":' + layout + '}}",'
        '"kvstore.version":"1"},"t.ids":{"dtype":"I64","shape":[2],"data_offsets":[0,16]},'
        '"t.rows":{"dtype":"U8","shape":[2,32],"data_offsets":[16,80]}}'
    )
    text += " " * (-len(text) % 8)
    ids = bytes.fromhex("feffffffffffffff 0700000000000000")
    data = len(text).to_bytes(8, "little") + text.encode() + ids + b"".join(rows)
    (tmp_path / "v1.safetensors").write_bytes(data)
    store = kvstore.KVStore({"t": kvstore.RowLayout(4)})
    kvstore.load(store, tmp_path / "v1.safetensors")
    assert_contents(store, {"t": {-2: rows[0], 7: rows[1]}}, where="version 1")


@requirement(
    "KV-100",
    "The schema on disk MUST be the documented one: rows in bucket order, ids ascending inside, counts by bucket.",
)
def test_schema(kvstore: Any, tmp_path: Path) -> None:
    store = store_of(kvstore, kvstore.RowLayout(4))
    keys = [5, -3, 8, 2, 0, 7]
    store.set_rows("t", random_rows(store, keys, 1))
    save(kvstore, store, tmp_path / "ck", buckets=kvstore.Buckets(3))
    raw = (tmp_path / "ck" / FILE).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    metadata = header.pop("__metadata__")
    assert_equal(metadata["kvstore.version"], "4", where="version")
    shapes = {name: (entry["dtype"], entry["shape"]) for name, entry in header.items()}
    assert_equal(shapes, {"t.rows": ("U8", [6, 32]), "t.ids": ("I64", [6]), "t.bucket_counts": ("I64", [3])})

    def data(name: str) -> bytes:
        begin, end = header[name]["data_offsets"]
        return raw[8 + length + begin : 8 + length + end]

    order = [-3, 0, 7, 2, 5, 8]
    assert_same_bytes(data("t.ids"), b"".join(k.to_bytes(8, "little", signed=True) for k in order), where="ids")
    assert_same_bytes(data("t.bucket_counts"), b"".join(k.to_bytes(8, "little") for k in (2, 1, 3)), where="counts")
    assert_same_bytes(data("t.rows"), b"".join(contents(store)["t"][k] for k in order), where="rows")


@requirement("KV-101", "Tables that file and store do not share MUST be refused, unless they are named.")
def test_tables(kvstore: Any, tmp_path: Path) -> None:
    store = filled(kvstore)
    save(kvstore, store, tmp_path / "ck")
    part = store_of(kvstore, {"a": layouts_of(kvstore)["a"]})
    with raises(ConfigError, where="a table too many in the file"):
        kvstore.load(part, tmp_path / "ck")
    kvstore.load(part, tmp_path / "ck", tables=("a",))
    assert_contents(part, {"a": contents(store)["a"]}, where="one table")
    other = store_of(kvstore, layouts_of(kvstore) | {"c": kvstore.RowLayout(4)})
    with raises((ConfigError, MissingKeyError), where="a table that is not in the file"):
        kvstore.load(other, tmp_path / "ck", tables=("a", "c"))
    assert_equal(contents(other), {"a": {}, "b": {}, "c": {}}, where="nothing is loaded")
    narrow = store_of(kvstore, layouts_of(kvstore) | {"a": kvstore.RowLayout(7, torch.float16)})
    with raises(ConfigError, where="another width"):
        kvstore.load(narrow, tmp_path / "ck", weights_only=True)


@requirement(
    "KV-161",
    "A load during which the checkpoint is replaced, at any moment, MUST give the rows of one of the two whole, or a "
    "named error: never parts of both without a word, into empty tables or beside rows.",
)
@pytest.mark.parametrize("beside", [(), (1000,)])
def test_replaced_while_loaded(kvstore: Any, tmp_path: Path, beside: tuple[int, ...]) -> None:
    old, new = filled(kvstore, range(40)), filled(kvstore, range(40))
    # The same ids: rows of one file would fit the ids of the other.
    for table in "ab":
        new.set_rows(table, random_rows(new, new.ids(table).tolist(), 11, table))
    expected, outcomes = {"old": contents(old), "new": contents(new)}, set()
    # Two files, which may be of two moments.
    files = {f"{table}.{name}": at for at, table in ((1, "a"), (2, "b")) for name in ("rows", "ids", "bucket_counts")}
    for rows in (rows for tables in expected.values() for rows in tables.values()):
        rows |= dict.fromkeys(beside, b"")

    def once(nth: int) -> Interruption:
        path, store = tmp_path / f"{nth}" / "ck", fresh(kvstore)
        for table in "ab":
            store.set(table, ids_of(beside), weights_of(store, len(beside), 5, table))
        path.parent.mkdir()
        options = {"buckets": kvstore.Buckets(2), "fqn_to_index_mapping": files}
        save(kvstore, old, path, **options)
        with interrupted(path, nth, functools.partial(save, kvstore, new, path, **options)) as hook:
            try:
                kvstore.load(store, path, chunk_rows=4)
            except TwinproofError as error:
                outcomes.add(error.message)
                return hook
        found = {table: rows | dict.fromkeys(beside, b"") for table, rows in contents(store).items()}
        which = [name for name, rows in expected.items() if rows == found]
        assert_equal(len(which), 1, where=f"moment {nth}: the rows of one of the two")
        outcomes.update(which)
        return hook

    each_moment(once)
    said = "the checkpoint was replaced while it was read; load it again"
    assert_equal(outcomes, {"old", "new", said}, where="outcomes")


@requirement(
    "KV-465",
    "A load whose files are replaced or deleted when it has written a table MUST end with all rows of the files that "
    "it began with, into empty tables and beside rows, in either form.",
)
@pytest.mark.parametrize("form", ["rows", "separate"])
@pytest.mark.parametrize("beside", [(), (1000,)])
def test_one_moment(kvstore: Any, tmp_path: Path, beside: tuple[int, ...], form: str) -> None:
    old, new = filled(kvstore, range(40)), filled(kvstore, range(20, 60))
    ways: dict[str, Callable[[Path], object]] = {
        "replaced": lambda path: save(kvstore, new, path, form=form),
        "deleted": shutil.rmtree,
    }
    for name, way in ways.items():
        path, store = tmp_path / name, fresh(kvstore)
        for table in "ab":
            store.set(table, ids_of(beside), weights_of(store, len(beside), 5, table))
        expected = {table: contents(store)[table] | rows for table, rows in contents(old).items()}
        save(kvstore, old, path, form=form)

        def change(table: str, path: Path = path, way: Any = way) -> None:
            if table == "a":
                way(path)

        with between_tables(change), succeeds("load", where=name):
            kvstore.load(store, path, chunk_rows=4)
        assert_contents(store, expected, where=name)


@requirement(
    "KV-466",
    "A load whose file is written over in place between its readings MUST be refused by name, with the file's path.",
)
def test_written_over_in_place(kvstore: Any, tmp_path: Path) -> None:
    old, new, store = filled(kvstore, range(40)), filled(kvstore, range(40)), filled(kvstore, [1000])
    new.set_rows("b", random_rows(new, range(1, 40), 11, "b"))
    file = tmp_path / "old" / FILE
    save(kvstore, old, file.parent)
    save(kvstore, new, tmp_path / "new")

    def write_over(table: str) -> None:
        if table != "a":
            return
        file.write_bytes((tmp_path / "new" / FILE).read_bytes())
        # Not within one tick of the clock.
        os.utime(file, ns=(0, file.stat().st_mtime_ns + 10**9))

    said = ("while it was read", f"where: {file}")
    with between_tables(write_over), raises(CorruptionError, mentions=said, where="a file that changes"):
        kvstore.load(store, file.parent, chunk_rows=4)


@requirement(
    "KV-472",
    "What is wrong with a file while it is held MUST be told with its path and, of the system, the number; a file that "
    "went before MUST be told as one that was replaced.",
)
def test_held_files_have_names(kvstore: Any, tmp_path: Path) -> None:
    file = tmp_path / "ck" / FILE
    save(kvstore, filled(kvstore, range(4)), file.parent)
    saved = kvstore.SavedRows(file.parent)
    with raises(CorruptionError, mentions=("shorter", f"where: {file}"), where="a torn file"), saved.held(("a",)):
        raise CorruptionError("shorter", got=1, expected=2, where=saved.file_of("a.ids"))
    refused = OSError(errno.EIO, os.strerror(errno.EIO))
    with raises(StorageError, mentions=("EIO", f"where: {file}"), where="a disk") as failure, saved.held(("a",)):
        raise storage_error(refused, "reading", saved.file_of("a.rows"))
    found = failure.outer
    assert_equal((type(found).__name__, getattr(found, "errno", None)), ("StorageError", errno.EIO), where="a disk")
    with raises(CorruptionError, mentions=("where: a row",), where="another place"), saved.held(("a",)):
        raise CorruptionError("wrong", got=1, expected=2, where="a row")
    assert_equal(saved.file_of("a.rows"), str(file), where="the file behind it")
    shutil.rmtree(file.parent)
    said = ("no file", f"where: {file}")
    with raises(CorruptionError, mentions=said, where="a file that is gone"), saved.held(("a",)):
        pass


@requirement(
    "KV-235",
    "Counts of buckets MUST be refused when the files are opened, where they are too few or too many buckets, a count "
    "is negative, or their sum is not the number of rows.",
)
def test_bucket_counts(kvstore: Any, tmp_path: Path) -> None:
    save(kvstore, filled(kvstore, range(20)), tmp_path / "ck", buckets=kvstore.Buckets(2))
    path = tmp_path / "ck" / FILE
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    begin, end = (8 + length + at for at in json.loads(raw[8 : 8 + length])["a.bucket_counts"]["data_offsets"])
    first, second = (int.from_bytes(raw[at : at + 8], "little") for at in (begin, begin + 8))
    for change, other in ((-1, 0), (1, 0), (0, -1), (0, 1), (-first - 1, first + 1)):
        counts = (first + change, second + other)
        path.write_bytes(raw[:begin] + b"".join(n.to_bytes(8, "little", signed=True) for n in counts) + raw[end:])
        said = ("bucket counts", f"got: {sum(counts)};", f"expected: {first + second}")
        with raises(CorruptionError, mentions=said, where=f"{counts}"):
            kvstore.SavedRows(tmp_path / "ck")
    path.write_bytes(raw)
    assert_equal(kvstore.SavedRows(tmp_path / "ck").saved_table("a").row_count, first + second, where="as it was")


@requirement(
    "KV-239",
    "An id in another bucket than its own, before it or behind it, MUST be named as that; and so MUST a version that "
    "is no number from 1 on.",
)
def test_versions_and_places(kvstore: Any, tmp_path: Path) -> None:
    # Bucket 0 has even ids, bucket 1 odd ones.
    save(kvstore, filled(kvstore, range(8)), tmp_path / "ck", buckets=kvstore.Buckets(2))
    path = tmp_path / "ck" / FILE
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    ids, rows = (8 + length + header[f"a.{name}"]["data_offsets"][0] for name in ("ids", "rows"))
    row_bytes = header["a.rows"]["shape"][1]
    stored = [int.from_bytes(raw[ids + 8 * at : ids + 8 * at + 8], "little") for at in range(8)]
    for place in (3, 7):
        # The last id of a bucket becomes the next higher one, which is another bucket's.
        bad = bytearray(raw)
        for at in (ids + 8 * place, rows + row_bytes * place):
            bad[at : at + 8] = (stored[place] + 1).to_bytes(8, "little")
        path.write_bytes(bad)
        other = fresh(kvstore)
        with raises(CorruptionError, mentions=("bucket order",), where=f"row {place} of {stored}"):
            kvstore.load(other, tmp_path / "ck")
        with raises(CorruptionError, mentions=("bucket order",), where=f"row {place} of {stored}"):
            list(kvstore.SavedRows(tmp_path / "ck").chunks("a", 0, 2, 3))
        assert_contents(other, {"a": {}, "b": {}}, where=f"row {place}")
    for text in ("0", "-1", "x", "", "1.0", "²"):
        header["__metadata__"]["kvstore.version"] = text
        said = json.dumps(header).encode()
        path.write_bytes(len(said).to_bytes(8, "little") + said + raw[8 + length :])
        with raises(FormatError, mentions=("version",), where=f"version {text!r}"):
            kvstore.SavedRows(tmp_path / "ck")


def _reads(saved: Any, view: Any, keys: list[int]) -> dict[str, Callable[[], Any]]:
    """Ways of reading saved rows."""
    return {
        "full_tensor": view.full_tensor,
        "narrow": lambda: view.narrow(0, 1, 2),
        "a chunk": lambda: next(view.chunks()),
        "get": lambda: saved.get("t", ids_of(keys)),
        "get_rows": lambda: saved.get_rows("t", ids_of([2])),
        "get_state": lambda: saved.get_state("t", "momentum2", ids_of([3])),
        "metadata": lambda: saved.metadata("t", ids_of([4])),
    }


@requirement(
    "KV-278",
    "Saved rows whose files were replaced or deleted since they were opened MUST be refused in every way of reading "
    "them, and never be those of another id or of the other save; opened again they are what is there.",
)
@pytest.mark.parametrize("form", ["rows", "separate"])
def test_replaced_since(kvstore: Any, tmp_path: Path, form: str) -> None:
    keys, path = [1, 2, 3, 4], tmp_path / "ck"
    first = store_of(kvstore)
    first.set_rows("t", random_rows(first, keys, 1))
    # As many rows of other ids, the same ids with other values, fewer and more rows, and none.
    for others in ([11, 2, 13, 14], keys, keys[1:], [0, *keys], None):
        for is_known in (False, True):
            save(kvstore, first, path, form=form, overwrite=True)
            saved = kvstore.SavedRows(path)
            view = kvstore.KVTensor(saved, ids_of(keys), "weight")
            if is_known:
                assert_bits(view.full_tensor(), first.get("t", ids_of(keys)), where="as it was opened")
            if others is None:
                shutil.rmtree(path)
            else:
                second = store_of(kvstore)
                second.set_rows("t", random_rows(second, others, 5))
                save(kvstore, second, path, form=form, overwrite=True)
                for file in path.iterdir():
                    # Not within one tick of the clock.
                    os.utime(file, ns=(0, file.stat().st_mtime_ns + 10**9))
            where = f"{form}, replaced by {others}, read before {is_known}"
            for name, act in _reads(saved, view, keys).items():
                with raises((CorruptionError, FileNotFoundError), where=f"{where}: {name}"):
                    act()
            if others is not None:
                assert_contents(kvstore.SavedRows(path), contents(second), where=f"{where}: opened again")


@requirement(
    "KV-347",
    "A save MUST refuse options of the writer whose files could not be loaded, before anything is written; what the "
    "others give MUST load.",
)
@pytest.mark.parametrize("form", ["rows", "separate"])
def test_options_of_the_writer(kvstore: Any, tmp_path: Path, form: str) -> None:
    store, path = filled(kvstore), tmp_path / "ck"
    refused: tuple[dict[str, Any], ...] = (
        {"export_dtype": torch.bfloat16},
        {"export_dtype": "float32", "export_keep": ["*"]},
        {"enable_consolidation": False},
    )
    for options in refused:
        with raises(ConfigError, mentions=[next(iter(options))], where=f"{form}, {options}"):
            save(kvstore, store, path, form=form, chunk_rows=2, **options)
        assert_equal((path.exists(), store.stats().snapshot_count), (False, 0), where=f"{form}, after {options}")
    taken: tuple[dict[str, Any], ...] = (
        {"export_dtype": None, "enable_consolidation": True, "thread_count": 2},
        {"max_shard_size": 200},
        {"single_file": True, "page_align": True},
        {"checksums": True, "write_mode": "sequential", "block_bytes": 64},
    )
    for options in taken:
        other = fresh(kvstore)
        save(kvstore, store, path, form=form, chunk_rows=2, **options)
        kvstore.load(other, path)
        assert_contents(other, contents(store), where=f"{form}, {options}")


@requirement(
    "KV-351",
    "Saved rows that are asked for positions or buckets that there are not, for the rows of a table that was not "
    "saved, or in chunks that are none, MUST refuse that by name when they are asked, and MUST give no other bytes.",
)
def test_ranges_of_saved_rows(kvstore: Any, tmp_path: Path) -> None:
    keys, buckets = [9, 3, 1, 4, 12, 7], kvstore.Buckets(3)
    store = store_of(kvstore)
    store.set_rows("t", random_rows(store, keys, 1))
    save(kvstore, store, tmp_path / "ck", buckets=buckets)
    saved = kvstore.SavedRows(tmp_path / "ck")
    order = [3, 9, 12, 1, 4, 7]
    for start, length in ((0, 6), (2, 3), (6, 0)):
        assert_equal(saved.read_ids("t", start, length).tolist(), order[start : start + length], where="positions")
        found = [key for ids, _ in saved.between("t", start, start + length, 2) for key in ids.tolist()]
        assert_equal(found, order[start : start + length], where="positions in chunks")
    assert_equal([key for ids, _ in saved.chunks("t", 1, 3, 2) for key in ids.tolist()], [1, 4, 7], where="buckets")
    outside: list[tuple[Any, Any]] = [(-1, 2), (0, 7), (6, 1), (2, -1), (-100, 3), (0.5, 1), (True, 1), ("0", 1)]
    for pair in outside:
        for verb in (saved.read_ids, saved.rows):
            with raises((ShapeError, ConfigError), mentions=[str(pair[0])], where=f"{verb.__name__} of {pair}"):
                verb("t", *pair)
    for first, behind in ((-1, 2), (0, 7), (7, 7), (2, 1), (0, 1.5)):
        with raises((ShapeError, ConfigError), where=f"between {first} and {behind}"):
            saved.between("t", first, behind, 2)
    for begin, end in ((-1, 2), (0, 4), (2, 1), (3, 9), (0, True), ("0", 1)):
        with raises(ConfigError, mentions=["where: begin, end", str(begin)], where=f"buckets {begin} to {end}"):
            saved.chunks("t", begin, end, 2)
    for chunk_rows in (0, -1, 1.5, True):
        with raises(ConfigError, mentions=["where: chunk_rows", str(chunk_rows)], where=f"chunks of {chunk_rows}"):
            saved.chunks("t", 0, 3, chunk_rows)
    others = {
        "read_ids": lambda name: saved.read_ids(name, 0, 1),
        "rows": lambda name: saved.rows(name, 0, 1),
        "chunks": lambda name: saved.chunks(name, 0, 1, 1),
        "deleted": saved.deleted,
        "file_of": saved.file_of,
    }
    for verb_name, call in others.items():
        with raises(MissingKeyError, mentions=["got: u"], where=f"{verb_name} of another table"):
            call("u")


@requirement(
    "KV-361",
    "A load with verify_checksums MUST refuse files whose bytes are not those that were summed, also where the rows "
    "would pass every other check, and a save without sums, before a row is written; without it neither is looked at.",
)
@pytest.mark.parametrize("form", ["rows", "separate"])
def test_checksums(kvstore: Any, tmp_path: Path, form: str) -> None:
    store, other = filled(kvstore), fresh(kvstore)
    save(kvstore, store, tmp_path / "plain", form=form)
    save(kvstore, store, tmp_path / "ck", form=form, checksums=True)
    other.set_rows("a", random_rows(other, [999], 1, "a"))
    before = contents(other)
    with raises(ConfigError, mentions=["checksums", "where: "], where="a save without sums"):
        kvstore.load(other, tmp_path / "plain", verify_checksums=True)
    assert_contents(other, before, where="after a save without sums")
    with succeeds("load", where="files as they were saved"):
        kvstore.load(fresh(kvstore), tmp_path / "ck", verify_checksums=True)
    raw = bytearray((tmp_path / "ck" / FILE).read_bytes())
    length = int.from_bytes(raw[:8], "little")
    name = "b.rows" if form == "rows" else "b.weight"
    end = json.loads(raw[8 : 8 + length])[name]["data_offsets"][1]
    # In the last row's weight or its state, of which no other check knows anything.
    raw[8 + length + end - 1] ^= 1
    (tmp_path / "ck" / FILE).write_bytes(raw)
    with raises(CorruptionError, mentions=[name, "where: "], where="a bit of a weight or a state"):
        kvstore.load(other, tmp_path / "ck", verify_checksums=True)
    assert_contents(other, before, where="after a flipped bit")
    with succeeds("load", where="sums that nobody asks for"):
        kvstore.load(fresh(kvstore), tmp_path / "ck")


@requirement(
    "KV-491",
    "A load for which the process may not hold all its files open, or open one of them, MUST be a StorageError that "
    "names the file, the process's limit and, where they are opened, how many it holds; the store keeps its rows, and "
    "the next load succeeds.",
)
def test_too_few_descriptors(kvstore: Any, tmp_path: Path) -> None:
    folder, keys = tmp_path / "ck", range(10)
    # A file for each tensor.
    save(kvstore, filled(kvstore, keys), folder, max_shard_size=1)
    files = sorted(str(file) for file in folder.glob("*.safetensors"))
    saved = kvstore.SavedRows(folder)
    for left_count in (0, 2):
        for store in (fresh(kvstore), filled(kvstore, [1000])):
            before = contents(store)
            said = (f"holding {len(files)} files",) if left_count == 2 else ()
            said = ("EMFILE", "ulimit -n", f"where: {folder}", *said)
            with raises(StorageError, mentions=said, where=f"{left_count} descriptors"), descriptors_left(left_count):
                kvstore.load(store, folder)
            assert_contents(store, before, where=f"behind a load with {left_count} descriptors")
            with succeeds("the next load", where=f"behind one with {left_count} descriptors"):
                kvstore.load(store, folder)
    file = saved.file_of("a.rows")
    with raises(StorageError, mentions=("EMFILE", f"where: {file}"), where="a held file"), saved.held(("a",)):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), saved.file_of("a.rows"))


@requirement(
    "KV-488",
    "A version of more digits than Python reads, and content or a layout that is nested deeper than it reads, MUST be "
    "refused as FormatError with a short excerpt; a version of nine digits MUST be a newer one.",
)
def test_absurd_content(kvstore: Any, tmp_path: Path) -> None:
    save(kvstore, filled(kvstore, range(4)), tmp_path / "ck")
    path = tmp_path / "ck" / FILE
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    deep = "[" * 100_000 + "]" * 100_000
    absurd: dict[str, tuple[type[Exception], dict[str, str]]] = {
        "a version of 5,000 digits": (FormatError, {"kvstore.version": "9" * 5000}),
        "a version of ten digits": (FormatError, {"kvstore.version": "1" + "0" * 9}),
        "a version of nine digits": (VersionError, {"kvstore.version": "9" * 9}),
        "content that is nested": (FormatError, {"kvstore.content": deep}),
        "layouts that are nested": (FormatError, {"kvstore.content": f'{{"layouts":{{"a":{deep}}}}}'}),
    }
    for name, (kind, entries) in absurd.items():
        text = json.dumps(header | {"__metadata__": header["__metadata__"] | entries}).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])
        with raises(kind, mentions=(f"{tmp_path}",), where=name) as failure:
            kvstore.SavedRows(tmp_path / "ck")
        assert_le(len(str(failure.outer)), 1000, where=f"letters of the error of {name}")
    with raises(FormatError, mentions=("row layout",), where="a layout's own text"):
        kvstore.RowLayout.from_json(deep)
