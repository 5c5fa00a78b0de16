"""Checkpoints of torch's own format (DCP): which format a folder has, the writer, and a trainer's states as one.

Torch's writer of its own format fills the visible folder file by file: a crash while it replaces a checkpoint leaves
the old metadata over new data. Here a native save is staged and shown at one instant, as an HF save is.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import os
import pickle
import re
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from twinproof.checkpoint.catalog import read_index
from twinproof.checkpoint.format import (
    INDEX_NAME,
    NATIVE_METADATA_NAME,
    SUFFIX,
    StrPath,
    check_put_aside,
    local_path,
)
from twinproof.checkpoint.optimizer_states import (
    GROUPS,
    OptimizerStates,
    State,
    merged,
    optimizer_states,
    params_of,
)
from twinproof.checkpoint.plan import (
    check_told,
    set_stored_rows,
    staged,
    stored_rows,
    stored_tables,
    with_memory,
    without_parts,
)
from twinproof.checkpoint.planners import FillingPlanner, HuggingFaceSavePlanner
from twinproof.checkpoint.publish import (
    Staging,
    fsync_path,
    gather,
    named_errors,
    on_any_rank,
    rank_count_of,
    several_ranks,
    together,
)
from twinproof.checkpoint.whole import Known, check_reaches, reading_metadata, refusals
from twinproof.errors import (
    ConfigError,
    CorruptionError,
    FormatError,
    MissingCheckpointError,
    MissingKeyError,
    PlanError,
    check_flags,
    check_kind,
)
from twinproof.optimizers import trained_params

__all__ = [
    "CheckpointFormat",
    "NativeStorageReader",
    "NativeStorageWriter",
    "beside",
    "check_stateful",
    "check_states",
    "detect_format",
    "formats_in",
    "give_back",
    "load_native",
    "load_training",
    "model_states",
    "one_of",
    "save_training",
    "set_model",
    "told_by",
]

T = TypeVar("T")
Models = torch.nn.Module | Sequence[torch.nn.Module]
# Of a module that has no states torch says, where it is strict, that they are required.
_OR_NONE = StateDictOptions(strict=False)
_EXTRA_STATE = torch.nn.modules.module._EXTRA_STATE_KEY_SUFFIX


class CheckpointFormat(str, Enum):
    """What a checkpoint consists of."""

    DCP = "dcp"
    HF = "hf"


def detect_format(path: StrPath) -> CheckpointFormat:
    """Whether a folder is torch's (``.metadata``) or HF's (an index, or safetensors files), or a file is HF's.

    Raises:
        FormatError: both formats, neither, or a malformed index. CorruptionError: a file of the index is missing.
        StorageError: it may not be read.
        MissingCheckpointError: there is nothing.
    """
    place = local_path(path)
    if place.is_file():
        if place.suffix == SUFFIX:
            return CheckpointFormat.HF
        raise FormatError("not a checkpoint", got=place.name, expected="a folder or a .safetensors file", where=place)
    if not place.is_dir():
        check_put_aside(place)
        expected = "a folder or a .safetensors file"
        raise MissingCheckpointError("no checkpoint is there", got="neither", expected=expected, where=place)
    with refusals("looking at", place):
        return one_of(formats_in(place), place)


def one_of(found: set[CheckpointFormat], folder: Path) -> CheckpointFormat:
    if len(found) != 1:
        raise FormatError(
            "a checkpoint has one format",
            got="both" if found else f"neither in {sorted(os.listdir(folder))[:5]}",
            expected=f"{NATIVE_METADATA_NAME} (torch's), or {INDEX_NAME} or safetensors files (HF)",
            where=folder,
        )
    if CheckpointFormat.DCP in found:
        return CheckpointFormat.DCP
    read_index(folder)
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
        rank_count: how many ranks save; None is however many come. Where the default group has gone meanwhile, each
            rank's asynchronous save would be one of that rank alone, and show a part for the whole.
        known: told of what was saved, for whoever looks at it later; None tells nobody.
    """

    def __init__(
        self, path: StrPath, *, durable: bool = True, rank_count: int | None = None, known: Known | None = None
    ) -> None:
        super().__init__(path, sync_files=False, thread_count=1)
        self.target, self.durable, self.rank_count = local_path(path), durable, rank_count
        self._known = known
        self.staging: Staging | None = None

    @property
    def checkpoint_id(self) -> Path:
        """The folder in which the checkpoint appears."""
        return self.target

    def stage(self, state_dict: State) -> State:
        """What an asynchronous save writes, see ``staged``: torch's own has no memory for rows, nor for parts."""
        # Torch's: what is on the CPU already is not copied ahead.
        self.per_thread_copy_ahead = 0
        result: State = staged(state_dict, any_layout=True)
        return result

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Tell where this rank saves; nothing is made yet."""
        return dataclasses.replace(plan, storage_data={"path": str(self.target.absolute())})

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make the hidden folder, on the coordinator; each rank is told its name and a prefix of its own.

        Raises ConfigError where ranks name different folders, or others save than were to.
        """
        if self.rank_count not in (None, len(plans)):
            raise ConfigError(
                "other ranks save than were to; the process group has come or gone since the manager was made",
                got=len(plans),
                expected=self.rank_count,
                where=self.target,
            )
        check_told([plan.storage_data for plan in plans])
        self.staging = Staging(self.target, durable=self.durable, is_indexed=False)
        folder = os.fspath(self.staging.folder)
        # Torch prefixes what says nothing of its own.
        prefixed = super().prepare_global_plan([dataclasses.replace(plan, storage_data=None) for plan in plans])
        return [dataclasses.replace(plan, storage_data=(plan.storage_data, folder)) for plan in prefixed]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files into the hidden folder, and sync them. Raises StorageError."""
        prefix, folder = plan.storage_data
        self.path = Path(folder)
        with named_errors("writing", self.target):
            written = super().write_data(dataclasses.replace(plan, storage_data=prefix), planner)
            self._sync({result.storage_data.relative_path for result in written.value()})
        return written

    def _sync(self, names: Iterable[str]) -> None:
        # Torch syncs a file before it empties Python's buffer into it, so the end of the file is in no sync of torch's.
        for name in names if self.durable else ():
            fsync_path(Path(self.path) / name)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the metadata and show the checkpoint; the coordinator only. Raises StorageError."""
        if self.staging is None:
            raise PlanError("nothing was written", got=None, expected="prepare_global_plan, write_data", where="finish")
        with named_errors("writing the metadata", self.target):
            super().finish(metadata, results)
            self._sync([NATIVE_METADATA_NAME])
        self.staging.publish(None)
        self.staging = None
        if self._known is not None:
            self._known.remember(self.target, metadata)

    def discard(self) -> None:
        """Remove what a failed save left; nothing where it succeeded."""
        if self.staging is not None:
            self.staging.discard()
            self.staging = None


