"""Faults that ``test_manager_options`` must notice."""

from __future__ import annotations

import re
from typing import Any

from conformance.harness import fault, mutated, patched, swap

_HF_WRITER = "twinproof.checkpoint.manager:CheckpointManager._hf_writer"


adapters_mapping_beside_one_file = patched(
    "An adapter's mapping is handed to the writer although one file was asked for.",
    mutated(_HF_WRITER, '"max_shard_size", "single_file"}', '"max_shard_size"}'),
    kills="CKPT-621",
)

adapters_mapping_wins = patched(
    "An adapter's mapping takes the place of the one that was asked for.",
    mutated(
        _HF_WRITER,
        '{"fqn_to_index_mapping", "max_shard_size", "single_file"}',
        '{"max_shard_size", "single_file"}',
    ),
    kills="CKPT-621",
)

option_of_the_writer_dropped = patched(
    "A manager drops an option of the HF writer that only changes how its files begin.",
    mutated(
        _HF_WRITER,
        "options = dict(self._hf_options)",
        "options = {k: v for k, v in self._hf_options.items() if k != 'page_align'}",
    ),
    kills="CKPT-621",
)

any_digits_are_a_step = patched(
    "Every folder whose name ends in digits is taken for the checkpoint of that number.",
    swap("twinproof.checkpoint.manager:STEP_NAME", re.compile(r"step-(\d+)")),
    swap("twinproof.checkpoint.manager:is_whole", lambda *_: True),
    kills="CKPT-623",
)

files_are_folders = patched(
    "Whatever is named as a checkpoint is looked into.",
    mutated("twinproof.checkpoint.manager:complete_steps", " or not (folder / name).is_dir()", ""),
    kills="CKPT-634",
)

adapters_reader_not_told = patched(
    "A reader that an adapter brings compares no checksums, whatever was asked for.",
    mutated(
        "twinproof.checkpoint.manager:CheckpointManager._verifying",
        "reader.verify_checksums = True",
        "pass",
    ),
    kills="CKPT-683",
)

any_reader_verifies = patched(
    "A reader that compares nothing passes for one that does.",
    mutated(
        "twinproof.checkpoint.manager:CheckpointManager._verifying",
        "not isinstance(reader, HuggingFaceStorageReader)",
        "False",
    ),
    kills="CKPT-683",
)

loads_delete = patched(
    "What a load kept from deletion is deleted behind it, also where nothing was saved.",
    mutated("twinproof.checkpoint.manager:_Cleaner._ask_again", "self._saved_step is not None", "True"),
    kills="CKPT-721",
)

mapping_of_the_caller = patched(
    "A writer goes by the mapping of the caller, as it is when the save comes.",
    mutated("twinproof.checkpoint.plan:check_mapping", "return dict(mapping)", "return mapping"),
    kills="CKPT-722",
)

nested_options_of_the_caller = patched(
    "A manager holds its own options, but the collections in them are the caller's.",
    mutated(
        "twinproof.checkpoint.manager:CheckpointManager.__init__",
        "copy.copy(value) if isinstance(value, Collection) else value",
        "value",
    ),
    kills="CKPT-722",
)

_MANAGER = "twinproof.checkpoint.manager"

saves_though_off = patched(
    "A manager that is not enabled saves.",
    mutated(f"{_MANAGER}:CheckpointManager._saves_at", "not self.enable or ", ""),
    kills="CKPT-765",
)

loads_though_off = patched(
    "A manager that is not enabled loads.",
    mutated(f"{_MANAGER}:CheckpointManager.load", "if not self.enable:", "if False:"),
    kills="CKPT-765",
)

steps_of_any_type = patched(
    "A step that is true, or a number of another type, is saved.",
    mutated(f"{_MANAGER}:CheckpointManager.save", "type(curr_step) is not int or curr_step", "int(curr_step or 0)"),
    kills="CKPT-766",
)

states_over_parameters = patched(
    "A state takes the place of the parameter whose name it has.",
    mutated("twinproof.checkpoint.native:beside", "if taken:", "if False:"),
    kills="CKPT-766",
)

agreeing_names_refused = patched(
    "Two names of one option are refused though they agree.",
    mutated(f"{_MANAGER}:_either", " and value != older", ""),
    kills="CKPT-766",
)

every_optimizer_is_torchs = patched(
    "An optimizer that is none of torch's is treated as one.",
    mutated(f"{_MANAGER}:_named_states", "if is_list else optimizers", "if several else optimizers"),
    kills="CKPT-767",
)

