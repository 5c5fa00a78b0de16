"""The command line's comparison and cleaning of checkpoints, and what it says of their bytes."""

from __future__ import annotations

import importlib
import json
import logging
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard

from conformance.checkpoint.cases import (
    FILE,
    mesh_of,
    own_count,
    peak_from_here,
    random_bits,
    save,
    save_ranks,
    sharded,
)
from conformance.harness import Rank, assert_equal, assert_le, requirement, succeeds
from conformance.harness.cli import main as twinproof

NEEDS = ("staged_copies",)
DAY_S = 86_400


def _run(impl: Any, capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, dict[str, Any]]:
    main = importlib.import_module(f"{impl.__name__}.checkpoint.__main__").main
    capsys.readouterr()
    code = main([*map(str, words), "--json"])
    return code, json.loads(capsys.readouterr().out)


@requirement(
    "CKPT-533",
    "The command line's verify MUST say whether bytes or only structure were verified, MUST name a tensor whose bytes "
    "do not agree and exit 1; `twinproof checkpoint` MUST be the same command.",
    needs=NEEDS,
)
def test_verify_says_what(impl: Any, checkpoint: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = {"w": torch.randn(4, 3), "v": torch.randn(5)}
    save(checkpoint, state, tmp_path / "plain")
    code, facts = _run(impl, capsys, "verify", tmp_path / "plain")
    said = "only the structure was verified" in facts["verified"]
    assert_equal((code, facts["checked"], facts["unchecked"], said), (0, [], ["v", "w"], True), where="without sums")
    save(checkpoint, state, tmp_path / "ck", checksums=True)
    code, facts = _run(impl, capsys, "verify", tmp_path / "ck")
    assert_equal((code, facts["checked"], facts["unchecked"]), (0, ["v", "w"], []), where="with sums")
    content = bytearray((tmp_path / "ck" / FILE).read_bytes())
    content[-1] ^= 64
    (tmp_path / "ck" / FILE).write_bytes(content)
    code, facts = _run(impl, capsys, "verify", tmp_path / "ck")
    named = "'w'" in facts["message"] and "'v'" not in facts["message"]
    assert_equal((code, facts["error"], named), (1, "CorruptionError", True), where="a flipped bit")
    assert_equal(twinproof(["checkpoint", "verify", str(tmp_path / "plain")]), 0, where="twinproof checkpoint")


def _save_columns(rank: Rank, path: str) -> None:
    state = {"w": sharded(random_bits(torch.float32, (6, 8), 1), mesh_of(rank), [Shard(1)])}
    save_ranks(rank, state, Path(path), enable_consolidation=False)


@requirement(
    "CKPT-534",
    "diff MUST find every difference of names, dtypes, shapes and bits, with the first place of each, over any two "
    "layouts; it MUST exit 0 for equal, 1 for different checkpoints, and 2 where it cannot compare.",
    needs=NEEDS,
)
def test_diff(impl: Any, checkpoint: Any, rank_pool: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = random_bits(torch.float32, (6, 8), 1)
    save(checkpoint, {"w": whole}, tmp_path / "a")
    rank_pool.run(_save_columns, 2, str(tmp_path / "shards"))
    code, facts = _run(impl, capsys, "diff", tmp_path / "a", tmp_path / "shards")
    assert_equal((code, facts["differences"]), (0, {}), where="files and shards")
    nan = torch.tensor([float("nan"), 0.0, 1.0])
    same = {"n": nan, "s": torch.tensor(1), "e": torch.empty(0, 2)}
    first = {**same, "w": whole, "gone": torch.ones(2), "dtype": torch.ones(2), "shape": torch.ones(2), "zero": nan * 0}
    second = {**same, "w": whole.clone(), "new": torch.ones(2), "dtype": torch.ones(2).int(), "shape": torch.ones(2, 1)}
    second["w"].view(torch.int32)[2, 5] ^= 1
    second["w"].view(torch.int32)[4, 1] ^= 1
    second["zero"] = (nan * 0).clone()
    second["zero"][1] = -0.0
    save(checkpoint, first, tmp_path / "b")
    save(checkpoint, second, tmp_path / "c")
    code, facts = _run(impl, capsys, "diff", tmp_path / "b", tmp_path / "c")
    expected = {
        "dtype": "dtype F32 and I32",
        "gone": "not in the second",
        "new": "not in the first",
        "shape": "shape (2,) and (2, 1)",
        "w": "2 of 48 values, the first at [2, 5]",
        "zero": "1 of 3 values, the first at [1]",
    }
    assert_equal((code, facts["differences"]), (1, expected), where="differences")
    code, facts = _run(impl, capsys, "diff", tmp_path / "b", tmp_path / "absent")
    assert_equal((code, facts["ok"]), (2, False), where="nothing there")


@requirement("CKPT-535", "diff MUST hold pieces of two tensors, whatever their size.", needs=NEEDS)
def test_diff_in_pieces(impl: Any, checkpoint: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = {"a": torch.zeros(6, 16 << 20, dtype=torch.uint8)}
    for name in "ab":
        save(checkpoint, state, tmp_path / name, durable=False)
    del state
    before = peak_from_here()
    code, facts = _run(impl, capsys, "diff", tmp_path / "a", tmp_path / "b")
    assert_equal((code, facts["differences"]), (0, {}), where="equal")
    assert_le(own_count("status", "VmHWM") - before, 24 << 10, where="growth in KiB over 96 MiB of data")


HEX = "0123456789ab"


def _leftovers(root: Path) -> dict[str, Path]:
    made = {
        "saving": root / f".ck.saving-{HEX}",
        "young": root / f".ck.saving-{HEX[::-1]}",
        # Made long ago, like its folder of folders; what it holds is being written.
        "at work": root / f".ck.saving-{HEX[6:]}{HEX[:6]}",
        "previous": root / f".ck.previous-{HEX}",
        "needed": root / f".lost.previous-{HEX}",
        "deleting": root / f".step-5.deleting-{HEX}",
        "other": root / f".ck.saving-{HEX}0",
        "users": root / "ck.saving",
    }
    for path in made.values():
        path.mkdir()
        (path / "model.safetensors").write_bytes(b"1")
    made["file"] = root / f".x.safetensors.saving-{HEX}"
    made["file"].write_bytes(b"1")
    made["link"] = root / f".link.saving-{HEX}"
    made["link"].symlink_to(made["users"])
    (made["at work"] / "inner").mkdir()
    (made["at work"] / "inner/model.safetensors").write_bytes(b"1")
    for name, path in made.items():
        age_s = 0 if name == "young" else 2 * DAY_S
        for each in (*path.glob("*"), path):
            status = os.lstat(each)
            os.utime(each, (status.st_atime, status.st_mtime - age_s), follow_symlinks=False)
    return made


@requirement(
    "CKPT-714",
    "clean MUST find what lies beside a checkpoint that is the current folder, or is named through a link.",
    needs=NEEDS,
)
def test_clean_the_current_folder(
    impl: Any, checkpoint: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save(checkpoint, {"w": torch.randn(3)}, tmp_path / "ck")
    made = _leftovers(tmp_path)
    beside = sorted(str(made[name]) for name in ("saving", "young", "at work", "previous"))
    (tmp_path / "apart").mkdir()
    (tmp_path / "apart/link").symlink_to(tmp_path / "ck")
    monkeypatch.chdir(tmp_path / "ck")
    for path in (".", tmp_path / "apart/link"):
        _, facts = _run(impl, capsys, "clean", path)
        assert_equal(sorted(facts["leftovers"]), beside, where=str(path))


@requirement(
    "CKPT-536",
    "clean MUST name what interrupted saves left and delete nothing unasked; with --delete it MUST delete what is old "
    "enough, by what changed in it last, and never what another made, a link, or the only copy of a checkpoint.",
    needs=NEEDS,
)
def test_clean(impl: Any, checkpoint: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(checkpoint, {"w": torch.randn(3)}, tmp_path / "ck")
    made = _leftovers(tmp_path)
    ours = {"saving", "young", "at work", "previous", "needed", "deleting", "file"}
    code, facts = _run(impl, capsys, "clean", tmp_path)
    assert_equal((code, sorted(facts["leftovers"])), (0, sorted(str(made[n]) for n in ours)), where="named")
    assert_equal([name for name, path in made.items() if not os.path.lexists(path)], [], where="deleted unasked")
    code, facts = _run(impl, capsys, "clean", tmp_path / "ck")
    beside = sorted(str(made[name]) for name in ("saving", "young", "at work", "previous"))
    assert_equal(sorted(facts["leftovers"]), beside, where="of one checkpoint")
    code, facts = _run(impl, capsys, "clean", tmp_path, "--delete")
    gone = sorted(name for name, path in made.items() if not os.path.lexists(path))
    assert_equal((code, gone), (0, ["deleting", "file", "previous", "saving"]), where="deleted")
    _run(impl, capsys, "clean", tmp_path, "--delete", "--older-than", "0")
    gone = sorted(name for name, path in made.items() if not os.path.lexists(path))
    assert_equal(gone, ["at work", "deleting", "file", "previous", "saving", "young"], where="of any age")


@requirement(
    "CKPT-657",
    "clean MUST take what is asked for as hours, parts of one too, and 24 of them where nothing is said: a staging "
    "folder that is younger may be that of a save that waits.",
    needs=NEEDS,
)
def test_hours(impl: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    now, ages_h = time.time(), (0.4, 0.6, 2.0, 23.0, 25.0)
    for asked in ([], ["--older-than", "0.5"], ["--older-than", "1"], ["--older-than", "24"], ["--older-than", "26"]):
        made = {}
        for number, age_h in enumerate(ages_h):
            made[age_h] = tmp_path / f".step-{number}.saving-{HEX}"
            made[age_h].mkdir(exist_ok=True)
            os.utime(made[age_h], (now - 3600 * age_h,) * 2)
        code, _ = _run(impl, capsys, "clean", tmp_path, "--delete", *asked)
        limit_h = float(asked[1]) if asked else 24.0
        left = [age_h for age_h, path in made.items() if path.exists()]
        assert_equal((code, left), (0, [age_h for age_h in ages_h if age_h < limit_h]), where=f"left, asked {asked}")


@requirement(
    "CKPT-537",
    "A save that finds leftovers of interrupted saves of its name MUST name them; the only copy of a checkpoint MUST "
    "be named as such, not as something to delete.",
)
def test_leftovers_are_named(checkpoint: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = _leftovers(tmp_path)
    caplog.set_level(logging.WARNING, logger="twinproof.checkpoint")
    (tmp_path / "ck").mkdir()
    save(checkpoint, {"w": torch.randn(3)}, tmp_path / "ck")
    named = [
        name for name, path in made.items() if f"{path}," in f"{caplog.text.strip()}," or f"{path} " in caplog.text
    ]
    assert_equal(sorted(named), ["at work", "previous", "saving", "young"], where="folder")
    caplog.clear()
    checkpoint.save_file({"w": torch.randn(3)}, tmp_path / "x.safetensors")
    assert_equal(str(made["file"]) in caplog.text, True, where="file")
    caplog.clear()
    save(checkpoint, {"w": torch.randn(3)}, tmp_path / "lost")
    only = [record.getMessage() for record in caplog.records if str(made["needed"]) in record.getMessage()]
    assert_equal([("only copy" in text, "safe to delete" in text) for text in only], [(True, False)], where="only copy")


@requirement(
    "CKPT-602",
    "diff MUST count differences, and name the first place, over all pieces, whatever it compares at once.",
    needs=NEEDS,
)
def test_diff_of_pieces(
    impl: Any, checkpoint: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = random_bits(torch.int16, (3, 4, 5), 1)
    other = whole.clone()
    places = [(0, 1, 2), (0, 1, 3), (1, 0, 0), (2, 3, 4)]
    for place in places:
        other[place] ^= 1
    save(checkpoint, {"w": whole}, tmp_path / "a")
    save(checkpoint, {"w": other}, tmp_path / "b")
    main = importlib.import_module(f"{impl.__name__}.checkpoint.__main__")
    for piece_bytes in (1, 2, 4, 10, 12, 40, 42, 1000):
        monkeypatch.setattr(main, "PIECE_BYTES", piece_bytes)
        code, facts = _run(impl, capsys, "diff", tmp_path / "a", tmp_path / "b")
        expected = {"w": "4 of 60 values, the first at [0, 1, 2]"}
        assert_equal((code, facts["differences"]), (1, expected), where=f"{piece_bytes} bytes at once")


@requirement(
    "CKPT-608",
    "The command line's consolidate MUST refuse by name a mapping that is no JSON object of names and numbers, and two "
    "rules for the files, before anything is written.",
    needs=NEEDS,
)
def test_refused_merges(impl: Any, checkpoint: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(checkpoint, {"w": torch.ones(3)}, tmp_path / "in", enable_consolidation=False)
    good, out = tmp_path / "good.json", tmp_path / "out"
    good.write_text('{"w": 1}')
    for text in ("", "{", '["w"]', "3", '{"w": "1"}', '{"w": 0}', '{"w": 1, "w": 2}', "\xff"):
        wrong = tmp_path / "wrong.json"
        wrong.write_bytes(text.encode("latin-1"))
        with succeeds("the command", where=f"a mapping {text!r}"):
            code, facts = _run(impl, capsys, "consolidate", tmp_path / "in", out, "--mapping", wrong)
        named = facts["error"] in ("FormatError", "ConfigError")
        assert_equal((code, named, out.exists()), (1, True, False), where=f"a mapping {text!r}")
    both = ("--mapping", good, "--max-shard-size", "1GB")
    code, facts = _run(impl, capsys, "consolidate", tmp_path / "in", out, *both)
    assert_equal((code, facts.get("error"), out.exists()), (1, "ConfigError", False), where="two rules")
    code, facts = _run(impl, capsys, "consolidate", tmp_path / "in", out, *both[:2])
    assert_equal((code, facts["ok"]), (0, True), where="one rule")


@requirement(
    "CKPT-609",
    "What vanishes while leftovers of saves are looked for MUST stop neither the look nor a save.",
)
def test_vanishing_leftovers(checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scandir = os.scandir

    def vanishing(path: Any = ".") -> Any:
        # Another save removes its folder between two looks at it.
        if isinstance(path, (str, os.PathLike)) and ".ck.saving-" in os.fspath(path):
            shutil.rmtree(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", vanishing)
    for inner in ("", "inner"):
        (tmp_path / f".ck.saving-{HEX}" / inner).mkdir(parents=True, exist_ok=True)
        with succeeds("a save", where=f"beside a folder that vanishes, {inner or 'itself'}"):
            save(checkpoint, {"w": torch.ones(2)}, tmp_path / "ck")
        assert_equal((tmp_path / "ck").is_dir(), True, where="the checkpoint")