class NativeStorageReader(FileSystemReader):
    """Torch's reader, which reads the metadata once: of a large checkpoint it is megabytes, and asked for twice."""

    _read: Metadata | None = None

    def read_metadata(self, *arguments: Any, **options: Any) -> Metadata:
        """The checkpoint's metadata. Raises CorruptionError where it was cut short."""
        if self._read is None:
            where = os.path.join(self.path, NATIVE_METADATA_NAME)
            with refusals("reading", where), reading_metadata(where):
                self._read = super().read_metadata(*arguments, **options)
        return self._read

    def names(self) -> Collection[str]:
        """Of everything in the checkpoint."""
        return self.read_metadata().state_dict_metadata.keys()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Demand that the files have what is to be read, while no rank has changed a target.

        Raises:
            CorruptionError: chunks of which the metadata does not say where they are, files that are missing or too
                short. Torch would fill targets until it comes there, and names no file that is too short.
        """
        lost = sorted({item.storage_index.fqn for item in plan.items if item.storage_index not in self.storage_data})
        if lost:
            raise CorruptionError(
                "the metadata does not say where these are",
                got=lost[:20],
                expected="a file for each chunk",
                where=os.path.join(self.path, NATIVE_METADATA_NAME),
            )
        ends: dict[str, int] = {}
        for item in plan.items:
            info = self.storage_data[item.storage_index]
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        for name, end in sorted(ends.items()):
            check_reaches(os.path.join(self.path, name), end)
        return plan

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill every target in place.

        Raises:
            CorruptionError: other bytes or shapes in a file than the metadata says; targets may then hold anything.
        """
        try:
            return super().read_data(plan, planner)
        except _OTHER_BYTES as error:
            if type(error) is RuntimeError and "PytorchStreamReader" not in str(error):
                raise
            raise CorruptionError(
                "a file has not what the metadata says of it",
                got=f"{type(error).__name__}: {str(error)[:200]}",
                expected="the bytes and the shape of each chunk",
                where=os.fspath(self.path),
            ) from error


