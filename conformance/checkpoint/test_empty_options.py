"""Options that are given and empty, or false: they are not the same as options that are not given."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from conformance.checkpoint.cases import load, save
from conformance.checkpoint.trainer import alone
from conformance.harness import assert_equal, assert_same_tensors, raises, requirement, succeeds
from twinproof.errors import ConfigError, PlanError

_EMPTY: dict[str, Any] = {"fqn_to_index_mapping": {}}
_STATE = {"a": torch.arange(2.0), "b": torch.arange(3.0)}


class _Plain:
    """An adapter that changes nothing, and cuts the files by a mapping."""

    def __init__(self, *names: str) -> None:
        self.fqn_to_index_mapping = dict.fromkeys(names, 1)

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return state_dict

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        return hf_state_dict


def _last_save(checkpoint: Any, folder: Path, **options: Any) -> None:
    model = torch.nn.Linear(2, 2)
    with (
        checkpoint.CheckpointManager(folder, model=model, interval=1, last_save_in_hf=True, **options) as manager,
        alone(),
    ):
        manager.save(1, last_step=True)


def _without_indices(checkpoint: Any, folder: Path) -> dict[str, tuple[str, Callable[[], Any]]]:
    """What has no file index where the mapping is empty: a name that is told, and the call."""
    shards, out = folder / "shards", folder / "out"
    save(checkpoint, _STATE, shards, enable_consolidation=False)
    last = partial(_last_save, checkpoint, folder / "run")
    return {
        "a save": ("a", lambda: save(checkpoint, _STATE, folder / "ck", **_EMPTY)),
        "a save of shards": (
            "a",
            lambda: save(checkpoint, _STATE, folder / "ck", enable_consolidation=False, **_EMPTY),
        ),
        "a merge": ("b", lambda: checkpoint.consolidate_safetensors_files(shards, out, {})),
        "a merge on ranks": ("b", lambda: checkpoint.consolidate_safetensors_files_on_every_rank(shards, out, {})),
        "a manager's options": ("weight", lambda: last(hf_options=_EMPTY)),
        "an adapter": ("bias", lambda: last(state_dict_adapter=_Plain())),
        "options before an adapter's": (
            "bias",
            lambda: last(state_dict_adapter=_Plain("weight", "bias"), hf_options=_EMPTY),
        ),
    }


def _refused(checkpoint: Any, folder: Path) -> list[tuple[str, Callable[[], Any]]]:
    """Options that no empty value can have, by the name that the error tells."""
    model = torch.nn.Linear(2, 2)
    adam = torch.optim.Adam(model.parameters())
    writer = partial(checkpoint.HuggingFaceStorageWriter, folder / "ck")
    manager = partial(checkpoint.CheckpointManager, folder / "run", model=model, interval=1)
    several = partial(checkpoint.CheckpointManager, folder / "run", model=[model, model], interval=1)
    save_training = partial(checkpoint.save_training, folder / "ck", model)
    return [
        ("fqn_to_index_mapping", partial(writer, {}, max_shard_size=100)),
        ("fqn_to_index_mapping", partial(writer, [])),
        ("single_file", partial(writer, {}, single_file=True)),
        ("max_shard_size", partial(writer, max_shard_size="")),
        ("max_shard_size", partial(writer, max_shard_size=0)),
        ("export_dtype", partial(writer, export_dtype="")),
        ("export_keep", partial(writer, export_keep="")),
        ("metadata", partial(writer, metadata="")),
        ("metadata", partial(writer, metadata=[])),
        ("progress", partial(writer, progress="")),
        ("progress", partial(checkpoint.HuggingFaceStorageReader, folder, progress=())),
        ("path", partial(checkpoint.HuggingFaceStorageWriter, "")),
        ("path", partial(checkpoint.HuggingFaceStorageReader, "")),
        ("checkpoint_id", lambda: writer().reset("")),
        ("checkpoint_id", lambda: checkpoint.HuggingFaceStorageReader(folder).reset("")),
        ("metadata", partial(checkpoint.save_file, {}, folder / "f.safetensors", metadata=[])),
        ("initial_load_path", partial(manager, initial_load_path="")),
        ("export_dtype", partial(manager, export_dtype="")),
        ("export_keep", partial(manager, export_keep="")),
        ("hf_options", partial(manager, hf_options=[])),
        ("exclude_from_loading", partial(manager, exclude_from_loading="")),
        ("model", partial(checkpoint.CheckpointManager, folder / "run", model="", interval=1)),
        ("states", partial(manager, states=[])),
        ("optimizers", partial(manager, optimizers=[])),
        ("optimizers", partial(several, optimizers=[])),
        ("optimizers", partial(save_training, [], 1)),
        ("states", partial(save_training, adam, 1, states=[])),
    ]


@requirement(
    "CKPT-738",
    "An empty mapping, text or list that is given MUST NOT pass for an option that is not given: names without a file "
    "index are refused by an empty mapping, and what cannot be empty by its name, before anything is written.",
)
def test_empty_values(checkpoint: Any, tmp_path: Path) -> None:
    ways = _without_indices(checkpoint, tmp_path)
    for where, (name, act) in ways.items():
        with raises(PlanError, mentions=("names without a file index", f"'{name}'"), where=where):
            act()
    for option, act in _refused(checkpoint, tmp_path):
        with raises(ConfigError, mentions=(option,), where=f"{option} that is empty"):
            act()
    left = [name for name in ("ck", "out", "f.safetensors", "run/step-1") if (tmp_path / name).exists()]
    assert_equal(left, [], where="what was written")
    for number, options in enumerate(({}, {"enable_consolidation": False})):
        with succeeds("a save of nothing by an empty mapping", where=str(options)):
            writer = save(checkpoint, {}, tmp_path / f"{number}", fqn_to_index_mapping={}, **options)
        assert_equal(writer.fqn_to_index_mapping, {}, where="the mapping as given")
        save(checkpoint, {}, tmp_path / f"{number}-none", **options)
        same = [sorted(os.listdir(tmp_path / name)) for name in (f"{number}", f"{number}-none")]
        assert_equal(same[0], same[1], where=f"files of nothing, {options}")


class _Told(list[tuple[int, int]]):
    """Told of progress; false until it has been."""

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        self.append((done_bytes, total_bytes))


class _Renamed(dict[str, str]):
    """An adapter that remembers nothing, and so is false."""

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return {f"hf.{name}": value for name, value in state_dict.items()}

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        return {name.removeprefix("hf."): value for name, value in hf_state_dict.items()}


class _Queue(list[int]):
    """A state of a trainer that is false: nothing is in the queue. How often it was emptied is saved."""

    def __init__(self, emptied_count: int) -> None:
        super().__init__()
        self.emptied_count = emptied_count

    def state_dict(self) -> dict[str, Any]:
        return {"emptied_count": torch.tensor(self.emptied_count)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.emptied_count = int(state_dict["emptied_count"])


class _Scale(torch.nn.Sequential):
    """A model without modules, which is false, and with a parameter."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor([value]))


