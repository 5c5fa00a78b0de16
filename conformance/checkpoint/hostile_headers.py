"""Single files that are wrong: length, JSON, entries, offsets, and things that are no regular file."""

from __future__ import annotations

import os
from pathlib import Path

from conformance.checkpoint.hostile import FILE, HEADER_BYTES_MAX, HostileCase, entry, in_file, pack
from twinproof.errors import FormatError

__all__ = ["HOSTILE_FILES"]

_GOOD = "{" + entry() + "}"
_DATA = b"xy"


def _json(name: str, header: str | bytes, *mentions: str, data: bytes = _DATA) -> HostileCase:
    return in_file(name, pack(header, data), *mentions)


def _entry(name: str, data: bytes = _DATA, **fields: str) -> HostileCase:
    return in_file(name, pack("{" + entry(**fields) + "}", data), "'a'")


def _raw(name: str, fields: str) -> HostileCase:
    """An entry of tensor ``a`` that is this JSON text."""
    return in_file(name, pack(f'{{"a":{fields}}}', _DATA), "'a'")


def _sparse_header(folder: Path) -> None:
    # The file really is as long as its header claims, which must not make a reader allocate it.
    with open(folder / FILE, "wb") as file:
        file.write(pack("{", length=HEADER_BYTES_MAX + 1))
        file.truncate(8 + HEADER_BYTES_MAX + 1)


def _special(name: str, kind: str) -> HostileCase:
    def build(folder: Path) -> None:
        path = folder / FILE
        if kind == "fifo":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
        else:
            path.symlink_to(kind)

    return HostileCase(name, build, FormatError, (FILE,))


_LENGTHS = (
    in_file("no_bytes", b""),
    in_file("seven_bytes", b"\x02\0\0\0\0\0\0"),
    in_file("length_only", pack("", length=2)),
    in_file("length_zero", pack(b"", _DATA)),
    in_file("length_one", pack(_GOOD, _DATA, length=1)),
    in_file("length_one_beyond_the_file", pack(_GOOD, length=len(_GOOD) + 1)),
    in_file("length_cuts_the_json", pack(_GOOD, _DATA, length=len(_GOOD) - 1)),
    in_file("length_reaches_into_the_data", pack(_GOOD, _DATA, length=len(_GOOD) + 1)),
    in_file("length_at_the_cap", pack(_GOOD, _DATA, length=HEADER_BYTES_MAX)),
    in_file("length_above_the_cap", pack(_GOOD, _DATA, length=HEADER_BYTES_MAX + 1)),
    in_file("length_2_to_the_32", pack(_GOOD, _DATA, length=1 << 32)),
    in_file("length_2_to_the_63", pack(_GOOD, _DATA, length=1 << 63)),
    in_file("length_2_to_the_64_minus_1", pack(_GOOD, _DATA, length=(1 << 64) - 1)),
    in_file("length_wraps_to_the_right_one", pack(_GOOD, _DATA, length=(1 << 64) - 8)),
    in_file("length_big_endian", len(_GOOD).to_bytes(8, "big") + _GOOD.encode() + _DATA),
    HostileCase("header_above_the_cap_and_really_there", _sparse_header, FormatError, (FILE,)),
    in_file("not_safetensors_at_all", b"PK\x03\x04" + b"\0" * 60),
)

