"""Torch's own format (DCP) in folders that appear whole, and which of the two formats a folder has.

Torch's writer fills the visible folder file by file: a crash while it replaces a checkpoint leaves the old metadata
over new data. Here a native save is staged and shown at one instant, as an HF save is.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from twinproof.checkpoint.catalog import read_index
from twinproof.checkpoint.format import INDEX_NAME, NATIVE_METADATA_NAME, SUFFIX, StrPath, local_path
from twinproof.checkpoint.publish import Staging, fsync_path
from twinproof.errors import ConfigError, FormatError, MissingCheckpointError, PlanError

__all__ = [
    "CheckpointFormat",
    "NativeStorageWriter",
    "OptimizerStates",
    "State",
    "detect_format",
    "formats_in",
    "load_training",
    "merged",
    "save_training",
]

State = dict[str, Any]
Models = torch.nn.Module | Sequence[torch.nn.Module]
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class CheckpointFormat(str, Enum):
    """What a checkpoint consists of."""

    DCP = "dcp"
    HF = "hf"


def detect_format(path: StrPath) -> CheckpointFormat:
    """Whether a folder is torch's (``.metadata``) or HF's (an index, or safetensors files), or a file is HF's.

    Raises:
        FormatError: both formats, neither, or a malformed index. CorruptionError: a file of the index is missing.
        MissingCheckpointError: there is nothing.
    """
    place = local_path(path)
    if place.is_file():
        if place.suffix == SUFFIX:
            return CheckpointFormat.HF
        raise FormatError("not a checkpoint", got=place.name, expected="a folder or a .safetensors file", where=place)
    if not place.is_dir():
        raise MissingCheckpointError("no checkpoint is there", expected="a folder or a .safetensors file", where=place)
    found = formats_in(place)
    if len(found) != 1:
        raise FormatError(
            "a checkpoint has one format",
            got="both" if found else f"neither in {sorted(os.listdir(place))[:5]}",
            expected=f"{NATIVE_METADATA_NAME} (torch's), or {INDEX_NAME} or safetensors files (HF)",
            where=place,
        )
    if CheckpointFormat.DCP in found:
        return CheckpointFormat.DCP
    read_index(place)
    return CheckpointFormat.HF


def formats_in(folder: Path) -> set[CheckpointFormat]:
    """The formats whose files a folder has; none of a save that a crash cut short."""
    names = os.listdir(folder)
    is_hf = any(name == INDEX_NAME or (name.endswith(SUFFIX) and not name.startswith(".")) for name in names)
    kinds = {CheckpointFormat.DCP: NATIVE_METADATA_NAME in names, CheckpointFormat.HF: is_hf}
    return {kind for kind, is_there in kinds.items() if is_there}


class NativeStorageWriter(FileSystemWriter):
    """Torch's ``FileSystemWriter``, whose checkpoint appears at one instant and replaces another whole.

    Each rank writes with one thread: with more, torch 2.13 reports success when a thread's write fails.

    Args:
        path: folder of the checkpoint.
        durable: fsync files and folders before the checkpoint becomes visible.
    """

    def __init__(self, path: StrPath, *, durable: bool = True) -> None:
        super().__init__(path, sync_files=False, thread_count=1)
        self.target, self.durable = local_path(path), durable
        self.staging: Staging | None = None

    @property
    def checkpoint_id(self) -> Path:
        """The folder in which the checkpoint appears."""
        return self.target

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Nothing to add, and nothing is made yet."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make the hidden folder, on the coordinator; each rank is told its name and a prefix of its own."""
        self.staging = Staging(self.target, durable=self.durable)
        folder = os.fspath(self.staging.folder)
        prefixed = super().prepare_global_plan(plans)
        return [dataclasses.replace(plan, storage_data=(plan.storage_data, folder)) for plan in prefixed]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files into the hidden folder, and sync them."""
        prefix, folder = plan.storage_data
        self.path = Path(folder)
        written = super().write_data(dataclasses.replace(plan, storage_data=prefix), planner)
        self._sync({result.storage_data.relative_path for result in written.value()})
        return written

    def _sync(self, names: Iterable[str]) -> None:
        # Torch syncs a file before it empties Python's buffer into it, so the end of the file is in no sync of torch's.
        for name in names if self.durable else ():
            fsync_path(Path(self.path) / name)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the metadata and show the checkpoint; the coordinator only."""
        if self.staging is None:
            raise PlanError("nothing was written that could be finished", expected="prepare_global_plan, write_data")
        super().finish(metadata, results)
        self._sync([NATIVE_METADATA_NAME])
        self.staging.publish(None)
        self.staging = None

    def discard(self) -> None:
        """Remove what a failed save left; nothing where it succeeded."""
        if self.staging is not None:
            self.staging.discard()
            self.staging = None