class _KeepingPlanner(FillingPlanner):
    """FillingPlanner that refuses dtypes which do not hold what was saved: torch casts, as 300.7 to 44 of a uint8.

    Raises:
        PlanError: all such names at once. Floats are rounded to floats, and complex values to complex ones.
    """

    def create_local_plan(self) -> LoadPlan:
        """As there."""
        assert self.metadata is not None
        plan: LoadPlan = super().create_local_plan()
        saved: dict[str, Any] = self.metadata.state_dict_metadata
        dtypes = {
            fqn: (value.dtype, saved[fqn].properties.dtype)
            for fqn, value in self.state_dict.items()
            if isinstance(value, torch.Tensor) and isinstance(saved.get(fqn), TensorStorageMetadata)
        }
        if wrong := {fqn: pair for fqn, pair in dtypes.items() if not _holds(*pair)}:
            expected = "one of the same kind, and integers of as many bits"
            raise PlanError(
                "dtypes that lose what was saved, as (target, saved)", got=wrong, expected=expected, where=min(wrong)
            )
        return plan


def _holds(target: torch.dtype, saved: torch.dtype) -> bool:
    def kind(dtype: torch.dtype) -> tuple[bool, bool]:
        return dtype.is_floating_point, dtype.is_complex

    if target == saved or kind(target) != kind(saved) or any(kind(target)):
        return kind(target) == kind(saved)
    try:
        return torch.promote_types(target, saved) == target
    except RuntimeError:  # Torch knows no dtype for both.
        return False


# What torch says, without a name, of bytes that are no tensor's, and of a tensor of another shape.
_OTHER_BYTES = (EOFError, pickle.UnpicklingError, IndexError, AssertionError, RuntimeError)


# Model, optimizer and step together.


def model_states(parts: Iterable[torch.nn.Module]) -> State:
    """What parts of a model say together. One without states, as a stage of activations or of no rank's, says none.

    Rows of key-value tables are among it; every rank calls this.
    """
    return merged(found for part in parts for found in (_own_states(part), stored_rows(part)))


def _own_states(part: torch.nn.Module) -> State:
    found: State = get_model_state_dict(part, options=_OR_NONE)
    return found


def beside(state: State, others: State) -> State:
    """Both, which have no name in common: one would be saved in the other's place. Raises PlanError."""
    taken = sorted(state.keys() & others.keys())
    if taken:
        raise PlanError(
            "a state has the name of a parameter, or of another state",
            got=taken,
            expected="distinct names",
            where="states",
        )
    return {**state, **others}


def check_states(states: Mapping[str, Any] | None) -> State:
    """The states that were given, if any. Raises ConfigError for what has no names, an empty list too."""
    check_kind({} if states is None else states, Mapping, "states", "name -> object with state_dict")
    for name in states or {}:
        check_kind(name, str, "states", "names that are text")
    return dict(states or {})


def check_stateful(states: Mapping[str, Any]) -> None:
    """Demand objects that give and take their states, whole.

    Raises:
        ConfigError: a class in place of an object, or a module whose state dict lacks rows that it holds.
    """
    wrong = sorted(name for name, value in states.items() if isinstance(value, type) or not isinstance(value, Stateful))
    if wrong:
        expected = "objects with both, and no classes"
        raise ConfigError("no state_dict and load_state_dict", got=wrong, expected=expected, where="states")
    modules = {name: value for name, value in states.items() if isinstance(value, torch.nn.Module)}
    if lacking := {name: tables for name, module in modules.items() if (tables := stored_tables(module))}:
        raise ConfigError(
            "rows of key-value tables are no part of a module's state dict",
            got=lacking,
            expected="their module inside of the model, as ModuleDict({...}) of both",
            where="states",
        )