all_states_cast = patched(
    "Whatever a model has is cast as a tensor.",
    mutated(f"{_MANAGER}:CheckpointManager._exported", " if is_tensor else value", ""),
    kills="CKPT-767",
)

broken_index_ends_a_load = patched(
    "A checkpoint whose index names a missing file ends every load.",
    mutated(f"{_MANAGER}:complete_steps", "except CorruptionError as error:", "except () as error:"),
    kills="CKPT-768",
)

failing_rename_ends_retention = patched(
    "A checkpoint that cannot be hidden keeps the others from deletion.",
    mutated(
        f"{_MANAGER}:_Cleaner._clean",
        "os.rename(self.folder / name, hidden)\n        except OSError as error:\n",
        "os.rename(self.folder / name, hidden)\n        except OSError as error:\n            return\n",
    ),
    kills="CKPT-768",
)

failing_look_unsaid = patched(
    "Nothing is said of a folder that retention cannot look at.",
    mutated(
        f"{_MANAGER}:_Cleaner._run", 'logger.warning("old checkpoints in %s could not', 'logger.debug("%s could not'
    ),
    kills="CKPT-768",
)

hf_options_beside_the_newer_name_alone = patched(
    "Options of the HF writer are refused where the older name asks for it.",
    mutated(
        f"{_MANAGER}:CheckpointManager.__init__",
        "self._hf_options and not in_hf",
        "self._hf_options and not last_save_in_hf",
    ),
    kills="CKPT-801",
)

older_name_of_hf_ignored = patched(
    "The older name of last_save_in_hf has no effect.",
    mutated(f"{_MANAGER}:CheckpointManager.__init__", "last_save_in_hf=in_hf", "last_save_in_hf=last_save_in_hf"),
    kills="CKPT-801",
)

older_name_of_model_only_ignored = patched(
    "The older name of last_save_model_only has no effect.",
    mutated(
        f"{_MANAGER}:CheckpointManager.__init__",
        "last_save_model_only=model_only",
        "last_save_model_only=last_save_model_only",
    ),
    kills="CKPT-801",
)

letters_are_names = patched(
    "Text stands for the states that its letters name, and empty text for none.",
    mutated(f"{_MANAGER}:_names", "isinstance(given, str | bytes) or not isinstance(given, Collection)", "False"),
    kills="CKPT-811",
)

anything_is_a_part = patched(
    "Whatever is given as a part of the model passes for one until it is saved.",
    mutated(f"{_MANAGER}:_modules", "isinstance(part, torch.nn.Module) for part in parts", "parts"),
    kills="CKPT-811",
)

schedulers_always_there = patched(
    "An optimizer is left alone with its scheduler alone, though there may be none.",
    mutated(
        f"{_MANAGER}:CheckpointManager.__init__",
        "_SCHEDULER in self._states.keys() - set(excluded)",
        "_SCHEDULER not in excluded",
    ),
    kills="CKPT-837",
)

anything_is_a_step = patched(
    "What is no step is looked for among the checkpoints.",
    mutated(f"{_MANAGER}:CheckpointManager.load", "if type(step) is not int:", "if False:"),
    kills="CKPT-838",
)

classes_are_adapters = patched(
    "A class passes for an adapter until the last save calls it.",
    mutated(f"{_MANAGER}:_adapter", "isinstance(given, type) or", "False or"),
    kills="CKPT-864",
)

adapters_asked_at_the_end = patched(
    "Whatever is given as an adapter is taken, and asked for names at the last save.",
    mutated(f"{_MANAGER}:_adapter", "if given is not None and (", "if False and ("),
    kills="CKPT-864",
)

names_not_given_back = patched(
    "Names that an adapter does not give back are found missing by whoever looks them up.",
    mutated(f"{_MANAGER}:CheckpointManager._from_hf", "if missing:", "if False:"),
    kills="CKPT-864",
)


@fault(kills="CKPT-987", at="twinproof.checkpoint.manager:CheckpointManager._exported")
def one_tensor_for_an_address(original: Any, manager: Any, state: Any) -> Any:
    """What begins at one address is exported once, as if it were tied; so is all that has no elements."""
    made: dict[int, Any] = {}
    return {name: made.setdefault(value.data_ptr(), value) for name, value in original(manager, state).items()}


step_that_is_not_whole_named = patched(
    "The step that is named where the newest holds the model alone may lack files.",
    mutated(f"{_MANAGER}:CheckpointManager._find", " if self._is_whole(n, complete[n])), None)", "), None)"),
    kills="CKPT-988",
)
