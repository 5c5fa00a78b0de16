"""Folders that are wrong although, mostly, each of their files is well-formed: index and shard sets."""

from __future__ import annotations

import json
import os
from pathlib import Path

from conformance.checkpoint.cases import INDEX
from conformance.checkpoint.hostile import FILE, Build, HostileCase, entry, pack
from twinproof.errors import CorruptionError, FormatError, TwinproofError

__all__ = ["HOSTILE_INDEXES", "HOSTILE_SETS"]

_GOOD = pack("{" + entry() + "}", b"xy")
_Errors = type[TwinproofError] | tuple[type[TwinproofError], ...]


def _index(name: str, text: str | bytes, *mentions: str, expect: _Errors = FormatError) -> HostileCase:
    """A good file beside an index of this text."""

    def build(folder: Path) -> None:
        (folder / FILE).write_bytes(_GOOD)
        (folder / INDEX).write_bytes(text.encode() if isinstance(text, str) else text)

    return HostileCase(name, build, expect, mentions or (INDEX,), single=False)


def _points(name: str, value: str, expect: _Errors = FormatError) -> HostileCase:
    """An index that sends a reader to ``value``."""
    return _index(name, json.dumps({"weight_map": {"a": value}}), INDEX, expect=expect)


def _member(name: str, make: Build, expect: _Errors = FormatError, *mentions: str) -> HostileCase:
    """An index that names ``m.safetensors``, which ``make`` puts into the folder."""

    def build(folder: Path) -> None:
        (folder / INDEX).write_text('{"weight_map":{"a":"m.safetensors"}}')
        make(folder)

    return HostileCase(name, build, expect, ("m.safetensors", *mentions), single=False)


def _escaping_link(folder: Path) -> None:
    outside = folder.parent / "outside.safetensors"
    outside.write_bytes(_GOOD)
    (folder / "m.safetensors").symlink_to(outside)


def _escaping_link_chain(folder: Path) -> None:
    outside = folder.parent / "outside.safetensors"
    outside.write_bytes(_GOOD)
    (folder / "n.safetensors").symlink_to(outside)
    (folder / "m.safetensors").symlink_to("n.safetensors")


def _cut_member(folder: Path) -> None:
    (folder / "m.safetensors").write_bytes(_GOOD[:-1])