_JSON = (
    _json("not_utf8", b'{"\xe9":' + entry().partition(":")[2].encode() + b"}"),
    _json("overlong_utf8", b'{"\xc0\x80":' + entry().partition(":")[2].encode() + b"}"),
    _json("surrogate_as_utf8", b'{"\xed\xa0\x80":' + entry().partition(":")[2].encode() + b"}"),
    _json("utf16", _GOOD.encode("utf-16-le")),
    _json("byte_order_mark", b"\xef\xbb\xbf" + _GOOD.encode()),
    _json("nul_padding", _GOOD.encode() + b"\0" * 8),
    _json("no_break_space_padding", _GOOD + "\u00a0"),
    _json("trailing_comma", "{" + entry() + ",}"),
    _json("trailing_comma_behind_the_metadata", '{"__metadata__":{"k":"v"}, }', data=b""),
    _json("missing_comma", "{" + entry() + entry("b") + "}"),
    _json("only_spaces", " " * 16),
    _json("array_root", "[]", data=b""),
    _json("string_root", '"a"', data=b""),
    _json("number_root", "0", data=b""),
    _json("null_root", "null", data=b""),
    _json("two_documents", _GOOD + "{}"),
    _json("unterminated_string", '{"a'),
    _json("unterminated_object", _GOOD[:-1]),
    _json("single_quotes", _GOOD.replace('"', "'")),
    _json("comment", "{/**/" + entry() + "}"),
    _json("raw_newline_in_a_name", "{" + entry(name="a\nb") + "}"),
    _json("bad_escape", "{" + entry(name="\\x41") + "}"),
    _json("lone_surrogate_in_a_name", "{" + entry(name="\\ud800") + "}"),
    _json("lone_surrogate_in_the_metadata", '{"__metadata__":{"k":"\\udfff"},' + entry() + "}"),
    _json("ten_thousand_open_brackets", '{"a":' + "[" * 10_000),
    _json("nesting_ten_thousand_deep", '{"a":' + "[" * 10_000 + "]" * 10_000 + "}"),
    _json("bare_word", "{" + entry(offsets="[0,two]") + "}"),
    _json("polyglot_behind_an_empty_header", "{}", data=b"PK\x03\x04"),
)

_DUPLICATES = (
    _json("tensor_named_twice", "{" + entry() + "," + entry() + "}"),
    _json("tensor_named_twice_by_escape", "{" + entry() + "," + entry(name="\\u0061") + "}"),
    _json("field_given_twice", '{"a":{"dtype":"U8","dtype":"U8","shape":[2],"data_offsets":[0,2]}}'),
    _json("metadata_given_twice", '{"__metadata__":{},"__metadata__":{},' + entry() + "}"),
    _json("metadata_key_given_twice", '{"__metadata__":{"k":"1","k":"2"},' + entry() + "}"),
    in_file(
        "later_metadata_key_given_twice",
        pack('{"__metadata__":{"j":"0","k":"1","k":"2"},' + entry() + "}", _DATA),
        "a key stands twice; got: k;",
    ),
)

_METADATA = (
    _json("metadata_is_a_list", '{"__metadata__":["format"],' + entry() + "}"),
    _json("metadata_is_a_string", '{"__metadata__":"pt",' + entry() + "}"),
    _json("metadata_is_false", '{"__metadata__":false,' + entry() + "}"),
    _json("metadata_is_an_empty_list", '{"__metadata__":[],' + entry() + "}"),
    _json("metadata_value_is_a_number", '{"__metadata__":{"step":1},' + entry() + "}"),
    _json("metadata_value_is_null", '{"__metadata__":{"step":null},' + entry() + "}"),
    _json("metadata_value_is_an_object", '{"__metadata__":{"a":{"b":"c"}},' + entry() + "}"),
    _json("metadata_looks_like_a_tensor", "{" + entry("__metadata__") + "}"),
)

_FIELDS = (
    _raw("entry_is_null", "null"),
    _raw("entry_is_a_string", '"U8"'),
    _raw("entry_is_a_list", '["U8",[2],[0,2]]'),
    _raw("entry_is_empty", "{}"),
    _raw("no_dtype", '{"shape":[2],"data_offsets":[0,2]}'),
    _raw("no_shape", '{"dtype":"U8","data_offsets":[0,2]}'),
    _raw("no_offsets", '{"dtype":"U8","shape":[2]}'),
    _entry("dtype_unknown", dtype='"F31"'),
    _entry("dtype_in_lower_case", dtype='"u8"'),
    _entry("dtype_with_a_space", dtype='"U8 "'),
    _entry("dtype_is_a_number", dtype="8"),
    _entry("dtype_is_null", dtype="null"),
    _entry("dtype_is_a_list", dtype='["U8"]'),
    _entry("shape_is_a_number", shape="2"),
    _entry("shape_is_null", shape="null"),
    _entry("shape_is_a_string", shape='"2"'),
    _entry("shape_is_an_object", shape='{"0":2}'),
    _entry("dimension_is_a_float", shape="[2.0]"),
    _entry("dimension_with_an_exponent", shape="[2e0]"),
    _entry("dimension_is_a_string", shape='["2"]'),
    _entry("dimension_is_true", shape="[2,true]"),
    _entry("dimension_is_null", shape="[2,null]"),
    _entry("dimension_is_a_list", shape="[[2]]"),
    in_file("dimension_negative", pack("{" + entry(shape="[-2]") + "}", _DATA)),
    in_file("dimensions_negative_twice", pack("{" + entry(shape="[-1,-2]") + "}", _DATA)),
    _entry("dimension_2_to_the_63", shape="[9223372036854775808]"),
    _entry("dimension_2_to_the_64_plus_2", shape="[18446744073709551618]"),
    in_file("dimension_of_5000_digits", pack("{" + entry(shape="[" + "1" * 5000 + "]") + "}", _DATA)),
    in_file("dimension_is_nan", pack("{" + entry(shape="[NaN]") + "}", _DATA)),
    in_file("dimension_is_infinite", pack("{" + entry(shape="[Infinity]") + "}", _DATA)),
    _entry("element_count_overflows_to_zero", shape="[4294967296,4294967296]", offsets="[0,0]", data=b""),
    _entry("element_count_overflows_to_two", shape="[9223372036854775809,2]"),
    _entry("byte_count_overflows", dtype='"F64"', shape="[2305843009213693952]", offsets="[0,0]", data=b""),
    _entry("nothing_times_far_too_much", shape="[0,4611686018427387904,3]", offsets="[0,0]", data=b""),
)

