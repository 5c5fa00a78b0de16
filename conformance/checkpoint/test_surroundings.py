"""What the process is beside a checkpoint: defaults, modes and a garbage collector as a caller has set them."""

from __future__ import annotations

import gc
import inspect
import json
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner

from conformance.checkpoint.cases import INDEX, load, load_with, random_bits, save, zeros_like
from conformance.harness import assert_equal, assert_same_bytes, assert_same_tensors, raises, requirement, succeeds
from conformance.harness.surroundings import SURROUNDINGS
from twinproof.checkpoint.catalog import read_catalog


@requirement(
    "CKPT-622",
    "The process's default device MUST NOT decide where a save or a load works: files and tensors under another one "
    "MUST be those without.",
)
def test_default_device(checkpoint: Any, tmp_path: Path) -> None:
    state = {
        f"t{i}": random_bits(dtype, shape, i)
        for i, (dtype, shape) in enumerate(
            [(torch.float32, (40, 7)), (torch.bfloat16, (3, 5, 4)), (torch.int64, ()), (torch.uint8, (0, 3))]
        )
    }
    state["turned"] = random_bits(torch.float32, (6, 9), 9).t()
    ways: dict[str, dict[str, Any]] = {
        "one file": {},
        "files": {"max_shard_size": 600, "block_bytes": 256},
        "sums": {"checksums": True, "block_bytes": 64},
        "cast": {"export_dtype": torch.bfloat16},
    }
    for name, options in ways.items():
        plain, folder = tmp_path / f"{name} plain", tmp_path / name
        save(checkpoint, state, plain, **options)
        with torch.device("meta"), succeeds("a save", where=name):
            save(checkpoint, state, folder, **options)
        names = sorted(path.name for path in plain.iterdir())
        assert_equal(sorted(path.name for path in folder.iterdir()), names, where=f"{name}: names")
        for file in names:
            assert_same_bytes((folder / file).read_bytes(), (plain / file).read_bytes(), where=f"{name}: {file}")
        expected, found = ({key: zeros_like(value) for key, value in state.items()} for _ in range(2))
        load(checkpoint, expected, plain, cast=True)
        with torch.device("meta"), succeeds("a load", where=name):
            load(checkpoint, found, plain, cast=True)
        assert_same_tensors(found, expected, where=name)
    checkpoint.save_file(state, tmp_path / "plain.safetensors")
    with torch.device("meta"), succeeds("a file", where="save_file and load_file"):
        checkpoint.save_file(state, tmp_path / "alone.safetensors")
        read = checkpoint.load_file(tmp_path / "alone.safetensors")
    assert_same_bytes(
        (tmp_path / "alone.safetensors").read_bytes(), (tmp_path / "plain.safetensors").read_bytes(), where="save_file"
    )
    assert_same_tensors(read, checkpoint.load_file(tmp_path / "plain.safetensors"), where="load_file")


