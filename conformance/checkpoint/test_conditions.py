"""Conditions that other modules leave on one side: the command line's text, and states that users seldom meet."""

from __future__ import annotations

import errno
import importlib
import io
import json
import logging
import os
import signal
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from conformance.checkpoint.cases import FILE, INDEX, assert_loads, load, load_with, save
from conformance.checkpoint.hostile import entry, pack
from conformance.checkpoint.trainer import alone
from conformance.harness import assert_equal, assert_same_tensor, raises, requirement, succeeds
from twinproof.checkpoint import catalog, publish
from twinproof.checkpoint.native import NativeStorageWriter
from twinproof.errors import (
    ConfigError,
    CorruptionError,
    FormatError,
    PlanError,
    StorageError,
    TwinproofError,
    UnsupportedError,
)

NEEDS = ("staged_copies",)
HEX = "0123456789ab"


def _say(impl: Any, capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    """The exit status of a command, and what it says as text to standard output and errors."""
    main = importlib.import_module(f"{impl.__name__}.checkpoint.__main__").main
    capsys.readouterr()
    with succeeds("the command", where=str(words[0])):
        code = main([*map(str, words)])
    return (code, *capsys.readouterr())


@requirement(
    "CKPT-750",
    "As text, inspect MUST list each tensor with its file, verify MUST say what was verified and warn of another total "
    "in the index, diff MUST name each difference, of files and folders, and progress MUST go to standard error.",
    needs=NEEDS,
)
def test_text(impl: Any, checkpoint: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = {"w": torch.ones(4, 3), "n": torch.tensor(5)}
    plain, shards, summed, other = (tmp_path / name for name in ("plain", "shards", "summed", "other"))
    save(checkpoint, state, plain, fqn_to_index_mapping={"w": 1, "n": 2})
    save(checkpoint, state, shards, enable_consolidation=False)
    save(checkpoint, state, summed, checksums=True)
    save(checkpoint, {"w": torch.eye(4)[:, :3], "n": torch.tensor(6), "x": torch.ones(1)}, other)
    first, second = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
    line = "{:>12} {:<24} {}  [{}]\n".format
    listed = line("I64", "[]", "n", second) + line("F32", "[4, 3]", "w", first)
    structure = "only the structure was verified: the checkpoint has no checksums\n"
    totals = "ok: 2 tensors, 56 bytes, {} files\n".format
    different = (
        "n: 1 of 1 values, the first at []\nw: 9 of 12 values, the first at [0, 1]\nx: not in the first\n"
        "0 tensors equal, 3 differ\n"
    )
    steps = " 14 % of 56 bytes\r100 % of 56 bytes\n"
    cases: dict[str, tuple[list[object], int, str, str]] = {
        "inspect": (["inspect", plain], 0, f"{listed}2 tensors, 56 bytes, 2 files\n", ""),
        "inspect a file": (
            ["inspect", plain / second],
            0,
            f"{listed.splitlines()[0]}\n1 tensors, 8 bytes, 1 files\n",
            "",
        ),
        "verify": (["verify", plain], 0, totals(2) + structure, ""),
        "verify what has no index": (["verify", shards], 0, totals(1) + structure, ""),
        "verify a file": (["verify", summed / FILE], 0, totals(1) + structure, ""),
        "verify sums": (
            ["verify", summed, "--threads", "1"],
            0,
            f"{totals(1)}the bytes of all 2 tensors were verified\n",
            steps,
        ),
        "diff of equal ones": (["diff", plain, shards], 0, "2 tensors equal, 0 differ\n", steps),
        "diff": (["diff", plain, other], 1, different, steps),
    }
    for where, (words, code, out, err) in cases.items():
        assert_equal(_say(impl, capsys, *words), (code, out, err), where=where)
    merged = _say(impl, capsys, "consolidate", shards, tmp_path / "out")
    size_bytes = (tmp_path / "out" / FILE).stat().st_size
    assert_equal(merged, (0, totals(1) + structure, f"100 % of {size_bytes} bytes\n"), where="consolidate")
    content = json.loads((plain / INDEX).read_text())
    for total, warning in ((57, "warning: the index declares 57 bytes\n"), (True, ""), (56.0, "")):
        content["metadata"]["total_size"] = total
        (plain / INDEX).write_text(json.dumps(content))
        said = totals(2) + structure + warning
        assert_equal(_say(impl, capsys, "verify", plain), (0, said, ""), where=f"a total of {total}")


def _leave(folder: Path, *names: str) -> dict[str, Path]:
    made = {name: folder / f"{name}-{HEX}" for name in names}
    for path in made.values():
        path.mkdir(parents=True)
        os.utime(path, (0, 0))
    return made


@requirement(
    "CKPT-751",
    "As text, clean MUST say of each leftover whether it is deleted or why it is kept, and name how to delete; what is "
    "no folder MUST be refused, and a plain file MUST NOT pass for a folder that was put aside.",
    needs=NEEDS,
)
def test_clean_as_text(impl: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    made = _leave(run, ".a.saving", ".b.previous", ".c.saving", ".d.previous", "..saving")
    os.utime(made[".c.saving"])
    (run / "d").mkdir()
    (run / f".e.previous-{HEX}").write_bytes(b"1")
    (run / f".f.deleting-{HEX}").write_bytes(b"1")
    counts = "5 leftovers, 3 to delete"
    for options, last in (([], f"{counts}; --delete deletes them"), (["--delete"], counts)):
        code, out, err = _say(impl, capsys, "clean", run, *options)
        *lines, total = out.splitlines()
        found = [(line.split(str(run))[0].strip(), line.split(" (")[1].rsplit(",", 1)[0]) for line in lines]
        expected = [
            ("delete", "saving of run"),
            ("delete", "saving of a"),
            ("keep: the only copy of b, rename it back", "previous of b"),
            ("keep: too young", "saving of c"),
            ("delete", "previous of d"),
        ]
        assert_equal((code, found, err), (0, expected, ""), where=f"clean {options}")
        assert_equal(total, last, where=f"clean {options}")
    left = sorted(path.name for path in run.iterdir())
    names = (f".b.previous-{HEX}", f".c.saving-{HEX}", f".e.previous-{HEX}", f".f.deleting-{HEX}", "d")
    assert_equal(left, sorted(names), where="left")
    for path in (tmp_path / "absent", run / f".e.previous-{HEX}"):
        code, out, err = _say(impl, capsys, "clean", path, "--delete")
        assert_equal((code, out, err.split(":")[0]), (1, "", "MissingCheckpointError"), where=f"clean of {path.name}")


@requirement(
    "CKPT-752",
    "A leftover that is the only copy of a checkpoint MUST NOT be removed, whoever asks, and one that cannot be "
    "removed MUST be a named error of its path.",
)
def test_removing_leftovers(tmp_path: Path) -> None:
    made = _leave(tmp_path, ".a.previous", ".b.saving")
    needed, gone = publish.find_leftovers(tmp_path)
    with raises(ConfigError, mentions=("only copy", str(made[".a.previous"])), where="the only copy"):
        publish.remove_leftover(needed)
    assert_equal(made[".a.previous"].is_dir(), True, where="the only copy is there")
    publish.remove_leftover(gone)
    assert_equal(made[".b.saving"].exists(), False, where="the other is gone")
    with raises(StorageError, mentions=("ENOENT", str(made[".b.saving"])), where="what is gone already"):
        publish.remove_leftover(gone)


def _refusing(code: int) -> Callable[..., None]:
    def refuse(path: Any, *_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code), path)

    return refuse


@requirement(
    "CKPT-804",
    "A leftover that the system does not let go, a file, a folder or what lies in one, MUST be a StorageError of its "
    "path and of the system's error, by the command line of status 1, and never be told as deleted.",
    needs=NEEDS,
)
@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.EBUSY, errno.EIO], ids=os.strerror)
@pytest.mark.parametrize("call", ["unlink", "rmdir"])
def test_leftovers_that_stay(
    impl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], call: str, code: int
) -> None:
    kinds = ("empty folder", "folder") if call == "rmdir" else ("file", "folder", "nested")
    for kind in kinds:
        folder = tmp_path / kind
        left = folder / f".step-3.saving-{HEX}"
        (folder if kind == "file" else left / "in" if kind == "nested" else left).mkdir(parents=True)
        if kind != "empty folder":
            (left if kind == "file" else left / "in" / "x" if kind == "nested" else left / "x").write_text("1")
        where, name = f"{call} of a {kind}: {os.strerror(code)}", errno.errorcode[code]
        clean = ("clean", folder, "--delete", "--older-than", "0")
        with monkeypatch.context() as patch:
            patch.setattr(os, call, _refusing(code))
            with raises(StorageError, mentions=("deleting", name, str(left)), where=where):
                publish.remove_leftover(publish.find_leftovers(folder)[0])
            status, out, _ = _say(impl, capsys, *clean, "--json")
            said = json.loads(out)
            assert_equal((status, said["ok"], said.get("error")), (1, False, "StorageError"), where=where)
            status, _, err = _say(impl, capsys, *clean)
            assert_equal((status, err.split(":")[0]), (1, "StorageError"), where=f"{where}, as text")
        assert_equal(left.exists(), True, where=where)
        status, out, _ = _say(impl, capsys, *clean, "--json")
        assert_equal((status, json.loads(out)["deleted"]), (0, [str(left)]), where=f"{where}, which passed")
        assert_equal(left.exists(), False, where=f"{where}, which passed")


