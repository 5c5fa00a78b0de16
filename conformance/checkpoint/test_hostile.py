"""G. Hostile input: every way to be wrong has its own error, soon, and within the memory that the file deserves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.checkpoint.hostile import ACCEPTED, FILE, AcceptedCase, HostileCase, entry, pack
from conformance.checkpoint.hostile_folders import HOSTILE_INDEXES, HOSTILE_SETS, INDEX
from conformance.checkpoint.hostile_headers import HOSTILE_FILES
from conformance.checkpoint.hostile_reading import bounded, consolidate_into, library_verdict, values_of
from conformance.checkpoint.support import load
from conformance.harness import Mismatch, assert_equal, examples, raises, requirement
from refimpl.errors import FormatError, TwinproofError, UnsupportedError


def _cases(cases: tuple[Any, ...]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


def _folder(case: HostileCase, tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    case.build(folder)
    return folder


def _read(checkpoint: Any, folder: Path) -> Any:
    return checkpoint.HuggingFaceStorageReader(folder).read_metadata()


@requirement("CKPT-400", "A malformed file MUST be refused by load_file with an error that names it, within bounds.")
@_cases(HOSTILE_FILES)
def test_load_file_refuses(checkpoint: Any, tmp_path: Path, case: HostileCase) -> None:
    folder = _folder(case, tmp_path)
    with bounded(folder, case.name), raises(case.expect, mentions=case.mentions, where=case.name):
        checkpoint.load_file(folder / FILE)


@requirement("CKPT-401", "A folder with a malformed file MUST be refused when its metadata is read, within bounds.")
@_cases(HOSTILE_FILES)
def test_reader_refuses_files(checkpoint: Any, tmp_path: Path, case: HostileCase) -> None:
    folder = _folder(case, tmp_path)
    with bounded(folder, case.name), raises(case.expect, mentions=case.mentions, where=case.name):
        _read(checkpoint, folder)


@requirement(
    "CKPT-402", "An index that is malformed, contradicts its files or leads out of its folder MUST be refused by name."
)
@_cases(HOSTILE_INDEXES)
def test_reader_refuses_indexes(checkpoint: Any, tmp_path: Path, case: HostileCase) -> None:
    folder = _folder(case, tmp_path)
    with bounded(folder, case.name), raises(case.expect, mentions=case.mentions, where=case.name):
        _read(checkpoint, folder)


@requirement(
    "CKPT-403", "Shards with gaps, overlaps or contradictions MUST be refused by tensor, never filled with zeros."
)
@_cases(HOSTILE_SETS)
def test_reader_refuses_sets(checkpoint: Any, tmp_path: Path, case: HostileCase) -> None:
    folder = _folder(case, tmp_path)
    with bounded(folder, case.name), raises(case.expect, mentions=case.mentions, where=case.name):
        _read(checkpoint, folder)


@requirement("CKPT-404", "Consolidation MUST refuse every folder that the reader refuses, and leave nothing behind.")
@_cases((*HOSTILE_FILES, *HOSTILE_SETS, *HOSTILE_INDEXES))
def test_consolidation_refuses(checkpoint: Any, tmp_path: Path, case: HostileCase) -> None:
    folder = _folder(case, tmp_path)
    output = tmp_path / "work" / "out"
    output.parent.mkdir()
    refusal = raises(case.expect, mentions=case.mentions, where=case.name)
    with consolidate_into(output), bounded(folder, case.name), refusal:
        checkpoint.consolidate_safetensors_files(folder, output)


@requirement(
    "CKPT-405", "An error found while loading MUST reach the caller of dcp.load before any target has changed."
)
@pytest.mark.parametrize("wrong", ["cut", "listed but missing", "shape"])
def test_targets_are_untouched(checkpoint: Any, tmp_path: Path, wrong: str) -> None:
    good, b_shape = pack("{" + entry() + "}", b"xy"), "[3]" if wrong == "shape" else "[2]"
    other = pack("{" + entry("b", shape=b_shape, offsets="[0,3]" if wrong == "shape" else "[0,2]") + "}", b"xyz")
    (tmp_path / "m1.safetensors").write_bytes(good)
    if wrong != "listed but missing":
        (tmp_path / "m2.safetensors").write_bytes(other if wrong == "shape" else other[:-3])
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "m1.safetensors", "b": "m2.safetensors"}}))
    targets = {name: torch.full((2,), 85, dtype=torch.uint8) for name in "ab"}
    # torch turns an error of read_metadata into an AssertionError with the same message.
    named = "b" if wrong == "shape" else "m2.safetensors"
    with raises((TwinproofError, ValueError, AssertionError), mentions=(named,), where=wrong):
        load(checkpoint, targets, tmp_path)
    assert_equal({name: tensor.tolist() for name, tensor in targets.items()}, {"a": [85, 85], "b": [85, 85]})


_SMALL = pack('{"__metadata__":{"format":"pt"},' + entry() + "," + entry("b", '"F16"', "[1,1]", "[2,4]") + "}", b"xyzw")


@requirement("CKPT-406", "A file cut at any byte, or with a byte appended, MUST be refused.")
def test_every_truncation(checkpoint: Any, tmp_path: Path) -> None:
    path = tmp_path / FILE
    for size in [*range(len(_SMALL)), len(_SMALL) + 1]:
        path.write_bytes((_SMALL + b"\0")[:size])
        where = f"{size} of {len(_SMALL)} bytes"
        with raises(FormatError, mentions=(FILE,), where=where):
            checkpoint.load_file(path)
        with raises(FormatError, mentions=(FILE,), where=where):
            _read(checkpoint, tmp_path)
    path.write_bytes(_SMALL)
    assert_equal(values_of(checkpoint.load_file(path)), library_verdict(_SMALL))


_FIRST = """{"__metadata__":{"format":"pt","k":"v"},
"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},
"b":{"dtype":"F16","shape":[1,2],"data_offsets":[2,6]},
"e":{"dtype":"I32","shape":[0,3],"data_offsets":[6,6]},
"s":{"dtype":"F64","shape":[],"data_offsets":[6,14],"x":[1,-2.5,"\\u0041"]}}"""
_SECOND = """{"aa":{"data_offsets":[4,8],"shape":[2,1],"dtype":"BF16"},
"ab":{"dtype":"C64","shape":[0],"data_offsets":[0,0]},
"\\u00e9\\n":{"dtype":"BOOL","shape":[4],"data_offsets":[0,4]}}  """
_BASES = ((_FIRST.encode(), bytes(range(14))), (_SECOND.encode(), b"\x01\x00\x01\x01wxyz"))
_BYTE = st.one_of(st.sampled_from(sorted(set(b'{}[]",:0123456789-.eEuUIFB \\nabs\x00\xff'))), st.integers(0, 255))
_EDIT = st.tuples(st.sampled_from(["replace", "flip", "insert", "delete", "swap"]), st.integers(0, 400), _BYTE)


def _edited(header: bytes, edits: list[tuple[str, int, int]]) -> bytes:
    text = bytearray(header)
    for kind, place, value in edits:
        at = place % len(text)
        if kind == "replace":
            text[at] = value
        elif kind == "flip":
            text[at] ^= 1 << value % 8
        elif kind == "insert":
            text.insert(at, value)
        elif kind == "delete" and len(text) > 1:
            del text[at]
        elif kind == "swap":
            text[at], text[at - 1] = text[at - 1], text[at]
    return bytes(text)


def _has_duplicates(header: bytes) -> bool:
    found: list[bool] = []

    def note(pairs: list[tuple[str, Any]]) -> None:
        found.append(len({name for name, _ in pairs}) < len(pairs))

    json.loads(header, object_pairs_hook=note)
    return any(found)


def _compare(checkpoint: Any, folder: Path, header: bytes, data: bytes) -> None:
    """Both refuse, or both give the same tensors; only a key that stands twice may be refused by ours alone."""
    content = pack(header, data)
    (folder / FILE).write_bytes(content)
    theirs = library_verdict(content)
    where = f"header {header!r}"
    if theirs is None:
        with raises(FormatError, mentions=(FILE,), where=where):
            _read(checkpoint, folder)
        return
    if _has_duplicates(header):
        with raises(FormatError, where=where):
            _read(checkpoint, folder)
        return
    try:
        names = set(_read(checkpoint, folder).state_dict_metadata)
        ours = values_of(checkpoint.load_file(folder / FILE))
    except UnsupportedError:
        # Six-bit floats have no dtype in torch; nothing else may stop a load.
        assert_equal(any(dtype.startswith("F6") for dtype, _, _ in theirs.values()), True, where=where)
        return
    except TwinproofError as error:
        raise Mismatch("refused what the library reads", got=str(error), expected=theirs, where=where) from error
    assert_equal(names, set(theirs), where=where)
    assert_equal(ours, theirs, where=where)


@requirement(
    "CKPT-407", "On damaged headers the verdict MUST be the safetensors library's, but for keys that stand twice."
)
@given(base=st.integers(0, len(_BASES) - 1), edits=st.lists(_EDIT, min_size=1, max_size=4))
@examples(600)
def test_random_damage(
    checkpoint: Any, tmp_path_factory: pytest.TempPathFactory, base: int, edits: list[tuple[str, int, int]]
) -> None:
    folder = tmp_path_factory.getbasetemp() / "damage"
    folder.mkdir(exist_ok=True)
    header, data = _BASES[base]
    _compare(checkpoint, folder, _edited(header, edits), data)


def _extra(value: str) -> str:
    return '{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2],"x":' + value + "}}"


@requirement(
    "CKPT-408", "Values that a reader ignores MUST neither be refused nor pass where the library does otherwise."
)
@pytest.mark.parametrize(
    "value",
    [
        "-1", "-0", "-2.5", "1" * 25, "1e308", "true", '"-"', '"\x7f"', "[" * 100 + "]" * 100, '{"dtype":"U8"}',
        "1e999", "1" * 500, "NaN", "-Infinity", "01", ".5", "1.", "+1", "0x1", '"\\ud800"', '"\\ud83d\\u0041"', "[1,]",
        "[" * 200 + "]" * 200, '"\\q"', "'a'", '{"k":1,"k":2}',
    ],
)  # fmt: skip
def test_ignored_values(checkpoint: Any, tmp_path: Path, value: str) -> None:
    _compare(checkpoint, tmp_path, _extra(value).encode(), b"xy")


@requirement("CKPT-409", "Odd but valid files MUST be read, with the tensors that the safetensors library finds.")
@_cases(ACCEPTED)
def test_odd_files(checkpoint: Any, tmp_path: Path, case: AcceptedCase) -> None:
    path = tmp_path / FILE
    path.write_bytes(case.content)
    assert_equal(library_verdict(case.content), case.tensors, where=f"{case.name}: the library")
    assert_equal(values_of(checkpoint.load_file(path)), case.tensors, where=case.name)
    found = _read(checkpoint, tmp_path).state_dict_metadata
    assert_equal({name: tuple(item.size) for name, item in found.items()}, {n: t[1] for n, t in case.tensors.items()})


@requirement(
    "CKPT-410", "A tensor that torch cannot hold MUST NOT stop the other tensors of its file from being loaded."
)
@pytest.mark.parametrize(("dtype", "shape"), [("F6_E2M3", "[4]"), ("F6_E3M2", "[2,2]"), ("F4", "[2,3]")])
def test_foreign_tensors(checkpoint: Any, tmp_path: Path, dtype: str, shape: str) -> None:
    foreign = entry("foreign", f'"{dtype}"', shape, "[2,5]")
    content = pack("{" + entry() + "," + foreign + "}", b"xyzzz")
    (tmp_path / FILE).write_bytes(content)
    assert_equal(library_verdict(content) is not None, True, where="the library reads it")
    targets = {"a": torch.zeros(2, dtype=torch.uint8)}
    load(checkpoint, targets, tmp_path)
    assert_equal(bytes(targets["a"].tolist()), b"xy")
    with raises(UnsupportedError, mentions=("foreign",)):
        checkpoint.load_file(tmp_path / FILE)


@requirement("CKPT-411", "A reader MUST accept links inside the folder and the blob links of the hub's cache.")
def test_links_that_stay(checkpoint: Any, tmp_path: Path) -> None:
    cache = tmp_path / "models--x"
    (cache / "blobs").mkdir(parents=True)
    (cache / "snapshots" / "rev").mkdir(parents=True)
    (cache / "blobs" / "0123abcd").write_bytes(pack("{" + entry() + "}", b"xy"))
    (cache / "blobs" / "4567cdef").write_text(json.dumps({"weight_map": {"a": FILE}}))
    snapshot = cache / "snapshots" / "rev"
    (snapshot / FILE).symlink_to("../../blobs/0123abcd")
    (snapshot / INDEX).symlink_to("../../blobs/4567cdef")
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "real.safetensors").write_bytes(pack("{" + entry() + "}", b"xy"))
    (plain / FILE).symlink_to("real.safetensors")
    (plain / INDEX).write_text(json.dumps({"weight_map": {"a": FILE}}))
    for folder in (snapshot, plain):
        targets = {"a": torch.zeros(2, dtype=torch.uint8)}
        load(checkpoint, targets, folder)
        assert_equal(bytes(targets["a"].tolist()), b"xy", where=folder.name)


@requirement("CKPT-412", "Files that the index does not list MUST NOT be opened, however broken they are.")
def test_unlisted_files_are_ignored(checkpoint: Any, tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(pack("{" + entry() + "}", b"xy"))
    (tmp_path / "stale.safetensors").write_bytes(pack("{" + entry() + "}", b"XY"))
    (tmp_path / "broken.safetensors").write_bytes(b"\xff" * 20)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": FILE}}))
    targets = {"a": torch.zeros(2, dtype=torch.uint8)}
    load(checkpoint, targets, tmp_path)
    assert_equal(bytes(targets["a"].tolist()), b"xy")