def _quantized(checkpoint: Any, folder: Path) -> None:
    """A matrix of 8-bit floats and groups of 4-bit ones, with their scales."""
    folder.mkdir()
    state = {
        "m.weight": (torch.arange(63.0).reshape(7, 9) / 8).to(torch.float8_e4m3fn),
        "m.weight_scale_inv": torch.arange(1.0, 7.0).reshape(2, 3) / 3,
        "g_blocks": torch.arange(24, dtype=torch.uint8).reshape(2, 3, 4),
        "g_scales": torch.tensor([[120, 127, 130], [126, 128, 1]], dtype=torch.uint8),
    }
    checkpoint.save_file(state, folder / "model.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(state, "model.safetensors")}))


def _everything(
    checkpoint: Any, folder: Path, around: Callable[[], AbstractContextManager[Any]], where: str
) -> tuple[dict[str, bytes], dict[str, torch.Tensor]]:
    """Saves and loads of all kinds inside, each begun anew: the files, and what was loaded."""
    state = {
        "w": random_bits(torch.float32, (40, 7), 1),
        "half": random_bits(torch.bfloat16, (3, 5, 4), 2),
        "turned": torch.arange(54.0).reshape(6, 9).t(),
        "count": torch.tensor(7),
        "conjugate": random_bits(torch.complex64, (4, 4), 3).conj(),
    }
    ways: dict[str, dict[str, Any]] = {
        "files": {"max_shard_size": 600, "block_bytes": 256, "checksums": True},
        "cast": {"export_dtype": torch.bfloat16},
        "shards": {"enable_consolidation": False},
    }
    loaded: dict[str, torch.Tensor] = {}
    for name, options in ways.items():
        # Tensors made in inference mode can be written to in no other, whichever thread does it.
        with around(), succeeds("a save and a load", where=f"{where}, {name}"):
            targets = {key: zeros_like(value) for key, value in state.items()}
            save(checkpoint, state, folder / name, **options)
            load(checkpoint, targets, folder / name, cast=True, thread_count=3)
        loaded |= {f"{name}: {key}": value for key, value in targets.items()}
    _quantized(checkpoint, folder / "quantized")
    for dtype, through in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float64, None)):
        options = {} if through is None else {"target_dtype": through}
        reader = checkpoint.QuantizedHuggingFaceStorageReader(folder / "quantized", block_size=4, **options)
        with around(), succeeds("a quantized load", where=f"{where}, {dtype}"):
            numbers = {"m.weight": torch.zeros(7, 9, dtype=dtype), "g": torch.zeros(2, 24, dtype=dtype)}
            load_with(reader, {"m.weight": numbers["m.weight"], "g_blocks": numbers["g"]})
        loaded |= {f"quantized {key} as {dtype}": value for key, value in numbers.items()}
    with around(), succeeds("a file and a consolidation", where=where):
        checkpoint.save_file(state, folder / "alone.safetensors", checksums=True)
        loaded |= {f"alone: {key}": v for key, v in checkpoint.load_file(folder / "alone.safetensors").items()}
        checkpoint.consolidate_safetensors_files(folder / "shards", folder / "whole")
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return files, loaded


@requirement(
    "CKPT-641",
    "Under any default dtype and mode of the caller saves, loads, quantized loads, single files and consolidations "
    "MUST give the files and the bits that they give without.",
)
@pytest.mark.parametrize("surroundings", SURROUNDINGS)
def test_defaults_and_modes(checkpoint: Any, tmp_path: Path, surroundings: str) -> None:
    found = []
    for name, around in (("plain", nullcontext), (surroundings, SURROUNDINGS[surroundings])):
        (tmp_path / name).mkdir()
        found.append(_everything(checkpoint, tmp_path / name, around, name))
    (plain_files, plain), (files, values) = found
    assert_equal(sorted(files), sorted(plain_files), where="names of files")
    for file, content in plain_files.items():
        assert_same_bytes(files[file], content, where=file)
    assert_same_tensors(values, plain, where=surroundings)


@contextmanager
def _collector(*, is_on: bool) -> Iterator[None]:
    """The garbage collector on or off inside, and as it was behind it."""
    was_on = gc.isenabled()
    (gc.enable if is_on else gc.disable)()
    try:
        yield
    finally:
        (gc.enable if was_on else gc.disable)()


def _ending(planner: Any, step: str) -> Any:
    """A planner that ends a save or a load in one of its steps."""

    def end(*arguments: Any, **options: Any) -> Any:
        raise LookupError("ended")

    setattr(planner, step, end)
    return planner


def _spoilt(checkpoint: Any, folder: Path) -> dict[str, Path]:
    """Checkpoints that cannot be read, by what is wrong with them."""
    state = {"x": torch.ones(4, 3), "y": torch.ones(5)}
    places = {what: folder / what for what in ("an index of text", "no file", "half a header", "other bytes")}
    for place in places.values():
        save(checkpoint, state, place, fqn_to_index_mapping={"x": 1, "y": 2}, checksums=True, durable=False)
    (places["an index of text"] / INDEX).write_text("text")
    second = {what: place / "model-00002-of-00002.safetensors" for what, place in places.items()}
    second["no file"].unlink()
    second["half a header"].write_bytes(second["half a header"].read_bytes()[:20])
    second["other bytes"].write_bytes(second["other bytes"].read_bytes()[:-1] + b"!")
    return {**places, "nothing": folder / "nothing"}