# Model, optimizer and step together.


class OptimizerStates(Stateful):
    """Optimizers as one state whose names are those of the parameters, so that ranks may change between runs."""

    def __init__(self, parts: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        if len(parts) > 1 and len(parts) != len(optimizers):
            raise ConfigError(
                "each part of the model has one optimizer", got=len(optimizers), expected=len(parts), where="optimizers"
            )
        self.pairs = (
            [(parts[0], list(optimizers))]
            if len(parts) == 1
            else [(part, [optimizer]) for part, optimizer in zip(parts, optimizers, strict=True)]
        )

    def state_dict(self) -> State:
        return merged(get_optimizer_state_dict(part, mine, options=_FLAT) for part, mine in self.pairs)

    def load_state_dict(self, state_dict: State) -> None:
        for part, mine in self.pairs:
            names = get_optimizer_state_dict(part, mine, options=_FLAT).keys()
            set_optimizer_state_dict(part, mine, {name: state_dict[name] for name in names}, options=_FLAT)


def merged(dicts: Any) -> State:
    result: State = {}
    for found in dicts:
        twice = sorted(result.keys() & found.keys())
        if twice:
            raise PlanError("parts of the model have the same name", got=twice[:5], where="model")
        result.update(found)
    return result


def _training(model: Models, optimizers: Any, step: int, states: Mapping[str, Any] | None) -> tuple[list[Any], State]:
    """The parts of the model, and everything under the names that a ``CheckpointManager`` gives it."""
    parts = [model] if isinstance(model, torch.nn.Module) else list(model)
    several = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else optimizers
    others = dict(states or {})
    wrong = sorted(name for name, value in others.items() if not isinstance(value, Stateful))
    if wrong:
        raise ConfigError("no state_dict and load_state_dict", got=wrong, where="states")
    is_list = isinstance(several, Sequence) and all(isinstance(each, torch.optim.Optimizer) for each in several)
    if not is_list or not all(isinstance(part, torch.nn.Module) for part in parts):
        got = [type(each).__name__ for each in (model, optimizers)]
        raise ConfigError("not a model and its optimizers", got=got, expected="modules, torch.optim.Optimizers")
    if type(step) is not int or step < 0:
        raise ConfigError("not a step", got=step, expected="an int >= 0", where="step")
    own = {"optimizer": OptimizerStates(parts, several), "train_state": {"step": torch.tensor(step)}}
    return parts, merged([*map(get_model_state_dict, parts), own, others])


def save_training(
    path: StrPath,
    model: Models,
    optimizers: Any,
    step: int,
    *,
    states: Mapping[str, Any] | None = None,
    durable: bool = True,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Save model, optimizers, step and other states in one checkpoint of torch's format, which appears at one instant.

    Call it on every rank; sharded parameters (FSDP2, DTensor) are saved by their shards, and may be loaded on another
    number of ranks. Names are those of a ``CheckpointManager``, so that one finds it as ``step-N``.

    Args:
        path: folder of the checkpoint; one that is there is replaced whole.
        model: the module, or the parts of it that this rank has.
        optimizers: a ``torch.optim.Optimizer``, or one for each part.
        step: steps that were trained.
        states: name -> object with ``state_dict`` and ``load_state_dict``: schedulers, data loaders.
        durable: fsync before the checkpoint becomes visible.
        process_group: the ranks that save; None is all.

    Raises:
        ConfigError: something else was given. PlanError: two states of one name. CheckpointException: torch's.
    """
    writer = NativeStorageWriter(path, durable=durable)
    try:
        dcp.save(_training(model, optimizers, step, states)[1], storage_writer=writer, process_group=process_group)
    except BaseException:
        writer.discard()
        raise


def load_training(
    path: StrPath,
    model: Models,
    optimizers: Any,
    *,
    states: Mapping[str, Any] | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> int:
    """Restore what ``save_training``, or a ``CheckpointManager`` that keeps its step so, saved; returns the step.

    Arguments are those of ``save_training``. Torch's format may hold pickles: load it from places you trust.

    Raises:
        MissingCheckpointError: nothing is there. FormatError: a checkpoint of HF's format, which holds the model alone.
        CheckpointException: torch's, also where the checkpoint lacks a name.
    """
    if detect_format(path) is not CheckpointFormat.DCP:
        expected = "a checkpoint of save_training; HuggingFaceStorageReader loads models"
        raise FormatError("an HF checkpoint holds no optimizer and no step", expected=expected, where=os.fspath(path))
    parts, state = _training(model, optimizers, 0, states)
    dcp.load(state, storage_reader=dcp.FileSystemReader(path), process_group=process_group)
    for part in parts:
        set_model_state_dict(part, {name: state[name] for name in get_model_state_dict(part)})
    return int(state["train_state"]["step"])
