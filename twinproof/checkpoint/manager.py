"""When a trainer saves and loads, in which format, and which checkpoints are kept: torchtitan's policy.

Intermediate saves are torch's own format (DCP): model, optimizers, data loader, schedulers. The last save may be HF,
the model alone. Source: torchtitan's CheckpointManager, https://github.com/pytorch/torchtitan/pull/1351.
"""

from __future__ import annotations

import copy
import inspect
import logging
import os
import queue
import re
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import AsyncStager, DefaultStager, StagingOptions

from twinproof.checkpoint.dcp import HuggingFaceStorageReader
from twinproof.checkpoint.format import STEP_NAME, StrPath, copies_put_aside, local_path
from twinproof.checkpoint.groups import begin_exchange, end_exchange, end_group, exchanging, is_gone, own_group
from twinproof.checkpoint.native import (
    CheckpointFormat,
    NativeStorageWriter,
    beside,
    check_stateful,
    check_states,
    detect_format,
    formats_in,
    load_native,
    model_states,
    one_of,
    set_model,
    told_by,
)
from twinproof.checkpoint.optimizer_states import OptimizerStates, State, optimizer_states
from twinproof.checkpoint.plan import Export, Unfilled, check_count, exported_dtype, with_memory, without_parts
from twinproof.checkpoint.planners import FillingPlanner, HuggingFaceSavePlanner
from twinproof.checkpoint.publish import (
    all_or_none,
    changed_s,
    named_errors,
    rank_count_of,
    scatter,
    several_ranks,
    storage_error,
    together,
)
from twinproof.checkpoint.trees import check_unmounted, remove_tree
from twinproof.checkpoint.whole import Known, check_whole
from twinproof.errors import (
    ConfigError,
    CorruptionError,
    MissingCheckpointError,
    MissingKeyError,
    UnsupportedError,
    check_flags,
    check_kind,
    sendable,
)

__all__ = [
    "ASYNC_MODES",
    "CheckpointManager",
    "CheckpointPolicy",
    "StateDictAdapter",
]

logger = logging.getLogger("twinproof.checkpoint")

T = TypeVar("T")
_Self = TypeVar("_Self", bound="CheckpointManager")

ASYNC_MODES = ("disabled", "async", "async_with_pinned_mem")
_PUT_ASIDE = re.compile(r"\.step-(0|[1-9][0-9]*)\.previous-[0-9a-f]{12}")
_LEFT = re.compile(r"\.step-(0|[1-9][0-9]*)\.(saving|previous)-[0-9a-f]{12}")
_DELETED = re.compile(r"\.step-\d+\.deleting-[0-9a-f]{12}")
_MODEL, _OPTIMIZER, _SCHEDULER = "model", "optimizer", "lr_scheduler"


@runtime_checkable
class StateDictAdapter(Protocol):
    """Maps the model's names and layouts to those of an HF checkpoint and back: rename, split, fuse, transpose.

    ``from_hf(to_hf(state))`` must be ``state`` again: names, shapes, dtypes, bits. An attribute
    ``fqn_to_index_mapping`` (HF name -> file index from 1), where there is one, says how the files are cut; a method
    ``get_hf_storage_reader(path, from_quantized=False)``, where there is one, gives the reader. Both are torchtitan's.
    """

    def to_hf(self, state_dict: State) -> State:
        """HF names and layouts. Tensors may be views of the given ones, or new."""
        ...

    def from_hf(self, hf_state_dict: State) -> State:
        """The model's own names and layouts."""
        ...


@dataclass(frozen=True)
class CheckpointPolicy:
    """The options of a manager, checked. See :class:`CheckpointManager`."""

    folder: Path
    interval: int
    enable_first_step_checkpoint: bool
    last_save_model_only: bool
    last_save_in_hf: bool
    initial_load_path: Path | None
    initial_load_model_only: bool
    initial_load_in_hf: bool
    initial_load_in_hf_quantized: bool
    export: Export
    keep_latest_k: int
    async_mode: str
    load_only: bool
    exclude_from_loading: tuple[str, ...]
    durable: bool

    def __post_init__(self) -> None:
        """Refuse what cannot be honoured, and what would have no effect. Raises ConfigError."""
        check_flags(**{field.name: getattr(self, field.name) for field in fields(self) if field.type == "bool"})
        check_count(self.interval, "interval")
        if type(self.keep_latest_k) is not int or self.keep_latest_k < 0:
            raise ConfigError(
                "not a count", got=self.keep_latest_k, expected=">= 0; 0 keeps all", where="keep_latest_k"
            )
        if self.async_mode not in ASYNC_MODES:
            raise ConfigError("not an async mode", got=self.async_mode, expected=ASYNC_MODES, where="async_mode")
        for option, needed, name, other in (
            (self.last_save_in_hf, self.last_save_model_only, "last_save_in_hf", "last_save_model_only"),
            (self.initial_load_in_hf, self.initial_load_model_only, "initial_load_in_hf", "initial_load_model_only"),
            (self.initial_load_in_hf, self.initial_load_path, "initial_load_in_hf", "initial_load_path"),
            (not self.initial_load_model_only, self.initial_load_path, "a full initial load", "initial_load_path"),
            (self.initial_load_in_hf_quantized, self.initial_load_in_hf, "a quantized load", "initial_load_in_hf"),
            (self.export.export_dtype, self.last_save_model_only, "export_dtype", "last_save_model_only"),
            (self.enable_first_step_checkpoint, not self.load_only, "enable_first_step_checkpoint", "load_only=False"),
        ):
            if option and not needed:
                raise ConfigError(
                    f"{name} needs {other}",
                    got=f"{name} alone",
                    expected="both, or not the first",
                    where="CheckpointPolicy",
                )
        excluded = self.exclude_from_loading
        if _MODEL in excluded:
            raise ConfigError(
                "the model is always loaded", got=excluded, expected="other states", where="exclude_from_loading"
            )


