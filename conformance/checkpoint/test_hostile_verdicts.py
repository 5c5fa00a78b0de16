"""Damaged headers: the verdict is that of the safetensors library, and so are the tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.checkpoint.hostile import FILE, pack
from conformance.checkpoint.hostile_reading import library_verdict, read_metadata, values_of
from conformance.harness import Mismatch, assert_equal, examples, raises, requirement
from twinproof.errors import FormatError, UnsupportedError

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
            read_metadata(checkpoint, folder)
        return
    if _has_duplicates(header):
        with raises(FormatError, where=where):
            read_metadata(checkpoint, folder)
        return
    try:
        names = set(read_metadata(checkpoint, folder).state_dict_metadata)
        ours = values_of(checkpoint.load_file(folder / FILE))
    except UnsupportedError:
        # Six-bit floats have no dtype in torch; nothing else may stop a load.
        assert_equal(any(dtype.startswith("F6") for dtype, _, _ in theirs.values()), True, where=where)
        return
    except Exception as error:
        got = f"{type(error).__name__}: {error}"
        raise Mismatch("fails on what the library reads", got=got, expected=theirs, where=where) from error
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


_VALID = (
    "-1", "-0", "-2.5", "1" * 25, "1e308", "true", '"-"', '"\x7f"', "[" * 100 + "]" * 100, '{"dtype":"U8"}',
)  # fmt: skip
# Not JSON, beyond what the library holds or nests, or with a key that stands twice.
_INVALID = (
    "1e999", "1" * 500, "NaN", "-Infinity", "01", ".5", "1.", "+1", "0x1", '"\\ud800"', '"\\ud83d\\u0041"', "[1,]",
    "[" * 200 + "]" * 200, '"\\q"', "'a'", '{"k":1,"k":2}',
)  # fmt: skip


@requirement(
    "CKPT-408", "Values that a reader ignores MUST neither be refused nor pass where the library does otherwise."
)
@pytest.mark.parametrize(("value", "valid"), [*((v, True) for v in _VALID), *((v, False) for v in _INVALID)])
def test_ignored_values(checkpoint: Any, tmp_path: Path, value: str, valid: bool) -> None:
    _compare(checkpoint, tmp_path, _extra(value).encode(), b"xy")


# In the order of their data; empty tensors lie at its beginning, at its end, and several at one border.
_ENTRIES = (
    '"e":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}',
    '"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}',
    '"f":{"dtype":"I64","shape":[0,3],"data_offsets":[2,2]}',
    '"g":{"dtype":"BF16","shape":[2,0],"data_offsets":[2,2]}',
    '"b":{"dtype":"F16","shape":[1,2],"data_offsets":[2,6]}',
    '"h":{"dtype":"BOOL","shape":[0],"data_offsets":[6,6]}',
)


@requirement(
    "CKPT-624",
    "A header MUST be read alike in whatever order it lists its tensors, empty ones beside the border where they lie "
    "among them.",
)
@given(entries=st.permutations([*_ENTRIES, '"__metadata__":{"k":"v"}']))
@examples(40)
def test_any_order(checkpoint: Any, tmp_path_factory: pytest.TempPathFactory, entries: list[str]) -> None:
    folder = tmp_path_factory.getbasetemp() / "orders"
    folder.mkdir(exist_ok=True)
    _compare(checkpoint, folder, ("{" + ",".join(entries) + "}").encode(), b"\x01\x02wxyz")
