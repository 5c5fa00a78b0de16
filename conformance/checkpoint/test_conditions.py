"""Conditions that other modules leave on one side: the command line's text, and states that users seldom meet."""

from __future__ import annotations

import importlib
import io
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.checkpoint.cases import FILE, INDEX, save
from conformance.checkpoint.hostile import entry, pack
from conformance.harness import assert_equal, raises, requirement, succeeds
from twinproof.checkpoint import publish
from twinproof.errors import ConfigError, StorageError

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