@requirement(
    "CKPT-744",
    "What is given to a writer, a reader, a manager or save_training MUST be used where its truth value is false, as "
    "that of a model without modules, of a state of length 0, of an adapter and of what is told of progress.",
)
def test_false_objects(checkpoint: Any, tmp_path: Path) -> None:
    told = {"a save": _Told(), "a load": _Told()}
    save(checkpoint, _STATE, tmp_path / "told", progress=told["a save"])
    load(checkpoint, {"a": torch.zeros(2)}, tmp_path / "told", progress=told["a load"])
    for where, calls in told.items():
        assert_equal([done == total for done, total in calls[-1:]], [True], where=f"progress of {where}")
    saved, other = _Scale(3.0), _Scale(0.0)
    adams = [torch.optim.Adam(model.parameters(), lr=0.1) for model in (saved, other)]
    queue = _Queue(5)
    with alone():
        checkpoint.save_training(tmp_path / "ck", saved, adams[0], 1, states={"queue": _Queue(5)}, durable=False)
        queue.emptied_count = 0
        checkpoint.load_training(tmp_path / "ck", other, adams[1], states={"queue": queue})
    assert_equal((other.scale.item(), queue.emptied_count), (3.0, 5), where="a load of training")
    for in_hf in (False, True):
        where, folder = "HF" if in_hf else "native", tmp_path / f"run-{in_hf}"
        options = {"interval": 1, "durable": False, "last_save_in_hf": True, "state_dict_adapter": _Renamed()}
        got, into = _Queue(7), _Scale(0.0)
        with checkpoint.CheckpointManager(folder, model=saved, states={"queue": got}, **options) as manager, alone():
            manager.save(1, last_step=in_hf)
        got.emptied_count = 0
        options |= {"initial_load_path": folder / "step-1"}
        start = tmp_path / "start" if in_hf else folder
        with (
            checkpoint.CheckpointManager(start, model=into, states={"queue": got}, **options) as manager,
            alone(),
            succeeds("a load", where=where),
        ):
            assert_equal(manager.load(), True, where=f"{where}: something was loaded")
        assert_equal((into.scale.item(), got.emptied_count), (3.0, 0 if in_hf else 7), where=where)
    names = checkpoint.HuggingFaceStorageReader(tmp_path / "run-True/step-1").read_metadata().state_dict_metadata
    assert_equal(list(names), ["hf.scale"], where="names of the adapter")
    assert_same_tensors({"scale": other.scale.detach()}, {"scale": saved.scale.detach()}, where="the model")