def _refused_saves(checkpoint: Any, folder: Path) -> dict[str, Callable[[], Any]]:
    """Every step in which a save may end, by name."""
    state = {"x": torch.ones(4, 3), "y": torch.ones(5)}
    (folder / "in the way").write_text("a file")

    def stop(done: int, total: int) -> None:
        raise LookupError("stopped")

    ways: dict[str, Callable[[], Any]] = {
        "a mapping that lacks a name": partial(save, checkpoint, state, folder / "a", fqn_to_index_mapping={"x": 1}),
        "a file in the way": partial(save, checkpoint, state, folder / "in the way"),
        "a tensor without memory": partial(save, checkpoint, {"x": torch.ones(2, device="meta")}, folder / "a"),
        "what is no tensor": partial(save, checkpoint, {"x": object()}, folder / "a"),
        "progress": partial(save, checkpoint, state, folder / "a", progress=stop),
        "a single file": partial(checkpoint.save_file, {"x": object()}, folder / "a"),
    }
    for step in ("set_up_planner", "create_local_plan", "create_global_plan", "finish_plan", "resolve_data"):
        planner = _ending(DefaultSavePlanner(), step)
        ways[f"a planner's {step}"] = partial(save, checkpoint, state, folder / "a", planner=planner)
    return ways


def _refused_loads(checkpoint: Any, folder: Path) -> dict[str, Callable[[], Any]]:
    """Every step in which a load or a consolidation may end, by name."""
    state = {"x": torch.ones(4, 3), "y": torch.ones(5)}
    save(checkpoint, state, folder / "right", durable=False)
    misfit = {"x.weight": torch.ones(4, 3).to(torch.float8_e4m3fn), "x.weight_scale_inv": torch.ones(2, 2)}
    save(checkpoint, misfit, folder / "misfit", durable=False)
    ways: dict[str, Callable[[], Any]] = {
        "an absent name": partial(load, checkpoint, {"z": torch.ones(3)}, folder / "right"),
        "another shape": partial(load, checkpoint, {"x": torch.ones(3)}, folder / "right"),
        "another dtype": partial(load, checkpoint, {"y": torch.ones(5, dtype=torch.int32)}, folder / "right"),
        "scales of another shape": checkpoint.QuantizedHuggingFaceStorageReader(folder / "misfit").read_metadata,
    }
    for step in ("set_up_planner", "create_local_plan", "create_global_plan", "finish_plan", "resolve_tensor"):
        planner = _ending(DefaultLoadPlanner(), step)
        ways[f"a planner's {step}"] = partial(load, checkpoint, state, folder / "right", planner=planner)
    for what, place in _spoilt(checkpoint, folder).items():
        targets = {name: torch.zeros_like(value) for name, value in state.items()}
        ways[f"a load of {what}"] = partial(load, checkpoint, targets, place, verify_checksums=True)
        ways[f"a merge of {what}"] = partial(checkpoint.consolidate_safetensors_files, place, folder / "merged")
        if what != "other bytes":
            ways[f"metadata of {what}"] = checkpoint.HuggingFaceStorageReader(place).read_metadata
    return ways


def _one_behind_another(checkpoint: Any, path: Path) -> None:
    """Two loads in two threads, of which the second begins to read headers while the first one does, and ends later."""
    begun, go, disable = threading.Event(), threading.Event(), gc.disable
    first = threading.Thread(target=lambda: checkpoint.HuggingFaceStorageReader(path).read_metadata())

    def read(*arguments: Any) -> Any:
        if threading.current_thread() is first:
            begun.set()
            go.wait(20)
        return read_catalog(*arguments)

    def disabled() -> None:
        # The second one has looked whether the collector is on; the first ends before anything follows from it.
        if threading.current_thread() is not first:
            go.set()
            first.join(20)
        disable()

    with mock.patch("twinproof.checkpoint.dcp.read_catalog", read), mock.patch.object(gc, "disable", disabled):
        first.start()
        begun.wait(20)
        checkpoint.HuggingFaceStorageReader(path).read_metadata()
        go.set()
        first.join(20)


