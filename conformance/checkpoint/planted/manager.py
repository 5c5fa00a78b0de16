"""Faults of a trainer's checkpoint policy; several shipped in torchtitan."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from conformance.checkpoint.planted.planting import nothing
from conformance.harness import fault, mutated, patched, swap
from twinproof.checkpoint.native import CheckpointFormat
from twinproof.errors import ConfigError, FormatError

_MANAGER = "twinproof.checkpoint.manager"
_NATIVE = "twinproof.checkpoint.native"
_STATES = "twinproof.checkpoint.optimizer_states"
_CLASS = f"{_MANAGER}:CheckpointManager"


@fault(kills="CKPT-430", at="detect_format")
def native_metadata_wins(original: Any, path: Any) -> Any:
    """A folder of both formats is taken for torch's."""
    try:
        return original(path)
    except FormatError as error:
        if error.got != "both":
            raise
        return CheckpointFormat.DCP


contradictions_accepted = patched(
    "A manager takes options that contradict each other, and follows one of them.",
    swap(f"{_MANAGER}:CheckpointPolicy.__post_init__", nothing),
    kills="CKPT-431",
)


@fault(kills="CKPT-432", at=f"{_CLASS}._hf_writer")
def last_save_stays_native(original: Any, manager: Any, folder: Any) -> Any:
    """The last save is in torch's format, whatever was asked for."""
    return manager._native_writer(folder)


schedule_of_the_optimizer_lost = patched(
    "A resumed optimizer keeps the learning rate that it was made with.",
    swap(f"{_STATES}:OptimizerStates.load_state_dict", nothing),
    kills="CKPT-433",
)


@fault(kills="CKPT-434", at=f"{_STATES}:OptimizerStates.state_dict")
def moments_of_one_rank(original: Any, optimizers: Any) -> Any:
    """The optimizer's states are those of rank 0; what other ranks hold is saved as zeros."""
    state = original(optimizers)
    if not dist.is_initialized() or dist.get_rank() == 0:
        return state
    return {n: torch.zeros_like(v) if isinstance(v, torch.Tensor) and v.dim() else v for n, v in state.items()}


@fault(kills="CKPT-435", at=f"{_CLASS}._find")
def model_only_in_silence(original: Any, manager: Any, step: Any) -> Any:
    """Of an HF checkpoint the model is loaded, and the rest is left as it was, without a word."""
    try:
        return original(manager, step)
    except ConfigError:
        path = manager.policy.initial_load_path or manager.policy.folder / "step-2"
        return path, CheckpointFormat.HF, True


@fault(kills="CKPT-436", at=f"{_CLASS}._find")
def initial_checkpoint_wins(original: Any, manager: Any, step: Any) -> Any:
    """A restarted run begins again at its initial checkpoint."""
    if step == -1 and manager.policy.initial_load_path is not None and manager.policy.initial_load_path.exists():
        return manager.policy.initial_load_path, CheckpointFormat.DCP, True
    return original(manager, step)


@fault(kills="CKPT-436", at=f"{_MANAGER}:complete_steps")
def ambiguous_step_skipped(original: Any, folder: Any) -> Any:
    """A newest step of both formats is passed over, and an older one is loaded in its place."""
    try:
        return original(folder)
    except FormatError:
        steps = {name: folder / f"step-{name}" for name in (2, 4)}
        return {step: CheckpointFormat.DCP for step, path in steps.items() if path.is_dir()}


closed_manager_says_false = patched(
    "A manager that was closed goes on to answer that nothing was due.",
    swap(f"{_CLASS}._check_open", nothing),
    swap(f"{_CLASS}._saves_at", lambda *arguments: False),
    kills="CKPT-437",
)


@fault(kills="CKPT-437", at=f"{_CLASS}._saves_at")
def step_zero_counts(original: Any, manager: Any, step: Any, last_step: Any) -> Any:
    """The state before the first step is saved: 0 is a multiple of the interval."""
    return original(manager, step, last_step) or (manager.enable and step == 0)


failed_native_save_left = patched(
    "What a failed save wrote stays there, once for each try.",
    swap("twinproof.checkpoint.native:NativeStorageWriter.discard", nothing),
    kills="CKPT-438",
)


@fault(kills="CKPT-438", at="twinproof.checkpoint.native:NativeStorageWriter.prepare_global_plan")
def old_checkpoint_removed_first(original: Any, writer: Any, plans: Any) -> Any:
    """The checkpoint that is to be replaced is deleted before the new one is written."""
    shutil.rmtree(writer.target, ignore_errors=True)
    return original(writer, plans)


