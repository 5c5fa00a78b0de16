"""Faults that ``test_training`` must notice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from conformance.harness import fault, mutated, patched, swap, wrap
from twinproof.checkpoint.native import CheckpointFormat
from twinproof.errors import DistributedError


@fault(kills="CKPT-539", at="twinproof.checkpoint.native:_training")
def step_begins_anew(original: Any, model: Any, optimizers: Any, step: int, states: Any) -> Any:
    """The step that is saved is 0."""
    return original(model, optimizers, 0 * step, states)


moments_left_out = patched(
    "The optimizer's states are saved, and not restored.",
    swap("twinproof.checkpoint.optimizer_states:OptimizerStates.load_state_dict", lambda states, state_dict: None),
    kills=("CKPT-539", "CKPT-540"),
)


@fault(kills="CKPT-541", at="twinproof.checkpoint.native:detect_format")
def every_checkpoint_is_native(original: Any, path: Any) -> Any:
    """The format of a checkpoint is not looked at."""
    return CheckpointFormat.DCP


as_many_optimizers_as_parts_refused = patched(
    "A model in parts is refused where each has an optimizer.",
    mutated("twinproof.checkpoint.optimizer_states:OptimizerStates.__init__", "len(parts) != len", "len(parts) >= len"),
    kills="CKPT-515",
)


step_0_taken_for_none = patched(
    "Step 0 is taken for no step: the newest is loaded.",
    mutated(
        "twinproof.checkpoint.manager:CheckpointManager._find",
        "max(complete, default=0) if step == -1 else step",
        "step if step > 0 else max(complete)",
    ),
    kills="CKPT-601",
)
later_states_of_step_0 = patched(
    "Everything is restored from step 0, which holds the model alone.",
    mutated("twinproof.checkpoint.manager:CheckpointManager._find", "chosen == 0", "False"),
    kills="CKPT-601",
)

native_saves_always_durable = patched(
    "A manager's native saves are synced whatever was asked for.",
    mutated(
        "twinproof.checkpoint.manager:CheckpointManager._native_writer",
        "durable=self.policy.durable, ",
        "",
    ),
    kills="CKPT-615",
)


@fault(kills="CKPT-652", at="twinproof.checkpoint.manager:together")
def nobody_says_what_was_wrong(original: Any, step: Any, group: Any) -> Any:
    """Every rank hears that one failed, and the one at fault no more than that."""
    try:
        return original(step, group)
    except Exception as error:
        raise DistributedError("a rank failed", got=None, expected=None, where=None) from error


full_in_silence = patched(
    "A state that cannot take its values is an error of its rank alone.",
    mutated(
        "twinproof.checkpoint.native:load_native",
        "together(lambda: give_back(state, loaded), group)",
        "give_back(state, loaded)",
    ),
    kills="CKPT-677",
)

extra_state_not_given_back = patched(
    "Of what is no tensor, what was loaded is dropped: modules keep the extra state that they had.",
    mutated("twinproof.checkpoint.native:load_native", "ended(first, loaded)", "ended(first, state)"),
    kills="CKPT-647",
)


def _by_path(original: Any, kept: dict[str, Any], path: Any, *arguments: Any, **options: Any) -> Any:
    found = original(*arguments, **options)
    return kept.setdefault(str(path), found)


@fault(kills="CKPT-807")
def metadata_of_the_path_kept() -> Iterator[None]:
    """A reader of torch's format goes by the metadata that another one read at its path."""
    kept: dict[str, Any] = {}

    def around(original: Any, reader: Any, *arguments: Any, **options: Any) -> Any:
        return _by_path(original, kept, reader.path, reader, *arguments, **options)

    with wrap("twinproof.checkpoint.native:NativeStorageReader.read_metadata", around):
        yield


@fault(kills="CKPT-807")
def headers_of_the_path_kept() -> Iterator[None]:
    """A reader of HF checkpoints goes by the headers that another one read at its path."""
    kept: dict[str, Any] = {}

    def around(original: Any, path: Any, *arguments: Any, **options: Any) -> Any:
        return _by_path(original, kept, path, path, *arguments, **options)

    with wrap("twinproof.checkpoint.dcp:read_catalog", around):
        yield
