"""Numbers that lie exactly on a border, and what is told of readers, writers and stagers."""

from __future__ import annotations

import importlib
import json
import logging
import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.staging import AsyncStager

from conformance.checkpoint.cases import load_with
from conformance.checkpoint.hostile import entry, pack
from conformance.checkpoint.trainer import Trainer, alone
from conformance.harness import assert_equal, assert_le, assert_same_bytes, raises, requirement, succeeds
from twinproof.checkpoint import publish
from twinproof.checkpoint.format import lay_out, layout_of, with_options
from twinproof.errors import ConfigError, FormatError

# One process saves here, and torch's threads warn of it when they like.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

HEX = "0123456789ab"


@requirement(
    "CKPT-817",
    "clean MUST delete a leftover that is exactly as old as --older-than says, and keep one that is a second younger.",
    needs=("staged_copies",),
)
def test_leftovers_of_the_least_age(
    impl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main = importlib.import_module(f"{impl.__name__}.checkpoint.__main__").main
    monkeypatch.setattr(publish, "time", SimpleNamespace(time=lambda: 100_000.0))
    for hours in (0, 1, 2.5):
        least_s = int(3600 * hours)
        folder = tmp_path / f"{hours}"
        for name, age_s in (("older", least_s + 1), ("least", least_s), ("younger", least_s - 1)):
            path = folder / f".{name}.saving-{HEX}"
            path.mkdir(parents=True)
            os.utime(path, (100_000 - age_s,) * 2)
        with succeeds("the command", where=f"{hours} hours"):
            main(["clean", str(folder), "--delete", "--older-than", f"{hours}", "--json"])
        told = [Path(path).name for path in json.loads(capsys.readouterr().out)["deleted"]]
        assert_equal(told, [f".{name}.saving-{HEX}" for name in ("least", "older")], where=f"told of {hours} hours")
        assert_equal(os.listdir(folder), [f".younger.saving-{HEX}"], where=f"left of {hours} hours")


@requirement(
    "CKPT-818",
    "A reader of quantized tensors MUST tell the bytes and calls of its reads: none before the first load, then all "
    "that were loaded, scales included, on any number of threads, and each further load added.",
    needs=("counted_io",),
)
def test_counts_of_quantized_reads(checkpoint: Any, tmp_path: Path) -> None:
    values = torch.ones(256, 64).to(torch.float8_e4m3fn)
    path, stored_bytes = tmp_path / "q.safetensors", 256 * 64 + 4 * 2
    checkpoint.save_file({"w.weight": values, "w.weight_scale_inv": torch.ones(2, 1)}, path)
    seen: list[tuple[int, int]] = []
    for thread_count in (1, 3):
        reader = checkpoint.QuantizedHuggingFaceStorageReader(path, thread_count)
        assert_equal((reader.stats.read_bytes, reader.stats.read_count), (0, 0), where="before the first load")
        counts: list[tuple[int, int]] = []
        for _ in range(3):
            load_with(reader, {"w.weight": torch.zeros(256, 64)})
            counts.append((reader.stats.read_bytes, reader.stats.read_count))
        assert_le(stored_bytes, counts[0][0], where="bytes of a load")
        assert_le(1, counts[0][1], where="calls of a load")
        added = [tuple(number * (each + 1) for number in counts[0]) for each in range(3)]
        assert_equal(counts, added, where="figures of one load, two and three")
        seen.append(counts[0])
    assert_equal(seen[1], seen[0], where="figures on three threads")


def _other_copies(device: torch.device) -> Any:
    raise NotImplementedError(device)


@requirement(
    "CKPT-819",
    "A reader and a writer MUST tell how their copies reach a device: torch's way for each device at first, then as "
    "they were told, each for itself.",
    needs=("counted_io",),
)
def test_copies_are_told(checkpoint: Any, tmp_path: Path) -> None:
    from fastimpl.checkpoint.device_copies import copies_for_device

    for kind in (checkpoint.HuggingFaceStorageReader, checkpoint.HuggingFaceStorageWriter):
        one, other = kind(tmp_path / "ck"), kind(tmp_path / "ck")
        assert_equal(one.choose_copies is copies_for_device, True, where=f"{kind.__name__}, at first")
        one.choose_copies = _other_copies
        assert_equal(one.choose_copies is _other_copies, True, where=f"{kind.__name__}, as told")
        assert_equal(other.choose_copies is copies_for_device, True, where=f"another {kind.__name__}")


@requirement(
    "CKPT-820",
    "A shape whose sizes but those that are 0 make 2 to the power of 60 or more MUST be refused by name, also where it "
    "has no bytes; one that makes less, and has none, MUST be loaded.",
)
def test_the_largest_shapes(checkpoint: Any, tmp_path: Path) -> None:
    path, most = tmp_path / "f.safetensors", 1 << 60
    shapes = [(most,), (most + 1,), (most - 1,), (most >> 1, 2), (1 << 30, 1 << 30), (most >> 1,), (most >> 1, 3)]
    for sizes in shapes:
        for shape in ([*sizes, 0], [0, *sizes]):
            path.write_bytes(pack("{" + entry(shape=json.dumps(shape), offsets="[0,0]") + "}", b""))
            if math.prod(sizes) >= most:
                with raises(FormatError, mentions=("overflows", f"{shape}", "'a'"), where=f"{shape}"):
                    checkpoint.load_file(path)
            else:
                with succeeds("a load", where=f"{shape}"):
                    found = checkpoint.load_file(path)["a"]
                assert_equal(list(found.shape), shape, where="shape")


class _Waited(AsyncStager):
    """Copies that are complete when they are waited for; whether torch waits is its own to say."""

    def __init__(self, *, is_waited_for: bool) -> None:
        self.is_waited_for = is_waited_for
        self.calls: list[str] = []

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        self.calls.append("stage")
        return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in state_dict.items()}

    @property
    def should_synchronize_after_execute(self) -> bool:
        return self.is_waited_for

    def synchronize_staging(self) -> None:
        self.calls.append("wait")

    def close(self) -> None:
        """Nothing to give back."""