def _training(model: Models, optimizers: Any, step: int, states: Mapping[str, Any] | None) -> tuple[list[Any], State]:
    """The parts of the model, and all but what they say, under the names that a ``CheckpointManager`` gives it."""
    given: Any = model
    parts = list(given) if isinstance(given, Iterable) and not isinstance(given, torch.nn.Module) else [given]
    several = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else optimizers
    others = check_states(states)
    check_stateful(others)
    is_list = isinstance(several, Sequence) and all(isinstance(each, torch.optim.Optimizer) for each in several)
    if not is_list or not all(isinstance(part, torch.nn.Module) for part in parts):
        got = [type(each).__name__ for each in (model, optimizers)]
        raise ConfigError(
            "not a model and its optimizers",
            got=got,
            expected="modules, torch.optim.Optimizers",
            where="model, optimizers",
        )
    if type(step) is not int or step < 0:
        raise ConfigError("not a step", got=step, expected="an int >= 0", where="step")
    # Without a list: of parts that no optimizer among the states trains, by their masters perhaps.
    asked = parts if several else [part for part in parts if not _is_trained_by(part, others.values())]
    own = {"optimizer": optimizer_states(asked, several), "train_state": {"step": torch.tensor(step, device="cpu")}}
    return parts, beside(own, others)


def _is_trained_by(part: torch.nn.Module, states: Iterable[Any]) -> bool:
    optimizers = [each for each in states if isinstance(each, torch.optim.Optimizer)]
    trained = {id(param) for each in optimizers for param in trained_params(each)}
    return all(id(param) in trained for param in part.parameters() if param.requires_grad)


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

    Call it on every rank. Sharded parameters (FSDP2, DTensor) are saved by their shards, rows of a store, also those of
    key-value tables, by the ranks that have them. Another number of ranks may load both, of rows each those of its
    buckets. Names are those of a ``CheckpointManager``, so that one finds it as ``step-N``.

    Args:
        path: folder of the checkpoint; one that is there is replaced whole.
        model: the module, or the parts of it that this rank has; an empty list where it has none.
        optimizers: a ``torch.optim.Optimizer``, or one for each part that is trained; an empty list where
            none is, or all stand among ``states``, as those of master weights do, with the masters.
            One that derives from torch's ``Stateful``, as torchtitan's container, names its states itself.
        step: steps that were trained.
        states: name -> object with ``state_dict`` and ``load_state_dict``: schedulers, data loaders.
        durable: fsync before the checkpoint becomes visible.
        process_group: the ranks that save; None is all.

    Raises:
        ConfigError: something else was given. PlanError: two states of one name. CheckpointException: torch's; with a
            PlanError where ranks have different tensors under one name, or parts of other shapes than they say.
    """

    def begun() -> tuple[list[Any], State, NativeStorageWriter]:
        check_flags(durable=durable)
        return *_training(model, optimizers, step, states), NativeStorageWriter(path, durable=durable)

    group, planner = several_ranks(process_group), HuggingFaceSavePlanner()
    parts, own, writer = together(begun, group)
    # Apart: ranks whose rows are dealt exchange some, and would wait for one that was refused.
    state = together(lambda: told_by(beside(model_states(parts), own)), group)
    try:
        dcp.save(state, storage_writer=writer, planner=planner, process_group=process_group)
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
        CheckpointException: torch's, with each rank's named error: a MissingKeyError of all names that the checkpoint
            lacks, a PlanError of all shapes that differ, or of all dtypes that do not hold what was saved (floats are
            rounded to floats), a CorruptionError where chunks or files lack a part of what is asked for.
    """

    def begun() -> tuple[list[torch.nn.Module], State]:
        if detect_format(path) is not CheckpointFormat.DCP:
            expected, where = "a checkpoint of save_training; HuggingFaceStorageReader loads models", os.fspath(path)
            raise FormatError(
                "an HF checkpoint holds no optimizer and no step", got="hf", expected=expected, where=where
            )
        return _training(model, optimizers, 0, states)

    # Apart, as in a save.
    parts, own = together(begun, several_ranks(process_group))

    def said() -> tuple[None, State]:
        return None, beside(model_states(parts), own)

    def ended(_: None, state: State) -> None:
        for part in parts:
            set_model(part, state)

    return int(load_native(path, said, ended, process_group)["train_state"]["step"])