@dataclass
class _Pending:
    """An asynchronous save on its way."""

    step: int
    writer: Any
    staging: Any
    upload: Any


class CheckpointManager:
    """Saves and loads the states of a trainer in ``folder/step-N``.

    A subclass names its writer and readers: ``class Manager(CheckpointManager, writer=..., reader=...)``. Construct it,
    and call it, on every rank.

    Args:
        folder: where ``step-N`` folders are; a relative path is that of the moment when the manager is made.
        model: the module, or the parts of it that this rank has (pipeline stages), with names of their own; an empty
            list where it has none. Rows of stores in it, and of key-value tables, are saved and loaded with it.
        optimizers: one, or one for each part that is trained; also any object with ``state_dict`` and
            ``load_state_dict``, and one optimizer that derives from torch's ``Stateful``, as torchtitan's container:
            these name their states. One of parameters that are none of the model's, as of master weights, stands among
            ``states``, and the masters beside it.
        states: name -> object with ``state_dict`` and ``load_state_dict``: data loader, schedulers, counters. They
            are saved in torch's format alone, which pickles what is no tensor: load it from places you trust.
        interval: steps from one save to the next.
        enable_first_step_checkpoint: save after step 1 as well.
        last_save_model_only: the last save holds the model alone.
        last_save_in_hf: the last save is HF, one pass, canonical files.
        initial_load_path: a checkpoint of either format to start from, while ``folder`` holds none. It is then ignored.
        initial_load_model_only: take the model alone from there.
        initial_load_in_hf: that checkpoint must be HF; the format is found out either way.
        initial_load_in_hf_quantized: it holds block-quantized weights.
        export_dtype: dtype of floating point tensors in a model-only last save; None keeps each.
        export_keep: ``fnmatch`` patterns of names that keep their dtype.
        keep_latest_k: complete checkpoints to keep; 0 keeps all. The newest and the last saved are never deleted. What
            killed saves of steps had left in ``folder`` before is deleted behind the first save, but for only copies.
        async_mode: ``disabled``; ``async``: ``save`` returns when states are copied; ``async_with_pinned_mem``: it
            returns at once, and ``maybe_wait_for_staging`` must come before the states change. Needs an accelerator.
        state_dict_adapter: see :class:`StateDictAdapter`; None leaves names and layouts as they are.
        hf_options: keyword arguments of the HF writer: ``fqn_to_index_mapping``, ``max_shard_size``, ``metadata``, ...
        exclude_from_loading: names of ``states``, or ``optimizer``, that ``load`` leaves alone.
        load_only: nothing is saved.
        durable: fsync before a checkpoint becomes visible.
        stager: makes the copies of an asynchronous save, in place of the mode's own.
        thread_count: threads of an HF load, unless the adapter brings a reader of its own.
        verify_checksums: compare what an HF load reads with its checksums, which ``checksums`` of ``hf_options`` saves.
            An adapter's reader does so too; one that is no HuggingFaceStorageReader is refused by the load.
        enable: False makes an object that neither loads nor saves.
        last_save_in_safetensors_format, last_save_model_weights_only: older names of ``last_save_in_hf`` and
            ``last_save_model_only``.

    Raises:
        ConfigError: an option, or a combination, that cannot be honoured or has no effect. DistributedError: another
            rank refused one of its own. UnsupportedError: it is pickled or copied while it holds a group or threads.
    """

    _writer: ClassVar[Callable[..., Any]]
    _reader: ClassVar[Callable[..., Any]]
    _quantized_reader: ClassVar[Callable[..., Any]]

    def __init_subclass__(
        cls,
        *,
        writer: Callable[..., Any] | None = None,
        reader: Callable[..., Any] | None = None,
        quantized_reader: Callable[..., Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init_subclass__(**options)
        for name, given in (("_writer", writer), ("_reader", reader), ("_quantized_reader", quantized_reader)):
            if given is not None:
                setattr(cls, name, staticmethod(given))

    def __init__(
        self,
        folder: StrPath,
        *,
        model: torch.nn.Module | Sequence[torch.nn.Module],
        interval: int,
        optimizers: Any = None,
        states: Mapping[str, Any] | None = None,
        enable_first_step_checkpoint: bool = False,
        last_save_model_only: bool = True,
        last_save_in_hf: bool = False,
        initial_load_path: StrPath | None = None,
        initial_load_model_only: bool = True,
        initial_load_in_hf: bool = False,
        initial_load_in_hf_quantized: bool = False,
        export_dtype: torch.dtype | str | None = None,
        export_keep: Sequence[str] = (),
        keep_latest_k: int = 10,
        async_mode: str = "disabled",
        state_dict_adapter: StateDictAdapter | None = None,
        hf_options: Mapping[str, Any] | None = None,
        exclude_from_loading: Sequence[str] = (),
        load_only: bool = False,
        durable: bool = True,
        stager: AsyncStager | None = None,
        thread_count: int = 1,
        verify_checksums: bool = False,
        enable: bool = True,
        last_save_in_safetensors_format: bool | None = None,
        last_save_model_weights_only: bool | None = None,
    ) -> None:
        self.enable, self._is_closed = enable, False
        self._pending: _Pending | None = None
        self._stager = stager
        self._own_stager: DefaultStager | None = None
        self._cleaner: _Cleaner | None = None
        self._group = self._own_group()
        # Of what one rank refuses the others hear here, and wait for it nowhere else.
        with exchanging(self._group), all_or_none(self._group, self.close):
            check_flags(
                enable=enable,
                verify_checksums=verify_checksums,
                last_save_in_safetensors_format=last_save_in_safetensors_format,
                last_save_model_weights_only=last_save_model_weights_only,
            )
            in_hf = _either(last_save_in_hf, False, last_save_in_safetensors_format, "last_save_in_safetensors_format")
            model_only = _either(
                last_save_model_only, True, last_save_model_weights_only, "last_save_model_weights_only"
            )
            check_kind(
                {} if hf_options is None else hf_options, Mapping, "hf_options", "name -> option of the HF writer"
            )
            # What the caller changes later is for others.
            self._hf_options = {
                name: copy.copy(value) if isinstance(value, Collection) else value
                for name, value in (hf_options or {}).items()
            }
            if self._hf_options and not in_hf:
                got, expected = list(self._hf_options), "none, or last_save_in_hf=True"
                raise ConfigError("hf_options need last_save_in_hf", got=got, expected=expected, where="hf_options")
            start = None if initial_load_path is None else _standing(local_path(initial_load_path, "initial_load_path"))
            self.policy = CheckpointPolicy(
                folder=_standing(local_path(folder, "folder")),
                interval=interval,
                enable_first_step_checkpoint=enable_first_step_checkpoint,
                last_save_model_only=model_only,
                last_save_in_hf=in_hf,
                initial_load_path=start,
                initial_load_model_only=initial_load_model_only,
                initial_load_in_hf=initial_load_in_hf,
                initial_load_in_hf_quantized=initial_load_in_hf_quantized,
                export=_export(export_dtype, export_keep),
                keep_latest_k=keep_latest_k,
                async_mode=async_mode,
                load_only=load_only,
                exclude_from_loading=_names(exclude_from_loading),
                durable=durable,
            )
            self._adapter = _adapter(state_dict_adapter)
            self._thread_count, self._verifies = check_count(thread_count, "thread_count"), verify_checksums
            self._parts = _modules(model)
            self._states = _named_states(self._parts, optimizers, check_states(states))
            excluded = self.policy.exclude_from_loading
            if _OPTIMIZER in excluded and _SCHEDULER in self._states.keys() - set(excluded):
                raise ConfigError(
                    "a scheduler without its optimizer", got=excluded, expected=_SCHEDULER, where="exclude_from_loading"
                )
            unknown = sorted(set(excluded) - self._states.keys())
            if unknown:
                raise ConfigError(
                    "no such state", got=unknown, expected=sorted(self._states), where="exclude_from_loading"
                )
            self._check_stager()
            if enable:
                self._set_up()

    def _own_group(self) -> dist.ProcessGroup | None:
        # Text is no flag, which all ranks are to hear.
        is_on = self.enable or isinstance(self.enable, str | bytes)
        # Asynchronous saves exchange messages beside the training loop, whose groups they must not use.
        return own_group(self) if is_on and several_ranks(None) is not None else None

    def _check_stager(self) -> None:
        mode = self.policy.async_mode
        if self._stager is not None and mode == "disabled":
            raise ConfigError(
                "a stager without asynchronous saves", got=mode, expected=f"one of {ASYNC_MODES[1:]}", where="stager"
            )
        if mode == "async_with_pinned_mem" and self._stager is None and not torch.accelerator.is_available():
            raise ConfigError(
                "pinned memory needs an accelerator", got="none", expected="async_mode='async'", where="async_mode"
            )

    def _set_up(self) -> None:
        self._known = Known()
        if self.policy.last_save_in_hf:
            # Its options are checked now, not hours later.
            self._hf_writer(self.policy.folder).close()
        if self.policy.async_mode == "async_with_pinned_mem" and self._stager is None:
            pinned = StagingOptions(True, False, use_async_staging=True, use_non_blocking_copy=True)
            self._stager = self._own_stager = DefaultStager(pinned)
        if self.policy.keep_latest_k and self._rank == 0 and not self.policy.load_only:
            self._cleaner = _Cleaner(self.policy.folder, self.policy.keep_latest_k, self._known)
            # One that nobody closed takes its thread along.
            weakref.finalize(self, self._cleaner.end)

    @property
    def _rank(self) -> int:
        return 0 if self._group is None else dist.get_rank(self._group)

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        """What travels by a pickle or a copy: of a manager that holds nothing, all.

        Raises UnsupportedError: two would use one group, and one thread of retention, which the first close ends.
        """
        things = {
            "a process group": self._group,
            "a thread of retention": self._cleaner,
            "a stager": self._own_stager,
            "a save on its way": self._pending,
        }
        held = [what for what, thing in things.items() if thing is not None]
        if held:
            raise UnsupportedError(
                "a manager can neither be pickled nor copied while it holds what cannot be shared",
                got=", ".join(held),
                expected="another manager, made of the same arguments where it is used; or this one, closed",
                where=type(self).__name__,
            )
        return dict(self.__dict__)

    def close(self) -> None:
        """Wait for the save that is on its way, and give back group, threads and memory. Raises its failure."""
        try:
            self.maybe_wait_for_saving()
        finally:
            # Where the wait was interrupted, the save still needs all of it.
            if self._pending is None:
                if self._cleaner is not None:
                    self._cleaner.close()
                if self._own_stager is not None:
                    self._own_stager.close()
                end_group(self._group)
                self._group, self._cleaner, self._own_stager, self._is_closed = None, None, None, True

    def _check_open(self) -> None:
        if self._is_closed:
            got, expected = "a closed manager", "an open one"
            raise ConfigError("the manager is closed", got=got, expected=expected, where=self.policy.folder)
        if is_gone(self._group):
            raise ConfigError(
                "the process group was destroyed since the manager was made",
                got="a group that is gone",
                expected="a manager that is made behind init_process_group",
                where=self.policy.folder,
            )

    # Saving.

    def save(self, curr_step: int, last_step: bool = False) -> bool:
        """Save where the policy says so; the answer is whether it did.

        Args:
            curr_step: steps that were trained.
            last_step: whether it is the last.

        Raises:
            CheckpointException: torch's, with each rank's named error; also that of the asynchronous save before, and
                then this step is not saved. ConfigError: no step, or the manager is closed.
        """
        if type(curr_step) is not int or curr_step < 0:
            raise ConfigError("not a step", got=curr_step, expected=">= 0", where="curr_step")
        check_flags(last_step=last_step)
        self._check_open()
        if not self._saves_at(curr_step, last_step):
            return False
        self.maybe_wait_for_saving()
        with exchanging(self._group):
            self._save(curr_step, *together(lambda: self._to_save(curr_step, last_step), self._group))
        return True

    def _to_save(self, step: int, last_step: bool) -> tuple[State, Any, HuggingFaceSavePlanner]:
        # One rank may fail to make any of these, and is waited for by all.
        folder, planner = self.policy.folder / f"step-{step}", HuggingFaceSavePlanner()
        if not (last_step and self.policy.last_save_model_only):
            return told_by(self._full_state(())), self._native_writer(folder), planner
        state = self._model_state()
        if not self.policy.last_save_in_hf:
            return self._exported(state), self._native_writer(folder), planner
        return self._to_hf(state), self._hf_writer(folder), planner

    def _saves_at(self, step: int, last_step: bool) -> bool:
        if not self.enable or self.policy.load_only:
            return False
        is_first = step == 1 and self.policy.enable_first_step_checkpoint
        return last_step or is_first or (step > 0 and step % self.policy.interval == 0)

    def _hf_writer(self, folder: Path) -> Any:
        options = dict(self._hf_options)
        mapping = getattr(self._adapter, "fqn_to_index_mapping", None)
        if mapping is not None and not options.keys() & {"fqn_to_index_mapping", "max_shard_size", "single_file"}:
            options["fqn_to_index_mapping"] = mapping
        export = self.policy.export
        own = {
            "process_group": self._group,
            "durable": self.policy.durable,
            "export_dtype": export.export_dtype,
            "export_keep": export.export_keep,
        }
        known = inspect.signature(type(self)._writer).parameters.keys() - own.keys() - {"path"}
        wrong = sorted(options.keys() - known)
        if wrong:
            raise ConfigError("no options to give", got=wrong, expected=sorted(known), where="hf_options")
        return type(self)._writer(folder, **own, **options)

    def _native_writer(self, folder: Path) -> NativeStorageWriter:
        rank_count = 1 if self._group is None else dist.get_world_size(self._group)
        return NativeStorageWriter(folder, durable=self.policy.durable, rank_count=rank_count, known=self._known)

    def _exported(self, state: State) -> State:
        def cast(name: str, value: Any) -> Any:
            is_tensor = isinstance(value, torch.Tensor)
            return value.to(exported_dtype(name, value.dtype, self.policy.export)) if is_tensor else value

        return {name: cast(name, value) for name, value in state.items()}

    def _save(self, step: int, state: State, writer: Any, planner: HuggingFaceSavePlanner) -> None:
        begun_s = time.monotonic()
        if self._cleaner is not None:
            self._cleaner.begin(step)
        if self.policy.async_mode == "disabled":
            try:
                dcp.save(state, storage_writer=writer, planner=planner, process_group=self._group)
            except BaseException:
                self._failed(writer)
                raise
            self._saved(step)
        else:
            stager = _StagedTogether(writer if self._stager is None else self._stager, self._group)
            try:
                response = dcp.async_save(
                    state,
                    storage_writer=writer,
                    planner=planner,
                    process_group=self._group,
                    async_stager=stager,
                )
            except BaseException:
                self._failed(writer)
                raise
            staging = getattr(response, "staging_completion", None)
            upload = getattr(response, "upload_completion", response)
            # Its threads exchange messages until it is there, or has failed.
            begin_exchange(self._group)
            self._pending = _Pending(step, writer, staging, upload)
        logger.info("step %d: save returned after %.2f s", step, time.monotonic() - begun_s)

    def _saved(self, step: int) -> None:
        logger.info("step %d is saved in %s", step, self.policy.folder)
        if self._cleaner is not None:
            try:
                self._cleaner.clean(step)
            except Exception as error:
                # The checkpoint is there, and the other ranks go on.
                logger.warning("old checkpoints in %s stay until the next save: %s", self.policy.folder, error)

    def _failed(self, writer: Any) -> None:
        _discard(writer)
        if self._cleaner is not None:
            self._cleaner.abandon()

    def maybe_wait_for_staging(self) -> None:
        """Return when the states may change: before the optimizer's next step."""
        if self._pending is not None and self._pending.staging is not None:
            self._pending.staging.result()
            self._pending.staging = None

    def maybe_wait_for_saving(self) -> None:
        """Return when the asynchronous save is visible. Raises its failure, once, on every rank.

        Interrupted, it leaves the save on its way; the next call waits for it.
        """
        pending = self._pending
        if pending is None:
            return
        try:
            pending.upload.result()
        except BaseException as error:
            # An interrupt of the wait is no failure of the save, whose threads go on writing.
            if pending.upload.done() and pending.upload.exception() is error:
                self._pending = None
                end_exchange(self._group, is_broken=True)
                self._failed(pending.writer)
            raise
        self._pending = None
        end_exchange(self._group, is_broken=False)
        self._saved(pending.step)

    # States.

    def _model_state(self) -> State:
        return model_states(self._parts)

    def _full_state(self, without: Sequence[str]) -> State:
        # As torchtitan's: names of the model stand beside the other states.
        return beside(self._model_state(), {name: value for name, value in self._states.items() if name not in without})

    # Loading.

    def load(self, step: int = -1) -> bool:
        """Restore the newest complete checkpoint of the folder, or the one of ``step``; else the initial one.

        What a crash left put aside, as the only copy of a step, is shown in its place first, unless ``load_only``.
        Model, optimizers and states of ``folder`` are restored; of ``step-0``, and of an initial checkpoint unless
        ``initial_load_model_only`` is False, the model alone.

        Returns:
            Whether there was anything to load.

        Raises:
            MissingCheckpointError: no complete checkpoint of ``step``, or nothing at ``initial_load_path``.
            ConfigError: no step; more than the model is asked of an HF checkpoint, or an HF checkpoint of one that is
                not. PlanError: entries of a state for which it has no place, whose keys may be no text.
            FormatError: a checkpoint of both formats. CheckpointException: torch's, with each rank's named error, as a
                CorruptionError where chunks or files lack a part of what is asked for.
        """
        if type(step) is not int:
            raise ConfigError("not a step", got=step, expected=">= 0, or -1 for the newest", where="step")
        self._check_open()
        if not self.enable:
            return False
        self.maybe_wait_for_saving()
        try:
            with exchanging(self._group):
                return self._load(step)
        finally:
            if self._cleaner is not None:
                self._cleaner.let_go()

    def _load(self, step: int) -> bool:
        found = self._agreed(lambda: self._find(step))
        if found is None:
            logger.info("no checkpoint in %s, and no initial_load_path: a fresh start", self.policy.folder)
            return False
        path, kind, model_only = found
        begun_s = time.monotonic()
        if kind is CheckpointFormat.HF:
            self._load_hf(path)
        else:
            self._load_native(path, model_only)
        logger.info("loaded %s in %.2f s", path, time.monotonic() - begun_s)
        return True

    def _agreed(self, look: Callable[[], T]) -> T:
        """What rank 0 finds, on every rank; file systems show others the same a moment later."""
        outcome: Any = None
        if self._rank == 0:
            try:
                outcome = look()
            except BaseException as error:  # Also what ends a program: the others would wait for this rank.
                outcome = error
        if isinstance(outcome, BaseException) and self._group is not None:
            outcome = sendable(outcome)
        received = scatter([outcome] * rank_count_of(self._group), self._group)
        if isinstance(received, BaseException):
            raise received
        result: T = received
        return result

    def _find(self, step: int) -> tuple[Path, CheckpointFormat, bool] | None:
        """(path, format, model only) of what is to be loaded; None where there is nothing."""
        policy = self.policy
        aside = _steps_put_aside(policy.folder)
        if not policy.load_only:
            _bring_back(policy.folder, aside)
        complete = complete_steps(policy.folder)
        while True:
            chosen = max(complete, default=0) if step == -1 else step
            if chosen not in complete or self._is_there(chosen, complete[chosen]):
                break
            del complete[chosen]
        if policy.load_only and (step in aside or (aside and not complete)):
            raise MissingCheckpointError(
                "the checkpoint is put aside: a crash cut a save short that was replacing it",
                got=sorted(map(os.fspath, aside.values())),
                expected="it, renamed back; or a load of a manager that saves, which does so",
                where=policy.folder,
            )
        if step != -1 and step not in complete:
            raise MissingCheckpointError(
                "no complete checkpoint of this step",
                got=step,
                expected=[n for n in sorted(complete) if self._is_whole(n, complete[n])],
                where=policy.folder,
            )
        if complete:
            path, kind, model_only = policy.folder / f"step-{chosen}", complete[chosen], chosen == 0
        elif policy.initial_load_path is not None:
            path = policy.initial_load_path
            kind, model_only = detect_format(path), policy.initial_load_model_only
            if policy.initial_load_in_hf and kind is not CheckpointFormat.HF:
                expected = CheckpointFormat.HF.value
                raise ConfigError(
                    "initial_load_in_hf needs an HF checkpoint", got=kind.value, expected=expected, where=path
                )
        else:
            return None
        if kind is CheckpointFormat.HF and not model_only:
            native = (n for n in sorted(complete, reverse=True) if complete[n] is not kind and n > 0)
            newest = next((n for n in native if self._is_whole(n, complete[n])), None)
            first = "" if newest is None else f"load(step={newest}), the newest that holds all; or "
            raise ConfigError(
                "an HF checkpoint holds the model alone: no optimizer, step or data loader can be restored",
                got=os.fspath(path),
                expected=f"{first}it as initial_load_path of another folder, with initial_load_model_only=True",
                where="load",
            )
        return path, kind, model_only

    def _is_there(self, step: int, kind: CheckpointFormat) -> bool:
        # Held first: nobody is to delete it while its files are looked at. It may have gone since it was seen.
        is_held = self._cleaner is None or self._cleaner.hold(step)
        return is_held and self._is_whole(step, kind)

    def _is_whole(self, step: int, kind: CheckpointFormat) -> bool:
        return is_whole(self.policy.folder / f"step-{step}", kind, self._known)

    def _load_native(self, path: Path, model_only: bool) -> None:
        def targets() -> tuple[None, State]:
            return None, self._model_state() if model_only else self._full_state(self.policy.exclude_from_loading)

        load_native(path, targets, lambda _, state: self._set_model(state), self._group)

    def _load_hf(self, path: Path) -> None:
        def begun() -> tuple[set[str], State, Any, FillingPlanner]:
            state, reader = self._model_state(), self._hf_reader(path)
            names, targets = set(state), self._to_hf(state)
            if any(isinstance(value, Unfilled) for value in targets.values()):
                targets = with_memory(targets, reader, rank_count_of(self._group))
            return names, targets, reader, FillingPlanner()

        names, targets, reader, planner = together(begun, self._group)
        dcp.load(targets, storage_reader=reader, planner=planner, process_group=self._group)
        together(lambda: self._set_model(self._from_hf(without_parts(targets), names)), self._group)

    def _to_hf(self, state: State) -> State:
        return state if self._adapter is None else _told(self._adapter.to_hf(state), "to_hf")

    def _from_hf(self, targets: State, names: set[str]) -> State:
        if self._adapter is None:
            return targets
        state = _told(self._adapter.from_hf(targets), "from_hf")
        missing = sorted(names - state.keys())
        if missing:
            raise MissingKeyError(
                "names of the model that the adapter did not give back",
                got=missing,
                expected="each name that to_hf was given",
                where="state_dict_adapter.from_hf",
            )
        return state

    def _hf_reader(self, path: Path) -> Any:
        quantized = self.policy.initial_load_in_hf_quantized
        make = getattr(self._adapter, "get_hf_storage_reader", None)
        if make is not None:
            return self._verifying(make(os.fspath(path), quantized))
        if quantized:
            return type(self)._quantized_reader(path, self._thread_count, verify_checksums=self._verifies)
        return type(self)._reader(path, self._thread_count, cast=True, verify_checksums=self._verifies)

    def _verifying(self, reader: Any) -> Any:
        # An adapter is not told of it, and another reader compares nothing.
        if self._verifies:
            if not isinstance(reader, HuggingFaceStorageReader):
                raise ConfigError(
                    "the adapter's reader compares no checksums",
                    got=type(reader).__name__,
                    expected="HuggingFaceStorageReader, or verify_checksums=False",
                    where="verify_checksums",
                )
            reader.verify_checksums = True
        return reader

    def _set_model(self, state: State) -> None:
        for part in self._parts:
            set_model(part, state)


def _standing(path: Path) -> Path:
    # What a save writes is found again where the process works elsewhere, and by ``..`` behind what is no folder.
    return Path(os.path.realpath(path))


def _modules(model: Any) -> list[torch.nn.Module]:
    is_several = isinstance(model, Iterable) and not isinstance(model, torch.nn.Module | str | bytes)
    parts = list(model) if is_several else [model]
    if not all(isinstance(part, torch.nn.Module) for part in parts):
        raise ConfigError("not a model", got=type(model).__name__, expected="a module, or its parts", where="model")
    return parts


def _adapter(given: Any) -> StateDictAdapter | None:
    """Demand what maps both ways, and is no class: the last save would be the first to ask. Raises ConfigError."""
    has_both = all(callable(getattr(given, verb, None)) for verb in ("to_hf", "from_hf"))
    if given is not None and (isinstance(given, type) or not has_both):
        got = f"the class {given.__name__}" if isinstance(given, type) else type(given).__name__
        expected = "an object with to_hf and from_hf"
        raise ConfigError("not an adapter", got=got, expected=expected, where="state_dict_adapter")
    result: StateDictAdapter | None = given
    return result


def _told(state: Any, verb: str) -> State:
    check_kind(state, Mapping, f"state_dict_adapter.{verb}", "name -> tensor")
    result: State = state
    return result


def _names(given: Any) -> tuple[str, ...]:
    """Names that an option holds; text, whose letters would be names, is none. Raises ConfigError."""
    if isinstance(given, str | bytes) or not isinstance(given, Collection) or not all(type(n) is str for n in given):
        raise ConfigError("not names", got=given, expected="a sequence of names", where="exclude_from_loading")
    return tuple(given)


def _named_states(parts: Sequence[torch.nn.Module], optimizers: Any, states: Mapping[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    if optimizers is not None:
        several = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else optimizers
        is_list = isinstance(several, Sequence) and all(isinstance(each, torch.optim.Optimizer) for each in several)
        result[_OPTIMIZER] = optimizer_states(parts, several) if is_list else optimizers
        if isinstance(result[_OPTIMIZER], OptimizerStates):
            # Now, and not with the first save.
            result[_OPTIMIZER].check_params()
    taken = sorted(states.keys() & {_MODEL, *result})
    if taken:
        raise ConfigError("names that the manager uses itself", got=taken, expected="other names", where="states")
    result.update(states)
    check_stateful(result)
    return result


def _either(value: bool, default: bool, older: bool | None, name: str) -> bool:
    """The value of an option that has two names. Raises ConfigError where they contradict each other."""
    if older is None:
        return value
    if value != default and value != older:
        raise ConfigError("two names of one option contradict each other", got=older, expected=value, where=name)
    return older


def _export(dtype: torch.dtype | str | None, keep: Sequence[str]) -> Export:
    if keep and dtype is None:
        expected = "no patterns, or export_dtype"
        raise ConfigError("export_keep needs export_dtype", got=keep, expected=expected, where="export_keep")
    return Export.make(dtype, keep)


class _StagedTogether(AsyncStager):
    """A stager whose failure on one rank is raised on all, before any of them writes: they would wait for it."""

    def __init__(self, stager: Any, group: dist.ProcessGroup | None) -> None:
        self._stager, self._group = stager, group

    def stage(self, state_dict: State) -> Any:
        """What the stager gives."""
        return together(lambda: self._stager.stage(state_dict), self._group)

    @property
    def should_synchronize_after_execute(self) -> bool:
        """As the stager says."""
        answer: bool = self._stager.should_synchronize_after_execute
        return answer

    def synchronize_staging(self) -> None:
        """As the stager does."""
        self._stager.synchronize_staging()

    def close(self) -> None:
        """The stager is closed by whoever made it."""


def _discard(writer: Any) -> None:
    # An HF writer clears its own staging folder: its ranks agree on the failure before torch's do.
    if isinstance(writer, NativeStorageWriter):
        writer.discard()


def _steps_put_aside(folder: Path) -> dict[int, Path]:
    """Step -> the newest copy of its checkpoint, where that is put aside and nothing stands in its place."""
    with named_errors("looking for steps", folder):
        names = os.listdir(folder) if folder.is_dir() else []
    steps = {int(match[1]) for match in map(_PUT_ASIDE.fullmatch, names) if match is not None}
    copies = {step: copies_put_aside(folder / f"step-{step}") for step in sorted(steps)}
    return {step: found[0] for step, found in copies.items() if found}


def _bring_back(folder: Path, aside: Mapping[int, Path]) -> None:
    """Show what is put aside in its place again; no save of this folder is on its way. Raises StorageError."""
    for step, copy_of_it in aside.items():
        target = folder / f"step-{step}"
        try:
            os.rename(copy_of_it, target)
        except OSError as error:
            raise storage_error(error, f"renaming {copy_of_it.name} back", target) from error
        logger.warning("%s is shown again: a crash had cut a save short that was replacing it", target)


def complete_steps(folder: Path) -> dict[int, CheckpointFormat]:
    """Step -> format of every checkpoint of a manager's folder that has metadata, or an index and its files.

    A ``step-N`` without is what another program left of a crash: it is no checkpoint, and is logged. Nor is one that
    somebody deletes meanwhile. Whether files of one that has them were cut short, ``is_whole`` says.

    Raises:
        FormatError: a folder of both formats, or with a malformed index: what it holds is for a human to say.
        StorageError: the folder, or a step, cannot be read.
    """
    found: dict[int, CheckpointFormat] = {}
    with named_errors("looking for steps", folder):
        names = os.listdir(folder) if folder.is_dir() else []
    for name in names:
        match = STEP_NAME.fullmatch(name)
        if match is None or not (folder / name).is_dir():
            continue
        try:
            # Looked at once: what is deleted between two looks has no format any more, which would be an error.
            if formats := formats_in(folder / name):
                found[int(match[1])] = one_of(formats, folder / name)
            else:
                logger.warning("%s is no complete checkpoint: it has neither metadata nor index", folder / name)
        except CorruptionError as error:
            logger.warning("%s is no complete checkpoint: %s", folder / name, error)
        except FileNotFoundError:
            logger.info("%s was deleted while the checkpoints were looked at", folder / name)
        except OSError as error:
            raise storage_error(error, "looking at a step", folder / name) from error
    return found


def is_whole(step: Path, kind: CheckpointFormat, known: Known) -> bool:
    """Whether a step has all its files, each as long as it is said to be; what it lacks is logged.

    Raises:
        StorageError: it cannot be read.
    """
    try:
        check_whole(step, is_native=kind is CheckpointFormat.DCP, known=known)
    except (CorruptionError, FileNotFoundError) as error:
        if step.is_dir():
            logger.warning("%s is no complete checkpoint: %s", step, error)
        else:
            logger.info("%s was deleted while the checkpoints were looked at", step)
        return False
    except OSError as error:
        raise storage_error(error, "looking at a step", step) from error
    return True


class _Cleaner:
    """Deletes old checkpoints in a thread: terabytes take minutes.

    A checkpoint is renamed before it is deleted, so that no half of it is ever taken for one. What could not be deleted
    is tried again after the next save. The one that was just saved is kept whatever its step: a run that went back to
    an earlier step finds later ones in its folder. So is one that is being saved, and may be seen at any moment: what
    was asked for after an earlier save may only be done now. One that is being loaded is kept until it has been.

    With them goes what killed saves had left when this was made, unless something in it has changed since: its save is
    at work. What is the only copy of a step stays.

    Attributes:
        saving_step: of the save that has begun; None when it has failed, or ``clean`` was asked for after it.
    """

    def __init__(self, folder: Path, keep: int, known: Known) -> None:
        self.folder, self.keep, self._known = folder, keep, known
        self.saving_step: int | None = None
        self._saved_step: int | None = None
        self._loading_step: int | None = None
        # No checkpoint is hidden between the moment when a load or save finds it and the one from which on it is kept.
        # A handler of a signal may save while its thread holds this.
        self._hiding = threading.RLock()
        # May be put into by what interrupts ``get`` itself, as a collection of garbage that finds a manager.
        self._asked: queue.SimpleQueue[bool] = queue.SimpleQueue()
        # Later ones may be of saves of this manager.
        self._left = {path: changed_s(path) for path in _left_by_saves(folder)}
        self._thread = threading.Thread(target=self._run, name="twinproof-retention", daemon=True)
        self._thread.start()

    def begin(self, step: int) -> None:
        """A save of the step begins: what has its name is kept from now on."""
        with self._hiding:
            self.saving_step = step

    def clean(self, saved_step: int) -> None:
        """Ask for it after a save; returns at once."""
        self._saved_step, self.saving_step = saved_step, None
        self._asked.put(True)

    def abandon(self) -> None:
        """The save that had begun has failed: what was kept for it alone may go."""
        self.saving_step = None
        self._ask_again()

    def hold(self, step: int) -> bool:
        """Keep the checkpoint that is about to be loaded; False where it is gone already."""
        with self._hiding:
            self._loading_step = step
            return (self.folder / f"step-{step}").is_dir()

    def let_go(self) -> None:
        """The load is over, on all ranks: what was kept for it alone may go."""
        if self._loading_step is not None:
            self._loading_step = None
            self._ask_again()

    def _ask_again(self) -> None:
        # Before the first save nobody knows which was saved last.
        if self._saved_step is not None:
            self._asked.put(True)

    def end(self) -> None:
        """Ask the thread to end behind everything that was asked for; returns at once."""
        self._asked.put(False)

    def close(self) -> None:
        """Return when everything that was asked for is done."""
        self.end()
        self._thread.join()

    def _run(self) -> None:
        while self._asked.get():
            try:
                self._clean()
            except Exception as error:
                logger.warning("old checkpoints in %s could not be looked at: %s", self.folder, error)

    def _clean(self) -> None:
        # First: what a step replaced is no only copy of it as long as the step is there.
        self._hide_left()
        found = complete_steps(self.folder)
        # One that is being saved is remembered a moment after it is seen, and counts when it is asked for then.
        whole = [step for step in sorted(found) if step != self.saving_step and self._counts(step, found)]
        older = whole[: -self.keep]
        for step in older:
            name = f"step-{step}"
            hidden = self.folder / f".{name}.deleting-{uuid.uuid4().hex[:12]}"
            try:
                check_unmounted(self.folder / name)
                with self._hiding:
                    # Asked at the last moment, for a step may be saved again while others are looked at; and in the
                    # order in which they change, so that a step is in one of them at every moment.
                    if step not in (self._loading_step, self.saving_step, self._saved_step):
                        os.rename(self.folder / name, hidden)
            except OSError as error:
                logger.warning("%s could not be deleted: %s", self.folder / name, error)
        for name in os.listdir(self.folder):
            if _DELETED.fullmatch(name):
                try:
                    if (self.folder / name).is_symlink():
                        # What somebody moved elsewhere and linked to is theirs to keep.
                        os.unlink(self.folder / name)
                    else:
                        remove_tree(self.folder / name)
                except OSError as error:
                    logger.warning("%s could not be deleted: %s", self.folder / name, error)

    def _counts(self, step: int, found: Mapping[int, CheckpointFormat]) -> bool:
        # Where none can be too many, nobody need look at their files.
        return len(found) <= self.keep or is_whole(self.folder / f"step-{step}", found[step], self._known)

    def _hide_left(self) -> None:
        for path, seen_s in self._left.items():
            name = path.name.partition(".saving-")[0].partition(".previous-")[0]
            is_needed = ".previous-" in path.name and not (self.folder / name[1:]).exists()
            if is_needed or changed_s(path) != seen_s:
                continue
            try:
                os.rename(path, self.folder / f"{name}.deleting-{uuid.uuid4().hex[:12]}")
            except OSError as error:
                logger.warning("%s could not be deleted: %s", path, error)
        self._left = {}


def _left_by_saves(folder: Path) -> list[Path]:
    """Hidden folders of saves of steps, which are at work, or were killed. Links are never ours."""
    try:
        found = [folder / name for name in os.listdir(folder) if _LEFT.fullmatch(name)]
    except OSError:
        return []  # Nothing was saved yet; of a folder that cannot be read a save will say so.
    return [path for path in found if path.is_dir() and not path.is_symlink()]