HOSTILE_INDEXES: tuple[HostileCase, ...] = (
    _index("index_is_empty", ""),
    _index("index_is_cut", '{"weight_map":{"a":"model.safe'),
    _index("index_is_an_array", "[]"),
    _index("index_is_null", "null"),
    _index("index_is_not_utf8", b'{"weight_map":{"\xff":"model.safetensors"}}'),
    _index("index_has_a_byte_order_mark", b"\xef\xbb\xbf{}"),
    _index("index_is_nested_ten_thousand_deep", '{"weight_map":' + "[" * 10_000),
    _index("index_has_no_weight_map", '{"metadata":{"total_size":2}}'),
    _index("weight_map_is_a_list", '{"weight_map":["a"]}'),
    _index("weight_map_is_null", '{"weight_map":null}'),
    _index("weight_map_is_given_twice", '{"weight_map":{},"weight_map":{"a":"model.safetensors"}}'),
    _index("name_is_given_twice", '{"weight_map":{"a":"x.safetensors","a":"model.safetensors"}}'),
    _index("file_is_a_number", '{"weight_map":{"a":1}}'),
    _index("file_is_null", '{"weight_map":{"a":null}}'),
    _index("file_is_a_list", '{"weight_map":{"a":["model.safetensors"]}}'),
    _index("total_size_is_infinite", '{"metadata":{"total_size":1e999},"weight_map":{"a":"model.safetensors"}}'),
    _index("total_size_is_nan", '{"metadata":{"total_size":NaN},"weight_map":{"a":"model.safetensors"}}'),
    _points("file_is_empty", ""),
    _points("file_is_a_dot", "."),
    _points("file_in_the_parent", "../outside.safetensors"),
    _points("file_through_the_parent", "sub/../../outside.safetensors"),
    _points("file_in_a_folder_below", "sub/model.safetensors"),
    _points("file_in_this_folder_by_path", "./model.safetensors"),
    _points("file_absolute", "/etc/x.safetensors"),
    _points("file_in_the_home", "~/x.safetensors", expect=(FormatError, CorruptionError)),
    _points("file_on_a_drive", "C:\\x.safetensors"),
    _points("file_relative_to_a_drive", "C:x.safetensors"),
    _points("file_on_a_share", "\\\\host\\share\\x.safetensors"),
    _points("file_with_a_backslash", "..\\x.safetensors"),
    _points("file_with_a_nul", "model.safetensors\0.safetensors"),
    _points("file_with_a_lone_surrogate", "\ud800.safetensors"),
    _points("file_with_a_name_too_long", "x" * 5000 + ".safetensors"),
    _points("file_of_another_suffix", "model.bin"),
    _points("file_with_a_newline_behind", "model.safetensors\n"),
    _points("file_is_missing", "model-00002-of-00002.safetensors", expect=CorruptionError),
    _index("file_lacks_the_tensor", '{"weight_map":{"b":"model.safetensors"}}', INDEX, FILE, expect=CorruptionError),
    _member("file_is_a_fifo", lambda folder: os.mkfifo(folder / "m.safetensors")),
    _member("file_is_a_folder", lambda folder: (folder / "m.safetensors").mkdir()),
    _member("file_is_a_device", lambda folder: (folder / "m.safetensors").symlink_to("/dev/zero")),
    _member("file_is_a_link_that_leaves_the_folder", _escaping_link),
    _member("file_is_a_chain_of_links_that_leaves_the_folder", _escaping_link_chain),
    _member(
        "file_is_a_link_to_nothing",
        lambda folder: (folder / "m.safetensors").symlink_to("nothing"),
        (FormatError, CorruptionError),
    ),
    _member(
        "file_is_a_link_to_itself", lambda folder: (folder / "m.safetensors").symlink_to("m.safetensors"), FormatError
    ),
    _member("file_is_malformed", _cut_member),
    HostileCase("index_is_a_folder", lambda folder: (folder / INDEX).mkdir(), FormatError, (INDEX,), single=False),
    HostileCase("index_is_a_fifo", lambda folder: os.mkfifo(folder / INDEX), FormatError, (INDEX,), single=False),
)


def _shard(info: str, dtype: str = "U8", shape: str = "[2]", data: bytes = b"xy") -> bytes:
    """A file as torch's sharded save writes it: tensor ``a`` and where it lies in the whole, as JSON inside JSON."""
    metadata = json.dumps({"DCP_SHARDING_INFO": info, "DCP_VERSION": "1.0", "format": "pt"})
    field = entry(dtype=f'"{dtype}"', shape=shape, offsets=f"[0,{len(data)}]")
    return pack(f'{{"__metadata__":{metadata},{field}}}', data)


def _at(*offsets: int, whole: list[int] | None = None) -> str:
    more = {} if whole is None else {"global_shape": whole}
    return json.dumps({"a": {"saved_offsets": list(offsets), **more}})


def _name(rank: int) -> str:
    return f"shard-{rank:05d}-model-00001-of-00001.safetensors"


def _set(name: str, *files: bytes, expect: _Errors = CorruptionError, names: tuple[str, ...] = ()) -> HostileCase:
    """A folder of these files, by default under torch's shard names; the error names tensor ``a``."""

    def build(folder: Path) -> None:
        for number, content in enumerate(files):
            (folder / (names[number] if names else _name(number + 1))).write_bytes(content)

    mentions = (".safetensors", "'a'") if expect is CorruptionError else (".safetensors",)
    return HostileCase(name, build, expect, mentions, single=False)