def _by_name(folder: Path) -> dict[int, CheckpointFormat]:
    names = [name for name in os.listdir(folder) if name.startswith("step-")]
    return {int(name.removeprefix("step-")): CheckpointFormat.DCP for name in names}


kept_by_name = patched(
    "Retention counts folders by their names, complete or not, as torchtitan's does.",
    swap(f"{_MANAGER}:complete_steps", _by_name),
    swap(f"{_MANAGER}:is_whole", lambda *_: True),
    kills="CKPT-439",
)


@fault(kills="CKPT-439", at=f"{_MANAGER}:_Cleaner._clean")
def saved_and_deleted(original: Any, cleaner: Any) -> Any:
    """A run that went back to an earlier step loses what it saves: later steps of the run before are kept instead."""
    cleaner._saved_step = None
    original(cleaner)


@fault(kills="CKPT-440", at=f"{_MANAGER}:_Cleaner._clean")
def deleted_in_sight(original: Any, cleaner: Any) -> Any:
    """Old checkpoints are deleted file by file under their own names; the first that fails ends it."""
    names = sorted(name for name in os.listdir(cleaner.folder) if name.startswith("step-"))
    for name in names[: -cleaner.keep]:
        shutil.rmtree(cleaner.folder / name)


class _Late:
    def __init__(self, state: Any, writer: Any, group: Any) -> None:
        self.arguments = {"state_dict": state, "storage_writer": writer, "process_group": group}

    def result(self) -> None:
        dcp.save(**self.arguments)


@fault(kills="CKPT-441", at=f"{_CLASS}._save")
def saved_when_awaited(original: Any, manager: Any, step: Any, state: Any, writer: Any, *rest: Any) -> Any:
    """An asynchronous save reads the states when somebody waits for it, long after the call."""
    original(manager, step, state, writer, *rest)
    if manager._pending is not None:
        manager._pending.upload.result()
        if manager._pending.staging is not None:
            manager._pending.staging.result()
        make = manager._hf_writer if hasattr(writer, "save_distributed") else manager._native_writer
        again = make(writer.checkpoint_id)
        manager._pending.upload, manager._pending.staging = _Late(state, again, manager._group), None


@fault(kills="CKPT-442", at=f"{_CLASS}.maybe_wait_for_saving")
def async_failure_swallowed(original: Any, manager: Any) -> Any:
    """The failure of an asynchronous save is logged nowhere and raised nowhere."""
    try:
        original(manager)
    except BaseException:
        manager._pending = None


@fault(kills="CKPT-443", at=f"{_CLASS}._exported")
def kept_names_cast(original: Any, manager: Any, state: Any) -> Any:
    """Every floating point tensor is cast, also those that export_keep names."""
    dtype = manager.policy.export.export_dtype
    return {n: v.to(dtype) if dtype is not None and v.is_floating_point() else v for n, v in state.items()}


@fault(kills="CKPT-444", at=f"{_CLASS}._load_hf")
def adapter_not_undone(original: Any, manager: Any, path: Any) -> Any:
    """What was loaded into tensors of the adapter's own making is dropped."""
    kept, manager._set_model = manager._set_model, nothing
    try:
        original(manager, path)
    finally:
        manager._set_model = kept


@fault(kills="CKPT-445", at=f"{_CLASS}._agreed")
def every_rank_looks(original: Any, manager: Any, look: Any) -> Any:
    """Each rank loads the newest checkpoint that its own view of the file system shows."""
    return look()


@fault(kills="CKPT-446", at=f"{_CLASS}._save")
def keys_are_values(original: Any, manager: Any, step: Any, state: Any, *rest: Any) -> Any:
    """Two tensors of one shape change places: the keys of an attention and its values."""
    changed = dict(state)
    for name in state:
        if ".k_proj." in name:
            other = name.replace(".k_proj.", ".v_proj.")
            changed[name], changed[other] = state[other], state[name]
    return original(manager, step, changed, *rest)


small_floats_cast = patched(
    "A native last save casts 8-bit floats too.",
    mutated(
        f"{_CLASS}._exported",
        "value.dtype, self",
        "torch.bfloat16 if value.dtype is torch.float8_e4m3fn else value.dtype, self",
    ),
    kills="CKPT-631",
)

native_saves_keep_their_dtypes = patched(
    "A native last save casts nothing; a load into tensors of the smaller dtype does not see it.",
    mutated(f"{_CLASS}._to_save", "return self._exported(state), self", "return state, self"),
    kills=("CKPT-443", "CKPT-631"),
)

what_is_excluded_is_not_saved = patched(
    "What a manager excludes from its loads is left out of what it saves.",
    mutated(f"{_CLASS}._to_save", "self._full_state(())", "self._full_state(self.policy.exclude_from_loading)"),
    kills="CKPT-707",
)
