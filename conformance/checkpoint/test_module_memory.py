"""What modules keep for themselves: caches, lists and dicts that live as long as the process."""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch

from conformance.checkpoint.cases import INDEX, load, load_with, random_bits, save
from conformance.checkpoint.trainer import alone
from conformance.harness import assert_equal, assert_le, requirement

# A cache that has a bound may fill up to it.
_CACHE_SIZE_MAX = 1024
_CONTAINERS = (dict, list, set, deque)


def _count(value: Any, seen: dict[int, Any]) -> int:
    """The entries of a container, and of those in it."""
    if not isinstance(value, _CONTAINERS) or id(value) in seen:
        return 0
    # As an object, so that no other gets its id.
    seen[id(value)] = value
    inner = list(value.values()) if isinstance(value, dict) else list(value)
    return len(inner) + sum(_count(each, seen) for each in inner)


def _kept_by(value: Any) -> Iterator[Any]:
    """What an attribute of a module or of a class keeps: itself, or what a function remembers between two calls."""
    value = getattr(value, "__func__", getattr(value, "fget", value))
    yield value
    if isinstance(value, FunctionType):
        yield vars(value)
        yield from value.__defaults__ or ()
        yield value.__kwdefaults__ or {}
        for cell in value.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # Nothing was put there yet.
                continue


def _places(module: ModuleType) -> Iterator[tuple[str, Any]]:
    for name, value in list(vars(module).items()):
        if name.startswith("__") or getattr(value, "__module__", module.__name__) != module.__name__:
            continue
        yield name, value
        if isinstance(value, type):
            for inner, each in list(vars(value).items()):
                if not inner.startswith("__") or isinstance(each, FunctionType):
                    yield f"{name}.{inner}", each


def _held(*roots: str) -> dict[str, int]:
    """Place -> entries, of everything that the modules of these packages keep; caches with a bound are full or not."""
    found: dict[str, int] = {}
    seen: dict[int, Any] = {}
    for path, module in sorted(sys.modules.items()):
        if path.split(".")[0] not in roots or module is None:
            continue
        for name, value in _places(module):
            if hasattr(value, "cache_info"):
                info, where = value.cache_info(), f"{path}.{name}"
                if info.maxsize is None:
                    found[where] = info.currsize
                else:
                    assert_le(info.maxsize, _CACHE_SIZE_MAX, where=f"entries that {where} may hold")
            else:
                found[f"{path}.{name}"] = sum(_count(each, seen) for each in _kept_by(value))
    return found


class _Use:
    """Everything that a program does with checkpoints, with other names, shapes and values each time."""

    def __init__(self, checkpoint: Any, folder: Path) -> None:
        self.checkpoint, self.folder = checkpoint, folder

    def once(self, number: int) -> None:
        """Save, load, merge and verify."""
        state = {
            f"{number}.a": random_bits(torch.float32, [40 + number, 3], number),
            f"{number}.b": random_bits(torch.int16, [number + 1], number),
        }
        targets = {name: torch.empty_like(value) for name, value in state.items()}
        small = {"checksums": True, "durable": False, "block_bytes": 64}
        final, shards, merged = (self.folder / f"{name}-{number}" for name in ("final", "shards", "merged"))
        save(self.checkpoint, state, final, metadata={f"{number}": f"{number}"}, **small)
        load(self.checkpoint, targets, final, verify_checksums=True)
        save(self.checkpoint, state, shards, enable_consolidation=False, **small)
        self.checkpoint.consolidate_safetensors_files(shards, merged, dict.fromkeys(state, 1))
        # Which verifies it.
        self.checkpoint.consolidate_safetensors_files(final, final)
        self._one_file(number)
        self._training(number)

    def _one_file(self, number: int) -> None:
        folder, rows = self.folder / f"quantized-{number}", number + 1
        folder.mkdir()
        state = {
            f"{number}.weight": random_bits(torch.float8_e4m3fn, [rows, 4], number),
            f"{number}.weight_scale_inv": torch.ones(-(-rows // 128), 1),
        }
        self.checkpoint.save_file(state, folder / "model.safetensors", {f"{number}": "kept"})
        self.checkpoint.load_file(folder / "model.safetensors")
        (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(state, "model.safetensors")}))
        reader = self.checkpoint.QuantizedHuggingFaceStorageReader(folder)
        load_with(reader, {f"{number}.weight": torch.empty(rows, 4)})

    def _training(self, number: int) -> None:
        folder, model = (
            self.folder / f"run-{number}",
            torch.nn.ModuleDict({f"{number}": torch.nn.Linear(number + 1, 1)}),
        )
        adam = torch.optim.Adam(model.parameters())
        with alone():
            self.checkpoint.save_training(folder / "step-1", model, adam, 1, durable=False)
            self.checkpoint.load_training(folder / "step-1", model, adam)
            options = {"interval": 1, "durable": False, "optimizers": adam}
            with self.checkpoint.CheckpointManager(folder, model=model, **options) as manager:
                manager.load()
                manager.save(2)


@requirement(
    "CKPT-741",
    "Modules, classes and functions MUST keep nothing of the checkpoints that were saved, loaded, merged and verified: "
    "after many of them, each with other names, shapes and values, they hold what they held after a few.",
)
def test_modules_keep_nothing(impl: Any, checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twinproof.checkpoint.catalog.PIECE_BYTES", 64)
    use, roots = _Use(checkpoint, tmp_path), ("twinproof", impl.__name__.split(".")[0])
    for number in range(2):
        use.once(number)
    few = _held(*roots)
    for number in range(2, 6):
        use.once(number)
    many = _held(*roots)
    grown = {place: (few.get(place, 0), count) for place, count in many.items() if count != few.get(place, 0)}
    assert_equal(grown, {}, where="entries that modules hold, after 2 and after 6 checkpoints of each kind")
    assert_le(100, len(many), where="places that were looked at")
