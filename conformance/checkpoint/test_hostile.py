"""Hostile input: every way to be wrong has its own error, soon, and within the memory that the file deserves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.checkpoint.cases import INDEX, load
from conformance.checkpoint.hostile import ACCEPTED, FILE, AcceptedCase, HostileCase, entry, pack
from conformance.checkpoint.hostile_folders import HOSTILE_INDEXES, HOSTILE_SETS
from conformance.checkpoint.hostile_headers import HOSTILE_FILES
from conformance.checkpoint.hostile_reading import bounded, consolidate_into, library_verdict, read_metadata, values_of
from conformance.harness import assert_equal, raises, requirement, succeeds
from twinproof.errors import CorruptionError, FormatError, TwinproofError, UnsupportedError


def _cases(cases: tuple[Any, ...]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


def _folder(case: HostileCase, tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    case.build(folder)
    return folder


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
        read_metadata(checkpoint, folder)


@requirement(
    "CKPT-402", "An index that is malformed, contradicts its files or leads out of its folder MUST be refused by name."
)
@_cases(HOSTILE_INDEXES)
def test_reader_refuses_indexes(checkpoint: Any, tmp_path: Path, case: HostileCase) -> None:
    folder = _folder(case, tmp_path)
    with bounded(folder, case.name), raises(case.expect, mentions=case.mentions, where=case.name):
        read_metadata(checkpoint, folder)


@requirement(
    "CKPT-403", "Shards with gaps, overlaps or contradictions MUST be refused by tensor, never filled with zeros."
)
@_cases(HOSTILE_SETS)
def test_reader_refuses_sets(checkpoint: Any, tmp_path: Path, case: HostileCase) -> None:
    folder = _folder(case, tmp_path)
    with bounded(folder, case.name), raises(case.expect, mentions=case.mentions, where=case.name):
        read_metadata(checkpoint, folder)


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
            read_metadata(checkpoint, tmp_path)
    path.write_bytes(_SMALL)
    assert_equal(values_of(checkpoint.load_file(path)), library_verdict(_SMALL))


@requirement("CKPT-409", "Odd but valid files MUST be read, with the tensors that the safetensors library finds.")
@_cases(ACCEPTED)
def test_odd_files(checkpoint: Any, tmp_path: Path, case: AcceptedCase) -> None:
    path = tmp_path / FILE
    path.write_bytes(case.content)
    assert_equal(library_verdict(case.content), case.tensors, where=f"{case.name}: the library")
    with succeeds("reading a valid file", case.name):
        loaded, found = checkpoint.load_file(path), read_metadata(checkpoint, tmp_path).state_dict_metadata
    assert_equal(values_of(loaded), case.tensors, where=case.name)
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
    with succeeds("loading beside it", "the rest of the folder"):
        load(checkpoint, targets, tmp_path)
    assert_equal(bytes(targets["a"].tolist()), b"xy")
    with raises(UnsupportedError, mentions=("foreign",)):
        checkpoint.load_file(tmp_path / FILE)


@requirement(
    "CKPT-411",
    "A reader MUST accept links inside the folder and the blob links of the hub's cache, also where the cache itself "
    "is reached through a link.",
)
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
    (tmp_path / "elsewhere").symlink_to(tmp_path)
    behind_link = [tmp_path / "elsewhere" / folder.relative_to(tmp_path) for folder in (snapshot, plain)]
    for folder in (snapshot, plain, *behind_link):
        targets = {"a": torch.zeros(2, dtype=torch.uint8)}
        with succeeds("following the link", str(folder.relative_to(tmp_path))):
            load(checkpoint, targets, folder)
        assert_equal(bytes(targets["a"].tolist()), b"xy", where=str(folder.relative_to(tmp_path)))


@requirement("CKPT-412", "Files that the index does not list MUST NOT be opened, however broken they are.")
def test_unlisted_files_are_ignored(checkpoint: Any, tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(pack("{" + entry() + "}", b"xy"))
    (tmp_path / "stale.safetensors").write_bytes(pack("{" + entry() + "}", b"XY"))
    (tmp_path / "broken.safetensors").write_bytes(b"\xff" * 20)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": FILE}}))
    targets = {"a": torch.zeros(2, dtype=torch.uint8)}
    with succeeds("loading beside it", "the rest of the folder"):
        load(checkpoint, targets, tmp_path)
    assert_equal(bytes(targets["a"].tolist()), b"xy")


@requirement(
    "CKPT-554",
    "Each of several files with the same entries MUST be measured by itself: one that is cut short, or has a byte too "
    "many, MUST be refused by its name, whichever it is.",
)
def test_files_alike(checkpoint: Any, tmp_path: Path) -> None:
    names = [f"shard-{number:05d}-model-00001-of-00001.safetensors" for number in (1, 2, 3)]
    for wrong in names:
        for length in (-2, -1, 1):
            folder, where = tmp_path / f"{wrong}{length}", f"{wrong}, {length} bytes"
            folder.mkdir()
            for begin, name in zip((0, 2, 4), names, strict=True):
                offsets = json.dumps(json.dumps({"a": {"saved_offsets": [begin]}}))
                header = '{"__metadata__":{"DCP_SHARDING_INFO":' + offsets + "}," + entry() + "}"
                data = b"xy" if name != wrong else b"xyz"[: 2 + length]
                (folder / name).write_bytes(pack(header, data))
            with raises(FormatError, mentions=(wrong,), where=where):
                read_metadata(checkpoint, folder)
            with raises(FormatError, mentions=(wrong,), where=where):
                checkpoint.consolidate_safetensors_files(folder, tmp_path / "out")


@requirement(
    "CKPT-635",
    "A folder without index MUST be refused where any one of its numbered files is missing, the first, the last and "
    "each between, in each of several numbered sets, by readers and consolidations; complete sets MUST be read.",
)
def test_numbered_sets(checkpoint: Any, tmp_path: Path) -> None:
    sets = {"model": 3, "ema": 2, "head-00001-of-00002": 1, "model-shard": 2, "shards": 2}
    whole = [(stem, number) for stem, count in sets.items() for number in range(1, count + 1)]
    for missing in (None, *whole):
        folder = tmp_path / "-".join(map(str, missing or ("whole",)))
        folder.mkdir()
        for at, (stem, number) in enumerate(whole):
            if (stem, number) != missing:
                name = f"{stem}-{number:05d}-of-{sets[stem]:05d}.safetensors"
                (folder / name).write_bytes(pack("{" + entry(name=f"t{at}") + "}", b"xy"))
        if missing is None:
            with succeeds("reading", where="complete sets"):
                found = read_metadata(checkpoint, folder)
            assert_equal(len(found.state_dict_metadata), len(whole), where="tensors of complete sets")
        elif sets[missing[0]] > 1:
            # Of a set of one file nothing is left that could say so.
            with raises(CorruptionError, mentions=("numbered", missing[0]), where=f"without {missing}"):
                read_metadata(checkpoint, folder)
            with raises(CorruptionError, mentions=("numbered", missing[0]), where=f"without {missing}"):
                checkpoint.consolidate_safetensors_files(folder, tmp_path / "out")
            assert_equal((tmp_path / "out").exists(), False, where="what is shown")


@requirement(
    "CKPT-636",
    "A link that leaves its folder MUST be followed to the blobs of the same cache, from a snapshot and the folders in "
    "it alone: not from another folder, not to another cache's, not to a folder below or above, nor to a file beside.",
)
def test_links_to_blobs(checkpoint: Any, tmp_path: Path) -> None:
    places = {
        ("cache/snapshots/rev", "cache/blobs/f"): True,
        ("cache/snapshots/rev/text_encoder", "cache/blobs/f"): True,
        ("cache/snapshots/rev/a/b", "cache/blobs/f"): True,
        ("cache/snapshots/rev/a", "other/blobs/f"): False,
        ("cache/snapshots/rev/a", "cache/snapshots/blobs/f"): False,
        ("cache/snapshots/rev/a", "cache/snapshots/rev/blobs/f"): False,
        ("cache/shots/rev/a", "cache/blobs/f"): False,
        ("cache/shots/rev", "cache/blobs/f"): False,
        ("cache/rev", "blobs/f"): False,
        ("cache/snapshots/rev", "other/blobs/f"): False,
        ("cache/snapshots/rev", "cache/snapshots/blobs/f"): False,
        ("cache/snapshots/rev", "cache/blobs/below/f"): False,
        ("cache/snapshots/rev", "cache/f"): False,
        ("cache/snapshots/rev", "cache/snapshots/f"): False,
        ("cache/snapshots/rev", "cache/snapshots/rev/blobs/f"): False,
        ("cache/snapshots", "blobs/f"): False,
    }
    for number, ((folder, target), is_followed) in enumerate(places.items()):
        root = tmp_path / f"{number}"
        (root / folder).mkdir(parents=True)
        (root / target).parent.mkdir(parents=True, exist_ok=True)
        (root / target).write_bytes(pack("{" + entry() + "}", b"xy"))
        (root / folder / FILE).symlink_to(root / target)
        (root / folder / INDEX).write_text(json.dumps({"weight_map": {"a": FILE}}))
        where = f"{folder} -> {target}"
        if is_followed:
            with succeeds("following the link", where):
                read_metadata(checkpoint, root / folder)
        else:
            with raises(FormatError, mentions=("leaves its folder", FILE), where=where):
                read_metadata(checkpoint, root / folder)