def load_native(
    path: StrPath,
    begun: Callable[[], tuple[T, State]],
    ended: Callable[[T, State], None],
    process_group: dist.ProcessGroup | None,
) -> State:
    """Load what ``begun`` answers behind something of its own; hand both to ``ended``, then objects what is theirs.

    Each rank hears of an error. Optimizers without states have none again where the load fails, ``ended`` included.
    """
    group, reader, state = several_ranks(process_group), NativeStorageReader(path), State()

    def targets() -> tuple[T, State, State, _KeepingPlanner]:
        first, found = begun()
        state.update(found)
        told = told_by(state, reader.names())
        told.update({name: as_saved(told[name], name, reader.names()) for name in _objects(state)})
        told = with_memory(told, reader, rank_count_of(group))
        return first, told, keys_as_text(told, ""), _KeepingPlanner()

    def taken() -> State:
        loaded = without_parts(with_own_keys(told, asked))
        # The model first: a state may belong to its parameters, as master weights do, and would be undone by it.
        ended(first, loaded)
        return loaded

    try:
        first, told, asked, planner = together(targets, group)
        rest, unlike, known = together(lambda: not_asked(asked, state, reader.read_metadata()), group)
        if on_any_rank(bool(rest or unlike), group):
            # What another rank asks for is its own: states may be in parts. One that has no such object asks for none.
            by_rank = gather(known, group)
            lost = [*(name for name in rest if not any(name in names for names in by_rank)), *unlike]
            asked = together(lambda: with_places(asked, lost, reader.read_metadata(), state), group)
        dcp.load(asked, storage_reader=reader, planner=planner, process_group=process_group)
        loaded = together(taken, group)
        together(lambda: give_back(state, loaded), group)
    except BaseException:
        for each in state.values():
            if isinstance(each, OptimizerStates):
                each.undo()
        raise
    return state


def set_model(model: torch.nn.Module, state: State) -> None:
    """Give a model its part of a state, whose names are those of ``get_model_state_dict`` and of ``stored_rows``.

    Torch gives parameters and buffers alone the names that a wrapper has for them (DDP, ``torch.compile``): what else a
    module saves, as tables that are cut and rows of a store do, was said to be missing.
    """
    # First: a store that refuses its rows leaves the parameters as they were.
    set_stored_rows(model, state)
    given = {name: state[name] for name in _own_states(model)}
    if not given:
        return
    renaming = (torch.nn.parallel.DistributedDataParallel, torch._dynamo.eval_frame.OptimizedModule)
    if any(isinstance(each, renaming) for each in model.modules()):
        own, parts = model.state_dict(), dict(model.named_modules())
        held = {f"{path}.{name}" for path, each in parts.items() for name in (*each._parameters, *each._buffers)}
        # Torch moves what has another name behind all else, in order.
        renamed = zip([n for n in own if n not in given], [n for n in given if n not in own], strict=True)
        for name, told in [*renamed]:
            if name not in held and not name.endswith(_EXTRA_STATE):
                given[name] = given.pop(told)
    set_model_state_dict(model, given)


def _objects(state: State) -> list[str]:
    """Objects, and what modules say beside their tensors: both may have other entries by the time of a load."""
    # What optimizers have is asked for by the names of their parameters.
    objects = [n for n, each in state.items() if isinstance(each, Stateful) and not isinstance(each, OptimizerStates)]
    extras = (n for n, each in state.items() if isinstance(each, Mapping | list))
    return objects + [name for name in extras if name.rpartition(".")[2] == _EXTRA_STATE]


def told_by(state: State, saved: Collection[str] | None = None) -> State:
    """The same, objects as what they say of themselves; ``saved``: names of a checkpoint that is to be loaded."""

    def said(name: str) -> Any:
        value = state[name]
        if isinstance(value, OptimizerStates) and saved is not None:
            return value.targets(_below(name, saved, state))
        return value.state_dict() if isinstance(value, Stateful) else value

    # Torch asks objects for their states where nobody hears of a rank that fails. In its order: they may exchange some.
    result = {name: said(name) for name in sorted(state)}
    if saved is None:
        for name in _objects(state):
            result.update(dict.fromkeys(f"{_NO_TEXT}{path}" for path in _with_literals(result[name], name)))
            if not flatten_state_dict({name: result[name]})[0]:
                result[f"{_NO_TEXT}{name}"] = None
    return result


def _below(name: str, saved: Iterable[str], state: Container[str]) -> list[str]:
    """Names of a checkpoint that begin with this one, without it."""
    prefix = f"{name}."
    # A parameter of the model may have a name that begins with this one.
    return [each.removeprefix(prefix) for each in saved if each.startswith(prefix) and each not in state]


# What an object has by now and had not when it was saved: states of a parameter without a step, entries of a log.
# Torch demands each of them of the checkpoint; an object is given what it said then, as ``torch.load`` gives it.
_UNSAVED: Any = object()


