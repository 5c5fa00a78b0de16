"""The command line: inspect, verify, consolidate."""

from __future__ import annotations

import importlib
import io
import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from conformance.checkpoint.cases import assert_folder, load, random_bits, save, save_ranks, save_with
from conformance.checkpoint.hostile import pack
from conformance.harness import Rank, assert_equal, raises, requirement, succeeds
from conformance.provers.search_path import search_path
from twinproof.errors import MissingCheckpointError

NEEDS = ("staged_copies",)


def _run(impl: Any, *arguments: str) -> tuple[int, dict[str, Any], str]:
    command = [sys.executable, "-m", f"{impl.__name__}.checkpoint", *arguments, "--json"]
    environment = {"PYTHONPATH": search_path(), "PATH": "/usr/bin:/bin"}
    # In the current folder it would look for packages first.
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd="/")
    return done.returncode, json.loads(done.stdout or "{}"), done.stderr


def _run_here(impl: Any, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    main = importlib.import_module(f"{impl.__name__}.checkpoint.__main__").main
    code = main([*arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def _save_shards(rank: Rank, path: str) -> None:
    save_ranks(
        rank, {f"r{rank.rank}": random_bits(torch.float32, (3,), rank.rank)}, Path(path), enable_consolidation=False
    )


@requirement(
    "CKPT-107",
    "The command line MUST inspect, verify and consolidate, as JSON too, and exit 1 naming what is wrong.",
    needs=NEEDS,
)
def test_command_line(
    impl: Any, checkpoint: Any, rank_pool: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = {"w": torch.randn(4, 3), "n": torch.tensor(5)}
    save(checkpoint, state, tmp_path / "ck", fqn_to_index_mapping={"w": 1, "n": 2}, metadata={"step": "7"})
    code, facts = _run_here(impl, capsys, "inspect", str(tmp_path / "ck"))
    assert_equal((code, facts["payload_bytes"], facts["metadata"]["step"]), (0, 56, "7"), where="inspect")
    assert_equal(facts["tensors"]["w"]["shape"], [4, 3], where="inspect")
    code, facts = _run_here(impl, capsys, "verify", str(tmp_path / "ck"))
    assert_equal((code, facts["ok"], facts["warnings"]), (0, True, []), where="verify")
    (tmp_path / "ck" / "model-00002-of-00002.safetensors").unlink()
    broken = (1, False, "CorruptionError")
    code, facts = _run_here(impl, capsys, "verify", str(tmp_path / "ck"))
    assert_equal((code, facts["ok"], facts.get("error")), broken, where="verify a broken folder")
    code, facts, errors = _run(impl, "verify", str(tmp_path / "ck"))
    assert_equal((code, facts["ok"], facts.get("error")), broken, where=f"as a process: {errors[-500:]}")
    rank_pool.run(_save_shards, 2, str(tmp_path / "shards"))
    code, facts = _run_here(
        impl, capsys, "consolidate", str(tmp_path / "shards"), str(tmp_path / "out"), "--threads", "2"
    )
    assert_equal((code, facts["ok"]), (0, True), where="consolidate")
    whole = {f"r{r}": random_bits(torch.float32, (3,), r) for r in (0, 1)}
    assert_folder(tmp_path / "out", {"model-00001-of-00001.safetensors": ["r0", "r1"]}, whole)


# Texts of a file of JSON, and the error that names what is wrong with it.
_NO_OBJECT = ("", "{", '{"a": 1, "b": 1', "null", "[]", '["a"]', '"a"', "1", "NaN", "\ufeff{}", "[" * 5000, "{}{}")
_MAPPINGS = {
    **dict.fromkeys(_NO_OBJECT, "FormatError"),
    '{"a": 1, "b": 1, "a": 2}': "FormatError",
    '{"a": NaN, "b": 1}': "FormatError",
    '{"a": 1e999, "b": 1}': "FormatError",
    '{"a": "1", "b": 1}': "ConfigError",
    '{"a": 1.0, "b": 1}': "ConfigError",
    '{"a": true, "b": 1}': "ConfigError",
    '{"a": null, "b": 1}': "ConfigError",
    '{"a": {}, "b": [1]}': "ConfigError",
    '{"a": 0, "b": 1}': "ConfigError",
    '{"a": 1, "b": 3}': "ConfigError",
    '{"a": 1}': "PlanError",
    "{}": "PlanError",
}
_INDICES = {
    **dict.fromkeys(_NO_OBJECT, "FormatError"),
    "{}": "FormatError",
    '{"weight_map": null}': "FormatError",
    '{"weight_map": ["a"]}': "FormatError",
    '{"weight_map": {"a": 1}}': "FormatError",
    '{"weight_map": {"a": null}}': "FormatError",
    '{"weight_map": {"a": ["f.safetensors"]}}': "FormatError",
    '{"weight_map": {"a": "f.safetensors", "a": "f.safetensors"}}': "FormatError",
    '{"weight_map": {"a": "f.safetensors"}, "weight_map": {}}': "FormatError",
    '{"weight_map": {"a": "../f.safetensors"}}': "FormatError",
    '{"weight_map": {"a": "g.safetensors"}}': "CorruptionError",
    '{"weight_map": {"x": "f.safetensors"}}': "CorruptionError",
}
_ENTRY = '{"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}'
_HEADERS = {
    **dict.fromkeys(_NO_OBJECT, "FormatError"),
    f'{{"a": {_ENTRY}, "a": {_ENTRY}}}': "FormatError",
    '{"a": null}': "FormatError",
    '{"a": [1]}': "FormatError",
    _ENTRY.join(('{"a": ', ', "__metadata__": {"x": 1}}')): "FormatError",
    _ENTRY.join(('{"a": ', ', "__metadata__": []}')): "FormatError",
    f'{{"a": {_ENTRY.replace("[2]", "2")}}}': "FormatError",
    f'{{"a": {_ENTRY.replace("[2]", "[2.0]")}}}': "FormatError",
    f'{{"a": {_ENTRY.replace("U8", "U7")}}}': "FormatError",
}


def _with_bytes(texts: dict[str, str]) -> dict[bytes, str]:
    # Beside texts, what is none, and the mark of another order of bytes.
    return {text.encode(): error for text, error in texts.items()} | {b'{"a\xff": 1}': "FormatError"}


def _assert_named(impl: Any, capsys: Any, words: list[str], status: int, error: str, where: str) -> None:
    """The command ends with this status and error, as JSON where that is asked for; with nothing else on stdout."""
    main = importlib.import_module(f"{impl.__name__}.checkpoint.__main__").main
    for flags in (["--json"], []):
        with succeeds("the command", where=f"{where} {flags}"):
            code = main([*words, *flags])
        out, err = capsys.readouterr()
        if flags:
            with succeeds("reading the one JSON object", where=where):
                said = json.loads(out)
            found = code, said["ok"], said["error"], said["path"], bool(said["message"])
            assert_equal(found, (status, False, error, words[1], True), where=where)
        else:
            assert_equal((code, out, err.split(":")[0]), (status, "", error), where=f"{where}, as text")


@requirement(
    "CKPT-742",
    "Every file that the command line reads, of a mapping, an index or a header, that is no JSON, has a name twice or "
    "other types MUST be a named error of status 1, of diff 2, with --json in one object; nothing is made.",
    needs=NEEDS,
)
def test_malformed_files(impl: Any, checkpoint: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shards, out, good, bad = (tmp_path / name for name in ("shards", "out", "good", "bad"))
    mapping, good_folder = tmp_path / "mapping.json", str(good)
    state = {"a": torch.ones(3), "b": torch.ones(2)}
    save(checkpoint, state, shards, enable_consolidation=False)
    save(checkpoint, state, good)
    merge = ["consolidate", str(shards), str(out), "--mapping", str(mapping)]
    _assert_named(impl, capsys, merge, 1, "FileNotFoundError", "no mapping")
    for content, error in _with_bytes(_MAPPINGS).items():
        mapping.write_bytes(content)
        _assert_named(impl, capsys, merge, 1, error, f"mapping {content[:60]!r}")
    bad.mkdir()
    commands: list[tuple[int, list[str]]] = [
        (1, ["inspect", str(bad)]),
        (1, ["verify", str(bad)]),
        (1, ["consolidate", str(bad), str(out)]),
        (2, ["diff", str(bad), good_folder]),
    ]
    checkpoint.save_file({"a": torch.ones(2)}, bad / "f.safetensors")
    for content, error in _with_bytes(_INDICES).items():
        (bad / "model.safetensors.index.json").write_bytes(content)
        for status, words in commands:
            _assert_named(impl, capsys, words, status, error, f"{words[0]}: index {content[:60]!r}")
    (bad / "model.safetensors.index.json").unlink()
    for content, error in _with_bytes(_HEADERS).items():
        (bad / "f.safetensors").write_bytes(pack(content, b"xy"))
        for status, words in commands:
            _assert_named(impl, capsys, words, status, error, f"{words[0]}: header {content[:60]!r}")
    left = [path.name for path in tmp_path.iterdir() if path not in (shards, good, bad, mapping)]
    assert_equal(left, [], where="what was made")


# Paths at which nothing can be read, and the errors of a checkpoint read there, of a mapping, and of a clean-up.
_BAD_PATHS = {
    "nothing": ("FileNotFoundError", "FileNotFoundError", "MissingCheckpointError"),
    "nothing/b.safetensors": ("FileNotFoundError", "FileNotFoundError", "MissingCheckpointError"),
    "dangling": ("FileNotFoundError", "FileNotFoundError", "MissingCheckpointError"),
    "text/b": ("NotADirectoryError", "NotADirectoryError", "MissingCheckpointError"),
    "text/b.safetensors": ("NotADirectoryError", "NotADirectoryError", "MissingCheckpointError"),
    "loop": ("OSError", "OSError", "MissingCheckpointError"),
    "loop/b.safetensors": ("OSError", "OSError", "MissingCheckpointError"),
    "n" * 300: ("OSError", "OSError", "OSError"),
    "n" * 300 + "/b.safetensors": ("OSError", "OSError", "OSError"),
    "pipe": ("FormatError", None, "MissingCheckpointError"),
    "text": ("FormatError", "FormatError", "MissingCheckpointError"),
    "empty": ("MissingCheckpointError", "IsADirectoryError", None),
    "empty.safetensors": ("MissingCheckpointError", "IsADirectoryError", None),
}
_BAD_OUTPUTS = {
    "text": "CheckpointExistsError",
    "pipe": "CheckpointExistsError",
    "text/b": "StorageError",
    "n" * 300: "StorageError",
    "n" * 300 + "/b": "StorageError",
}


def _make_bad_paths(folder: Path) -> None:
    (folder / "text").write_text("no JSON")
    (folder / "dangling").symlink_to(folder / "nothing")
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "empty").mkdir()
    (folder / "empty.safetensors").mkdir()
    os.mkfifo(folder / "pipe")


@requirement(
    "CKPT-800",
    "Each command that is given a path which the system refuses or which is of another kind, as any of its arguments, "
    "MUST end with a named error of status 1, of diff 2, with --json in one object, and make nothing.",
    needs=NEEDS,
)
def test_bad_paths(impl: Any, checkpoint: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shards, good, out = (str(tmp_path / name) for name in ("shards", "good", "out"))
    save(checkpoint, {"a": torch.ones(3)}, tmp_path / "shards", enable_consolidation=False)
    save(checkpoint, {"a": torch.ones(3)}, tmp_path / "good")
    _make_bad_paths(tmp_path)
    before = sorted(os.listdir(tmp_path))
    commands: list[tuple[int, list[str], str | None]] = []
    for name, (as_checkpoint, as_mapping, as_folder) in _BAD_PATHS.items():
        bad = str(tmp_path / name)
        for words in (["inspect", bad], ["verify", bad], ["consolidate", bad, out]):
            commands.append((1, words, as_checkpoint))
        commands += [(2, ["diff", bad, good], as_checkpoint), (2, ["diff", good, bad], as_checkpoint)]
        commands.append((1, ["consolidate", shards, out, "--mapping", bad], as_mapping))
        commands += [(1, ["clean", bad, *flags], as_folder) for flags in ([], ["--delete", "--older-than", "0"])]
    commands += [(1, ["consolidate", shards, str(tmp_path / name)], error) for name, error in _BAD_OUTPUTS.items()]
    for status, words, error in commands:
        if error is not None:
            where = " ".join(words).replace(str(tmp_path), "").replace("n" * 300, "n...")
            _assert_named(impl, capsys, words, status, error, where)
    assert_equal(sorted(os.listdir(tmp_path)), before, where="what was made")


# What a stream of each encoding shows of two names and of a byte that is no text.
_SHOWN = {
    "ascii": ("\\xe9", "\\u6f22", "\\udcff"),
    "latin-1": ("é", "\\u6f22", "\\udcff"),
    "utf-8": ("é", "漢", "\\udcff"),
    "utf-16": ("é", "漢", "\\udcff"),
    "none": ("é", "漢", "\\udcff"),
}


@requirement(
    "CKPT-816",
    "As text, names of tensors, files and folders that standard output cannot encode MUST be shown escaped, and all "
    "others as they are, by every command; none MUST fail because of a name.",
    needs=NEEDS,
)
@pytest.mark.parametrize("encoding", sorted(_SHOWN))
def test_names_beyond_the_encoding(
    impl: Any, checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    main = importlib.import_module(f"{impl.__name__}.checkpoint.__main__").main
    byte = os.fsdecode(b"\xff")
    accent, sign, shown = _SHOWN[encoding]
    first, second = tmp_path / "first", tmp_path / "second"
    save(checkpoint, {"é": torch.ones(1), "漢": torch.ones(1)}, first)
    second.mkdir()
    checkpoint.save_file({"é": torch.ones(2)}, second / f"{byte}.safetensors")
    left = second / f".{byte}.saving-0123456789ab"
    left.mkdir()
    os.utime(left, (0, 0))
    line = "{:>12} {:<24} {}  [{}]\n".format
    summed = {"é": torch.ones(1)}
    checkpoint.save_file(summed, tmp_path / "summed.safetensors", checksums=True)
    cases: dict[str, tuple[list[Path | str], int, str]] = {
        "inspect": (["inspect", second], 0, line("F32", "[2]", accent, f"{shown}.safetensors")),
        "verify": (["verify", tmp_path / "summed.safetensors"], 0, "ok: 1 tensors"),
        "diff": (["diff", first, second], 1, f"{accent}: shape (1,) and (2,)\n{sign}: not in the second\n"),
        "clean": (["clean", second], 0, f"delete   {second}/.{shown}.saving-0123456789ab  (saving of {shown}, "),
    }
    for where, (words, status, begin) in cases.items():
        # Text in memory has no encoding.
        has_none = encoding == "none"
        stream = io.StringIO() if has_none else io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True)
        with monkeypatch.context() as patch, succeeds("the command", where=f"{where} in {encoding}"):
            patch.setattr(sys, "stdout", stream)
            code = main([*map(str, words)])
        stream.seek(0)
        said = stream.read()
        assert_equal((code, said[: len(begin)]), (status, begin), where=f"{where} in {encoding}")


# Values that an option refuses: what is wrong, and what would be right.
_COUNT, _HOURS = ("not a count", "an int >= 1"), ("not an age in hours", "a number >= 0")
_FORM, _LEAST = ("not a size", "bytes, or a number with KB, MB, GB or TB"), ("not a size", ">= 1")
_BAD_VALUES = {
    "--threads": dict.fromkeys(("0", "-1", "1.5", "many", "", "nan"), _COUNT),
    "--older-than": dict.fromkeys(("-1", "-1e-9", "nan", "-inf", "inf", "1e999", "a day", ""), _HOURS),
    "--max-shard-size": {**dict.fromkeys(("5XB", "GB", "", "nanGB"), _FORM), "0": _LEAST, "-5GB": _LEAST},
}


@requirement(
    "CKPT-853",
    "A value that an option of the command line refuses MUST be named with what was expected, with status 2 and before "
    "anything is done; an age in hours MUST be a number from 0, a shard size bytes or a number with a unit.",
    needs=NEEDS,
)
def test_values_of_options(impl: Any, checkpoint: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main = importlib.import_module(f"{impl.__name__}.checkpoint.__main__").main
    shards, out, left = (str(tmp_path / name) for name in ("shards", "out", ".x.saving-0123456789ab"))
    save(checkpoint, {"a": torch.ones(8), "b": torch.ones(8)}, tmp_path / "shards", enable_consolidation=False)
    os.mkdir(left)
    words = {"--older-than": ["clean", str(tmp_path), "--delete"]}
    for option, values in _BAD_VALUES.items():
        for value, (what, expected) in values.items():
            try:
                code = main([*words.get(option, ["consolidate", shards, out]), f"{option}={value}"])
            except SystemExit as refusal:
                code = refusal.code
            said = capsys.readouterr().err
            got = value in said.partition("got: ")[2].partition("; expected")[0]
            told = (code, what in said, got, f"expected: {expected}" in said)
            assert_equal(told, (2, True, True, True), where=f"{option}={value}: {said[-300:]}")
    assert_equal(sorted(os.listdir(tmp_path)), [".x.saving-0123456789ab", "shards"], where="what is there")
    for size, file_count in (("32", 2), ("0.032KB", 2), ("64", 1)):
        where = f"--max-shard-size={size}"
        with succeeds("the command", where=where):
            code, facts = _run_here(impl, capsys, "consolidate", shards, out + size, f"--max-shard-size={size}")
        found = len(list(Path(out + size).glob("model-*.safetensors")))
        assert_equal((code, facts["ok"], found), (0, True, file_count), where=where)


@requirement(
    "CKPT-856",
    "A command of the shell whose reader has gone, as behind a pipe to head, MUST end with status 141 and say nothing "
    "of it, whether the output is large or small.",
    needs=NEEDS,
)
@pytest.mark.parametrize("tensor_count", [1, 2000])
def test_readers_that_have_gone(
    impl: Any, checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, tensor_count: int
) -> None:
    main = importlib.import_module(f"{impl.__name__}.checkpoint.__main__").main
    save(checkpoint, {f"tensor {i}": torch.ones(1) for i in range(tensor_count)}, tmp_path / "ck")
    for words in (["inspect"], ["verify"], ["inspect", "--json"]):
        reader, writer = os.pipe()
        os.close(reader)
        output, where = os.fdopen(writer, "w", encoding="utf-8"), f"{words}, {tensor_count} tensors"
        with monkeypatch.context() as patch, succeeds("the command", where=where):
            patch.setattr(sys, "stdout", output)
            code = main([words[0], str(tmp_path / "ck"), *words[1:]])
        # What is left is written now, if that still goes to the pipe.
        with suppress(BrokenPipeError):
            output.close()
        said = capsys.readouterr().err
        assert_equal((code, "ipe" in said), (141, False), where=f"{where}: {said[-300:]}")


def _folders_of_others(path: Path) -> dict[Path, tuple[str, ...]]:
    """Folders without safetensors files, and what is to be said of each."""
    native, run, others = (path / name for name in ("native", "run", "others"))
    save_with(dcp.FileSystemWriter(native), {"w": torch.ones(2)})
    for name in ("step-9", "step-10", "step-2", "step-11", "step-012", "steps"):
        (run / name).mkdir(parents=True)
    others.mkdir()
    (others / "pytorch_model.bin").write_bytes(b"")
    return {
        native: ("format, with .metadata", "load_training", "CheckpointManager", "dcp.load"),
        run: ("['step-9', 'step-10', 'step-11']", "one of them"),
        others: ("got: ['pytorch_model.bin']", "expected: safetensors files;"),
    }


@requirement(
    "CKPT-964",
    "Of a folder without safetensors files a reader MUST say what it has: torch's format and who reads that, the last "
    "steps of a run, or its files.",
)
def test_folders_of_others(checkpoint: Any, tmp_path: Path) -> None:
    for folder, words in _folders_of_others(tmp_path).items():
        said = ("no safetensors file", f"where: {folder}", *words)
        with raises(MissingCheckpointError, mentions=said, where=folder.name):
            load(checkpoint, {"w": torch.zeros(2)}, folder)


@requirement(
    "CKPT-965",
    "Of a folder without safetensors files every command of the shell, but clean, MUST say what a reader says, and end "
    "with the status of what is no checkpoint.",
    needs=NEEDS,
)
def test_commands_on_folders_of_others(impl: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main = importlib.import_module(f"{impl.__name__}.checkpoint.__main__").main
    for folder, words in _folders_of_others(tmp_path).items():
        for command, status in {"inspect": 1, "verify": 1, "diff": 2, "consolidate": 1}.items():
            more = [str(tmp_path / "out")] if command in ("diff", "consolidate") else []
            code = main([command, str(folder), *more])
            text = capsys.readouterr().err
            assert_equal(code, status, where=f"{command} {folder.name}")
            missing = [word for word in (f"where: {folder}", *words) if word not in text]
            assert_equal(missing, [], where=f"what {command} does not say of {folder.name}: {text[-500:]}")