@requirement(
    "CKPT-822",
    "A stager that a manager is given MUST be waited for within each asynchronous save where it says so, once, behind "
    "its copies, and not where it does not.",
)
def test_stagers_are_waited_for(checkpoint: Any, tmp_path: Path) -> None:
    for is_waited_for in (True, False):
        stager = _Waited(is_waited_for=is_waited_for)
        options = {"async_mode": "async", "stager": stager, "interval": 1}
        with Trainer(1).manager(checkpoint, tmp_path / f"{is_waited_for}", **options) as manager:
            for step in (1, 2):
                with alone(), succeeds("a save", where=f"waited for: {is_waited_for}"):
                    manager.save(step)
                expected = ["stage", *["wait"] * is_waited_for] * step
                assert_equal(stager.calls, expected, where=f"step {step}, waited for: {is_waited_for}")
                manager.maybe_wait_for_saving()


@requirement(
    "CKPT-823",
    "A file of the safetensors library MUST be brought into the one form that its metadata has, keys sorted, from two "
    "keys on, and stay byte for byte what it is with fewer.",
)
def test_keys_of_metadata(checkpoint: Any) -> None:
    state = {"w": torch.ones(3)}
    for count in range(5):
        metadata = {f"k{number}": f"{number}" for number in range(count)}
        layout = layout_of(state, metadata)
        data = bytes(layout.file_bytes - len(layout.header))
        text = "{" + ",".join(f'"k{number}":"{number}"' for number in range(count)[::-1]) + "}"
        sorted_text = json.dumps(metadata, separators=(",", ":"))
        unsorted = layout.header.replace(sorted_text.encode(), text.encode(), 1) + data
        with succeeds("a change of form", where=f"{count} keys"):
            made = with_options(unsorted, layout)
        assert_same_bytes(made, layout.header + data, where=f"{count} keys")
        assert_equal(made is unsorted, count < 2, where=f"{count} keys: whether it is the file as it was")


@requirement(
    "CKPT-824",
    "A header that is exactly as long as the format allows MUST be written, and no warning come of one that is exactly "
    "as long as remote readers read; a word more is refused, or warned of.",
)
def test_the_longest_headers(checkpoint: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="twinproof.checkpoint")
    tensors = [("w", torch.float32, (2,))]
    other_bytes = len(lay_out(tensors, {"k": ""}).header.rstrip()) - 8
    for most_bytes in (25_000_000, 100_000_000):
        caplog.clear()
        with succeeds("a layout", where=f"{most_bytes} bytes"):
            made = lay_out(tensors, {"k": "x" * (most_bytes - other_bytes)})
        assert_equal(len(made.header) - 8, most_bytes, where="bytes of the header")
        is_warned = "model hubs' remote parsers" in caplog.text
        assert_equal(is_warned, most_bytes > 25_000_000, where=f"warned of {most_bytes} bytes")
    caplog.clear()
    lay_out(tensors, {"k": "x" * (25_000_001 - other_bytes)})
    assert_equal("25000008 bytes" in caplog.text, True, where="warned of a word more")
    with raises(ConfigError, mentions=("header too long", "got: 100000008"), where="a word more"):
        lay_out(tensors, {"k": "x" * (100_000_001 - other_bytes)})