def _numbered_file_missing(folder: Path) -> None:
    for number in (1, 3):
        text = "{" + entry(name=f"t{number}") + "}"
        (folder / f"model-{number:05d}-of-00003.safetensors").write_bytes(pack(text, b"xy"))


HOSTILE_SETS: tuple[HostileCase, ...] = (
    _set("sharding_is_not_json", _shard("{"), expect=FormatError),
    _set("sharding_is_a_list", _shard("[]"), expect=FormatError),
    _set(
        "sharding_has_a_name_twice", _shard('{"a":{"saved_offsets":[0]},"a":{"saved_offsets":[0]}}'), expect=FormatError
    ),
    _set("sharding_lacks_the_tensor", _shard("{}"), expect=FormatError),
    _set("sharding_entry_is_a_list", _shard('{"a":[0]}'), expect=FormatError),
    _set("sharding_entry_is_empty", _shard('{"a":{}}'), expect=FormatError),
    _set("offsets_are_a_number", _shard('{"a":{"saved_offsets":0}}'), expect=FormatError),
    _set("offset_is_a_float", _shard('{"a":{"saved_offsets":[0.0]}}'), expect=FormatError),
    _set("offset_is_true", _shard('{"a":{"saved_offsets":[false]}}'), expect=FormatError),
    _set("offset_is_negative", _shard('{"a":{"saved_offsets":[-1]}}'), expect=(FormatError, CorruptionError)),
    _set("offsets_of_another_rank", _shard(_at(0, 0)), expect=FormatError),
    _set("offsets_of_a_scalar", _shard(_at(0), shape="[]", data=b"x"), expect=FormatError),
    _set("global_shape_is_a_number", _shard('{"a":{"saved_offsets":[0],"global_shape":2}}'), expect=FormatError),
    _set("global_shape_is_negative", _shard(_at(0, whole=[-2])), expect=(FormatError, CorruptionError)),
    _set("global_shape_of_another_rank", _shard(_at(0, whole=[2, 1])), expect=(FormatError, CorruptionError)),
    _set("shard_beyond_its_global_shape", _shard(_at(1, whole=[2]))),
    _set("shards_disagree_about_the_global_shape", _shard(_at(0, whole=[4])), _shard(_at(2, whole=[5]))),
    _set("first_shard_missing", _shard(_at(2))),
    _set("middle_shard_missing", _shard(_at(0)), _shard(_at(4))),
    _set("last_shard_missing", _shard(_at(0, whole=[4]))),
    _set("every_shard_empty", _shard(_at(0, whole=[4]), shape="[0]", data=b"")),
    _set("shards_overlap", _shard(_at(0)), _shard(_at(1))),
    _set("shards_overlap_and_leave_as_much_out", _shard(_at(0, whole=[4])), _shard(_at(1, whole=[4]))),
    _set("shard_there_twice", _shard(_at(0)), _shard(_at(0))),
    _set(
        "shard_left_from_another_world_size", _shard(_at(0)), _shard(_at(2)), _shard(_at(0), shape="[4]", data=b"wxyz")
    ),
    _set("shards_of_different_dtypes", _shard(_at(0)), _shard(_at(2), dtype="I8")),
    _set("shards_of_different_widths", _shard(_at(0)), _shard(_at(2), dtype="I16", data=b"wxyz")),
    _set("shards_of_different_ranks", _shard(_at(0)), _shard(_at(2, 0), shape="[2,1]")),
    _set("shards_of_different_breadths", _shard(_at(0, 0), shape="[1,2]"), _shard(_at(1, 0), shape="[2,1]")),
    _set("whole_tensor_beside_a_shard", _shard(_at(0)), _GOOD),
    _set("tensor_in_two_files", _GOOD, _GOOD, names=(FILE, "consolidated.safetensors")),
    HostileCase(
        "numbered_file_missing_and_no_index",
        _numbered_file_missing,
        CorruptionError,
        ("model",),
        single=False,
    ),
)