def as_saved(value: Any, name: str, saved: Collection[str]) -> Any:
    """What an object says, without what the checkpoint has not; mappings under keys of its own are left, empty.

    Raises:
        MissingKeyError: the checkpoint has nothing of an object that says something.
    """
    if not isinstance(value, Mapping) or name in saved:
        return value
    # Names, and where there are names below: once for all lists of an object.
    own = [each for each in saved if each.startswith(f"{name}.")]
    known = {*own, *(each[:at] for each in own for at, letter in enumerate(each) if letter == ".")}
    parts = {key: _saved_part(each, f"{name}.{key}", saved, known) for key, each in value.items()}
    if not own and f"{_NO_TEXT}{name}" not in saved and any(part is _UNSAVED for part in parts.values()):
        expected = "one that was among the states of the save"
        raise MissingKeyError("the checkpoint has nothing of an object", got=name, expected=expected, where="states")
    for key, each in value.items():
        if parts[key] is _UNSAVED and isinstance(each, Mapping):
            parts[key] = _emptied(each)
    return _with_parts(value, parts)


def _saved_part(value: Any, path: str, saved: Collection[str], known: Collection[str]) -> Any:
    if path in saved or (isinstance(value, Mapping) and not value):
        return value
    if isinstance(value, Mapping):
        parts = {key: _saved_part(each, f"{path}.{key}", saved, known) for key, each in value.items()}
        return _UNSAVED if all(part is _UNSAVED for part in parts.values()) else _with_parts(value, parts)
    # Torch names what stands in a list by its place, where there are tensors or mappings among it.
    if isinstance(value, list) and path in known:
        entries = [_saved_part(each, f"{path}.{place}", saved, known) for place, each in enumerate(value)]
        while entries and entries[-1] is _UNSAVED:
            entries.pop()
        # One that is lost between others was a mapping without entries: of nothing else a checkpoint has nothing.
        entries = [_emptied(value[place]) if part is _UNSAVED else part for place, part in enumerate(entries)]
        is_same = len(entries) == len(value) and all(a is b for a, b in zip(entries, value, strict=True))
        return value if is_same else entries
    return _UNSAVED


def _emptied(value: Any) -> Any:
    return _with_parts(value, dict.fromkeys(value, _UNSAVED)) if isinstance(value, Mapping) else {}


def _with_parts(value: Mapping[Any, Any], parts: Mapping[Any, Any]) -> Any:
    """The mapping with these parts, and without the keys of those that are unsaved; itself where that is all of it."""
    if all(parts[key] is each for key, each in value.items()):
        return value
    made: Any = copy.copy(value)
    for key, part in parts.items():
        if part is _UNSAVED:
            del made[key]
        else:
            made[key] = part
    return made


def give_back(state: State, told: State) -> None:
    """Give each object what was loaded for it, and keep the values of the others."""
    for name in sorted(state):
        each = state[name]
        if isinstance(each, Stateful):
            # A row store's own load leaves the rows that a state dict does not list: those of steps taken back. Of a
            # module rows are a part.
            is_store = not isinstance(each, torch.nn.Module) and hasattr(type(each), "load_key_value_state_dict")
            getattr(each, "load_key_value_state_dict" if is_store else "load_state_dict")(told[name])
        else:
            state[name] = told[name]


def keys_as_text(value: Any, path: str) -> Any:
    """The same state, each key of a mapping as text: torch looks for what is no tensor under that name alone.

    What has no other keys is the same object, in which torch puts what it loads. Raises PlanError for keys of one text.
    """
    if isinstance(value, Mapping):
        made = {str(key): keys_as_text(each, f"{path}{key}.") for key, each in value.items()}
        if len(made) < len(value):
            got = sorted({repr(key) for key in value if not isinstance(key, str)})
            expected = "keys that differ as text"
            raise PlanError("keys that are one name in a checkpoint", got=got, expected=expected, where=path[:-1])
        is_same = all(isinstance(key, str) and made[key] is each for key, each in value.items())
        return value if is_same else made
    if isinstance(value, list):
        entries = [keys_as_text(each, f"{path}{place}.") for place, each in enumerate(value)]
        return value if all(a is b for a, b in zip(entries, value, strict=True)) else entries
    return value