_OFFSETS = (
    _entry("one_offset", offsets="[2]"),
    _entry("three_offsets", offsets="[0,2,2]"),
    _entry("no_offset", offsets="[]"),
    _entry("offsets_are_null", offsets="null"),
    _entry("offsets_are_a_number", offsets="2"),
    _entry("offsets_are_a_string", offsets='"02"'),
    _entry("offsets_are_an_object", offsets='{"0":0,"1":2}'),
    _entry("offset_is_a_float", offsets="[0.0,2.0]"),
    _entry("offset_is_a_string", offsets='["0","2"]'),
    _entry("offset_is_true", shape="[1]", offsets="[false,true]", data=b"x"),
    in_file("offset_negative", pack("{" + entry(offsets="[-2,0]") + "}", _DATA)),
    in_file("offset_is_minus_zero", pack("{" + entry(offsets="[-0,2]") + "}", _DATA)),
    _entry("offsets_reversed", offsets="[2,0]"),
    _entry("offsets_far_beyond_the_file", shape="[1000000]", offsets="[0,1000000]"),
    _entry("offsets_near_2_to_the_64", offsets="[18446744073709551614,18446744073709551616]"),
    _entry("range_smaller_than_the_shape", shape="[3]"),
    _entry("range_larger_than_the_shape", shape="[1]"),
    _entry("scalar_with_two_bytes", shape="[]"),
    _entry("hole_before_the_first_tensor", shape="[1]", offsets="[1,2]"),
    _json("hole_between_tensors", "{" + entry() + "," + entry("b", offsets="[3,5]") + "}", "'b'", data=b"xyzwv"),
    _json("tensors_overlap", "{" + entry() + "," + entry("b", offsets="[1,3]") + "}", "'b'", data=b"xyz"),
    _json("tensors_share_all_bytes", "{" + entry() + "," + entry("b") + "}"),
    _json("empty_tensor_inside_another", "{" + entry() + "," + entry("e", shape="[0]", offsets="[1,1]") + "}", "'e'"),
    _json("bytes_behind_the_last_tensor", _GOOD, data=b"xyz"),
    _json("bytes_missing_from_the_last_tensor", _GOOD, data=b"x"),
    _json("bytes_without_a_tensor", '{"__metadata__":{}}', data=b"x"),
    _entry("odd_count_of_half_bytes", dtype='"F4"', shape="[3]"),
    _entry("six_bits_that_fill_no_byte", dtype='"F6_E2M3"', shape="[1]", offsets="[0,1]", data=b"x"),
)

_KINDS = (
    _special("a_fifo", "fifo"),
    _special("a_folder", "folder"),
    _special("a_link_to_an_endless_device", "/dev/zero"),
    _special("a_link_to_an_empty_device", "/dev/null"),
)

HOSTILE_FILES: tuple[HostileCase, ...] = (*_LENGTHS, *_JSON, *_DUPLICATES, *_METADATA, *_FIELDS, *_OFFSETS, *_KINDS)