@requirement(
    "CKPT-753",
    "diff of tensors that no torch dtype holds MUST be a named error of the tensor, as text and in one JSON object.",
    needs=NEEDS,
)
def test_diff_of_foreign_dtypes(impl: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for dtype, shape in (("F6_E2M3", "[4]"), ("F6_E3M2", "[4]"), ("F4", "[2,3]")):
        path, content = tmp_path / f"{dtype}.safetensors", entry(dtype=f'"{dtype}"', shape=shape, offsets="[0,3]")
        path.write_bytes(pack("{" + content + "}", b"xyz"))
        code, out, err = _say(impl, capsys, "diff", path, path)
        named = err.startswith("UnsupportedError: no torch dtype holds this tensor") and f"{path}: tensor 'a'" in err
        assert_equal((code, out, named), (2, "", True), where=f"{dtype}: {err}")
        code, out, _ = _say(impl, capsys, "diff", path, path, "--json")
        assert_equal((code, json.loads(out)["error"]), (2, "UnsupportedError"), where=f"{dtype} as JSON")


class _Interrupting(io.StringIO):
    """Standard error on whose first line the user interrupts."""

    def write(self, text: str) -> int:
        """Note the text."""
        is_first = not self.getvalue()
        written = super().write(text)
        if is_first:
            signal.raise_signal(signal.SIGINT)
        return written


@requirement(
    "CKPT-754",
    "A command that is interrupted MUST end with status 130 and say so on standard error alone; nothing that it wrote "
    "is visible, or left.",
    needs=NEEDS,
)
def test_interrupted(
    impl: Any, checkpoint: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shards, summed = tmp_path / "shards", tmp_path / "summed"
    save(checkpoint, {"w": torch.ones(3)}, shards, enable_consolidation=False)
    save(checkpoint, {"w": torch.ones(3)}, summed, checksums=True)
    cases: list[list[object]] = [
        ["diff", shards, summed],
        ["verify", summed],
        ["consolidate", shards, tmp_path / "out"],
    ]
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for words in cases:
            errors = _Interrupting()
            monkeypatch.setattr("sys.stderr", errors)
            code, out, _ = _say(impl, capsys, *words)
            said = errors.getvalue().endswith("interrupted; nothing half-written is visible\n")
            assert_equal((code, out, said), (130, "", True), where=f"{words[0]}: {errors.getvalue()!r}")
    finally:
        signal.signal(signal.SIGINT, handler)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert_equal(left, ["shards", "summed"], where="what is there")


def _shard(folder: Path, number: int, text: str | None, value: torch.Tensor) -> Path:
    """A file of the tensor ``w`` with this text of its offsets; None: a file of whole tensors."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{number}.safetensors"
    safetensors.torch.save_file({"w": value}, path, {} if text is None else {"DCP_SHARDING_INFO": text})
    return path


@requirement(
    "CKPT-755",
    "Offsets of shards that are no JSON or have a name twice, in torch's own spelling too, and offsets before the "
    "tensor MUST be refused; and a tensor that stands whole in one file and as a shard in another.",
)
def test_offsets_of_shards(checkpoint: Any, tmp_path: Path) -> None:
    at = '{{"w": {{"saved_offsets": [{}]}}}}'.format
    twice = '{"w": {"saved_offsets": [0]}, "w": {"saved_offsets": [0]}}'
    whole: list[str | None] = [None, at(2)]
    cases: dict[str, tuple[list[str | None], type[TwinproofError]]] = {
        "a leading zero": ([at("00")], FormatError),
        "another leading zero": ([at("0"), at("02")], FormatError),
        "a name twice": ([twice], FormatError),
        "before the tensor": ([at("-2"), at("2")], FormatError),
        "whole, then a shard": (whole, CorruptionError),
        "a shard, then whole": (whole[::-1], CorruptionError),
    }
    for where, (texts, error) in cases.items():
        folder = tmp_path / where
        files = [_shard(folder, number, text, torch.ones(2)).name for number, text in enumerate(texts)]
        with raises(error, mentions=(folder.name, "w"), where=where):
            load(checkpoint, {"w": torch.zeros(2 * len(files))}, folder)
    _shard(tmp_path / "good", 0, at("0"), torch.ones(2))
    _shard(tmp_path / "good", 1, at("2"), torch.ones(2))
    assert_loads(checkpoint, tmp_path / "good", {"w": torch.ones(4)})


@requirement(
    "CKPT-756",
    "Without an index, files that are hidden or have another suffix MUST NOT count, and a folder without others is "
    "empty; an index that is larger than any sensible one MUST be refused unread.",
)
def test_files_that_count(checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, state = tmp_path / "ck", {"w": torch.ones(2)}
    folder.mkdir()
    (folder / ".hidden.safetensors").write_bytes(b"no file")
    (folder / "notes.txt").write_bytes(b"no file")
    with raises(FileNotFoundError, mentions=("no safetensors file", str(folder)), where="only others"):
        load(checkpoint, {"w": torch.zeros(2)}, folder)
    checkpoint.save_file(state, folder / "w.safetensors")
    with succeeds("a load beside others", where="folder"):
        assert_loads(checkpoint, folder, state)
    text = json.dumps({"weight_map": {"w": "w.safetensors"}})
    (folder / INDEX).write_text(text)
    monkeypatch.setattr(catalog, "INDEX_BYTES_MAX", len(text))
    with succeeds("a load by an index of the largest size", where="folder"):
        assert_loads(checkpoint, folder, state)
    monkeypatch.setattr(catalog, "INDEX_BYTES_MAX", len(text) - 1)
    with raises(FormatError, mentions=("sensible size", INDEX), where="an index of one byte more"):
        load(checkpoint, {"w": torch.zeros(2)}, folder)


class _Asking(DefaultLoadPlanner):
    """Changes the plan, or what an item is to fill."""

    def __init__(self, target: torch.Tensor | None = None, **changes: Any) -> None:
        super().__init__()
        self.target, self.changes = target, changes

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan([replace(item, **self.changes) for item in super().create_local_plan().items])

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return super().resolve_tensor(read_item) if self.target is None else self.target


@requirement(
    "CKPT-757",
    "A target without memory, a planner's target of another shape, and items of no tensor or another rank MUST be "
    "refused by the plain reader and that of quantized tensors; an item without an offset means the first chunk.",
)
def test_plans_of_loads(checkpoint: Any, tmp_path: Path) -> None:
    values = {"w.weight": torch.ones(4, 2).to(torch.float8_e4m3fn), "w.weight_scale_inv": torch.ones(1, 1)}
    checkpoint.save_file({**values, "vector": torch.ones(4)}, tmp_path / "ck.safetensors")
    # A plain reader converts no numbers that have scales beside them.
    checkpoint.save_file({"w.weight": torch.ones(4, 2).half(), "vector": torch.ones(4)}, tmp_path / "plain.safetensors")
    meta = torch.empty(4, 2, device="meta")
    flat = {"lengths": torch.Size([4]), "storage_offsets": torch.Size([0]), "dest_offsets": torch.Size([0])}
    cases: dict[str, tuple[_Asking, type[TwinproofError], str]] = {
        "no memory": (_Asking(meta), UnsupportedError, "meta target"),
        "another shape": (_Asking(torch.zeros(4, 3)), PlanError, "(4, 3)"),
        "of another rank": (_Asking(torch.zeros(4), **flat), PlanError, "beyond the chunk"),
    }
    for is_quantized in (False, True):
        for where, (planner, error, said) in cases.items():
            with raises(error, mentions=(said, "w.weight"), where=f"{where}, quantized {is_quantized}"):
                load_with(_reader(checkpoint, tmp_path, is_quantized), {"w.weight": torch.zeros(4, 2)}, planner)
        target = torch.zeros(4, 2)
        with succeeds("a load", where=f"no offset, quantized {is_quantized}"):
            planner = _Asking(storage_index=MetadataIndex("w.weight"))
            load_with(_reader(checkpoint, tmp_path, is_quantized), {"w.weight": target}, planner)
        assert_same_tensor(target, torch.ones(4, 2), where=f"no offset, quantized {is_quantized}")
        matrix = {name: torch.Size([2, 1] if name == "lengths" else [0, 0]) for name in flat}
        vector = MetadataIndex("vector", torch.Size([0]))
        with raises(PlanError, mentions=("beyond the chunk", "vector"), where=f"a matrix of a vector, {is_quantized}"):
            planner = _Asking(torch.zeros(2, 1), storage_index=vector, **matrix)
            load_with(_reader(checkpoint, tmp_path, is_quantized), {"vector": torch.zeros(4)}, planner)
        with raises(TwinproofError, mentions=("not in the checkpoint", "x"), where=f"no tensor, {is_quantized}"):
            planner = _Asking(storage_index=MetadataIndex("x"))
            load_with(_reader(checkpoint, tmp_path, is_quantized), {"w.weight": target}, planner)


def _reader(checkpoint: Any, folder: Path, is_quantized: bool) -> Any:
    if is_quantized:
        return checkpoint.QuantizedHuggingFaceStorageReader(folder / "ck.safetensors")
    return checkpoint.HuggingFaceStorageReader(folder / "plain.safetensors", cast=True)


@requirement(
    "CKPT-758",
    "Groups of MXFP4 that are a vector, or cut between shards, MUST be refused by name; a subclass of a reader or "
    "manager that changes nothing MUST work as its base does.",
)
def test_quantized_forms(checkpoint: Any, tmp_path: Path) -> None:
    class Reader(checkpoint.QuantizedHuggingFaceStorageReader):  # type: ignore[misc]
        pass

    class Manager(checkpoint.CheckpointManager):  # type: ignore[misc]
        pass

    groups = torch.full((2, 3, 4), 0x22, dtype=torch.uint8)
    scales = torch.full((2, 3), 127, dtype=torch.uint8)
    vector, cut, good = (tmp_path / name for name in ("vector.safetensors", "cut", "good.safetensors"))
    checkpoint.save_file({"w_blocks": groups.flatten(), "w_scales": scales[0, 0]}, vector)
    cut.mkdir()
    for number in (0, 1):
        info = {"w_blocks": {"saved_offsets": [0, 0, 2 * number]}, "w_scales": {"saved_offsets": [number, 0]}}
        part = {"w_blocks": groups[..., :2].contiguous(), "w_scales": scales[:1]}
        metadata = {"DCP_SHARDING_INFO": json.dumps(info)}
        safetensors.torch.save_file(part, cut / f"{number}.safetensors", metadata)
    for path, said in ((vector, "not MXFP4 blocks"), (cut, "a group is cut")):
        with raises(UnsupportedError, mentions=(said, "w_blocks"), where=said):
            load_with(Reader(path), {"w_blocks": torch.zeros(2, 24)})
    checkpoint.save_file({"w_blocks": groups, "w_scales": scales}, good)
    target = torch.zeros(2, 24)
    with succeeds("a load by a subclass", where="reader"):
        load_with(Reader(good), {"w_blocks": target})
    assert_same_tensor(target, torch.ones(2, 24), where="by a subclass")
    model = torch.nn.Linear(2, 2)
    with (
        succeeds("a save by a subclass", where="manager"),
        alone(),
        Manager(tmp_path / "run", model=model, interval=1, last_save_in_hf=True) as manager,
    ):
        assert_equal(manager.save(1, last_step=True), True, where="manager")


@requirement(
    "CKPT-759",
    "A file that is cut short, or goes, while it is verified or loaded MUST be a named error of its path.",
)
def test_files_that_go(checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"w": torch.ones(64)}
    save(checkpoint, state, tmp_path / "ck", checksums=True)
    path = tmp_path / "ck" / FILE
    size_bytes = path.stat().st_size

    def cut(data: torch.Tensor) -> int:
        os.truncate(path, size_bytes - 100)
        return catalog.crc32(data)

    monkeypatch.setattr(catalog, "PIECE_BYTES", 96)
    with raises(CorruptionError, mentions=("became shorter", FILE), where="cut while it is verified"):
        catalog.verify(tmp_path / "ck", crc=cut)
    save(checkpoint, state, tmp_path / "ck")

    def remove(done_bytes: int, total_bytes: int) -> None:
        if done_bytes == total_bytes:
            path.unlink()

    with raises(CorruptionError, mentions=("replaced while it was read", "no file", FILE), where="gone while loaded"):
        load(checkpoint, {"w": torch.zeros(64)}, tmp_path / "ck", progress=remove)


@requirement(
    "CKPT-760",
    "What the format cannot hold MUST be refused by name before anything is made, by a save of one file and of a "
    "folder: dtypes that it lacks, quantized tensors, names that are no text, and metadata that is not of text.",
)
def test_what_no_file_holds(checkpoint: Any, tmp_path: Path) -> None:
    ones = torch.ones(2)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*quantized tensor creation")
        quantized = torch.quantize_per_tensor(ones, 0.1, 0, torch.qint8)
    states: dict[str, tuple[Any, type[TwinproofError], str]] = {
        "complex128": ({"w": ones.to(torch.complex128)}, UnsupportedError, "complex128"),
        "bits16": ({"w": torch.empty(2, dtype=torch.bits16)}, UnsupportedError, "bits16"),
        "quantized": ({"w": quantized}, TwinproofError, "w"),
        "a lone surrogate": ({"w\ud800": ones}, UnsupportedError, "valid Unicode"),
    }
    for where, (state, error, said) in states.items():
        with raises(error, mentions=(said,), where=f"{where} in one file"):
            checkpoint.save_file(state, tmp_path / "f.safetensors")
        with raises(error, mentions=(said,), where=f"{where} in a folder"):
            save(checkpoint, state, tmp_path / "ck")
    with raises(UnsupportedError, mentions=("strings", "int"), where="a number for a name"):
        checkpoint.save_file({1: ones}, tmp_path / "f.safetensors")
    metadata: Any
    for metadata in ({1: "a"}, {"a": 1}, {"a": None}):
        with raises(ConfigError, mentions=("str to str", str(metadata)), where=f"{metadata} in one file"):
            checkpoint.save_file({"w": ones}, tmp_path / "f.safetensors", metadata)
        with raises(ConfigError, mentions=("str to str", str(metadata)), where=f"{metadata} in a folder"):
            save(checkpoint, {"w": ones}, tmp_path / "ck", metadata=metadata)
    assert_equal(list(tmp_path.iterdir()), [], where="what was made")


@requirement(
    "CKPT-761",
    "A header that is longer than the format allows MUST be refused before anything is made, and one that remote "
    "readers do not read MUST be warned of.",
)
def test_long_headers(checkpoint: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="twinproof.checkpoint")
    state = {"w": torch.ones(2)}
    for text_bytes, is_warned in ((24_000_000, False), (25_000_000, True)):
        caplog.clear()
        checkpoint.save_file(state, tmp_path / "f.safetensors", {"k": "x" * text_bytes})
        said = "model hubs' remote parsers" in caplog.text
        assert_equal(said, is_warned, where=f"{text_bytes} bytes of metadata")
        (tmp_path / "f.safetensors").unlink()
    with raises(ConfigError, mentions=("header too long", "100000000"), where="100 MB"):
        checkpoint.save_file(state, tmp_path / "f.safetensors", {"k": "x" * 100_000_000})
    assert_equal(list(tmp_path.iterdir()), [], where="what was made")


@requirement(
    "CKPT-762",
    "A header's entry whose shape or data_offsets are no lists of whole numbers MUST be refused, what reads as an "
    "empty shape included.",
)
def test_entries_of_headers(checkpoint: Any, tmp_path: Path) -> None:
    path = tmp_path / "f.safetensors"
    cases = [{"shape": shape, "offsets": "[0,1]"} for shape in ('""', "{}", "null", "true", "[true]", "[1.0]")]
    cases += [{"shape": "[1]", "offsets": f"[0,{end}]"} for end in ("1.0", "true", '"1"', "null")]
    cases += [{"shape": "[1]", "offsets": f"[{begin},1]"} for begin in ("0.0", "false", "-0", "null")]
    for case in cases:
        path.write_bytes(pack("{" + entry(**case) + "}", b"x"))
        with raises(FormatError, mentions=(path.name, "'a'"), where=str(case)):
            checkpoint.load_file(path)


class _Giving(DefaultSavePlanner):
    """Gives other data than it planned."""

    def __init__(self, given: torch.Tensor) -> None:
        super().__init__()
        self.given = given

    def resolve_data(self, write_item: Any) -> Any:
        return self.given


@requirement(
    "CKPT-763",
    "A save whose planner gives another shape or dtype than it planned MUST fail by the tensor's name, and leave "
    "nothing.",
)
def test_other_data_than_planned(checkpoint: Any, tmp_path: Path) -> None:
    for given in (torch.ones(4), torch.ones(2, 2), torch.ones(3).double(), torch.ones(3).int(), torch.ones(())):
        where = f"{given.dtype} {list(given.shape)}"
        with raises(PlanError, mentions=("not what was planned", "where: w"), where=where):
            save(checkpoint, {"w": torch.ones(3)}, tmp_path / "ck", planner=_Giving(given))
        assert_equal(list(tmp_path.iterdir()), [], where=f"what is left after {where}")
    save(checkpoint, {"w": torch.ones(3)}, tmp_path / "ck", planner=_Giving(torch.zeros(3)))
    assert_loads(checkpoint, tmp_path / "ck", {"w": torch.zeros(3)})


@requirement(
    "CKPT-764",
    "A writer MUST tell its options as they were given; counts that are no whole numbers of at least 1 MUST be "
    "refused by name, as a save without collectives, and the end of a save that has written nothing.",
)
def test_options_of_writers(checkpoint: Any, tmp_path: Path) -> None:
    make = partial(checkpoint.HuggingFaceStorageWriter, tmp_path / "ck")
    mapping = {"w": 1}
    for given in (None, mapping):
        for is_merged in (False, True):
            with make(given, enable_consolidation=is_merged) as writer:
                told = writer.fqn_to_index_mapping, writer.consolidated_output_path, writer.enable_consolidation
            expected = given, str(tmp_path / "ck") if is_merged else None, is_merged
            assert_equal(told, expected, where=f"{given}, merged {is_merged}")
    options = ("thread_count", "thread_count_consolidation", "block_bytes")
    for option, value in product(options, (0, -1, True, False, 1.0, 64.0, "4", None, [1])):
        with raises(ConfigError, mentions=(option,), where=f"{option} {value!r}"):
            make(**{option: value})
    for value in (1, 32, 63, 96, 65):
        with raises(ConfigError, mentions=("not a block size", str(value)), where=f"blocks of {value} bytes"):
            make(block_bytes=value)
    with raises(ConfigError, mentions=("use_collectives",), where="without collectives"), alone():
        dcp.save({"w": torch.ones(2)}, storage_writer=make(), no_dist=True, use_collectives=False)
    planner, native = DefaultSavePlanner(), NativeStorageWriter(tmp_path / "ck")
    planner.set_up_planner({"w": torch.ones(2)}, is_coordinator=True)
    for writer in (make(), native):
        with raises(PlanError, mentions=("nothing was written",), where="no plan at all"):
            writer.finish(Metadata({}), [])
    writer = make()
    writer.set_up_storage_writer(True)
    writer.prepare_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    with raises(PlanError, mentions=("nothing was written",), where="a plan alone"):
        writer.finish(Metadata({}), [])
    assert_equal(list(tmp_path.iterdir()), [], where="what was made")