def with_own_keys(value: Any, loaded: Any) -> Any:
    """What was loaded into ``keys_as_text`` of a state, under the keys of the state."""
    if value is loaded:
        return value
    # A checkpoint of torch 2.3 or older has a whole mapping as one value, under its own keys.
    if isinstance(value, Mapping) and isinstance(loaded, Mapping) and all(str(key) in loaded for key in value):
        made: Any = copy.copy(value)
        own = {str(key): key for key in value}
        # One by one: a counter would add them to what it has.
        for text, each in loaded.items():
            if text in own:
                made[own[text]] = with_own_keys(value[own[text]], each)
            else:
                made[text.key if isinstance(text, _Literal) else text] = _as_saved(each)
        return made
    if isinstance(value, list) and isinstance(loaded, list):
        return [with_own_keys(a, b) for a, b in zip(value, loaded, strict=False)] + _as_saved(loaded[len(value) :])
    return _as_saved(loaded)


# What a checkpoint has of an object, and its ``state_dict`` on no rank asks for. Torch fills what the target has, and
# leaves the rest without a word: the counts of a counter, a loader's place in each file, where none was opened yet.


@dataclasses.dataclass(frozen=True)
class _Place:
    """What is put where a value is to be loaded."""

    value: torch.Tensor | None


def not_asked(asked: State, owners: State, metadata: Metadata) -> tuple[list[str], list[str], set[str]]:
    """What the checkpoint has of objects, and these targets have no place for; and what they have no fitting one for.

    And the names that they ask for of objects. Torch would cast a tensor to the dtype that a fresh object begins with,
    which loses what it cannot hold, and refuse one of another size. Of ``optimizers`` that is so of options, as a
    learning rate; of a parameter that this rank has all states and options are its own. ``owners``: what said the
    targets.
    """
    saved, paths, names = metadata.state_dict_metadata, metadata.planner_data, _objects(owners)
    optimizers = [name for name, each in owners.items() if isinstance(each, OptimizerStates)]
    # A planner of somebody else's may keep no paths.
    if not names + optimizers or not isinstance(paths, Mapping):
        return [], [], set()
    mine, mine_of = flatten_state_dict({name: asked[name] for name in names + optimizers})
    below = {fqn: path for fqn, path in paths.items() if len(path) > 1}
    rest = [fqn for fqn, path in below.items() if path[0] in names and fqn not in mine]
    unlike = [
        fqn
        for fqn, path in below.items()
        if fqn in mine and not _fits(mine[fqn], saved[fqn])
        if path[0] in names or str(path[1]).startswith(GROUPS)
    ]
    later = [f"{name}.{each}" for name in optimizers for each in owners[name].not_asked(_below(name, saved, owners))]
    return rest, unlike + later, {fqn for fqn in mine if mine_of[fqn][0] in names}


def _fits(target: Any, saved: Any) -> bool:
    """Whether a value of the checkpoint can be read into a target as it is; sizes of shards are judged elsewhere."""
    if not isinstance(saved, TensorStorageMetadata):
        return True
    if isinstance(target, DTensor):
        return target.dtype == saved.properties.dtype or target.shape != saved.size
    if type(target) not in (torch.Tensor, torch.nn.Parameter):
        return isinstance(target, torch.Tensor)
    return (target.dtype, target.shape) == (saved.properties.dtype, saved.size) and not target.is_meta


def with_places(asked: State, fqns: Collection[str], metadata: Metadata, owners: State) -> State:
    """The same targets, with places for these names of the checkpoint; ``owners``: the objects that said the targets.

    Raises:
        PlanError: keys that may have been no text when they were saved, where the checkpoint does not say so; a state
            of a sharded parameter that is sharded otherwise.
    """
    tree: dict[Any, Any] = {}
    params = {name: _params_of_states(owner) for name, owner in owners.items()}
    for fqn in fqns:
        path, saved, node = metadata.planner_data[fqn], metadata.state_dict_metadata[fqn], tree
        if isinstance(owners[path[0]], OptimizerStates):
            # Whatever mappings it was saved in: it is one mapping here.
            path = path[0], fqn.removeprefix(f"{path[0]}.")
        *before, last = path
        for key in before:
            node = node.setdefault(key, {})
        memory = None
        if isinstance(saved, TensorStorageMetadata):
            memory = _memory_for(saved, params[path[0]].get(tuple(map(str, path[1:3]))), fqn)
        node[last] = _Place(memory)
    said = {name.removeprefix(_NO_TEXT) for name in metadata.state_dict_metadata if name.startswith(_NO_TEXT)}
    return {**asked, **{name: _placed_in(asked[name], below, name, said) for name, below in tree.items()}}