@requirement(
    "CKPT-723",
    "Saves, loads and consolidations MUST leave the garbage collector as it was, on or off, in whichever step they "
    "end, and where two run at a time.",
)
def test_garbage_collector(checkpoint: Any, tmp_path: Path) -> None:
    state = {"x": random_bits(torch.float32, (4, 3), 1)}
    ways = {**_refused_saves(checkpoint, tmp_path), **_refused_loads(checkpoint, tmp_path)}
    for is_on in (True, False):
        for name, way in ways.items():
            with _collector(is_on=is_on):
                with raises(BaseException, where=name):
                    way()
                assert_equal(gc.isenabled(), is_on, where=f"the collector is on behind {name}")
        with _collector(is_on=is_on):
            save(checkpoint, state, tmp_path / "whole", durable=False)
            assert_equal(gc.isenabled(), is_on, where="the collector is on behind a save")
            load(checkpoint, {name: zeros_like(value) for name, value in state.items()}, tmp_path / "whole")
            assert_equal(gc.isenabled(), is_on, where="the collector is on behind a load")
    with _collector(is_on=True):
        _one_behind_another(checkpoint, tmp_path / "whole")
        assert_equal(gc.isenabled(), True, where="the collector is on behind two loads at a time")


@requirement(
    "CKPT-861",
    "In a process that is forked while a load goes on the garbage collector MUST be as it was before that load, and "
    "behind loads of its own.",
)
def test_forked_meanwhile(checkpoint: Any, tmp_path: Path) -> None:
    state = {"x": random_bits(torch.float32, (4, 3), 1)}
    save(checkpoint, state, tmp_path / "ck", durable=False)
    found = list[int]()

    def read(*args: Any, **options: Any) -> Any:
        if not found:
            with warnings.catch_warnings():
                # Of threads in the process that forks: that is what is asked for.
                warnings.simplefilter("ignore")
                child = os.fork()
            if child == 0:
                signal.alarm(20)
                found.append(0)
                told = 0
                try:
                    told = 2 * gc.isenabled()
                    checkpoint.HuggingFaceStorageReader(tmp_path / "ck").read_metadata()
                    told += gc.isenabled()
                finally:
                    # Whatever it raised, the child may not go on as another run of the tests.
                    os._exit(told)
            found.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        return read_catalog(*args, **options)

    for is_on in (True, False):
        found.clear()
        with _collector(is_on=is_on), mock.patch("twinproof.checkpoint.dcp.read_catalog", read):
            load(checkpoint, {"x": torch.zeros(4, 3)}, tmp_path / "ck")
        # In the child, and there behind a reading of its own.
        assert_equal(found, [3 * is_on], where=f"the child's collector was on and stays so: {is_on}")


class _Handler:
    """A handler of a signal that raises once, in a pause of the collector: as a call begins, or one of C's returns."""

    def __init__(self, number: int) -> None:
        self.number, self.count = number, 0

    def __call__(self, frame: Any, event: str, _: Any) -> None:
        is_place = event == "c_return" or (event == "call" and not frame.f_code.co_flags & inspect.CO_GENERATOR)
        if is_place and frame.f_globals.get("__name__") == "fastimpl.checkpoint.pause":
            self.count += 1
            if self.count == self.number:
                raise KeyboardInterrupt


def _pauses_of_load(checkpoint: Any, path: Path, number: int) -> tuple[int, str]:
    """How many such places a load comes to, of which one raises, and the name of what it raises."""
    handler, said = _Handler(number), ""
    sys.setprofile(handler)
    try:
        load(checkpoint, {"x": torch.zeros(4, 3)}, path)
    except BaseException as error:
        # Torch wraps what a planner or a reader raises.
        said = type(error).__name__
    finally:
        sys.setprofile(None)
    return handler.count, said


@requirement(
    "CKPT-993",
    "A load that a handler of a signal ends while the garbage collector is turned off or on MUST leave it as it was, "
    "and the loads behind it MUST turn it off and on as those before.",
)
@pytest.mark.parametrize("is_on", [True, False])
def test_interrupted_pauses(checkpoint: Any, tmp_path: Path, is_on: bool) -> None:
    save(checkpoint, {"x": torch.ones(4, 3)}, tmp_path / "ck", durable=False)
    with _collector(is_on=is_on):
        whole = _pauses_of_load(checkpoint, tmp_path / "ck", 0)
        for number in range(1, whole[0] + 1):
            _, said = _pauses_of_load(checkpoint, tmp_path / "ck", number)
            assert_equal(bool(said), True, where=f"handler {number} is heard")
            assert_equal(gc.isenabled(), is_on, where=f"the collector is on behind handler {number}")
            found = _pauses_of_load(checkpoint, tmp_path / "ck", 0)
            assert_equal(found, whole, where=f"a load behind handler {number}")
            assert_equal(gc.isenabled(), is_on, where=f"the collector is on behind a load behind handler {number}")
