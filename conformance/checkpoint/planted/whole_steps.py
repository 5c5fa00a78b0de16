"""Faults that ``test_whole_steps`` must notice."""

from __future__ import annotations

from contextlib import nullcontext

from conformance.harness import mutated, patched, swap

_WHOLE, _MANAGER = "twinproof.checkpoint.whole", "twinproof.checkpoint.manager"

metadata_is_a_checkpoint = patched(
    "A step that has metadata counts as complete, whatever of its files is there.",
    swap(f"{_WHOLE}:_native_ends", lambda *_: {}),
    kills="CKPT-903",
)
files_of_the_index_of_any_length = patched(
    "The files of an index count, however short they are.",
    swap(f"{_WHOLE}:_end_of_safetensors", lambda file: 0),
    kills="CKPT-903",
)
half_a_file_counts = patched(
    "A file counts that has the begin of its last chunk.",
    mutated(f"{_WHOLE}:ends_of", "info.offset + info.length", "info.offset"),
    kills="CKPT-904",
)
parts_displace_whole_steps = patched(
    "Retention counts steps that lack files, which loads pass over.",
    mutated(f"{_MANAGER}:_Cleaner._counts", "is_whole(", "True or is_whole("),
    kills="CKPT-904",
)
numbers_left_out_count = patched(
    "A folder without index counts, whatever of its numbered files is missing.",
    mutated("twinproof.checkpoint.catalog:list_files", "_check_numbering(path, names)", "pass"),
    kills="CKPT-903",
)
unnamed_metadata = patched(
    "What Python says of a pickle that was cut short is told as it is.",
    swap(f"{_WHOLE}:reading_metadata", lambda where: nullcontext()),
    swap("twinproof.checkpoint.native:reading_metadata", lambda where: nullcontext()),
    kills="CKPT-905",
)
later_versions_passed_over = patched(
    "A step of a later version of torch is passed over, and an older step is loaded.",
    mutated(f"{_WHOLE}:reading_metadata", "except (ImportError, AttributeError) as error:", "except () as error:"),
    kills="CKPT-905",
)
own_saves_read_again = patched(
    "Retention reads the metadata of what this process has just saved.",
    swap(f"{_WHOLE}:Known.remember", lambda *_: None),
    kills="CKPT-906",
)
metadata_read_after_each_save = patched(
    "Retention reads the metadata of each step after each save.",
    mutated(f"{_WHOLE}:Known.of", "found[0] == status", "found[0] is status"),
    kills="CKPT-906",
)
changed_folders_believed = patched(
    "What was whole once is whole for ever.",
    mutated(f"{_WHOLE}:Known.of", "and found[0] == status", ""),
    kills="CKPT-906",
)
missing_shards_count = patched(
    "Retention counts shards of which one is missing.",
    swap(f"{_WHOLE}:CHUNKS_LEAVE_A_GAP", ""),
    kills="CKPT-904",
)
contradictions_passed_over = patched(
    "A step whose files contradict each other is none, and an older one is loaded.",
    mutated(f"{_WHOLE}:_check_hf", "if error.message != CHUNKS_LEAVE_A_GAP:", "if False:"),
    kills="CKPT-907",
)
refusals_unnamed = patched(
    "What may not be read is a bare error of the system.",
    mutated(f"{_WHOLE}:refusals", "if error.errno in _NO_PATH:", "if True:"),
    kills="CKPT-916",
)
unreadable_step_passed_over = patched(
    "A step that may not be read is none, and an older one is loaded.",
    mutated(f"{_MANAGER}:complete_steps", "except FileNotFoundError:", "except OSError:"),
    mutated(f"{_MANAGER}:is_whole", "(CorruptionError, FileNotFoundError)", "(CorruptionError, OSError)"),
    kills="CKPT-907",
)
all_that_was_read_is_known = patched(
    "What was found out of steps is kept for ever.",
    mutated(f"{_WHOLE}:Known.keep", "while len(self._found) > _KNOWN_MAX:", "while False:"),
    kills="CKPT-950",
)
one_less_is_known = patched(
    "One step less is known than is said.",
    mutated(f"{_WHOLE}:Known.keep", "> _KNOWN_MAX:", ">= _KNOWN_MAX:"),
    kills="CKPT-950",
)
first_looks_count = patched(
    "The step that was read first is forgotten, though it was read again since.",
    mutated(f"{_WHOLE}:Known.keep", "self._found.move_to_end(os.path.abspath(folder))", "pass"),
    kills="CKPT-950",
)
all_files_are_of_the_step = patched(
    "Whatever changes in a step's folder, its headers are read again.",
    mutated(f"{_WHOLE}:_check_hf", " if _is_of_hf(name)", ""),
    kills="CKPT-951",
)
hidden_files_are_of_the_step = patched(
    "A hidden file counts as one of the step.",
    mutated(f"{_WHOLE}:_is_of_hf", 'and not name.startswith(".")', ""),
    kills="CKPT-951",
)
any_name_is_of_the_step = patched(
    "Whatever is not hidden counts as a file of the step.",
    mutated(f"{_WHOLE}:_is_of_hf", "name.endswith(SUFFIX) and ", ""),
    kills="CKPT-951",
)
metadata_names_files = patched(
    "Metadata that says nothing of files is read after each save.",
    mutated(f"{_WHOLE}:ends_of", "(metadata.storage_data or {})", "metadata.storage_data"),
    kills="CKPT-952",
)
storage_is_files = patched(
    "Metadata of storage of another kind is read after each save.",
    mutated(f"{_WHOLE}:ends_of", 'if hasattr(info, "relative_path"):', "if True:"),
    kills="CKPT-952",
)
headers_end_retention = patched(
    "A header that is malformed fails the next save.",
    mutated(f"{_WHOLE}:_check_hf", "except (FormatError, UnsupportedError):", "except ():"),
    kills="CKPT-953",
)
what_is_being_saved_is_read = patched(
    "Retention reads the metadata of a step that its save has just shown.",
    mutated(f"{_MANAGER}:_Cleaner._clean", "step != self.saving_step and ", ""),
    kills="CKPT-992",
)