def _params_of_states(owner: Any) -> dict[tuple[str, ...], torch.Tensor]:
    """The parameters of an optimizer, by how paths to their states go on behind its name, at most two keys of them.

    Of one among the states by the numbers that it counts them by; of ``optimizers`` by the states that come later.
    """
    if isinstance(owner, OptimizerStates):
        return {(name,): param for name, param in owner.later.items()}
    params = params_of([owner]) if isinstance(owner, torch.optim.Optimizer) else []
    return {("state", str(number)): param for number, param in enumerate(params)}


def _memory_for(saved: TensorStorageMetadata, param: torch.Tensor | None, fqn: str) -> torch.Tensor:
    """What a tensor of the checkpoint is read into: a state of a DTensor is sharded as it is, all else comes whole."""
    if isinstance(param, DTensor):
        if param.shape == saved.size:
            return torch.empty_like(param.detach(), dtype=saved.properties.dtype)
        if len(saved.chunks) > 1:
            raise PlanError(
                "a state is sharded otherwise than its parameter, and the optimizer does not have it yet",
                got=f"{fqn}, {tuple(saved.size)}",
                expected=f"{tuple(param.shape)}, or an optimizer that has stepped before the load",
                where="states",
            )
    return torch.empty(saved.size, dtype=saved.properties.dtype, device="cpu")


def _placed_in(value: Any, tree: Any, path: str, said: Container[str]) -> Any:
    """A target with the places of a tree; what it had is not changed."""
    if isinstance(tree, _Place):
        if tree.value is not None and isinstance(value, DTensor):
            return torch.empty_like(value.detach(), dtype=tree.value.dtype)
        if tree.value is not None and isinstance(value, torch.Tensor) and not value.is_meta:
            return torch.empty_like(tree.value, device=value.device)
        return tree.value
    if all(isinstance(key, int) for key in tree):
        entries = list(value) if isinstance(value, list) else []
        entries += [{} for _ in range(1 + max(tree) - len(entries))]
        for key, below in tree.items():
            entries[key] = _placed_in(entries[key], below, f"{path}.{key}", said)
        return entries
    made: Any = copy.copy(value) if isinstance(value, Mapping) else {}
    literals = {key for key in tree if key not in made and _may_be_no_text(key)}
    if literals and path not in said:
        raise PlanError(
            "the checkpoint has entries for which the state has no place, and their keys may be no text",
            got=sorted(literals)[:5],
            expected="a state_dict that has these keys before the load, or keys that are words",
            where=path,
        )
    for key, below in tree.items():
        made[_Literal(key) if key in literals else key] = _placed_in(made.get(key), below, f"{path}.{key}", said)
    return made


# Torch stores the text of a key. Of mappings whose keys are numbers, None or tuples of them a save says so by a name.
_NO_TEXT = "twinproof.keys."
_MAYBE = re.compile(r"[-+.\d(\[{'\"]|(None|True|False)$|[bB]['\"]")


class _Literal(str):
    """The text of a key that is none, for torch, which keeps the object that a mapping has."""

    @property
    def key(self) -> Any:
        return ast.literal_eval(self)


def _may_be_no_text(text: str) -> bool:
    if _MAYBE.match(text) is None:
        return False
    try:
        ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return False
    return True


def _with_literals(value: Any, path: str) -> Iterator[str]:
    """Where mappings are whose keys are no text, but for words, and can be made of their text again."""
    if isinstance(value, Mapping):
        literals = [key for key in value if _may_be_no_text(str(key))]
        if literals and all(_is_literal(key) for key in literals):
            yield path
        for key, each in value.items():
            yield from _with_literals(each, f"{path}.{key}")
    elif isinstance(value, list):
        for place, each in enumerate(value):
            yield from _with_literals(each, f"{path}.{place}")


def _is_literal(key: Any) -> bool:
    made = ast.literal_eval(str(key))
    return type(made) is type(key) and bool(made == key)


def _as_saved(value: Any) -> Any:
    """What was loaded where the object had nothing, under the keys that it had when it was saved."""
    if isinstance(value, list):
        return [_as_saved(each) for each in value]
    if not isinstance(value, Mapping):
        return value
    made: Any = copy.copy(value)
    for text, each in value.items():
        if isinstance(text, _Literal):
            del made[text]
        made[text.key if isinstance(text, _Literal) else text] = _as_saved(each)
    return made
